"""Responses from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, a hosted model), as text."""

import os
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import urllib3

from dapo.errors import ConfigError
from dapo.keyed import keyed_seed
from dapo.types import Finish, Problem

API_KEY = "OPENAI_API_KEY"
"""The environment variable that holds the server's key, where it wants one."""
_FINISHES: Mapping[str, Finish] = {"stop": "stop", "length": "length"}
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
_OK, _UNAUTHORIZED, _FORBIDDEN = 200, 401, 403
_CONNECT_S, _LONGEST_PAUSE_S = 10.0, 30.0
_POLL_S = 0.2
_SEED_BITS = 31
_SHOWN_CHARS = 200


@dataclass(frozen=True)
class ServedResponse:
    """What the server said to one request, or why there is nothing."""

    text: str
    tokens: int
    finish: Finish | None
    error: str | None = None


@dataclass(frozen=True)
class ServerOptions:
    """How a server is asked."""

    url: str
    """Up to and with the version: `http://localhost:8000/v1`."""
    model: str
    """As the server calls it."""
    samples: int
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    concurrency: int = 16
    timeout_s: float = 600.0
    """For one response."""
    retries: int = 4
    """After a failure that may pass: no connection, a timeout, 429, 5xx."""
    pause_s: float = 0.5
    """Before the second retry (the first is at once); it doubles, and a server that says how long to wait is heard."""


class ServerClient:
    """Asks for k chat completions a problem, several at a time; each has a seed of its own, keyed by its place."""

    def __init__(self, options: ServerOptions, messages: Callable[[Problem], Sequence[Mapping[str, str]]]) -> None:
        """Raises ConfigError where the server cannot be reached, or does not know the model."""
        self._options, self._messages = options, messages
        key = os.environ.get(API_KEY)
        self._url = options.url.rstrip("/")
        self._pool = urllib3.PoolManager(
            maxsize=options.concurrency,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=urllib3.Timeout(connect=min(_CONNECT_S, options.timeout_s), read=options.timeout_s),
            retries=urllib3.Retry(
                options.retries,
                allowed_methods=None,
                status_forcelist=_PASSING,
                backoff_factor=options.pause_s,
                backoff_max=_LONGEST_PAUSE_S,
                raise_on_status=False,
            ),
        )
        self._arrived: queue.SimpleQueue[tuple[int, int, ServedResponse]] = queue.SimpleQueue()
        self._require_model()
        self._threads = ThreadPoolExecutor(options.concurrency, thread_name_prefix="dapo-server")

    def submit(self, place: int, problem: Problem) -> None:
        """Ask for the k responses to a problem."""
        messages = [dict(message) for message in self._messages(problem)]
        for i in range(self._options.samples):
            seed = keyed_seed(self._options.seed, "eval", problem.id, i) % (1 << _SEED_BITS)
            self._threads.submit(self._ask, place, i, messages, seed)

    def poll(self) -> list[tuple[int, int, ServedResponse]]:
        """What has arrived; waits a moment if nothing has."""
        found = []
        try:
            found.append(self._arrived.get(timeout=_POLL_S))
            while True:
                found.append(self._arrived.get_nowait())
        except queue.Empty:
            return found

    def close(self) -> None:
        """Give up what is still out."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.clear()

    def __enter__(self) -> "ServerClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, place: int, i: int, messages: list[dict[str, str]], seed: int) -> None:
        options = self._options
        body = {
            "model": options.model,
            "messages": messages,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "max_tokens": options.max_tokens,
            "seed": seed,
        }
        try:
            answer = self._pool.request("POST", f"{self._url}/chat/completions", json=body)
            response = _read(answer) if answer.status == _OK else _nothing(f"status {answer.status}: {_told(answer)}")
        except Exception as error:  # a thread's exception would be lost, and the evaluation would wait for ever
            response = _nothing(_cause(error))
        self._arrived.put((place, i, response))

    def _require_model(self) -> None:
        options = self._options
        try:
            answer = self._pool.request("GET", f"{self._url}/models", retries=False)
        except urllib3.exceptions.HTTPError as error:
            raise ConfigError(
                f"--server {options.url} cannot be reached ({_cause(error)}); "
                "expected a URL such as http://localhost:8000/v1 of a server that runs"
            ) from None
        if answer.status in (_UNAUTHORIZED, _FORBIDDEN):
            raise ConfigError(
                f"--server {options.url} refuses us (status {answer.status}); "
                f"put its key into the environment variable {API_KEY}"
            )
        try:
            served = [str(model["id"]) for model in answer.json()["data"]]
        except (ValueError, KeyError, TypeError):
            return  # not every server lists its models; an unknown one shows with the first answer
        if served and options.model not in served:
            raise ConfigError(f"--server {options.url} has no model {options.model!r}; it has {', '.join(served)}")


def _read(answer: urllib3.BaseHTTPResponse) -> ServedResponse:
    try:
        values = answer.json()
        choice = values["choices"][0]
        text = choice["message"]["content"] or ""
        said = choice.get("finish_reason") or "stop"
        tokens = int((values.get("usage") or {}).get("completion_tokens") or 0)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return _nothing(f"the answer is no chat completion: {_told(answer)}")
    if not isinstance(text, str):
        return _nothing(f"the answer's content is a {type(text).__name__}, not text")
    if said not in _FINISHES:
        return _nothing(f"the response ended by {said!r}")
    return ServedResponse(text, tokens, _FINISHES[said])


def _nothing(reason: str) -> ServedResponse:
    return ServedResponse("", 0, None, f"server: {reason}")


def _told(answer: urllib3.BaseHTTPResponse) -> str:
    """The server's own words."""
    try:
        values: Any = answer.json()
        error = values.get("error", values)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = answer.data.decode(errors="replace")
    return " ".join(str(text).split())[:_SHOWN_CHARS] or "(nothing)"


def _cause(error: Exception) -> str:
    """The innermost reason, without the addresses of objects."""
    cause = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) and error.reason else error
    text = str(cause).rpartition(": ")[2] if isinstance(cause, urllib3.exceptions.HTTPError) else str(cause)
    return f"{type(cause).__name__}: {text}"
