"""A chat model behind an OpenAI-compatible server."""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from dapo.errors import DapoError, DataError

_TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
_SHOWN = 200


class ServerFailed(DapoError):
    """The server did not answer as a chat server does, however often it was asked; another time it may."""


class ServerRefused(DataError):
    """The server says that the request is wrong: its model, its key, its address."""


class ChatClient:
    """Asks for one completion at a time; several threads may share one."""

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
        """`url` ends where `/chat/completions` begins, as in `http://localhost:8000/v1`. Raises DataError.

        A failed connection or a status that may pass is tried again `retries` times, after 0, 2, 4, 8 ... times
        `backoff_s` or as long as the server asks for.
        """
        import urllib3

        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise DataError(f"server {url!r}: expected an address such as http://localhost:8000/v1")
        # it warns of every attempt that fails; the last failure is told by ask()
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        self._url = f"{url.rstrip('/')}/chat/completions"
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._pool = urllib3.PoolManager(
            maxsize=connections,
            block=True,
            timeout=timeout_s,
            retries=urllib3.Retry(
                total=retries,
                status_forcelist=_TRY_AGAIN,
                allowed_methods=None,
                backoff_factor=backoff_s,
                raise_on_status=False,
            ),
        )

    def ask(self, messages: Sequence[Mapping[str, str]], *, temperature: float, max_tokens: int, seed: int) -> str:
        """The text of the first choice. Raises ServerFailed or ServerRefused."""
        import urllib3

        body = {
            "model": self._model,
            "messages": [dict(message) for message in messages],
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
        }
        try:
            response = self._pool.request("POST", self._url, json=body, headers=self._headers)
        except urllib3.exceptions.HTTPError as error:
            raise ServerFailed(f"{self._url}: {' '.join(str(error).split())[:_SHOWN]}") from None
        text = response.data.decode("utf-8", "replace")
        if response.status in _TRY_AGAIN or response.status >= 500:
            raise ServerFailed(f"{self._url} answers {response.status}: {text[:_SHOWN]}")
        if response.status != 200:
            raise ServerRefused(f"{self._url} refuses with {response.status}: {text[:_SHOWN]}")
        return self._content(text)

    def _content(self, text: str) -> str:
        try:
            reply: Any = json.loads(text)
            content = reply["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise ServerFailed(f"{self._url}: expected a chat completion, got {text[:_SHOWN]!r}") from None
        # a response that is all hidden reasoning has no content
        return content if isinstance(content, str) else ""
