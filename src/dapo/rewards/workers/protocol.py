"""What the pool and its workers say to each other: JSON objects, each after its length in four bytes."""

import json
import math
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from dapo.types import Problem, Verdict

_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 20
_MAX_ANSWER_BYTES = 1 << 26
_MAX_ERROR_CHARS = 1000
_MAX_ANSWER_CHARS = 200


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as it is sent. Raises TypeError or ValueError for what is not JSON."""
    # json escapes lone surrogates, which a tokenizer may produce and UTF-8 refuses
    body = json.dumps(message).encode("ascii")
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket, deadline: float | None = None) -> dict[str, Any] | None:
    """The next message, or None at the end of the stream.

    `deadline`, which the pool's end gives, is a reading of `time.monotonic()`; raises TimeoutError after it, and
    ValueError for what is no message: user code has the worker's end.
    """
    head = _read(connection, _LENGTH.size, deadline)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    if deadline is not None and size > _MAX_ANSWER_BYTES:
        raise ValueError(f"a message of {size} bytes")
    body = _read(connection, size, deadline)
    if body is None:
        return None
    try:
        message = json.loads(body)
    except RecursionError:
        raise ValueError("brackets without end") from None
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


def verdict_to_json(verdict: Verdict | None) -> list[Any] | None:
    """A verdict as a list, or None where there is none."""
    if verdict is None:
        return None
    error = verdict.error and verdict.error[:_MAX_ERROR_CHARS]
    return [verdict.correct, verdict.score, error, verdict.answer and verdict.answer[:_MAX_ANSWER_CHARS]]


def verdicts_from_json(answer: Mapping[str, Any], num_responses: int, num_verifiers: int) -> list[list[Verdict | None]]:
    """The `[response][verifier]` opinions of a worker's answer. Raises ValueError if it is not that."""
    rows = answer.get("verdicts")
    if (
        not isinstance(rows, list)
        or not all(isinstance(row, list) for row in rows)
        or [len(row) for row in rows] != [num_verifiers] * num_responses
    ):
        raise ValueError("the worker process answered something else than opinions")
    return [[_verdict_from_json(values) for values in row] for row in rows]


def _verdict_from_json(values: Any) -> Verdict | None:
    match values:
        case None:
            return None
        case [
            (bool() | None) as correct,
            (int() | float()) as score,
            (str() | None) as error,
            (str() | None) as answer,
        ] if math.isfinite(score):
            return Verdict(correct, score, error, answer)
    raise ValueError("the worker process answered something else than an opinion")
