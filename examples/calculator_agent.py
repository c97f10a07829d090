"""The environment `calculator` as agents on the OpenAI SDK, which know nothing of training.

    pip install openai
    cd examples && dapo train calculator agent=calculator_agent:solve
    cd examples && dapo train calculator agent=calculator_agent:compact

`solve` sends what the environment would show, so that the run has the bytes of `dapo train
calculator`. `compact` rewrites its history after each call, as agents with a small context do: each
call is a branch of its own.
"""

import re
from typing import Any

from openai import AsyncOpenAI

_EXPRESSION = re.compile(r"(\d{1,18})\s*([-+*])\s*(\d{1,18})", re.ASCII)
_NUMBER = re.compile(r"-?\d+", re.ASCII)


async def solve(problem: Any, *, base_url: str, api_key: str) -> dict[str, Any]:
    """Ask, compute the first expression of the answer, and ask again behind its value."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": problem.prompt}]
    text = await _ask(client, messages)
    value = _value(text)
    if value is None:
        return _judged(problem, text)
    messages += [
        {"role": "assistant", "content": text},
        {"role": "user", "content": f"The calculator shows {value}"},
    ]
    return _judged(problem, await _ask(client, messages))


async def compact(problem: Any, *, base_url: str, api_key: str) -> dict[str, Any]:
    """Ask, and ask again in a chat in which the first answer is its expression alone."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    question = {"role": "user", "content": problem.prompt}
    text = await _ask(client, [question])
    expression = None if text is None else _EXPRESSION.search(text)
    if expression is None:
        return _judged(problem, text)
    compacted = [
        question,
        {"role": "assistant", "content": f"{expression[0]} ="},
        {"role": "user", "content": f"The calculator shows {_value(text)}"},
    ]
    return _judged(problem, await _ask(client, compacted))


async def _ask(client: AsyncOpenAI, messages: list[Any]) -> str | None:
    """Return the model's answer; None if it was cut at the limit of tokens."""
    completion = await client.chat.completions.create(model="policy", messages=messages)
    choice = completion.choices[0]
    return None if choice.finish_reason == "length" else choice.message.content


def _value(text: str | None) -> int | None:
    """Return the value of the first expression in a text, such as `4821 + 3977`."""
    match = None if text is None else _EXPRESSION.search(text)
    if match is None:
        return None
    first = int(match[1])
    second = int(match[3])
    return {"+": first + second, "-": first - second, "*": first * second}[match[2]]


def _judged(problem: Any, text: str | None) -> dict[str, Any]:
    """Return the reward of the last answer: Eq. 7, and wrong if it was cut."""
    numbers = _NUMBER.findall(text or "")
    correct = bool(numbers) and numbers[-1] == problem.answer
    return {"score": 1.0 if correct else -1.0, "correct": correct}
