"""`dapo doctor` on whole runs: what is printed, which problems are named, and what the rules cost a
run that trains.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from dapo.analysis.doctor import diagnose
from dapo.cli.main import main
from dapo.cli.train import resume_run, start_run
from dapo.config import dump_config
from dapo.runs.directory import RunDirectory
from dapo.runs.evaluations import write_evaluation
from dapo.runs.rollout_table import OPTIONAL_COLUMNS, ROLLOUT_SCHEMA, write_rollouts
from dapo.training.rules.all_rules import LiveRules
from helpers.ablations import evaluation
from helpers.run_files import log_metrics
from helpers.tiny_runs import tiny

STEP: dict[str, Any] = {
    "rollout/groups_generated": 4,
    "rollout/groups_trained": 3,
    "rollout/groups_all_correct": 1,
    "rollout/keep_rate": 0.75,
    "rollout/all_correct_fraction": 0.25,
    "rollout/all_wrong_fraction": 0.0,
    "rollout/truncated_fraction": 0.05,
    "rollout/response_tokens_mean": 5.0,
    "rollout/verifier_errors": 0,
    "reward/accuracy": 0.5,
    "loss/entropy": 0.5,
    "loss/approx_kl": 1e-4,
    "loss/ratio_mean": 1.0,
    "optim/grad_norm": 0.3,
    "optim/skipped": 0,
    "time/judge_wait_s": 0.0,
    "time/step_s": 1.0,
}


def row(step: int, sample: int, **changed: Any) -> dict[str, Any]:
    """A row of the table of responses."""
    plain = {
        "step": step,
        "group_id": 0,
        "problem_id": "easy",
        "source": "s",
        "sample": sample,
        "prompt": "?",
    }
    plain |= {
        "response": f"text {sample}",
        "answer": "1",
        "fields": None,
        "correct": True,
        "score": 1.0,
    }
    plain |= {
        "components": None,
        "error": None,
        "reward": 1.0,
        "advantage": 0.5,
        "prompt_tokens": 1,
    }
    plain |= {"response_tokens": 2, "finish": "stop", "outcome": "trained", "response_ids": [1, 2]}
    return plain | {"engine_logprobs": [0.0, 0.0], "version": 0} | changed


def a_run(
    path: Path, steps: list[dict[str, Any]], tables: dict[int, list[dict[str, Any]]] | None = None
) -> Path:
    """A run directory with these metrics and tables of responses."""
    run = RunDirectory.create(path, dump_config(tiny()), {})
    log_metrics(
        run.metrics, [{"step": number, **metrics} for number, metrics in enumerate(steps, start=1)]
    )
    (path / "rollouts").mkdir()
    for step, rows in (tables or {}).items():
        write_rollouts(run.rollouts(step), rows)
    return path


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int | str | None, str]:
    with pytest.raises(SystemExit) as end:
        main(["doctor", *arguments])
    return end.value.code, capsys.readouterr().out


def test_a_healthy_run_is_told_so_first_and_what_was_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = a_run(tmp_path / "run", [STEP] * 6, {1: [row(1, 0)]})
    code, printed = doctor(capsys, str(path), "--strict")
    assert code == 0
    verdict, *looked_at = printed.splitlines()
    assert verdict == "healthy: 36 rules looked, nothing wrong"
    assert " ".join(looked_at) == f"{path}: 6 steps, 0 evaluations, 1 table of responses"


ERRORS = STEP | {"rollout/verifier_errors": 4}


def test_a_finding_names_numbers_problems_the_error_and_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    failed = {
        "correct": None,
        "score": None,
        "error": "timed out after 10 s",
        "reward": None,
        "advantage": None,
    }
    rows = [
        row(6, 0, problem_id="hard", **failed),
        row(6, 1, problem_id="hard", **failed),
        row(6, 2),
    ]
    path = a_run(tmp_path / "run", [STEP] * 2 + [ERRORS] * 4, {6: rows})
    code, printed = doctor(capsys, str(path))
    assert code == 0
    assert printed.startswith("1 error: verifier_errors\n")
    assert "error: verifier_errors, since step 3" in printed
    printed = " ".join(printed.split())
    assert "20% of the responses have no verdict" in printed
    assert "rollout/verifier_errors 3.2 (steps 2 to 6)" in printed
    assert "hard (2); 2 responses of these steps show it" in printed
    assert "timed out after 10 s" in printed
    assert "reward.timeout_s=20" in printed
    assert doctor(capsys, str(path), "--strict")[0] == 1


def test_responses_are_counted_as_far_as_they_were_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    failed = {"correct": None, "score": None, "reward": None, "advantage": None}
    tables = {
        step: [row(step, sample, error="timed out", **failed) for sample in range(16)]
        for step in range(2, 7)
    }
    path = a_run(tmp_path / "run", [ERRORS] * 6, tables)
    assert "; 80 responses of these steps show it" in " ".join(doctor(capsys, str(path))[1].split())
    # at the paper's size a step alone has 8,192 responses
    monkeypatch.setattr("dapo.analysis.doctor.MAX_ROWS", 20)
    printed = " ".join(doctor(capsys, str(path))[1].split())
    assert "; at least 32 responses of these steps show it" in printed


def test_a_table_that_a_live_run_removes_meanwhile_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    path = a_run(tmp_path / "run", [STEP] * 2 + [ERRORS] * 4)
    monkeypatch.setattr(RunDirectory, "rollout_tables", lambda self: {6: self.rollouts(6)})
    code, printed = doctor(capsys, str(path))
    assert (code, printed.startswith("1 error: verifier_errors\n")) == (0, True)


def test_json_holds_the_same_and_nothing_else_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = a_run(tmp_path / "run", [STEP] * 2 + [ERRORS] * 4)
    _, printed = doctor(capsys, str(path), "--json")
    found = json.loads(printed)
    assert (found["run"], found["steps"], len(found["rules"])) == (str(path), 6, 36)
    (finding,) = found["findings"]
    assert (finding["name"], finding["severity"], finding["since"], finding["holds"]) == (
        "verifier_errors",
        "error",
        3,
        True,
    )
    assert finding["evidence"] == {"rollout/verifier_errors": 3.2}
    assert finding["change"] == ["reward.timeout_s=20"]


def test_what_is_over_comes_last_and_is_no_reason_for_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = a_run(tmp_path / "run", [ERRORS] * 4 + [STEP] * 8)
    code, printed = doctor(capsys, str(path), "--strict")
    assert code == 0
    verdict = "healthy: 36 rules looked, nothing wrong at the end; over: verifier_errors\n"
    assert printed.startswith(verdict)
    assert "verifier_errors, from step 3 to 7, no longer" in printed


def test_a_finding_that_came_back_holds_since_then(tmp_path: Path):
    path = a_run(tmp_path / "run", [ERRORS] * 6 + [STEP] * 20 + [ERRORS] * 6)
    (case,) = diagnose(path).issues
    # the window of 5 steps has more than 5 % of errors from its second step with errors on
    assert (case.finding.name, case.span) == ("verifier_errors", "since step 28")


def evaluated(name: str, accuracy: float) -> dict[str, Any]:
    ends = {"accuracy": accuracy, "low": accuracy - 0.05, "high": accuracy + 0.05}
    return {f"eval/{name}/{key}": value for key, value in ends.items()}


def test_accuracies_on_other_data_are_neither_overfitting_nor_a_change(tmp_path: Path):
    """A fork with another data.eval has the metrics and the evaluations of its parent."""
    before = STEP | {"reward/accuracy": 0.3}
    after = STEP | {"reward/accuracy": 0.6}
    for last_name in ("easy", "hard"):
        steps = [before | evaluated("easy", 0.8), *[before] * 4, *[after] * 6]
        path = a_run(tmp_path / last_name, [*steps, after | evaluated(last_name, 0.3)])
        run = RunDirectory.open(path)
        for step, name, accuracy in ((1, "easy", 0.8), (12, last_name, 0.3)):
            summary, table = evaluation([accuracy] * 6)
            rows = [row | {"id": name + row["id"]} for row in table]
            write_evaluation(run, step, summary | {"name": name}, rows)
        verdict = diagnose(path).verdict
        if last_name == "easy":
            assert verdict == "1 error: overfit; accuracy 80.0 -> 30.0 %"
        else:
            assert verdict == "healthy: 36 rules looked, nothing wrong"


def test_each_step_is_judged_by_the_options_that_held_in_it(tmp_path: Path):
    """One error in 16 responses is more than 5 %, and one in 32 is not."""
    path = a_run(tmp_path / "run", [STEP | {"rollout/verifier_errors": 1}] * 12)
    larger_groups = dump_config(tiny("rollout.group_size=8"))
    RunDirectory.open(path).replace_config(larger_groups, after=6)
    (case,) = diagnose(path).issues
    assert (case.finding.name, case.since, case.holds) == ("verifier_errors", 3, False)
    assert case.finding.steps == (2, 6)


def test_a_step_that_ended_without_a_batch_is_read_from_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Nothing of it is in the metrics, and yet it is what ended the run."""
    wrong = {"correct": False, "score": -1.0, "outcome": "all_wrong", "advantage": None}
    path = a_run(
        tmp_path / "run",
        [],
        {1: [row(1, i, group_id=i // 2, problem_id=f"p{i // 2}", **wrong) for i in range(6)]},
    )
    _, printed = doctor(capsys, str(path))
    printed = " ".join(printed.split())
    assert "error: too_hard, since step 1" in printed
    assert "every response to 3 prompts is wrong, so nothing is learned" in printed
    assert "data.train={mix: {easy: SOURCE, hard: SOURCE}}" in printed
    assert "p0 (2), p1 (2), p2 (2)" in printed


def test_tables_of_runs_before_the_audit_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    import pyarrow as pa
    import pyarrow.parquet as pq

    audited = STEP | {
        "audit/mean": 0.0,
        "audit/responses": 64,
        "audit/problems": 64,
        "audit/gap_low": 0.4,
    }
    path = a_run(
        tmp_path / "run",
        [audited | {"audit/gap": 0.5 + i / 100, "audit/gap_high": 0.6 + i / 50} for i in range(6)],
    )
    old = pa.schema([field for field in ROLLOUT_SCHEMA if field.name not in OPTIONAL_COLUMNS])
    pq.write_table(
        pa.Table.from_pylist([row(6, 0)], schema=old), path / "rollouts" / "step_000006.parquet"
    )
    _, printed = doctor(capsys, str(path))
    assert "error: audit_gap, since step 1" in printed


def test_what_is_no_run_is_refused_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as end:
        main(["doctor", str(tmp_path)])
    assert end.value.code == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_a_run_warns_once_with_the_step_and_a_resumed_one_does_not_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    start_run(
        tiny("train.num_steps=2", "train.save_every=0"), run_dir=tmp_path / "run", config_name="t"
    )
    warned = "of the responses of the first evaluation end at the limit of 8 tokens"
    printed = capsys.readouterr().out
    assert printed.count(warned) == printed.count("; try rollout.max_response_tokens=16") == 1
    resume_run(tmp_path / "run", ["train.num_steps=4"])
    assert "; try rollout.max_response_tokens=16" not in capsys.readouterr().out
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["time/warnings"] for line in lines if "time/warnings" in line][-1] >= 1


def test_a_run_of_scores_says_at_its_first_step_alone_what_would_make_an_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    graded = (
        "reward.verifier=helpers.reward_functions:length",
        "train.num_steps=2",
        "reward.workers=1",
    )
    advice = "reward.threshold=1 would count scores of at least 1 as correct"
    start_run(tiny(*graded), run_dir=tmp_path / "run", config_name="t")
    assert capsys.readouterr().out.count(advice) == 1
    start_run(tiny(*graded, "reward.threshold=1"), run_dir=tmp_path / "other", config_name="t")
    assert advice not in capsys.readouterr().out


def test_the_rules_of_a_step_are_a_bounded_number_of_calls_however_long_the_run_is():
    """A bound instead of a clock: 2,000 calls of Python and C functions are under a millisecond."""

    def calls(steps: int) -> int:
        watch = LiveRules(tiny(), [{"step": number, **STEP} for number in range(1, steps)])
        count: Counter[str] = Counter()

        def hook(frame: FrameType, event: str, argument: object) -> None:
            count[event] += event in ("call", "c_call")

        sys.setprofile(hook)
        try:
            watch.add({"step": steps, **STEP})
        finally:
            sys.setprofile(None)
        return count.total()

    assert 100 < calls(100) < 2_000
    assert calls(300) == calls(100)
