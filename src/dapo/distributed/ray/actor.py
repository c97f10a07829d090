"""The actor in a Ray worker's process: holds an object and answers calls on it."""

import os
import pkgutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

import dapo
from dapo.core.environment import public_environment
from dapo.core.files import PRIVATE
from dapo.distributed.worker_main import try_call

AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")


@dataclass(frozen=True)
class ActorInfo:
    """Where an actor runs."""

    pid: int
    node: str  # the node's IP address
    version: str  # the version of this package on the node
    # the process's output: in the run's `logs` if the node sees them, otherwise Ray's own file on
    # the node
    log: Path
    gpus: Sequence[str]  # the names of its GPUs, as in CUDA_VISIBLE_DEVICES
    reads_files: bool  # whether the process sees the folder to which the controller writes weights


class WorkerActor:
    """Executes calls one at a time, in the process's main thread; answers like `try_call`."""

    def __init__(self, secrets: Collection[str] = ()) -> None:
        """Forget the node's secrets but the named ones, also for children of this process."""
        self._target: Any = None
        for name in os.environ.keys() - public_environment({*secrets, *AUTHENTICATION}).keys():
            del os.environ[name]

    def handshake(self, name: str, logs: Path, weights: Path | None) -> tuple[bool, ActorInfo]:
        """Redirect output to the run's logs if the node sees them; report where the actor runs."""
        import ray.util

        if logs.is_dir():
            log = logs / f"{name}.log"
            _redirect_output(log)
        else:
            log = Path(os.readlink("/proc/self/fd/1"))
        reads_files = weights is not None and weights.is_dir()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        return True, ActorInfo(
            os.getpid(), ray.util.get_node_ip_address(), dapo.__version__, log, gpus, reads_files
        )

    def create(self, factory: str, options: Mapping[str, Any]) -> tuple[bool, Any]:
        is_ok, value = try_call(lambda: pkgutil.resolve_name(factory)(**options))
        if is_ok:
            self._target = value
            value = None
        return is_ok, value

    def call(
        self, method: str, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[bool, Any]:
        return try_call(methodcaller(method, *arguments, **options), self._target)


def _redirect_output(log: Path) -> None:
    """Redirect stdout and stderr, including the output of libraries written in C."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, PRIVATE)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
