"""What `dapo chat` and `dapo generate` print of a model and of its answers."""

import re
from collections.abc import Iterator

from rich.cells import cell_len

from dapo.core.terminal import print_text, printable
from dapo.core.text import one_line, shorten
from dapo.start.conversation import Answer
from dapo.start.generate import SamplingOptions
from dapo.start.model_choice import ModelChoice

# a line feed, white space, a wide character (after any of which a line may end) or a word
_PARTS = re.compile(r"\n|[^\S\n]+|[\u2e80-\ufaff\uff00-\uffef]|[^\s\u2e80-\ufaff\uff00-\uffef]+")
_MAX_HELD = 24  # columns of a word whose end has not come
_SHOWN_CHARS = 60


class GrowingText:
    """Prints a text as it grows, with its lines broken between words."""

    def __init__(self, width: int | None) -> None:
        """Print nothing yet; `width` is the terminal's, None: lines are not broken."""
        self._width = width
        self._newest = ""
        self._printed = ""
        self._held = ""  # the last word, which may still grow
        self._column = 0

    def show(self, text: str) -> None:
        """Print what the text has more than before."""
        self._newest = text
        # a tokenizer may join the newest token to the ones before in another way
        if text.startswith(self._printed):
            self._add(text[len(self._printed) :])
            self._printed = text

    def end(self) -> None:
        """Print the rest, and end the line."""
        if self._newest != self._printed:
            self._add(self._newest[_common_length(self._newest, self._printed) :])
        self._write(self._held)
        self._held = ""
        print_text()

    def _add(self, text: str) -> None:
        if self._width is None:
            print_text(text, end="")
            return
        *parts, last = _PARTS.findall(self._held + printable(text)) or [""]
        for part in parts:
            self._write(part)
        may_grow = bool(last.strip()) and cell_len(last) < _MAX_HELD
        self._held = last if may_grow else ""
        if not may_grow:
            self._write(last)

    def _write(self, part: str) -> None:
        """Print a word, white space or a line feed."""
        if part == "\n":
            print_text()
            self._column = 0
            return
        width = cell_len(part)
        limit = self._width or 0
        if self._column and self._column + width > limit > 0:
            print_text()
            self._column = 0
            part = part.lstrip()
            width = cell_len(part)
        print_text(part, end="")
        self._column += width
        if self._column > limit > 0:  # a word of more than a line
            self._column %= limit


def _common_length(a: str, b: str) -> int:
    """Return the number of first characters in which two texts are equal."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def end_note(answer: Answer) -> str | None:
    """Return why an answer ends here, unless the model has ended it."""
    if answer.finish is None:
        return "stopped"
    if answer.finish == "length":
        return f"cut at {answer.tokens:,} tokens; --max-new-tokens sets the limit"
    if answer.finish == "context":
        return (
            "the model's context is full: /reset forgets the conversation, /undo its last message"
        )
    if answer.finish != "stop":
        return f"ended by {answer.finish!r}"
    return None if answer.text.strip() else "an empty answer"


def describe_model(choice: ModelChoice) -> str:
    """Return what is open, in one line: the run with its step and model, and its instruction."""
    parts = [choice.name]
    if choice.checkpoint is not None:
        parts = [f"{choice.name} after step {choice.step}, trained from {choice.config.model.name}"]
    parts += _prompt_options(choice)
    return "; ".join(parts)


def _prompt_options(choice: ModelChoice) -> Iterator[str]:
    for name, value in (
        ("instruction", choice.config.data.instruction),
        ("system", choice.config.data.system),
    ):
        if value:
            yield f'{name} "{shorten(one_line(value), _SHOWN_CHARS)}"'


def describe_sampling(options: SamplingOptions, limit: int | None) -> str:
    """Return the sampling options in words; `limit` is that of the tokens, None: the server's."""
    if options.temperature:
        text = f"temperature {options.temperature:g}, top-p {options.top_p:g}"
    else:
        text = "the most likely token (temperature 0)"
    if limit is not None:
        text += f", at most {limit:,} tokens"
    return f"{text}, seed {options.seed}"
