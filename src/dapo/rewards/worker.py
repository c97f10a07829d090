"""The process that runs verifiers for a pool: `python -m dapo.rewards.worker SOCKET PIPE`. Imports no torch."""

import faulthandler
import fcntl
import os
import socket
import sys
from typing import Any, TextIO, cast

from dapo.errors import RewardError
from dapo.rewards.combine import CombinedVerifier, RewardSpec
from dapo.rewards.wire import encode, opinion_to_json, problem_from_json, receive


def main() -> None:
    """Build the verifier, say so, then judge until the connection ends."""
    descriptor, lifeline = map(int, sys.argv[1:])
    for inherited in (descriptor, lifeline):
        os.set_inheritable(inherited, False)
    _end_with_parent(lifeline)
    connection = socket.socket(fileno=descriptor)
    faulthandler.enable()
    cast(TextIO, sys.stdout).reconfigure(line_buffering=True)  # type: ignore[attr-defined]
    order = receive(connection)
    if order is None:
        return
    sys.path.extend(entry for entry in order["path"] if entry not in sys.path)
    try:
        verifier = CombinedVerifier(RewardSpec(**order["spec"]))
    except RewardError as error:
        connection.sendall(encode({"error": str(error)}))
        return
    connection.sendall(encode({"scopes": verifier.scopes}))
    while (job := receive(connection)) is not None:
        connection.sendall(encode({"opinions": _judge(verifier, job)}))


def _judge(verifier: CombinedVerifier, job: dict[str, Any]) -> list[list[Any]]:
    problem = problem_from_json(job["problem"])
    opinions = verifier.opinions(job["scope"], problem, job["responses"], job["token_ids"])
    return [[opinion_to_json(opinion) for opinion in row] for row in opinions]


def _end_with_parent(lifeline: int) -> None:
    """Let the kernel kill the process group when the pipe's other end closes, which it does if the parent dies.

    It sends SIGIO, whose default is death. A thread could not do that: a verifier that hangs inside one C call, an
    enormous power for instance, lets no other thread run.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


if __name__ == "__main__":
    main()
