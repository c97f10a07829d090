"""The process that runs verifiers for a pool: `python -m dapo.rewards.workers.worker SOCKET LIFELINE REPORT BYTES`.

Imports no torch.
"""

import faulthandler
import os
import resource
import signal
import socket
import sys
from typing import Any, TextIO, cast

from dapo.core.errors import RewardError
from dapo.core.loading import OUT_OF_MEMORY
from dapo.rewards.combine import CombinedVerifier, RewardSpec
from dapo.rewards.workers.protocol import encode, opinion_to_json, problem_from_json, receive
from dapo.rewards.workers.supervisor import end_with_guard, guard


def main() -> None:
    """Become the guard of a child process, which builds the verifier, says so, and judges until its connection ends."""
    connection, lifeline, report, memory_bytes = map(int, sys.argv[1:])
    output, theirs = os.pipe()
    guard_pid, worker = os.getpid(), os.fork()
    if worker:
        for unused in (connection, theirs):
            os.close(unused)
        guard(worker, lifeline=lifeline, output=output, report=report, memory_bytes=memory_bytes)
    end_with_guard(guard_pid)
    os.setsid()  # a group of its own, and no terminal whose Ctrl-C it would get
    for unused in (output, lifeline, report):
        os.close(unused)
    os.dup2(theirs, 1)
    os.dup2(theirs, 2)
    os.close(theirs)
    _limit(memory_bytes)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        cast(TextIO, stream).reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    os.set_inheritable(connection, False)
    _serve(socket.socket(fileno=connection))


def _limit(memory_bytes: int) -> None:
    """Private writable memory of this process and of each it starts; RLIMIT_AS would count mere reservations too."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    bound = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def _serve(connection: socket.socket) -> None:
    order = receive(connection)
    if order is None:
        return
    sys.path.extend(entry for entry in order["path"] if entry not in sys.path)
    try:
        verifier = CombinedVerifier(RewardSpec(**order["spec"]))
    except RewardError as error:
        connection.sendall(encode({"error": str(error)}))
        return
    connection.sendall(encode({"scopes": verifier.scopes, "pid": os.getpid()}))
    own, whole = os.getpid(), _surroundings(connection)
    number = 0
    while (job := receive(connection)) is not None:
        number += 1
        opinions = _judge(verifier, job)
        if os.getpid() != own:
            os._exit(0)  # the verifier has forked, and this is the child: there must not be two answers
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left pending would ring in the next verdict
        answer = {
            "number": number,
            "opinions": opinions,
            "damage": _changes(whole, _surroundings(connection)),
            "spent": _ran_out_of_memory(opinions),
        }
        connection.sendall(encode(answer))


def _judge(verifier: CombinedVerifier, job: dict[str, Any]) -> list[list[Any]]:
    problem = problem_from_json(job["problem"])
    opinions = verifier.opinions(job["scope"], problem, job["responses"], job["token_ids"])
    return [[opinion_to_json(opinion) for opinion in row] for row in opinions]


def _surroundings(connection: socket.socket) -> dict[str, Any]:
    """What every verdict must find as the first one did, under the words that say what is wrong if not."""

    def descriptor(number: int) -> tuple[int, int] | None:
        try:
            found = os.fstat(number)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    try:
        directory: str | None = os.getcwd()
    except OSError:  # it was removed
        directory = None
    return {
        "left the working directory changed": directory,
        **{
            f"left {name} closed or replaced": descriptor(number)
            for name, number in (("standard input", 0), ("standard output", 1), ("standard error", 2))
        },
        "left the connection to the pool closed or replaced": descriptor(connection.fileno()),
    }


def _changes(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Why this process must not judge again, nor its last verdict count; empty if nothing is wrong."""
    return " and ".join(words for words, value in before.items() if after[words] != value)


def _ran_out_of_memory(opinions: list[list[Any]]) -> bool:
    """Then what fills it may still be there."""
    errors = [opinion[2] for row in opinions for opinion in row if opinion is not None]
    return any(error is not None and OUT_OF_MEMORY in error for error in errors)


if __name__ == "__main__":
    main()
