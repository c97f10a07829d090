"""One rank of the trainer group: an object whose methods are called on all ranks at once."""

import math
import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dapo.config import Config
from dapo.config.run_options import START_TIMEOUT_S
from dapo.core.errors import EngineError, LaunchError
from dapo.core.interfaces import use_interface_towards, use_loopback_interface
from dapo.core.loading import use_import_locations
from dapo.core.ranges import select
from dapo.core.terminal import print_text
from dapo.distributed.channel import Buffers
from dapo.distributed.rank_samples import NumberedPass, RankSamples, decode, microbatches_of
from dapo.distributed.weight_files import WeightsFolder, write_weights
from dapo.libs.gated_store import Gate, GateError, connect_store, serve_store
from dapo.libs.vllm_weights import TransferFailed, WeightSender
from dapo.policy.fsdp.policy import ShardedPolicy
from dapo.policy.fsdp.ranks import Ranks
from dapo.policy.model import LoadedModel, device_of, load_for_sharding


class TrainerWorker:
    """Reads the configuration at once, and its rows of the weights with the process group."""

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        threads: int,
        path: Sequence[str] = (),
        code_folders: Sequence[str] = (),
    ) -> None:
        """Prepare a rank.

        Args:
            config: the configuration of the run.
            rank: the number of this rank.
            threads: the number of CPU threads.
            path: the folders in which the controller finds modules.
            code_folders: those of them with the user's modules.
        """
        if config.ray_address is None:
            # before its first use: it takes an interface once, also to reach engines
            use_loopback_interface("NCCL")
        use_import_locations(path, code_folders)
        torch.set_num_threads(threads)
        self._config = config
        self._rank = rank
        self._device = _device(config, rank)
        self._loaded: LoadedModel | None = load_for_sharding(
            config.model.name,
            dtype=getattr(torch, config.model.dtype),
            trust_remote_code=config.model.trust_remote_code,
        )
        self._start_timeout = timedelta(seconds=START_TIMEOUT_S)
        self._store: Any = None
        self._policy: Any = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dapo-checkpoint")
        self._written: Any = None
        self._sender = WeightSender(rank=rank, device=self._device.type)
        self._folder = WeightsFolder()
        self._exported: Path | None = None

    def open_gate(self) -> Gate:
        """Open the store through which ranks of several machines meet, on rank 0."""
        self._store, gate = serve_store(self._start_timeout)
        return gate

    def init_process_group(self, rendezvous: Path | Gate, *, timeout_s: float) -> None:
        """Connect to the other ranks, which do so at the same time, and load a part of the model.

        Ranks of one machine meet in a file of a private folder, others at the gate of rank 0's
        store. `timeout_s` bounds every later collective operation.
        """
        size = self._config.distributed.trainer_ranks
        if isinstance(rendezvous, Path):
            use_loopback_interface("GLOO")
            self._store = dist.FileStore(str(rendezvous), size)
            self._store.set_timeout(self._start_timeout)
        else:
            self._use_interface(rendezvous)
        if self._store is None:
            assert isinstance(rendezvous, Gate)
            try:
                self._store = connect_store(rendezvous, self._start_timeout)
            except GateError as error:
                raise LaunchError(str(error)) from error
        dist.init_process_group(
            "gloo" if self._device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=self._store,
            rank=self._rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        assert self._loaded is not None
        ranks = Ranks(self._device, timeout_s=timeout_s)
        self._policy = ShardedPolicy(self._config, self._loaded, ranks)
        self._samples = RankSamples(ranks.exchange)
        self._loaded = None

    def _use_interface(self, gate: Gate) -> None:
        """Let gloo and NCCL use the interface that leads to the gate of rank 0, and say which."""
        name = use_interface_towards(gate.host, gate.port, "GLOO", "NCCL")
        chosen = os.environ.get("GLOO_SOCKET_IFNAME")
        if chosen is None:
            print_text(
                f"rank {self._rank}: no interface leads to rank 0 at {gate.host}; set"
                " GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the one that does"
            )
        else:
            origin = "the route to rank 0" if chosen == name else "GLOO_SOCKET_IFNAME"
            print_text(f"rank {self._rank}: tensors go through {chosen}, by {origin}")

    def can_access(self, folder: Path) -> bool:
        """Return True if this process sees a folder of the controller."""
        return folder.is_dir()

    def store(self, buffers: Buffers, *, first: int) -> None:
        """Store the samples of the next update; numbers below `first` belong to scored samples."""
        self._samples.store(buffers, first=first)

    def score(self, buffers: Buffers, passes: Sequence[NumberedPass], *, is_first: bool) -> None:
        """Store samples with the current policy's log-probabilities; the first replace all."""
        self._samples.store(buffers, first=0 if is_first else None)
        scores = self._policy.logprobs(self._samples.microbatches(passes))
        for numbered, rows in zip(passes, scores, strict=True):
            # not strict: a dummy microbatch has a row of scores and no number
            self._samples.set_old_logprobs(dict(zip(numbered.numbers, rows, strict=False)))

    def add_columns(self, buffers: Buffers) -> None:
        """Add the columns that scoring did not need."""
        self._samples.add_columns(buffers)

    def response_kl(
        self, buffers: Buffers, passes: Sequence[NumberedPass], *, step: int
    ) -> dict[int, float]:
        """Return the KL divergence over sampled tokens by number; samples are not kept."""
        samples = decode(buffers)
        scores = self._policy.token_kl(microbatches_of(samples, passes), step=step)
        # not strict: a dummy microbatch has a row and no number
        pairs = (
            pair
            for numbered, rows in zip(passes, scores, strict=True)
            for pair in zip(numbered.numbers, rows, strict=False)
        )
        return {number: math.fsum(select(row, samples[number].sampled)) for number, row in pairs}

    def update(
        self, passes: Sequence[NumberedPass], moved: Sequence[Sequence[int]] | None, *, step: int
    ) -> tuple[dict[str, float], int]:
        """One update; returns its metrics and the number of updates skipped in a row.

        `moved`: the samples to send to each rank first; None on every rank if no sample moves.
        """
        if moved is not None:
            self._samples.move(moved)
        metrics = self._policy.update(self._samples.microbatches(passes), step=step)
        return metrics, self._policy.skipped_in_a_row

    def export_weights(self, path: Path | None, version: int) -> int:
        """Gather all weights; rank 0 writes them to `path` or shared memory; return the size."""
        weights = self._policy.weights()
        if self._rank:
            for _ in weights.named_tensors():
                pass
            torch.cuda.empty_cache()
            return 0
        if path is None:
            self._exported = path = self._folder.write(weights, version).path
        else:
            write_weights(path, weights, version)
        torch.cuda.empty_cache()  # an engine on this GPU wakes next
        return path.stat().st_size

    def send_weights(self, method: str, *arguments: Any) -> Any:
        """Call the rank's end of a transfer between GPUs, which begins with the rank's weights."""
        if method == "begin":
            arguments = *arguments[:-1], self._policy.weights()
        try:
            return self._sender.call(method, *arguments)
        except TransferFailed as error:  # not a fault, which would end the group
            raise EngineError(str(error)) from error

    def read_weights(self, start: int, size: int) -> bytes:
        """Return a part of the file that `export_weights` wrote on this machine."""
        assert self._exported is not None
        with open(self._exported, "rb") as file:
            file.seek(start)
            return file.read(size)

    def snapshot(self) -> None:
        self._policy.snapshot()

    def start_writing(self, directory: Path) -> None:
        self._written = self._writer.submit(self._policy.write, directory)

    def has_written(self) -> tuple[bool, str | None]:
        """Return whether the snapshot is written, and the message of an OSError, if any."""
        is_done = self._written.done()
        error = self._written.exception() if is_done else None
        if error is not None and not isinstance(error, OSError):
            raise error
        return is_done, None if error is None else str(error)

    def load(self, directory: Path) -> int:
        """Load a checkpoint; returns the number of updates skipped in a row."""
        self._policy.load(directory)
        return int(self._policy.skipped_in_a_row)


def _device(config: Config, rank: int) -> torch.device:
    """Return the device of a rank here: ranks of one machine take its GPUs in turn."""
    if device_of(config.train.device, f"trainer rank {rank} on {socket.gethostname()}") == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device
