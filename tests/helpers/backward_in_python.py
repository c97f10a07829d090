"""Autograd's backward in a few lines of Python, for fake CUDA tensors: PyTorch's own asks the CUDA
runtime for streams.

Nodes of the graph are PyTorch's, so their formulas, the kernels that they launch and what they
saved are the real ones. `Tensor.backward` works, with hooks on leaves and with recomputed layers;
`torch.autograd.grad` does not.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import FunctionCtx


@contextmanager
def engine(mode: AbstractContextManager[Any]) -> Iterator[None]:
    """Autograd's engine is the one here while the block runs, and runs in a mode, which a call of
    `backward` leaves.
    """
    with (
        mock.patch.object(Variable, "_execution_engine", _Engine(mode)),
        _functions_remember_outputs(),
    ):
        yield


class _Engine:
    """Stands for `Variable._execution_engine`."""

    def __init__(self, mode: AbstractContextManager[Any]) -> None:
        self._num_runs = 0
        self._mode = mode

    def run_backward(
        self,
        tensors: Sequence[Tensor],
        gradients: Sequence[Tensor],
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Tensor] = (),
        **others: object,
    ) -> tuple[Tensor, ...]:
        """Add the gradients of `tensors` to the leaves of their graph."""
        if inputs:
            raise NotImplementedError("only backward() without inputs runs on fake CUDA tensors")
        self._num_runs += 1
        task = mock.patch("torch._C._current_graph_task_id", return_value=self._num_runs)
        with torch.set_grad_enabled(create_graph), task, self._mode:
            _run_graph(tensors, gradients)
        return ()


def _run_graph(tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Nodes run when all that feed them have run, the last made first."""
    arrived: dict[Any, dict[int, Tensor]] = defaultdict(dict)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        _add(arrived[tensor.grad_fn], tensor.output_nr, gradient)
    waits_for = _in_degrees(list(arrived))
    ready = [
        (-node._sequence_nr(), i, node) for i, node in enumerate(arrived) if not waits_for[node]
    ]
    heapq.heapify(ready)
    made = len(ready)
    while ready:
        _, _, node = heapq.heappop(ready)
        results = _apply(node, arrived.pop(node, {}))
        for (following, position), gradient in zip(node.next_functions, results, strict=False):
            if following is None:
                continue
            if gradient is not None:
                _add(arrived[following], position, _like_the_output(gradient, following, position))
            waits_for[following] -= 1
            if not waits_for[following]:
                made += 1
                heapq.heappush(ready, (-following._sequence_nr(), made, following))


def _in_degrees(roots: Sequence[Any]) -> Counter[Any]:
    degrees: Counter[Any] = Counter()
    seen = set(roots)
    stack = list(roots)
    while stack:
        for following, _ in stack.pop().next_functions:
            if following is not None:
                degrees[following] += 1
                if following not in seen:
                    seen.add(following)
                    stack.append(following)
    return degrees


def _apply(node: Any, gradients: dict[int, Tensor]) -> Sequence[Tensor | None]:
    if not gradients:
        return [None] * len(node.next_functions)
    if (leaf := getattr(node, "variable", None)) is not None:
        _accumulate(leaf, gradients[0])
        return []
    given = [gradients.get(i) for i in range(len(node._input_metadata))]
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        found = node(*given)
        return found if isinstance(found, tuple) else (found,)
    if getattr(node, "fake_cuda_materializes", True):
        given = [
            (
                torch.zeros(output.shape, dtype=output.dtype, device=output.device)
                if gradient is None
                else gradient
            )
            for gradient, output in zip(given, node.fake_cuda_outputs, strict=True)
        ]
    found = node.apply(*given)
    found = found if isinstance(found, tuple) else (found,)
    # one result for each input of forward, but next nodes only for tensors
    wanted = (result for result, needed in zip(found, node.needs_input_grad, strict=True) if needed)
    return [None if following is None else next(wanted) for following, _ in node.next_functions]


def _accumulate(leaf: Tensor, gradient: Tensor) -> None:
    """Give a leaf its gradient, which autograd adds in place; it would copy one that Python holds a
    reference to.
    """
    if leaf.grad is None:
        leaf.grad = gradient.detach()
    else:
        leaf.grad += gradient
    for hook in (leaf._post_accumulate_grad_hooks or {}).values():
        hook(leaf)


@contextmanager
def _functions_remember_outputs() -> Iterator[None]:
    """Let each `autograd.Function` keep its outputs' shapes and settings, as autograd does out of
    Python's reach.
    """
    apply = torch.autograd.Function.__dict__["apply"].__func__
    set_materialize_grads = FunctionCtx.set_materialize_grads

    def apply_and_remember(cls: type, *args: Any, **kwargs: Any) -> Any:
        results = apply(cls, *args, **kwargs)
        outputs = results if isinstance(results, tuple) else (results,)
        for output in outputs:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                output.grad_fn.fake_cuda_outputs = [
                    _Output(x.shape, x.dtype, x.device) for x in outputs
                ]
                break
        return results

    def set_and_remember(ctx: Any, value: bool) -> None:
        set_materialize_grads(ctx, value)
        ctx.fake_cuda_materializes = value

    patches = (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply_and_remember)),
        mock.patch.object(FunctionCtx, "set_materialize_grads", set_and_remember),
    )
    with patches[0], patches[1]:
        yield


class _Output(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _like_the_output(gradient: Tensor, node: Any, position: int) -> Tensor:
    """The gradient of a node's output, converted as autograd does."""
    output = node._input_metadata[position]
    if gradient.device != output.device and gradient.dim():
        raise RuntimeError(
            f"{node.name()} got a gradient on {gradient.device} for an output on {output.device}"
        )
    return gradient.sum_to_size(output.shape).to(output.dtype)


def _add(arrived: dict[int, Tensor], position: int, gradient: Tensor) -> None:
    arrived[position] = arrived[position] + gradient if position in arrived else gradient
