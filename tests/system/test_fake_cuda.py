"""The engine and the update on fake CUDA tensors: no device is mixed up, and nothing waits or launches too much.

No GPU is needed. The budgets are what the code needs today: they may fall, and a change that raises one says why.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from helpers.fake_cuda import FakeCuda, fake_cuda, saved_bytes
from helpers.fake_models import fake_model

HERE = "test_fake_cuda.py:"


@pytest.fixture
def gpu():
    with fake_cuda() as gpu:
        yield gpu


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


# The harness catches each kind of mistake, and says where it was made.


def test_a_cpu_tensor_among_cuda_tensors_raises(gpu: FakeCuda) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        on_gpu(3) + torch.ones(3)
    assert (on_gpu(3) + torch.ones(())).device.type == "cuda"  # a number is allowed, as on a GPU
    with pytest.raises(RuntimeError, match="same device"):
        torch.nn.functional.linear(on_gpu(3, 4), torch.ones(5, 4))


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: bool((x > 0).all()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.ones(3, 2).copy_(x),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: torch.equal(x, x),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_each_way_to_wait_for_the_device_counts_once_and_names_its_line(gpu: FakeCuda, wait) -> None:
    values = on_gpu(3, 2)
    with gpu.record() as trace:
        wait(values)
    (sync,) = trace.syncs
    assert sync.line.startswith(HERE)


def test_reading_rows_one_by_one_waits_for_each(gpu: FakeCuda) -> None:
    values = on_gpu(5)
    with gpu.record() as trace:
        numbers = [float(value) for value in values]
    assert numbers == [0.0] * 5
    assert len(trace.syncs) == 5


def test_what_stays_on_the_device_does_not_wait(gpu: FakeCuda) -> None:
    values = on_gpu(3, 2)
    with gpu.record() as trace:
        torch.where(values > 0, values, 0.0).sum()
        values[torch.zeros(2, dtype=torch.long, device="cuda")] = 0.0
        values.to("cpu", non_blocking=True)
    assert not trace.syncs
    assert len(trace.downloads) == 1


def test_copies_to_the_device_are_counted_with_their_bytes(gpu: FakeCuda) -> None:
    with gpu.record() as trace:
        torch.tensor([1.0, 2.0], device="cuda")
        torch.arange(3).to("cuda")
        on_gpu(3).copy_(torch.ones(3))
        on_gpu(3)[torch.tensor([0, 1])]
        torch.zeros(3, device="cuda")  # a kernel, not a copy
    assert [event.num_bytes for event in trace.uploads] == [8, 24, 12, 16]
    assert all(event.line.startswith(HERE) for event in trace.uploads)


@pytest.mark.parametrize("inference", [False, True])
def test_kernels_count_as_on_a_gpu(gpu: FakeCuda, inference: bool) -> None:
    x, weight = on_gpu(4, 8, dtype=torch.bfloat16), on_gpu(8, 8, dtype=torch.bfloat16)
    heads = on_gpu(1, 2, 5, 16, dtype=torch.bfloat16)
    with torch.inference_mode(inference), gpu.record() as trace:
        torch.nn.functional.linear(x, weight, on_gpu(8, dtype=torch.bfloat16))
        rms_norm(x, (8,), on_gpu(8, dtype=torch.bfloat16))
        scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x[1:, :2].transpose(0, 1)
    assert sorted(trace.kernels) == [
        "aten._fused_rms_norm.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten.addmm.default",
    ]
    assert trace.num_kernels == 3


def test_backward_gives_every_gradient_its_shape_type_and_device(gpu: FakeCuda) -> None:
    weight = torch.nn.Parameter(on_gpu(6, 8, dtype=torch.bfloat16))
    scale = torch.nn.Parameter(on_gpu(8))
    hidden = on_gpu(4, 8, dtype=torch.bfloat16).requires_grad_()
    seen: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(seen.append)
    with gpu.record() as trace:
        loss = ((hidden * scale).bfloat16() @ weight.T).float().sum() + scale.sum()
        loss.backward()
    for leaf in (weight, scale, hidden):
        assert leaf.grad is not None
        assert (leaf.grad.shape, leaf.grad.dtype, leaf.grad.device) == (leaf.shape, leaf.dtype, leaf.device)
    assert seen == [weight]
    assert trace.kernels["aten.mm.default"] == 3  # forward, and one for each of its inputs
    assert not trace.syncs


def test_saved_bytes_count_each_storage_once_and_no_weights(gpu: FakeCuda) -> None:
    layer = torch.nn.Linear(8, 16, bias=False, device="cuda")
    x = on_gpu(4, 8)
    with saved_bytes(layer) as saved:
        y = layer(x)  # saves x and the weight
        (y * y).sum()  # saves y twice
    assert saved() == 4 * (4 * 8 + 4 * 16)


def test_attention_saves_what_its_kernels_save(gpu: FakeCuda) -> None:
    def states(heads: int, *, packed: bool = False) -> Tensor:
        shape = (10, heads, 64) if packed else (2, heads, 5, 64)
        return on_gpu(*shape, dtype=torch.bfloat16).requires_grad_()

    nothing = torch.nn.Identity()
    tensors = 2 * 2 * 4 * 5 * 64 * 4  # queries, keys, values and outputs of bfloat16
    logsumexp = 4 * 2 * 4 * 5
    with saved_bytes(nothing) as flash:
        scaled_dot_product_attention(states(4), states(4), states(4), is_causal=True)
    assert tensors + logsumexp <= flash() <= tensors + logsumexp + 64  # and the generator's state
    mask = on_gpu(2, 1, 5, 5, dtype=torch.bfloat16)
    with saved_bytes(nothing) as masked:
        scaled_dot_product_attention(states(4), states(4), states(4), attn_mask=mask)
    assert masked() >= tensors + 2 * 2 * 5 * 16  # rows of the mask are padded to 16
    starts = torch.tensor([0, 5, 10], dtype=torch.int32, device="cuda")
    query, key, value = (states(heads, packed=True) for heads in (4, 2, 2))
    with saved_bytes(nothing) as packed, gpu.record() as trace:
        out = varlen_attn(query, key, value, starts, starts, 5, 5, window_size=(-1, 0), enable_gqa=True)
        out.sum().backward()
    assert tensors * 3 // 4 + logsumexp <= packed() <= tensors * 3 // 4 + logsumexp + 64
    for leaf in (query, key, value):
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
    assert trace.kernels["torch_attn._varlen_attn_backward.default"] == 1


def test_everything_is_undone_afterwards() -> None:
    before = torch.autograd.Variable._execution_engine, torch.cuda.synchronize, torch.autograd.Function.apply
    with fake_cuda():
        fake_model("llama")
    assert (torch.autograd.Variable._execution_engine, torch.cuda.synchronize, torch.autograd.Function.apply) == before
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.ones(3, device="cuda")
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
