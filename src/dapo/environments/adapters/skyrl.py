"""Environments of skyrl-gym: `BaseTextEnv` with `init`, `step` and `close`."""

from collections.abc import Callable, Mapping
from typing import Any

from dapo.core.errors import ConfigError
from dapo.core.loading import require_package
from dapo.core.text import did_you_mean
from dapo.environments.environment import StepResult
from dapo.rewards.verifiers.function import columns_of
from dapo.types import Message, Problem


class SkyRLEnvironment:
    """Plays an environment of skyrl-gym, by its registered id or its class.

    A problem's columns are its `extras`, with `reward_spec` as skyrl-gym's data has it:
    `{"ground_truth": answer}` unless the data has that column.
    """

    def __init__(self, environment: str | Callable[..., Any], **options: Any) -> None:
        """`options` are keyword arguments of the class, or `env_config`."""
        self._environment = environment
        self._options = options
        if isinstance(environment, str):
            require_package("skyrl_gym", purpose="this environment", error=ConfigError)
            from skyrl_gym.envs.registration import registry

            if environment not in registry:
                raise ConfigError(
                    f"skyrl-gym has no environment {environment!r};"
                    f" {did_you_mean(environment, registry)}"
                )
        self._made: Any = None

    def reset(self, problem: Problem, seed: int) -> list[Message]:
        extras = {"reward_spec": {"ground_truth": problem.answer}, **columns_of(problem)}
        options = {"env_config": {}, **self._options}
        if isinstance(self._environment, str):
            import skyrl_gym

            self._made = skyrl_gym.make(self._environment, extras=extras, **options)
        else:
            self._made = self._environment(extras=extras, **options)
        prompt = problem.prompt
        messages = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [dict(m) for m in prompt]
        )
        first, _ = self._made.init(messages)
        return [dict(message) for message in first]

    def step(self, action: str) -> StepResult:
        output: Mapping[str, Any] = self._made.step(action)
        reward = float(output["reward"] or 0.0)
        done = bool(output["done"])
        return StepResult(
            [dict(message) for message in output["observations"]], reward=reward, done=done
        )

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
