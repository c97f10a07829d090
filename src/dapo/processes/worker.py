"""The process's side of a worker that runs user code: `run`.

The arguments of such a process are SOCKET KEEPALIVE_PIPE REPORT_PIPE MEMORY_BYTES, with descriptors.
"""

import contextlib
import faulthandler
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, TextIO, TypeAlias, cast

from dapo.core.errors import DapoError
from dapo.core.loading import use_import_locations
from dapo.processes.frames import encode, receive
from dapo.processes.supervisor import MAX_PROCESSES, exit_with_supervisor, supervise

Answer: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
"""Answers a message of the pool; `needs_restart` in the answer asks for a new process."""
Build: TypeAlias = Callable[[dict[str, Any]], tuple[dict[str, Any], Answer]]
"""Makes the answer to the first message, and what answers the others; raises DapoError."""


def run(build: Build, *, max_processes: int = MAX_PROCESSES) -> None:
    """Supervise a child, which answers the pool's messages by user code that `build` loads.

    The child may have `max_processes` descendants, itself included.
    """
    connection, keepalive_pipe, report, memory_bytes = map(int, sys.argv[1:])
    output, write_end = os.pipe()
    supervisor_pid = os.getpid()
    worker = os.fork()
    if worker:
        for unused in (connection, write_end):
            os.close(unused)
        supervise(
            worker,
            keepalive_pipe=keepalive_pipe,
            output=output,
            report=report,
            memory_bytes=memory_bytes,
            max_processes=max_processes,
        )
    exit_with_supervisor(supervisor_pid)
    os.setsid()  # its own process group, without a terminal that sends Ctrl-C
    for unused in (output, keepalive_pipe, report):
        os.close(unused)
    os.dup2(write_end, 1)
    os.dup2(write_end, 2)
    os.close(write_end)
    _limit(memory_bytes)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        cast(TextIO, stream).reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    os.set_inheritable(connection, False)
    _serve(socket.socket(fileno=connection), build)


def _limit(memory_bytes: int) -> None:
    """Limit private writable memory, also of children; RLIMIT_AS would count reservations."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    bound = memory_bytes if hard_limit == resource.RLIM_INFINITY else min(memory_bytes, hard_limit)
    with (
        contextlib.nullcontext()
        if sys.platform == "linux"
        else contextlib.suppress(ValueError, OSError)
    ):
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))  # macOS may refuse it


def _serve(connection: socket.socket, build: Build) -> None:
    init_message = receive(connection)
    if init_message is None:
        return
    use_import_locations(init_message["path"], init_message["code_folders"])
    own_pid = os.getpid()
    try:
        ready, answer_to = build(init_message["spec"])
    except DapoError as error:
        connection.sendall(encode({"error": str(error)}))
        return
    if os.getpid() != own_pid:
        os._exit(0)
    initial_state = _process_state(connection)
    connection.sendall(encode({**ready, "pid": own_pid}))
    number = 0
    while (task := receive(connection)) is not None:
        number += 1
        answer = answer_to(task)
        if os.getpid() != own_pid:
            os._exit(0)  # the user's code has forked, and the child must not answer too
        signal.setitimer(signal.ITIMER_REAL, 0)  # a pending alarm would interrupt the next call
        state = _process_state(connection)
        damage = " and ".join(text for text, value in initial_state.items() if state[text] != value)
        connection.sendall(encode({**answer, "number": number, "damage": damage}))


def _process_state(connection: socket.socket) -> dict[str, Any]:
    """Process state that every call must leave unchanged, keyed by the message for a change."""
    state: dict[str, Any] = {"left the working directory changed": None}
    with contextlib.suppress(OSError):  # it was removed
        state["left the working directory changed"] = os.getcwd()
    names = ("standard input", "standard output", "standard error", "the connection to the pool")
    for name, number in zip(names, (0, 1, 2, connection.fileno()), strict=True):
        try:
            status = os.fstat(number)
            state[f"left {name} closed or replaced"] = status.st_dev, status.st_ino
        except OSError:
            state[f"left {name} closed or replaced"] = None
    return state
