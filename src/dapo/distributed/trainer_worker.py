"""What a trainer rank's process holds: its part of the policy, behind calls that a gang makes on all ranks at once."""

import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor

from dapo.config import Config
from dapo.core.errors import ConfigError
from dapo.distributed.weight_files import dense_weights, write_weights
from dapo.policy.fsdp.policy import Ranks, ShardedPolicy
from dapo.policy.model import LoadedModel, load_model
from dapo.policy.packing import RankMicrobatch

ANY_ADDRESS = ("10.255.255.255", 1)
"""Nothing is sent there: it only asks the system from which address it would be."""


class TrainerRank:
    """Made with the model loaded; it becomes a part of the policy when it joins the others."""

    def __init__(self, config: Config, *, rank: int, threads: int) -> None:
        """`config.model.dtype` is settled."""
        torch.set_num_threads(threads)
        self._config, self._rank = config, rank
        self._device = _device(config.train.device, rank)
        self._loaded: LoadedModel | None = load_model(
            config.model.name,
            dtype=getattr(torch, config.model.dtype),
            trust_remote_code=config.model.trust_remote_code,
        )
        self._store: Any = None
        self._policy: Any = None
        self._writer: threading.Thread | None = None
        self._write_error: BaseException | None = None

    def rendezvous_address(self, host: str | None, *, timeout_s: float) -> tuple[str, int]:
        """Of rank 0: the address where the others find it. `host`: none: this machine's own, as others see it."""
        host = host or _own_address()
        self._store = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        return host, self._store.port

    def init_process_group(self, host: str, port: int, *, ranks: int, start_timeout_s: float, timeout_s: float) -> None:
        """Meet the others and take this rank's part of the model; every rank does at the same time.

        `timeout_s`: for whatever they do together later.
        """
        if self._store is None:
            self._store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=start_timeout_s))
        dist.init_process_group(
            "gloo" if self._device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=self._store,
            rank=self._rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        assert self._loaded is not None
        self._policy = ShardedPolicy(self._config, self._loaded, Ranks(self._device, timeout_s=timeout_s))
        self._loaded = None

    def can_access(self, folder: Path) -> bool:
        """Whether a folder of the controller is there for this process too."""
        return folder.is_dir()

    def update(self, rank_microbatches: Sequence[RankMicrobatch], *, step: int) -> tuple[dict[str, float], int]:
        """Metrics, and the updates skipped in a row."""
        return self._policy.update(rank_microbatches, step=step), self._policy.skipped_in_a_row

    def logprobs(self, rank_microbatches: Sequence[RankMicrobatch]) -> list[list[tuple[float, ...]]]:
        """As the policy's."""
        return self._policy.logprobs(rank_microbatches)

    def export_weights(self, path: Path, version: int) -> None:
        """Gather all weights; rank 0 writes them to `path`."""
        weights = _FullWeights(self._policy)
        if self._rank == 0:
            write_weights(path, weights, version)
        else:
            weights.participate()

    def send_weights(self, version: int) -> bytes | None:
        """Gather all weights; rank 0 returns the contents of such a file."""
        weights = _FullWeights(self._policy)
        if self._rank == 0:
            tensors, metadata = dense_weights(weights, version)
            return save(tensors, metadata=metadata)
        weights.participate()
        return None

    def snapshot(self) -> None:
        """As the policy's."""
        self._policy.snapshot()

    def start_writing(self, directory: Path) -> None:
        """Begin to write the snapshot while other calls are answered."""

        def work() -> None:
            try:
                self._policy.write(directory)
            except BaseException as error:  # raised where the gang asks for it
                self._write_error = error

        self._write_error = None
        self._writer = threading.Thread(target=work, name="dapo-checkpoint")
        self._writer.start()

    def has_written(self) -> tuple[bool, str | None]:
        """Whether the writing has ended, and why the disk refused it, if it did."""
        assert self._writer is not None
        if self._writer.is_alive():
            return False, None
        if isinstance(self._write_error, OSError):
            return True, str(self._write_error)
        if self._write_error is not None:
            raise self._write_error
        return True, None

    def load(self, directory: Path) -> int:
        """As the policy's; returns the updates skipped in a row."""
        self._policy.load(directory)
        return self._policy.skipped_in_a_row


@dataclass(frozen=True)
class _FullWeights:
    """The whole policy, gathered weight by weight; every rank has to go through it."""

    policy: ShardedPolicy

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As a WeightSource."""
        return self.policy.full_weights()

    def participate(self) -> None:
        """Do this rank's part."""
        for _ in self.named_tensors():
            pass


def _device(wanted: str, rank: int) -> torch.device:
    """Of the machine that this process runs on, which need not be the controller's."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"train.device=cuda, but trainer rank {rank} finds no CUDA device on {socket.gethostname()}")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ANY_ADDRESS)
        except OSError:  # no route anywhere: alone
            return "127.0.0.1"
        return str(probe.getsockname()[0])
