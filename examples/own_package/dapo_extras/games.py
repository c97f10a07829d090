"""The environment `echo`: it repeats a turn, and rewards a turn that repeats the last one."""

from dapo.environments.environment import StepResult
from dapo.types import Problem


class Echo:
    """Repeats what the policy says; `turns` becomes `environment.options.turns`."""

    def __init__(self, turns: int = 2) -> None:
        self.turns = turns
        self.actions: list[str] = []

    def reset(self, problem: Problem, seed: int) -> None:
        """Start an episode with the problem's own prompt."""
        self.actions = []

    def step(self, action: str) -> StepResult:
        """Return the turn; reward it by the characters that it shares with the turn before."""
        earlier = self.actions[-1] if self.actions else ""
        self.actions.append(action)
        shared = sum(a == b for a, b in zip(earlier, action, strict=False))
        return StepResult(action, reward=float(shared), done=len(self.actions) == self.turns)
