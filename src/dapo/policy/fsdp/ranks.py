"""The ranks that a model is sharded over, and messages between them in main memory."""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional


class Ranks:
    """The processes that a model is sharded over, with torch.distributed initialised."""

    def __init__(self, device: torch.device, *, timeout_s: float) -> None:
        """Take the `device` of this rank's shards and the time to wait for the slowest rank."""
        self.device = device
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.mesh = init_device_mesh(device.type, (self.size,))
        self.host_mesh = (
            self.mesh if device.type == "cpu" else init_device_mesh("cpu", (self.size,))
        )
        timeout = timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        # a thread writes checkpoints: its messages must not mix with those of updates
        self.checkpoint_group = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Return the JSON values of all ranks, in rank order.

        Every rank calls it. Nothing is unpickled.
        """
        group = group or self._group
        encoded = torch.frombuffer(bytearray(json.dumps(value), "ascii"), dtype=torch.uint8)
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(encoded)]), group=group)
        longest = max(int(size) for size in sizes)
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        padded = functional.pad(encoded, (0, longest - len(encoded)))
        dist.all_gather(texts, padded, group=group)
        return [
            json.loads(text[: int(size)].numpy().tobytes())
            for text, size in zip(texts, sizes, strict=True)
        ]

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        """Send one message to each rank, and return the messages of all ranks to this one.

        Every rank calls it.
        """
        lengths = self.gather([len(message) for message in messages])
        incoming = [row[self.rank] for row in lengths]
        outgoing = lengths[self.rank]
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        sent = torch.frombuffer(bytearray(b"".join(messages) or b"-"), dtype=torch.uint8)[
            : sum(outgoing)
        ]
        dist.all_to_all_single(received, sent, incoming, outgoing, group=self._group)
        return [part.numpy().tobytes() for part in received.split(incoming)]
