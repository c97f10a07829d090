"""A conversation with a model whose answers grow token by token, opened here or at a server."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from dapo.core.errors import ConfigError
from dapo.core.openai_client import ChatClient
from dapo.core.rng import keyed_seed
from dapo.data.sources.rows import prompted_problem
from dapo.evaluation.server import SEED_BITS
from dapo.start.generate import OpenModel, SamplingOptions, responses_to
from dapo.types import Message, Prompt


@dataclass(frozen=True)
class Answer:
    """An answer, as far as it is sampled."""

    text: str
    tokens: int
    """Sampled tokens; at a server the pieces that have arrived."""
    finish: str | None
    """`stop` at an end token, `length` at the limit, `context` where the model can read no further
    token, another word of a server; None: it grows, or was stopped.
    """


AnswerStream: TypeAlias = Generator[Answer, None, None]
"""An answer as it grows; closing it, or an error, ends the sampling."""
NOTHING = Answer("", 0, None)
"""An answer before its first token."""


def unchecked() -> None:
    """Never stop an answer."""


class AnswerSource(Protocol):
    """Something that answers conversations."""

    @property
    def reads_roles(self) -> bool:
        """Whether it reads conversations; if not, it continues the text of the last message."""

    @property
    def checks_often(self) -> bool:
        """Whether `stream` calls `check` several times per second, however slow the model is."""

    def stream(
        self,
        messages: Sequence[Message],
        *,
        attempt: int = 0,
        check: Callable[[], None] = unchecked,
    ) -> AnswerStream:
        """Yield the answer to the last message as it grows; the last one has a finish.

        Args:
            messages: the conversation.
            attempt: equal numbers give equal answers.
            check: called between tokens; its error ends the answer.

        Raises:
            DataError: the messages cannot be a prompt, or fill the model's context.
        """


class ModelSource:
    """Answers with a model that is open in this process."""

    checks_often = True

    def __init__(
        self, model: OpenModel, options: SamplingOptions, *, untrained: bool = False
    ) -> None:
        """Open nothing yet; `untrained` answers with the model with which a run began."""
        self.model = model
        self.options = options
        self._untrained = untrained

    @property
    def reads_roles(self) -> bool:
        return self.model.encoder.uses_template

    def stream(
        self,
        messages: Sequence[Message],
        *,
        attempt: int = 0,
        check: Callable[[], None] = unchecked,
    ) -> AnswerStream:
        """See AnswerSource."""
        options = self.options
        if attempt:
            options = replace(options, seed=keyed_seed(options.seed, "chat", attempt))
        prompt: Prompt = messages
        if not self.reads_roles:
            prompt = str(messages[-1]["content"])
        problem = prompted_problem(prompt)
        sampler = self.model.sampler(options, untrained=self._untrained)
        for _, _, response in responses_to(sampler, [problem], check=check, partial=True):
            finish: str | None = response.finish
            if finish == "length" and self._fills_context(problem, response.tokens):
                finish = "context"
            yield Answer(response.text, response.tokens, finish)

    def _fills_context(self, problem: Any, num_tokens: int) -> bool:
        positions = self.model.positions
        length = len(self.model.encoder.encode(problem)) + num_tokens
        return positions is not None and length >= positions


class ServerSource:
    """Answers with a model of an OpenAI-compatible server."""

    reads_roles = True
    checks_often = False

    def __init__(self, client: ChatClient, options: SamplingOptions) -> None:
        """Send nothing yet. Without `max_new_tokens` the server's own limit holds."""
        self._client = client
        self._options = options

    def stream(
        self,
        messages: Sequence[Message],
        *,
        attempt: int = 0,
        check: Callable[[], None] = unchecked,
    ) -> AnswerStream:
        """See AnswerSource. Raises ServerFailed or ServerRefused."""
        options = self._options
        parameters: dict[str, Any] = {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "seed": keyed_seed(options.seed, "chat", attempt) % (1 << SEED_BITS),
        }
        if options.max_new_tokens is not None:
            parameters["max_tokens"] = options.max_new_tokens
        text = ""
        tokens = 0
        finish: str | None = None
        for piece in self._client.stream(messages, **parameters):
            check()
            text += piece.text
            tokens += bool(piece.text)
            finish = piece.finish or finish
            yield Answer(text, tokens, None)
        # some servers end without a reason
        yield Answer(text, tokens, finish or "stop")


@dataclass(frozen=True)
class Exchange:
    """A question with its answer."""

    question: str
    answer: Answer
    attempt: int = 0
    """How often the question was asked anew."""


class Conversation:
    """Questions and answers so far, and the system message in front of them."""

    def __init__(self, source: AnswerSource, *, system: str | None = None) -> None:
        """Begin without messages.

        Args:
            source: gives the answers.
            system: the system message; None: that of a run's options, or the chat template's own.

        Raises:
            ConfigError: there is a system message, and the source reads no roles.
        """
        self.source = source
        self.exchanges: list[Exchange] = []
        self.system = system

    @property
    def system(self) -> str | None:
        """The system message; None: that of a run's options, or the chat template's own."""
        return self._system

    @system.setter
    def system(self, text: str | None) -> None:
        if text is not None and not self.source.reads_roles:
            raise ConfigError("a system message needs a chat template, and this model has none")
        self._system = text

    @property
    def messages(self) -> list[Message]:
        """The conversation as chat messages."""
        return self.messages_before(len(self.exchanges))

    def messages_before(self, index: int, question: str | None = None) -> list[Message]:
        """Return the messages of the exchanges before `index`, and a further question."""
        messages: list[Message] = []
        if self._system is not None:
            messages.append({"role": "system", "content": self._system})
        for exchange in self.exchanges[:index]:
            messages.append({"role": "user", "content": exchange.question})
            messages.append({"role": "assistant", "content": exchange.answer.text})
        if question is not None:
            messages.append({"role": "user", "content": question})
        return messages

    def ask(self, question: str, *, check: Callable[[], None] = unchecked) -> AnswerStream:
        """Yield the answer as it grows, and keep it, also if the iteration ends early."""
        return self._answer(len(self.exchanges), question, 0, check)

    def retry(self, *, check: Callable[[], None] = unchecked) -> AnswerStream:
        """Answer the last question anew, with other random numbers. Raises ConfigError without."""
        if not self.exchanges:
            raise ConfigError("there is no question to answer anew")
        last = self.exchanges[-1]
        index = len(self.exchanges) - 1
        return self._answer(index, last.question, last.attempt + 1, check)

    def undo(self) -> Exchange | None:
        """Take back the last question with its answer, and return them; None without one."""
        return self.exchanges.pop() if self.exchanges else None

    def reset(self) -> None:
        """Forget all questions and answers; the system message stays."""
        self.exchanges.clear()

    def _answer(
        self, index: int, question: str, attempt: int, check: Callable[[], None]
    ) -> AnswerStream:
        messages = self.messages_before(index, question)
        answer = NOTHING
        try:
            for answer in self.source.stream(messages, attempt=attempt, check=check):
                yield answer
        finally:
            if answer.tokens:
                self.exchanges[index:] = [Exchange(question, answer, attempt)]
