"""Commands to a worker process and its answers: one JSON object a line over its standard input and
output.

Standard library only: it runs in every system's own virtual environment.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Any, TextIO

Handler = Callable[..., dict[str, Any]]

GRACE_S = 10.0
"""For a worker to end by itself before it is killed."""


class WorkerFailed(RuntimeError):
    """A worker died, reported an error or did not answer in time."""


class Channel:
    """The worker's side.

    Whatever libraries print goes to standard error, so that only answers are on the line.
    """

    def __init__(self) -> None:
        self._answers: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def receive(self) -> dict[str, Any] | None:
        """The next command; None at the end."""
        line = sys.stdin.readline()
        command = json.loads(line) if line else {"do": "quit"}
        return None if command["do"] == "quit" else command

    def answer(self, result: Mapping[str, Any]) -> None:
        """Send the result of the last command."""
        print(json.dumps({"ok": result}), file=self._answers, flush=True)

    def fail(self, error: BaseException) -> None:
        """Say that the last command failed, and how."""
        text = "".join(traceback.format_exception(error))
        print(
            json.dumps({"error": f"{type(error).__name__}: {error}", "traceback": text}),
            file=self._answers,
            flush=True,
        )


def serve(
    handlers: Mapping[str, Handler], channel: Channel | None = None, until: str | None = None
) -> bool:
    """Answer commands by the handler of their name; an error ends the worker.

    Returns True at the command named `until`, which the caller answers, and False when the
    coordinator quits.
    """
    channel = channel or Channel()
    while (command := channel.receive()) is not None:
        name = command.pop("do")
        if name == until:
            return True
        try:
            channel.answer(handlers[name](**command))
        except Exception as error:
            channel.fail(error)
            raise
    return False


class Worker:
    """The coordinator's side: one process, started at once, that answers one command at a time."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        cwd: Path | None = None,
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "w", encoding="utf-8") as errors:
            # a session of its own: what it starts ends with it
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(env),
                cwd=cwd,
                start_new_session=True,
            )
        self._pending = b""

    def ask(self, do: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer.

        Raises WorkerFailed, after which the process is gone.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
            reply = json.loads(self._read_line(time.monotonic() + timeout_s, do))
        except (OSError, ValueError) as error:
            self.kill()
            raise WorkerFailed(
                f"{self.name}: {do}: {error}; its output is in {os.path.relpath(self.log)}"
            ) from error
        except WorkerFailed:
            self.kill()
            raise
        if "error" in reply:
            self.kill()
            raise WorkerFailed(
                f"{self.name}: {do}: {reply['error']}; its output is in {os.path.relpath(self.log)}"
            )
        result: dict[str, Any] = reply["ok"]
        return result

    def close(self) -> None:
        """Ask it to end, and kill it if it does not."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            with suppress(OSError, subprocess.TimeoutExpired):  # killed below
                self._process.stdin.write(b'{"do": "quit"}\n')
                self._process.stdin.close()
                self._process.wait(GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End it and everything it has started, by its process group."""
        with suppress(ProcessLookupError):  # everything has ended already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # a command that it never read
                    pipe.close()

    def _read_line(self, deadline: float, do: str) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            ready, _, _ = select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerFailed(
                    f"{self.name}: no answer to {do} in time; its output is in"
                    f" {os.path.relpath(self.log)}"
                )
            data = os.read(descriptor, 1 << 20)
            if not data:
                raise WorkerFailed(
                    f"{self.name} ended while it was asked to {do}; its output is in"
                    f" {os.path.relpath(self.log)}"
                )
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line
