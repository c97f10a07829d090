"""Runs the `dapo` command as a fresh process does: without torch, unless the command imports it.

A process that has imported the command line forks for each command.
"""

import gc
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from helpers.paths import ROOT, TESTS

IMPORTED_ONCE = ("dapo.cli.main", "dapo.config", "dapo.cli.train")
"""What most commands import; its seconds are those of a start."""


@dataclass(frozen=True)
class Answer:
    """How a command has ended."""

    code: int
    start_s: float
    """Seconds of the processor until the command line is imported."""
    command_s: float
    """Seconds of the processor after that."""
    heavy: Sequence[str]
    """Which of torch, transformers and matplotlib it has imported."""
    out: str
    err: str


class FreshCommands:
    """The other end: start it, ask it, close it."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(TESTS), str(ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "helpers.fresh_commands"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
        )

    def run(self, arguments: Sequence[str], folder: Path) -> Answer:
        """Run `dapo ARGUMENTS` in a folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([list(arguments), str(folder)]) + "\n")
        self._process.stdin.flush()
        return Answer(**json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate()


def serve() -> None:
    for module in IMPORTED_ONCE:
        importlib.import_module(module)
    gc.freeze()  # the collector of a child would write to every object, and so copy its page
    start_s = time.process_time()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        arguments, folder = json.loads(line)
        answers.write(
            json.dumps(run_in_fork(arguments, Path(folder)) | {"start_s": start_s}) + "\n"
        )


def run_in_fork(arguments: list[str], folder: Path) -> dict[str, object]:
    reader, writer = os.pipe()
    files = {1: folder.with_name("stdout"), 2: folder.with_name("stderr")}
    child = os.fork()
    if child == 0:
        os.close(reader)
        for number, path in files.items():
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        be_the_command(arguments, writer)
    os.close(writer)
    with os.fdopen(reader) as news:
        answer: dict[str, object] = json.loads(news.read())
    os.waitpid(child, 0)
    out, err = (path.read_text(errors="replace") for path in files.values())
    return answer | {"out": out, "err": err}


def be_the_command(arguments: list[str], writer: int) -> None:
    """In the child; does not return."""
    from dapo.cli.main import main

    sys.argv = ["dapo", *arguments]
    sys.path[0] = ""
    code = 1
    try:
        main(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        heavy = sorted({"torch", "transformers", "matplotlib"} & sys.modules.keys())
        answer = {"code": code, "command_s": time.process_time(), "heavy": heavy}
        os.write(writer, json.dumps(answer).encode())
        os._exit(code)


if __name__ == "__main__":
    serve()
