"""Comparisons of runs: pairs by hand, intervals that hold, and two forks of one run."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dapo.analysis.compare import best_of, compare_evaluations, compare_runs, equal_steps, verdict
from dapo.analysis.view.queries import Runs
from dapo.analysis.view.queries import paired as paired_on_page
from dapo.cli.train import resume_run
from dapo.config import RewardConfig, parse_overrides
from dapo.config.load import merge_options
from dapo.core.errors import DataError
from dapo.evaluation.pairing import mean_over_steps, paired, paired_problems, who_is_better
from dapo.evaluation.scores import Evaluation, EvaluationPlan, JudgedProblem, JudgedResponse
from dapo.runs.directory import RunDirectory
from dapo.runs.evaluations import load_evaluation, write_evaluation
from dapo.runs.rollout_table import branches_json, problem_means, write_rollouts
from dapo.start.fork import create_fork, plan_fork
from dapo.types import Generation, Problem
from helpers.commands import run as run_command
from helpers.run_files import new_run
from helpers.tiny_runs import tiny

STEP = 2


@pytest.fixture(scope="module")
def runs(sync_run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and a fork of it at step 2 with another learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(sync_run, folder / "a")
    create_fork(plan_fork(RunDirectory(folder / "a"), STEP, ["optim.lr=0.05"]), folder / "b", [])
    resume_run(folder / "b", [])
    return folder / "a", folder / "b"


class TestPairs:
    def test_pairs_that_move_together_save_most_of_the_variance(self):
        found = paired([0.0, 1.0, 2.0, 3.0], [0.5, 1.5, 2.5, 4.5])
        # differences .5 .5 .5 1.5: mean .75, variance 1/4; of a 5/3, of b 35/12
        assert found.difference == pytest.approx(0.75)
        assert found.paired_variance == pytest.approx(0.25 / 4)
        assert found.unpaired_variance == pytest.approx((5 / 3 + 35 / 12) / 4)
        assert found.variance_ratio == pytest.approx(4 * (5 / 3 + 35 / 12))
        # Student's quantile of 3 degrees of freedom: 3.182
        assert (found.low, found.high) == (
            pytest.approx(0.75 - 3.182 / 4, abs=1e-3),
            pytest.approx(1.546, abs=1e-3),
        )

    def test_equal_pairs_have_no_interval_and_one_pair_neither(self):
        assert paired([1.0, 2.0], [1.0, 2.0]).low is None
        assert paired([1.0], [2.0]).low is None
        assert paired([], []).difference is None

    def test_differences_that_rounding_alone_makes_differ_do_not_vary(self):
        step = paired([0.6, 0.2, 0.1], [0.7, 0.3, 0.2])
        assert (step.low, step.variance_ratio) == (None, None)
        mean = mean_over_steps([step, step])
        assert (mean.low, mean.variance_ratio) == (None, None)
        assert who_is_better(mean.as_json()) == "undecided"

    def test_no_end_of_an_interval_is_a_difference_that_accuracies_cannot_have(self):
        found = paired([1.0, 1.0], [1.0, 0.5], proportions=True)
        assert (found.difference, found.low, found.high) == (-0.25, -1.0, 1.0)
        scores = paired([1.0, 1.0], [1.0, 0.5])
        assert scores.high is not None
        assert scores.high > 2

    def test_only_problems_that_both_were_asked_count(self):
        found = paired_problems({"p": 1.0, "q": 0.0, "r": 0.5}, {"q": 1.0, "r": 0.5, "s": 0.0})
        assert (found.pairs, found.difference) == (2, 0.5)

    def test_the_interval_over_steps_holds_in_95_of_100(self):
        random = np.random.default_rng(0)
        covered = 0
        repeats = 400
        for _ in range(repeats):
            steps = []
            for shift in (0.1, 0.3, 0.2):  # the true mean is 0.2
                a = random.normal(0, 3, 6)
                steps.append(paired(a, a + shift + random.normal(0, 0.5, 6)))
            found = mean_over_steps(steps)
            assert found.low is not None
            assert found.high is not None
            covered += found.low <= 0.2 <= found.high
        assert 0.92 < covered / repeats < 0.98

    def test_the_interval_over_steps_holds_where_some_have_few_pairs(self):
        random = np.random.default_rng(0)
        covered = 0
        repeats = 2000
        for _ in range(repeats):
            steps = []
            for pairs in (2, 2, 2, 40):
                differences = random.normal(0.2, 1, pairs)
                steps.append(paired(np.zeros(pairs), differences))
            found = mean_over_steps(steps)
            assert found.low is not None
            assert found.high is not None
            covered += found.low <= 0.2 <= found.high
        assert covered / repeats > 0.94  # 0.87 with a degree of freedom per pair

    def test_the_mean_over_steps_leaves_out_steps_without_two_pairs(self):
        one = paired([0.0, 1.0], [1.0, 3.0])
        two = paired([0.0], [9.0])
        assert mean_over_steps([one, two]).difference == one.difference
        assert mean_over_steps([two]).difference is None


def response(problem: str, outcome: str = "trained", **values: Any) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(("fields", "score", "components", "error", "advantage"))
    row |= {
        "step": 1,
        "group_id": 0,
        "problem_id": problem,
        "source": "s",
        "sample": 0,
        "prompt": "",
        "response": "",
    }
    row |= {"answer": "", "prompt_tokens": 1, "finish": "stop", "outcome": outcome, "version": 0}
    row |= {
        "correct": True,
        "reward": 1.0,
        "response_ids": [1, 2],
        "engine_logprobs": [-1.0, -2.0],
    } | values
    return row | {"response_tokens": len(row["response_ids"])}


def test_means_of_a_problem_are_those_of_its_decided_responses(tmp_path: Path):
    rows = [
        response("p", reward=1.0),
        response(
            "p",
            reward=0.0,
            correct=False,
            response_ids=[1, 2, 3, 4],
            engine_logprobs=[-4.0, -4.0, -4.0, -3.0],
        ),
        response("q", "all_wrong", reward=None, correct=None, error="timed out"),
        response("r", "excess"),
    ]
    write_rollouts(tmp_path / "t.parquet", rows)
    found = problem_means(tmp_path / "t.parquet")
    assert found == {
        "reward": {"p": 0.5},
        "accuracy": {"p": 0.5},
        "entropy": {"p": 3.0, "q": 1.5},  # 18 nats over 6 tokens
        "length": {"p": 3.0, "q": 2.0},
    }


def test_the_entropy_of_an_agent_counts_the_tokens_of_all_its_branches(tmp_path: Path):
    branch = Generation("1/0/1", [3, 4, 5], [-3.0, -4.0, -5.0], "stop", 0, prompt_ids=(9,))
    episode = Generation("1/0/0", [1, 2], [-1.0, -2.0], "stop", 0, branches=(branch,))
    rows = [
        response("p", branches=branches_json(episode)) | {"response_tokens": 5},
        response("q", branches=None),
    ]
    write_rollouts(tmp_path / "t.parquet", rows)
    # 15 nats over 5 tokens, and 3 over 2
    assert problem_means(tmp_path / "t.parquet")["entropy"] == {"p": 3.0, "q": 1.5}
    write_rollouts(tmp_path / "hurt.parquet", [response("p", branches="{}")])
    with pytest.raises(DataError, match="a row has no valid branches"):
        problem_means(tmp_path / "hurt.parquet")


def test_a_table_without_log_probabilities_has_no_entropy(tmp_path: Path):
    write_rollouts(tmp_path / "t.parquet", [response("p", engine_logprobs=None)])
    assert problem_means(tmp_path / "t.parquet")["entropy"] == {}


def judged(value: float) -> dict[str, Any]:
    texts = {"text": "", "answer": None, "finish": "stop"}
    return {"correct": bool(value), "score": value, "error": None, "tokens": 1, **texts}


def evaluation(accuracies: dict[str, list[float]], **settings: Any) -> dict[str, Any]:
    table = [
        {
            "id": name,
            "accuracy": float(np.mean(values)),
            "responses": [judged(value) for value in values],
        }
        for name, values in accuracies.items()
    ]
    samples = max(map(len, accuracies.values()))
    mean = float(np.mean([np.mean(values) for values in accuracies.values()]))
    return {"name": "test", "temperature": 1.0, "top_p": 1.0, "max_response_tokens": 8, "binary": True, "seed": 0} | {
        "step": 1, "samples_per_problem": samples, "accuracy": mean, "table": table, **settings
    }  # fmt: skip


class TestEvaluations:
    FEW = evaluation({"p": [1, 0], "q": [0, 0]})
    MANY = evaluation({"q": [1, 0, 1, 1], "p": [1, 0, 1, 1]})

    def test_with_equal_draws_the_same_samples_are_compared(self):
        found = compare_evaluations(self.FEW | {"step": 3}, self.MANY | {"step": 4})
        assert found.shares_draws
        # the first two of four
        assert found.difference["difference"] == pytest.approx((0 + 0.5) / 2)
        assert (found.step_a, found.step_b, found.better, found.worse) == (3, 4, 1, 0)

    def test_with_another_seed_all_samples_count(self):
        found = compare_evaluations(self.FEW, self.MANY | {"seed": 1})
        assert not found.shares_draws
        assert found.difference["difference"] == pytest.approx((0.25 + 0.75) / 2)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (
                evaluation({"p": [1], "q": [0]}, temperature=0.5),
                "temperature is 1.0 in one and 0.5 in the other",
            ),
            (evaluation({"p": [1], "z": [0]}), "2 problems are only in one of them"),
        ],
    )
    def test_what_was_asked_otherwise_is_not_compared(self, other: dict[str, Any], message: str):
        with pytest.raises(DataError, match=message):
            compare_evaluations(self.FEW, other)


FORMS = {
    "few": ["rw", "wr", "ww"],
    "many": ["rwrr", "wwwr", "rrrr"],
    "errors": ["re", "ee", "rw"],
    "no verdict": ["ee", "ee", "ee"],
    "one": ["rr"],
    "low": ["w"] * 20,
    "middle": ["r"] * 8 + ["w"] * 12,
    "high": ["r"] * 16 + ["w"] * 4,
    "higher": ["r"] * 17 + ["w"] * 3,
}


def write_result(run: RunDirectory, form: str, *, seed: int = 0, verifier: str = "exact") -> None:
    """The evaluation of a run after step 4, with a mark for each response to each problem."""
    verdicts = {"r": (True, 1.0, None), "w": (False, -1.0, None), "e": (None, 0.0, "timed out")}
    problems = [
        JudgedProblem(
            Problem(str(i), "?", "!"),
            tuple(JudgedResponse("", *verdicts[m], "", 3, "stop") for m in marks),
        )
        for i, marks in enumerate(FORMS[form])
    ]
    judging = RewardConfig(verifier=verifier).judging
    found = Evaluation(
        EvaluationPlan("e", len(FORMS[form][0]), 1.0, 1.0, 8, (), seed, judging), tuple(problems)
    )
    write_evaluation(run, 4, found.summary(), found.table())


@pytest.mark.parametrize(
    ("second", "settings", "expected"),
    [
        ("few", {}, (0.0, 0, 0)),
        ("many", {}, ((0 - 0.5 + 1) / 3, 1, 1)),  # the first two responses of four
        ("many", {"seed": 1}, ((0.25 - 0.25 + 1) / 3, 2, 1)),
        ("errors", {}, ((0.5 + 0.5) / 2, 2, 0)),
        ("one", {}, "2 problems are only in one of them"),
        ("few", {"verifier": "math"}, "verifier is exact in one and math in the other"),
    ],
)
def test_the_page_and_the_command_pair_two_runs_by_one_rule(
    tmp_path: Path, second: str, settings: dict[str, Any], expected: tuple[float, int, int] | str
):
    a = new_run(tmp_path / "a")
    b = new_run(tmp_path / "b")
    write_result(a, "few")
    for _ in range(2):  # a resumed run repeats an evaluation
        write_result(b, second, **settings)
    found = compare_runs(a.path, b.path)
    page = Runs([a.path, b.path])
    given = {"a_run": "a", "a_step": "4", "b_run": "b", "b_step": "4"}
    if isinstance(expected, str):
        assert [note.endswith(expected) for note in found.notes] == [True]
        with pytest.raises(DataError, match=f"^{expected}$"):
            paired_on_page(page, given)
        return
    shown = paired_on_page(page, given)
    command = found.held_out["final"]
    assert (shown["difference"], shown["better"], shown["worse"]) == (
        pytest.approx(expected[0]),
        *expected[1:],
    )
    ends = [(each["difference"], each["low"], each["high"]) for each in (shown, command.difference)]
    assert ends[0] == ends[1]
    assert (shown["problems"], shown["better"], shown["worse"]) == (
        command.difference["pairs"], command.better, command.worse
    )  # fmt: skip
    rows = [
        row["second"] - row["first"]
        for row in shown["table"]
        if None not in (row["first"], row["second"])
    ]
    assert np.mean(rows) == pytest.approx(shown["difference"])


def test_the_best_of_several_runs_is_significantly_above_each_of_them(tmp_path: Path):
    runs = {}
    for form in ("low", "middle", "high", "higher"):
        runs[form] = new_run(tmp_path / form)
        write_result(runs[form], form)

    def sentence(first: str, *others: str) -> str:
        return best_of([compare_runs(runs[first].path, runs[other].path) for other in others])

    higher = runs["higher"].path
    assert sentence("low", "middle", "higher").startswith(f"{higher} is best: accuracy 0.0 and ")
    undecided = f"{higher} is highest; no difference to {runs['high'].path} can be told: accuracy "
    assert sentence("low", "high", "higher").startswith(undecided)
    none = f"no run is significantly better than {runs['high'].path}"
    assert sentence("high", "middle", "higher") == none


def test_no_run_is_best_while_another_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    runs = {}
    for name, form, verifier in (
        ("low", "low", "exact"),
        ("high", "high", "exact"),
        ("other", "higher", "math"),
    ):
        runs[name] = new_run(tmp_path / name)
        write_result(runs[name], form, verifier=verifier)
    new_run(tmp_path / "none")
    found = [compare_runs(tmp_path / "low", tmp_path / name) for name in ("high", "other", "none")]
    undecided = f"{tmp_path / 'high'} is highest; no difference to {tmp_path / 'other'} or "
    assert best_of(found).startswith(undecided)
    paths = [str(tmp_path / name) for name in ("low", "high", "other", "none")]
    _, out, _ = run_command(capsys, "compare", *paths)
    shown = " ".join(out.split())
    assert f"{tmp_path / 'other'}: the final evaluations on held-out problems cannot be" in shown
    assert f"{tmp_path / 'none'}: no comparison on held-out problems: a run has no" in shown


def test_rewards_of_different_verifiers_rank_no_run(runs: tuple[Path, Path], tmp_path: Path):
    for name, verifier in (("a", "exact"), ("b", "math")):
        write_result(new_run(tmp_path / name), "high", verifier=verifier)
    reason = compare_runs(tmp_path / "a", tmp_path / "b").without_final
    assert reason == "verifier is exact in one and math in the other"
    found = replace(compare_runs(*runs), held_out={}, without_final=reason)
    ending = f"; held-out problems are not compared: {reason}"
    assert ": in training " in verdict(found)
    assert verdict(found).endswith(ending)
    differing = replace(found, options={"reward.options.unit": ["m", "cm"]})
    assert verdict(differing) == f"undecided: the runs differ in reward.options.unit{ending}"


def test_without_a_verdict_in_both_runs_nothing_is_said_to_be_equal(tmp_path: Path):
    runs = {}
    for form in ("few", "no verdict"):
        runs[form] = new_run(tmp_path / form)
        write_result(runs[form], form)
    found = compare_runs(runs["few"].path, runs["no verdict"].path)
    assert verdict(found) == (
        "undecided: the runs have no evaluations or training problems in common"
    )
    assert best_of([found]).startswith("undecided: no run has an evaluation of the same problems")
    assert who_is_better({"difference": None, "low": None, "high": None}) == "undecided"


def test_steps_are_equal_up_to_the_first_metric_that_differs_but_for_times():
    a = {step: {"step": step, "loss/policy": 0.5, "time/step_s": step} for step in (1, 2, 3)}
    b = {step: row | {"time/step_s": 9} for step, row in a.items()} | {
        3: a[3] | {"loss/policy": 0.6}
    }
    assert equal_steps(a, b) == 2
    assert equal_steps(a, a) == 3
    assert equal_steps(a, {}) == 0


def test_two_forks_are_equal_up_to_the_step_and_differ_in_what_was_changed(runs: tuple[Path, Path]):
    found = compare_runs(*runs)
    assert (found.equal_up_to, list(found.steps)) == (STEP, [3, 4])
    assert found.options == {"optim.lr": [0.0005, 0.05]}
    assert found.a.fork is None
    assert found.b.fork is not None
    assert found.b.fork["step"] == STEP
    # step 3 has the same responses in both; the update after it is the first that differs
    for curve in found.curves.values():
        assert next(each["difference"] for each in curve.differences) == 0
        assert curve.differences[1]["pairs"] > 1
        assert curve.a[0] == curve.b[0] or curve is found.curves["entropy"]
    assert found.curves["entropy"].differences[1]["difference"] != 0
    assert set(found.held_out) == {"final", "best"}
    assert found.held_out["final"].shares_draws
    assert found.costs["tokens_generated"][0] > 0
    assert found.notes == []
    assert load_evaluation(RunDirectory(runs[0]).eval(4))["verifier"] == tiny().reward.verifier
    assert json.loads(json.dumps(asdict(found)))["equal_up_to"] == STEP


def test_without_stored_responses_the_curves_are_not_paired(
    runs: tuple[Path, Path], tmp_path: Path
):
    a, _ = runs
    other = create_fork(
        plan_fork(RunDirectory(a), STEP, ["log.rollouts=none", "optim.lr=0.05"]), tmp_path / "c", []
    )
    resume_run(other.path, [])
    found = compare_runs(a, other.path)
    assert found.curves["reward"].mean["difference"] is None
    assert None not in found.curves["reward"].b
    assert found.notes == [
        "2 of 2 steps are not paired: a run keeps no judged responses (log.rollouts)"
    ]


def test_the_command_prints_tables_or_json(
    capsys: pytest.CaptureFixture[str], runs: tuple[Path, Path]
):
    code, out, _ = run_command(capsys, "compare", *map(str, runs), "--by-step")
    assert code == 0
    assert f"b {runs[1]}: 4 steps, seed 0, forked from {runs[0]} at step 2 " in " ".join(
        out.split()
    )
    assert "equal up to step 2; compared below: steps 3 to 4\n" in out
    assert "optim.lr" in out
    assert "entropy, nats" in out
    tables = [line for line in out.splitlines() if not line.startswith(("a  ", "b  ", "ratio"))]
    assert max(map(len, tables)) <= 80
    code, out, err = run_command(capsys, "compare", *map(str, runs), "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert len(found["comparisons"]) == 1
    verdict = "equal in all 4 common steps\n"
    assert run_command(capsys, "compare", str(runs[0]), str(runs[0]))[1].startswith(verdict)
    assert run_command(capsys, "compare", str(runs[0]))[0] == 2


def test_shapes_that_one_start_has_measured_are_no_difference_of_options(
    capsys: pytest.CaptureFixture[str], runs: tuple[Path, Path], tmp_path: Path
):
    other = RunDirectory(shutil.copytree(runs[1], tmp_path / "other"))
    options = ["rollout.native.kernels={9x9: compiled}", "reward.options={extract: final}"]
    raw = yaml.safe_load(other.config.read_text())
    for option in options:
        raw = merge_options(raw, parse_overrides([option]))
    other.config.write_text(yaml.safe_dump(raw))
    _, out, _ = run_command(capsys, "compare", str(runs[0]), str(other.path))
    assert "only b  reward.options.extract=final" in out
    assert "kernels" not in out
    _, found, _ = run_command(capsys, "compare", str(runs[0]), str(other.path), "--json")
    (comparison,) = json.loads(found)["comparisons"]
    assert comparison["options"]["rollout.native.kernels.9x9"] == [None, "compiled"]
