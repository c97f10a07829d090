"""What a Ray worker runs: an actor that holds one object and answers calls, as the child of a local worker does."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dapo
from dapo.distributed.worker_main import call_method, make, try_call


@dataclass(frozen=True)
class ActorInfo:
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


class WorkerActor:
    """The actor. Its calls are carried out one after the other in the process's main thread."""

    def __init__(self) -> None:
        self._target: Any = None

    def handshake(self, name: str, logs: Path, weights: Path | None) -> ActorInfo:
        """Send what is printed from now on to the run's logs, if they can be reached, and tell where this is."""
        import ray.util

        if logs.is_dir():
            log = logs / f"{name}.log"
            _redirect_output(log)
        else:
            log = Path(os.readlink("/proc/self/fd/1"))
        reads_files = weights is not None and weights.is_dir()
        return ActorInfo(os.getpid(), ray.util.get_node_ip_address(), dapo.__version__, log, reads_files)

    def make(self, factory: str, options: Mapping[str, Any]) -> tuple[bool, Any]:
        """Make the object; see child.attempt for the answer."""
        is_ok, value = try_call(make, factory, options)
        if is_ok:
            self._target, value = value, os.getpid()
        return is_ok, value

    def call(self, method: str, arguments: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Call a method of the object."""
        return try_call(call_method, self._target, method, arguments, kwargs)


def _redirect_output(log: Path) -> None:
    """Both streams, those of libraries in C included."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
