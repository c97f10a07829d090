"""Room on a Ray cluster for workers, all of a gang or none, or an error that names what was asked and what there is."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError

from dapo.core.errors import LaunchError
from dapo.distributed.protocol import WorkerSpec

UNCOUNTED_CPUS = 0.001
"""A placement group asks for something: this where CPUs are shared."""


class Reservation:
    """A placement group; given back when the last worker in it is gone."""

    def __init__(self, bundles: Sequence[dict[str, float]]) -> None:
        from ray.util import placement_group

        self.bundles = bundles
        self.group = placement_group(
            [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles], strategy="PACK"
        )
        self._members = len(bundles)
        self._lock = threading.Lock()

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Wait for it."""
        try:
            self.group.ready().future().result(timeout_s)
        except FutureTimeoutError:
            return False
        return True

    def release(self) -> None:
        """One of its workers is gone."""
        with self._lock:
            self._members -= 1
            is_last = self._members == 0
        if is_last:
            self.cancel()

    def cancel(self) -> None:
        """Give it back as a whole."""
        from ray.util import remove_placement_group

        remove_placement_group(self.group)


def reserve(
    names: Sequence[str],
    specs: Sequence[WorkerSpec],
    *,
    together: bool,
    timeout_s: float,
    counts_cpus: bool,
    gpus_left: float | None,
) -> list[tuple[Reservation, int]]:
    """A place for each worker: `together` in one placement group, otherwise in one for each.

    A node that joins meanwhile counts. `gpus_left`: of a cluster that cannot grow, what this run does not hold yet.
    Raises LaunchError after `timeout_s`, or at once for more GPUs than are left.
    """
    deadline = time.monotonic() + timeout_s
    if gpus_left is not None and sum(spec.gpus for spec in specs) > gpus_left:
        raise LaunchError(f"no place for {describe_demand(names, specs)}; {describe_cluster()}")
    bundles = [{"CPU": _cpus(spec, counts_cpus), "GPU": spec.gpus} for spec in specs]
    parts = [bundles] if together else [[bundle] for bundle in bundles]
    reservations = [Reservation(part) for part in parts]
    try:
        placed = [reservation.wait_until_ready(max(deadline - time.monotonic(), 0.0)) for reservation in reservations]
        if not all(placed):
            lacking = [i for i in range(len(names)) if not placed[0 if together else i]]
            asked = describe_demand([names[i] for i in lacking], [specs[i] for i in lacking])
            raise LaunchError(
                f"no place within {timeout_s:g} s (distributed.start_timeout_s) for {asked}; {describe_cluster()}"
            )
    except BaseException:
        for reservation in reservations:
            reservation.cancel()
        raise
    return [
        (reservation, index)
        for reservation, part in zip(reservations, parts, strict=True)
        for index in range(len(part))
    ]


def total(resource: str) -> float:
    """Of all nodes."""
    import ray

    return float(ray.cluster_resources().get(resource, 0.0))


def describe_demand(names: Sequence[str], specs: Sequence[WorkerSpec]) -> str:
    """`engine-0, engine-1 (1 CPU, 1 GPU each; 2 CPUs, 2 GPUs in all)`."""
    by_demand: dict[tuple[float, float], list[str]] = {}
    for name, spec in zip(names, specs, strict=True):
        by_demand.setdefault((spec.cpus, spec.gpus), []).append(name)
    each = [
        f"{', '.join(same)} ({_amounts(*demand)}{' each' if len(same) > 1 else ''})"
        for demand, same in by_demand.items()
    ]
    if len(names) == 1:
        return each[0]
    in_all = _amounts(sum(b.cpus for b in specs), sum(b.gpus for b in specs))
    return f"{' and '.join(each)}, {in_all} in all"


def describe_cluster() -> str:
    """What there is, what of it is free, and how much of it one node has at most."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources()
    descriptions = [
        f"{_amount(total(kind), kind)} ({_number(free.get(kind, 0.0))} free; "
        f"{_number(max((node.get(kind, 0.0) for node in alive), default=0.0))} on the largest node)"
        for kind in ("CPU", "GPU")
    ]
    return f"the cluster has {len(alive)} node{'s' * (len(alive) != 1)} with {' and '.join(descriptions)}"


def _cpus(spec: WorkerSpec, counts_cpus: bool) -> float:
    if counts_cpus and (spec.cpus or spec.gpus):
        return spec.cpus
    return UNCOUNTED_CPUS


def _amounts(cpus: float, gpus: float) -> str:
    return ", ".join([_amount(cpus, "CPU"), *([_amount(gpus, "GPU")] if gpus else [])])


def _amount(amount: float, kind: str) -> str:
    return f"{_number(amount)} {kind}{'s' * (amount != 1)}"


def _number(amount: float) -> str:
    return f"{round(amount, 2):g}"
