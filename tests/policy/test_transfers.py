"""What an update brings from the device to main memory: a few numbers at its end, however many
microbatches it has.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dapo.policy.transfer import to_numbers
from helpers.tiny_policies import make_policy, ragged

READS: set[Callable[..., Any]] = {
    Tensor.__bool__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__int__,
    Tensor.cpu,
    Tensor.item,
    Tensor.masked_select,
    Tensor.nonzero,
    Tensor.numpy,
    Tensor.tolist,
    torch.masked_select,
    torch.nonzero,
}


class CountReads(TorchFunctionMode):
    """Counts what would wait for a GPU: values that come to Python, and shapes that depend on
    values.
    """

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        has_mask = func in (Tensor.__getitem__, Tensor.__setitem__) and any(
            isinstance(index, Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], tuple) else (args[1],))
        )
        self.count += has_mask or func in READS
        return func(*args, **(kwargs or {}))


def reads_of_an_update(microbatch_tokens: int) -> int:
    loss = {"entropy_coef": 0.01, "kl_coef": 0.01, "engine_correction": 2.0, "dual_clip": 3.0}
    policy = make_policy(loss=loss, microbatch_tokens=microbatch_tokens)
    samples = [
        replace(
            row,
            engine_logprobs=(-1.0,) * n,
            old_logprobs=(-1.0,) * n,
            mask=(True,) * (n - 1) + (False,),
        )
        for row in ragged()
        if (n := len(row.response_ids))
    ]
    with CountReads() as reads:
        policy.update(samples, step=1)
    return reads.count


def test_an_update_reads_as_many_numbers_in_many_microbatches_as_in_one() -> None:
    assert reads_of_an_update(30) == reads_of_an_update(10_000)


def test_masks_as_indices_and_conversions_to_numbers_count_as_reads() -> None:
    values = torch.arange(4.0)
    with CountReads() as reads:
        values[values > 1].sum()
        float(values[0])
        bool(values.isfinite().all())
        values.tolist()
        torch.where(values > 1, values, 0.0).sum()
    assert reads.count == 4


def test_scalars_of_several_types_come_as_numbers_in_one_read() -> None:
    scalars = [
        torch.tensor(True),
        torch.tensor(2**40 + 1),
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor(0.5),
    ]
    with CountReads() as reads:
        assert to_numbers(scalars) == [1.0, 2.0**40 + 1, 0.1, 0.5]
    assert reads.count == 1
    assert to_numbers([]) == []
