"""Samples responses from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, a hosted model)."""

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dapo.core.errors import ConfigError, DapoError, DataError
from dapo.core.http_client import ServerFailed, ServerRefused
from dapo.core.openai_client import ChatClient
from dapo.core.rng import keyed_seed
from dapo.core.secrets import mask_text
from dapo.evaluation.evaluate import Response
from dapo.evaluation.scores import EvaluationPlan
from dapo.types import Finish, Message, Problem

API_KEY_VARIABLE = "OPENAI_API_KEY"  # the environment variable with the server's key
_FINISHES: Mapping[str, Finish] = {"stop": "stop", "length": "length"}
_POLL_S = 0.2
SEED_BITS = 31


class ServerSampler:
    """Samples k chat completions per problem; seeds follow from (run seed, problem, sample)."""

    def __init__(
        self,
        url: str,
        model: str,
        plan: EvaluationPlan,
        to_messages: Callable[[Problem], Sequence[Message] | Mapping[str, Any]],
        *,
        concurrency: int = 16,
        timeout_s: float = 600.0,
        retries: int = 4,
        backoff_s: float = 0.5,
    ) -> None:
        """Connect to the server.

        Args:
            url: The server's address up to and including the version: `http://localhost:8000/v1`.
            model: The model's name at the server.
            plan: The sampling options.
            to_messages: Turns a problem into chat messages, or into a mapping of `messages` and
                what the server's chat template gets besides (`tools`, `chat_template_kwargs`).
            concurrency: The number of requests in flight.
            timeout_s: The time limit of one response.
            retries: The number of retries after a lost connection, a timeout or a status of
                RETRYABLE_STATUSES.
            backoff_s: The pause before the first retry; it doubles with each.

        Raises:
            ConfigError: the server cannot be reached or does not serve the model.
        """
        self.plan = plan
        self._to_messages = to_messages
        self._concurrency = concurrency
        self._chat = open_client(
            url,
            model,
            timeout_s=timeout_s,
            retries=retries,
            backoff_s=backoff_s,
            connections=concurrency,
        )
        self._results: queue.SimpleQueue[tuple[int, int, Response]] = queue.SimpleQueue()
        self._tasks: queue.SimpleQueue[tuple[int, int, dict[str, Any], int] | None] = (
            queue.SimpleQueue()
        )
        self._is_closed = False
        for _ in range(concurrency):
            # daemons: a pending request must not keep an interrupted command alive
            threading.Thread(target=self._work, name="dapo-server", daemon=True).start()

    def submit(self, index: int, problem: Problem) -> None:
        """See Sampler."""
        conversation = self._to_messages(problem)
        if isinstance(conversation, Mapping):
            prompt = dict(conversation)
        else:
            prompt = {"messages": [dict(message) for message in conversation]}
        for i in range(self.plan.samples_per_problem):
            # some servers take a seed as a signed number of 32 bits
            seed = keyed_seed(self.plan.seed, "eval", problem.id, i) % (1 << SEED_BITS)
            self._tasks.put((index, i, prompt, seed))

    def poll(self) -> list[tuple[int, int, Response]]:
        """See Sampler. Waits a moment if no response has arrived."""
        responses = []
        try:
            responses.append(self._results.get(timeout=_POLL_S))
            while True:
                responses.append(self._results.get_nowait())
        except queue.Empty:
            return responses

    def abort(self) -> None:
        """Drop the requests that no thread has sent yet."""
        with suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()

    def close(self) -> None:
        """End all threads after their present request."""
        self._is_closed = True
        for _ in range(self._concurrency):
            self._tasks.put(None)
        self._chat.close()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._is_closed:
            index, i, prompt, seed = task
            try:
                response = self._request(prompt, seed)
            # otherwise a thread's exception is lost, and the evaluation waits forever
            except Exception as error:
                reason = str(error).removeprefix(f"{self._chat.url}: ")
                # of an unforeseen error the text alone may say nothing
                if not isinstance(error, DapoError):
                    reason = f"{type(error).__name__}: {reason}"
                response = _failed_response(reason)
            self._results.put((index, i, response))

    def _request(self, prompt: dict[str, Any], seed: int) -> Response:
        """Return one response, which may have failed."""
        plan = self.plan
        completion = self._chat.complete(
            **prompt,
            temperature=plan.temperature,
            top_p=plan.top_p,
            max_tokens=plan.max_response_tokens,
            seed=seed,
        )
        if completion.finish not in _FINISHES:
            return _failed_response(f"the response ended by {completion.finish!r}")
        return Response(completion.text, (), completion.tokens, _FINISHES[completion.finish])


def open_client(url: str, model: str, **limits: Any) -> ChatClient:
    """Return a client of a served model, with the key of API_KEY_VARIABLE.

    Args:
        url: the server's address up to and including the version: `http://localhost:8000/v1`.
        model: the model's name at the server.
        limits: the numbers of ChatClient, such as `timeout_s`.

    Raises:
        ConfigError: the server cannot be reached or does not serve the model, as far as it tells.
    """
    try:
        client = ChatClient(url, model, api_key=os.environ.get(API_KEY_VARIABLE), **limits)
    except DataError as error:
        raise ConfigError(f"--server: {error}") from None
    try:
        served = client.models()
    except ServerFailed as error:
        advice = "expected the URL of a running server, such as http://localhost:8000/v1"
        raise ConfigError(f"--server {error}; {advice}") from None
    except ServerRefused as error:
        advice = f"set its key in the environment variable {API_KEY_VARIABLE}"
        raise ConfigError(f"--server {error}; {advice}") from None
    # not every server lists its models; an unknown one shows with the first answer
    if served is not None and model not in served:
        raise ConfigError(f"--server {url} has no model {model!r}; it has {', '.join(served)}")
    return client


def _failed_response(reason: str) -> Response:
    return Response("", (), 0, None, mask_text(f"server: {reason}"))
