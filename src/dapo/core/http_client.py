"""An HTTP client with time limits, which retries transient failures."""

import json
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import urllib3

from dapo.core.errors import DapoError, DataError
from dapo.core.secrets import mask_text
from dapo.core.waiting import (
    MAX_FOREIGN_WAIT_S,
    SHOWN_WAIT_S,
    SystemClock,
    clamped_wait_s,
    describe_wait,
    wished_wait_s,
)

RETRYABLE_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504)
_CONNECT_S = 10.0
_MAX_BACKOFF_S = 30.0
_MAX_ANSWER_BYTES = 1 << 24
_SHOWN_CHARS = 200
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class ServerFailed(DapoError):
    """A server gave no usable answer after all retries; a later request may succeed."""


class ServerRefused(DataError):
    """A server rejected the request: its model, its key or its address is wrong."""


@dataclass(frozen=True)
class Answer:
    """The answer to a request; a retryable status is returned once all tries are used up."""

    status: int
    reason: str  # of the status: `Not Found`
    body: bytes
    tries: int


@dataclass(frozen=True)
class Stream:
    """An answer whose lines are read while it arrives."""

    status: int
    reason: str
    lines: Iterator[bytes]


class HttpClient:
    """Sends JSON to one server, through the environment's proxies; threads may share a client."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        timeout_s: float,
        retries: int,
        backoff_s: float,
        connections: int = 1,
        total_s: float = float("inf"),
        clock: SystemClock | None = None,
    ) -> None:
        """Open no connection yet.

        A failed connection, a timeout or a status of RETRYABLE_STATUSES is followed by retries
        after 1, 2, 4, 8 ... times `backoff_s`, at most 30 s, or what the server asks for
        (`Retry-After`) if that is longer; a wish above MAX_FOREIGN_WAIT_S ends the request. Waits
        are shown, and a signal ends them.

        Args:
            url: a valid address, which selects the proxy and stands in error messages.
            token: sent as a bearer token.
            timeout_s: the time limit of a try, from connecting to the last byte.
            retries: the number of tries after the first.
            backoff_s: the pause before the first retry.
            connections: the number of threads that share the client.
            total_s: the time limit of a request with all its tries.
            clock: measures time and waits; None: the system's.
        """
        self._clock = clock or SystemClock()
        self._total_s = total_s
        self._shown_until = 0.0
        self._shown_lock = threading.Lock()
        self._shown_url = mask_text(url)
        self._token = token
        self._timeout_s = timeout_s
        self._retries = retries
        self._backoff_s = backoff_s
        self._headers = {"Content-Type": "application/json", "User-Agent": "dapo"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        parts = urlsplit(url)
        is_direct = parts.hostname in _LOOPBACK or urllib.request.proxy_bypass(parts.hostname or "")
        proxy = None if is_direct else urllib.request.getproxies().get(parts.scheme)
        self._pool: urllib3.PoolManager
        if proxy:
            self._pool = urllib3.ProxyManager(proxy, maxsize=connections)
        else:
            self._pool = urllib3.PoolManager(maxsize=connections)

    def request(
        self,
        method: str,
        url: str,
        value: Any = None,
        *,
        deadline: float = float("inf"),
        limit_s: float = float("inf"),
        retries: int | None = None,
    ) -> Answer:
        """Send `value` as JSON, if not None; return the answer of any status, without redirects.

        Args:
            method: `GET`, `POST` and the like.
            url: The full address.
            value: The body, if it is not None.
            deadline: The time of the last try, by `time.monotonic()`.
            limit_s: The seconds until the last try.
            retries: The number of tries after the first; None for the client's own.

        Raises:
            ServerFailed: no try got an answer, the answer is too long, or the server asks for a
                longer wait than MAX_FOREIGN_WAIT_S.
            Interrupted: a signal came while the client waited.
        """
        body = None
        if value is not None:
            body = json.dumps(value).encode()
        clock = self._clock
        deadline = min(deadline, clock.monotonic() + min(limit_s, self._total_s))
        last_try = 1 + (self._retries if retries is None else retries)
        backoff_s = self._backoff_s
        for tries in range(1, last_try + 1):
            limit = min(deadline, clock.monotonic() + self._timeout_s)
            outcome, headers = self._try(method, url, body, limit)
            if isinstance(outcome, Answer) and outcome.status not in RETRYABLE_STATUSES:
                return replace(outcome, tries=tries)
            delay_s = min(backoff_s, _MAX_BACKOFF_S)
            wished_s = wished_wait_s(headers, clock.time())
            # a server could otherwise stop the run by naming a date far away
            allowed_s = clamped_wait_s(wished_s)
            if allowed_s is None and isinstance(outcome, Answer):
                raise ServerFailed(
                    f"{self._shown_url}: status {outcome.status}, and the server asks to wait"
                    f" {describe_wait(wished_s)}; the longest wait is"
                    f" {describe_wait(MAX_FOREIGN_WAIT_S)}: try again then"
                )
            delay_s = max(delay_s, allowed_s or 0.0)
            if tries == last_try or clock.monotonic() + delay_s >= deadline:
                break
            self._show_wait(outcome, delay_s)
            clock.sleep(delay_s)
            backoff_s *= 2
        if isinstance(outcome, Answer):
            return replace(outcome, tries=tries)
        raise ServerFailed(f"{self._shown_url}: {outcome} ({tries} tries)")

    @contextmanager
    def stream(self, method: str, url: str, value: Any) -> Iterator[Stream]:
        """Send `value` as JSON once; yield the answer of any status, whose lines then arrive.

        The connection ends with the block. Raises ServerFailed without an answer, for a pause of
        more than `timeout_s` and for an answer that is too long.
        """
        timeout = urllib3.Timeout(connect=min(_CONNECT_S, self._timeout_s), read=self._timeout_s)
        options: Any = {
            "retries": False,
            "redirect": False,
            "preload_content": False,
            "timeout": timeout,
        }
        body = json.dumps(value).encode()
        try:
            response = self._pool.request(method, url, body=body, headers=self._headers, **options)
            with response:
                try:
                    yield Stream(response.status, response.reason or "", _lines(response))
                finally:
                    # the rest of an answer that nobody reads must not meet the next request
                    response.close()
        except urllib3.exceptions.NewConnectionError as error:  # a TimeoutError to urllib3
            raise ServerFailed(f"{self._shown_url}: {_cause(error)}") from None
        except (TimeoutError, urllib3.exceptions.TimeoutError):
            reason = f"nothing arrived within {self._timeout_s:.3g} s"
            raise ServerFailed(f"{self._shown_url}: {reason}") from None
        except urllib3.exceptions.HTTPError as error:
            raise ServerFailed(f"{self._shown_url}: {_cause(error)}") from None

    def _try(
        self, method: str, url: str, body: bytes | None, limit: float
    ) -> tuple[Answer | str, Mapping[str, str]]:
        """Return the answer of one try, or why there is none; and the answer's headers."""
        left_s = max(limit - self._clock.monotonic(), 0.01)
        try:
            timeout = urllib3.Timeout(connect=min(_CONNECT_S, left_s), read=left_s)
            options: Any = {
                "retries": False,
                "redirect": False,
                "preload_content": False,
                "timeout": timeout,
            }
            response = self._pool.request(method, url, body=body, headers=self._headers, **options)
            with response:
                content = _read(response, limit, self._clock)
                return Answer(response.status, response.reason or "", content, 1), response.headers
        except urllib3.exceptions.NewConnectionError as error:  # a TimeoutError to urllib3
            return _cause(error), {}
        except (TimeoutError, urllib3.exceptions.TimeoutError):
            return f"no answer within {left_s:.3g} s", {}
        except urllib3.exceptions.HTTPError as error:
            return _cause(error), {}

    def _show_wait(self, outcome: Answer | str, delay_s: float) -> None:
        """Say that a request waits, once for all threads that wait at this time."""
        now = self._clock.monotonic()
        with self._shown_lock:
            if delay_s < SHOWN_WAIT_S or now < self._shown_until:
                return
            self._shown_until = now + delay_s
        reason = f"status {outcome.status}" if isinstance(outcome, Answer) else outcome
        self._clock.show(f"{self._shown_url}: {reason}; trying again in {describe_wait(delay_s)}")

    def close(self) -> None:
        self._pool.clear()

    def quote(self, text: str | bytes) -> str:
        """Return the start of a server's answer for a message; the token in it is masked."""
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        # before it is cut, which could cut the token in two
        if self._token:
            text = text.replace(self._token, "***")
        return text[:_SHOWN_CHARS]


def _read(response: urllib3.BaseHTTPResponse, deadline: float, clock: SystemClock) -> bytes:
    """Return the whole body.

    Raises TimeoutError at the deadline, even if the server sends byte by byte.
    """
    content = bytearray()
    # in parts: the pool's own time limit is one of each read
    while part := response.read1(1 << 16):
        content += part
        if len(content) > _MAX_ANSWER_BYTES:
            raise ServerFailed(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
        if clock.monotonic() > deadline:
            raise TimeoutError
    return bytes(content)


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Yield the lines of a body as they arrive. Raises ServerFailed for one that is too long."""
    rest = b""
    length = 0
    while part := response.read1(1 << 16):
        length += len(part)
        if length > _MAX_ANSWER_BYTES:
            raise ServerFailed(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
    yield rest


def _cause(error: Exception) -> str:
    text = str(error)
    # the library puts its connection object before the cause
    if isinstance(error, urllib3.exceptions.HTTPError):
        text = text.rpartition(": ")[2]
    return f"{type(error).__name__}: {text}"
