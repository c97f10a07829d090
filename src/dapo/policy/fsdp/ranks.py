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
        """Make the groups of processes for messages. Every rank calls it.

        Args:
            device: the device of this rank's shards.
            timeout_s: the seconds to wait for the slowest rank.
        """
        self.device = device
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.mesh = init_device_mesh(device.type, (self.size,))
        # shards are written and read in main memory: a GPU's mesh cannot send from there
        self.host_mesh = self.mesh
        if device.type != "cpu":
            self.host_mesh = init_device_mesh("cpu", (self.size,))
        timeout = timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        # a thread writes checkpoints: its messages must not mix with those of updates
        self.checkpoint_group = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
        """Return the JSON values of all ranks, in rank order.

        Every rank calls it. Nothing is unpickled.

        Args:
            value: what this rank contributes.
            group: the processes that send each other messages; None: those of updates.
        """
        if group is None:
            group = self._group
        encoded = torch.frombuffer(bytearray(json.dumps(value), "ascii"), dtype=torch.uint8)
        # `all_gather` sends tensors of one size: the sizes first, then texts padded to the longest
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(encoded)]), group=group)
        lengths = [int(size) for size in sizes]

        longest = max(lengths)
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
        padded = functional.pad(encoded, (0, longest - len(encoded)))
        dist.all_gather(texts, padded, group=group)
        values = []
        for text, length in zip(texts, lengths, strict=True):
            values.append(json.loads(text[:length].numpy().tobytes()))
        return values

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        """Send one message to each rank, and return the messages of all ranks to this one.

        Every rank calls it. `messages` are in rank order, as is the result.
        """
        lengths = self.gather([len(message) for message in messages])
        incoming_sizes = [row[self.rank] for row in lengths]
        outgoing_sizes = lengths[self.rank]
        # `frombuffer` refuses an empty buffer, so a byte stands in and is cut off
        buffer = bytearray(b"".join(messages) or b"-")
        outgoing = torch.frombuffer(buffer, dtype=torch.uint8)[: sum(outgoing_sizes)]
        incoming = torch.empty(sum(incoming_sizes), dtype=torch.uint8)
        dist.all_to_all_single(
            incoming, outgoing, incoming_sizes, outgoing_sizes, group=self._group
        )
        return [part.numpy().tobytes() for part in incoming.split(incoming_sizes)]
