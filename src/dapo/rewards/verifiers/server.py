"""`server`: your own judge behind HTTP, called once for a group's responses.

Request: POST, `{"version": 1, "items": [{"id", "prompt", "answer", "source", "fields", "response"},
...]}`. Answer: status 200, `{"verdicts": [v, ...]}` in the items' order, each `v` one of: true or
false (right or wrong), a number (a score), null (does not apply), `{"correct": true/false/null,
"score": number}`, `{"error": "why not"}`.
"""

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from dapo.core.answer_fields import WrongField, parse_json
from dapo.core.errors import RewardError
from dapo.core.http_client import RETRYABLE_STATUSES, HttpClient, ServerFailed
from dapo.core.secrets import mask_text
from dapo.core.verifier_limits import SERVER_TOTAL_S
from dapo.rewards.verdicts import TokenIds, error_verdict, problem_to_json, to_correct, to_verdict
from dapo.rewards.verifiers.function import NOT_APPLIED
from dapo.types import Problem, Verdict

VERSION = 1
_BACKOFF_S = 0.2
_SHOWN_CHARS = 200


class ServerVerifier:
    """Sends responses to a server for verdicts; a missing answer is an error, never a zero.

    A failed connection, a timeout and the statuses 408, 409, 425, 429, 500, 502, 503 and 504 are
    retried after 0.2, 0.4, 0.8 ... s, or after `Retry-After` if that is longer. Any other status or
    form of answer is an error at once.
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
            url: the address for POST requests.
            batch_size: responses in one request.
            request_s: time limit of one request.
            total_s: time limit of a group's verdicts with all retries; keep it below
                reward.timeout_s.
            retries: further tries of a request.
            token_env: the environment variable that holds a bearer token.

        Raises:
            RewardError: an option is invalid.
        """
        try:
            parts = urlsplit(url) if isinstance(url, str) else None
        except ValueError:  # brackets that do not match
            parts = None
        if parts is not None and "@" in parts.netloc:  # not repeated: it may be a secret
            raise RewardError(
                "server: url has a user's name or a password in it, which is not sent; give the"
                " address without it, and a bearer token by token_env=NAME, the environment"
                " variable that holds it"
            )
        if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise RewardError(
                "server: url must be http://HOST[:PORT]/PATH or https://..., got"
                f" {mask_text(str(url))!r}"
            )
        _require(
            "batch_size", batch_size, lambda v: isinstance(v, int) and v > 0, "a positive integer"
        )
        _require(
            "retries", retries, lambda v: isinstance(v, int) and v >= 0, "a non-negative integer"
        )
        for name, seconds in (("request_s", request_s), ("total_s", total_s)):
            _require(
                name,
                seconds,
                lambda v: isinstance(v, int | float) and 0 < v < math.inf,
                "a positive number",
            )
        token = None if token_env is None else os.environ.get(token_env)
        if token_env is not None and not token:
            raise RewardError(
                f"server: the environment variable {mask_text(token_env)} (token_env) is not set"
            )
        self._url = url
        self._batch_size = batch_size
        self._total_s = total_s
        self._http = HttpClient(
            url, token=token, timeout_s=request_s, retries=retries, backoff_s=_BACKOFF_S
        )

    def __call__(self, problem: Problem, response: str) -> Verdict:
        return self.judge_group(problem, [response], [()])[0] or error_verdict(
            f"server: {NOT_APPLIED}"
        )

    def judge_group(
        self, problem: Problem, responses: Sequence[str], token_ids: TokenIds
    ) -> list[Verdict | None]:
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

    def _request_verdicts(
        self, items: Sequence[Mapping[str, Any]], deadline: float
    ) -> list[Verdict | None]:
        answer = self._http.request(
            "POST", self._url, {"version": VERSION, "items": items}, deadline=deadline
        )
        url = mask_text(self._url)
        excerpt = repr(self._http.quote(answer.body))
        if answer.status != 200:
            tries = f" ({answer.tries} tries)" if answer.status in RETRYABLE_STATUSES else ""
            raise ServerFailed(f"{url}: status {answer.status} {answer.reason}: {excerpt}{tries}")
        try:
            content = parse_json(answer.body)
        except WrongField:
            raise ServerFailed(f"{url} did not answer with JSON: {excerpt}") from None
        verdicts = content.get("verdicts") if isinstance(content, dict) else None
        if not isinstance(verdicts, list) or len(verdicts) != len(items):
            expected = f'{{"verdicts": [...]}} with {len(items)} of them'
            raise ServerFailed(f"{url} must answer {expected}, got {excerpt}")
        return [_to_verdict(verdict) for verdict in verdicts]


def _to_verdict(value: Any) -> Verdict | None:
    if not isinstance(value, dict):
        return to_verdict("server", value)
    if value.get("error") not in (None, False, ""):
        return error_verdict(f"server: {str(value['error'])[:_SHOWN_CHARS]}")
    score = value.get("score")
    correct = value.get("correct")
    if score is None and correct is not None:
        is_correct = to_correct(correct)
        if is_correct is not None:
            return to_verdict("server", is_correct)
    return to_verdict("server", Verdict(correct, score))  # type: ignore[arg-type]


def _require(name: str, value: Any, is_valid: Callable[[Any], bool], expected: str) -> None:
    if isinstance(value, bool) or not is_valid(value):
        raise RewardError(f"server: {name} must be {expected}, got {value!r}")
