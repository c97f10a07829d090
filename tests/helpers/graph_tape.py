"""`decode_graphs.capture` on a CPU: the operators of a computation are recorded, and run again on
the same tensors.

As with a CUDA graph, the tensors and the numbers of the host are those of the capture: what the
computation reads later from other tensors, or what Python would decide otherwise, has no effect.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from dapo.engines.native import decode_graphs


class _Tape(TorchDispatchMode):
    active: "_Tape | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            for old, new in zip(
                tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True
            ):
                # views and results in place have the memory of an input, which has been filled
                if (
                    isinstance(old, Tensor)
                    and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()
                ):
                    old.copy_(new)


def as_kernel(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that reads values of its tensors in Python, as one operator of a tape."""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        tape = _Tape.active
        if tape is None:
            return function(*args, **kwargs)
        with _disable_current_modes():
            result = function(*args, **kwargs)
        tape.calls.append((function, args, kwargs, result))
        return result

    return kernel


@contextmanager
def captured_on_cpu() -> Iterator[list[int]]:
    """While the block runs, decode graphs are tapes; the list has the number of operators of each
    capture.
    """
    captured: list[int] = []

    def capture(compute: Callable[[], Tensor], pool: object) -> tuple[Callable[[], None], Tensor]:
        tape = _Tape()
        with tape, mock.patch.object(_Tape, "active", tape):
            output = compute()
        captured.append(len(tape.calls))
        return tape.replay, output

    pool = mock.patch("torch.cuda.graph_pool_handle", return_value=(0, 0))
    with mock.patch.object(decode_graphs, "capture", capture), pool:
        yield captured
