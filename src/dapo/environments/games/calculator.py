"""The environment `calculator`: it computes an expression that a turn contains; the turn after that
is the answer.
"""

import operator
import re
from collections.abc import Callable, Mapping

from dapo.environments.environment import StepResult
from dapo.types import Problem

_EXPRESSION = re.compile(r"(\d{1,18})\s*([-+*])\s*(\d{1,18})", re.ASCII)
_NUMBER = re.compile(r"-?\d+", re.ASCII)
_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


class Calculator:
    """Shows the value of the first expression, such as `4821 + 3977`, of each turn that may use the
    calculator.

    A turn without an expression, or the turn after `uses` expressions, is the answer: its last
    number is compared with the problem's. The reward is 1 or -1 (Eq. 7).
    """

    def __init__(self, *, uses: int = 1) -> None:
        """`uses` is the number of expressions that an episode may have computed."""
        self._uses = uses
        self._answer = ""

    def reset(self, problem: Problem, seed: int) -> None:
        self._answer = problem.answer

    def step(self, action: str) -> StepResult:
        match = _EXPRESSION.search(action)
        if match is not None and self._uses > 0:
            self._uses -= 1
            value = _OPERATIONS[match[2]](int(match[1]), int(match[3]))
            return StepResult(f"The calculator shows {value}", reward=0.0)
        return self._judged(action)

    def end(self) -> StepResult:
        """An episode that was cut has no answer, which is wrong."""
        return StepResult(reward=-1.0, done=True, correct=False)

    def _judged(self, action: str) -> StepResult:
        numbers = _NUMBER.findall(action)
        correct = bool(numbers) and numbers[-1] == self._answer
        return StepResult(reward=1.0 if correct else -1.0, done=True, correct=correct)
