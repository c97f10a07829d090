"""What the pool and its workers say to each other: JSON objects, each after its length in four bytes."""

import json
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from dapo.rewards.verdicts import Opinion
from dapo.types import Problem, Verdict

_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 20


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as it is sent. Raises TypeError or ValueError for what is not JSON."""
    # json escapes lone surrogates, which a tokenizer may produce and UTF-8 refuses
    body = json.dumps(message).encode("ascii")
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket, deadline: float | None = None) -> dict[str, Any] | None:
    """The next message, or None at the end of the stream.

    `deadline` is a reading of `time.monotonic()`; raises TimeoutError after it, and ValueError for what is no message.
    """
    head = _read(connection, _LENGTH.size, deadline)
    body = _read(connection, _LENGTH.unpack(head)[0], deadline) if head is not None else None
    if body is None:
        return None
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError(f"expected an object, got {type(message).__name__}")
    return message


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes | None:
    parts, missing = [], size
    while missing:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-6))
        part = connection.recv(min(missing, _CHUNK))
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """A problem as JSON values; `fields` are JSON values already."""
    prompt = problem.prompt if isinstance(problem.prompt, str) else [dict(message) for message in problem.prompt]
    return {
        "id": problem.id,
        "prompt": prompt,
        "answer": problem.answer,
        "source": problem.source,
        "fields": dict(problem.fields),
    }


def problem_from_json(values: Mapping[str, Any]) -> Problem:
    """The problem that `problem_to_json` was given."""
    return Problem(**values)


def opinion_to_json(opinion: Opinion) -> list[Any] | None:
    """A verdict as a list, or None where there is none."""
    return None if opinion is None else [opinion.correct, opinion.score, opinion.error]


def opinions_from_json(answer: Mapping[str, Any], num_responses: int, num_verifiers: int) -> list[list[Opinion]]:
    """The `[response][verifier]` opinions of a worker's answer. Raises ValueError if it is not that."""
    rows = answer.get("opinions")
    if not isinstance(rows, list) or [len(row) for row in rows] != [num_verifiers] * num_responses:
        raise ValueError("the worker process answered something else than opinions")
    return [[None if values is None else Verdict(*values) for values in row] for row in rows]
