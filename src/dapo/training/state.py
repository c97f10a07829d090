"""A training run: its configuration, its parts, and its progress."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from dapo.config import Config
from dapo.engines.engine import RolloutEngine
from dapo.environments.agents.pool import AgentPool
from dapo.environments.pool import EnvironmentPool
from dapo.evaluation.scores import EvaluationPlan
from dapo.processes.output import WorkerOutput
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import read_metrics
from dapo.runs.sinks import Tracker
from dapo.sampling.batch import Sampling, WeightOwner, collect
from dapo.sampling.continuous import PrefetchedBatch
from dapo.sampling.problem_stats import ProblemStats
from dapo.sampling.queue import Batch
from dapo.sampling.second_verifier import Audit
from dapo.sampling.selection import ProblemSelector, make_selector
from dapo.training.checkpoint_writer import CheckpointWriter
from dapo.training.demonstrations import Answer
from dapo.training.rules.all_rules import LiveRules
from dapo.training.signals import StopRequest
from dapo.training.step_timer import StepTimer, profiled_step
from dapo.training.updates import LogprobSource, estimate_advantages, prepare_updates
from dapo.types import Problem, Sample

T = TypeVar("T")
_SHOWN_CHARS = 80


class TrainablePolicy(LogprobSource, WeightOwner, Protocol):
    """The methods of a policy that the loop calls."""

    @property
    def skipped_in_a_row(self) -> int: ...

    def update(self, minibatch: Sequence[Sample], *, step: int) -> dict[str, float]: ...

    def save(self, directory: Path) -> None: ...

    def snapshot(self) -> Callable[[Path], None]: ...

    def load(self, directory: Path) -> None: ...


@dataclass
class TrainState:
    """The progress of a run; a checkpoint holds it with stream, sampler and policy."""

    step: int = 0  # finished training steps, which is also the version of the policy's weights
    tokens_generated: int = 0
    tokens_trained: int = 0
    wall_s: float = 0.0
    entropy_collapse_steps: int = 0  # steps in a row in which the policy was nearly deterministic
    empty_steps: int = 0  # steps in a row that had no group to train on
    pending_metrics: dict[str, float] | None = field(default_factory=dict)
    """Metrics of `step`, which are written after its evaluation; None once they are."""
    accuracy: float | None = None  # accuracy in the evaluation after `step`, if there was one
    # the next step's batch, if the schedule samples it before the step
    prefetched_batch: PrefetchedBatch | None = None
    updates: list[Mapping[str, float]] = field(default_factory=list, compare=False)
    """The metrics of each finished update of step `step + 1`."""
    # whether a checkpoint of it is written, or being written
    is_saved: bool = field(default=False, compare=False)
    # the moment at which the last batch had closed
    closed_at: float | None = field(default=None, compare=False)

    @property
    def is_new(self) -> bool:
        """True if the run has done nothing yet."""
        return self.step == 0 and self.pending_metrics is not None

    @property
    def is_consistent(self) -> bool:
        """True if no update of the next step has changed the policy of `step`."""
        return all(
            update["optim/skipped"] and update.get("critic/skipped", True)
            for update in self.updates
        )

    def advance(
        self, metrics: dict[str, float], *, tokens_generated: int, tokens_trained: int
    ) -> None:
        """Count one more step; its metrics are pending."""
        self.step += 1
        self.tokens_generated += tokens_generated
        self.tokens_trained += tokens_trained
        self.pending_metrics = metrics
        self.accuracy = None
        self.updates = []
        self.is_saved = False

    def state_dict(self) -> dict[str, float]:
        """Return the counts as JSON values."""
        names = (
            "step",
            "tokens_generated",
            "tokens_trained",
            "wall_s",
            "entropy_collapse_steps",
            "empty_steps",
        )
        return {name: getattr(self, name) for name in names}


@dataclass
class Run:
    """The parts and the state of a run."""

    config: Config
    sampling: Sampling
    policy: TrainablePolicy
    tracker: Tracker
    directory: RunDirectory
    held_out: Sequence[Problem] = ()
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """The tokens that each demonstration's id stands for (`schedule: supervised`)."""
    eval_plan: EvaluationPlan | None = None
    problem_stats: ProblemStats = field(default_factory=ProblemStats)
    stop: StopRequest = field(default_factory=StopRequest)
    state: TrainState = field(default_factory=TrainState)
    timer: StepTimer = field(default_factory=StepTimer)  # seconds per phase of the step at hand
    audit: Audit | None = None  # the second verifier; None in a run without one
    # rules over the last steps; None before this process's first metrics
    live_rules: LiveRules | None = None
    provenance: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options, versions, processor and data of this process (`runs/manifest.py`), stored in each
    checkpoint.
    """
    is_solved: bool = False  # whether the run has ended because its problems are solved
    # whether the message after a signal says how to continue; False: the caller does
    names_continuation: bool = True
    # the output of the verifiers; None where it goes to the console
    verifier_output: WorkerOutput | None = None
    # the processes that answer turns; None without an environment
    environment: EnvironmentPool | AgentPool | None = None
    checkpoints: CheckpointWriter = field(init=False)

    def __post_init__(self) -> None:
        self.checkpoints = CheckpointWriter(self.directory, log=self.tracker.message)

    @property
    def engine(self) -> RolloutEngine:
        return self.sampling.engine

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the remaining steps; the first step of a run is 1."""
        for step in range(self.state.step + 1, self.config.train.num_steps + 1):
            if self.config.train.is_budget_spent(self.state.tokens_generated):
                return
            yield step

    @property
    def is_complete(self) -> bool:
        """True if the run has finished its last step."""
        train = self.config.train
        state = self.state
        return state.step >= train.num_steps or train.is_budget_spent(state.tokens_generated)

    @contextmanager
    def timed(self, step: int) -> Iterator[None]:
        """Time the block as one step; write a trace of it if `profile.steps` names the step."""
        with profiled_step(
            step, self.config.profile.steps, self.directory.profile, self.tracker.message
        ) as self.timer:
            yield

    @contextmanager
    def phase(self, name: str, *, total: int = 0) -> Iterator[Callable[..., None]]:
        """Show and time a phase of the step; yield its progress function (done, total, note)."""
        self.tracker.phase(name, 0, total)
        with self.timer.phase(name):
            yield partial(self.tracker.phase, name)

    def track(self, name: str, items: Sequence[T]) -> Iterator[T]:
        """Yield the items one after another, timed and shown as one phase."""
        with self.phase(name, total=len(items)) as on_progress:
            for i, item in enumerate(items):
                on_progress(i, len(items))
                yield item

    def sample_batch(self, step: int, selector: ProblemSelector | None) -> Batch:
        """Algorithm 1, lines 2 and 4 to 8: collect the groups of a step, and show the progress."""
        with self.phase("generate", total=self.config.rollout.prompts_per_step) as on_progress:
            return collect(
                self.sampling,
                step=step,
                selector=selector,
                on_progress=on_progress,
                check=self.stop.check,
            )

    def estimate_advantages(self, batch: Batch, *, step: int) -> list[Sample]:
        """Algorithm 1, line 9: turn a batch into samples with advantages (`updates.py`)."""
        return estimate_advantages(
            batch.groups, self.policy, self.config, step=step, phase=self.phase
        )

    def prepare_updates(self, samples: Sequence[Sample], *, step: int) -> list[list[Sample]]:
        """Algorithm 1, line 10: cut a step into minibatches, and record pi_old of Eq. 6."""
        return prepare_updates(samples, self.policy, self.config, step=step, phase=self.phase)

    def begin_sampling(self, step: int) -> ProblemSelector | None:
        """Prepare a step's sampling: load the newest weights; return what selects the problems.

        Call it from the thread that trains, because the loop changes the history while another
        thread samples.
        """
        self.sync_engine()
        return make_selector(
            self.config.dynamic_sampling,
            self.problem_stats,
            step=step,
            group_size=self.config.rollout.group_size,
            seed=self.config.train.seed,
        )

    def sync_engine(self) -> None:
        """Load the policy's weights into the engine, unless it has them."""
        with self.phase("load_weights"):
            self.sampling.sync_weights(self.policy, version=self.state.step)

    def keep_verifier_output(self) -> None:
        """Move output of verifiers and environment to logs/verifier.log; show its first line."""
        path = self.directory.verifier_log
        audit = None if self.audit is None else self.audit.output
        environment = None if self.environment is None else self.environment.output
        outputs = (
            ("verifier", self.verifier_output),
            ("verifier", audit),
            ("agent" if self.config.runs_agent else "environment", environment),
        )
        for name, output in outputs:
            is_first = not path.exists()
            if output is not None:
                new = output.move_to(path)
                if new and is_first:
                    first_line = new.decode(errors="replace").strip().partition("\n")[0]
                    self.tracker.message(
                        f"the {name} prints: {first_line[:_SHOWN_CHARS]!r}; kept in {path}"
                    )

    def warn(self, metrics: Mapping[str, float]) -> int:
        """Report new findings on the last finished step; return the number of active findings.

        The first call reads the metrics of earlier processes, so that no finding is reported twice.
        """
        if self.live_rules is None:
            path = self.directory.metrics
            self.live_rules = LiveRules(self.config, read_metrics(path) if path.exists() else ())
        new, count = self.live_rules.add({"step": self.state.step, **metrics})
        for finding in new:
            self.tracker.message(f"step {self.state.step}: {finding.one_line()}")
        return count
