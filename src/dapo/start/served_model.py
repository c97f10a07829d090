"""One engine that answers the requests of any number of clients, behind the endpoint of agents."""

import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dapo.core.errors import DapoError, EngineError
from dapo.core.loading import describe
from dapo.core.rng import keyed_seed
from dapo.core.terminal import warn
from dapo.data.prompts import PromptEncoder, chat_messages
from dapo.data.sources.rows import TEMPLATE_KWARGS
from dapo.engines.engine import capabilities_of
from dapo.engines.request_checks import TEMPERATURES, is_temperature
from dapo.environments.agents.messages import AgentRequest
from dapo.environments.agents.rendering import AgentRenderer, with_json_arguments
from dapo.environments.agents.session import AgentAnswer, AgentError, answer, fail
from dapo.environments.agents.streaming import GrowingPending
from dapo.start.generate import OpenModel, settled
from dapo.types import Generation, GenerationRequest, Message, Problem

MAX_OPEN = 256
"""The most requests that are answered or wait at one time, by default."""
_IDLE_S = 0.2
"""How often an idle engine looks whether the server is to end."""
_CALL_MARKS = "<{[`"
"""With tools, text from one of these on may be a call, and is not streamed before its end."""


@dataclass(eq=False)
class _Job:
    """A request that is sampled."""

    pending: GrowingPending
    prompt_ids: tuple[int, ...]
    limit: int
    decode: Callable[[Sequence[int]], str]
    generations: dict[int, Generation] = field(default_factory=dict)
    """The whole answers, by their number."""

    @cached_property
    def names(self) -> list[str]:
        """The ids of the requests to the engine."""
        return [f"{self.pending.name}/{i}" for i in range(self.pending.request.samples)]

    @property
    def is_read(self) -> bool:
        """Whether the tokens so far are of use: for a stream, or to find a text that ends it."""
        return self.pending.is_watched or bool(self.pending.request.stop)

    def grown_text(self, token_ids: Sequence[int]) -> str:
        """Return the text so far that the next tokens cannot change."""
        request = self.pending.request
        text = settled(self.decode(token_ids))
        return shown_text(text, request.stop, has_tools=bool(request.tools))


class ServedModel:
    """Takes requests in the server's thread, and answers them in the thread that calls `run`."""

    def __init__(
        self, opened: OpenModel, *, limit: int, as_trained: bool = False, max_open: int = MAX_OPEN
    ) -> None:
        """Answer nothing yet.

        Args:
            opened: the model; nobody else samples from it.
            limit: the most tokens of an answer to a request that names no limit.
            as_trained: whether chats get the instruction and the system message of the run.
            max_open: the most requests that are answered or wait at one time.
        """
        self.model = opened.choice.name.rstrip("/")
        self.num_answers = 0
        self.num_tokens = 0
        self._opened = opened
        self._limit = limit
        self._data = opened.config.data
        self._as_trained = as_trained
        self._max_open = max_open
        plain = {"instruction": "", "system": None}
        texts: dict[str, Any] = {**plain, "chat_template": "off", "chat_template_kwargs": {}}
        tokenizer = opened.tokenizer
        self._chats = PromptEncoder(
            tokenizer, self._data.model_copy(update=plain), continues_answers=False
        )
        self._texts = PromptEncoder(tokenizer, self._data.model_copy(update=texts))
        self._tools: AgentRenderer | None = None
        """Renders tools and reads calls; made when a client brings tools."""
        self._lock = threading.Lock()
        self._open: set[GrowingPending] = set()
        self._is_closed = False
        self._reader = ThreadPoolExecutor(1, "dapo-prompts")
        """Encodes prompts: a long one delays neither the server nor the engine."""
        self._arrived: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._jobs: dict[str, _Job] = {}
        """The requests that are sampled, by their name."""

    @property
    def uses_template(self) -> bool:
        return self._chats.uses_template

    @property
    def num_open(self) -> int:
        """The number of requests that are answered or wait."""
        return len(self._open)

    # --- the server's thread

    def submit(self, request: AgentRequest) -> GrowingPending:
        """Take a request. Raises AgentError for one that cannot be answered."""
        self._require_possible(request)
        with self._lock:
            if self._is_closed:
                raise AgentError(503, "the server is ending", "server_ending")
            if len(self._open) >= self._max_open:
                raise AgentError(
                    429,
                    f"{self._max_open} requests are open already; try again",
                    "rate_limit_exceeded",
                )
            pending = GrowingPending(request, f"dapo-{secrets.token_hex(8)}")
            self._open.add(pending)
            self._reader.submit(self._read, pending)
        pending.answers.add_done_callback(lambda _: self._leave(pending))
        return pending

    def _leave(self, pending: GrowingPending) -> None:
        with self._lock:
            self._open.discard(pending)

    def _require_possible(self, request: AgentRequest) -> None:
        name = request.model
        if name is not None and name.rstrip("/") != self.model:
            raise AgentError(
                404, f"there is no model {name!r} here; it is {self.model}", "model_not_found"
            )
        if request.foreign:
            raise AgentError(
                400, f"{' and '.join(request.foreign)}: this server cannot do that; leave it out"
            )
        if "chat_template" in request.template_kwargs:
            # a program that all clients would wait for
            raise AgentError(
                400,
                "chat_template_kwargs has chat_template, and messages are formatted by the model's"
                " own; leave it out, or send the text to /v1/completions",
            )
        temperature = request.temperature
        if temperature is not None and not is_temperature(temperature):
            raise AgentError(400, f"temperature is {temperature}, expected {TEMPERATURES}")
        top_p = request.top_p
        if top_p is not None and not 0 < top_p <= 1:
            raise AgentError(400, f"top_p is {top_p}, expected a number above 0 and up to 1")

    # --- the thread that reads prompts

    def _read(self, pending: GrowingPending) -> None:
        """Encode the prompt of a request, and hand it to the engine's thread."""
        if pending.answers.cancelled():
            return
        try:
            self._arrived.put(self._job_of(pending))
        except AgentError as error:
            fail(pending, error)
        except (DapoError, ValueError, TypeError, LookupError, AttributeError) as error:
            fail(pending, AgentError(400, str(error).removeprefix("problem : ")))
        except Exception as error:  # the client would wait forever
            warn(f"a request failed: {describe(error)}")
            fail(pending, AgentError(500, describe(error), "server_error"))

    def _job_of(self, pending: GrowingPending) -> _Job:
        """Return a request with the tokens of its prompt. Raises AgentError or DataError."""
        request = pending.request
        encoder = self._chats
        decode = self._chats.decode
        if request.prompt is not None:
            encoder = self._texts
            if not request.prompt:
                raise AgentError(400, "prompt: expected a text, got an empty one")
        elif request.tools:
            renderer = self._renderer().of(request.tools)
            encoder = renderer.prompts
            decode = renderer.text
        prompt_ids = self._encoded(encoder, request)
        limit = request.max_tokens or self._limit
        positions = self._opened.positions
        if positions is not None:
            room = positions - len(prompt_ids)
            if room < 1:
                raise AgentError(
                    400,
                    f"the prompt has {len(prompt_ids):,} tokens, and the model's context is"
                    f" {positions:,} tokens long; shorten it",
                    "context_length_exceeded",
                )
            limit = min(limit, room)
        return _Job(pending, prompt_ids, limit, decode)

    def _renderer(self) -> AgentRenderer:
        if self._tools is None:
            self._tools = AgentRenderer(self._opened.tokenizer, self._data, "append")
        return self._tools

    def _encoded(self, encoder: PromptEncoder, request: AgentRequest) -> tuple[int, ...]:
        if request.prompt is not None:
            return encoder.encode_once(Problem("", request.prompt, ""))
        messages: Sequence[Message] = request.messages
        if self._as_trained:
            data = self._data
            messages = chat_messages(
                Problem("", messages, ""), instruction=data.instruction, system=data.system
            )
        fields: dict[str, Any] = {}
        if request.template_kwargs:
            fields[TEMPLATE_KWARGS] = request.template_kwargs
        # templates read the arguments of a call as a mapping, or as JSON text
        try:
            return encoder.encode_once(Problem("", list(messages), "", fields=fields))
        except (DapoError, TypeError):
            if not any(message.get("tool_calls") for message in messages):
                raise
        written = [with_json_arguments(message) for message in messages]
        return encoder.encode_once(Problem("", written, "", fields=fields))

    # --- the engine's thread

    def run(self, is_ending: Callable[[], bool]) -> None:
        """Answer requests until `is_ending()`, and then those that have come before.

        Raises EngineError if the model can sample no longer; all open requests are answered with
        an error then.
        """
        try:
            while not is_ending():
                self._advance()
            self._refuse()
            while self._open:
                self._advance()
        finally:
            self._refuse()
            self._reader.shutdown(cancel_futures=True)
            self._fail_open(AgentError(503, "the server has ended", "server_ending"))

    def _refuse(self) -> None:
        with self._lock:
            self._is_closed = True

    def _advance(self) -> None:
        """Start what has arrived, and sample the next tokens, or wait a moment."""
        self._start(wait=not self._jobs)
        self._drop_cancelled()
        if not self._jobs:
            return
        for generation in self._opened.engine.poll():
            self._take(generation)
        self._show_growth()

    def _start(self, *, wait: bool) -> None:
        try:
            job = self._arrived.get(timeout=_IDLE_S) if wait else self._arrived.get_nowait()
            while True:
                self._submit(job)
                job = self._arrived.get_nowait()
        except queue.Empty:
            return

    def _submit(self, job: _Job) -> None:
        request = job.pending.request
        seed = request.seed
        if seed is None:
            seed = secrets.randbits(63)
        requests = [
            GenerationRequest(
                id=name,
                prompt_ids=job.prompt_ids,
                max_new_tokens=job.limit,
                temperature=1.0 if request.temperature is None else request.temperature,
                top_p=1.0 if request.top_p is None else request.top_p,
                seed=keyed_seed(seed, "serve", i),
                stop_ids=self._opened.stop_ids,
            )
            for i, name in enumerate(job.names)
        ]
        try:
            self._opened.engine.submit(requests)
        except EngineError as error:
            fail(job.pending, AgentError(400, str(error)))
            return
        self._jobs[job.pending.name] = job

    def _drop_cancelled(self) -> None:
        """Stop the answers whose clients have gone."""
        for name, job in list(self._jobs.items()):
            if job.pending.answers.cancelled():
                del self._jobs[name]
                self._abort(job)

    def _abort(self, job: _Job) -> list[Generation]:
        running = [name for i, name in enumerate(job.names) if i not in job.generations]
        return self._opened.engine.abort(running)

    def _take(self, generation: Generation) -> None:
        """Take a whole answer, and answer the request if it was the last one."""
        name, _, number = generation.request_id.rpartition("/")
        job = self._jobs[name]
        job.generations[int(number)] = generation
        request = job.pending.request
        if len(job.generations) == request.samples:
            del self._jobs[name]
            answers = [self._answer(job, i) for i in range(request.samples)]
            self.num_answers += len(answers)
            self.num_tokens += sum(len(item.token_ids) for item in answers)
            answer(job.pending, answers)

    def _show_growth(self) -> None:
        """Show the tokens so far, and end answers that contain a text that ends them."""
        partial = capabilities_of(self._opened.engine).partial
        jobs = [job for job in self._jobs.values() if job.is_read]
        if partial is None or not jobs:
            return
        running = partial()
        for job in jobs:
            token_ids = []
            for i, name in enumerate(job.names):
                if i in job.generations:
                    token_ids.append(job.generations[i].token_ids)
                else:
                    token_ids.append(running.get(name, ()))
            if job.pending.is_watched and any(len(ids) for ids in token_ids):
                job.pending.grow(job.prompt_ids, token_ids, job.grown_text)
            if job.pending.request.stop:
                self._end_at_stops(job, token_ids)

    def _end_at_stops(self, job: _Job, token_ids: Sequence[Sequence[int]]) -> None:
        for i, name in enumerate(job.names):
            if i in job.generations:
                continue
            if _first_stop(job.decode(token_ids[i]), job.pending.request.stop) is not None:
                for generation in self._opened.engine.abort([name]):
                    self._take(generation)

    def _answer(self, job: _Job, number: int) -> AgentAnswer:
        request = job.pending.request
        generation = job.generations[number]
        token_ids = list(generation.token_ids)
        text = job.decode(token_ids)
        place = _first_stop(text, request.stop)
        reason = str(generation.finish)
        stop: str | None = None
        if place is not None:
            stop = next(sign for sign in request.stop if text.startswith(sign, place))
            text = text[:place]
            reason = "stop"
        message: Message = {"role": "assistant", "content": text}
        if request.tools:
            name = f"{job.pending.name}_{number}"
            message = self._renderer().message(request, text, name)
            if message.get("tool_calls") and reason == "stop":
                reason = "tool_calls"
        return AgentAnswer(
            id=job.pending.name,
            text=text,
            message=message,
            finish_reason=reason,
            prompt_ids=job.prompt_ids,
            token_ids=token_ids,
            logprobs=list(generation.logprobs),
            tokens=_TokenTexts(self._chats, token_ids),
            stop=stop,
        )

    def _fail_open(self, error: AgentError) -> None:
        with self._lock:
            waiting = list(self._open)
        for pending in waiting:
            fail(pending, error)


class _TokenTexts(Sequence[str]):
    """The text of each token, decoded when it is read: few clients ask for it."""

    def __init__(self, encoder: PromptEncoder, token_ids: Sequence[int]) -> None:
        self._encoder = encoder
        self._token_ids = token_ids

    def __len__(self) -> int:
        return len(self._token_ids)

    def __getitem__(self, index: Any) -> Any:
        return self._encoder.decode_prompt([self._token_ids[index]])


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return where the first of the texts that end an answer begins; None: there is none."""
    places = [text.find(stop) for stop in stops if stop in text]
    return min(places, default=None)


def _stop_overlap(text: str, stops: Sequence[str]) -> int:
    """Return the length of the end of a text that may begin a text which ends the answer."""
    longest = max(map(len, stops), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0


def shown_text(text: str, stops: Sequence[str], *, has_tools: bool) -> str:
    """Return the part of a growing text with which the content of its message will begin."""
    place = _first_stop(text, stops)
    if place is None:
        text = text[: len(text) - _stop_overlap(text, stops)]
    else:
        text = text[:place]
    if not has_tools:
        return text
    # the content of a message with calls has no white space around it
    if text[:1].isspace():
        return ""
    places = [text.find(mark) for mark in _CALL_MARKS if mark in text]
    return text[: min(places, default=len(text))].rstrip()
