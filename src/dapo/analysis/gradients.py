"""The policy gradients of a step's stored responses under two sets of options, at a checkpoint."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from dapo.analysis.rescored import RescoredGroup
from dapo.analysis.stored_groups import RunProblems, saved_steps, with_prompt_ids
from dapo.config import Config
from dapo.core.errors import ConfigError
from dapo.data.prompts import PromptEncoder
from dapo.policy.model import device_of
from dapo.policy.policy import Policy
from dapo.runs.directory import RunDirectory
from dapo.training.assemble.inputs import read_model
from dapo.training.assemble.resolve import resolve_auto
from dapo.training.samples import with_advantages
from dapo.types import Group, Sample


class GradientComparison:
    """Compares the gradients of both losses on both batches of chosen steps.

    The gradient of a step is taken over its whole batch as one update, on policy (every ratio is 1), at the newest
    checkpoint before it; the initial model is the checkpoint of step 0. The compared steps are the chosen ones right
    after a checkpoint. If there is none, it is the first chosen step, whose responses are then of a later policy.
    """

    def __init__(
        self, directory: RunDirectory, old: Config, new: Config, steps: Sequence[int], *, log: Callable[[str], None]
    ) -> None:
        """Load the model. Raises ConfigError for a loss of the user's own."""
        if old.loss.function is not None or new.loss.function is not None:
            raise ConfigError("--gradient compares losses of Eq. 8, which loss.function replaces: leave --gradient out")
        if old.loss.reference_steps is not None or new.loss.reference_steps is not None:
            raise ConfigError(
                "--gradient compares losses whose reference is the initial policy, and loss.reference=STEPS moves it; "
                "leave --gradient out"
            )
        self._directory, self._old, self._new, self._log = directory, old, new, log
        saved = [0, *saved_steps(directory)]
        right_after = [step for step in steps if step - 1 in saved]
        self._checkpoints = {
            step: max(each for each in saved if each < step) for step in right_after or list(steps)[:1]
        }
        resolved = resolve_auto(new if new.loss.kl_coef > 0 else old)  # only with a KL term a policy has a reference
        loaded = read_model(resolved, device_of(resolved.train.device))
        self._encoder = PromptEncoder(loaded.tokenizer, resolved.data)
        self._policy = Policy(resolved, loaded)
        self._loaded_step = 0
        self._problems = RunProblems(old)
        self.results: list[dict[str, Any]] = []
        """One object of JSON values for each compared step."""

    def add(self, step: int, groups: Sequence[RescoredGroup]) -> None:
        """Compare the gradients of a step if it is to be compared; steps come in ascending order."""
        checkpoint = self._checkpoints.get(step)
        if checkpoint is None:
            return
        self._log(f"gradients of step {step} at the checkpoint of step {checkpoint}")
        if checkpoint != self._loaded_step:
            self._policy.load(self._directory.checkpoints.find(checkpoint))
            self._loaded_step = checkpoint
        old = [self._with_prompt(each, each.stored.group) for each in groups if each.stored.outcome == "trained"]
        new = [self._with_prompt(each, each.group) for each in groups if each.outcome == "trained"]
        first, second = self._gradient(old, self._old), self._gradient(new, self._new)
        norms = _norm(first) * _norm(second)
        self.results.append(
            {
                "step": step,
                "checkpoint": checkpoint,
                "cosine": _dot(first, second) / norms if norms else None,
                "old_norm": _norm(first),
                "new_norm": _norm(second),
                "old_groups": len(old),
                "new_groups": len(new),
            }
        )

    def _with_prompt(self, each: RescoredGroup, group: Group) -> Group:
        complete = with_prompt_ids(self._problems.complete(each.stored), self._encoder)
        return replace(group, prompt_ids=complete.group.prompt_ids)

    def _gradient(self, groups: Sequence[Group], config: Config) -> Mapping[str, Tensor]:
        samples: list[Sample] = with_advantages(groups, config)
        return self._policy.gradient(samples, config.loss) if samples else {}


def _dot(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The inner product of two gradients, in float64; 0 if one of them has no samples."""
    return math.fsum(float((first[name].double() * second[name].double()).sum()) for name in first if name in second)


def _norm(gradient: Mapping[str, Tensor]) -> float:
    return math.sqrt(_dot(gradient, gradient))
