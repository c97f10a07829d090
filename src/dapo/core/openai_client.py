"""A client of chat models on OpenAI-compatible servers (vLLM, SGLang, llama.cpp, hosted ones)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dapo.core.answer_fields import (
    WrongField,
    count_field,
    field,
    logprob_field,
    optional_mapping,
    parse_json,
    text_field,
)
from dapo.core.errors import DataError
from dapo.core.http_client import (
    RETRYABLE_STATUSES,
    Answer,
    HttpClient,
    ServerFailed,
    ServerRefused,
)
from dapo.core.waiting import SystemClock

TOTAL_S = 1800.0
"""The time limit of a request with all its tries and waits."""
_LIST_S = 60.0  # for the list of models


@dataclass(frozen=True)
class Completion:
    """The first choice of a chat completion."""

    text: str  # the message's content; empty if all of it was hidden reasoning
    tokens: int  # generated tokens; 0 if the server does not count them
    finish: str  # the server's finish reason: `stop`, `length`, `content_filter`, ...


@dataclass(frozen=True)
class CompletionPiece:
    """What a server adds to a chat completion at one time."""

    text: str
    finish: str | None  # the server's finish reason, with the last piece


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
        clock: SystemClock | None = None,
    ) -> None:
        """Open no connection yet.

        Args:
            url: the address without `/chat/completions`: `http://localhost:8000/v1`.
            model: the name of the model at the server.
            api_key: the key; None: the server needs none.
            timeout_s: as in HttpClient, like the other numbers and the clock.
            retries: the number of tries after the first.
            backoff_s: the pause before the first retry.
            connections: the number of threads that share the client.
            clock: measures time and waits; None: the system's.

        Raises:
            DataError: `url` is not an address.
        """
        try:
            parts = urlsplit(url)
        except ValueError:  # brackets that do not match
            parts = urlsplit("")
        if "@" in url or parts.query or parts.fragment:  # not quoted, because it may hold a secret
            raise DataError(
                "the server's address contains a user, a password, a query or a fragment; expected"
                " one such as http://localhost:8000/v1, and the key in an environment variable"
            )
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise DataError(f"server {url!r}: expected an address such as http://localhost:8000/v1")
        self.url = url.rstrip("/")
        self._model = model
        self._http = HttpClient(
            url,
            token=api_key,
            timeout_s=timeout_s,
            retries=retries,
            backoff_s=backoff_s,
            connections=connections,
            total_s=TOTAL_S,
            clock=clock,
        )

    def complete(self, messages: Sequence[Mapping[str, Any]], **parameters: Any) -> Completion:
        """Request with `parameters` such as temperature, max_tokens, seed.

        Raises ServerFailed or ServerRefused.
        """
        body = {
            "model": self._model,
            "messages": [dict(message) for message in messages],
            **parameters,
        }
        answer = self._answer("chat/completions", body)
        try:
            return _completion(parse_json(answer.body))
        except WrongField as error:
            raise ServerFailed(
                f"{self.url}: the answer is not a chat completion: {error}:"
                f" {self._error_message(answer)}"
            ) from None

    def stream(
        self, messages: Sequence[Mapping[str, Any]], **parameters: Any
    ) -> Iterator[CompletionPiece]:
        """Request as `complete` does, without retries, and yield the text as it arrives.

        A server that does not stream gives one piece. Raises ServerFailed or ServerRefused.
        """
        body = {
            "model": self._model,
            "messages": [dict(message) for message in messages],
            "stream": True,
            **parameters,
        }
        with self._http.stream("POST", f"{self.url}/chat/completions", body) as stream:
            if stream.status != 200:
                content = b"\n".join(stream.lines)
                raise self._failure(Answer(stream.status, stream.reason, content, 1))
            others = []
            for line in stream.lines:
                event = line.strip()
                if not event.startswith(b"data:"):
                    others.append(event)
                    continue
                data = event.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                yield self._piece(data)
            # one completion instead of events
            content = b"\n".join(others).strip()
            if content.startswith(b"{"):
                yield self._piece(content)

    def _piece(self, content: bytes) -> CompletionPiece:
        """Return the first choice of an event, or of a whole completion. Raises ServerFailed."""
        try:
            values = parse_json(content)
            if isinstance(values, dict) and values.get("choices") == []:
                return CompletionPiece("", None)  # the last event may have the usage alone
            choice = optional_mapping(field(values, "choices", 0), "choice")
            message = optional_mapping(choice.get("delta") or choice.get("message"), "delta")
            text = text_field(message.get("content"), "content", default="")
            finish = text_field(choice.get("finish_reason"), "finish_reason", default="")
            return CompletionPiece(text, finish or None)
        except WrongField as error:
            answer = Answer(200, "", content, 1)
            raise ServerFailed(
                f"{self.url}: the answer is not a chat completion: {error}:"
                f" {self._error_message(answer)}"
            ) from None

    def prompt_logprobs(self, token_ids: Sequence[int]) -> tuple[list[float], list[str]]:
        """Return the log-probability of each token but the first at temperature 1, and the texts.

        The texts are those of all tokens in the server's vocabulary; there are none if it does not
        say them.

        The server computes one forward pass over the tokens (`/completions` with `echo`, as of vLLM
        and SGLang). Raises ServerFailed or ServerRefused, also if it returns no log-probabilities
        of its prompt.
        """
        body = {
            "model": self._model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "echo": True,
            "logprobs": 1,
        }
        answer = self._answer("completions", body)
        try:
            scores = field(parse_json(answer.body), "choices", 0, "logprobs")
            logprobs = field(scores, "token_logprobs")
        except WrongField:
            logprobs = None
        count = len(logprobs) if isinstance(logprobs, list) else 0
        # with the token that it has generated, or without
        if count not in (len(token_ids), len(token_ids) + 1):
            raise ServerRefused(
                f"{self.url}: the answer has {max(count - 1, 0):,} log-probabilities for"
                f" {len(token_ids):,} tokens of the prompt; expected a server that returns them"
                " (/completions with echo and logprobs, as vLLM does)"
            )
        try:
            return _logprobs(logprobs, len(token_ids)), _texts(scores.get("tokens"), len(token_ids))
        except WrongField as error:
            raise ServerFailed(
                f"{self.url}: the answer has no usable log-probabilities: {error}"
            ) from None

    def models(self) -> list[str] | None:
        """Return the names of the served models; None if the server lists none.

        Raises ServerFailed or ServerRefused.
        """
        try:
            answer = self._http.request("GET", f"{self.url}/models", retries=0, limit_s=_LIST_S)
        except ServerFailed as error:
            cause = str(error).removeprefix(f"{self.url}: ")
            raise ServerFailed(f"{self.url} cannot be reached ({cause})") from None
        if answer.status in (401, 403):
            raise ServerRefused(f"{self.url} denies access (status {answer.status})")
        try:
            models = field(parse_json(answer.body), "data")
            return [text_field(field(model, "id"), "id", default="") for model in models] or None
        except (WrongField, TypeError):
            return None

    def close(self) -> None:
        self._http.close()

    def _answer(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Return the answer to a request with status 200. Raises ServerFailed or ServerRefused."""
        answer = self._http.request("POST", f"{self.url}/{path}", body)
        if answer.status != 200:
            raise self._failure(answer)
        return answer

    def _failure(self, answer: Answer) -> ServerFailed | ServerRefused:
        """Return the error of a status other than 200."""
        is_transient = answer.status in RETRYABLE_STATUSES or answer.status >= 500
        return (ServerFailed if is_transient else ServerRefused)(
            f"{self.url}: status {answer.status}: {self._error_message(answer)}"
        )

    def _error_message(self, answer: Answer) -> str:
        text = answer.body.decode(errors="replace")
        try:
            error = field(parse_json(answer.body), "error")
            text = text_field(
                error if isinstance(error, str) else field(error, "message"),
                "message",
                default=text,
            )
        except WrongField:
            pass  # then all of it is shown
        return self._http.quote(" ".join(text.split())) or "(nothing)"


def _completion(values: Any) -> Completion:
    """Return the first choice of an answer. Raises WrongField."""
    choice = field(values, "choices", 0)
    usage = optional_mapping(values.get("usage"), "usage")
    return Completion(
        text=text_field(field(choice, "message", "content"), "content", default=""),
        tokens=count_field(usage.get("completion_tokens"), "completion_tokens"),
        finish=text_field(choice.get("finish_reason"), "finish_reason", default="stop"),
    )


def _logprobs(values: Sequence[Any], count: int) -> list[float]:
    """Return the log-probabilities of the tokens after the first. Raises WrongField."""
    # the first token has none
    following = enumerate(values[1:count], start=1)
    return [logprob_field(value, f"log-probability {i}") for i, value in following]


def _texts(values: Any, count: int) -> list[str]:
    """Return the texts of the tokens, if the server says them. Raises WrongField."""
    if not values:
        return []
    if not isinstance(values, list) or len(values) < count:
        raise WrongField(f"it does not have {count:,} texts of tokens")
    return [
        text_field(value, f"text of token {i}", default="\ufffd")
        for i, value in enumerate(values[:count])
    ]
