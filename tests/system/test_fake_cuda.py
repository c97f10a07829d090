"""The engine and the update on fake CUDA tensors: no device is mixed up, and nothing waits or
launches too much.

No GPU is needed. The budgets are what the code needs today: they may fall, and a change that raises
one says why.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from dapo.config.rollout_options import NativeConfig
from dapo.engines.engine import WeightSource
from dapo.engines.native.engine import NativeEngine
from dapo.libs.cpu_kernels import fuse_layers
from dapo.policy.model import LoadedModel
from dapo.policy.packed_attention import use_packed_attention
from dapo.policy.policy import Policy
from dapo.types import Generation, GenerationRequest, Sample
from helpers.fake_cuda import FakeCuda, Trace, fake_cuda, saved_bytes
from helpers.fake_models import FAMILIES, WINDOW, fake_model
from helpers.tables import for_each_row
from helpers.tiny_policies import groups_of, loaded, policy_config

DECODE_LAYER = {"llama": 13, "mistral": 13, "qwen2": 13, "qwen3": 14, "smollm3": 11.5, "gemma3": 20}
"""Kernels of a decode step in each layer; 20 is the most that a family may have."""

DECODE_REST = {"llama": 74, "mistral": 74, "qwen2": 74, "qwen3": 74, "smollm3": 74, "gemma3": 86}
"""Kernels of a decode step outside of the layers: embedding, rotary angles, head, sampling, and
what fills the inputs of a graph. A step that has been captured launches `LAUNCHES` instead.
"""

LAUNCHES = 55
"""Launches of a captured decode step: its graph, the head and sampling."""

DECODE_UPLOADS = 1
"""Copies to the device in a decode step: tokens, positions and random numbers together."""

UPDATE_LAYER = {
    "llama": 105,
    "mistral": 105,
    "qwen2": 114,
    "qwen3": 111,
    "smollm3": 93,
    "gemma3": 265,
}
"""Kernels of an update of one microbatch in each layer, with backward and optimiser."""

UPDATE_REST = {
    "llama": 146,
    "mistral": 146,
    "qwen2": 146,
    "qwen3": 146,
    "smollm3": 145,
    "gemma3": 182,
}
"""Kernels of such an update outside of the layers; five of them gather and add up what several
responses share, and four fill the bounds of the clip, which eight copies from the host did before
an H100 counted them.
"""

UPDATE_UPLOADS = {"llama": 3, "mistral": 3, "qwen2": 3, "qwen3": 3, "smollm3": 3, "gemma3": 4}
"""Copies to the device for each microbatch: tokens, numbers of the loss, indices of each kind of
attention.
"""

UPDATE_SYNCS = 1
"""Waits of an update: for the sums of the loss, the gradient's norm, and whether the weights were
finite, together.
"""

HEAD_OF_16K = 198
"""Kernels that a microbatch of 16,384 tokens has more than a small one, at a vocabulary of 151,936:
22 for each further chunk of logits.
"""

HERE = "test_fake_cuda.py:"

SAMPLE = ("llama", "qwen3", "gemma3")
"""A plain family, one that normalizes heads, and one with layers of two kinds."""
BY_FAMILY = [
    pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.nightly]) for name in FAMILIES
]
"""`make test` meets the sample, `make nightly` all families."""


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


@for_each_row(
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
        lambda x: torch.where(x > 0, torch.tensor(1.0), x),
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_each_way_to_wait_for_the_device_counts_once_and_names_its_line(
    gpu: FakeCuda, wait
) -> None:
    values = on_gpu(3, 2)
    with gpu.record() as trace:
        wait(values)
    (sync,) = trace.syncs
    assert sync.line.startswith(HERE)


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
        assert (leaf.grad.shape, leaf.grad.dtype, leaf.grad.device) == (
            leaf.shape,
            leaf.dtype,
            leaf.device,
        )
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
        out = varlen_attn(
            query, key, value, starts, starts, 5, 5, window_size=(-1, 0), enable_gqa=True
        )
        out.sum().backward()
    assert tensors * 3 // 4 + logsumexp <= packed() <= tensors * 3 // 4 + logsumexp + 64
    for leaf in (query, key, value):
        assert leaf.grad is not None
        assert leaf.grad.shape == leaf.shape
    assert trace.kernels["torch_attn._varlen_attn_backward.default"] == 1


def test_everything_is_undone_afterwards() -> None:
    before = (
        torch.autograd.Variable._execution_engine,
        torch.cuda.synchronize,
        torch.autograd.Function.apply,
    )
    with fake_cuda():
        fake_model("llama")
    assert (
        torch.autograd.Variable._execution_engine,
        torch.cuda.synchronize,
        torch.autograd.Function.apply,
    ) == before
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.ones(3, device="cuda")
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


# The engine.


def request(
    name: str, prompt: Sequence[int], max_new_tokens: int, **options: Any
) -> GenerationRequest:
    values = {"temperature": 1.0, "top_p": 1.0, "seed": 1, "stop_ids": (1,)} | options
    return GenerationRequest(name, tuple(prompt), max_new_tokens, **values)


def decode_step(gpu: FakeCuda, engine: NativeEngine) -> Trace:
    """One poll that is one decode step of four rows: nothing starts, ends or grows."""
    engine.submit([request(str(i), range(5 + i), 9) for i in range(4)])
    engine.poll()
    with gpu.record() as trace:
        assert engine.poll() == []
    engine.abort(engine.in_flight)
    return trace


@pytest.mark.parametrize("name", BY_FAMILY)
def test_the_engine_serves_each_family_on_a_gpu_within_its_budget(gpu: FakeCuda, name: str) -> None:
    models = [fake_model(name, num_hidden_layers=layers) for layers in depths(name)]
    engines = [NativeEngine(model, NativeConfig(slots=4)) for model in models]
    shallow, deep = (decode_step(gpu, engine) for engine in engines)
    assert len(shallow.syncs) == len(deep.syncs) == 1, list(map(str, deep.syncs))
    assert len(deep.uploads) <= DECODE_UPLOADS, list(map(str, deep.uploads))
    check_budget(shallow, deep, depths(name), per_layer=DECODE_LAYER[name], rest=DECODE_REST[name])
    serve(engines[0], HostWeights(models[0]))


@pytest.mark.parametrize("name", BY_FAMILY)
def test_a_captured_decode_step_launches_no_layers(gpu: FakeCuda, name: str) -> None:
    model = fake_model(name, num_hidden_layers=depths(name)[1])
    engine = NativeEngine(model, NativeConfig(slots=4))
    engine.submit([request(str(i), range(5 + i), 9) for i in range(4)])
    for _ in range(3):
        engine.poll()
    with gpu.record() as trace:
        assert engine.poll() == []
    assert trace.kernels["graph"] == 1
    assert trace.num_kernels <= LAUNCHES, trace.table()
    assert len(trace.syncs) == 1, list(map(str, trace.syncs))


def test_a_prompt_longer_than_a_window_attends_in_a_kernel_without_a_matrix_of_scores(
    gpu: FakeCuda,
) -> None:
    engine = NativeEngine(fake_model("mistral"), NativeConfig(slots=4))
    engine.submit([request("long", range(3 * WINDOW), 2)])
    with gpu.record() as trace:
        engine.poll()
    assert any("efficient_attention" in kernel for kernel in trace.kernels)
    assert not any("attention_math" in kernel for kernel in trace.kernels)


def serve(engine: NativeEngine, weights: WeightSource) -> None:
    """New weights, prefill, slots that grow and move, decode, sampling of all kinds, an abort, and
    weights dropped.
    """
    engine.load_weights(weights, version=1)
    engine.submit([request(f"group {i}", range(20, 30), 1 + 2 * i) for i in range(3)])
    engine.submit(
        [
            request("nucleus", range(70), 3, top_p=0.7),
            request("greedy", range(4), 3, temperature=0.0),
        ]
    )
    engine.submit(
        [request("minimum", range(3), 3, min_new_tokens=2), request("aborted", range(5), 100)]
    )
    done: list[Generation] = []
    while len(done) < 6:
        done += engine.poll()
    assert sorted(len(each.token_ids) for each in done) == [1, 3, 3, 3, 3, 5]
    assert [each.finish for each in engine.abort(["aborted"])] == ["aborted"]
    # the prompts' prefix is shared
    engine.submit([request(f"shared {i}", [*range(40), i], 2) for i in range(3)])
    while engine.in_flight:
        engine.poll()
    engine.drop_weights()
    engine.load_weights(weights, version=2)


@dataclass(frozen=True)
class HostWeights:
    """Weights of zeros in main memory, as they come from a file."""

    model: PreTrainedModel

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter by name, in float32."""
        for name, weight in self.model.named_parameters():
            yield name, torch.zeros(weight.shape)


def depths(name: str) -> tuple[int, int]:
    """Two numbers of layers, each with equally many layers of each kind that the family has."""
    return (2, 4) if name in ("gemma3", "smollm3") else (1, 2)


def check_budget(
    shallow: Trace, deep: Trace, depths: tuple[int, int], *, per_layer: float, rest: float
) -> None:
    """Kernels are at most `per_layer` for each layer, and `rest` for everything else."""
    kernels = (deep.num_kernels - shallow.num_kernels) / (depths[1] - depths[0])
    assert kernels <= per_layer, deep.table()
    assert shallow.num_kernels - depths[0] * kernels <= rest, shallow.table()


# The update.


def policy_of(
    name: str,
    *,
    microbatch_tokens: int = 1000,
    loss: dict[str, Any] | None = None,
    recompute: bool = False,
    **options: Any,
) -> Policy:
    """A policy whose optimiser has its state, which the first update makes."""
    model = fake_model(name, **options)
    # then the policy does not compare it with plain attention, which takes a while
    use_packed_attention(model)
    fuse_layers(model)
    config = policy_config(microbatch_tokens=microbatch_tokens, loss=loss).changed(
        "train", recompute=recompute
    )
    policy = Policy(config, LoadedModel(model, loaded().tokenizer, (1,), name))
    policy._optimizer.measure()
    policy._optimizer.update(1e-3, {"squared_norm": 1.0})
    return policy


def update(gpu: FakeCuda, policy: Policy, samples: Sequence[Sample]) -> Trace:
    with gpu.record() as trace:
        policy.update(samples, step=1)
    return trace


def with_engine_logprobs(samples: Sequence[Sample]) -> list[Sample]:
    return [replace(each, engine_logprobs=(-1.0,) * len(each.response_ids)) for each in samples]


@pytest.mark.parametrize("name", BY_FAMILY)
def test_an_update_of_each_family_runs_on_a_gpu_within_its_budget(gpu: FakeCuda, name: str) -> None:
    samples = with_engine_logprobs(groups_of([(5, (3, 7, 4)), (12, (2, 20))]))
    traces = []
    for layers in depths(name):
        policy = policy_of(name, num_hidden_layers=layers)
        off_policy = policy.record_old_logprobs(samples)
        assert [len(each.old_logprobs or ()) for each in off_policy] == [3, 7, 4, 2, 20]
        traces.append(update(gpu, policy, off_policy))
    shallow, deep = traces
    assert len(deep.syncs) == len(shallow.syncs) <= UPDATE_SYNCS, list(map(str, deep.syncs))
    assert len(deep.uploads) <= UPDATE_UPLOADS[name], list(map(str, deep.uploads))
    check_budget(shallow, deep, depths(name), per_layer=UPDATE_LAYER[name], rest=UPDATE_REST[name])


def test_a_policy_compares_packed_with_plain_attention_on_a_gpu(gpu: FakeCuda) -> None:
    Policy(policy_config(), LoadedModel(fake_model("llama"), loaded().tokenizer, (1,), "llama"))


@pytest.mark.parametrize(
    "loss",
    [
        {"kl_coef": 0.01},
        {"entropy_coef": 0.01},
        {"engine_correction": "tis"},
        {"aggregate": "sequence", "dual_clip": 3.0},
    ],
    ids=str,
)
def test_no_term_of_the_loss_waits_for_the_device(gpu: FakeCuda, loss: dict[str, Any]) -> None:
    samples = with_engine_logprobs(groups_of([(5, (3, 7, 4)), (12, (2, 20))]))
    trace = update(gpu, policy_of("llama", loss=loss), samples)
    assert len(trace.syncs) <= UPDATE_SYNCS, list(map(str, trace.syncs))


def test_the_number_of_waits_does_not_depend_on_the_number_of_microbatches(gpu: FakeCuda) -> None:
    samples = with_engine_logprobs(groups_of([(5, (30, 40))] * 3))
    whole, cut = (
        update(gpu, policy_of("llama", microbatch_tokens=tokens), samples)
        for tokens in (10_000, 80)
    )
    assert cut.kernels["aten.embedding.default"] >= 3 * whole.kernels["aten.embedding.default"]
    assert len(cut.syncs) == len(whole.syncs), list(map(str, cut.syncs))


def test_the_head_of_a_microbatch_of_16384_tokens_launches_little(gpu: FakeCuda) -> None:
    """At the vocabulary of Qwen2.5; kernels that a microbatch of a few tokens does not launch."""
    small = groups_of([(100, (100,) * 4)])
    large = groups_of([(100, (4000,) * 4)])
    few, many = (
        update(gpu, policy_of("qwen2.5-1.5b", microbatch_tokens=16_384), each)
        for each in (small, large)
    )
    assert many.num_kernels - few.num_kernels <= HEAD_OF_16K, many.table()
    assert len(many.syncs) == len(few.syncs), list(map(str, many.syncs))


def test_recomputing_layers_runs_their_forward_once_more_and_waits_for_nothing(
    gpu: FakeCuda,
) -> None:
    samples = groups_of([(5, (30, 40))] * 3)
    kept, recomputed = (policy_of("llama", recompute=recompute) for recompute in (False, True))
    with saved_bytes(kept._model) as bytes_kept:
        once = update(gpu, kept, samples)
    with saved_bytes(recomputed._model) as bytes_recomputed:
        twice = update(gpu, recomputed, samples)
    attention = "torch_attn._varlen_attn.default"
    assert (once.kernels[attention], twice.kernels[attention]) == (2, 4)
    assert len(twice.syncs) == len(once.syncs), list(map(str, twice.syncs))
    assert bytes_recomputed() < bytes_kept()


def test_state_and_weights_leave_the_device_and_come_back(gpu: FakeCuda, tmp_path: Path) -> None:
    policy = policy_of("qwen3")
    for folder in ("saved", "copied"):
        (tmp_path / folder).mkdir()
    policy.save(tmp_path / "saved")
    policy.snapshot()(tmp_path / "copied")
    policy.load(tmp_path / "saved")
    engine = NativeEngine(fake_model("qwen3"), NativeConfig(slots=2))
    with gpu.record() as trace:
        engine.load_weights(policy.weights(version=1), version=1)
    assert not trace.downloads  # an engine on the same device takes them there
    assert not trace.uploads
