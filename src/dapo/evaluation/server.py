"""Responses from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, a hosted model), as text."""

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from dapo.core.errors import ConfigError, DapoError, DataError
from dapo.core.openai_client import ChatClient, ServerFailed, ServerRefused
from dapo.core.rng import keyed_seed
from dapo.types import Finish, Problem

API_KEY = "OPENAI_API_KEY"
"""The environment variable that holds the server's key, where it wants one."""
_FINISHES: Mapping[str, Finish] = {"stop": "stop", "length": "length"}
_POLL_S = 0.2
_SEED_BITS = 31


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
    backoff_s: float = 0.5
    """Before the second retry (the first is at once); it doubles, and a server that says how long to wait is heard."""


class ServerClient:
    """Asks for k chat completions a problem, several at a time; each has a seed of its own, keyed by its place."""

    def __init__(self, options: ServerOptions, messages: Callable[[Problem], Sequence[Mapping[str, str]]]) -> None:
        """Raises ConfigError where the server cannot be reached, or does not know the model."""
        self._options, self._messages = options, messages
        try:
            self._chat = ChatClient(
                options.url,
                options.model,
                api_key=os.environ.get(API_KEY),
                timeout_s=options.timeout_s,
                retries=options.retries,
                backoff_s=options.backoff_s,
                connections=options.concurrency,
            )
        except DataError as error:
            raise ConfigError(f"--server: {error}") from None
        self._require_model()
        self._results: queue.SimpleQueue[tuple[int, int, ServedResponse]] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[tuple[int, int, list[dict[str, str]], int] | None] = queue.SimpleQueue()
        self._is_closed = False
        for _ in range(options.concurrency):
            # daemons: a request that is still out must not keep an interrupted command alive
            threading.Thread(target=self._work, name="dapo-server", daemon=True).start()

    def submit(self, index: int, problem: Problem) -> None:
        """Ask for the k responses to a problem."""
        messages = [dict(message) for message in self._messages(problem)]
        for i in range(self._options.samples):
            seed = keyed_seed(self._options.seed, "eval", problem.id, i) % (1 << _SEED_BITS)
            self._tasks.put((index, i, messages, seed))

    def poll(self) -> list[tuple[int, int, ServedResponse]]:
        """What has arrived; waits a moment if nothing has."""
        found = []
        try:
            found.append(self._results.get(timeout=_POLL_S))
            while True:
                found.append(self._results.get_nowait())
        except queue.Empty:
            return found

    def close(self) -> None:
        """Give up what is still out."""
        self._is_closed = True
        for _ in range(self._options.concurrency):
            self._tasks.put(None)
        self._chat.close()

    def __enter__(self) -> "ServerClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._is_closed:
            index, i, messages, seed = task
            try:
                response = self._ask(messages, seed)
            except Exception as error:  # a thread's exception would be lost, and the evaluation would wait for ever
                reason = str(error).removeprefix(f"{self._chat.url}: ")
                response = _failed_response(
                    reason if isinstance(error, DapoError) else f"{type(error).__name__}: {reason}"
                )
            self._results.put((index, i, response))

    def _ask(self, messages: list[dict[str, str]], seed: int) -> ServedResponse:
        options = self._options
        found = self._chat.complete(
            messages,
            temperature=options.temperature,
            top_p=options.top_p,
            max_tokens=options.max_tokens,
            seed=seed,
        )
        if found.finish not in _FINISHES:
            return _failed_response(f"the response ended by {found.finish!r}")
        return ServedResponse(found.text, found.tokens, _FINISHES[found.finish])

    def _require_model(self) -> None:
        options = self._options
        try:
            served = self._chat.models()
        except ServerFailed as error:
            raise ConfigError(
                f"--server {error}; expected a URL such as http://localhost:8000/v1 of a server that runs"
            ) from None
        except ServerRefused as error:
            raise ConfigError(f"--server {error}; put its key into the environment variable {API_KEY}") from None
        # not every server lists its models; an unknown one shows with the first answer
        if served is not None and options.model not in served:
            raise ConfigError(f"--server {options.url} has no model {options.model!r}; it has {', '.join(served)}")


def _failed_response(reason: str) -> ServedResponse:
    return ServedResponse("", 0, None, f"server: {reason}")
