"""The policy in several processes, for the controller: ranks execute each call together."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dapo.config import Config
from dapo.config.run_options import START_TIMEOUT_S
from dapo.core.errors import OutOfMemory, TrainerLost, WorkerDied, WorkerFault
from dapo.core.files import DiskRefused
from dapo.core.loading import import_locations
from dapo.core.memory import collections_paused
from dapo.core.secrets import HUB_VARIABLES
from dapo.distributed.launch import allocator_environment, gpus_per_worker, threads_on_cluster
from dapo.distributed.protocol import (
    CALL_TIMEOUT_S,
    ENGINE_NAME,
    Launcher,
    Node,
    Worker,
    WorkerSpec,
)
from dapo.distributed.rank_samples import ALL, IDS, REMAINING_COLUMNS, NumberedPass, encode
from dapo.distributed.weight_files import (
    PIECE_BYTES,
    RankWeights,
    WeightsFile,
    WeightsFolder,
    write_chunks,
)
from dapo.policy.minibatch import partition_minibatch
from dapo.policy.packing import RankMicrobatch, first_groups, partition
from dapo.types import RankRecord, Sample

# after one rank fails: the time for other ranks to fail as well, before they count as stuck
FAILURE_WAIT_S = 10.0
MIN_POLL_INTERVAL_S = 0.02
MAX_POLL_INTERVAL_S = 1.0
"""The interval of polls while a checkpoint is written doubles from the first to the second."""


class TrainerGroup:
    """A `TrainablePolicy` over `config.distributed.trainer_ranks` processes.

    If a rank dies or does not answer in time, all ranks are ended, and this call and every later
    one raise TrainerLost: the run can continue from its last checkpoint with a new group.
    """

    def __init__(
        self, config: Config, launcher: Launcher, *, call_timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        """Start the ranks, which shard the model.

        Raises LaunchError, and the errors of loading and sharding.
        """
        self._config = config
        self._timeout_s = call_timeout_s
        self._lock = threading.RLock()
        self._lost: str | None = None
        # counts the calls of `record_old_logprobs`: the ranks keep the samples of the last one
        self._batch = 0
        self._num_recorded = 0  # the number of those samples, which are numbered from 0
        self._rank_of: dict[int, int] = {}  # the rank that holds each of those samples, by number
        self.skipped_in_a_row = 0  # the number of updates skipped since the last one that was not
        self._num_updates = 0  # the number that has been requested
        self._folder = WeightsFolder()
        self._sends_weights = config.gpu_shares(torch.cuda.device_count()).transfer is not None
        specs = trainer_specs(config, launcher.nodes)
        names = [f"trainer-{rank}" for rank in range(len(specs))]
        try:
            self._workers: Sequence[Worker] = launcher.start(names, specs, together=True)
            can_access = self._all("can_access", self._folder.path)
            self._has_shared_memory = bool(can_access[0])
            rendezvous: Any = self._folder.path / "rendezvous"
            if not all(can_access):  # several machines
                [rendezvous] = self._answers([self._workers[0].call("open_gate")], START_TIMEOUT_S)
            self._all("init_process_group", rendezvous, timeout_s=self._timeout_s)
        except BaseException:
            self._folder.close()
            raise

    def update(self, minibatch: Sequence[Sample], *, step: int) -> dict[str, float]:
        """Update like `Policy.update`, on the same rows; recorded samples are not sent again."""
        with self._lock:
            self._num_updates += 1
        partitions = partition_minibatch(minibatch, self._config, ranks=len(self._workers))
        are_recorded = [sample.rank_record is not None for sample in minibatch]
        if all(are_recorded):
            stores: list[Future[Any]] = []
            passes = self._number(partitions, self._recorded_number)
            moves = self._moves(passes)
        elif any(are_recorded):
            raise ValueError(
                "old log-probabilities must be recorded for all samples of a minibatch or for none"
            )
        else:
            first = self._num_recorded
            passes = self._number(partitions, lambda i, sample: first + i)
            moves = None
            stores = self._request_store(minibatch, partitions, first)
        arguments = (
            [rank_passes, moves and moves[rank]] for rank, rank_passes in enumerate(passes)
        )
        updates = self._request_each("update", arguments, step=step)
        self._answers(stores, self._timeout_s)
        metrics, self.skipped_in_a_row = self._answers(updates, self._timeout_s)[0]
        return metrics

    def _request_store(
        self,
        minibatch: Sequence[Sample],
        partitions: Sequence[Sequence[RankMicrobatch]],
        first: int,
    ) -> "list[Future[Any]]":
        """Send each rank its samples of a minibatch, which are numbered from `first` on."""
        columns: tuple[str, ...] = (*IDS, *REMAINING_COLUMNS)
        if all(sample.old_logprobs is not None for sample in minibatch):
            columns = ALL  # the engine's, which no rank has computed
        arguments = ([encode(_by_number(part, first), columns)] for part in partitions)
        return self._request_each("store", arguments, first=first)

    def record_old_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with a `rank_record`: the ranks keep their old log-probabilities.

        The first groups, which fill about one pass of every rank, are partitioned and sent first:
        the ranks compute them while the others follow, and then the remaining columns.
        """
        num_first = first_groups(
            samples, ranks=len(self._workers), max_tokens=self._config.microbatch_tokens
        )
        self._batch += 1
        self._num_recorded = len(samples)
        self._rank_of = {}
        first_scores, first_samples = self._score(samples[:num_first], first=0)
        later_scores, later_samples = self._score(samples[num_first:], first=num_first)
        # encoded one by one, while the ranks compute
        arguments = (
            [encode(first_of_rank | later_of_rank, REMAINING_COLUMNS)]
            for first_of_rank, later_of_rank in zip(first_samples, later_samples, strict=True)
        )
        additions = self._request_each("add_columns", arguments)
        self._answers([*first_scores, *later_scores], self._timeout_s)
        self._answers(additions, self._timeout_s)
        return [
            replace(sample, rank_record=RankRecord(self._batch, i))
            for i, sample in enumerate(samples)
        ]

    def response_kl(self, samples: Sequence[Sample], *, step: int) -> list[float]:
        """See `Policy.response_kl`; the ranks do not keep the samples."""
        max_tokens = self._config.microbatch_tokens
        partitions = partition(samples, ranks=len(self._workers), max_tokens=max_tokens)
        passes = self._number(partitions, lambda i, sample: i)
        arguments = (
            [encode(_by_number(rank_microbatches, 0), IDS), rank_passes]
            for rank_microbatches, rank_passes in zip(partitions, passes, strict=True)
        )
        sums: dict[int, float] = {}
        requests = self._request_each("response_kl", arguments, step=step)
        for answer in self._answers(requests, self._timeout_s):
            sums |= answer
        return [sums[i] for i in range(len(samples))]

    @collections_paused()  # the ranks wait for it
    def _score(
        self, samples: Sequence[Sample], *, first: int
    ) -> tuple[list[Future[Any]], list[dict[int, Sample]]]:
        """Send tokens to the ranks for scoring; return also each rank's samples by number."""
        partitions = partition(
            samples, ranks=len(self._workers), max_tokens=self._config.microbatch_tokens
        )
        passes = self._number(partitions, lambda i, sample: first + i)
        for rank, rank_passes in enumerate(passes):
            for number in _all_numbers(rank_passes):
                self._rank_of[number] = rank
        samples_by_rank = [_by_number(part, first) for part in partitions]
        arguments = (
            [encode(rank_samples, IDS), rank_passes]
            for rank_samples, rank_passes in zip(samples_by_rank, passes, strict=True)
        )
        requests = self._request_each("score", arguments, is_first=first == 0)
        return requests, samples_by_rank

    def _number(
        self,
        partitions: Sequence[Sequence[RankMicrobatch]],
        number_of: Callable[[int, Sample], int],
    ) -> list[list[NumberedPass]]:
        """Return the microbatches of each rank, by the numbers of its samples.

        Args:
            partitions: the microbatches of each rank.
            number_of: the number of a sample, from its index in the batch and itself.
        """

        def numbered_pass(microbatch: RankMicrobatch) -> NumberedPass:
            if not microbatch.indices:
                return NumberedPass((), ())  # a dummy
            numbers = tuple(map(number_of, microbatch.indices, microbatch.samples))
            return NumberedPass(numbers, microbatch.weights)

        return [[numbered_pass(microbatch) for microbatch in part] for part in partitions]

    def _recorded_number(self, index: int, sample: Sample) -> int:
        """Return the number under which a rank keeps a sample; `index` is not needed for it."""
        assert sample.rank_record is not None
        if sample.rank_record.batch != self._batch:
            raise ValueError(
                "the trainer ranks keep the samples of the newest batch only; record these again"
            )
        return sample.rank_record.number

    def _moves(self, passes: Sequence[Sequence[NumberedPass]]) -> list[list[list[int]]] | None:
        """Return the numbers of the samples that move, by old rank, then by new one.

        None if no sample moves.
        """
        ranks = range(len(self._workers))
        moves: list[list[list[int]]] = [[[] for _ in ranks] for _ in ranks]
        has_moves = False
        for rank, rank_passes in enumerate(passes):
            for number in _all_numbers(rank_passes):
                owner = self._rank_of[number]
                if owner != rank:
                    moves[owner][rank].append(number)
                    self._rank_of[number] = rank
                    has_moves = True
        return moves if has_moves else None

    def weights(self, *, version: int) -> WeightsFile:
        """Return the current weights, readable until the next version but one.

        Raises NumericsError.

        They are in a file, unless engines on GPUs may get them from the ranks.
        """
        if self._sends_weights:
            send = partial(self._all, "send_weights")
            export = partial(self._export_unless_updated, version, self._num_updates)
            return RankWeights(self._folder.path_of(version), version, send, export)
        return self._export(version)

    def _export_unless_updated(self, version: int, num_updates: int) -> WeightsFile | None:
        """Export the weights that the ranks had after so many updates; None if they have changed.

        An update may be requested by another thread meanwhile: ranks execute it afterwards.
        """
        with self._lock:
            if self._num_updates != num_updates:
                return None
            requests = self._request_export(version)
        return self._exported(version, requests)

    def _export(self, version: int) -> WeightsFile:
        return self._exported(version, self._request_export(version))

    def _request_export(self, version: int) -> "list[Future[Any]]":
        """Have the ranks write the weights, or keep them to be read in pieces."""
        path = self._folder.path_of(version) if self._has_shared_memory else None
        return self._request_each("export_weights", ((path, version) for _ in self._workers))

    def _exported(self, version: int, requests: "Sequence[Future[Any]]") -> WeightsFile:
        """Wait for the answers to `_request_export`, and return the file."""
        path = self._folder.path_of(version)
        size = self._answers(requests, self._timeout_s)[0]
        if not self._has_shared_memory:
            write_chunks(path, self._pieces(size), size=size)
        return self._folder.keep(path, version)

    def _pieces(self, size: int) -> Iterator[Any]:
        """Yield the exported weights in pieces; a rank reads the next one while one travels."""
        request: list[Future[Any]] = []
        for start in range(0, size, PIECE_BYTES):
            next_request = self._request_each("read_weights", [(start, PIECE_BYTES)], ranks=1)
            if request:
                yield self._answers(request, self._timeout_s)[0]
            request = next_request
        if request:
            yield self._answers(request, self._timeout_s)[0]

    def save(self, directory: Path) -> None:
        """Like `Policy.save`, into a `directory` that all ranks can reach."""
        self.snapshot()(directory)

    def snapshot(self) -> Callable[[Path], None]:
        """Copy the state; the result writes it like `save`, in any thread, until the next copy."""
        self._all("snapshot")
        return self._write

    def load(self, directory: Path) -> None:
        """Load a checkpoint of any number of ranks, or of a `Policy`. Raises CheckpointError."""
        self.skipped_in_a_row = self._all("load", directory.absolute())[0]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._folder.close()

    def _write(self, directory: Path) -> None:
        """Write the state that `snapshot` has copied. Raises DiskRefused or TrainerLost."""
        self._all("start_writing", directory.absolute())
        deadline = time.monotonic() + self._timeout_s
        poll_interval_s = MIN_POLL_INTERVAL_S
        while True:
            answers = self._all("has_written")
            refusals = [refusal for _, refusal in answers if refusal is not None]
            if refusals:
                raise DiskRefused(refusals[0])
            if all(is_done for is_done, _ in answers):
                return
            if time.monotonic() > deadline:
                self._give_up(
                    f"the trainer ranks have not written a checkpoint within {self._timeout_s:g} s"
                )
            time.sleep(poll_interval_s)
            poll_interval_s = min(2 * poll_interval_s, MAX_POLL_INTERVAL_S)

    def _all(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """Call all ranks with the same arguments, and return their answers."""
        requests = self._request_each(method, (arguments for _ in self._workers), **options)
        return self._answers(requests, self._timeout_s)

    def _request_each(
        self,
        method: str,
        arguments: Iterable[Sequence[Any]],
        *,
        ranks: int | None = None,
        **options: Any,
    ) -> "list[Future[Any]]":
        """Call the ranks, or the first `ranks`, with their arguments, which are read one by one."""
        with self._lock:  # the calls of two threads reach every rank in the same order
            if self._lost is not None:
                raise TrainerLost(self._lost)
            pairs = zip(self._workers[:ranks], arguments, strict=True)
            return [
                worker.call(method, *rank_arguments, **options) for worker, rank_arguments in pairs
            ]

    def _answers(self, futures: "Sequence[Future[Any]]", timeout_s: float) -> list[Any]:
        """Return the ranks' answers. Raises their errors; if a rank cannot continue, all end."""
        wait(futures, timeout_s, return_when=FIRST_EXCEPTION)
        errors = _errors(futures)
        if errors and not any(isinstance(error, WorkerDied) for error in errors):
            # the others fail with the same error, or one has died
            wait(futures, FAILURE_WAIT_S)
            errors = _errors(futures)
        for error in errors:
            if isinstance(error, WorkerDied):
                self._give_up(str(error), error)
        silent = [
            worker.name
            for worker, future in zip(self._workers, futures, strict=False)
            if not future.done()
        ]
        if silent and not errors:
            self._give_up(f"{', '.join(silent)} gave no answer within {timeout_s:g} s")
        if silent or any(isinstance(error, WorkerFault) for error in errors):
            self._end(f"the trainer ranks were ended after: {errors[0]}")
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def _give_up(self, reason: str, cause: BaseException | None = None) -> None:
        """End all ranks. Raises TrainerLost."""
        self._end(reason)
        raise TrainerLost(reason) from cause

    def _end(self, reason: str) -> None:
        """End all ranks; later calls raise TrainerLost with this reason."""
        with self._lock:
            self._lost = reason
        for worker in self._workers:
            worker.kill()


def _all_numbers(passes: Sequence[NumberedPass]) -> list[int]:
    return [number for numbered_pass in passes for number in numbered_pass.numbers]


def _by_number(microbatches: Sequence[RankMicrobatch], first: int) -> dict[int, Sample]:
    """Return the samples of a rank by number: their index in the batch, counted from `first`."""
    samples: dict[int, Sample] = {}
    for microbatch in microbatches:
        # a dummy microbatch has a sample without an index
        for i, sample in zip(microbatch.indices, microbatch.samples, strict=False):
            samples[first + i] = sample
    return samples


def _errors(futures: "Sequence[Future[Any]]") -> list[BaseException]:
    """Return the errors so far, OutOfMemory first, since other errors may follow from it."""
    exceptions = [future.exception() for future in futures if future.done()]
    errors = [error for error in exceptions if error is not None]
    return sorted(errors, key=lambda error: not isinstance(error, OutOfMemory))


def trainer_specs(config: Config, nodes: Sequence[Node]) -> list[WorkerSpec]:
    """Return the worker spec of each rank; `nodes` are the launcher's."""
    ranks = config.distributed.trainer_ranks
    gpus_per_engine = config.gpus_per_engine
    gpus = gpus_per_worker(config, nodes, default=config.train.device != "cpu")
    is_paired = config.uses_ray and config.gpu_shares(0).is_paired
    local_threads = max(1, torch.get_num_threads() // ranks)
    threads = config.train.threads or threads_on_cluster(config, nodes, gpus=gpus) or local_threads
    environment = {"OMP_NUM_THREADS": str(threads)} | allocator_environment(config)
    # where a function of the user's own is found
    locations = {} if config.loss.function is None else import_locations()
    specs = []
    for rank in range(ranks):
        spec = WorkerSpec(
            "dapo.distributed.trainer_worker:TrainerWorker",
            {"config": config, "rank": rank, "threads": threads, **locations},
            environment,
            HUB_VARIABLES,
            cpus=threads,
            gpus=gpus,
        )
        if is_paired:
            # the rank has no GPU of its own, but one of an engine's
            engine_name = ENGINE_NAME.format(rank // gpus_per_engine)
            spec = replace(spec, gpus=0, shares=(engine_name, rank % gpus_per_engine))
        specs.append(spec)
    return specs
