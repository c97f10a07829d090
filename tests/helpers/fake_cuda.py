"""The package on fake CUDA tensors, without a GPU: devices, kernels, copies, synchronisations and
saved bytes.

Inside of `fake_cuda()` a tensor on the device "cuda" has shape, type and device but no values
(PyTorch's `FakeTensorMode`), and a tensor on the CPU is real. So planning and bookkeeping on the
CPU run as always, an operation that mixes devices raises, and every operator that would launch a
kernel passes through `FakeCuda`, which records it with the line of the package that caused it.
Whatever is read from the device is 0, or True.

    with fake_cuda() as gpu:
        model = fake_model("qwen2")
        with gpu.record() as trace:
            Forward(model).prefill([[1, 2, 3]])
        assert not trace.syncs, trace.syncs

Counts are of operators, as PyTorch dispatches them: an operator over a list of tensors
(`_foreach_*`, the fused AdamW) is one, though a GPU may need several launches for it.
"""

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import dapo
from dapo.engines.native import decode_graphs
from helpers import backward_in_python, gpu_kernels

PACKAGE = str(Path(dapo.__file__).parent)
LIBRARIES = (
    str(Path(torch.__file__).parent),
    *map(str, (__file__, backward_in_python.__file__, gpu_kernels.__file__)),
)
GPU_MEMORY = 80 * 10**9
HOPPER = (9, 0)
CUDA = 1
LAZY = 17  # values of c10::DeviceType
NUM_DEVICE_TYPES = 21

aten = torch.ops.aten

NO_KERNEL = {
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "detach",
    "detach_",
    "empty",
    "empty_like",
    "empty_strided",
    "is_same_size",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "record_stream",
    "resize_",
    "set_",
    "split_with_sizes",
}
"""Operators that launch nothing, besides the views."""

DATA_DEPENDENT = {
    "nonzero",
    "masked_select",
    "repeat_interleave",
    "_unique2",
    "unique_consecutive",
    "unique_dim",
}
"""Operators whose result's shape depends on values: the host waits for it."""

READS = {"_local_scalar_dense", "equal", "is_nonzero"}
"""Operators that return values of the device to Python."""


@dataclass(frozen=True)
class Event:
    """An operator with the line that caused it."""

    operator: str
    line: str
    """`file:line`: the innermost line of the package, or of the test where the package was not
    involved.
    """
    num_bytes: int = 0

    def __str__(self) -> str:
        return f"{self.operator} at {self.line}"


@dataclass
class Trace:
    """What happened while it was recorded."""

    kernels: Counter[str] = field(default_factory=Counter)
    """Operators that launch a kernel, by name."""
    kernel_lines: Counter[str] = field(default_factory=Counter)
    """The same by the line that caused them."""
    views: int = 0
    uploads: list[Event] = field(default_factory=list)
    """Copies from the host to the device."""
    downloads: list[Event] = field(default_factory=list)
    """Copies of tensors from the device to the host."""
    syncs: list[Event] = field(default_factory=list)
    """Where the host waits for the device: downloads that block, scalars, shapes that depend on
    values.
    """

    @property
    def num_kernels(self) -> int:
        return self.kernels.total()

    def table(self, count: int = 20) -> str:
        """The most frequent operators and lines, for the message of a failing assertion."""
        rows = [*self.kernels.most_common(count), *self.kernel_lines.most_common(count)]
        return "\n".join(f"{number:7d}  {name}" for name, number in rows)


class FakeCuda(TorchDispatchMode):
    """Runs operators on fake CUDA tensors or on real CPU tensors, and records the former."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake
        self._traces: list[Trace] = []
        self._unbound: tuple[int, int, int] | None = None
        self._is_tolist_noted = False
        """Where `Tensor.tolist` may be at work: it unbinds tensors to their numbers, and reads
        these one by one.
        """

    @contextmanager
    def record(self) -> Iterator[Trace]:
        """Everything that the block does on the device; records may be nested."""
        trace = Trace()
        self._traces.append(trace)
        try:
            yield trace
        finally:
            self._traces.remove(trace)

    def capture(
        self, compute: Callable[[], Tensor], pool: object
    ) -> tuple[Callable[[], None], Tensor]:
        """`decode_graphs.capture`: what is captured launches nothing and may not wait; a graph is
        one launch.
        """
        traces = self._traces
        self._traces = [captured := Trace()]
        output = compute()
        self._traces = traces
        assert not captured.syncs + captured.uploads, list(
            map(str, captured.syncs + captured.uploads)
        )
        return lambda: self.count_kernel("graph"), output

    def sync(self, operator: str) -> None:
        """Note that the host waits for the device."""
        self._note("syncs", operator)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":  # a question about the tensor itself
            return func(*args, **kwargs)
        leaves = [*tree_leaves(args), *tree_leaves(kwargs)]
        on_device = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        to_device = any(isinstance(leaf, torch.device) and leaf.type == "cuda" for leaf in leaves)
        if not on_device and not to_device:
            return self._on_cpu(func, args, kwargs)
        if _is_composite(func):
            with self:  # of inference mode: autograd has not taken it apart
                return func.decompose(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name == "unbind" and self._traces and self._unbound != (here := _instruction(args[0])):
            self._unbound = here
            self._is_tolist_noted = False
        if name in READS:
            return self._read(func, args)
        if name in ("copy_", "_to_copy") and (copied := self._copy(name, args, kwargs)) is not None:
            return copied
        if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
            args = (args[0], self._indices(name, args[1]), *args[2:])
        elif name == "where":
            self._copy_numbers(name, args)
        elif name in DATA_DEPENDENT:
            return self._data_dependent(name, args)
        self._count(func, name)
        args, kwargs = tree_map_only(Tensor, self._to_fake, (args, kwargs))
        return func(*args, **kwargs)

    def _on_cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with unset_fake_temporarily():
            if func in (aten.pin_memory.default, aten._pin_memory.default):
                return args[0].clone()
            if func is aten.is_pinned.default:
                return True
            kwargs.pop("pin_memory", None)
            return func(*args, **kwargs)

    def _to_fake(self, tensor: Tensor) -> Tensor:
        return (
            tensor
            if isinstance(tensor, FakeTensor)
            else self._fake.from_tensor(tensor, static_shapes=True)
        )

    def _count(self, func: Any, name: str) -> None:
        if func.is_view or name in NO_KERNEL:
            for trace in self._traces:
                trace.views += 1
        else:
            self.count_kernel(str(func))

    def count_kernel(self, operator: str) -> None:
        """Note that an operator launches a kernel."""
        if self._traces:
            line = _line()
            for trace in self._traces:
                trace.kernels[operator] += 1
                trace.kernel_lines[line] += 1

    def _note(self, kind: str, operator: str, num_bytes: int = 0) -> None:
        if self._traces:
            event = Event(operator, _line(), num_bytes)
            for trace in self._traces:
                getattr(trace, kind).append(event)

    def _read(self, func: Any, args: tuple[Any, ...]) -> Any:
        if not self._in_tolist(args[0]):
            self.sync(str(func))
            self.count_kernel(str(func))
        dtype = torch.bool if func is aten.equal.default else args[0].dtype
        if dtype == torch.bool:
            return True
        if dtype.is_floating_point:
            return 0.0
        return 0

    def _in_tolist(self, tensor: Tensor) -> bool:
        """Whether a read belongs to a call of `tolist` that has been noted: on a GPU it is one
        copy.
        """
        if self._unbound is None or self._unbound != _instruction(tensor):
            return False
        is_first = not self._is_tolist_noted
        self._is_tolist_noted = True
        return not is_first

    def _copy(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """A copy between host and device; None for one within the device."""
        if name == "copy_":
            target, source = args[:2]
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            here = isinstance(target, FakeTensor)
        else:
            target = None
            source = args[0]
            blocks = not kwargs.get("non_blocking", False)
            here = torch.device(kwargs.get("device") or source.device).type == "cuda"
        there = isinstance(source, FakeTensor)
        if here == there:
            return None
        num_bytes = source.numel() * source.element_size()
        self._note("uploads" if here else "downloads", name, num_bytes)
        self.count_kernel(name)
        if here:
            if target is not None:
                return target
            dtype = kwargs.get("dtype") or source.dtype
            return torch.empty_like(source, dtype=dtype, device=kwargs["device"])
        if blocks:
            self.sync(f"{name} to the CPU")
        with unset_fake_temporarily():
            if target is None:
                dtype = kwargs.get("dtype") or source.dtype
                target = torch.empty(source.shape, dtype=dtype)
            return target.fill_(target.dtype == torch.bool)

    def _copy_numbers(self, name: str, args: Sequence[Any]) -> None:
        """Note a copy that blocks for each 0-dim tensor on the host, which other operators pass
        with the launch.
        """
        for arg in args:
            if isinstance(arg, Tensor) and not isinstance(arg, FakeTensor):
                self._note("uploads", f"{name} with a number on the CPU", arg.element_size())
                self.sync(f"{name} with a number on the CPU")

    def _indices(self, name: str, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Integer indices instead of masks, whose number of true values the host would wait for."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and not isinstance(index, FakeTensor):
                self._note(
                    "uploads",
                    f"{name} with an index on the CPU",
                    index.numel() * index.element_size(),
                )
                index = self._to_fake(index.nonzero()[:, 0] if index.dtype == torch.bool else index)
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                self.sync(f"{name} with a mask")
                self.count_kernel("aten.nonzero.default")
                found += [
                    index.new_empty(index.numel(), dtype=torch.long) for _ in range(index.dim())
                ]
            else:
                found.append(index)
        return found

    def _data_dependent(self, name: str, args: tuple[Any, ...]) -> Any:
        """As if a condition held everywhere and all values were different."""
        self.sync(name)
        self.count_kernel(name)
        source = args[0]
        if name == "nonzero":
            return source.new_empty(source.numel(), source.dim(), dtype=torch.long)
        if name == "masked_select":
            return source.new_empty(source.numel())
        raise NotImplementedError(
            f"{name} waits for the device, and fake_cuda has no shape for it (at {_line()})"
        )


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """A device "cuda" whose tensors have no values; all of it is undone when the block ends."""
    gpu = FakeCuda(FakeTensorMode(allow_non_fake_inputs=True))
    functions: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: HOPPER,
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "synchronize": lambda device=None: gpu.sync("torch.cuda.synchronize"),
        "mem_get_info": lambda device=None: (GPU_MEMORY, GPU_MEMORY),
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": lambda: (0, 0),
    }
    with ExitStack() as stack:
        stack.enter_context(_current_device())
        stack.enter_context(
            backward_in_python.engine(kernels := gpu_kernels.KernelsOfGpu(gpu.count_kernel))
        )
        for types in (_foreach_utils._foreach_supported_types, optimizer._foreach_supported_types):
            stack.callback(types.remove, FakeTensor)
            types.append(FakeTensor)  # as tensors of a GPU: all of a list in one kernel
        stack.enter_context(gpu._fake)
        stack.enter_context(gpu)
        stack.enter_context(kernels)
        stack.enter_context(mock.patch.multiple(torch.cuda, **functions))
        stack.enter_context(mock.patch.object(decode_graphs, "capture", gpu.capture))
        yield gpu


@contextmanager
def _current_device() -> Iterator[None]:
    """Let PyTorch without CUDA set and read the current CUDA device: indexing and autograd do it
    for every tensor.

    `FakeTensorMode` installs an implementation of this that does nothing, but only instead of one
    that has no devices. In a build without CUDA there is none at all; that of lazy tensors is such
    a one.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    by_device_type = (ctypes.c_void_p * NUM_DEVICE_TYPES).in_dll(
        library, "_ZN3c104impl26device_guard_impl_registryE"
    )
    before = by_device_type[CUDA]
    if before is None:
        by_device_type[CUDA] = by_device_type[LAZY]
    try:
        yield
    finally:
        by_device_type[CUDA] = before


@contextmanager
def saved_bytes(model: torch.nn.Module) -> Iterator[Callable[[], int]]:
    """Counts the bytes of activations that the block saves for its backward; call the result to
    read them.

    Each storage counts once, however many views of it are saved; the model's own weights do not
    count.
    """
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and tensor.device.type == "cuda":
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(storage.nbytes() for storage in storages.values())


@cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), torch._C.DispatchKey.CompositeImplicitAutograd
    )


def _instruction(tensor: Tensor) -> tuple[int, int, int]:
    """The memory of a tensor, with the frame and instruction that called the libraries with it."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename.startswith(LIBRARIES):
        frame = frame.f_back
    return tensor.untyped_storage()._cdata, id(frame), frame.f_lasti


def _line() -> str:
    """`file:line` of the innermost frame of the package, or else of whatever called the
    libraries.
    """
    frame = sys._getframe(1)
    fallback = "?"
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file.removeprefix(PACKAGE)[1:]}:{frame.f_lineno}"
        if fallback == "?" and not file.startswith(LIBRARIES):
            fallback = f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback
