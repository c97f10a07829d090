"""Runs without a model: a scripted engine, and a policy that only counts its updates."""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.scripted_engine import ScriptedEngine
from dapo.config import dump_config
from dapo.data.stream import ProblemStream
from dapo.engines.checked import CheckedEngine
from dapo.engines.continuation import ContinuingEngine
from dapo.engines.engine import RolloutEngine
from dapo.runs.console import ProgressDisplay
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import JsonlSink
from dapo.runs.sinks import Tracker
from dapo.sampling.batch import Sampling, sampling_plan
from dapo.sampling.continuous import ContinuousSampling
from dapo.sampling.dynamic_sampling import DynamicSampler
from dapo.training.checkpointing import restore
from dapo.training.state import Run, TrainablePolicy
from dapo.training.train import train
from dapo.types import Problem, Sample
from helpers.async_runs import async_config
from helpers.fake_rollout import END, FakeEncoder, FakeJudge, problems, random_script


@dataclass
class CountingPolicy:
    """Its weights are the number of its updates."""

    before_updates: Callable[[int], None] = lambda updates: None
    """Called with the number of updates so far, before the log-probabilities of a step are
    recorded.
    """
    on_update: Callable[[int], None] = lambda updates: None
    """Called with the number of an update while it is made."""
    updates: int = 0
    trained: list[list[Sample]] = field(default_factory=list)
    skipped_in_a_row: int = 0

    def weights(self, *, version: int) -> "CountingPolicy":
        return self

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()

    def record_old_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        self.before_updates(self.updates)
        return [replace(sample, old_logprobs=sample.engine_logprobs) for sample in samples]

    def response_kl(self, samples: Sequence[Sample], *, step: int) -> list[float]:
        assert 2 * (step - 1) == self.updates  # two updates a step, none of this one
        return [float(len(sample.response_ids)) for sample in samples]

    def update(self, minibatch: Sequence[Sample], *, step: int) -> dict[str, float]:
        self.on_update(self.updates + 1)
        self.updates += 1
        self.trained.append(list(minibatch))
        return {"optim/skipped": 0.0}

    def save(self, directory: Path) -> None:
        (directory / "updates").write_text(str(self.updates))

    def snapshot(self) -> Callable[[Path], None]:
        return copy.copy(self).save

    def load(self, directory: Path) -> None:
        self.updates = int((directory / "updates").read_text())


SCRIPTED = (
    "train.num_steps=4",
    "train.minibatch_groups=2",
    "train.save_every=0",
    "rollout.max_response_tokens=12",
    "dynamic_sampling.max_groups_per_step=40",
    "data.eval=null",
)


def scripted_run(
    path: Path,
    *overrides: str,
    engine: RolloutEngine | None = None,
    policy: TrainablePolicy | None = None,
    of: Sequence[Problem] = (),
    change: Callable[[Run], None] = lambda training_run: None,
) -> Run:
    """A run `of` problems to its end, or on from where it stands; one step off, unless the
    overrides say otherwise.
    """
    config = async_config(*SCRIPTED, *overrides)
    run = (
        RunDirectory(path) if path.exists() else RunDirectory.create(path, dump_config(config), {})
    )
    checkpoint = run.checkpoints.latest(warn=print)
    training_run = Run(
        config=config,
        sampling=Sampling(
            stream=ProblemStream(of or problems(60), seed=0),
            engine=engine or ScriptedEngine(random_script),
            judge=FakeJudge(),
            sampler=DynamicSampler(
                prompts_per_step=config.rollout.prompts_per_step,
                max_groups_per_step=config.max_groups_per_step,
            ),
            encoder=FakeEncoder(),
            plan=sampling_plan(config.rollout, (END,), seed=config.train.seed),
            by_load=not config.rollout.is_reproducible,
        ),
        policy=policy or CountingPolicy(),
        tracker=Tracker([JsonlSink(run.metrics)], ProgressDisplay(config.train.num_steps)),
        directory=run,
    )
    if config.samples_ahead:
        training_run.sampling = ContinuousSampling.of(
            training_run.sampling, max_staleness=config.max_staleness, lookahead=config.lookahead
        )
    change(training_run)
    if not isinstance(training_run.sampling.engine, CheckedEngine):
        training_run.sampling.engine = CheckedEngine(training_run.sampling.engine, vocabulary=10)
    training_run.sampling.engine = ContinuingEngine(training_run.sampling.engine)
    if checkpoint:
        restore(training_run, checkpoint)
    try:
        train(training_run)
    finally:
        training_run.checkpoints.join()
        training_run.tracker.close()
        assert not [
            thread for thread in threading.enumerate() if thread.name.startswith("dapo-batch")
        ]
    return training_run
