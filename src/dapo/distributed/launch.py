"""Helpers of both launchers: resources, waiting for a start, import path."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from math import ceil
from pathlib import Path
from typing import Any

import dapo
from dapo.config import Config
from dapo.core.errors import LaunchError
from dapo.distributed.protocol import Node, WorkerSpec

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def gpus_per_worker(config: Config, nodes: Sequence[Node], *, default: float) -> float:
    """Return a cluster worker's GPUs: the option, or the default if a node has GPUs."""
    configured = config.distributed.gpus_per_process
    if configured is not None:
        return configured
    if any(node.gpus for node in nodes):
        return default
    return 0.0


def threads_on_cluster(config: Config, nodes: Sequence[Node], *, gpus: float) -> int | None:
    """Return a worker's CPU threads; None if all workers share the CPUs of one machine.

    Workers with GPUs get the same fraction of their node's CPUs as of its GPUs, so that any
    placement fits. Workers without GPUs spread evenly over the nodes.
    """
    if gpus:
        with_gpus = [node for node in nodes if node.gpus]
        if with_gpus:
            return max(1, int(min(node.cpus * min(1.0, gpus / node.gpus) for node in with_gpus)))
    if len(nodes) < 2:
        return None
    workers = config.distributed.trainer_ranks + config.engine_processes
    return max(1, int(min(node.cpus for node in nodes)) // ceil(workers / len(nodes)))


def allocator_environment(config: Config) -> dict[str, str]:
    """Return variables for torch's allocator in a worker on a GPU, unless the user set them.

    Expandable segments prevent fragmentation. vLLM plans its own memory and, with several GPUs,
    does not start with them (vLLM issue 42609).
    """
    if config.train.device == "cpu" or any(name in os.environ for name in ALLOCATOR_VARIABLES):
        return {}
    return {ALLOCATOR_VARIABLES[0]: "expandable_segments:True"}


def use_expandable_segments(config: Config) -> None:
    """Set torch's allocator in this process, which trains on a GPU, as workers have it.

    Environment variables would reach the engines, too, of which vLLM's may not have it.
    """
    import torch

    for settings in allocator_environment(config).values():
        torch._C._accelerator_setAllocatorSettings(settings)


def wait_until_ready(
    future: "Future[Any]", *, since: float, timeout_s: float, what: str, see: str
) -> Any:
    """Return the result of one stage of a start. Raises LaunchError at the deadline.

    Args:
        future: the stage.
        since: the time at which it began, by `time.monotonic`.
        timeout_s: the seconds that it may take.
        what: names the stage in the message.
        see: says in the message where to look.
    """
    try:
        return future.result(max(since + timeout_s - time.monotonic(), 0.0))
    except TimeoutError as error:
        raise LaunchError(f"{what} was not ready within {timeout_s:g} s; {see}") from error


def import_path(spec: WorkerSpec) -> str:
    """Return a worker's PYTHONPATH: this package, then the worker's own and the user's.

    Another interpreter gets this package by its own path alone: next to this one may lie another
    version of torch.
    """
    package_path = None if spec.python is not None else str(Path(dapo.__file__).parents[1])
    return os.pathsep.join(
        filter(
            None, [package_path, spec.environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        )
    )
