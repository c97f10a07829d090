"""The trainer's end of a transfer, in the process of each rank."""

import base64
import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.cuda import nccl
from torch.multiprocessing.reductions import reduce_tensor

from .chunks import Layout, Source, chunks_of


class TransferFailed(Exception):
    """A transfer failed on the trainer's end; the weights themselves are unharmed."""


class NcclGroup:
    """Rank 0 of a group with vLLM's processes, which torch.distributed cannot form: they have a
    group of their own.
    """

    def __init__(self) -> None:
        self.unique_id: bytes = nccl.unique_id()
        self._group: Any = None

    def connect(self, size: int) -> None:
        """Form the group, and add up one number, with which vLLM's processes begin."""
        self._group = nccl.init_rank(size, self.unique_id, 0)
        nccl.all_reduce([torch.zeros(1, device="cuda")], comms=[self._group])
        torch.cuda.current_stream().synchronize()

    def broadcast(self, buffer: Tensor) -> None:
        nccl.broadcast([buffer], comms=[self._group])
        torch.cuda.current_stream().synchronize()

    def abort(self) -> None:
        """Leave the group, also from an operation that waits for a lost process."""
        if self._group is not None:
            pointer = ctypes.pythonapi.PyCapsule_GetPointer
            pointer.restype = ctypes.c_void_p
            pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
            group = pointer(self._group, b"torch.cuda.nccl.Communicator")
            # torch has loaded this library
            ctypes.CDLL("libnccl.so.2").ncclCommAbort(ctypes.c_void_p(group))


class WeightSender:
    """One rank's end; all ranks get the same calls, because each gathers what rank 0 or all of them
    send.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        group: Callable[[], Any] = NcclGroup,
        device: str = "cuda",
        timeout_s: float = 120.0,
    ) -> None:
        """`group` makes rank 0's end of a group of NCCL. `timeout_s` bounds every call."""
        self._rank = rank
        self._make_group = group
        self._device = device
        self._timeout_s = timeout_s
        self._group: Any = None
        self._buffer: Tensor | None = None
        self._readers = 0  # the processes of all engines
        self._tensors: Iterator[tuple[str, Tensor]] = iter(())

    def call(self, method: str, *arguments: Any) -> Any:
        """Call one of the methods below.

        Raises TransferFailed for whatever fails or takes too long.
        """
        device = torch.cuda.current_device() if self._device == "cuda" else -1
        future: Future[Any] = Future()

        def run() -> None:  # in a thread that is left behind where a lost process never answers
            try:
                torch.cuda.set_device(device)  # a negative number changes nothing
                future.set_result(getattr(self, method)(*arguments))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="weight-sender", daemon=True).start()
        try:
            return future.result(self._timeout_s)
        except Exception as error:
            self._leave_group()
            self._buffer = None
            reason = str(error) or f"an engine did not answer within {self._timeout_s:g} s"
            raise TransferFailed(f"the trainer cannot send weights: {reason}") from error

    def open(self, uses_nccl: bool) -> dict[str, Any]:
        """Leave an earlier group, and return the fields of vLLM's init info that only the trainer
        knows.
        """
        self._leave_group()
        if not uses_nccl or self._rank:
            return {}
        self._group = self._make_group()
        return {"nccl_unique_id_b64": base64.b64encode(self._group.unique_id).decode()}

    def connect(self, size: int) -> None:
        """Form the group of `size` with the engines' processes, which connect at the same time."""
        self._readers = size - 1
        if self._group is not None:
            self._group.connect(size)

    def begin(self, uses_nccl: bool, source: Source) -> tuple[Layout, dict[str, Any]]:
        """Begin to send a source's weights; returns their layout, and without NCCL this rank's
        buffer, by its GPU, if an engine's process reads it there.

        The engines are on the GPUs of the first ranks. A buffer that is shared and never read is
        never freed: torch waits for its one reader.
        """
        layout = source.layout()
        handle = dict[str, Any]()
        self._chunks = chunks_of(layout.tensors)
        # tied ones once
        self._tensors = (pair for pair in source.named_tensors() if pair[0] in layout.tensors)
        torch.cuda.empty_cache()  # an engine on this GPU wakes next
        is_read = self._group is not None if uses_nccl else self._rank < self._readers
        if is_read:
            size = max(sum(chunk["tensor_sizes"]) for chunk in self._chunks)
            with plain_segments():
                self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        if self._buffer is not None and not uses_nccl:
            gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
            handle[str(gpu.uuid)] = reduce_tensor(self._buffer)[1]
        return layout, handle

    def send(self, index: int) -> None:
        """Gather a chunk, and broadcast it or leave it in the buffer."""
        start = 0
        chunk = self._chunks[index]
        for expected, size in zip(chunk["names"], chunk["tensor_sizes"], strict=True):
            name, tensor = next(self._tensors)
            if name != expected or tensor.nbytes != size:
                raise ValueError(
                    f"the weights differ from their layout: expected {expected}, got {name}"
                )
            if self._buffer is not None:
                self._buffer[start : start + size].copy_(
                    tensor.contiguous().view(-1).view(torch.uint8)
                )
            start += size
        if self._group is not None and self._buffer is not None:
            self._group.broadcast(self._buffer[:start])
        elif self._device == "cuda":
            torch.cuda.current_stream().synchronize()

    def end(self) -> None:
        """Free the buffer."""
        self._buffer = None
        self._tensors = iter(())
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Free the buffer and leave the group, where no more weights will be sent."""
        self._leave_group()
        self.end()

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None


@contextmanager
def plain_segments() -> Iterator[None]:
    """Allocate without expandable segments, whose memory is shared by a system call that containers
    refuse.
    """
    settings = torch._C._accelerator_getAllocatorSettings()
    if "expandable" not in settings:
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)
