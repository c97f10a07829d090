"""Launchers for tests: of light processes, which are started as they are, and of heavy ones, which
are kept warm.

A process that samples from a model imports torch, which takes seconds: a warm one has the next
engine made in it.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dapo
from dapo.distributed.local import LocalLauncher, LocalWorker
from dapo.distributed.protocol import WeightsHandle, WorkerSpec
from dapo.engines.engine import WeightSource
from helpers.fake_engines import EmptyWeightsHandle
from helpers.paths import ROOT, TESTS
from helpers.processes import is_alive

# this very package, and these modules, wherever the tests run
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(Path(dapo.__file__).parents[1]), str(TESTS), str(ROOT)])
}


def engine_spec(engine: str, **options: Any) -> WorkerSpec:
    """Of an engine in pool_engines.py."""
    return WorkerSpec(
        f"helpers.fake_engines:{engine}", options, {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    )


class LightLauncher(LocalLauncher):
    """For engines that do not look at their weights.

    Knows the processes that it has started, by name.
    """

    def __init__(self, logs: Path) -> None:
        super().__init__(logs, timeout_s=60)
        self.running: dict[str, LocalWorker] = {}
        self.starts = 0

    def start(
        self, names: Sequence[str], specs: Sequence[WorkerSpec], *, together: bool = False
    ) -> list[LocalWorker]:
        workers = super().start(names, specs, together=together)
        self.running.update(zip(names, workers, strict=True))
        self.starts += len(workers)
        return workers

    def publish_weights(self, weights: object, version: int) -> EmptyWeightsHandle:
        return EmptyWeightsHandle(version)


class BorrowedWorker:
    """A warm process under another name; closing it leaves it warm."""

    def __init__(self, name: str, worker: LocalWorker) -> None:
        self.name = name
        self.pid = worker.pid
        self.call = worker.call
        self.kill = worker.kill

    def close(self) -> None:
        pass


class SharedWorkerLauncher:
    """Hands out processes that run already, and starts more when those are not enough."""

    def __init__(self) -> None:
        self._logs: TemporaryDirectory[str] | None = None
        self._all: list[LocalWorker] = []
        self._free: list[LocalWorker] = []
        self.running: dict[str, BorrowedWorker] = {}

    @property
    def gpus(self) -> float:
        return 0.0

    def release_all(self) -> None:
        """Nobody uses what was handed out any more."""
        self._free = [worker for worker in self._all if is_alive(worker.pid)]
        self.running.clear()

    def start(
        self, names: Sequence[str], specs: Sequence[WorkerSpec], *, together: bool = False
    ) -> list[BorrowedWorker]:
        self.warm_up(len(names))
        workers = [BorrowedWorker(name, self._free.pop(0)) for name in names]
        self.running.update((one.name, one) for one in workers)
        made = [
            worker.call("replace_engine", **one.options)
            for worker, one in zip(workers, specs, strict=True)
        ]
        for future in made:
            future.result(120)
        return workers

    def warm_up(self, count: int) -> None:
        """Have so many processes free."""
        if self._logs is None:
            self._logs = TemporaryDirectory()
            self._launcher = LocalLauncher(Path(self._logs.name), timeout_s=120)
        names = [
            f"warm-{i}" for i in range(len(self._all), len(self._all) + count - len(self._free))
        ]
        new = self._launcher.start(names, [engine_spec("ReusableEngineWorker")] * len(names))
        self._all += new
        self._free += new

    def publish_weights(self, weights: WeightSource, version: int) -> WeightsHandle:
        return self._launcher.publish_weights(weights, version)

    def close(self) -> None:
        if self._logs is not None:
            self._launcher.close()
            self._logs.cleanup()


SHARED_WORKERS = SharedWorkerLauncher()
"""Of the whole session, which ends them."""
