"""GSM8K with a calculator: the marks of its solutions become calls of an environment.

    python examples/gsm8k_calculator.py train.jsonl calls.jsonl

A solution of GSM8K writes each calculation with its result: `48/2 = <<48/2=24>>24 clips`. As an
episode, the policy's turn ends with the calculation, `48/2 = <<48/2>>`, the environment answers
`24`, and the next turn goes on with `24 clips`. The command writes the solutions as demonstrations of
such episodes.
"""

import ast
import json
import operator
import re
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from dapo.environments import StepResult
from dapo.rewards import get_verifier
from dapo.types import Problem

_MARK = re.compile(r"<<([^<>=]+)=([^<>]+)>>")
_CALL = re.compile(r"<<([^<>=]+)>>\s*\Z")
_MAX_CHARS = 80
NO_VALUE = "?"
_VERIFIER = get_verifier("gsm8k")
_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Calculator:
    """Answers a turn that ends with `<<EXPRESSION>>` by its value; another turn is the end."""

    def __init__(self) -> None:
        self._problem: Problem | None = None
        self._text = ""

    def reset(self, problem: Problem, seed: int) -> None:
        self._problem = problem

    def step(self, action: str) -> StepResult:
        self._text += action
        call = _CALL.search(action)
        if call is not None:
            return StepResult(value(call[1]))
        assert self._problem is not None
        verdict = _VERIFIER(self._problem, self._text)
        return StepResult(reward=verdict.score, done=True, correct=verdict.correct)

    def end(self) -> StepResult:
        """An episode that was cut has no answer."""
        return StepResult(reward=-1.0, done=True, correct=False)


def value(expression: str) -> str:
    """Return the value of sums, differences, products and quotients, or NO_VALUE for anything else."""
    if len(expression) > _MAX_CHARS:
        return NO_VALUE
    try:
        result = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return NO_VALUE
    if result.denominator == 1:
        return str(result.numerator)
    return f"{float(result):.10g}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
        return _value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("no number and no operation")


def episode(question: str, solution: str) -> list[dict[str, Any]]:
    """Return a solution as the turns of the policy and of the calculator."""
    messages = [{"role": "user", "content": question}]
    position = 0
    for mark in _MARK.finditer(solution):
        turn = f"{solution[position : mark.start()]}<<{mark[1]}>>"
        messages.append({"role": "assistant", "content": turn})
        messages.append({"role": "user", "content": mark[2]})
        position = mark.end()
    messages.append({"role": "assistant", "content": solution[position:]})
    return messages


def main(source: str, target: str) -> None:
    """Write the episodes of a file of GSM8K."""
    with open(source, encoding="utf-8") as rows, open(target, "w", encoding="utf-8") as file:
        for line in rows:
            row = json.loads(line)
            messages = episode(row["question"], row["answer"])
            file.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
