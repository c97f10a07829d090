"""`server`: your own judge behind HTTP, called once for a group's responses.

Request: POST, `{"version": 1, "items": [{"id", "prompt", "answer", "source", "fields", "response"}, ...]}`.
Answer: status 200, `{"verdicts": [v, ...]}` in the items' order, each `v` one of: true or false (right or wrong), a
number (a score), null (does not apply), `{"correct": true/false/null, "score": number}`, `{"error": "why not"}`.
"""

import json
import math
import os
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import urllib3

from dapo.core.errors import RewardError
from dapo.core.openai_client import RETRYABLE_STATUSES, ServerFailed, error_cause, without_key
from dapo.core.secrets import mask_text
from dapo.core.verifier_limits import SERVER_TOTAL_S
from dapo.rewards.verdicts import TokenIds, error_verdict, problem_to_json
from dapo.rewards.verifiers.function import NOT_APPLIED
from dapo.rewards.verifiers.results import to_verdict
from dapo.types import Problem, Verdict

VERSION = 1
_MIN_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 5.0
_MAX_ANSWER_BYTES = 1 << 24
_SHOWN_CHARS = 200
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ServerVerifier:
    """Sends responses to a server and takes its verdicts; what it does not answer in time is an error, never a zero.

    Retried after 0.2, 0.4, 0.8 ... s or what `Retry-After` says: no connection, no answer in time, a status 408, 409,
    425, 429, 500, 502, 503 or 504. Any other status, and an answer in another form, is an error at once.
    """

    def __init__(
        self,
        url: str,
        batch_size: int = 64,
        request_s: float = 5.0,
        total_s: float = SERVER_TOTAL_S,
        retries: int = 3,
        token_env: str | None = None,
    ) -> None:
        """Check the options; no request is made yet.

        Args:
            url: where requests are posted.
            batch_size: responses in one request.
            request_s: time limit of one request.
            total_s: time limit of a group's verdicts with all retries; keep it below reward.timeout_s.
            retries: further tries of a request.
            token_env: the environment variable that holds a bearer token.

        Raises:
            RewardError: an option cannot be used.
        """
        try:
            parts = urlsplit(url) if isinstance(url, str) else None
        except ValueError:  # brackets that do not match
            parts = None
        if parts is not None and "@" in parts.netloc:  # not repeated: it may be a secret
            raise RewardError(
                "server: url has a user's name or a password in it, which is not sent; give the address without it, "
                "and a bearer token by token_env=NAME, the environment variable that holds it"
            )
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise RewardError(
                f"server: url must be http://HOST[:PORT]/PATH or https://..., got {mask_text(str(url))!r}"
            )
        _require("batch_size", batch_size, lambda v: isinstance(v, int) and v > 0, "a positive integer")
        _require("retries", retries, lambda v: isinstance(v, int) and v >= 0, "a non-negative integer")
        for name, seconds in (("request_s", request_s), ("total_s", total_s)):
            _require(name, seconds, lambda v: isinstance(v, int | float) and 0 < v < math.inf, "a positive number")
        self._url, self._batch_size, self._retries = url, batch_size, retries
        self._shown_url = mask_text(url)
        self._token: str | None = None
        self._request_s, self._total_s = request_s, total_s
        self._headers = {"Content-Type": "application/json", "User-Agent": "dapo"}
        if token_env is not None:
            self._token = os.environ.get(token_env)
            if not self._token:
                raise RewardError(f"server: the environment variable {mask_text(token_env)} (token_env) is not set")
            self._headers["Authorization"] = f"Bearer {self._token}"
        is_direct = parts.hostname in _LOOPBACK or urllib.request.proxy_bypass(parts.hostname)
        proxy = None if is_direct else urllib.request.getproxies().get(parts.scheme)
        self._pool = urllib3.ProxyManager(proxy) if proxy else urllib3.PoolManager()

    def __call__(self, problem: Problem, response: str) -> Verdict:
        return self.judge_group(problem, [response], [()])[0] or error_verdict(f"server: {NOT_APPLIED}")

    def judge_group(self, problem: Problem, responses: Sequence[str], token_ids: TokenIds) -> list[Verdict | None]:
        """One verdict per response. A request that fails is an error for its responses only."""
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
        body = self._post(json.dumps({"version": VERSION, "items": items}), deadline)
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            raise ServerFailed(f"{self._shown_url} answered what is not JSON: {self._shown(body)}") from None
        verdicts = answer.get("verdicts") if isinstance(answer, dict) else None
        if not isinstance(verdicts, list) or len(verdicts) != len(items):
            wanted = f'{{"verdicts": [...]}} with {len(items)} of them'
            raise ServerFailed(f"{self._shown_url} must answer {wanted}, got {self._shown(body)}")
        return [_to_verdict(verdict) for verdict in verdicts]

    def _post(self, body: str, deadline: float) -> bytes:
        """The body of the answer. Raises ServerFailed when all tries or the time are used up."""
        backoff_s = _MIN_BACKOFF_S
        for attempt in range(self._retries + 1):
            limit = min(deadline, time.monotonic() + self._request_s)
            left = max(limit - time.monotonic(), 0.01)
            delay_s = backoff_s
            try:
                response = self._pool.request(
                    "POST", self._url, body=body, headers=self._headers, timeout=left,
                    retries=False, redirect=False, preload_content=False,
                )  # fmt: skip
                with response:
                    content = _read(response, limit)
            except urllib3.exceptions.NewConnectionError as error:  # a TimeoutError to urllib3
                reason = error_cause(error)
            except (TimeoutError, urllib3.exceptions.TimeoutError):
                reason = f"no answer within {left:.3g} s"
            except urllib3.exceptions.HTTPError as error:
                reason = error_cause(error)
            else:
                if response.status == 200:
                    return content
                reason = f"status {response.status} {response.reason}: {self._shown(content)}"
                if response.status not in RETRYABLE_STATUSES:
                    raise ServerFailed(f"{self._shown_url}: {reason}")
                wanted = response.headers.get("Retry-After", "")
                delay_s = max(delay_s, min(float(wanted), _MAX_BACKOFF_S)) if wanted.isdecimal() else delay_s
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            if attempt == self._retries or time.monotonic() + delay_s >= deadline:
                break
            time.sleep(delay_s)
        raise ServerFailed(f"{self._shown_url}: {reason} ({attempt + 1} tries)")

    def _shown(self, body: bytes) -> str:
        return repr(without_key(body.decode(errors="replace"), self._token)[:_SHOWN_CHARS])


def _read(response: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
    """All of the body; a server that sends byte by byte is not waited for beyond the deadline."""
    content = b""
    while part := response.read1(1 << 16):
        content += part
        if len(content) > _MAX_ANSWER_BYTES:
            raise ServerFailed(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError
    return content


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
