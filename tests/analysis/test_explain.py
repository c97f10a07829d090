"""`dapo explain`: its numbers are those that the run stored, and those of the paper's equations,
written naively.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyarrow import Table
from pyarrow.parquet import read_table, write_table

from conformance import naive
from dapo.analysis.explain import explain_group
from dapo.cli.explain import _most_telling, _print_group
from dapo.core.errors import CheckpointError, DataError
from dapo.runs.console import SafeConsole
from dapo.training.train import train
from helpers.commands import run as command
from helpers.run_files import edit_options
from helpers.tiny_runs import new_run, tiny

STEPS = 3
OPTIONS = (
    "data.eval=null",
    "rollout.prompts_per_step=3",
    "train.minibatch_groups=1",
    "train.save_every=0",
)
RUNS = {
    "dapo": ("overlong.penalty=0.7", "overlong.buffer_tokens=5", "optim.lr=0.01"),
    "grpo": ("preset=grpo", "log.rollouts=no-logprobs", "optim.lr=0.01"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of three steps of three updates for each of RUNS."""
    folder = tmp_path_factory.mktemp("runs")
    for name, options in RUNS.items():
        config = tiny(*OPTIONS, f"train.num_steps={STEPS}", *options)
        with new_run(config, folder / name) as run:
            train(run)
    return {name: folder / name for name in RUNS}


def rows_of(run: Path, step: int) -> list[dict[str, Any]]:
    """The stored responses of a step, read without the package."""
    rows: list[dict[str, Any]] = read_table(run / f"rollouts/step_{step:06d}.parquet").to_pylist()
    return rows


def rewrite(run: Path, step: int, **columns: Any) -> None:
    """Give all responses of a step these values."""
    rows = read_table(run / f"rollouts/step_{step:06d}.parquet").to_pylist()
    store(run, step, [row | columns for row in rows])


def store(run: Path, step: int, rows: Sequence[dict[str, Any]]) -> None:
    """Store other responses of a step."""
    path = run / f"rollouts/step_{step:06d}.parquet"
    schema = read_table(path).schema
    write_table(Table.from_pylist(list(rows), schema=schema), path)


def penalty(name: str, length: int) -> float:
    """Eq. 13 of the run `dapo`, at L_max = 8 and L_cache = 5, times 0.7; GRPO has none."""
    return naive.overlong_penalty(length, 8, 5, 0.7) if name == "dapo" else 0.0


@pytest.mark.parametrize("name", RUNS)
def test_every_number_is_stored_and_that_of_the_equations_written_naively(
    runs: dict[str, Path], name: str
) -> None:
    num_trained = 0
    for step in range(1, STEPS + 1):
        rows = rows_of(runs[name], step)
        for group in {row["group_id"] for row in rows if row["outcome"] == "trained"}:
            members = [row for row in rows if row["group_id"] == group]
            found = explain_group(runs[name], step, group)
            rewards = [
                (1.0 if row["correct"] else -1.0) + penalty(name, row["response_tokens"])
                for row in members
            ]
            advantages = naive.group_advantages(rewards, "std")
            assert found["eq9"]["mean"] == pytest.approx(naive.mean(rewards), abs=1e-9)
            assert found["eq9"]["std"] == pytest.approx(naive.sample_std(rewards), abs=1e-9)
            assert (found["reward_mean"], found["reward_std"]) == (
                found["eq9"]["mean"],
                found["eq9"]["std"],
            )
            for i, (response, row) in enumerate(zip(found["responses"], members, strict=True)):
                assert response["penalty"] == pytest.approx(
                    penalty(name, row["response_tokens"]), abs=1e-9
                )
                assert response["reward"] == pytest.approx(rewards[i], abs=1e-9)
                assert response["advantage"] == pytest.approx(advantages[i], abs=1e-6)
                assert response["response"] == row["response"]
                assert response["response_ids"] == row["response_ids"]
                assert response["engine_logprobs"] == row["engine_logprobs"]
                assert (response["engine_logprobs"] is None) == (name == "grpo")
            num_trained += 1
    assert num_trained > 3


def test_the_default_is_the_trained_group_with_the_largest_spread_then_the_shortest(
    runs: dict[str, Path],
) -> None:
    rows = rows_of(runs["dapo"], STEPS)
    spreads = {}
    for group in {row["group_id"] for row in rows if row["outcome"] == "trained"}:
        members = [row for row in rows if row["group_id"] == group]
        tokens = sum(row["response_tokens"] for row in members)
        spreads[group] = (
            round(naive.sample_std([row["reward"] for row in members]), 9),
            -tokens,
            -group,
        )
    found = explain_group(runs["dapo"], STEPS)
    assert found["group_id"] == max(spreads, key=lambda group: spreads[group])
    assert "spread" in found["chosen_because"]
    assert explain_group(runs["dapo"], STEPS, found["group_id"])["chosen_because"] is None


def test_a_group_of_half_the_spread_is_not_the_default(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["dapo"], run)
    first = explain_group(run, STEPS)["group_id"]
    rows = rows_of(run, STEPS)
    trained = {row["group_id"] for row in rows if row["outcome"] == "trained"}
    assert len(trained) > 1
    halves = [row | {"reward": row["reward"] / 2} for row in rows if row["group_id"] == first]
    store(run, STEPS, [row for row in rows if row["group_id"] != first] + halves)
    assert explain_group(run, STEPS)["group_id"] in trained - {first}


def test_where_none_trains_the_first_group_is_explained(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["dapo"], run)
    rewrite(run, 2, outcome="excess", advantage=None)
    found = explain_group(run, 2)
    assert found["group_id"] == rows_of(run, 2)[0]["group_id"]
    assert "no group of the step trained" in found["chosen_because"]
    assert "batch was full" in found["eq11"]["why"]


def test_what_is_gone_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["dapo"], run)
    (run / "rollouts/step_000001.parquet").unlink()
    assert explain_group(run, 3)["eq9"] is not None
    with pytest.raises(DataError, match="no judged responses of step 1; stored: steps 2 to 3"):
        explain_group(run, 1)
    with pytest.raises(DataError, match="has no group 999; its groups: "):
        explain_group(run, 3, 999)
    with pytest.raises(CheckpointError, match="no run directory"):
        explain_group(tmp_path / "nothing", 1)


def test_each_outcome_has_its_reason(runs: dict[str, Path]) -> None:
    reasons = {
        "all_correct": "no response is better",
        "all_wrong": "no response is better",
        "excess": "batch was full",
    }
    reasons["trained"] = "so the group carries a signal"
    seen = set()
    for step in range(1, STEPS + 1):
        for group, outcome in {
            row["group_id"]: row["outcome"] for row in rows_of(runs["dapo"], step)
        }.items():
            found = explain_group(runs["dapo"], step, group)
            assert found["outcome"] == outcome
            assert reasons[outcome] in found["eq11"]["why"]
            assert (found["eq9"] is None) == (outcome != "trained")
            seen.add(outcome)
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"outcome": "zero_variance", "correct": None, "score": 0.5}, "all 4 scores are 0.5"),
        (
            {"outcome": "filtered", "correct": True},
            "4 of its 4 responses are right, and dynamic_sampling.filter",
        ),
        (
            {"outcome": "invalid", "error": "no", "score": None, "reward": None},
            "0 of its 4 responses have a verdict",
        ),
        ({"outcome": "trained", "correct": None}, "they differ, so the group carries a signal"),
    ],
)
def test_outcomes_that_the_run_did_not_meet_have_their_reasons(
    runs: dict[str, Path], tmp_path: Path, columns: dict[str, Any], why: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["dapo"], run)
    rewrite(run, 1, **columns)
    assert why in explain_group(run, 1, rows_of(run, 1)[0]["group_id"])["eq11"]["why"]


def test_a_filtered_overlong_response_does_not_train_and_options_of_the_step_count(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["grpo"], run)
    edit_options(run, "mode: 'off'", "mode: filter")
    (run / "configs").mkdir()
    shutil.copy(runs["grpo"] / "config.yaml", run / "configs" / "step_000001.yaml")
    for step, mode in ((1, "off"), (2, "filter")):
        rewrite(run, step, finish="length")
        found = explain_group(run, step)
        assert found["eq13"]["mode"] == mode
        assert {response["trains"] for response in found["responses"]} == {mode == "off"}


def test_the_command_prints_for_a_person_and_as_one_json_object(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = str(runs["dapo"])
    code, out, _ = command(capsys, "explain", path, "--step", "3", "--json")
    assert (code, len(out.splitlines())) == (0, 1)
    found = json.loads(out)
    assert found == json.loads(json.dumps(explain_group(path, 3)))
    code, out, _ = command(capsys, "explain", path, "--equations")
    assert code == 0
    assert f"step 3, group {found['group_id']}" in out
    for response in found["responses"]:
        assert f"{response['advantage']:+.6g}" in out
        assert f"{response['penalty']:+.6g}" in out or response["penalty"] == 0


def nine_responses() -> list[dict[str, Any]]:
    """Responses of a group with rewards 6 to 14, of which the fifth has an advantage of 0."""
    texts = {"response": "a long answer " * 9, "finish": "stop", "calls": None}
    verdict = {"correct": None, "error": None, "response_tokens": 4}
    return [
        {"sample": i, "advantage": i / 4 - 1, "reward": i + 6, "score": i + 6, **verdict, **texts}
        for i in range(9)
    ]


def test_the_most_telling_of_many_responses_have_the_extreme_advantages() -> None:
    shown = _most_telling(nine_responses())
    assert [response["sample"] for response in shown] == [0, 1, 2, 6, 7, 8]


@pytest.mark.parametrize("width", [60, 55, 50, 40])
def test_a_response_is_short_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], width: int
) -> None:
    facts = {"question": "How many?", "prompt": "", "answer": "12", "responses": nine_responses()}
    _print_group(SafeConsole(width=width), facts)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) <= width


def test_a_run_is_explained_without_torch_and_without_modules_of_the_run(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["dapo"], run)
    edit_options(run, "verifier: ", "verifier: nobody_has_this_module:f  # ")
    script = (
        "import sys; from dapo.cli.main import main\ntry: main()\nfinally: print('torch' in"
        " sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "explain", str(run), "--equations", "--tokens"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Eq. 11" in done.stdout
    assert done.stdout.endswith("False\n")
