"""`make simulate ARGS=--oversampling`: what `dynamic_sampling.oversampling` saves in time and costs
in tokens, with the real controller and an engine that counts seconds (async_simulation.py).

Both runs of a row have the same problems, signals and lengths: their batches are equal, and only
what is in flight differs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, stdev
from typing import Any

from benchmarks.async_simulation import END, TOKENS, ClockedEngine, Encoder, Judge
from benchmarks.simulation_fakes import KEEP_RATE, LengthDistribution
from dapo.config.options import GPU_OVERSAMPLING
from dapo.data.stream import ProblemStream
from dapo.engines.continuation import ContinuingEngine
from dapo.sampling.batch import Sampling, SamplingPlan, collect
from dapo.sampling.dynamic_sampling import DynamicSampler
from dapo.types import Problem

STANDARD_NORMAL = NormalDist()
PROBLEMS = 17_000
LIMIT = 20480
UNCOUNTED = 2
"""First steps, in which the keep rate is learned."""


class SeedLengths(LengthDistribution):
    """The same distribution, of the seed itself: it is drawn millions of times."""

    def length(self, seed: int) -> int:
        uniform = (seed % 2**53 + 0.5) / 2**53
        drawn = self.median * math.exp(self.sigma * STANDARD_NORMAL.inv_cdf(uniform))
        return max(1, min(self.limit, round(drawn)))


@dataclass(frozen=True)
class Setting:
    """An engine and the lengths of its responses."""

    name: str
    step_s: float  # of a decode step without sequences
    sequence_s: float  # in addition, of each sequence
    slots: int | None = None
    group_size: int = 16
    median_tokens: float = 5000.0
    limit: int = LIMIT
    oversampling: float = GPU_OVERSAMPLING


POOL = Setting("a large pool", 0.006, 0.3e-6)
CPU = {"step_s": 0.010, "sequence_s": 1e-3, "group_size": 8, "median_tokens": 300.0, "limit": 1024}
"""As the quickstart's model on two cores, with longer responses."""


@dataclass(frozen=True)
class Case:
    """A row of a table."""

    setting: Setting
    prompts: int
    keep_rate: float = KEEP_RATE
    oversampling: float | None = None  # None: the setting's
    # the paper's batch needs few steps, a small one many for the same precision
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", UNCOUNTED + max(2, min(48, 3072 // self.prompts)))


@dataclass(frozen=True)
class Outcome:
    """What the counted steps of a run took."""

    seconds: Sequence[float]
    tokens: Sequence[int]
    trained: Sequence[Sequence[int]]
    """The problems of each batch, by their position in the stream."""

    @property
    def mean_s(self) -> float:
        return fmean(self.seconds)


def simulate(case: Case, oversampling: float) -> Outcome:
    """Sample the batches of a case with `schedule: sync`."""
    setting = case.setting
    engine = ClockedEngine(
        SeedLengths(setting.limit, setting.median_tokens),
        step_s=setting.step_s,
        sequence_s=setting.sequence_s,
        slots=setting.slots,
    )
    sampling = Sampling(
        stream=ProblemStream([Problem(str(i), "", "") for i in range(PROBLEMS)], seed=0),
        engine=ContinuingEngine(engine),
        judge=Judge(case.keep_rate),
        sampler=DynamicSampler(
            prompts_per_step=case.prompts, max_groups_per_step=10 * case.prompts
        ),
        encoder=Encoder(),
        plan=SamplingPlan(setting.group_size, setting.limit // TOKENS + 1, 1.0, (END,), 0),
        oversampling=oversampling,
        slots=setting.slots,
    )
    seconds = []
    tokens = []
    trained = []
    for step in range(1, case.steps + 1):
        engine.load_weights(None, step - 1)  # type: ignore[arg-type]
        before = engine.seconds
        batch = collect(sampling, step=step)
        seconds.append(engine.seconds - before)
        tokens.append(batch.num_generated_tokens)
        trained.append([group.id for group in batch.groups])
    return Outcome(seconds[UNCOUNTED:], tokens[UNCOUNTED:], trained)


def rows(cases: Sequence[Case]) -> Iterator[str]:
    """Yield the table's rows, each when it is known."""
    yield (
        "| engine | prompts | keep rate | expected number in flight, s per step | with"
        " oversampling, s | ratio | more tokens |"
    )
    yield "|" + " --- |" * 7
    known: dict[tuple[Any, ...], Outcome] = {}
    for case in cases:
        key = (case.setting.name, case.prompts, case.keep_rate)
        if key not in known:
            known[key] = simulate(case, 0.0)
        before = known[key]
        share = case.setting.oversampling if case.oversampling is None else case.oversampling
        after = simulate(case, share) if share else before
        assert before.trained == after.trained, "batches are a function of the stream"
        noise = stdev(before.seconds) / len(before.seconds) ** 0.5
        name = case.setting.name
        if case.oversampling is not None:
            name += f", oversampling {case.oversampling:g}"
        yield (
            f"| {name} | {case.prompts:,} | {case.keep_rate:.2f} |"
            f" {before.mean_s:,.0f} ± {noise:,.0f} | {after.mean_s:,.0f} |"
            f" {after.mean_s / before.mean_s:.2f} |"
            f" {sum(after.tokens) / sum(before.tokens) - 1:+.1%} |"
        )


SIZES = [
    Case(POOL, prompts, keep_rate)
    for prompts in (32, 128, 512)
    for keep_rate in (0.2, KEEP_RATE, 0.5, 0.9)
]
# minutes for each row
LARGE = [Case(POOL, 2048, keep_rate) for keep_rate in (0.9, 0.5, KEEP_RATE, 0.2)]
ENGINES = [
    Case(setting, prompts)
    for setting, sizes in (
        (Setting("a large pool, median 2,000", 0.006, 0.3e-6, median_tokens=2000.0), (512,)),
        (Setting("a pool of 4,096 slots", 0.007, 1.25e-6, 4096), (128, 512)),
        (Setting("a GPU, no limit", 0.012, 20e-6), (32, 128)),
        (Setting("a GPU, 1,024 slots", 0.007, 20e-6, 1024), (32, 128)),
        (Setting("a GPU, 256 slots", 0.012, 20e-6, 256), (32, 128)),
        (Setting("a CPU, 64 slots", slots=64, oversampling=0.0, **CPU), (8,)),  # type: ignore[arg-type]
    )
    for prompts in sizes
]
SHARES = [
    Case(setting, prompts, oversampling=share)
    for setting, prompts in (
        (POOL, 32),
        (Setting("a CPU, 64 slots", slots=64, **CPU), 8),  # type: ignore[arg-type]
        (Setting("a CPU, 256 slots", slots=256, **CPU), 8),  # type: ignore[arg-type]
    )
    for share in (0.1, 0.25, 0.5)
]
TABLES: Mapping[str, Sequence[Case]] = {
    "sizes": SIZES,
    "engines": ENGINES,
    "shares": SHARES,
    "large": LARGE,
}
