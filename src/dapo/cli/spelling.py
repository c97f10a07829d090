"""Answers a misspelt command line with the exact text to type.

Options of a run are typed `NAME=VALUE`; who knows other programs types `--lr 1e-4`, `lr=1e-4` or
`optim.lr 1e-4`.
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dapo.core.errors import DapoError

TAKES_OPTIONS = "KEY=VALUE"
"""The argument of the commands that take options of a run."""
TYPED_FIRST = (
    "Type first: dapo train quickstart\n"
    "On your own data: dapo train model=smollm2-135m-instruct data.train=problems.jsonl"
)
OPTIONS_OF_A_RUN = "options of a run are typed NAME=VALUE, without dashes"
_FILE_TYPES = (".jsonl", ".parquet", ".csv", ".tsv", ".json")
_NO_SUCH_FLAG = re.compile(r"No such option: (--?[\w.-]+)")
_SUGGESTION = re.compile(r"did you mean ([\w.]+(?: or [\w.]+)*)\?")
_UNKNOWN = re.compile(r"unknown option ([^\s;]+); " + _SUGGESTION.pattern)
_STAGE = re.compile(r"stages\.[^.]+\.")
_NO_VALUE = re.compile(r"override '([^']+)': expected key=value, for example \S+")


def example_of(message: str, command: Any) -> str | None:
    """Return what to type where an argument is missing; None for any other error.

    It is the example of the command's help, with the newest run of ./runs in place of runs/a.

    Args:
        message: the error of the command line.
        command: the command, whose help ends with an example.
    """
    if not message.startswith("Missing argument"):
        return None
    if command.name == "train":
        return TYPED_FIRST
    _, _, example = str(command.epilog or "").partition("Example: ")
    newest = _newest_run()
    if newest is not None and "runs/b" not in example:
        example = example.replace("runs/a", shlex.quote(str(newest)))
    return f"\nFor example: {example}" if example else None


def _newest_run() -> Path | None:
    """Return the run of ./runs that was begun or resumed last."""
    configs = list(Path("runs").glob("*/config.yaml"))
    if not configs:
        return None
    return max(configs, key=lambda path: path.stat().st_mtime).parent


def as_typed(message: str, words: Sequence[str]) -> str:
    """Replace the options that an error proposes by the text to type.

    >>> as_typed("unknown option lr; did you mean optim.lr?", ["train", "tiny", "lr=1e-4"])
    'unknown option lr; did you mean optim.lr=1e-4?'
    """
    typed = dict(word.split("=", 1) for word in words if "=" in word)

    def with_typed_value(match: re.Match[str]) -> str:
        for typed_name, value in typed.items():
            stage = _STAGE.match(typed_name)
            prefix = stage[0] if stage is not None else ""
            name = typed_name.removeprefix(prefix)
            if name == match[1] or name.startswith(f"{match[1]}."):
                below = name.removeprefix(match[1])
                return _with_value(match[0], value, prefix=prefix, below=below)
        return match[0]

    match = _NO_VALUE.fullmatch(message)
    if match is not None:
        setting = _setting_of(match[1], words)
        if setting is not None:
            return f"{match[1]!r} is not NAME=VALUE; type {setting}"
    return _UNKNOWN.sub(with_typed_value, message)


def flag_answer(message: str, words: Sequence[str], command: Any) -> str | None:
    """Answer a flag that means an option of a run, such as `--lr 1e-4`; None for any other error.

    Args:
        message: the error of the command line.
        words: what was typed.
        command: the command, with its parameters.
    """
    match = _NO_SUCH_FLAG.match(message)
    if match is None or not any(item.metavar == TAKES_OPTIONS for item in command.params):
        return None
    flag = match[1]
    if not flag.startswith("--"):  # the error names the first letter of -lr
        flag = next((word.partition("=")[0] for word in words if word.startswith(flag)), flag)
    name = flag.lstrip("-").replace("-", "_")
    flags = {option for item in command.params for option in item.opts}
    similar_flag = f"--{name.replace('_', '-')}"
    if similar_flag in flags:
        return f"No such option: {flag}; did you mean {similar_flag}?"
    value = _value_of(flag, words)
    hint = _hint(name, value)
    if value is not None and "=" in value and _is_option(value.partition("=")[0]):
        # as in `--set optim.lr=1e-4`
        hint = f"did you mean {shlex.quote(value)}?"
    if hint is None:
        return None
    unknown = [flag]
    for word in words:
        other = word.partition("=")[0]
        other_hint = None
        if other.startswith("--") and other not in {*flags, flag}:
            other_hint = _hint(other.lstrip("-").replace("-", "_"), _value_of(other, words))
        if other_hint is not None and hint.endswith("?") and other_hint.endswith("?"):
            unknown.append(other)
            hint = f"{hint[:-1]} {other_hint.removeprefix('did you mean ')}"
    return f"No such option: {', '.join(unknown)}; {hint} ({OPTIONS_OF_A_RUN})"


def _hint(name: str, value: str | None) -> str | None:
    """Return the option that a name means, with its value; None if no option is like it."""
    from dapo.config import parse_overrides
    from dapo.config.messages import nearest_option

    try:
        content = None if value is None else parse_overrides([f"x={value}"])["x"]
    except DapoError:
        return None
    hint = nearest_option(name.split("."), content)
    if _SUGGESTION.fullmatch(hint):
        return hint if value is None else _with_value(hint, value)
    # the counterpart of another trainer's option
    return hint if " here" in hint else None


def _with_value(message: str, value: str, *, prefix: str = "", below: str = "") -> str:
    """Write `did you mean optim.lr?` with a value, as a shell reads it.

    Args:
        message: the question.
        value: the value.
        prefix: what leads to the option, such as `stages.rewards.`.
        below: what follows if the question names a section, such as `.lr`.
    """

    def add(match: re.Match[str]) -> str:
        settings = []
        for name in match[1].split(" or "):
            option = f"{name}{below}" if _is_section(name) else name
            settings.append(shlex.quote(f"{prefix}{option}={value}"))
        return f"did you mean {' or '.join(settings)}?"

    return _SUGGESTION.sub(add, message)


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    """Return the value that was typed behind a flag, with `=` or as the next word."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            following = words[index + 1 : index + 2]
            if equals:
                return value
            return following[0] if following and not following[0].startswith("--") else None
    return None


def _setting_of(word: str, words: Sequence[str]) -> str | None:
    """Return the setting that a word without `=` belongs to, in quotes where a shell needs them."""
    index = words.index(word) if word in words else 0
    before = words[index - 1] if index > 0 else ""
    after = words[index + 1] if index + 1 < len(words) else ""
    name, colon, value = word.partition(":")
    if word == "=":
        return shlex.quote(f"{before}={after}")
    if before.endswith("="):
        return shlex.quote(before + word)
    if before.startswith("data.") and word.endswith(_FILE_TYPES):
        option, _, first = before.partition("=")
        return shlex.quote(f"{option}=[{first},{word}]")
    if colon and _is_option(name):
        return shlex.quote(f"{name}={value}")
    is_value = bool(after) and "=" not in after and not after.startswith("--")
    value = after if is_value else "VALUE"
    if _is_option(word):
        return shlex.quote(f"{word}={value}")
    hint = _hint(word, value)
    if hint is not None and hint.endswith("?"):
        return hint.removeprefix("did you mean ").removesuffix("?")
    return shlex.quote(f"{before} {word}") if "=" in before else None


def _is_option(name: str) -> bool:
    from dapo.config.option_fields import options_of

    return any(name == option for option, _ in options_of())


def _is_section(name: str) -> bool:
    from dapo.config.messages import SECTIONS
    from dapo.config.options import STAGES

    return name in {*SECTIONS, STAGES}
