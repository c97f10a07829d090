"""The first line of an inspecting command is its verdict, and its lines fit the terminal.

One table over runs and configurations, healthy and not.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from helpers.commands import run
from helpers.paths import TINY
from helpers.tables import for_each_row

WIDTH = 80
EXPLAINED_LINES = 15
ROWS = [
    # command, its first words
    ("explain RUN", r"trained: \d of 4 responses are right "),
    ("explain RUN --step 1 --group DROPPED", r"not trained \(\w+\): all \d responses are \w+:"),
    ("explain RUN --equations --tokens", r"trained: "),
    ("doctor RUN", r"(healthy: (accuracy .* -> .* %, )?36 rules looked|\d (error|warning)s?: )"),
    ("doctor EMPTY", r"nothing to diagnose: no step has been logged yet "),
    ("compare RUN RUN", r"equal in all 4 common steps "),
    ("compare RUN OTHER", r"(a is better|b is better|no significant difference|undecided): "),
    ("compare RUN OTHER EMPTY", r"(no run is significantly better than|undecided:|\S+ is best:)"),
    ("eval --compare EVALUATION OTHER_EVALUATION", r"(no difference|no sig.*e): step \d - step"),
    ("status RUN", r"finished, step 4/4, accuracy \d"),
    ("status EMPTY", r"stopped, step 0/4"),
    ("status RUN OTHER EMPTY", r"3 runs: 2 finished, 1 stopped "),
    ("check CONFIG", r"ok: [\d.]+ of [\d.]+ GiB, \d+ kB of disk; --probe measures the time "),
    ("check CONFIG --verbose", r"ok: "),
    (
        "check CONFIG train.device=cpu model.name=Qwen/Qwen2.5-32B",
        r"does not fit: needs [\d,.]+ of ",
    ),
    ("test math --verbose", r"nothing suspicious in 44 responses"),
    ("test exact LAST", r"4 of 44 responses are judged right though they are wrong "),
    ("test helpers.faulty_rewards:fragile", r"the reward fails on \d+ of 44 responses: "),
    ("test calculator", r"nothing suspicious in 10 episodes of nonsense, played twice; "),
    ("test helpers.environments:Forgetful --verbose", r"9 of 10 episodes differ when "),
    ("test helpers.environments:Broken --verbose", r"\d+ of 10 episodes failed: "),
]


@pytest.fixture(scope="module")
def words(
    sync_run: Path, lora_run: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The arguments that the words of the table stand for."""
    from dapo.runs.rollout_table import read_rollouts

    empty = tmp_path_factory.mktemp("runs") / "empty"
    shutil.copytree(sync_run, empty)
    for name in ("metrics.jsonl", "summary.json"):
        (empty / name).unlink()
    for folder in ("rollouts", "eval", "checkpoints"):
        shutil.rmtree(empty / folder)
    rows = read_rollouts(sorted((sync_run / "rollouts").iterdir())[:1]).to_pylist()
    dropped = next(row["group_id"] for row in rows if row["outcome"].startswith("all_"))
    evaluations = sorted((sync_run / "eval").glob("*.json"))
    return {
        "EVALUATION": str(evaluations[0]),
        "OTHER_EVALUATION": str(evaluations[-1]),
        "RUN": str(sync_run),
        "OTHER": str(lora_run),
        "EMPTY": str(empty),
        "DROPPED": str(dropped),
        "CONFIG": str(TINY),
        "LAST": "reward.options.extract=last_number",
    }


@for_each_row(("command", "verdict"), ROWS)
def test_the_first_line_is_the_verdict_and_no_line_or_cell_is_cut(
    words: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    command: str,
    verdict: str,
):
    arguments = [words.get(word, word) for word in command.split()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", f"{WIDTH}")
        _, out, err = run(capsys, *arguments)
    lines = out.splitlines()
    assert lines, err
    assert re.match(verdict, " ".join(out.split())), out
    # a path or a command that is longer than a line is not broken
    too_long = [line for line in lines if len(line) > WIDTH and not _is_one_word(line)]
    assert too_long == []
    assert re.search(r"[…\x1b]", out) is None  # a cell that is cut, a colour


def _is_one_word(line: str) -> bool:
    """Whether a line holds, behind its label, a word that alone is too long."""
    return max(map(len, line.split())) > WIDTH - 20


@for_each_row("step", range(1, 5))
def test_a_group_is_explained_in_15_lines(
    sync_run: Path, capsys: pytest.CaptureFixture[str], step: int
):
    from dapo.runs.rollout_table import read_rollouts

    table = read_rollouts([sync_run / "rollouts" / f"step_{step:06}.parquet"], ["group_id"])
    for group in sorted(set(table["group_id"].to_pylist())):
        arguments = ("--step", f"{step}", "--group", f"{group}")
        code, out, _ = run(capsys, "explain", str(sync_run), *arguments)
        assert code == 0
        assert len(out.splitlines()) <= EXPLAINED_LINES, out


def test_verdicts_of_a_check_are_in_its_json(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "check", str(TINY), "--json")
    assert (code, json.loads(out)["verdict"].startswith("ok: ")) == (0, True)
