"""A client of chat models on OpenAI-compatible servers (vLLM, SGLang, llama.cpp, hosted ones)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dapo.core.errors import DataError
from dapo.core.http_client import RETRYABLE_STATUSES, Answer, HttpClient, ServerFailed, ServerRefused


@dataclass(frozen=True)
class Completion:
    """The first choice of a chat completion."""

    text: str  # the message's content; empty if all of it was hidden reasoning
    tokens: int  # generated tokens; 0 if the server does not count them
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
        """Open no connection yet; the numbers are those of HttpClient.

        `url` is the address without `/chat/completions`: `http://localhost:8000/v1`. Raises DataError if it is none.
        """
        try:
            parts = urlsplit(url)
        except ValueError:  # brackets that do not match
            parts = urlsplit("")
        if "@" in url or parts.query or parts.fragment:  # not quoted, because it may hold a secret
            raise DataError(
                "the server's address contains a user, a password, a query or a fragment; expected one such as "
                "http://localhost:8000/v1, and the key in an environment variable"
            )
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise DataError(f"server {url!r}: expected an address such as http://localhost:8000/v1")
        self.url, self._model = url.rstrip("/"), model
        self._http = HttpClient(
            url, token=api_key, timeout_s=timeout_s, retries=retries, backoff_s=backoff_s, connections=connections
        )

    def complete(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> Completion:
        """Request with `parameters` such as temperature, max_tokens, seed. Raises ServerFailed or ServerRefused."""
        body = {"model": self._model, "messages": [dict(message) for message in messages], **parameters}
        answer = self._answer("chat/completions", body)
        try:
            values = json.loads(answer.body)
            choice = values["choices"][0]
            text = choice["message"]["content"] or ""
            tokens = int((values.get("usage") or {}).get("completion_tokens") or 0)
            finish = str(choice.get("finish_reason") or "stop")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise ServerFailed(f"{self.url}: the answer is no chat completion: {self._error_message(answer)}") from None
        if not isinstance(text, str):
            raise ServerFailed(f"{self.url}: the answer's content is a {type(text).__name__}, not text")
        return Completion(text, tokens, finish)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> tuple[list[float], list[str]]:
        """The log-probability of each token but the first, given those before it, at temperature 1; the tokens' texts.

        The texts are those of all tokens in the server's vocabulary; there are none if it does not say them.

        The server computes one forward pass over the tokens (`/completions` with `echo`, as of vLLM and SGLang). Raises
        ServerFailed or ServerRefused, also if it returns no log-probabilities of its prompt.
        """
        body = {"model": self._model, "prompt": list(token_ids), "max_tokens": 1, "echo": True, "logprobs": 1}
        answer = self._answer("completions", body)
        try:
            scores = json.loads(answer.body)["choices"][0]["logprobs"]
            found = [float(value) for value in scores["token_logprobs"][1 : len(token_ids)]]
            texts = [str(text) for text in scores.get("tokens") or ()][: len(token_ids)]
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            found, texts = [], []
        if len(found) != len(token_ids) - 1:
            raise ServerRefused(
                f"{self.url}: the answer has {len(found):,} log-probabilities for {len(token_ids):,} tokens of the "
                "prompt; expected a server that returns them (/completions with echo and logprobs, as vLLM does)"
            )
        return found, texts

    def models(self) -> list[str] | None:
        """The names of the served models; None if the server lists none. Raises ServerFailed or ServerRefused."""
        try:
            answer = self._http.request("GET", f"{self.url}/models", retries=0)
        except ServerFailed as error:
            cause = str(error).removeprefix(f"{self.url}: ")
            raise ServerFailed(f"{self.url} cannot be reached ({cause})") from None
        if answer.status in (401, 403):
            raise ServerRefused(f"{self.url} denies access (status {answer.status})")
        try:
            return [str(model["id"]) for model in json.loads(answer.body)["data"]] or None
        except (ValueError, KeyError, TypeError):
            return None

    def close(self) -> None:
        self._http.close()

    def _answer(self, path: str, body: Mapping[str, Any]) -> Answer:
        """The answer to a request with status 200. Raises ServerFailed or ServerRefused."""
        answer = self._http.request("POST", f"{self.url}/{path}", body)
        if answer.status != 200:
            is_transient = answer.status in RETRYABLE_STATUSES or answer.status >= 500
            raise (ServerFailed if is_transient else ServerRefused)(
                f"{self.url}: status {answer.status}: {self._error_message(answer)}"
            )
        return answer

    def _error_message(self, answer: Answer) -> str:
        try:
            values: Any = json.loads(answer.body)
            error = values.get("error", values)
            text = error.get("message", error) if isinstance(error, dict) else error
        except (ValueError, AttributeError, RecursionError):
            text = answer.body.decode(errors="replace")
        return self._http.quote(" ".join(str(text).split())) or "(nothing)"
