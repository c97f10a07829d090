"""Reads the prompts of `dapo generate` from arguments, a file or a pipe, without torch."""

import sys
from collections.abc import Sequence
from pathlib import Path

from dapo.config import parse_data_argument
from dapo.core.errors import ConfigError, DataError
from dapo.data.problems import load_problems
from dapo.data.sources.rows import prompted_problem
from dapo.types import Problem

TEXT_FILES = ("", ".txt", ".text", ".prompts")
"""The endings of files with a prompt in each line; others are data sources."""


def read_prompts(arguments: Sequence[str], file: str | None) -> list[Problem]:
    """Return the prompts of the arguments, a file, or the standard input (`-`, or a pipe).

    Raises ConfigError without prompts, and DataError for an empty one or an unreadable file.
    """
    problems = []
    for number, text in enumerate(arguments, start=1):
        if text == "-":
            problems += _from_lines(sys.stdin.read(), "the standard input")
        elif text.strip():
            problems.append(prompted_problem(text))
        else:
            raise DataError(f"prompt {number} is empty; expected a text")
    if file is not None:
        problems += _from_file(file)
    elif not arguments:
        if sys.stdin.isatty():
            raise ConfigError(
                'dapo generate needs prompts: "TEXT" ..., --file FILE, or - for the standard input'
            )
        problems += _from_lines(sys.stdin.read(), "the standard input")
    return problems


def _from_file(file: str) -> list[Problem]:
    path = Path(file)
    if path.suffix in TEXT_FILES and ":" not in file:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not UTF-8 text: {error}") from None
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}; expected a file of prompts") from None
        return _from_lines(text, file)
    source = parse_data_argument(file)
    rows = load_problems(source, split="eval", require_answer=False)
    return [prompted_problem(row.prompt, row.fields) for row in rows]


def _from_lines(text: str, where: str) -> list[Problem]:
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{where} has no prompts; expected a line of text for each")
    return [prompted_problem(line) for line in lines]
