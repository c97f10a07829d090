"""A teacher behind a server: `loss.reference.server` scores the sampled tokens of each step."""

import os
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from functools import cache
from typing import Any

from dapo.config import ReferenceServerConfig
from dapo.core.errors import ConfigError, DataError
from dapo.core.http_client import ServerFailed
from dapo.core.openai_client import ChatClient
from dapo.core.waiting import STOP_SIGNAL
from dapo.evaluation.server import API_KEY_VARIABLE
from dapo.types import Sample

CONNECTIONS = 16
COMPARED_TOKENS = 64  # of the vocabulary, when a run starts
TIMEOUT_S = 600.0
_POLL_S = 0.2  # between two looks for a signal


class TeacherServer:
    """Scores samples by the prompt log-probabilities of an OpenAI-compatible server."""

    def __init__(self, server: ReferenceServerConfig) -> None:
        """Raises ConfigError if the server cannot be reached or does not serve the model."""
        key = os.environ.get(API_KEY_VARIABLE)
        self._name = str(server)
        model = server.model
        try:
            self._client = ChatClient(
                server.url, model, api_key=key, timeout_s=TIMEOUT_S, connections=CONNECTIONS
            )
            served = self._client.models()
        except (ServerFailed, DataError) as error:
            raise ConfigError(f"{self._name}: {error}") from None
        if served is not None and model not in served:
            raise ConfigError(
                f"{self._name}: the server has no model {model}; it has {', '.join(served)}"
            )

    def require_vocabulary(self, tokenizer: Any) -> None:
        """Raise ConfigError if the server's text of a token is another one than the tokenizer's.

        It compares `COMPARED_TOKENS` spread over the vocabulary, without special ones and parts of
        a character. Spaces around a text do not count, because servers differ in them. A server
        that says no texts passes.
        """
        last = len(tokenizer) - 1
        steps = COMPARED_TOKENS - 1
        ids = sorted(
            {round(i * last / steps) for i in range(COMPARED_TOKENS)}
            - set(tokenizer.all_special_ids)
        )
        try:
            _, texts = self._client.prompt_logprobs(ids)
        except (ServerFailed, DataError) as error:  # a stop by a signal passes as it is
            raise type(error)(f"{self._name}: {error}") from None
        policy_texts = [tokenizer.decode([token]) for token in ids]
        pairs = [
            pair
            for pair in zip(ids, policy_texts, texts, strict=False)
            if not _is_partial(pair[1], pair[2])
        ]
        differing = [
            (token, mine, server_text)
            for token, mine, server_text in pairs
            if mine.strip() != server_text.strip()
        ]
        if differing:
            token, mine, server_text = differing[0]
            raise ConfigError(
                f"{self._name} has another vocabulary than the policy: of {len(pairs)} tokens"
                f" compared, {len(differing)} differ; the first is id {token}, {mine!r} here and"
                f" {server_text!r} there; serve a model of the policy's family"
            )

    def with_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with `reference_logprobs`.

        Raises DapoError if the server fails or answers with no log-probability, and Interrupted as
        soon as a signal comes: requests in flight are then left to themselves.
        """
        futures: list[Future[Sample]] = [Future() for _ in samples]
        tasks = iter(list(zip(samples, futures, strict=True)))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    task = next(tasks, None)
                if task is None:
                    return
                sample, future = task
                try:
                    future.set_result(self._with_logprobs(sample))
                except BaseException as error:
                    future.set_exception(error)

        for _ in range(min(CONNECTIONS, len(samples))):
            # daemons: a request that hangs must not keep a stopped process alive
            threading.Thread(target=work, name="dapo-teacher", daemon=True).start()
        waiting = set(futures)
        try:
            while waiting:
                done, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                STOP_SIGNAL.check()
        except BaseException:
            with lock:
                tasks = iter([])  # the rest is not requested
            raise
        return [future.result() for future in futures]

    def _with_logprobs(self, sample: Sample) -> Sample:
        try:
            logprobs, _ = self._client.prompt_logprobs((*sample.prompt_ids, *sample.response_ids))
        except (ServerFailed, DataError) as error:  # a stop by a signal passes as it is
            raise type(error)(f"{self._name}: {error}") from None
        return replace(sample, reference_logprobs=tuple(logprobs[len(sample.prompt_ids) - 1 :]))


def _is_partial(*texts: str) -> bool:
    """Return True if a text is part of a character, or a server's notation for one."""
    return any("\ufffd" in text or text.startswith(("bytes:", "token_id:")) for text in texts)


@cache
def teacher_server(server: ReferenceServerConfig) -> TeacherServer:
    """Return the server of `loss.reference.server`, one for a process.

    Raises ConfigError as TeacherServer does.
    """
    return TeacherServer(server)
