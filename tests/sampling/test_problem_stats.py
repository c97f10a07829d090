"""What a run keeps of each problem."""

import json
from pathlib import Path

import pytest
from pyarrow.parquet import read_table

from dapo.cli.main import main
from dapo.core.errors import DataError
from dapo.sampling.problem_stats import ProblemStats, read_problem_stats, write_problem_stats
from dapo.types import Group, Problem, Verdict
from helpers import paths

TINY = str(paths.TINY)
RIGHT = Verdict(True, 1.0)
WRONG = Verdict(False, -1.0)
FAILED = Verdict(None, 0.0, "late")
GRADED = Verdict(None, 0.25)


def group(problem: str, *verdicts: Verdict) -> Group:
    return Group(Problem(problem, "?", "!"), (1,), (), verdicts)


def test_visits_responses_and_the_last_step_are_counted_by_problem(tmp_path: Path):
    problem_stats = ProblemStats()
    problem_stats.record(
        [group("a", RIGHT, WRONG, WRONG, FAILED), group("b", FAILED, FAILED)], step=1
    )
    problem_stats.record([group("a", RIGHT, RIGHT), group("c", GRADED, GRADED)], step=7)
    assert problem_stats.by_problem() == {
        "a": {
            "visits": 2,
            "responses": 5,
            "decided": 5,
            "correct": 3,
            "score_sum": 1.0,
            "last_step": 7,
        },
        "b": {
            "visits": 1,
            "responses": 0,
            "decided": 0,
            "correct": 0,
            "score_sum": 0.0,
            "last_step": 1,
        },
        "c": {
            "visits": 1,
            "responses": 2,
            "decided": 0,
            "correct": 0,
            "score_sum": 0.5,
            "last_step": 7,
        },
    }
    write_problem_stats(tmp_path / "stats", problem_stats.table())
    copy = read_problem_stats(tmp_path / "stats")
    problem_stats.record([group("c", RIGHT)], step=8)
    copy.record([group("c", RIGHT)], step=8)
    assert copy.by_problem() == problem_stats.by_problem()
    assert copy.table() == problem_stats.table()


def test_a_response_without_a_verdict_or_with_a_score_alone_is_no_wrong_one_to_predictions():
    problem_stats = ProblemStats()
    problem_stats.record(
        [group("a", RIGHT, FAILED, FAILED, WRONG), group("b", FAILED, GRADED)], step=1
    )
    problem_stats.record([group("a", FAILED, RIGHT)], step=1)
    history = problem_stats.history()
    assert (history.correct.tolist(), history.wrong.tolist()) == ([2.0, 0.0], [1.0, 0.0])


def test_any_id_and_any_score_is_kept_to_the_bit_and_the_copy_does_not_change(tmp_path: Path):
    problem_stats = ProblemStats()
    problem_stats.record(
        [group("b\x00", Verdict(None, 0.1), Verdict(None, 0.2)), group("\ud83d ü", RIGHT)], step=3
    )
    copy = problem_stats.table()
    problem_stats.record([group("b\x00", RIGHT), group("new", RIGHT)], step=4)
    write_problem_stats(tmp_path / "stats", copy)
    found = read_problem_stats(tmp_path / "stats").by_problem()
    assert list(found) == ["b\x00", "\ud83d ü"]
    assert found["b\x00"]["score_sum"] == 0.1 + 0.2
    assert read_problem_stats(tmp_path / "stats").table() == copy
    for content in (b"", b'{"a": 1}', b"PAR1"):
        (tmp_path / "stats").write_bytes(content)
        with pytest.raises(DataError, match="is damaged"):
            read_problem_stats(tmp_path / "stats")


def train(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0


def train_two_steps(run: Path) -> None:
    small = ("train.num_steps=2", "train.threads=1", "data.eval=null")
    train("train", TINY, *small, "--run-dir", str(run))


def test_problem_stats_agree_with_the_rollouts_also_after_a_resume(tmp_path: Path):
    run = tmp_path / "run"
    train_two_steps(run)
    train("resume", str(run), "train.num_steps=4")
    found = read_problem_stats(run / "problems.parquet").by_problem()
    assert (
        found
        == read_problem_stats(run / "checkpoints" / "step_000004" / "problems.parquet").by_problem()
    )
    rows = [
        row
        for path in sorted((run / "rollouts").glob("*.parquet"))
        for row in read_table(path).to_pylist()
    ]
    decided = [row for row in rows if row["outcome"] != "excess"]
    assert sum(entry["responses"] for entry in found.values()) == len(decided)
    assert sum(entry["correct"] for entry in found.values()) == sum(
        row["correct"] for row in decided
    )
    assert max(entry["last_step"] for entry in found.values()) == 4


def test_data_stats_of_a_run_shows_its_problem_stats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    out = tmp_path / "stats.json"
    train_two_steps(run)
    problem_stats = read_problem_stats(run / "problems.parquet").by_problem()
    capsys.readouterr()
    train("data", "stats", str(run), "--output", str(out))
    output = capsys.readouterr().out
    # a long path is broken over several lines of the table
    assert f"passratesin{run}" in "".join(output.replace("│", "").split())
    assert "most visited" in output
    rows = {row["id"]: row["run"] for row in json.loads(out.read_text())["table"] if row["run"]}
    assert rows.keys() == {problem for problem, entry in problem_stats.items() if entry["decided"]}
    for problem, row in rows.items():
        entry = problem_stats[problem]
        assert (row["visits"], row["responses"], row["correct"]) == (
            entry["visits"],
            entry["decided"],
            entry["correct"],
        )
        assert row["last_seen"] == entry["last_step"]
