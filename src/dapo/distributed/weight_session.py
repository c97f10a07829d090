"""One transfer of weights from process to process without a file, as a stream of buckets of bytes.

`broadcast`: every receiver gets each bucket in a process group (NCCL between GPUs, gloo on CPUs). `ipc`: the sender
fills one buffer, which receivers on the same GPU read (CUDA IPC; on CPUs a mapped file stands in).

A process group exists for one transfer only, so that a process which is lost in the middle leaves nothing behind.
Neither has ever run on a GPU: only gloo and the mapped file are tested.
"""

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from dapo.core.errors import EngineError
from dapo.core.files import reserve
from dapo.core.loopback import use_loopback_interface
from dapo.distributed.weight_files import shared_folder, stored_tensors
from dapo.engines.engine import WeightSource
from dapo.policy.hf_io import with_tied
from dapo.types import WeightLayout

Kind: TypeAlias = Literal["file", "broadcast", "ipc"]
BUCKET_BYTES = 2**28
"""Sent at a time: what a transfer needs on each side besides one tensor."""
TRANSFER_TIMEOUT_S = 120.0
"""For a process to join a transfer, and for one bucket."""
ABORT_NCCL = "TORCH_NCCL_BLOCKING_WAIT"  # an operation that fails raises, where NCCL would end the process
UNROUTED_ADDRESS = ("10.255.255.255", 1)
"""Nothing is sent there: connecting only asks the system from which of its addresses it would send."""


class Location(NamedTuple):
    """Where a process holds weights."""

    machine: str
    gpus: tuple[str, ...]  # the UUID of its GPU; none: it holds weights in main memory


def own_location(device_type: str) -> Location:
    """Of this process, whose weights are on its current device of a type."""
    gpus = () if device_type == "cpu" else (str(torch.cuda.get_device_properties().uuid),)
    boot = Path("/proc/sys/kernel/random/boot_id")
    return Location(f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}", gpus)


@dataclass(frozen=True)
class Session:
    """One transfer of a version from one process, which has index 0, to `receivers` others; picklable."""

    kind: Kind
    rendezvous: Path | tuple[str, int]  # a file that does not exist yet in a private folder; or a store's host and port
    name: str  # unique for the store
    receivers: int
    layout: WeightLayout
    version: int
    device_type: str
    timeout_s: float = TRANSFER_TIMEOUT_S
    bucket_bytes: int = BUCKET_BYTES

    @property
    def total_bytes(self) -> int:
        """The size of all weights."""
        return sum(_empty(*spec, device="meta").nbytes for spec in self.layout.tensors.values())

    def send(self, weights: WeightSource) -> None:
        """Send all weights, read one at a time. Raises EngineError where a receiver is lost or late."""
        with self._connected(0) as channel:
            bucket, filled = channel.bucket, 0
            for _, tensor in stored_tensors(weights, self.layout):
                flat, sent = tensor.contiguous().reshape(-1).view(torch.uint8), 0
                while sent < len(flat):
                    size = min(len(flat) - sent, len(bucket) - filled)
                    bucket[filled : filled + size].copy_(flat[sent : sent + size])
                    sent, filled = sent + size, filled + size
                    if filled == len(bucket):
                        channel.send(filled)
                        filled = 0
            if filled:
                channel.send(filled)

    def receive(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Every stored weight. Raises EngineError where the sender is lost or late."""
        with self._connected(index) as channel:
            left, bucket = self.total_bytes, channel.bucket[:0]
            for name, spec in self.layout.tensors.items():
                tensor = _empty(*spec, device=self.device_type)
                flat, done = tensor.reshape(-1).view(torch.uint8), 0
                while done < len(flat):
                    if not len(bucket):
                        bucket = channel.receive(min(left, len(channel.bucket)))
                        left -= len(bucket)
                    size = min(len(flat) - done, len(bucket))
                    flat[done : done + size].copy_(bucket[:size])
                    done, bucket = done + size, bucket[size:]
                yield name, tensor

    @contextlib.contextmanager
    def _connected(self, index: int) -> "Iterator[BroadcastChannel | BufferChannel]":
        try:
            with _interfaces(is_local=isinstance(self.rendezvous, Path)):
                channel = self._connect(index)
        except (RuntimeError, OSError) as error:
            raise self._error(error) from error
        try:
            yield channel
            channel.finish()
        except (RuntimeError, OSError) as error:  # torch raises RuntimeError for whatever happens to a connection
            raise self._error(error) from error
        finally:
            channel.close()

    def _error(self, error: Exception) -> EngineError:
        return EngineError(f"the {self.kind} of the weights of version {self.version} failed: {error}")

    def _connect(self, index: int) -> "BroadcastChannel | BufferChannel":
        timeout, size = timedelta(seconds=self.timeout_s), self.receivers + 1
        store: Any
        if isinstance(self.rendezvous, Path):
            store = dist.FileStore(str(self.rendezvous), size)
        else:
            store = dist.TCPStore(*self.rendezvous, is_master=False, timeout=timeout)
        store.set_timeout(timeout)
        store = dist.PrefixStore(self.name, store)
        num_bytes = min(self.bucket_bytes, self.total_bytes)
        if self.kind == "broadcast":
            group = _nccl_group if self.device_type == "cuda" else dist.ProcessGroupGloo
            bucket = torch.empty(num_bytes, dtype=torch.uint8, device=self.device_type)
            return BroadcastChannel(group(store, index, size, timeout), bucket)
        control = dist.ProcessGroupGloo(store, index, size, timeout)
        if index:
            return BufferChannel(control, _open_buffer(store.get("buffer"), num_bytes, self.device_type))
        bucket, handle = _shared_buffer(num_bytes, self.device_type)
        store.set("buffer", handle)
        return BufferChannel(control, bucket, None if bucket.is_cuda else Path(handle.decode()))


@dataclass(frozen=True)
class IncomingWeights:
    """A version that one receiver reads while it is sent: a handle and a `WeightSource`. It can be read once."""

    session: Session
    index: int  # from 1

    @property
    def version(self) -> int:
        return self.session.version

    @contextlib.contextmanager
    def open(self) -> "Iterator[IncomingWeights]":
        """The weights themselves."""
        yield self

    def layout(self) -> WeightLayout:
        """Names, types and shapes, which are known before anything is sent."""
        return self.session.layout

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Join the transfer, and yield each weight when all of its bytes have come. Raises EngineError if it fails."""
        return with_tied(self.session.receive(self.index), self.session.layout.tied)


class BroadcastChannel:
    """One side of a transfer in a process group of which the sender has index 0."""

    def __init__(self, group: Any, bucket: Tensor) -> None:
        self.bucket, self._group = bucket, group

    def send(self, size: int) -> None:
        """Send the first bytes of the bucket, which may then be filled anew."""
        self._broadcast(size)

    def receive(self, size: int) -> Tensor:
        """The next bytes, valid until the next call."""
        self._broadcast(size)
        return self.bucket[:size]

    def finish(self) -> None:
        """Wait until every process has all."""
        self._group.barrier(dist.BarrierOptions()).wait()

    def close(self) -> None:
        """Leave the process group."""
        if self.bucket.is_cuda:
            self._group.abort()

    def _broadcast(self, size: int) -> None:
        self._group.broadcast([self.bucket[:size]], dist.BroadcastOptions()).wait()


class BufferChannel:
    """One side of a transfer through a buffer that all processes see; a group on CPUs keeps them in step."""

    def __init__(self, group: Any, bucket: Tensor, path: Path | None = None) -> None:
        """`path`: of a mapped file, which goes when the transfer has ended."""
        self.bucket, self._group, self._path, self._is_reading = bucket, group, path, False

    def send(self, size: int) -> None:
        """Let the others read the first bytes of the bucket, and wait until they have."""
        self._meet()
        self._meet()

    def receive(self, size: int) -> Tensor:
        """The next bytes, valid until the next call."""
        self.finish()
        self._meet()
        self._is_reading = True
        return self.bucket[:size]

    def finish(self) -> None:
        """Let the sender know that the last bytes have been read."""
        if self._is_reading:
            self._is_reading = False
            self._meet()

    def close(self) -> None:
        """Remove the mapped file; the memory of a buffer goes with its last process."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _meet(self) -> None:
        if self.bucket.is_cuda:
            torch.cuda.synchronize()
        self._group.barrier(dist.BarrierOptions()).wait()


def _empty(dtype: str, shape: Sequence[int], *, device: str) -> Tensor:
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)


def _nccl_group(store: Any, index: int, size: int, timeout: timedelta) -> Any:
    before = os.environ.get(ABORT_NCCL)
    os.environ[ABORT_NCCL] = "1"
    try:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, index, size, options)
    finally:
        os.environ.pop(ABORT_NCCL) if before is None else os.environ.update({ABORT_NCCL: before})


def _shared_buffer(size: int, device_type: str) -> tuple[Tensor, bytes]:
    """A buffer, and what another process of this machine needs to open it."""
    if device_type == "cuda":
        bucket = torch.empty(size, dtype=torch.uint8, device="cuda")
        return bucket, encode_handle(bucket.untyped_storage()._share_cuda_())
    descriptor, path = tempfile.mkstemp(prefix="dapo-bucket-", dir=shared_folder())
    reserve(descriptor, size)
    os.close(descriptor)
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8), path.encode()


def _open_buffer(handle: bytes, size: int, device_type: str) -> Tensor:
    """The buffer of another process."""
    if device_type == "cuda":
        _, *parts = decode_handle(handle)
        # the sender may number the GPU differently
        storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *parts)
        return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage)
    return torch.from_file(handle.decode(), shared=True, size=size, dtype=torch.uint8)


def encode_handle(parts: Sequence[int | bool | bytes]) -> bytes:
    """What names a piece of a GPU's memory to another process, as text: a pickle could run code where it is read."""
    return json.dumps([part.hex() if isinstance(part, bytes) else part for part in parts]).encode()


def decode_handle(handle: bytes) -> list[int | bool | bytes]:
    """The parts that `encode_handle` was given."""
    return [bytes.fromhex(part) if isinstance(part, str) else part for part in json.loads(handle)]


@contextlib.contextmanager
def _interfaces(*, is_local: bool) -> Iterator[None]:
    """Connect over the loopback interface on one machine; else not, even where this process uses it otherwise."""
    if is_local:
        use_loopback_interface()
        yield
        return
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    hidden = {name: os.environ.pop(name) for name in names if os.environ.get(name) in ("lo", "lo0")}
    try:
        yield
    finally:
        os.environ.update(hidden)


def serve_store(timeout: timedelta) -> tuple[Any, tuple[str, int]]:
    """A store through which processes of several machines meet, and its host and port.

    It listens on this one address, not on all of the machine's; whoever reaches that may read and write it.
    """
    host = own_address()
    with socket.create_server((host, 0)) as listener:
        port, handle = listener.getsockname()[1], listener.detach()
    options: Any = {"is_master": True, "wait_for_workers": False, "master_listen_fd": handle}
    return dist.TCPStore(host, port, timeout=timeout, **options), (host, port)


def own_address() -> str:
    """The address of this machine by which others reach it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(UNROUTED_ADDRESS)
        except OSError:  # no route: a machine without a network
            return "127.0.0.1"
        return str(probe.getsockname()[0])
