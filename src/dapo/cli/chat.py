"""`dapo chat`: a conversation in the terminal, or with lines of a pipe."""

import signal
import sys
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import FrameType
from typing import Any

from rich.table import Table

from dapo.cli.answer_text import GrowingText, describe_model, describe_sampling, end_note
from dapo.core.errors import ConfigError, DapoError, DataError
from dapo.core.http_client import ServerFailed
from dapo.core.terminal import print_text
from dapo.core.text import did_you_mean
from dapo.core.waiting import Interrupted
from dapo.evaluation.server import open_client
from dapo.runs.console import SafeConsole, start_live
from dapo.start.conversation import (
    NOTHING,
    Answer,
    AnswerSource,
    AnswerStream,
    Conversation,
    ModelSource,
    ServerSource,
)
from dapo.start.generate import OpenModel, SamplingOptions
from dapo.start.model_choice import ModelChoice

PROMPT = "> "
MORE = "... "
SIDE_BY_SIDE = 100
"""The columns of a terminal from which on two answers stand beside each other."""
COMMANDS = {
    "/compare [TEXT]": "Show the untrained model's answer beside the trained one's, to the last"
    " message or to TEXT.",
    "/retry": "Answer the last message again, with other random numbers.",
    "/undo": "Take back the last message and its answer.",
    "/reset": "Forget the conversation.",
    "/system [TEXT]": "Set the system message and forget the conversation, or show it.",
    "/help": "Show this list.",
    "/quit": "End, as Ctrl-D does.",
}
OTHER_NAMES = {"/clear": "/reset", "/exit": "/quit", "/bye": "/quit", "/q": "/quit", "/?": "/help"}


class Quit(Exception):
    """The user ends the conversation."""


@dataclass(frozen=True)
class ChatOptions:
    """The options of `dapo chat`; None: see its help."""

    temperature: float | None
    top_p: float | None
    max_new_tokens: int | None
    seed: int
    system: str | None
    compares: bool


@contextmanager
def open_chat(
    model: ModelChoice | str, server: str | None, options: ChatOptions
) -> "Iterator[Chat]":
    """Open a model, a run, or the model of a server, and say what is open.

    Raises ConfigError if there is no such model, and for a system message without a chat template.
    """
    with ExitStack() as stack:
        notes = sys.stdout if sys.stdin.isatty() and sys.stdout.isatty() else sys.stderr
        untrained: AnswerSource | None = None
        source: AnswerSource
        if isinstance(model, str):
            assert server is not None, "a name alone is that of a server's model"
            sampling = _sampling(options, temperature=1.0, top_p=1.0)
            client = stack.enter_context(closing(open_client(server, model)))
            source = ServerSource(client, sampling)
            print_text(f"{model} at {server}", file=notes)
            print_text(describe_sampling(sampling, options.max_new_tokens), file=notes)
        else:
            defaults = model.config.eval
            sampling = _sampling(options, temperature=defaults.temperature, top_p=defaults.top_p)
            with without_echo():
                opened = OpenModel(model)
            stack.callback(opened.close)
            source = ModelSource(opened, sampling)
            if model.checkpoint is not None:
                untrained = ModelSource(opened, sampling, untrained=True)
            limit = opened.sampler(sampling).plan.max_response_tokens
            print_text(describe_model(model), file=notes)
            print_text(describe_sampling(sampling, limit), file=notes)
        if not source.reads_roles:
            print_text(
                "no chat template: each message is continued as plain text, without those before",
                file=notes,
            )
        if notes is sys.stdout:
            print_text("/help lists the commands; Ctrl-C stops an answer, Ctrl-D ends\n")
        conversation = Conversation(source, system=options.system)
        yield Chat(conversation, source, untrained=untrained, compares=options.compares)


def _sampling(options: ChatOptions, *, temperature: float, top_p: float) -> SamplingOptions:
    """Return how answers are sampled; the numbers stand for those that are not set."""
    if options.temperature is not None:
        temperature = options.temperature
    if options.top_p is not None:
        top_p = options.top_p
    return SamplingOptions(1, temperature, top_p, options.max_new_tokens, options.seed)


class Chat:
    """Reads messages and commands, and prints answers as they grow."""

    def __init__(
        self,
        conversation: Conversation,
        source: AnswerSource,
        *,
        untrained: AnswerSource | None,
        compares: bool = False,
    ) -> None:
        """Prepare a conversation.

        Args:
            conversation: keeps the messages.
            source: the source of the conversation.
            untrained: the model with which the run began; None: there is nothing to compare with.
            compares: show both answers to every message.
        """
        self._conversation = conversation
        self._source = source
        self._untrained = untrained
        self._compares = compares
        self._on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._has_compared = False
        self.num_failed = 0
        """Messages that got no answer, such as those longer than the model's context."""

    def run(self) -> None:
        """Answer messages until the input ends, /quit, or the second Ctrl-C in a row."""
        with suppress(Quit):
            for line in self._lines():
                if not line.strip():
                    continue
                try:
                    self._take(line)
                except (ConfigError, DataError, ServerFailed) as error:
                    self.num_failed += 1
                    self._note(str(error))
                if self._on_terminal:
                    print_text()  # sets the next message apart

    def _lines(self) -> Iterator[str]:
        """Yield messages; on a terminal, a line that ends with a backslash goes on in the next."""
        if not self._on_terminal:
            try:
                yield from (line.rstrip("\r\n") for line in sys.stdin)
            except KeyboardInterrupt:
                raise Interrupted(signal.SIGINT) from None
            return
        with suppress(ImportError):
            import readline  # noqa: F401  (lets `input` edit lines and recall earlier ones)
        was_interrupted = False
        while True:
            try:
                text = input(PROMPT)
                while text.endswith("\\"):
                    text = f"{text[:-1]}\n{input(MORE)}"
            except EOFError:
                print_text()
                return
            except KeyboardInterrupt:
                print_text()
                if was_interrupted:
                    return
                was_interrupted = True
                self._note("Ctrl-C again, or Ctrl-D, ends")
                print_text()
                continue
            was_interrupted = False
            yield text

    def _take(self, line: str) -> None:
        """Carry out a command, or answer a message."""
        text = line.strip()
        if not text.startswith("/") or text.startswith("//"):
            message = line.removeprefix("/") if text.startswith("//") else line
            self._answer_both(message) if self._compares else self._answer(message)
            return
        name, _, rest = text.partition(" ")
        name = OTHER_NAMES.get(name, name)
        commands: dict[str, Callable[[str], None]] = {
            "/compare": self._compare,
            "/retry": self._retry,
            "/undo": self._undo,
            "/reset": self._reset,
            "/system": self._set_system,
            "/help": self._help,
            "/quit": self._quit,
        }
        if name not in commands:
            near = did_you_mean(name, commands, otherwise="/help lists them")
            raise ConfigError(
                f"there is no command {name}: {near} (//... sends a message that begins with /)"
            )
        commands[name](rest.strip())

    def _answer(self, message: str) -> None:
        self._show(lambda check: self._conversation.ask(message, check=check))

    def _retry(self, rest: str) -> None:
        self._show(lambda check: self._conversation.retry(check=check))

    def _undo(self, rest: str) -> None:
        exchange = self._conversation.undo()
        if exchange is None:
            self._note("there is nothing to take back")
        else:
            self._note(f"taken back: {exchange.question}")

    def _reset(self, rest: str) -> None:
        self._conversation.reset()
        self._note("the conversation is forgotten")

    def _set_system(self, rest: str) -> None:
        if rest:
            self._conversation.system = rest
            self._conversation.reset()
            self._note("the system message is set; the conversation begins anew")
        elif self._conversation.system is None:
            self._note("no system message is set here; /system TEXT sets one")
        else:
            self._note(f"system message: {self._conversation.system}")

    def _help(self, rest: str) -> None:
        width = max(map(len, COMMANDS)) + 2
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=width)
        table.add_column()
        for command, meaning in COMMANDS.items():
            table.add_row(command, meaning)
        table.add_row("\\", "At the end of a line: the message goes on in the next line.")
        table.add_row("Ctrl-C", "Stop the answer; twice ends.")
        SafeConsole(file=self._notes).print(table)

    def _quit(self, rest: str) -> None:
        raise Quit

    def _compare(self, rest: str) -> None:
        if self._untrained is None:
            raise ConfigError(
                "/compare shows a run before and after training; this model is no run"
            )
        exchanges = self._conversation.exchanges
        if rest:
            self._answer_both(rest)
        elif exchanges:
            last = exchanges[-1]
            messages = self._conversation.messages_before(len(exchanges) - 1, last.question)
            with self._interruptible() as check:
                stream = self._untrained.stream(messages, attempt=last.attempt, check=check)
                self._show_both(stream, (answer for answer in [last.answer]))
        else:
            raise ConfigError("there is no answer to compare yet; /compare TEXT asks both")

    def _answer_both(self, message: str) -> None:
        """Ask the untrained model too; the trained one's answer is the one that is kept."""
        assert self._untrained is not None
        messages = self._conversation.messages_before(len(self._conversation.exchanges), message)
        with self._interruptible() as check:
            self._show_both(
                self._untrained.stream(messages, check=check),
                self._conversation.ask(message, check=check),
            )

    def _show(self, start: Callable[[Callable[[], None]], AnswerStream]) -> None:
        """Print an answer as it grows."""
        paper = GrowingText(self._width)
        answer = NOTHING
        with self._interruptible() as check:
            try:
                for answer in start(check):
                    paper.show(answer.text)
            except KeyboardInterrupt:
                answer = replace(answer, finish=None)
            except DapoError:
                if answer.tokens:
                    paper.end()
                raise
        paper.end()
        note = end_note(answer)
        if note is not None:
            self._note(note)

    def _show_both(self, untrained: AnswerStream, trained: AnswerStream) -> None:
        """Print two answers, beside each other as they grow where there is room."""
        if not self._has_compared:
            self._has_compared = True
            self._note("opening the untrained model")
        answers = {"untrained": NOTHING, "trained": NOTHING}
        is_wide = self._width is not None and self._width >= SIDE_BY_SIDE
        live = start_live(lambda: _columns(answers), sys.stdout) if is_wide else None
        try:
            for before, after in zip_longest(untrained, trained):
                answers["untrained"] = before or answers["untrained"]
                answers["trained"] = after or answers["trained"]
        except KeyboardInterrupt:
            answers = {title: replace(answer, finish=None) for title, answer in answers.items()}
        finally:
            untrained.close()
            trained.close()
            if live is not None:
                live.stop()
        for title, answer in answers.items():
            if live is None:
                SafeConsole(file=sys.stdout).print(f"{title}:", style="bold")
                paper = GrowingText(self._width)
                paper.show(answer.text)
                paper.end()
            note = end_note(answer)
            if note is not None:
                self._note(f"{title}: {note}")

    @property
    def _width(self) -> int | None:
        """The columns of the terminal; None without one."""
        return SafeConsole().width if self._on_terminal else None

    @property
    def _notes(self) -> Any:
        return sys.stdout if self._on_terminal else sys.stderr

    def _note(self, text: str) -> None:
        SafeConsole(file=self._notes).print(f"({text})", style="dim")

    @contextmanager
    def _interruptible(self) -> Iterator[Callable[[], None]]:
        """Let the first Ctrl-C stop the block's answer, and the second end the conversation.

        Yields a function that raises KeyboardInterrupt after the first.
        """
        came = 0

        def on_signal(signum: int, frame: FrameType | None) -> None:
            nonlocal came
            came += 1
            # between two tokens of an engine in this process, which must stay whole
            if came > 1 or not self._source.checks_often:
                raise KeyboardInterrupt

        def check() -> None:
            if came:
                raise KeyboardInterrupt

        previous = signal.signal(signal.SIGINT, on_signal)
        try:
            with without_echo():
                yield check
        finally:
            signal.signal(signal.SIGINT, previous)
            if came > 1:
                raise Quit


@contextmanager
def without_echo() -> Iterator[None]:
    """Keep what is typed during the block off the screen; it stays for the next prompt."""
    try:
        settings = termios.tcgetattr(sys.stdin)
    except (termios.error, OSError, ValueError):  # no terminal
        yield
        return
    silent = [*settings]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, settings)


def _columns(answers: Mapping[str, Answer]) -> Table:
    """Return the answers beside each other, under their titles."""
    table = Table(expand=True)
    for title in answers:
        table.add_column(title, ratio=1)
    table.add_row(*(answer.text for answer in answers.values()))
    return table
