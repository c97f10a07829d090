"""Agents for tests of what is seen of them: they ask with the standard library alone."""

import contextlib
import json
import urllib.error
import urllib.request
from typing import Any


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(
    base_url: str, api_key: str, messages: list[Any], *, again: bool = False, **fields: Any
) -> tuple[dict[str, Any], str]:
    """The assistant's message and the id of an answer; `again`: as an SDK repeats a request."""
    body = json.dumps({"model": "policy", "messages": messages, **fields}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    if again:
        headers["x-stainless-retry-count"] = "1"
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    return answer["choices"][0]["message"], answer["id"]


def fork_and_summarize(problem: Any, *, base_url: str, api_key: str) -> dict[str, float]:
    """Two turns, a retry, a fork behind the first turn, a summary, and a request that is refused.

    The rewards refer to the ends of the two turns and of the fork, not to the summary.
    """
    start = [user(problem.prompt)]
    first, _ = ask(base_url, api_key, start)
    ask(base_url, api_key, start, again=True)
    _, second_id = ask(base_url, api_key, [*start, first, user("Shorter.")])
    third, third_id = ask(base_url, api_key, [*start, first, user("Longer.")])
    ask(base_url, api_key, [user("Summary.")])
    with contextlib.suppress(urllib.error.HTTPError):
        ask(base_url, api_key, start, temperature=0.25)
    digits = sum(character.isdigit() for character in third["content"])
    return {second_id: 0.0, third_id: float(digits > 0)}


def measured(problem: Any, *, base_url: str, api_key: str) -> dict[str, float]:
    """One call; its reward has a further number."""
    message, _ = ask(base_url, api_key, [user(problem.prompt)])
    digits = sum(character.isdigit() for character in message["content"])
    return {"score": float(digits > 0), "digits": digits}


def too_warm(problem: Any, *, base_url: str, api_key: str) -> float:
    """Fails by a request that the endpoint refuses."""
    ask(base_url, api_key, [user(problem.prompt)], temperature=0.25)
    return 0.0
