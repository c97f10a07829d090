"""Runs the `dapo` command, or a program of the tests, many times without starting Python many
times, and kills it.

A process that has imported everything, and started no thread (`helpers.zygote`), forks for each
command. One JSON object comes in, one goes out when the command has ended: its wait status and the
calls that were counted.

Moments are counted in calls: of Python functions and C functions made in the files of one area of
the package, in any thread. So a moment is the same one on every machine, up to what the threads of
verifiers and checkpoints do meanwhile.
"""

import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from helpers import zygote

MESSAGE_BYTES = 2**17

AREAS = {
    "start": (
        "cli",
        "api",
        "start",
        "config",
        "training/signals",
        "data",
    ),
    "rollout": (
        "sampling/queue",
        "sampling/batch",
        "sampling/continuous",
        "sampling/selection",
        "sampling/dynamic_sampling",
        "distributed",
        "engines",
        "core/rng",
    ),
    "agents": ("environments/agents",),
    "judging": ("rewards", "environments", "processes"),
    "update": (
        "policy/policy",
        "policy/critic",
        "policy/packing",
        "policy/objective",
        "policy/logprobs",
        "policy/optim",
        "policy/packed_attention",
    ),
    "saving": (
        "training/checkpointing",
        "training/checkpoint_writer",
        "runs/checkpoints",
        "runs/directory",
        "runs/metrics_file",
        "sampling/saved_groups",
        "policy/checkpoint",
    ),
    "evaluation": ("evaluation",),
    "loop": (
        "training/train",
        "training/asynchronous",
        "sampling/samples",
        "training/updates",
        "training/step_metrics",
    ),
}


class ForkServer:
    """The other end: start it, ask it, close it."""

    def __init__(self) -> None:
        self._connection = zygote.fork_server("commands", os.environ)

    def run(self, *arguments: str, output: Path, **moment: Any) -> tuple[int, dict[str, int]]:
        """`dapo ARGUMENTS` to its end: the exit code (minus the signal that ended it), and calls by
        area.

        `area`, `calls`: the moment at which `signals` are sent, each with its delay in seconds;
        `hold`: the seconds that the command's thread then waits, so that a signal finds it there.
        `file`, `lines`: instead the moment at which this file has so many lines. `file_bytes`: no
        file may become larger. `count`: count calls by area, which makes it slow. `program`: a
        `module:function` of the tests that takes the arguments instead. `folder`: the current
        directory. `errors`: a file for the standard error alone.
        """
        request = {"arguments": arguments, "output": str(output), **moment}
        self._connection.send(json.dumps(request).encode())
        answer = json.loads(self._connection.recv(MESSAGE_BYTES))
        return os.waitstatus_to_exitcode(answer["status"]), answer["calls"]

    def close(self) -> None:
        self._connection.close()


def serve(connection: socket.socket) -> None:
    """Answer the requests of a connection until its other end is closed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while request := connection.recv(MESSAGE_BYTES):
        connection.send(json.dumps(fork_and_watch(json.loads(request), connection)).encode())


def fork_and_watch(request: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
    assert threading.active_count() == 1
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        connection.close()
        be_the_command(request, writer)
    os.close(writer)
    calls: dict[str, int] = {}
    with os.fdopen(reader) as news:
        if (path := request.get("file")) is not None:
            # the pipe becomes readable when the command has ended
            while (
                count_lines(Path(path)) < request["lines"]
                and not select.select([news], [], [], 0.02)[0]
            ):
                pass
            send_signals(child, request["signals"])
        for line in news:
            if line == "now\n":
                send_signals(child, request["signals"])
            else:
                calls = json.loads(line)
    return {"status": os.waitpid(child, 0)[1], "calls": calls}


def send_signals(child: int, signals: Sequence[tuple[float, int]]) -> None:
    """Each after its delay. The child is not reaped yet, so the id is still its own."""
    for delay, signum in signals:
        time.sleep(delay)
        os.kill(child, signum)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def be_the_command(request: dict[str, Any], writer: int) -> None:
    """In the child; does not return."""
    module, _, function = request.get("program", "dapo.cli.main:main").partition(":")
    program = getattr(importlib.import_module(module), function)
    out = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(
        (
            os.open(request["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            if "errors" in request
            else out
        ),
        2,
    )
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if folder := request.get("folder"):
        os.chdir(folder)
    if limit := request.get("file_bytes"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    sys.argv = ["dapo", *request["arguments"]]
    counts: Counter[str] = Counter()
    if request.get("count") or request.get("area"):
        watch_calls(counts, request, writer)
    code = 1
    try:
        program(request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.setprofile(None)
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(writer, json.dumps(counts).encode() + b"\n")
        os._exit(code)


def watch_calls(counts: Counter[str], request: dict[str, Any], writer: int) -> None:
    """Count, and say so at the asked call in the asked area."""
    import dapo

    area = request.get("area")
    calls = request.get("calls", 0)
    hold = request.get("hold", 0.001)
    root = f"{Path(dapo.__file__).parent}/"
    area_of_file: dict[str, str | None] = {}

    def find_area(file: str) -> str | None:
        inside = file.removeprefix(root).removesuffix(".py")
        fits = [
            name
            for name, parts in AREAS.items()
            for part in parts
            if f"{inside}/".startswith(f"{part}/")
        ]
        return fits[0] if file.startswith(root) and fits else None

    def hook(frame: FrameType, event: str, argument: object) -> None:
        if event not in ("call", "c_call"):
            return
        file = frame.f_code.co_filename
        if file not in area_of_file:
            area_of_file[file] = find_area(file)
        if (found := area_of_file[file]) is None:
            return
        counts[found] += 1
        if found == area and counts[found] == calls:
            os.write(writer, b"now\n")
            time.sleep(hold)

    threading.setprofile(hook)
    sys.setprofile(hook)
