"""A probe is the run's first step: same responses and verdicts; its expectations hold; it writes
nothing.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dapo.algo.chance import Beta, expected_chance, measured_chances
from dapo.analysis.check.facts import CheckedFacts, run_seconds
from dapo.analysis.probe import (
    Check,
    Probe,
    compare_with_run,
    default_problems,
    pass_rate_histogram,
    probe_run,
    step_seconds,
)
from dapo.cli.check.probe import describe_probe
from dapo.cli.train import start_run
from dapo.config import Config
from dapo.core.errors import DataError
from dapo.libs.sample_intervals import mean_interval
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import truncate_after
from dapo.start.check import check, read_data
from dapo.start.read import read
from dapo.start.resolve import resolve
from helpers.async_runs import ONE_STEP_OFF
from helpers.commands import run as run_command
from helpers.paths import CONFIGS
from helpers.run_files import log_metrics
from helpers.tables import for_each_row
from helpers.tiny_runs import metrics, tiny

OPTIONS = (
    "data.eval=null",
    "train.num_steps=2",
    "rollout.prompts_per_step=8",
    "rollout.max_response_tokens=12",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run"
    start_run(tiny(*OPTIONS), run_dir=path, config_name="tiny")
    return path


def probe_of(config: Config, *, problems: int | None = None, samples: int | None = None) -> Probe:
    with check(config) as checked:
        return probe_run(
            read(resolve(checked), read_data(checked)), problems=problems, samples=samples
        )


@pytest.fixture(scope="module")
def probe(run: Path) -> Probe:
    """Of as many problems as the run's two steps have decided."""
    return probe_of(tiny(*OPTIONS), problems=sum(decided_in(run)))


def decided_in(run: Path) -> list[int]:
    """The number of groups that each step has decided."""
    undecided = ("rollout/groups_excess", "rollout/groups_aborted")
    return [
        row["rollout/groups_generated"] - sum(row[name] for name in undecided)
        for row in metrics(run)
    ]


def test_a_probe_of_the_first_two_steps_problems_measures_what_these_steps_report(
    run: Path, probe: Probe
):
    rows = metrics(run)
    weights = decided_in(run)

    def mean(name: str) -> float:
        return pytest.approx(np.average([row[name] for row in rows], weights=weights), abs=1e-12)

    assert rows[1]["rollout/keep_rate"] < 1, (
        "a step that drops groups, sampled after the first update"
    )
    assert probe.kept == mean("rollout/keep_rate")
    assert probe.accuracy == mean("reward/accuracy")
    assert probe.response_tokens == mean("rollout/response_tokens_mean")
    assert probe.truncated == mean("rollout/truncated_fraction")
    assert probe.response_quantiles["100%"] == max(
        row["rollout/response_tokens_max"] for row in rows
    )
    assert sum(each.problems for each in probe.histogram) == probe.problems == sum(weights)


def test_a_step_takes_what_its_groups_take_at_the_measured_rates(probe: Probe):
    assert probe.expected_keep_rate is not None
    assert probe.update_s is not None
    assert probe.update_tokens_per_s is not None
    assert probe.step_s == pytest.approx(probe.load_s + probe.generate_s + probe.update_s)
    assert probe.groups_per_step == pytest.approx(min(16, 8 / probe.expected_keep_rate))
    assert probe.generate_s * probe.tokens_per_s == pytest.approx(
        probe.groups_per_step * 4 * probe.response_tokens
    )
    assert 0.1 < probe.peak_memory_gib < 64


def test_a_step_that_samples_ahead_takes_what_its_longer_phase_takes():
    ahead = tiny(*ONE_STEP_OFF)
    assert step_seconds(ahead, 0.5, 4.0, 3.0) == 4.5
    assert step_seconds(ahead, 0.5, 2.0, 3.0) == 3.5
    assert step_seconds(tiny(), 0.5, 4.0, 3.0) == 7.5


def test_a_probe_says_what_the_doctor_would_where_no_response_is_right(probe: Probe):
    assert [each.name for each in probe.findings if each.severity == "error"] == []
    wrong = ("reward.verifier=helpers.reward_functions:always", "reward.options={verdict: false}")
    config = tiny(*OPTIONS, *wrong)
    found = probe_of(config, problems=8)
    severities = {each.name: each.severity for each in found.findings}
    assert severities == {"too_hard": "error", "truncation": "warning", "idle_techniques": "note"}
    text = " ".join(" ".join(describe_probe(config, found)).split())
    assert (
        "of the responses reach 12 tokens, the limit: every response to 8 prompts is wrong, so"
        " nothing" in text
    )
    assert "is learned; try rollout.max_response_tokens=24" in text
    facts = CheckedFacts(config, [], 0, None, [])
    assert facts.verdict(found).startswith("fits, but with the error below: ")
    assert facts.verdict(found).endswith("; 0 of 8 problems carry a signal")
    assert facts.verdict(probe).startswith("ok: ")


def test_more_samples_and_a_reward_of_scores_alone_are_probed_too():
    found = probe_of(
        tiny(*OPTIONS, "reward.verifier=dapo.rewards.examples:digit_share"), problems=3, samples=6
    )
    assert (found.problems, found.samples, found.group_size) == (3, 6, 4)
    assert (found.accuracy, found.expected_keep_rate, found.histogram) == (None, None, [])
    assert found.groups_per_step == min(16, 8 / found.kept) if found.kept else 16


def test_responses_without_a_verdict_are_in_no_pass_rate_of_a_probe():
    """Every response with a verdict is right: so are all problems, however many responses have
    none.
    """
    found = probe_of(
        tiny(*OPTIONS, "reward.verifier=helpers.reward_functions:right_or_no_verdict"), problems=8
    )
    assert found.verifier_errors > 0
    assert found.accuracy == 1.0
    (always,) = (each for each in found.histogram if each.problems)
    assert always.name == "always"


def test_fewer_samples_than_a_group_has_leave_the_keep_rate_without_an_interval():
    config = tiny(*OPTIONS)
    found = probe_of(config, problems=8, samples=2)
    assert found.expected_keep_rate is not None
    assert found.expected_keep_interval is None
    # groups of 2 are kept less often than the step's groups of 4
    assert found.kept < found.expected_keep_rate
    assert found.groups_per_step == pytest.approx(min(16, 8 / found.expected_keep_rate))
    assert found.groups_per_step < min(16, 8 / found.kept)
    text = " ".join(" ".join(describe_probe(config, found)).split())
    assert "expected for groups of 4, roughly: there are only 2 responses per problem" in text


def test_the_default_is_four_steps_prompts_within_bounds():
    configs = [
        tiny(f"rollout.prompts_per_step={n}", "train.minibatch_groups=1") for n in (1, 4, 16)
    ]
    assert [default_problems(config) for config in configs] == [8, 16, 32]


@pytest.mark.parametrize("samples", [8, 16])
@pytest.mark.parametrize("population", [(0.6, 1.0), (1.0, 200.0), (0.05, 0.05)])
def test_the_expected_keep_rate_is_that_of_the_population_and_its_interval_holds(
    population: tuple[float, float], samples: int
):
    random = np.random.default_rng(0)
    group_size = 8
    estimates = []
    covered = 0
    truth = expected_chance(Beta(*population), group_size)
    for _ in range(100):
        correct = random.binomial(samples, random.beta(*population, size=32))
        chances = measured_chances(correct.tolist(), (samples - correct).tolist(), group_size)
        estimates.append(np.mean(chances))
        low, high = mean_interval(chances)
        covered += low <= truth <= high
    assert np.mean(estimates) == pytest.approx(truth, abs=0.03)
    assert covered / 100 > 0.9


def test_pass_rates_are_counted_in_bins_with_wilsons_interval():
    found = pass_rate_histogram([0, 0, 1, 2, 4, 7, 8, 8, 8, 8], [8, 8, 7, 6, 4, 1, 0, 0, 0, 0])
    assert {each.name: each.problems for each in found} == {
        "never": 2, "0 to 25 %": 1, "25 to 50 %": 1, "50 to 75 %": 1, "75 to 100 %": 1, "always": 4
    }  # fmt: skip
    # Wilson's interval of 4 of 10
    assert (found[-1].low, found[-1].high) == (
        pytest.approx(0.168, abs=1e-3),
        pytest.approx(0.687, abs=1e-3),
    )


def test_a_probe_is_compared_with_the_means_of_the_first_steps(tmp_path: Path, probe: Probe):
    run = RunDirectory(tmp_path)
    row = {"rollout/groups_generated": 13, "rollout/groups_trained": 4, "rollout/groups_excess": 1}
    row |= {
        "rollout/groups_aborted": 1,
        "rollout/groups_stale": 1,
        "rollout/tokens_generated": 480,
        "rollout/tokens_in_minibatches": 160,
    }
    row |= {
        "reward/accuracy": 0.5,
        "rollout/response_tokens_mean": 10.0,
        "rollout/truncated_fraction": 0.0,
    }
    row |= {
        "time/load_weights_s": 0.5,
        "time/generate_s": 4.0,
        "time/update_s": 1.5,
        "time/old_logprobs_s": 0.5,
    }
    rows = [row | {"step": step, "time/peak_memory_gib": step} for step in (1, 2, 3)] + [
        row | {"step": 4, "x": 1e9}
    ]
    log_metrics(run.metrics, [{"step": 0}, *rows])
    found = {each.name: each for each in compare_with_run(probe, run)}
    assert found["keep rate"].measured == pytest.approx(0.4)
    assert found["groups per step"].measured == 10
    assert (found["generated tokens/s"].measured, found["updated tokens/s"].measured) == (120, 80)
    assert (found["step, s"].measured, found["peak memory, GiB"].measured) == (6.5, 3)
    ahead = RunDirectory(tmp_path / "ahead")
    ahead.path.mkdir()
    log_metrics(ahead.metrics, [{**row, "step": 1, "time/trainer_idle_s": 1.0}])
    of_ahead = {each.name: each.measured for each in compare_with_run(probe, ahead)}
    # weights, the wait for the batch, and the update: most of the sampling overlaps with it
    assert (of_ahead["step, s"], of_ahead["generation, s per step"]) == (3.5, 4.0)
    assert [
        Check("x", 1.2, 1.0).is_close,
        Check("x", 1.21, 1.0).is_close,
        Check("x", 0.0, 0.0).is_close,
    ] == [1, 0, 1]
    assert "accuracy" not in {
        each.name for each in compare_with_run(replace(probe, accuracy=None), run)
    }
    truncate_after(run.metrics, 0)
    with pytest.raises(DataError, match="has finished no step"):
        compare_with_run(probe, run)


def test_a_run_that_samples_nothing_is_not_compared_with_a_probe(tmp_path: Path, probe: Probe):
    run = RunDirectory(tmp_path)
    log_metrics(run.metrics, [{"step": 1, "loss/nll": 0.5, "time/step_s": 1.0}])
    with pytest.raises(DataError, match="has judged no group in its steps up to 3"):
        compare_with_run(probe, run)


def test_a_budget_of_tokens_ends_the_estimated_run(probe: Probe):
    measured = replace(
        probe, groups_per_step=5.0, response_tokens=10.0, tokens_per_s=100.0, step_s=3.0
    )
    config = tiny("rollout.group_size=4", "train.num_steps=100", "data.eval=null")
    for budget, steps in ((None, 100), (999, 5), (1000, 5), (1001, 6), (10**9, 100)):
        limited = config.changed("train", token_budget=budget)
        facts = CheckedFacts(limited, [], 0, None, [])
        assert run_seconds(facts, measured) == 3 * steps


def test_the_command_prints_the_probe_and_the_run_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    command = ["check", str(CONFIGS / "tiny.yaml"), *OPTIONS, "--probe", "--problems", "5"]
    code, out, _ = run_command(capsys, *command)
    assert code == 0
    verdict = " of disk, about 1 minute; 4 of 5 problems carry a signal model "
    assert verdict in " ".join(out.split())
    assert len(out.splitlines()) <= 15
    code, out, _ = run_command(capsys, *command, "--against", str(run), "--verbose")
    assert code == 0
    assert "probe of 5 problems x 4 responses with the real model:" in out
    assert "75 to 100 %" in out
    assert f"compared with steps 1 to 3 of {run}:" in out
    code, out, _ = run_command(capsys, *command, "--json", "--samples", "3")
    answer = json.loads(out)
    found = answer["probe"]
    assert (code, found["problems"], found["samples"]) == (0, 5, 3)
    assert answer["seconds"] > 0
    assert list(tmp_path.iterdir()) == []


@for_each_row("option", [("--samples", "4"), ("--problems", "4"), ("--against", "x")])
def test_options_of_a_probe_need_one(capsys: pytest.CaptureFixture[str], option: tuple[str, str]):
    code, _, err = run_command(capsys, "check", str(CONFIGS / "tiny.yaml"), *option)
    assert (code, err) == (2, "error: --problems, --samples and --against need --probe\n")
