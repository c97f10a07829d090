"""What a Ray worker runs: an actor that holds one object and answers calls, as the child of a local worker does."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dapo
from dapo.distributed.worker_main import attempt, carry_out, make


@dataclass(frozen=True)
class Arrival:
    """Where an actor has found its place."""

    pid: int
    node: str
    """The node's IP address."""
    version: str
    """Of this package there."""
    log: Path
    """What the process prints: in the run's `logs` where the node reaches them, otherwise Ray's own file there."""
    reads_files: bool
    """Whether it sees the folder that the controller writes weights to."""


class Host:
    """The actor. Its calls are carried out one after the other in the process's main thread."""

    def __init__(self) -> None:
        self._target: Any = None

    def arrive(self, name: str, logs: Path, weights: Path | None) -> Arrival:
        """Send what is printed from now on to the run's logs, if they can be reached, and tell where this is."""
        import ray.util

        if logs.is_dir():
            log = logs / f"{name}.log"
            _print_to(log)
        else:
            log = Path(os.readlink("/proc/self/fd/1"))
        reads_files = weights is not None and weights.is_dir()
        return Arrival(os.getpid(), ray.util.get_node_ip_address(), dapo.__version__, log, reads_files)

    def make(self, factory: str, options: Mapping[str, Any]) -> tuple[bool, Any]:
        """Make the object; see child.attempt for the answer."""
        is_answer, value = attempt(make, factory, options)
        if is_answer:
            self._target, value = value, os.getpid()
        return is_answer, value

    def call(self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[bool, Any]:
        """Call a method of the object."""
        return attempt(carry_out, self._target, method, arguments, named)


def _print_to(log: Path) -> None:
    """Both streams, those of libraries in C included."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
