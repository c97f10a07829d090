"""`server`: your own judge behind HTTP, asked for a group's verdicts at a time.

Request: POST, `{"version": 1, "items": [{"id", "prompt", "answer", "source", "fields", "response"}, ...]}`.
Answer: status 200, `{"verdicts": [v, ...]}` in the items' order, each `v` one of: true or false (right or wrong), a
number (a grade), null (does not apply), `{"correct": true/false/null, "score": number}`, `{"error": "why not"}`.
"""

import http.client
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from dapo.core.errors import RewardError
from dapo.rewards.verdicts import error_verdict, problem_to_json
from dapo.rewards.verifiers.function import NOT_APPLIED
from dapo.rewards.verifiers.results import to_verdict
from dapo.types import Problem, Verdict

VERSION = 1
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 5.0
_MAX_ANSWER_BYTES = 1 << 24
_SHOWN_CHARS = 200
_RETRYABLE_STATUSES = (408, 425, 429, 500, 502, 503, 504)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ServerVerifier:
    """Sends responses to a server and takes its verdicts; what it does not answer in time is an error, never a zero.

    Tried again, after 0.2, 0.4, 0.8 ... s or what `Retry-After` says: no connection, no answer in time, a status 408,
    425, 429, 500, 502, 503 or 504. Any other status, and an answer that is not as agreed, is an error at once.
    """

    def __init__(
        self,
        url: str,
        batch_size: int = 64,
        request_s: float = 5.0,
        total_s: float = 9.0,
        retries: int = 3,
        token_env: str | None = None,
    ) -> None:
        """`batch_size`: responses in one request. `request_s` bounds a request, `total_s` a group's verdicts with all
        further tries; keep it below reward.timeout_s. `token_env`: the environment variable that holds a bearer token.

        Raises RewardError. The server is not asked yet.
        """
        parts = urlsplit(url) if isinstance(url, str) else None
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise RewardError(f"server: url must be http://HOST[:PORT]/PATH or https://..., got {url!r}")
        _require("batch_size", batch_size, lambda v: isinstance(v, int) and v > 0, "a positive whole number")
        _require("retries", retries, lambda v: isinstance(v, int) and v >= 0, "a whole number from 0 on")
        for name, seconds in (("request_s", request_s), ("total_s", total_s)):
            _require(name, seconds, lambda v: isinstance(v, int | float) and 0 < v < math.inf, "a positive number")
        self._url, self._batch_size, self._retries = url, batch_size, retries
        self._request_s, self._total_s = request_s, total_s
        self._headers = {"Content-Type": "application/json", "User-Agent": "dapo"}
        if token_env is not None:
            token = os.environ.get(token_env)
            if not token:
                raise RewardError(f"server: the environment variable {token_env} (token_env) is not set")
            self._headers["Authorization"] = f"Bearer {token}"
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if parts.hostname in _LOOPBACK:
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def __call__(self, problem: Problem, response: str) -> Verdict:
        """The verdict on a group of one."""
        return self.judge_group(problem, [response], [()])[0] or error_verdict(f"server: {NOT_APPLIED}")

    def judge_group(
        self, problem: Problem, responses: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> list[Verdict | None]:
        """One opinion a response. A request that fails is an error for its responses only."""
        deadline = time.monotonic() + self._total_s
        described = problem_to_json(problem)
        verdicts: list[Verdict | None] = []
        for start in range(0, len(responses), self._batch_size):
            batch = responses[start : start + self._batch_size]
            items = [{**described, "response": response} for response in batch]
            try:
                verdicts += self._request_verdicts(items, deadline)
            except ServerFailed as error:
                verdicts += [error_verdict(f"server: {error}") for _ in batch]
        return verdicts

    def _request_verdicts(self, items: Sequence[Mapping[str, Any]], deadline: float) -> list[Verdict | None]:
        body = self._post(json.dumps({"version": VERSION, "items": items}).encode("ascii"), deadline)
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            raise ServerFailed(f"{self._url} answered what is not JSON: {_shown(body)}") from None
        verdicts = answer.get("verdicts") if isinstance(answer, dict) else None
        if not isinstance(verdicts, list) or len(verdicts) != len(items):
            raise ServerFailed(
                f'{self._url} must answer {{"verdicts": [...]}} with {len(items)} of them, got {_shown(body)}'
            )
        return [_to_verdict(verdict) for verdict in verdicts]

    def _post(self, body: bytes, deadline: float) -> bytes:
        """The answer's body. Raises ServerFailed when all tries or the time are used up."""
        backoff_s = _MIN_BACKOFF_S
        for attempt in range(self._retries + 1):
            try:
                return self._once(body, min(deadline, time.monotonic() + self._request_s))
            except _RetryableError as error:
                reason, wanted = str(error), error.delay_s
            delay_s = max(backoff_s, min(wanted, _MAX_BACKOFF_S))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            if attempt == self._retries or time.monotonic() + delay_s >= deadline:
                break
            time.sleep(delay_s)
        raise ServerFailed(f"{self._url}: {reason} ({attempt + 1} tries)")

    def _once(self, body: bytes, deadline: float) -> bytes:
        left = max(deadline - time.monotonic(), 0.01)
        request = urllib.request.Request(self._url, body, self._headers, method="POST")
        try:
            with self._opener.open(request, timeout=left) as answer:
                return _read(answer, deadline)
        except urllib.error.HTTPError as error:
            with error:
                text = _shown(error.read(_SHOWN_CHARS)) if error.fp else ""
                wanted = error.headers.get("Retry-After", "") if error.headers else ""
            message = f"status {error.code} {error.reason}: {text}"
            if error.code in _RETRYABLE_STATUSES:
                raise _RetryableError(message, float(wanted) if wanted.isdecimal() else 0.0) from None
            raise ServerFailed(f"{self._url}: {message}") from None
        except TimeoutError:
            raise _RetryableError(f"no answer within {left:.3g} s") from None
        except urllib.error.URLError as error:
            timed_out = isinstance(error.reason, TimeoutError)
            raise _RetryableError(f"no connection within {left:.3g} s" if timed_out else f"{error.reason}") from None
        except (OSError, http.client.HTTPException) as error:
            raise _RetryableError(f"{type(error).__name__}: {error}") from None


class ServerFailed(Exception):
    """No usable answer, and why."""


class _RetryableError(Exception):
    """A try failed that another may not."""

    def __init__(self, reason: str, delay_s: float = 0.0) -> None:
        super().__init__(reason)
        self.delay_s = delay_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A POST that is redirected would become a GET."""

    def redirect_request(self, *args: Any) -> None:
        return None


def _read(answer: http.client.HTTPResponse, deadline: float) -> bytes:
    """All of it; a server that sends byte by byte is not waited for beyond the deadline."""
    parts, size = [], 0
    while part := answer.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            raise ServerFailed(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError
    return b"".join(parts)


def _to_verdict(value: Any) -> Verdict | None:
    if not isinstance(value, dict):
        return to_verdict("server", value)
    if value.get("error") is not None:
        return error_verdict(f"server: {str(value['error'])[:_SHOWN_CHARS]}")
    score, correct = value.get("score"), value.get("correct")
    if score is None and isinstance(correct, bool):
        return to_verdict("server", correct)
    return to_verdict("server", Verdict(correct, score))  # type: ignore[arg-type]


def _require(name: str, value: Any, is_valid: Callable[[Any], bool], expected: str) -> None:
    if isinstance(value, bool) or not is_valid(value):
        raise RewardError(f"server: {name} must be {expected}, got {value!r}")


def _shown(body: bytes) -> str:
    return repr(body[:_SHOWN_CHARS].decode(errors="replace"))
