"""What is plugged into the training loop, and how far it has come."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dapo.data.prompts import Encoder
from dapo.data.stream import ProblemStream
from dapo.engines.engine import RolloutEngine, WeightSource
from dapo.evaluation.scores import EvaluationPlan
from dapo.rewards.judge import Judge
from dapo.telemetry.sinks import Tracker
from dapo.training.checkpoint_store import CheckpointWriter
from dapo.training.prefetched_batch import PrefetchedBatch
from dapo.training.problem_stats import ProblemStats
from dapo.training.rollout import DynamicSampler, SamplingPlan
from dapo.training.run_directory import RunDirectory
from dapo.training.signals import StopRequest
from dapo.types import Problem, Sample


class TrainablePolicy(Protocol):
    """What the loop needs of a policy."""

    def weights(self, *, version: int) -> WeightSource: ...

    def record_old_logprobs(self, samples: Sequence[Sample]) -> list[Sample]: ...

    @property
    def skipped_in_a_row(self) -> int: ...

    def update(self, minibatch: Sequence[Sample], *, step: int) -> dict[str, float]: ...

    def save(self, directory: Path) -> None: ...

    def snapshot(self) -> Callable[[Path], None]: ...

    def load(self, directory: Path) -> None: ...


@dataclass
class Run:
    """Everything that is plugged into the loop."""

    stream: ProblemStream
    engine: RolloutEngine
    judge: Judge
    policy: TrainablePolicy
    sampler: DynamicSampler
    encoder: Encoder
    plan: SamplingPlan
    tracker: Tracker
    directory: RunDirectory
    held_out: Sequence[Problem] = ()
    eval_plan: EvaluationPlan | None = None
    problem_stats: ProblemStats = field(default_factory=ProblemStats)
    stop: StopRequest = field(default_factory=StopRequest)
    checkpoints: CheckpointWriter = field(init=False)

    def __post_init__(self) -> None:
        """Checkpoints go into the run's directory, and their troubles to its tracker."""
        self.checkpoints = CheckpointWriter(self.directory, log=self.tracker.message)


@dataclass
class TrainState:
    """How far a run is: with stream, sampler and policy, all that a checkpoint holds."""

    step: int = 0
    """Finished training steps, which is also the version of the policy's weights."""
    tokens_generated: int = 0
    tokens_trained: int = 0
    wall_s: float = 0.0
    entropy_collapse_steps: int = 0
    """Steps in a row whose policy was all but deterministic (`divergence.MIN_ENTROPY`)."""
    unlogged: dict[str, float] | None = field(default_factory=dict)
    """Metrics of this step, or of the time before the first, that are not written yet: its evaluation is still due."""
    accuracy: float | None = None
    """Of this step's evaluation, if it had one."""
    prefetched_batch: PrefetchedBatch | None = None
    """The next step's batch, where the schedule samples it before the step."""
    is_saved: bool = field(default=False, compare=False)
    """A checkpoint of this very state has been written, or is being written."""
    is_consistent: bool = field(default=True, compare=False)
    """The policy is that of `step`: no update of the next one has changed it."""
    engine_version: int | None = field(default=None, compare=False)
    """Of the weights that the engine holds."""

    @property
    def is_new(self) -> bool:
        """Nothing has been done yet."""
        return self.step == 0 and self.unlogged is not None

    def advance(self, metrics: dict[str, float], *, tokens_generated: int, tokens_trained: int) -> None:
        """One more step is done, with metrics still to be logged."""
        self.step += 1
        self.tokens_generated += tokens_generated
        self.tokens_trained += tokens_trained
        self.unlogged, self.accuracy = metrics, None
        self.is_saved, self.is_consistent = False, True

    def state_dict(self) -> dict[str, float]:
        """JSON values."""
        return {
            "step": self.step,
            "tokens_generated": self.tokens_generated,
            "tokens_trained": self.tokens_trained,
            "wall_s": self.wall_s,
            "entropy_collapse_steps": self.entropy_collapse_steps,
        }
