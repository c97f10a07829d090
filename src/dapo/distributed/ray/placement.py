"""Reserves resources for workers as placement groups; errors name demand and cluster."""

import threading
from collections.abc import Sequence

from dapo.core.errors import LaunchError
from dapo.distributed.protocol import Node, WorkerSpec

# a placement group cannot be empty: the request where processes share the CPUs
UNCOUNTED_CPUS = 0.001


class Reservation:
    """A placement group, removed with its last worker; a lost worker returns to its bundle."""

    def __init__(self, bundles: Sequence[dict[str, float]]) -> None:
        from ray.util import placement_group

        self.bundles = bundles
        self.group = placement_group(
            [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles],
            strategy="PACK",
        )
        self.ready = self.group.ready()
        self._members = len(bundles)
        self._lock = threading.Lock()

    def join(self) -> bool:
        """Add a worker, unless the group is removed."""
        with self._lock:
            self._members += self._members > 0
            return self._members > 0

    def release(self) -> None:
        with self._lock:
            self._members -= 1
            if self._members:
                return
        self.cancel()

    def cancel(self) -> None:
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
    """Reserve resources; return each worker's placement group and the index of its bundle.

    Args:
        names: the workers' names, for the message.
        specs: the workers' specs.
        together: whether one group has all workers, instead of a group each.
        timeout_s: how long to wait, also for nodes that join the cluster.
        counts_cpus: whether CPUs are reserved; otherwise processes share them.
        gpus_left: the number of GPUs that this run has not reserved; None: the cluster may grow.

    Raises LaunchError after `timeout_s`, or at once for more than `gpus_left`.
    """
    import ray

    if gpus_left is not None and sum(spec.gpus for spec in specs) > gpus_left:
        raise LaunchError(
            f"not enough resources for {describe_demand(names, specs)}; {describe_cluster()}"
        )
    bundles = [bundle_of(spec, counts_cpus=counts_cpus) for spec in specs]
    parts = [bundles] if together and bundles else [[bundle] for bundle in bundles]
    reservations = [Reservation(part) for part in parts]
    placed = [
        (reservation, index)
        for reservation in reservations
        for index in range(len(reservation.bundles))
    ]
    try:
        ready = [reservation.ready for reservation in reservations]
        granted = ray.wait(ready, num_returns=len(ready), timeout=timeout_s)[0] if ready else []
        if lacking := [
            i for i, (reservation, _) in enumerate(placed) if reservation.ready not in granted
        ]:
            demand = describe_demand([names[i] for i in lacking], [specs[i] for i in lacking])
            raise LaunchError(
                f"not enough resources within {timeout_s:g} s for {demand}; {describe_cluster()}"
            )
    except BaseException:
        for reservation in reservations:
            reservation.cancel()
        raise
    return placed


def bundle_of(spec: WorkerSpec, *, counts_cpus: bool) -> dict[str, float]:
    """Return the resources of one worker, all of them on one node."""
    return {
        "CPU": spec.cpus if counts_cpus and (spec.cpus or spec.gpus) else UNCOUNTED_CPUS,
        "GPU": spec.gpus,
    }


def cluster_nodes() -> list[Node]:
    """Return the live nodes of the cluster."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [
        Node(cpus=resources.get("CPU", 0.0), gpus=resources.get("GPU", 0.0)) for resources in alive
    ]


def describe_demand(names: Sequence[str], specs: Sequence[WorkerSpec]) -> str:
    """Return text like `engine-0, engine-1 (1 CPU, 1 GPU each; 2 CPUs, 2 GPUs in all)`."""
    by_demand: dict[tuple[float, float], list[str]] = {}
    for name, spec in zip(names, specs, strict=True):
        by_demand.setdefault((spec.cpus, spec.gpus), []).append(name)
    groups = by_demand.items()
    demands = [
        f"{', '.join(same)} ({_amounts(*demand)}{' each' if len(same) > 1 else ''})"
        for demand, same in groups
    ]
    if len(names) == 1:
        return demands[0]
    in_all = _amounts(sum(b.cpus for b in specs), sum(b.gpus for b in specs))
    return f"{' and '.join(demands)}, {in_all} in all"


def describe_cluster() -> str:
    """Nodes, CPUs and GPUs of the cluster, how many are free, and how many the largest node has."""
    import ray

    alive = cluster_nodes()
    free = ray.available_resources()
    descriptions = [
        f"{_amount(sum(amounts), kind)} ({_number(free.get(kind, 0.0))} free; "
        f"{_number(max(amounts, default=0.0))} on the largest node)"
        for kind, amounts in (
            ("CPU", [node.cpus for node in alive]),
            ("GPU", [node.gpus for node in alive]),
        )
    ]
    return (
        f"the cluster has {len(alive)} node{'s' * (len(alive) != 1)} with"
        f" {' and '.join(descriptions)}"
    )


def _amounts(cpus: float, gpus: float) -> str:
    return ", ".join([_amount(cpus, "CPU"), *([_amount(gpus, "GPU")] if gpus else [])])


def _amount(amount: float, kind: str) -> str:
    return f"{_number(amount)} {kind}{'s' * (amount != 1)}"


def _number(amount: float) -> str:
    return f"{round(amount, 2):g}"
