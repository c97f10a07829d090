"""Trains a step of a run again from its stored responses, in memory, to recover the policy that
each update began with.

A step is a function of the policy before it and of its batch, so a replay reaches any update from
the newest checkpoint before the step, or from the initial model. It compares the metrics of the
replayed updates with the logged ones: equal metrics are the evidence that the policy is the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dapo.analysis.stored_groups import (
    RunProblems,
    read_groups,
    saved_steps,
    with_prompt_ids,
)
from dapo.config import Config
from dapo.core.errors import CheckpointError, DataError
from dapo.data.prompts import PromptEncoder
from dapo.policy.model import device_of
from dapo.policy.policy import Policy
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import metrics_by_step
from dapo.training.assemble.inputs import read_model
from dapo.training.rollout_metrics import mean_of_updates
from dapo.training.updates import estimate_advantages, prepare_updates
from dapo.types import Sample

_NOT_COMPARED = ("time/", "rollout/engine_logprob_gap_mean", "rollout/engine_logprob_gap_max")
"""Metrics of the machine, and of log-probabilities, which a table keeps in float32 for engines of
any type.
"""


@dataclass(frozen=True)
class ReplayPlan:
    """The steps of a replay, planned before a model is loaded."""

    start: int  # the step of the checkpoint that it starts from; 0: the initial model
    step: int  # the step that it ends with

    def describe(self) -> str:
        steps = (
            f"step {self.step} was"
            if self.start == self.step - 1
            else f"steps {self.start + 1} to {self.step} were"
        )
        start = "the initial model" if self.start == 0 else f"the checkpoint of step {self.start}"
        return f"{steps} trained again in memory from {start}, with the stored responses"


@dataclass(frozen=True)
class ReplayedUpdate:
    """An optimizer update's samples, with the log-probabilities of each policy that its loss
    compares.
    """

    samples: Sequence[Sample]  # the samples, with pi_old in `old_logprobs`
    # the log-probabilities of the policy that the update begins with
    logprobs: Sequence[Sequence[float]]
    reference: Sequence[Sequence[float]] | None
    """The log-probabilities of the KL term's reference; None if the loss has no such term."""


def plan_replay(directory: RunDirectory, config: Config, step: int) -> ReplayPlan:
    """Plan the replay of a step. Raises CheckpointError or DataError that names what is missing."""
    needs_engine = config.loss.engine_correction is not None or config.loss.old_logprobs == "engine"
    if needs_engine and config.log.rollouts == "no-logprobs":
        raise CheckpointError(
            "the loss reads the engine's log-probabilities, which the run has not kept;"
            " log.rollouts=all keeps them"
        )
    stored = set(directory.rollout_tables())
    begins = [0, *(saved for saved in saved_steps(directory) if saved < step)]
    for start in reversed(begins):
        if stored.issuperset(range(start + 1, step + 1)):
            return ReplayPlan(start, step)
    lost = next(each for each in range(step, begins[-1], -1) if each not in stored)
    raise CheckpointError(
        f"the newest checkpoint before step {step} is of step {begins[-1]} (0: the initial model),"
        f" and the responses of step {lost}, which lead from there, are gone;"
        f" train.keep_checkpoints={step} with train.save_every=1 keeps a checkpoint before each"
        " step, and log.rollouts=all the responses of every step"
    )


class Replay:
    """A run's policy, trained again on its stored responses."""

    def __init__(
        self,
        directory: RunDirectory,
        config: Config,
        plan: ReplayPlan,
        *,
        log: Callable[[str], None],
    ) -> None:
        """Load the model of the plan's start. Raises ConfigError, CheckpointError or DataError."""
        self._directory = directory
        self._config = config
        self._plan = plan
        self._log = log
        loaded = read_model(config, device_of(config.train.device))
        self.encoder = PromptEncoder(loaded.tokenizer, config.data)
        self._problems = RunProblems(config)
        self._policy = Policy(config, loaded)
        if plan.start:
            self._policy.load(directory.checkpoints.find(plan.start))
        self._logged = metrics_by_step(directory.metrics)
        self._compared: list[tuple[float, float]] = []

    def update(self, number: int) -> ReplayedUpdate:
        """Replay up to the update `number`, from 0, of the plan's step, and to the end of that
        step.
        """
        for step in range(self._plan.start + 1, self._plan.step):
            self._log(f"replay step {step}")
            self._compare(
                step,
                [self._policy.update(minibatch, step=step) for minibatch in self._updates_of(step)],
            )
        step = self._plan.step
        self._log(f"replay step {step}")
        updates = self._updates_of(step)
        metrics = [self._policy.update(minibatch, step=step) for minibatch in updates[:number]]
        found = self._scored(updates[number], step=step)
        metrics += [self._policy.update(minibatch, step=step) for minibatch in updates[number:]]
        self._compare(step, metrics)
        return found

    def evidence(self) -> dict[str, Any]:
        """The comparison of the replayed steps' metrics with the logged ones, as JSON values."""
        differences = [
            abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in self._compared if a != b
        ]
        return {
            "from_step": self._plan.start,
            "to_step": self._plan.step,
            "metrics_compared": len(self._compared),
            "metrics_equal": len(self._compared) - len(differences),
            "largest_relative_difference": max(differences, default=0.0),
        }

    def _updates_of(self, step: int) -> list[list[Sample]]:
        groups = [each for each in read_groups(self._directory, step) if each.outcome == "trained"]
        stored = [
            with_prompt_ids(self._problems.complete(each), self.encoder).group for each in groups
        ]
        samples = estimate_advantages(stored, self._policy, self._config, step=step)
        return prepare_updates(samples, self._policy, self._config, step=step)

    def _scored(self, minibatch: Sequence[Sample], *, step: int) -> ReplayedUpdate:
        """An update's tokens with their log-probabilities; in a step's first update pi_old is the
        policy itself.
        """
        now = self._policy.record_old_logprobs(minibatch)
        logprobs = [sample.old_logprobs or () for sample in now]
        with_old = [
            sample if sample.old_logprobs is not None else replace(sample, old_logprobs=row)
            for sample, row in zip(minibatch, logprobs, strict=True)
        ]
        has_kl = self._config.loss.has_kl_term and not self._config.loss.has_full_kl
        reference = self._policy.reference_logprobs(minibatch, step=step) if has_kl else None
        return ReplayedUpdate(with_old, logprobs, reference)

    def _compare(self, step: int, updates: Sequence[Mapping[str, float]]) -> None:
        logged = self._logged.get(step, {})
        for name, value in mean_of_updates(updates).items():
            if not name.startswith(_NOT_COMPARED) and isinstance(logged.get(name), float | int):
                self._compared.append((value, logged[name]))


CannotReplay = (CheckpointError, DataError)
"""The errors of a step that cannot be replayed: its checkpoints, responses, problems or prompts are
gone.
"""
