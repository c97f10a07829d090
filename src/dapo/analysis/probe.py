"""Makes a run's first two steps in advance to measure pass rates, speed and memory.

Nothing is written. The code and the random keys of the run (`start/build.py`) sample,
judge and update, so the first batches are the ones that the run would train on. The second update
is the first to hold the optimizer's moments together with activations. Further batches are sampled
with the weights after it, until enough problems are judged.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from dapo.algo.chance import measured_chances
from dapo.config import Config
from dapo.core.errors import DataError
from dapo.core.memory import GIB
from dapo.libs.sample_intervals import Interval, mean_interval
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import read_metrics
from dapo.sampling.batch import Sampling, collect
from dapo.sampling.problem_stats import ProblemStats
from dapo.sampling.queue import Batch
from dapo.sampling.selection import make_selector
from dapo.start.build import build_engine, build_sampling, open_launcher, open_policy
from dapo.start.read import Inputs
from dapo.training.rules.all_rules import active_findings
from dapo.training.rules.finding import Finding
from dapo.training.rules.history import MetricHistory
from dapo.training.state import TrainablePolicy
from dapo.training.step_metrics import batch_metrics
from dapo.training.step_timer import peak_memory_gib
from dapo.training.updates import estimate_advantages, prepare_updates
from dapo.types import Group

MAX_PROBLEMS = 32  # the largest default number of problems
MAX_UPDATES = 2  # the number of steps that update
BINS = 4  # the number of equal bins of pass rates between never and always
LENGTH_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
# number of a run's first steps that a probe is compared with: later steps have learned
FIRST_STEPS = 3
TOLERANCE = 0.2


@dataclass(frozen=True)
class PassRates:
    """The number of problems with a pass rate in one bin."""

    name: str  # `never`, `0 to 25 %` .. `75 to 100 %` (both ends excluded), `always`
    problems: int
    fraction: float
    low: float  # the lower end of the fraction's 95 % interval
    high: float


@dataclass(frozen=True)
class Probe:
    """The measurements of a probe; None for a value that could not be measured."""

    problems: int
    samples: int  # responses per problem
    group_size: int
    accuracy: float | None
    accuracy_interval: Interval | None  # the 95 % interval, over problems
    histogram: Sequence[PassRates]
    kept: float  # the fraction of judged groups that would train
    expected_keep_rate: float | None
    """The keep rate of groups of `group_size` responses, from the pass rates; None for a reward of
    scores only.
    """
    expected_keep_interval: Interval | None
    """The 95 % interval, over problems; None for fewer samples than `group_size`, where a prior
    decides the chance.
    """
    groups_per_step: float
    """Groups to judge for a full batch at this keep rate, at most
    `dynamic_sampling.max_groups_per_step`.
    """
    response_tokens: float  # the mean length of a response
    response_quantiles: Mapping[str, float]
    truncated: float
    truncated_interval: Interval | None
    verifier_errors: int
    tokens_per_s: float  # generated tokens per second of sampling, verdicts included
    load_s: float  # seconds to load the policy's weights into the engine
    # trained response tokens per second of an update; None if no group had a signal
    update_tokens_per_s: float | None
    generate_s: float  # seconds per step of sampling, from the rates above
    # seconds per step of updates and old log-probabilities, from the rates above
    update_s: float | None
    step_s: float | None
    """Seconds per step of weights, sampling and updates; without evaluation and checkpoint.

    With `schedule: async` the larger of sampling and updates counts, because they overlap.
    """
    # peak main memory of this process, or of the tensors on its GPU if it trains there
    peak_memory_gib: float
    findings: Sequence[Finding] = ()  # the findings of `dapo doctor` in these steps


def probe_run(
    inputs: Inputs,
    *,
    problems: int | None = None,
    samples: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    log: Callable[[str], None] = print,
) -> Probe:
    """Sample the run's first problems and make two updates of weights that are discarded.

    A policy in this process trains the model of `inputs` in place.

    Args:
        inputs: the options, the verifiers, the model and the data.
        problems: the least number of problems to judge; None: `default_problems`.
        samples: responses to each problem; None: `rollout.group_size`.
        on_progress: gets the number of judged problems and the number to judge.
        log: gets messages about the start of engines.
    """
    config = inputs.config
    problems = problems or default_problems(config)
    samples = samples or config.rollout.group_size
    with ExitStack() as stack:
        launcher = stack.enter_context(open_launcher(config))
        engine = build_engine(config, inputs.loaded, launcher, episodes=inputs.episodes, log=log)
        stack.callback(engine.close)
        policy = stack.enter_context(open_policy(config, inputs.loaded, launcher, inputs.code))
        stop_ids = inputs.loaded.stop_ids
        sampling = build_sampling(
            config, inputs.train, engine, inputs.code, inputs.encoder, stop_ids
        )
        sampling = replace(sampling, plan=replace(sampling.plan, group_size=samples))
        steps = list(_steps(config, sampling, policy, problems, on_progress))
    return _summarize(config, steps, samples)


def default_problems(config: Config) -> int:
    """Return the number of problems of about four steps, at least 8 and at most MAX_PROBLEMS."""
    return max(8, min(4 * config.rollout.prompts_per_step, MAX_PROBLEMS))


def _bin_of(rate: float) -> int:
    """Return the bin of a pass rate: 0 for never, 1 to BINS, and BINS + 1 for always.

    A rate on a border counts in the bin above.
    """
    if rate == 0:
        return 0
    return BINS + 1 if rate == 1 else 1 + int(rate * BINS)


def pass_rate_histogram(correct: Sequence[int], wrong: Sequence[int]) -> list[PassRates]:
    """Count problems by pass rate, with intervals of their fractions."""
    rates = [c / (c + w) for c, w in zip(correct, wrong, strict=True)]
    width = 100 // BINS
    names = ["never", *(f"{i * width} to {(i + 1) * width} %" for i in range(BINS)), "always"]
    bins = [_bin_of(rate) for rate in rates]
    histogram = []
    for i, name in enumerate(names):
        inside = [float(number == i) for number in bins]
        fraction = fmean(inside) if inside else 0.0
        low, high = mean_interval(inside) or (0.0, 1.0)
        histogram.append(PassRates(name, int(sum(inside)), fraction, low, high))
    return histogram


@dataclass(frozen=True)
class Check:
    """One value of a probe, and the same value measured in a run's first steps."""

    name: str
    probe: float
    measured: float

    @property
    def ratio(self) -> float:
        """The probe's value over the measured one; 1 if both are 0."""
        if self.probe == self.measured:
            return 1.0
        if self.measured:
            return self.probe / self.measured
        return float("inf")

    @property
    def is_close(self) -> bool:
        """Return True if the two values differ by at most TOLERANCE."""
        return abs(self.ratio - 1) <= TOLERANCE


def compare_with_run(probe: Probe, run: RunDirectory, *, steps: int = FIRST_STEPS) -> list[Check]:
    """Compare a probe with the means of a run's first steps.

    Raises DataError for a run without a finished step, or that judged nothing in these.
    """
    rows = [row for row in read_metrics(run.metrics) if 0 < row["step"] <= steps]
    if not rows:
        raise DataError(
            f"{run.path} has finished no step, so there is nothing to compare the probe with"
        )

    def total(*names: str) -> float:
        return sum(row.get(name) or 0.0 for row in rows for name in names)

    undecided = ("rollout/groups_excess", "rollout/groups_aborted", "rollout/groups_stale")
    decided = total("rollout/groups_generated") - total(*undecided)
    if not decided:
        raise DataError(
            f"{run.path} has judged no group in its steps up to {steps}, so there is nothing to"
            " compare the probe with; name a run that samples"
        )
    generate_s = total("time/generate_s")
    update_s = total("time/update_s", "time/old_logprobs_s")
    waited_s = 0.0
    for row in rows:
        # a batch that was sampled during updates: the step waits only for the rest of it
        waited_s += row.get("time/trainer_idle_s", row.get("time/generate_s")) or 0.0
    count = len(rows)
    load_s = total("time/load_weights_s")
    tokens = total("rollout/tokens_in_minibatches")
    pairs: list[tuple[str, float | None, float]] = [
        (
            "keep rate",
            probe.expected_keep_rate or probe.kept,
            total("rollout/groups_trained") / decided,
        ),
        ("accuracy", probe.accuracy, total("reward/accuracy") / count),
        ("groups per step", probe.groups_per_step, decided / count),
        (
            "tokens per response",
            probe.response_tokens,
            total("rollout/response_tokens_mean") / count,
        ),
        ("truncated", probe.truncated, total("rollout/truncated_fraction") / count),
        ("generated tokens/s", probe.tokens_per_s, total("rollout/tokens_generated") / generate_s),
        ("updated tokens/s", probe.update_tokens_per_s, tokens / update_s if update_s else 0.0),
        ("generation, s per step", probe.generate_s, generate_s / count),
        ("update, s per step", probe.update_s, update_s / count),
        ("step, s", probe.step_s, (load_s + waited_s + update_s) / count),
        (
            "peak memory, GiB",
            probe.peak_memory_gib,
            max(row.get("time/peak_memory_gib", 0.0) for row in rows),
        ),
    ]
    return [Check(name, value, measured) for name, value, measured in pairs if value is not None]


@dataclass(frozen=True)
class _Step:
    """The result of one step of a probe."""

    batch: Batch
    load_s: float
    generate_s: float
    trained_tokens: int  # 0 if it made no update
    update_s: float


def _steps(
    config: Config,
    sampling: Sampling,
    policy: TrainablePolicy,
    problems: int,
    on_progress: Callable[[int, int], None],
) -> Iterator[_Step]:
    """Make the run's steps, MAX_UPDATES with an update, until `problems` problems are decided."""
    stats = ProblemStats()
    decided = 0
    step = 0
    options = config.dynamic_sampling
    size = config.rollout.group_size
    seed = config.train.seed
    while decided < problems:
        step += 1
        started = time.perf_counter()
        sampling.sync_weights(policy, version=min(step - 1, MAX_UPDATES))
        load_s = time.perf_counter() - started
        sampling.sampler.max_groups_per_step = min(config.max_groups_per_step, problems - decided)
        selector = make_selector(options, stats, step=step, group_size=size, seed=seed)
        started = time.perf_counter()
        batch = collect(sampling, step=step, selector=selector)
        generate_s = time.perf_counter() - started
        stats.record((group for group, _ in batch.decided), step=step)
        decided += len(batch.decided)
        trained_tokens = 0
        update_s = 0.0
        if step <= MAX_UPDATES:
            sampling.drop_weights()
            trained_tokens, update_s = _update(config, policy, batch, step=step)
        yield _Step(batch, load_s, generate_s, trained_tokens, update_s)
        on_progress(decided, problems)


def _update(
    config: Config, policy: TrainablePolicy, batch: Batch, *, step: int
) -> tuple[int, float]:
    """Trained tokens and seconds of a step's updates; 0 if the batch has no group to train on."""
    started = time.perf_counter()
    samples = estimate_advantages(batch.groups, policy, config, step=step)
    if not samples:
        return 0, 0.0
    for minibatch in prepare_updates(samples, policy, config, step=step):
        policy.update(minibatch, step=step)
    return sum(sample.num_trained_tokens for sample in samples), time.perf_counter() - started


def _summarize(config: Config, steps: Sequence[_Step], samples: int) -> Probe:
    import torch

    decided = [pair for step in steps for pair in step.batch.decided]
    groups = [group for group, _ in decided]
    rollout = config.rollout
    lengths = [generation.num_sampled for group in groups for generation in group.generations]
    rates = _pass_rates(config, groups, samples)
    kept_fraction = fmean([outcome == "trained" for _, outcome in decided])
    keep_rate = kept_fraction
    if rates["expected_keep_rate"] is not None:
        keep_rate = rates["expected_keep_rate"]
    most = config.max_groups_per_step
    groups_per_step = min(most, rollout.prompts_per_step / keep_rate) if keep_rate > 0 else most
    truncated = [fmean([g.finish == "length" for g in group.generations]) for group in groups]
    # a short batch has few sequences at a time
    full = [step for step in steps if not step.batch.shortfall] or steps
    num_tokens = sum(step.batch.num_generated_tokens for step in full)
    tokens_per_s = num_tokens / sum(step.generate_s for step in full)
    generate_s = groups_per_step * rollout.group_size * fmean(lengths) / tokens_per_s
    load_s = fmean([step.load_s for step in steps[: MAX_UPDATES + 1]])
    update_tokens_per_s = None
    update_s = None
    if trained_tokens := sum(step.trained_tokens for step in steps):
        update_tokens_per_s = trained_tokens / sum(step.update_s for step in steps)
        trained_groups = [group for step in steps for group in step.batch.groups]
        trained = [g.num_sampled for group in trained_groups for g in group.generations]
        responses = rollout.prompts_per_step * rollout.group_size
        update_s = responses * fmean(trained) / update_tokens_per_s
    history = MetricHistory()  # without the updates
    for number, step in enumerate(steps, start=1):
        history.add({"step": number} | batch_metrics(step.batch, ()))
    on_gpu = config.train.device == "cuda" and not config.uses_trainer_group
    return Probe(
        problems=len(groups),
        samples=samples,
        group_size=rollout.group_size,
        kept=kept_fraction,
        groups_per_step=groups_per_step,
        response_tokens=fmean(lengths),
        response_quantiles={f"{q:.0%}": float(np.quantile(lengths, q)) for q in LENGTH_QUANTILES},
        truncated=fmean(truncated),
        truncated_interval=mean_interval(truncated),
        verifier_errors=sum(group.num_errors for group in groups),
        tokens_per_s=tokens_per_s,
        load_s=load_s,
        update_tokens_per_s=update_tokens_per_s,
        generate_s=generate_s,
        update_s=update_s,
        step_s=None if update_s is None else step_seconds(config, load_s, generate_s, update_s),
        peak_memory_gib=torch.cuda.max_memory_allocated() / GIB if on_gpu else peak_memory_gib(),
        findings=active_findings(history, config),
        **rates,
    )


def step_seconds(config: Config, load_s: float, generate_s: float, update_s: float) -> float:
    """Return the seconds of a step from those of its phases.

    On hardware that engines and the trainer share, phases that overlap take longer than here.
    """
    if config.samples_ahead:
        return load_s + max(generate_s, update_s)
    return load_s + generate_s + update_s


def _pass_rates(config: Config, groups: Sequence[Group], samples: int) -> dict[str, Any]:
    """Return the fields of a probe that come from right and wrong verdicts."""
    verdicts = [[v for v in group.verdicts if v.error is None] for group in groups]
    counts = [(sum(bool(v.correct) for v in valid), len(valid)) for valid in verdicts if valid]
    is_binary = all(v.correct is not None for valid in verdicts for v in valid)
    if not counts or not is_binary:
        names = ("accuracy", "accuracy_interval", "expected_keep_rate", "expected_keep_interval")
        return dict.fromkeys(names) | {"histogram": []}
    correct = [c for c, _ in counts]
    wrong = [n - c for c, n in counts]
    size = config.rollout.group_size
    accuracies = [c / n for c, n in counts]
    expected: float = 1.0
    interval: Interval | None = (1.0, 1.0)
    if config.dynamic_sampling.enabled:
        chances = measured_chances(correct, wrong, size)
        expected = fmean(chances)
        interval = mean_interval(chances) if samples >= size else None
    return {
        "accuracy": fmean(accuracies),
        "accuracy_interval": mean_interval(accuracies),
        "histogram": pass_rate_histogram(correct, wrong),
        "expected_keep_rate": expected,
        "expected_keep_interval": interval,
    }
