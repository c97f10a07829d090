"""The trainer of the simulation: the real group and the real ranks in processes of their own,
without a model.

What the controller and the ranks do with samples is what they do in a run: partitions, sockets,
exchanges between the ranks. A rank packs its first microbatch, and answers zeros instead of
computing.
"""

import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.memory import peak_rss_bytes, rss_bytes
from benchmarks.simulation_fakes import Clock
from benchmarks.worker_session import ROOT
from dapo.config import Config
from dapo.core.interfaces import use_loopback_interface
from dapo.distributed.channel import Buffers
from dapo.distributed.local import LocalLauncher, LocalWorker
from dapo.distributed.protocol import WorkerSpec
from dapo.distributed.rank_samples import NumberedPass, RankSamples
from dapo.distributed.trainer_group import TrainerGroup
from dapo.distributed.trainer_worker import TrainerWorker
from dapo.engines.engine import WeightSource
from dapo.policy.fsdp.ranks import Ranks
from dapo.policy.packing import RankMicrobatch, pack_microbatch
from dapo.types import Sample

START_TIMEOUT_S = 600.0


class NoModel:
    """Replaces the sharded policy of a rank."""

    skipped_in_a_row = 0

    def __init__(self) -> None:
        self.began_at: float | None = None

    def logprobs(self, rank_microbatches: Sequence[RankMicrobatch]) -> list[list[Sequence[float]]]:
        """Zeros.

        Notes when a batch's first microbatch is packed: its log-probabilities would be computed
        from then.
        """
        if self.began_at is None:
            for rank_microbatch in rank_microbatches[:1]:
                pack_microbatch(rank_microbatch, torch.device("cpu"))
            self.began_at = time.monotonic()
        return [
            [array("f", bytes(4 * len(sample.response_ids))) for sample in each.samples]
            for each in rank_microbatches
        ]

    def update(self, rank_microbatches: Sequence[RankMicrobatch], *, step: int) -> dict[str, float]:
        """Nothing changes."""
        names = (
            "loss/policy",
            "optim/update_tokens",
            "optim/grad_norm",
            "optim/lr",
            "optim/skipped",
        )
        return dict.fromkeys(names, 0.0)


class SimulatedRank(TrainerWorker):
    """A real rank, but for its model."""

    def __init__(
        self, config: Config, *, rank: int, threads: int, path: Sequence[str] = ()
    ) -> None:
        torch.set_num_threads(threads)
        self._size = config.distributed.trainer_ranks
        self._rank = rank

    def init_process_group(self, rendezvous: Path | tuple[str, int], *, timeout_s: float) -> None:
        """Connect to the other ranks."""
        use_loopback_interface("GLOO")
        store = dist.FileStore(str(rendezvous), self._size)
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            "gloo", store=store, rank=self._rank, world_size=self._size, timeout=timeout
        )
        self._policy = NoModel()
        self._samples = RankSamples(Ranks(torch.device("cpu"), timeout_s=timeout_s).exchange)

    def score(self, buffers: Buffers, passes: Sequence[NumberedPass], *, is_first: bool) -> None:
        """The real one."""
        if is_first:
            self._policy.began_at = None
        super().score(buffers, passes, is_first=is_first)

    def began_at(self) -> float:
        """When the first log-probabilities of the newest batch could be computed, by
        `time.monotonic`.
        """
        return float(self._policy.began_at)


class CountedWorker:
    """A worker; the bytes of the buffers that go to it are counted."""

    def __init__(self, worker: LocalWorker, moved: dict[str, int]) -> None:
        self._worker = worker
        self._moved = moved
        self.name = worker.name
        self.pid = worker.pid
        self.kill = worker.kill
        self.close = worker.close

    def call(self, method: str, /, *arguments: Any, **options: Any) -> "Future[Any]":
        """Pass it on."""
        sent = [
            part.nbytes for each in arguments if isinstance(each, Buffers) for part in each.parts
        ]
        self._moved["controller to trainer"] += sum(sent)
        return self._worker.call(method, *arguments, **options)


class SimulatedLauncher(LocalLauncher):
    """Starts simulated ranks where real ones are asked for."""

    def __init__(self, logs: Path, moved: dict[str, int]) -> None:
        super().__init__(logs, timeout_s=START_TIMEOUT_S)
        self._moved = moved

    def start(
        self, names: Sequence[str], specs: Sequence[WorkerSpec], *, together: bool = False
    ) -> list[Any]:
        """Ranks without a model."""
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        simulated = [
            replace(
                spec,
                factory="benchmarks.simulated_trainer:SimulatedRank",
                environment={**spec.environment, "PYTHONPATH": path},
            )
            for spec in specs
        ]
        return [
            CountedWorker(worker, self._moved)
            for worker in super().start(names, simulated, together=together)
        ]


class TimedTrainer(TrainerGroup):
    """The real trainer group, clocked."""

    def __init__(self, config: Config, launcher: SimulatedLauncher, clock: Clock) -> None:
        self._clock = clock
        self.ready_at = 0.0
        """When all ranks had begun to score the newest batch, by `time.monotonic`; 0 before the
        first.
        """
        self.spent_when_scored: dict[str, float] = {}
        """By the controller, when the newest batch was scored."""
        self.own_when_sent = 0.0
        """The controller's seconds, when all ranks had been sent their first pass of the newest
        batch.
        """
        super().__init__(config, launcher)

    def rss_bytes(self) -> tuple[int, int]:
        """The resident memory of all ranks, now and at most so far, with what they map."""
        pids = [worker.pid for worker in self._workers if isinstance(worker, CountedWorker)]
        return sum(map(rss_bytes, pids)), peak_rss_bytes(pids) - peak_rss_bytes()

    def weights(self, *, version: int) -> Any:
        """None: the bytes of real weights are arithmetic."""
        return NoWeights()

    def _score(self, samples: Sequence[Sample], *, first: int) -> Any:
        """The real one; notes when the ranks can begin."""
        found = super()._score(samples, first=first)
        if not first:
            self.own_when_sent = self._clock.own()
        return found

    def record_old_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """The real one, clocked."""
        with self._clock.inside("samples to the trainer, old log-probabilities"):
            recorded = super().record_old_logprobs(samples)
        self.spent_when_scored = self._clock.by_name()
        self.ready_at = max(self._all("began_at"))
        return recorded

    def update(self, minibatch: Sequence[Sample], *, step: int) -> dict[str, float]:
        """The real one, clocked."""
        with self._clock.inside("updates: partitions, numbers to the trainer"):
            return super().update(minibatch, step=step)

    def save(self, directory: Path) -> None:
        """Does nothing: there are no weights."""

    def snapshot(self) -> Callable[[Path], None]:
        """Does nothing: there are no weights."""
        return self.save


class NoWeights(WeightSource):
    """No tensors."""

    def named_tensors(self) -> Iterator[Any]:
        """None."""
        return iter(())
