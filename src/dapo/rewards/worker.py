"""The process that runs verifiers for a pool: `python -m dapo.rewards.worker DESCRIPTOR`. Imports no torch."""

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any, TextIO, cast

from dapo.errors import RewardError
from dapo.rewards.combine import CombinedVerifier, RewardSpec
from dapo.rewards.wire import encode, opinion_to_json, problem_from_json, receive

GRACE_S = 1.0
"""Between the parent's end and that of whatever a worker's process group still runs."""


def main() -> None:
    """Build the verifier, say so, then judge until the connection ends."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with_parent, args=(descriptor,), daemon=True).start()
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


def _end_with_parent(descriptor: int) -> None:
    """Kill the process group soon after the other end has closed, even if a verifier hangs."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-up is reported without being asked for
    poll.poll()
    time.sleep(GRACE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
