"""A chat model behind an OpenAI-compatible server (vLLM, SGLang, llama.cpp, a hosted one)."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import urllib3

from dapo.core.errors import DapoError, DataError

RETRYABLE_STATUSES = (408, 409, 425, 429, 500, 502, 503, 504)
_CONNECT_S, _MAX_BACKOFF_S = 10.0, 30.0
_SHOWN_CHARS = 200


class ServerFailed(DapoError):
    """A server gave no usable answer after all retries; it may another time."""


class ServerRefused(DataError):
    """A server rejected the request: its model, its key or its address is wrong."""


@dataclass(frozen=True)
class Completion:
    """The first choice of a chat completion."""

    text: str  # the message's content, empty where all of it was hidden reasoning
    tokens: int  # the number of generated tokens, 0 where the server does not count them
    finish: str  # the server's finish reason: `stop`, `length`, `content_filter`, ...


class ChatClient:
    """Requests one chat completion per call; several threads may share one client."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 5,
        backoff_s: float = 0.5,
        connections: int = 8,
    ) -> None:
        """Open no connection yet.

        Args:
            url: ends where `/chat/completions` begins, as in `http://localhost:8000/v1`.
            model: the model's name at the server.
            api_key: sent as a bearer token.
            timeout_s: time limit of one request.
            retries: further tries after a failed connection or a transient status.
            backoff_s: tries wait 0, 2, 4, 8 ... times this, or as long as the server asks for.
            connections: how many threads share the client.

        Raises:
            DataError: `url` is not an address.
        """
        try:
            parts = urlsplit(url)
        except ValueError:  # brackets that do not match
            parts = urlsplit("")
        if "@" in url or parts.query or parts.fragment:  # not repeated: it may hold a secret
            raise DataError(
                "the server's address has a user, a password, a query or a fragment in it; expected one such as "
                "http://localhost:8000/v1, and the key in an environment variable"
            )
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise DataError(f"server {url!r}: expected an address such as http://localhost:8000/v1")
        # it warns of every attempt that fails; complete() raises the last failure
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        self.url = url.rstrip("/")
        self._model, self._key = model, api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._pool = urllib3.PoolManager(
            maxsize=connections,
            timeout=urllib3.Timeout(connect=min(_CONNECT_S, timeout_s), read=timeout_s),
            retries=urllib3.Retry(
                total=retries,
                status_forcelist=RETRYABLE_STATUSES,
                allowed_methods=None,
                backoff_factor=backoff_s,
                backoff_max=_MAX_BACKOFF_S,
                raise_on_status=False,
            ),
        )

    def complete(self, messages: Sequence[Mapping[str, str]], **parameters: float) -> Completion:
        """Request with `parameters` such as temperature, max_tokens, seed. Raises ServerFailed or ServerRefused."""
        body = {"model": self._model, "messages": [dict(message) for message in messages], **parameters}
        try:
            response = self._pool.request("POST", f"{self.url}/chat/completions", json=body, headers=self._headers)
        except urllib3.exceptions.HTTPError as error:
            raise ServerFailed(f"{self.url}: {error_cause(error)}") from None
        if response.status != 200:
            is_transient = response.status in RETRYABLE_STATUSES or response.status >= 500
            raise (ServerFailed if is_transient else ServerRefused)(
                f"{self.url}: status {response.status}: {self._error_message(response)}"
            )
        try:
            values = response.json()
            choice = values["choices"][0]
            text = choice["message"]["content"] or ""
            tokens = int((values.get("usage") or {}).get("completion_tokens") or 0)
            finish = str(choice.get("finish_reason") or "stop")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise ServerFailed(
                f"{self.url}: the answer is no chat completion: {self._error_message(response)}"
            ) from None
        if not isinstance(text, str):
            raise ServerFailed(f"{self.url}: the answer's content is a {type(text).__name__}, not text")
        return Completion(text, tokens, finish)

    def models(self) -> list[str] | None:
        """The served models' names; None where the server lists none. Raises ServerFailed or ServerRefused."""
        try:
            response = self._pool.request("GET", f"{self.url}/models", headers=self._headers, retries=False)
        except urllib3.exceptions.HTTPError as error:
            raise ServerFailed(f"{self.url} cannot be reached ({error_cause(error)})") from None
        if response.status in (401, 403):
            raise ServerRefused(f"{self.url} refuses us (status {response.status})")
        try:
            return [str(model["id"]) for model in response.json()["data"]] or None
        except (ValueError, KeyError, TypeError):
            return None

    def close(self) -> None:
        """Close idle connections."""
        self._pool.clear()

    def _error_message(self, response: urllib3.BaseHTTPResponse) -> str:
        try:
            values: Any = response.json()
            error = values.get("error", values)
            text = error.get("message", error) if isinstance(error, dict) else error
        except (ValueError, AttributeError, RecursionError):
            text = response.data.decode(errors="replace")
        return without_key(" ".join(str(text).split()), self._key)[:_SHOWN_CHARS] or "(nothing)"


def without_key(text: str, key: str | None) -> str:
    """A server's text with `***` for the key that it was sent, which it may quote."""
    return text.replace(key, "***") if key else text


def error_cause(error: Exception) -> str:
    """The innermost reason of a failed request, without the addresses of objects."""
    cause = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason else error
    text = str(cause).rpartition(": ")[2] if isinstance(cause, urllib3.exceptions.HTTPError) else str(cause)
    return f"{type(cause).__name__}: {text}"
