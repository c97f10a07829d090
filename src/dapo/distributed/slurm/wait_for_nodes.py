"""Waits until all nodes of a Slurm allocation have joined its Ray cluster.

Usage: `python -m dapo.distributed.slurm.wait_for_nodes ADDRESS NODES SECONDS`.
"""

import logging
import sys
import time

from dapo.core.errors import DapoError, LaunchError
from dapo.core.terminal import print_text

POLL_INTERVAL_S = 0.5


def wait_for_nodes(address: str, count: int, timeout_s: float) -> None:
    """Wait until `count` nodes of the Ray cluster are alive.

    Raises LaunchError with the names of those that are.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    # RuntimeError: the token is missing or of another cluster
    except (ConnectionError, RuntimeError) as error:
        raise LaunchError(f"the Ray cluster at {address} cannot be reached: {error}") from error
    try:
        while True:
            names = sorted(node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"])
            if len(names) >= count:
                return
            if time.monotonic() > deadline:
                joined = (
                    f"{len(names)} of {count} nodes joined the Ray cluster at {address} within"
                    f" {timeout_s:g} s"
                )
                raise LaunchError(f"{joined}: {', '.join(names)}")
            time.sleep(POLL_INTERVAL_S)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    try:
        wait_for_nodes(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
    except DapoError as error:
        print_text(f"error: {error}", file=sys.stderr)
        sys.exit(1)
