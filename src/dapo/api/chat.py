"""A conversation with a run, for a notebook: each call is a message, and its answer shows itself."""

import signal
import time
from collections.abc import Callable
from html import escape
from typing import TYPE_CHECKING, Any

from dapo.api.plain_values import plain_values
from dapo.api.python_errors import python_interface
from dapo.core.errors import ConfigError, DataError
from dapo.core.terminal import printable
from dapo.core.waiting import Interrupted
from dapo.runs.console import notebook_display
from dapo.runs.directory import RunDirectory
from dapo.runs.stored_config import load_run_config
from dapo.training.signals import signals_as_requests

if TYPE_CHECKING:
    from dapo.start.conversation import Answer, AnswerStream, Conversation, ModelSource
    from dapo.start.generate import OpenModel
    from dapo.types import Message

_REDRAW_S = 0.1
_STYLE = "white-space:pre-wrap;margin:.3em 0"


class ChatAnswer:
    """An answer of `run.chat`, which a notebook shows as text."""

    def __init__(self, question: str, text: str, tokens: int, finish: str | None) -> None:
        """Keep an answer.

        Args:
            question: the message that it answers.
            text: the answer.
            tokens: the number of its tokens.
            finish: `stop` if the model ended it, `length` at the limit, `context` at the end of the
                model's context, None if it was interrupted.
        """
        self.question = question
        self.text = text
        self.tokens = tokens
        self.finish = finish
        self.untrained: str | None = None
        """The answer of the model with which the run began, after `run.chat.compare`."""

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        if self.untrained is None:
            return printable(self.text)
        return printable(f"untrained: {self.untrained}\ntrained: {self.text}")

    def _repr_html_(self) -> str:
        if self.untrained is None:
            return _paragraph(self.text)
        cells = "".join(
            f"<td style='text-align:left;vertical-align:top;{_STYLE}'>{_safe(text)}</td>"
            for text in (self.untrained, self.text)
        )
        return f"<table><tr><th>untrained</th><th>trained</th></tr><tr>{cells}</tr></table>"


@python_interface
class Chat:
    """The conversation of `run.chat`, with the newest checkpoint of the run.

    Prompts are formatted as in training. The conversation lasts until `reset`, also when the run
    has a newer checkpoint, which then answers.

    Example:
        >>> answer = run.chat("17 + 25?", max_new_tokens=4)
        >>> len(run.chat.messages)
        2
    """

    def __init__(self, directory: RunDirectory, open_model: "Callable[[], OpenModel]") -> None:
        self._directory = directory
        self._open_model = open_model
        self._conversation: Conversation | None = None
        self._source: ModelSource | None = None
        self._system: str | None = None

    @python_interface
    def __call__(
        self,
        message: str = "",
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
    ) -> ChatAnswer:
        """Answer a message after those before it; a notebook shows the answer as it grows.

        Args:
            message: the text.
            temperature: the sampling temperature, 0: the most likely token; None:
                `eval.temperature` of the run.
            top_p: the sum of probabilities up to which tokens are sampled; None: `eval.top_p`.
            max_new_tokens: the length limit; None: `rollout.max_response_tokens`.
            seed: equal seeds give equal answers in equal conversations.

        Ctrl-C, or the stop button, ends the answer, which is kept as far as it came. Raises
        CheckpointError if the run has no checkpoint yet, and DataError for an empty message and for
        a conversation that fills the model's context.
        """
        return self._answer(message, temperature, top_p, max_new_tokens, seed)

    @property
    def messages(self) -> "list[Message]":
        """The conversation as chat messages."""
        return [] if self._conversation is None else self._conversation.messages

    @property
    def system(self) -> str | None:
        """The system message; None: that of the run's options."""
        return self._system

    def retry(self) -> ChatAnswer:
        """Answer the last message anew, with other random numbers. Raises ConfigError without."""
        conversation = self._begun()
        return self._grow(
            conversation.exchanges[-1].question, lambda check: conversation.retry(check=check)
        )

    def compare(self, message: str | None = None) -> ChatAnswer:
        """Return an answer beside that of the model with which the run began.

        `message` is asked first; None: the last message. Raises ConfigError without any.
        """
        from dapo.start.conversation import ModelSource

        if message is not None:
            self._answer(message, None, None, None, 0)
        conversation = self._begun()
        assert self._source is not None
        last = conversation.exchanges[-1]
        messages = conversation.messages_before(len(conversation.exchanges) - 1, last.question)
        source = ModelSource(self._source.model, self._source.options, untrained=True)
        untrained = self._grow(
            last.question,
            lambda check: source.stream(messages, attempt=last.attempt, check=check),
        )
        answer = _chat_answer(last.question, last.answer)
        answer.untrained = untrained.text
        return answer

    def undo(self) -> None:
        """Take back the last message and its answer."""
        if self._conversation is not None:
            self._conversation.undo()

    def reset(self, *, system: str | None = None) -> None:
        """Forget the conversation, and set the system message; None: that of the run's options."""
        self._conversation = None
        self._system = system

    def __repr__(self) -> str:
        count = 0 if self._conversation is None else len(self._conversation.exchanges)
        return printable(
            f'<Chat with {self._directory.path}: {count} answers; run.chat("TEXT") asks>'
        )

    def _begun(self) -> "Conversation":
        """Return the conversation, which the newest checkpoint answers from here on.

        Raises ConfigError without an answer.
        """
        from dapo.start.conversation import ModelSource

        if self._conversation is None or not self._conversation.exchanges:
            raise ConfigError('there is no answer yet; run.chat("TEXT") asks')
        assert self._source is not None
        # the model may be closed: by `run.close()`, or for a newer checkpoint
        self._source = ModelSource(self._open_model(), self._source.options)
        self._conversation.source = self._source
        return self._conversation

    def _answer(
        self,
        message: str,
        temperature: float | None,
        top_p: float | None,
        max_new_tokens: int | None,
        seed: int,
    ) -> ChatAnswer:
        from dapo.start.conversation import Conversation, ModelSource
        from dapo.start.generate import SamplingOptions

        if not message.strip():
            raise DataError('a message is missing, as in run.chat("17 + 25?")')
        defaults = load_run_config(self._directory).eval
        numbers = plain_values(
            temperature=defaults.temperature if temperature is None else temperature,
            top_p=defaults.top_p if top_p is None else top_p,
            max_new_tokens=max_new_tokens,
            seed=seed,
        )
        options = SamplingOptions(**numbers)
        self._source = ModelSource(self._open_model(), options)
        if self._conversation is None:
            self._conversation = Conversation(self._source, system=self._system)
        conversation = self._conversation
        conversation.source = self._source
        return self._grow(message, lambda check: conversation.ask(message, check=check))

    def _grow(
        self, question: str, start: "Callable[[Callable[[], None]], AnswerStream]"
    ) -> ChatAnswer:
        """Sample an answer, which a notebook shows until it is whole."""
        from dapo.start.conversation import NOTHING

        display = notebook_display()
        handle: Any = None
        if display is not None:
            handle = display({"text/html": _paragraph("...")}, raw=True, display_id=True)
        shown = time.monotonic()
        answer = NOTHING
        try:
            with signals_as_requests(
                "stopping the answer", on_second=signal.default_int_handler
            ) as stop:
                for answer in start(stop.check):
                    if handle is not None and time.monotonic() - shown >= _REDRAW_S:
                        shown = time.monotonic()
                        handle.update({"text/html": _paragraph(answer.text)}, raw=True)
        except Interrupted as error:
            # the answer is kept as far as it came; only Ctrl-C means no more than that
            if error.exit_code != 128 + signal.SIGINT:
                raise
        finally:
            if handle is not None:
                # the answer that is returned shows itself
                handle.update({"text/html": ""}, raw=True)
        return _chat_answer(question, answer)


def _chat_answer(question: str, answer: "Answer") -> ChatAnswer:
    return ChatAnswer(question, answer.text, answer.tokens, answer.finish)


def _paragraph(text: str) -> str:
    return f"<div style='{_STYLE}'>{_safe(text)}</div>"


def _safe(text: str) -> str:
    return escape(printable(text))
