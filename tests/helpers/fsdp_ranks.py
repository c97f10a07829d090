"""Ranks of sharded policies over the models of the policy's tests; the process of a rank holds one
`RankWorker`.
"""

import os
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel, Starcoder2Config, Starcoder2ForCausalLM

import dapo
from dapo.distributed.protocol import Worker, WorkerSpec
from dapo.policy.checkpoint import read_tensors
from dapo.policy.fsdp.checkpoint import stored_like
from dapo.policy.fsdp.policy import ShardedPolicy
from dapo.policy.fsdp.ranks import Ranks
from dapo.policy.minibatch import partition_minibatch
from dapo.policy.model import LoadedModel, load_for_sharding, load_model
from dapo.policy.packing import RankMicrobatch
from dapo.policy.policy import Policy
from dapo.types import Sample
from helpers.paths import TESTS
from helpers.tiny_models import COMMON, randomised
from helpers.tiny_policies import loaded, make_policy, policy_config

TIMEOUT_S = 60.0

PACKAGE = str(Path(dapo.__file__).parent)
READS = {
    "__bool__",
    "__float__",
    "__index__",
    "__int__",
    "cpu",
    "equal",
    "item",
    "nonzero",
    "numpy",
    "tolist",
}
HOST_FILES = {f"policy/{name}.py" for name in ("packing", "segments")}


def exact_model(*, tied: bool = False) -> PreTrainedModel:
    """A model that computes in float64 throughout: those with RMSNorm round to float32 inside of
    it.
    """
    options: dict[str, Any] = COMMON | {
        "head_dim": None,
        "pad_token_id": None,
        "tie_word_embeddings": tied,
    }
    return randomised(Starcoder2ForCausalLM(Starcoder2Config(**options)), 0).double().eval()


def model_named(name: str) -> LoadedModel:
    """`exact`, `exact_tied`, or one of the engines' families in bfloat16, or as `NAME in
    float32`.
    """
    if name.startswith("exact"):
        return loaded(exact_model(tied=name == "exact_tied"))
    family = name.removesuffix(" in float32")
    return loaded(family, dtype=torch.bfloat16 if family == name else torch.float32)


def unsharded_policy(name: str, **options: Any) -> Policy:
    """The same policy in this process."""
    return make_policy(model_named(name), temperature=0.9, **options)


class RankWorker:
    """Sharded policies, one after the other, in one process of several."""

    def __init__(self, rank: int, size: int) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.size = size
        self.store: Any = None

    def port(self) -> int:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return self.store.port

    def init_process_group(self, port: int) -> None:
        if self.store is None:
            self.store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        self.ranks = Ranks(torch.device("cpu"), timeout_s=TIMEOUT_S)

    def make(self, name: str, options: dict[str, Any]) -> None:
        self.policy = ShardedPolicy(
            policy_config(temperature=0.9, **options), model_named(name), self.ranks
        )

    def make_from(self, folder: Path, dtype: str, options: dict[str, Any], in_parts: bool) -> bool:
        """A policy of a model in a folder, whole or read in parts; returns whether it was on the
        meta device.
        """
        load = load_for_sharding if in_parts else load_model
        found = load(str(folder), dtype=getattr(torch, dtype))
        was_meta = all(weight.is_meta for weight in found.model.parameters())
        self.policy = ShardedPolicy(policy_config(temperature=0.9, **options), found, self.ranks)
        return was_meta

    def make_changed(self, folder: Path) -> None:
        """A policy of a model whose head sees each position's number in its sequence, which packing
        keeps not.
        """
        found = load_for_sharding(str(folder), dtype=torch.float64)

        def shifted(module: Any, arguments: Any, output: Any) -> Any:
            output.last_hidden_state = (
                output.last_hidden_state * torch.arange(1, output[0].shape[1] + 1)[:, None]
            )
            return output

        found.model.base_model.register_forward_hook(shifted)
        self.policy = ShardedPolicy(policy_config(temperature=0.9), found, self.ranks)

    def fused_layers(self) -> int:
        """The number of the policy's modules that compute by functions of
        `cpu_kernels.fuse_layers`.
        """
        modules: list[Any] = list(self.policy._model.modules())
        return sum(vars(module).get("forward") is not None for module in modules)

    def update(self, rank_microbatches: Sequence[RankMicrobatch], step: int) -> dict[str, float]:
        return self.policy.update(rank_microbatches, step=step) | {
            "skipped_in_a_row": self.policy.skipped_in_a_row
        }

    def reads_of_update(self, rank_microbatches: Sequence[RankMicrobatch], step: int) -> list[str]:
        """Where an update brings values to Python, which waits for a GPU: the innermost files of
        the package.

        Files that plan a microbatch in main memory, and messages between hosts, are left out.
        """
        with _Reads() as reads:
            self.policy.update(rank_microbatches, step=step)
        return [file for file in reads.files if file not in HOST_FILES]

    def logprobs(
        self, rank_microbatches: Sequence[RankMicrobatch]
    ) -> list[list[tuple[float, ...]]]:
        return self.policy.logprobs(rank_microbatches)

    def token_kl(
        self, rank_microbatches: Sequence[RankMicrobatch], step: int
    ) -> list[list[list[float]]]:
        return [
            [list(row) for row in rows]
            for rows in self.policy.token_kl(rank_microbatches, step=step)
        ]

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        return self.ranks.exchange(messages)

    def weights(self) -> bytes:
        return save(
            {name: weight.clone() for name, weight in self.policy.weights().named_tensors()}
        )

    def save(self, directory: Path) -> None:
        self.policy.snapshot()
        self.policy.write(directory)

    def load(self, directory: Path) -> None:
        self.policy.load(directory)


class _Reads(TorchFunctionMode):
    """Notes the file of the package from which a value of a tensor is read."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            frame: Any = sys._getframe(1)
            while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
                frame = frame.f_back
            if frame is not None and not frame.f_code.co_qualname.startswith("Ranks.gather"):
                self.files.append(frame.f_code.co_filename.removeprefix(PACKAGE)[1:])
        return func(*args, **(kwargs or {}))


class RankGroup:
    """All ranks of one world, called together."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers
        port = workers[0].call("port").result(TIMEOUT_S)
        self.all("init_process_group", port)

    def all(self, method: str, *arguments: Any) -> list[Any]:
        futures = [worker.call(method, *arguments) for worker in self.workers]
        return [future.result(TIMEOUT_S) for future in futures]

    def each(self, method: str, arguments: Sequence[Any], *more: Any) -> list[Any]:
        futures = [
            worker.call(method, own, *more)
            for worker, own in zip(self.workers, arguments, strict=True)
        ]
        return [future.result(TIMEOUT_S) for future in futures]

    def update(
        self, minibatch: Sequence[Sample], *, step: int = 1, loss: dict[str, Any] | None = None
    ) -> list[Any]:
        """Metrics of every rank."""
        return self.each("update", self.partitions(minibatch, loss), step)

    def partitions(
        self, minibatch: Sequence[Sample], loss: dict[str, Any] | None = None
    ) -> list[tuple[RankMicrobatch, ...]]:
        return partition_minibatch(minibatch, policy_config(loss=loss), ranks=len(self.workers))

    def weights(self) -> list[dict[str, Tensor]]:
        """As every rank gathers them."""
        return [load(content) for content in self.all("weights")]

    def gradient(self, directory: Path) -> dict[str, Tensor]:
        """Of the first update, which has been made: AdamW's first moment is a tenth of it."""
        return {
            name: moment / (1 - 0.9) for name, moment in self.state(directory, "exp_avg").items()
        }

    def state(self, directory: Path, kind: str) -> dict[str, Tensor]:
        if not directory.exists():
            directory.mkdir()
            self.all("save", directory)
        return read_tensors(directory, kind, stored_like(directory / kind))


def rank_spec(rank: int, size: int) -> WorkerSpec:
    environment = {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "OMP_NUM_THREADS": "1"}
    if "lo" in [name for _, name in socket.if_nameindex()]:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return WorkerSpec("helpers.fsdp_ranks:RankWorker", {"rank": rank, "size": size}, environment)
