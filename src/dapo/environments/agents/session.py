"""The mailbox between an agent, which speaks to the endpoint, and the engine that answers it.

The server's thread puts requests in and waits for their answers; the engine's thread takes them out
when the episode is due.
"""

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dapo.core.text import shorten
from dapo.environments.agents.messages import AgentRequest, depth_of

MAX_WAITING = 1024
"""The most requests of one agent that may wait until the engine takes them."""
MAX_WAITING_CHARS = 2**26
"""The most characters of these requests."""
MAX_DEPTH = 64
"""How deep the values of a request may be nested: templates and tables read them recursively."""
_MAX_REFUSAL_CHARS = 300
NO_VARIABLES: Mapping[str, Any] = {}
"""Of the chat template, in a run without them."""


class AgentError(Exception):
    """An answer to an agent that is an error, with its HTTP status."""

    def __init__(self, status: int, message: str, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class AgentAnswer:
    """One answer to an agent's request."""

    id: str
    """The id of the call; an agent's reward may refer to it."""
    text: str
    """The text that the policy sampled, up to the end of its turn."""
    message: Mapping[str, Any]
    """The assistant's message: `content`, and `tool_calls` if the text has calls."""
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    prompt_ids: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    """The log-probability of each token, in nats."""
    tokens: Sequence[str] = ()
    """The text of each token."""
    stop: str | None = None
    """The text of the request's `stop` that ended the answer."""


@dataclass(eq=False)
class Pending:
    """A request that waits for its answers."""

    request: AgentRequest
    answers: "Future[list[AgentAnswer]]" = field(default_factory=Future)
    is_gone: bool = False
    """Whether the client has closed its connection before the answer came."""


@dataclass(frozen=True)
class Outcome:
    """What an agent returned, or the reason why it failed."""

    result: Any = None
    error: str | None = None
    is_given: bool = True
    """Whether the agent gave a result; an agent that ends without one, nor a reward, has failed."""


class Session:
    """The requests, the reward and the end of one agent, from any thread."""

    def __init__(
        self,
        model: str,
        temperature: float,
        top_p: float,
        *,
        overrides: bool,
        trained: Sequence[float] = (),
        template_kwargs: Mapping[str, Any] = NO_VARIABLES,
        on_arrival: Callable[[], None] = lambda: None,
    ) -> None:
        """Open a session with a random key.

        Args:
            model: The name of the model, in answers.
            temperature: The run's, or the evaluation's, at which every answer is sampled.
            top_p: Likewise.
            overrides: Whether other values in a request are replaced and counted, not refused.
            trained: The temperature and top_p of training, which an agent may state in an
                evaluation, too.
            template_kwargs: The run's variables of the chat template, which a request may repeat.
            on_arrival: Called when a request or the end has arrived.
        """
        self._on_arrival = on_arrival
        self.id = secrets.token_urlsafe(18)
        self.key = f"sk-dapo-{secrets.token_urlsafe(32)}"
        self.model = model
        self.num_overridden = 0
        """The requests whose temperature, top_p or the like was replaced."""
        self.num_refused = 0
        """The requests that were answered with an error."""
        self._last_refusal = ""
        self._temperature = temperature
        self._top_p = top_p
        self._overrides = overrides
        self._trained = trained or (temperature, top_p)
        self._template_kwargs = dict(template_kwargs)
        self._lock = threading.Condition()
        self._arrived: list[Pending] = []
        self._num_waiting_chars = 0
        self._num_arrivals = 0
        self._rewards: list[Any] = []
        self._outcome: Outcome | None = None
        self._is_closed = False

    # --- the server's side

    def submit(self, request: AgentRequest) -> Pending:
        """Queue a request. Raises AgentError if the session cannot answer it."""
        self._check_sampling(request)
        if depth_of((request.messages, request.tools)) > MAX_DEPTH:
            raise AgentError(400, f"the request is nested more than {MAX_DEPTH} deep")
        # the engine's thread, for which training waits, does not write it again
        length = len(request.text)
        pending = Pending(request)
        with self._lock:
            self._require_open()
            self._num_waiting_chars += length
            is_full = self._num_waiting_chars > MAX_WAITING_CHARS and len(self._arrived) > 0
            if is_full or len(self._arrived) >= MAX_WAITING:
                self._num_waiting_chars -= length
                raise AgentError(
                    429, f"{len(self._arrived)} requests of this agent wait to be served already"
                )
            self._arrived.append(pending)
            self._num_arrivals += 1
            self._lock.notify_all()
        self._on_arrival()
        return pending

    def refuse(self, reason: str) -> None:
        """Count a request that is answered with an error, while the agent runs."""
        with self._lock:
            if self._is_closed or self._outcome is not None:
                return
            self.num_refused += 1
            self._last_refusal = shorten(reason, _MAX_REFUSAL_CHARS)

    def reward(self, value: Any) -> None:
        """Take the reward that an agent elsewhere sends. Raises AgentError after the end."""
        with self._lock:
            self._require_open()
            self._rewards.append(value)

    def end(self, outcome: Outcome) -> None:
        """Take the agent's end; a later one changes nothing."""
        with self._lock:
            if self._outcome is None:
                self._outcome = outcome
            self._lock.notify_all()
        self._on_arrival()

    def _require_open(self) -> None:
        if self._is_closed or self._outcome is not None:
            raise AgentError(410, "the episode of this key has ended", "session_ended")

    def _check_sampling(self, request: AgentRequest) -> None:
        """Raise AgentError for a distribution other than the run's, unless it is overridden."""
        wanted = (
            ("temperature", request.temperature, self._temperature, self._trained[0]),
            ("top_p", request.top_p, self._top_p, self._trained[1]),
        )
        differing = [
            f"{name}={value:g}, and the run samples at {name}={own:g}"
            for name, value, own, trained in wanted
            if value is not None and value not in (own, trained)
        ]
        differing += [f"{name} is set" for name in request.foreign]
        if request.template_kwargs and request.template_kwargs != self._template_kwargs:
            differing.append("chat_template_kwargs is set")
        if not differing:
            return
        if not self._overrides:
            raise AgentError(
                400,
                f"{' and '.join(differing)}: training needs the run's own distribution; leave it"
                " out, or set environment.foreign_sampling=override",
            )
        with self._lock:
            self.num_overridden += 1

    # --- the engine's side

    @property
    def num_arrivals(self) -> int:
        """The number of requests so far."""
        with self._lock:
            return self._num_arrivals

    @property
    def is_ended(self) -> bool:
        """Whether the agent has ended."""
        with self._lock:
            return self._outcome is not None

    @property
    def is_waiting(self) -> bool:
        """Whether a request, or the end, has come and was not taken yet."""
        with self._lock:
            return bool(self._arrived) or self._outcome is not None

    def take(self) -> list[Pending]:
        """Return the requests that have come since the last time."""
        with self._lock:
            arrived = self._arrived
            self._arrived = []
            self._num_waiting_chars = 0
        return arrived

    def put_back(self, pending: Sequence[Pending]) -> None:
        """Return requests that are to be taken later."""
        with self._lock:
            self._arrived = [*pending, *self._arrived]

    @property
    def outcome(self) -> Outcome | None:
        """The agent's end, with its reward; None while it runs."""
        with self._lock:
            outcome = self._outcome
            if outcome is None:
                return None
            if outcome.error is not None:
                return Outcome(error=_with_refusal(outcome.error, self._last_refusal))
            if outcome.is_given and outcome.result is not None:
                return outcome
            if self._rewards:
                return Outcome(_joined(self._rewards))
        return Outcome(
            error="the agent ended without a reward: return a number, or send one to /reward"
        )

    def wait(self, timeout_s: float) -> None:
        """Wait until a request or the end arrives, at most this long."""
        with self._lock:
            if not self._arrived and self._outcome is None:
                self._lock.wait(timeout_s)

    def close(self) -> None:
        """End the session: requests that wait get an error, and later ones too."""
        with self._lock:
            self._is_closed = True
            waiting = self._arrived
            self._arrived = []
        for pending in waiting:
            fail(pending, AgentError(410, "the episode has ended", "session_ended"))


def answer(pending: Pending, answers: Sequence[AgentAnswer]) -> None:
    """Give a request its answers, unless its client has gone."""
    if pending.answers.set_running_or_notify_cancel():
        pending.answers.set_result(list(answers))


def fail(pending: Pending, error: AgentError) -> None:
    """Answer a request with an error, unless its client has gone."""
    if pending.answers.set_running_or_notify_cancel():
        pending.answers.set_exception(error)


def _with_refusal(error: str, refusal: str) -> str:
    """Return an agent's error with why its last request was refused, if it does not say so."""
    if not refusal or refusal in error:
        return error
    return f"{error}; the endpoint had refused a request: {refusal}"


def _joined(rewards: Sequence[Any]) -> Any:
    """Return the rewards that were sent as one: references to calls add up, else the last one."""
    if all(isinstance(reward, Mapping) for reward in rewards):
        merged: dict[str, Any] = {}
        for reward in rewards:
            merged |= reward
        return merged
    return rewards[-1]
