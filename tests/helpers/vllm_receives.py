"""A program in which vLLM's own classes take the calls of a transfer, with memory in the place of
GPUs.

It prints what they were told, and whether what they unpacked is what was sent.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dapo.libs.vllm_weights import WeightSender, WeightTransfer, chunks, sender, transfer
from dapo.policy.hf_io import NamedWeights, layout_of

WEIGHTS = {name: torch.randn(size) for name, size in (("a", 100), ("b", 50), ("c", 225), ("d", 10))}


class Engine:
    """Keeps the calls."""

    worker = None

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def request(self, method: str, *arguments: Any, timeout_s: float) -> None:
        self.calls.append((method, *arguments))

    def answer(self) -> None:
        return None


class Group:
    """Keeps what was broadcast, for the receiver."""

    unique_id = bytes(range(128))

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.asked: list[int] = []

    def connect(self, size: int) -> None:
        pass

    def abort(self) -> None:
        pass

    def broadcast(self, buffer: Tensor, src: int | None = None) -> None:
        if src is None:
            self.sent.append(buffer.clone())
        else:
            self.asked.append(buffer.numel())
            buffer.copy_(self.sent.pop(0))


def send(kind: Any, group: Group) -> list[Engine]:
    """The calls on two engines of two processes each."""
    end = WeightSender(group=lambda: group, device="cpu")
    source = NamedWeights(WEIGHTS.items, layout_of(WEIGHTS, {}))
    engines = [Engine(), Engine()]
    WeightTransfer(kind, end, processes_per_engine=2).run(source, engines, 1)
    return engines


def main() -> None:
    from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, packed_tensor
    from vllm.v1.worker.gpu_worker import Worker

    chunks.CHUNK_BYTES = transfer.CHUNK_BYTES = 600
    group = Group()
    engines = send("nccl", group)
    infos = [nccl_engine.NCCLWeightTransferInitInfo(**one.calls[0][1]) for one in engines]
    assert all(one.nccl_unique_id_bytes == Group.unique_id and one.packed for one in infos)

    # CPUs have no streams
    streams: Any = packed_tensor
    streams._get_streams = lambda *_: [_Stream()] * 2
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    received: dict[str, Tensor] = {}
    buffers = []
    for _, update, _layout, _version in engines[0].calls[1:]:
        info = nccl_engine.NCCLWeightTransferUpdateInfo(**update)

        def described(info: Any = info) -> Iterator[tuple[str, tuple[list[int], torch.dtype]]]:
            for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
                yield name, (shape, getattr(torch, dtype))

        packed_tensor.packed_nccl_broadcast_consumer(
            described(),
            group,
            0,
            lambda pairs: received.update({name: tensor.clone() for name, tensor in pairs}),
            buffer_size_bytes=infos[0].packed_buffer_size_bytes,
            num_buffers=infos[0].packed_num_buffers,
            device="cpu",
        )
        buffers.append(group.asked)
        group.asked = []

    # one GPU's handle, as a rank would export it
    sender.reduce_tensor = lambda tensor: (None, ("handle",))
    torch.cuda.get_device_properties = lambda index: type("Gpu", (), {"uuid": "GPU-1"})
    torch.cuda.current_device = lambda: 0
    shared = send("ipc", Group())[0]
    assert ipc_engine.IPCWeightTransferInitInfo(**shared.calls[0][1]).packed
    updates = [ipc_engine.IPCWeightTransferUpdateInfo(**call[1]) for call in shared.calls[1:]]
    called = ("shutdown", "init")
    found = {
        "worker": all(hasattr(Worker, f"{call}_weight_transfer_engine") for call in called),
        "ranks": [[one.rank_offset, one.world_size] for one in infos],
        "buffers": buffers,
        "received": all(torch.equal(received[name], tensor) for name, tensor in WEIGHTS.items()),
        "ipc": (
            [(one.ipc_handles, one.tensor_sizes) for one in updates]
            == [({"GPU-1": ("handle",)}, sizes) for sizes in ([400, 200], [900], [40])]
        ),
    }
    print("\n" + json.dumps(found))


class _Stream:
    def synchronize(self) -> None:
        pass


if __name__ == "__main__":
    main()
