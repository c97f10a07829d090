"""One rank of the trainer group: the object in its process, whose methods the group calls on all ranks at once."""

import math
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dapo.config import Config
from dapo.config.run_options import START_TIMEOUT_S
from dapo.core.errors import ConfigError
from dapo.core.loopback import use_loopback_interface
from dapo.distributed.channel import Buffers
from dapo.distributed.rank_samples import NumberedPass, RankSamples, decode, microbatches_of
from dapo.distributed.weight_files import WeightsFolder, write_weights
from dapo.policy.fsdp.policy import ShardedPolicy
from dapo.policy.fsdp.ranks import Ranks
from dapo.policy.model import LoadedModel, load_for_sharding

UNROUTED_ADDRESS = ("10.255.255.255", 1)
"""Nothing is sent to it: connecting a UDP socket only selects the local address of the default route."""


class TrainerWorker:
    """Reads the model's configuration at once, and its own rows of the weights when the ranks form a process group."""

    def __init__(self, config: Config, *, rank: int, threads: int, path: Sequence[str] = ()) -> None:
        """`path`: where the controller finds modules, those of the user's among them."""
        sys.path.extend(entry for entry in path if entry not in sys.path)
        torch.set_num_threads(threads)
        self._config, self._rank = config, rank
        self._device = _device(config.train.device, rank)
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
        self._folder: WeightsFolder | None = None
        self._exported: Path | None = None

    def rendezvous_address(self) -> tuple[str, int]:
        """Open the store through which ranks of several machines meet, on rank 0; returns its host and port.

        It listens on this one address, not on all of the machine's; whoever reaches that may read and write it.
        """
        self._store, address = _serve_store(self._start_timeout)
        return address

    def init_process_group(self, rendezvous: Path | tuple[str, int], *, timeout_s: float) -> None:
        """Connect to the other ranks, which call this at the same time, and load this rank's part of the model.

        Args:
            rendezvous: Where the ranks meet: a file in a private folder of the machine on which all of them are, or the
                host and port of rank 0's store.
            timeout_s: For every collective operation after this one.
        """
        size = self._config.distributed.trainer_ranks
        if isinstance(rendezvous, Path):
            use_loopback_interface()
            self._store = dist.FileStore(str(rendezvous), size)
            self._store.set_timeout(self._start_timeout)
        elif self._store is None:
            self._store = dist.TCPStore(*rendezvous, is_master=False, timeout=self._start_timeout)
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

    def can_access(self, folder: Path) -> bool:
        """Whether this process sees a folder of the controller."""
        return folder.is_dir()

    def store(self, buffers: Buffers, *, first: int) -> None:
        """Take the samples of the next update, as `RankSamples.store`: scored ones have numbers below `first`."""
        self._samples.store(buffers, first=first)

    def score(self, buffers: Buffers, passes: Sequence[NumberedPass], *, is_first: bool) -> None:
        """Take samples of a step, and keep their log-probabilities under the policy as it is now.

        Args:
            buffers: samples with their response ids.
            passes: what this rank computes of them.
            is_first: whether these are the first of the step: all samples that are there are dropped.
        """
        if is_first:
            self._samples.store(buffers, first=0)
        else:
            self._samples.add(buffers)
        scores = self._policy.logprobs(self._samples.microbatches(passes))
        for each, rows in zip(passes, scores, strict=True):
            # not strict: a dummy microbatch has a row of scores and no number
            self._samples.set_old_logprobs(dict(zip(each.numbers, rows, strict=False)))

    def add_columns(self, buffers: Buffers) -> None:
        """Take what scoring did not need of the samples."""
        self._samples.add_columns(buffers)

    def response_kl(self, buffers: Buffers, passes: Sequence[NumberedPass], *, step: int) -> dict[int, float]:
        """The divergence to the reference, summed over each response, by its number; the samples are not kept.

        Args:
            buffers: samples with their response ids.
            passes: what this rank computes of them.
            step: the training step that the policy has not begun to update in.
        """
        found = self._policy.token_kl(microbatches_of(decode(buffers), passes), step=step)
        # not strict: a dummy microbatch has a row and no number
        pairs = (
            pair for each, rows in zip(passes, found, strict=True) for pair in zip(each.numbers, rows, strict=False)
        )
        return {number: math.fsum(row) for number, row in pairs}

    def update(
        self, passes: Sequence[NumberedPass], moved: Sequence[Sequence[int]] | None, *, step: int
    ) -> tuple[dict[str, float], int]:
        """One update; returns its metrics and the number of updates skipped in a row.

        Args:
            passes: what this rank computes.
            moved: the samples to give to each rank before; None for every rank where all have theirs.
            step: the training step.
        """
        if moved is not None:
            self._samples.move(moved)
        metrics = self._policy.update(self._samples.microbatches(passes), step=step)
        return metrics, self._policy.skipped_in_a_row

    def export_weights(self, path: Path | None, version: int) -> int:
        """Gather all weights, one at a time, which every rank must do; rank 0 writes them to a file.

        Args:
            path: The file; None: one in the shared memory of rank 0's machine, for `read_weights`.
            version: Of the weights.

        Returns:
            The size of the file, on rank 0.
        """
        weights = self._policy.weights()
        if self._rank:
            for _ in weights.named_tensors():
                pass
            return 0
        if path is None:
            self._folder = self._folder or WeightsFolder()
            self._exported = path = self._folder.write(weights, version).path
        else:
            write_weights(path, weights, version)
        return path.stat().st_size

    def read_weights(self, start: int, size: int) -> bytes:
        """A part of the file that `export_weights` wrote on this machine."""
        assert self._exported is not None
        with open(self._exported, "rb") as file:
            file.seek(start)
            return file.read(size)

    def snapshot(self) -> None:
        self._policy.snapshot()

    def start_writing(self, directory: Path) -> None:
        self._written = self._writer.submit(self._policy.write, directory)

    def has_written(self) -> tuple[bool, str | None]:
        """Whether the snapshot is written, and the message of an OSError if the disk refused it."""
        if not self._written.done():
            return False, None
        try:
            self._written.result()
        except OSError as error:
            return True, str(error)
        return True, None

    def load(self, directory: Path) -> int:
        """Load a checkpoint; returns the number of updates skipped in a row."""
        self._policy.load(directory)
        return int(self._policy.skipped_in_a_row)


def _device(wanted: str, rank: int) -> torch.device:
    """The device of a rank on the machine of this process, which need not be the controller's."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"train.device=cuda, but trainer rank {rank} finds no CUDA device on {socket.gethostname()}")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _serve_store(timeout: timedelta) -> tuple[Any, tuple[str, int]]:
    """A store through which processes of several machines meet, and its host and port.

    It listens on this one address, not on all of the machine's; whoever reaches that may read and write it.
    """
    host = _own_address()
    with socket.create_server((host, 0)) as listener:
        port, handle = listener.getsockname()[1], listener.detach()
    options: Any = {"is_master": True, "wait_for_workers": False, "master_listen_fd": handle}
    return dist.TCPStore(host, port, timeout=timeout, **options), (host, port)


def _own_address() -> str:
    """The address of this machine on its default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(UNROUTED_ADDRESS)
        except OSError:  # no route: a machine without a network
            return "127.0.0.1"
        return str(probe.getsockname()[0])
