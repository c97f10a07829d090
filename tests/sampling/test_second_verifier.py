"""A second verifier on a keyed share of the trained responses: which, what is counted, and that it
never trains.
"""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow.parquet import read_table

from dapo.analysis.check.summary import explain
from dapo.cli.train import resume_run, start_run
from dapo.config import build_config
from dapo.core.errors import ConfigError, RewardError
from dapo.processes.output import WorkerOutput
from dapo.rewards.combine import InlineJudge
from dapo.runs.directory import RunDirectory
from dapo.sampling.second_verifier import Audit, AuditedStep
from dapo.training.state import Run
from dapo.types import Generation, Group, Problem, Verdict
from helpers.async_runs import async_config, resumed_from, run_or_resume
from helpers.tiny_runs import contents, metrics, tiny

AUDIT = ("audit.verifier=helpers.reward_functions:yes_or_no", "audit.share=0.5")


def group(position: int, *verdicts: Verdict, problem: str = "") -> Group:
    generations = tuple(
        Generation(str(i), (5, 9), (-1.0, -1.0), "stop", 0) for i, _ in enumerate(verdicts)
    )
    texts = tuple(f"text {i}" for i, _ in enumerate(verdicts))
    return Group(
        Problem(problem or str(position), "?", "text 1"),
        (1,),
        generations,
        verdicts,
        id=position,
        texts=texts,
    )


RIGHT = Verdict(True, 1.0)
WRONG = Verdict(False, -1.0)
ERROR = Verdict(None, 0.0, "died")


def test_the_gap_is_the_mean_over_problems_of_what_the_verifiers_say_of_equal_responses():
    first = group(0, RIGHT, RIGHT, WRONG)
    second = group(1, RIGHT, WRONG)
    audited = [
        (first, 0, WRONG),
        (first, 1, RIGHT),
        (first, 2, WRONG),
        (second, 0, WRONG),
        (second, 1, ERROR),
    ]
    found = AuditedStep(audited).metrics()
    assert found["audit/responses"] == 5
    assert found["audit/errors"] == 1  # counted, and in no mean: not a zero
    assert found["audit/mean"] == 0.25
    assert found["audit/gap"] == pytest.approx((1 / 3 + 1) / 2)
    assert found["audit/gap_low"] < found["audit/gap"] < found["audit/gap_high"]


def test_two_groups_of_one_problem_are_one_problem_of_the_interval():
    audited = [(group(i, RIGHT, problem=name), 0, WRONG) for i, name in enumerate(("a", "a", "b"))]
    assert AuditedStep(audited).metrics()["audit/gap"] == 1.0
    assert (
        AuditedStep(audited).metrics()["audit/gap_low"]
        == AuditedStep(audited[1:]).metrics()["audit/gap_low"]
    )


def test_where_one_of_the_two_gives_scores_only_the_gap_is_one_of_scores():
    audited = [(group(0, RIGHT), 0, Verdict(None, 0.25)), (group(1, WRONG), 0, Verdict(None, -0.5))]
    found = AuditedStep(audited).metrics()
    assert (found["audit/mean"], found["audit/gap"]) == (-0.125, (0.75 - 0.5) / 2)


def test_without_a_verdict_of_the_audit_there_is_no_gap():
    assert AuditedStep([(group(0, RIGHT), 0, ERROR)]).metrics() == {
        "audit/responses": 1,
        "audit/errors": 1,
    }
    assert AuditedStep([]).metrics() == {"audit/responses": 0, "audit/errors": 0}


def test_the_share_is_sampled_by_key_and_leaves_out_responses_without_a_verdict():
    groups = [group(position, *[RIGHT] * 15, ERROR) for position in range(200)]
    with InlineJudge("helpers.reward_functions:yes_or_no") as judge:
        audit = Audit(judge, share=0.1, seed=7)
        found = audit.submit(groups, step=3)()
        again = audit.submit(groups[100:], step=3)()
        other = audit.submit(groups[100:], step=4)()
    chosen = [(each.id, i) for each, i, _ in found.responses]
    assert 240 < len(chosen) < 360  # 10 % of 3,000, +- 3.6 standard deviations
    assert all(i < 15 for _, i in chosen)
    assert [key for key in chosen if key[0] >= 100] == [
        (each.id, i) for each, i, _ in again.responses
    ]
    assert again.verdicts().keys() != other.verdicts().keys()
    assert all(verdict.correct == (i == 1) for _, i, verdict in found.responses)


def audited_rows(run: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(run.glob("rollouts/*")) for row in read_table(path).to_pylist()]


def without_audit(run: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not name.startswith("audit/")}
        for row in metrics(run)
    ]


def test_an_audit_is_stored_and_changes_nothing_else_also_when_the_run_is_resumed(tmp_path: Path):
    options = (
        "train.num_steps=2",
        "train.save_every=1",
        "train.keep_checkpoints=9",
        "data.eval=null",
    )
    start_run(tiny(*options), run_dir=tmp_path / "plain", config_name="t")
    start_run(tiny(*options, *AUDIT), run_dir=tmp_path / "run", config_name="t")
    assert without_audit(tmp_path / "run") == metrics(tmp_path / "plain")
    rows = audited_rows(tmp_path / "run")
    audited = [row for row in rows if row["audit_score"] is not None]
    assert len(audited) == sum(row["audit/responses"] for row in metrics(tmp_path / "run")) > 5
    assert {row["outcome"] for row in audited} == {"trained"}
    assert {row["audit_correct"] for row in rows if row["outcome"] != "trained"} <= {None}
    whole = contents(tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        if path.name == "step_000002":
            shutil.rmtree(path)
    resume_run(tmp_path / "run", [])
    assert contents(tmp_path / "run") == whole


def test_errors_of_the_audit_are_counted_and_written_where_they_belong(tmp_path: Path):
    options = (
        "train.num_steps=1",
        "data.eval=null",
        "audit.share=1",
        "audit.verifier=helpers.reward_functions:verdict_with_error",
    )
    start_run(tiny(*options), run_dir=tmp_path / "run", config_name="t")
    (row,) = metrics(tmp_path / "run")
    assert row["audit/errors"] == row["audit/responses"] == 16
    assert "audit/gap" not in row
    trained = [row for row in audited_rows(tmp_path / "run") if row["outcome"] == "trained"]
    assert [(row["audit_score"], row["audit_error"] is None) for row in trained] == [
        (None, False)
    ] * 16


def test_one_step_off_audits_the_batch_that_trains_and_resumes_to_the_byte(tmp_path: Path):
    config = async_config(
        "train.num_steps=3",
        "train.save_every=1",
        "train.keep_checkpoints=9",
        "data.eval=null",
        *AUDIT,
    )
    run_or_resume(tmp_path / "whole", config)
    resumed_from(tmp_path / "whole", tmp_path / "run", step=1)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert sum(row["audit/responses"] for row in metrics(tmp_path / "run")) > 5


BASE = {"model": "tiny-random", "data": {"train": "builtin:sums"}}


@pytest.mark.parametrize(
    "options",
    [
        ["reward.verifier=math", "audit.verifier=math"],
        ["audit.verifier={exact: {extract: final}}"],  # what auto stands for here
        ["reward.verifier={math: 1, dapo.rewards.examples:brevity: 0.1}", "audit.verifier=math"],
    ],
)
def test_what_trains_is_refused_as_its_own_audit(options: list[str]):
    with pytest.raises(
        ConfigError, match=r"equals reward.verifier, so the two could never disagree"
    ):
        build_config(BASE, options)


def test_the_same_verifier_with_other_options_may_audit_and_check_prints_it():
    config = build_config(
        BASE, ["reward.verifier=exact", "audit.verifier={exact: {extract: final}}"]
    )
    assert config.audit_reward is not None
    assert config.audit_reward.options == {"extract": "final"}
    assert "  audit       exact judges 0.05 of the trained responses, never trains" in list(
        explain(config)
    )


def test_an_audit_that_cannot_be_used_is_refused_before_the_run_directory_is_made(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"audit\.verifier must be one verifier"):
        build_config(BASE, ["audit.verifier={math: {}, exact: {}}"])
    with (
        pytest.raises(
            RewardError, match=r"audit\.verifier: verifier math has no option 'tolerance'"
        ),
    ):
        start_run(
            tiny("audit.verifier={math: {tolerance: 1}}"),
            run_dir=tmp_path / "run",
            config_name="t",
        )
    assert not (tmp_path / "run").exists()


def test_what_both_verifiers_print_is_in_one_file_and_named_once(tmp_path: Path):
    own = WorkerOutput()
    audits = WorkerOutput()
    messages = []
    os.pwrite(own.fileno(), b"JUDGING\n", 0)
    os.pwrite(audits.fileno(), b"AUDITING\n", 0)
    run: Any = SimpleNamespace(
        directory=RunDirectory(tmp_path),
        verifier_output=own,
        environment=None,
        config=tiny(),
        audit=Audit(InlineJudge("exact"), share=1.0, seed=0, output=audits),
        tracker=SimpleNamespace(message=messages.append),
    )
    for _ in range(2):
        Run.keep_verifier_output(run)
    assert (tmp_path / "logs" / "verifier.log").read_text() == "JUDGING\nAUDITING\n"
    assert messages == [f"the verifier prints: 'JUDGING'; kept in {tmp_path}/logs/verifier.log"]
    own.close()
    audits.close()
