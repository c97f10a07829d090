"""An HTTP client with time limits, which retries transient failures."""

import json
import time
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import urllib3

from dapo.core.errors import DapoError, DataError
from dapo.core.secrets import mask_text

RETRYABLE_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504)
_CONNECT_S, _MAX_BACKOFF_S = 10.0, 30.0
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


class HttpClient:
    """Sends JSON to one server, through the proxies of the environment; several threads may share a client."""

    def __init__(
        self, url: str, *, token: str | None, timeout_s: float, retries: int, backoff_s: float, connections: int = 1
    ) -> None:
        """Open no connection yet. `url` is a valid address, which selects the proxy and stands in error messages.

        The `token` is sent as a bearer token. A try may take `timeout_s` from connecting to the last byte; `retries`
        follow a failed connection, a timeout or a status of RETRYABLE_STATUSES, after 1, 2, 4, 8 ... times `backoff_s`,
        at most 30 s, or `Retry-After` if that is longer. `connections` is the number of threads that share the client.
        """
        self._shown_url, self._token = mask_text(url), token
        self._timeout_s, self._retries, self._backoff_s = timeout_s, retries, backoff_s
        self._headers = {"Content-Type": "application/json", "User-Agent": "dapo"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        parts = urlsplit(url)
        is_direct = parts.hostname in _LOOPBACK or urllib.request.proxy_bypass(parts.hostname or "")
        proxy = None if is_direct else urllib.request.getproxies().get(parts.scheme)
        self._pool = (
            urllib3.ProxyManager(proxy, maxsize=connections) if proxy else urllib3.PoolManager(maxsize=connections)
        )

    def request(
        self, method: str, url: str, value: Any = None, *, deadline: float = float("inf"), retries: int | None = None
    ) -> Answer:
        """Send `value` as JSON, if it is not None, and return the answer of any status, without following redirects.

        `deadline` is the time of the last try, by `time.monotonic()`. Raises ServerFailed if no try got an answer, or
        the answer is too long.
        """
        body = None if value is None else json.dumps(value).encode()
        last_try = 1 + (self._retries if retries is None else retries)
        tries, backoff_s = 0, self._backoff_s
        while True:
            tries += 1
            limit = min(deadline, time.monotonic() + self._timeout_s)
            left_s = max(limit - time.monotonic(), 0.01)
            answer, delay_s = None, min(backoff_s, _MAX_BACKOFF_S)
            try:
                timeout = urllib3.Timeout(connect=min(_CONNECT_S, left_s), read=left_s)
                options: Any = {"retries": False, "redirect": False, "preload_content": False, "timeout": timeout}
                response = self._pool.request(method, url, body=body, headers=self._headers, **options)
                with response:
                    answer = Answer(response.status, response.reason or "", _read(response, limit), tries)
            except urllib3.exceptions.NewConnectionError as error:  # a TimeoutError to urllib3
                failure = _cause(error)
            except (TimeoutError, urllib3.exceptions.TimeoutError):
                failure = f"no answer within {left_s:.3g} s"
            except urllib3.exceptions.HTTPError as error:
                failure = _cause(error)
            if answer is not None:
                if answer.status not in RETRYABLE_STATUSES:
                    return answer
                wanted = response.headers.get("Retry-After", "")
                delay_s = max(delay_s, float(wanted)) if wanted.isdecimal() else delay_s
            if tries == last_try or time.monotonic() + delay_s >= deadline:
                if answer is not None:
                    return answer
                raise ServerFailed(f"{self._shown_url}: {failure} ({tries} tries)")
            time.sleep(delay_s)
            backoff_s *= 2

    def close(self) -> None:
        self._pool.clear()

    def quote(self, text: str | bytes) -> str:
        """The start of a server's answer for a message; the token in it is masked."""
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return (text.replace(self._token, "***") if self._token else text)[:_SHOWN_CHARS]


def _read(response: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
    """The whole body. Raises TimeoutError at the deadline, even if the server sends byte by byte."""
    content = b""
    while part := response.read1(1 << 16):
        content += part
        if len(content) > _MAX_ANSWER_BYTES:
            raise ServerFailed(f"an answer of more than {_MAX_ANSWER_BYTES} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError
    return content


def _cause(error: Exception) -> str:
    text = str(error).rpartition(": ")[2] if isinstance(error, urllib3.exceptions.HTTPError) else str(error)
    return f"{type(error).__name__}: {text}"
