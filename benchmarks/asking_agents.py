"""Agents of benchmarks/agents.py: what they import is what an agent's processes hold."""

import json
import urllib.request
from typing import Any

from dapo.environments.games.calculator import Calculator
from dapo.types import Problem

CALLS = 10


def ask(messages: list[Any], base_url: str, api_key: str) -> Any:
    """Return the first choice of the answer, by the standard library alone."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]


def conversation(problem: Problem, *, base_url: str, api_key: str) -> float:
    """Ask CALLS times, each behind all answers before."""
    messages: list[Any] = [{"role": "user", "content": problem.prompt}]
    for number in range(CALLS):
        text = ask(messages, base_url, api_key)["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": f"Step {number} is done; go on."})
    return 1.0


def relay(problem: Problem, *, base_url: str, api_key: str) -> dict[str, Any]:
    """Play the calculator."""
    game = Calculator()
    game.reset(problem, 0)
    messages: list[Any] = [{"role": "user", "content": problem.prompt}]
    while True:
        choice = ask(messages, base_url, api_key)
        if choice["finish_reason"] == "length":
            result = game.end()
            break
        text = choice["message"]["content"]
        result = game.step(text)
        if result.done:
            break
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": result.observation})
    return {"score": result.reward, "correct": result.correct}
