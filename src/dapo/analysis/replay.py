"""Trains a step of a run again from its stored responses, in memory, to find the policy that each update began with.

A step is a function of the policy before it and of its batch, so the update before which a ratio is wanted is reached
from the newest checkpoint before the step, or from the initial model. Metrics of the replayed updates are compared with
those that the run has logged: that they are equal is the evidence that the policy is the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dapo.analysis.stored_groups import (
    RunProblems,
    StoredGroup,
    read_groups,
    saved_steps,
    stored_steps,
    with_problem,
    with_prompt_ids,
)
from dapo.config import Config
from dapo.core.errors import CheckpointError, DataError
from dapo.data.prompts import PromptEncoder
from dapo.policy.policy import Policy
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import metrics_by_step
from dapo.training.assemble.inputs import read_model
from dapo.training.assemble.resolve import device_of
from dapo.training.rollout_metrics import mean_of_updates
from dapo.training.updates import estimate_advantages, prepare_updates
from dapo.types import Sample

_NOT_COMPARED = ("time/", "rollout/engine_logprob_gap_mean", "rollout/engine_logprob_gap_max")
"""Metrics of the machine, and of log-probabilities that a table keeps in float32 whatever the engine's type was."""


@dataclass(frozen=True)
class ReplayPlan:
    """Where a replay begins; made without loading anything."""

    start: int
    """The step of the checkpoint that it begins from; 0: the initial model."""
    step: int
    """The step that it ends with."""


@dataclass(frozen=True)
class ReplayedUpdate:
    """An optimizer update's samples, with what the policies that its loss compares gave to each token."""

    samples: Sequence[Sample]
    """With `old_logprobs`: pi_old."""
    logprobs: Sequence[Sequence[float]]
    """Of the policy that the update begins with."""
    reference: Sequence[Sequence[float]] | None
    """Of the policy that the KL term keeps near, where the loss has one."""


@dataclass(frozen=True)
class Evidence:
    """How metrics of the replayed steps compare with the logged ones."""

    compared: int
    """The number of values."""
    equal: int
    """Those that are equal to the last bit."""
    largest_difference: float
    """The largest relative difference."""


def plan_replay(directory: RunDirectory, config: Config, step: int) -> ReplayPlan:
    """Where the replay of a step can begin. Raises CheckpointError that says what is missing and what keeps it."""
    if config.dynamic_sampling.weights != "none":
        raise CheckpointError(
            "the groups' loss weights (dynamic_sampling.weights=inverse) are in no file, so the step cannot be replayed"
        )
    needs_engine = config.loss.engine_correction is not None or config.loss.old_logprobs == "engine"
    if needs_engine and config.log.rollouts == "no-logprobs":
        raise CheckpointError(
            "the loss reads the engine's log-probabilities, which the run has not kept; log.rollouts=all keeps them"
        )
    stored = set(stored_steps(directory))
    begins = [0, *(saved for saved in saved_steps(directory) if saved < step)]
    for start in reversed(begins):
        if stored.issuperset(range(start + 1, step + 1)):
            return ReplayPlan(start, step)
    lost = max(set(range(begins[-1] + 1, step + 1)) - stored)
    raise CheckpointError(
        f"the newest checkpoint before step {step} is of step {begins[-1]} (0: the initial model), and the responses "
        f"of step {lost}, which lead from there, are gone; train.keep_checkpoints={step} with train.save_every=1 keeps "
        "a checkpoint before each step, and log.rollouts=all the responses of every step"
    )


class Replay:
    """A run's policy, trained again on stored responses."""

    def __init__(
        self, directory: RunDirectory, config: Config, plan: ReplayPlan, *, log: Callable[[str], None]
    ) -> None:
        """Load the model as it was at the plan's start. Raises ConfigError, CheckpointError or DataError."""
        self._directory, self._config, self._plan, self._log = directory, config, plan, log
        loaded = read_model(config, device_of(config))
        self.encoder = PromptEncoder(loaded.tokenizer, config.data)
        self._problems = RunProblems(config)
        self._policy = Policy(config, loaded)
        if plan.start:
            self._policy.load(directory.checkpoints.find(plan.start))
        self._logged = metrics_by_step(directory.metrics)
        self._compared: list[tuple[float, float]] = []

    def update(self, number: int) -> ReplayedUpdate:
        """Replay up to the update `number`, from 0, of the plan's step, and to the end of that step."""
        for step in range(self._plan.start + 1, self._plan.step):
            self._log(f"replay step {step}")
            self._train(step, self._updates_of(step))
        step = self._plan.step
        self._log(f"replay step {step}")
        updates = self._updates_of(step)
        metrics = [self._policy.update(minibatch, step=step) for minibatch in updates[:number]]
        found = self._scored(updates[number], step=step)
        metrics += [self._policy.update(minibatch, step=step) for minibatch in updates[number:]]
        self._compare(step, metrics)
        return found

    def evidence(self) -> Evidence:
        """How the metrics of the replayed steps compare with the logged ones."""
        differences = [abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in self._compared if a != b]
        return Evidence(len(self._compared), len(self._compared) - len(differences), max(differences, default=0.0))

    def _updates_of(self, step: int) -> list[list[Sample]]:
        groups = [each for each in read_groups(self._directory, step) if each.outcome == "trained"]
        stored = [with_prompt_ids(self._found(each), self.encoder).group for each in groups]
        samples = estimate_advantages(stored, self._policy, self._config, step=step)
        return prepare_updates(samples, self._policy, self._config, step=step)

    def _found(self, stored: StoredGroup) -> StoredGroup:
        problem = self._problems.find(stored)
        return stored if problem is None else with_problem(stored, problem)

    def _train(self, step: int, updates: Sequence[Sequence[Sample]]) -> None:
        self._compare(step, [self._policy.update(minibatch, step=step) for minibatch in updates])

    def _scored(self, minibatch: Sequence[Sample], *, step: int) -> ReplayedUpdate:
        """What the policies say of an update's tokens; in a step's first update pi_old is the policy itself."""
        now = self._policy.record_old_logprobs(minibatch)
        logprobs = [sample.old_logprobs or () for sample in now]
        with_old = [
            sample if sample.old_logprobs is not None else replace(sample, old_logprobs=row)
            for sample, row in zip(minibatch, logprobs, strict=True)
        ]
        has_kl = self._config.loss.has_kl_term
        reference = self._policy.reference_logprobs(minibatch, step=step) if has_kl else None
        return ReplayedUpdate(with_old, logprobs, reference)

    def _compare(self, step: int, updates: Sequence[Mapping[str, float]]) -> None:
        logged = self._logged.get(step, {})
        for name, value in mean_of_updates(updates).items():
            if not name.startswith(_NOT_COMPARED) and isinstance(logged.get(name), float | int):
                self._compared.append((value, logged[name]))


def initial_or_saved(plan: ReplayPlan) -> str:
    """Where a replay begins, in words."""
    return "the initial model" if plan.start == 0 else f"the checkpoint of step {plan.start}"


CannotReplay = (CheckpointError, DataError)
"""What says that a step cannot be replayed: its checkpoints, responses, problems or prompts are gone."""
