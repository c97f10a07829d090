"""What the native engine does on a GPU, computed on the CPU: fused layers, attention by lengths,
bounded memory.
"""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import PreTrainedModel

from dapo.config.rollout_options import NativeConfig, RolloutConfig
from dapo.engines.native import attention, decode_graphs
from dapo.engines.native.cache import LengthSlots, SlotCache
from dapo.engines.native.compatibility import patch_model
from dapo.engines.native.decode_graphs import padded_rows
from dapo.engines.native.device_memory import CACHE_SHARE, CudaMemory, cache_token_bound, step_bytes
from dapo.engines.native.engine import NativeEngine, open_native_engine
from dapo.engines.native.forward import Forward
from dapo.engines.native.fused_weight_layers import FusedWeightKernels
from dapo.engines.native.model_kernels import ModelKernels, model_kernels_for
from dapo.types import Generation, GenerationRequest
from helpers.fake_cuda import fake_cuda
from helpers.fake_memory import POSITION_BYTES, FakeMemory, bytes_for_cache
from helpers.fake_models import fake_model
from helpers.graph_tape import as_kernel, captured_on_cpu
from helpers.tiny_models import SERVED, WINDOW, ModelWeights, tiny_model
from helpers.varlen_operators import decode_attention

FUSED = [
    "llama",
    "tied llama",
    "qwen2",
    "qwen2 with windows",
    "qwen3",
    "mistral with a window",
    "smollm3",
    "gemma3",
]
"""Of `SERVED`, those whose layers are computed in few kernels; the others keep their own."""

MASKED = ModelKernels(fuses_weights=False)
BY_LENGTH = ModelKernels(fuses_weights=False, attend=decode_attention)
ON_GPU = ModelKernels(fuses_weights=True, attend=decode_attention, num_splits=1)

NORM_ROUNDING = 1e-5
"""Of models in float64 relative to their logits' spread: transformers computes their norms in
float32.
"""

SEQUENCES = [
    [(7 * i + 3 * i * i + seq) % 197 for i in range(length)]
    for seq, length in enumerate((15, 22, 9))
]
PREFILLED = (6, 13, 3)


def forward_of(
    name: str, model_kernels: ModelKernels, dtype: torch.dtype = torch.float64
) -> Forward:
    return patch_model(tiny_model(name, dtype=dtype), rows=4, model_kernels=model_kernels)


@torch.inference_mode()
def decoded(forward: Forward, *, moved: bool = False) -> list[Tensor]:
    """Logits of each of `SEQUENCES`, `[tokens after the prefill, vocabulary]`, decoded together as
    far as each goes.

    The cache is resized twice on the way. `moved`: the last row takes the place of the first that
    ends.
    """
    cache = forward.model_kernels.new_slots()
    cache.reserve(3, max(PREFILLED) + 1, 64)
    prefilled = forward.prefill([ids[:n] for ids, n in zip(SEQUENCES, PREFILLED, strict=True)])
    cache.store(prefilled.cache, [0, 1, 2], [0, 1, 2], max(PREFILLED))
    rows = [0, 1, 2]
    logits = [[prefilled.logits[i]] for i in range(3)]
    for step in range(max(map(len, SEQUENCES))):
        for row in reversed(
            [row for row, i in enumerate(rows) if PREFILLED[i] + step >= len(SEQUENCES[i])]
        ):
            last = rows.pop()
            if row < len(rows):
                cache.move([len(rows)], [row], PREFILLED[last] + step)
                rows[row] = last
        if not rows:
            break
        positions = [PREFILLED[i] + step for i in rows]
        cache.reserve(len(rows) + step % 2, max(positions) + 1, 64)
        found = forward.decode(
            cache, [SEQUENCES[i][p] for i, p in zip(rows, positions, strict=True)], positions
        )
        for row, i in enumerate(rows):
            logits[i].append(found[row])
    return [torch.stack(entries) for entries in logits]


@torch.inference_mode()
def plain_logits(model: PreTrainedModel) -> list[Tensor]:
    """The same logits of the model's own forward over whole sequences."""
    return [
        model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, n - 1 :]
        for ids, n in zip(SEQUENCES, PREFILLED, strict=True)
    ]


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference, relative to the spread of what is expected."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b.double()).abs().max() / b.double().std()) for a, b in pairs)


# --- attention by lengths ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVED)
def test_attention_by_lengths_is_attention_under_masks(name: str) -> None:
    # rows of different lengths, moved and resized; three of the models have a sliding window
    # shorter than the rows
    assert distance(decoded(forward_of(name, BY_LENGTH)), decoded(forward_of(name, MASKED))) < 1e-10


@pytest.mark.parametrize("name", ["gemma3", "smollm3"])
def test_fused_layers_attend_by_lengths_as_under_masks(name: str) -> None:
    masked = decoded(forward_of(name, replace(ON_GPU, attend=None)))
    assert distance(decoded(forward_of(name, ON_GPU)), masked) < 1e-10


def test_the_kernels_window_leaves_out_the_querys_own_position_and_full_layers_have_none() -> None:
    windows: list[tuple[int, int]] = []
    splits = set()

    def recording(*args: Any, **kwargs: Any) -> Tensor:
        windows.append(kwargs["window_size"])
        splits.add(kwargs["num_splits"])
        return decode_attention(*args, **kwargs)

    decoded(forward_of("gemma3", replace(ON_GPU, attend=recording)))
    assert windows[:2] == [(WINDOW - 1, 0), (-1, -1)]
    assert set(windows) == set(windows[:2])
    assert splits == {1}


def test_a_row_is_one_sequence_in_memory() -> None:
    forward = forward_of("llama", ON_GPU)
    cache = forward.model_kernels.new_slots()
    cache.reserve(2, 9, 9)
    with torch.inference_mode():
        prefilled = forward.prefill([[1, 2, 3], [4, 5, 6]])
    cache.store(prefilled.cache, [0, 1], [0, 1], 3)
    assert [tensor.shape for tensor in cache.tensors] == [(2, 9, 4, 8)] * 2
    for tensor, keys, values in zip(
        cache.tensors, prefilled.cache.keys, prefilled.cache.values, strict=True
    ):
        assert torch.equal(tensor[:, :3, :2].transpose(1, 2), keys)
        assert torch.equal(tensor[:, :3, 2:].transpose(1, 2), values)


def test_the_processor_and_float32_keep_masks() -> None:
    assert model_kernels_for(tiny_model("llama"), reproducible=True) == MASKED
    assert model_kernels_for(tiny_model("llama", dtype=torch.bfloat16), reproducible=True) == MASKED


def test_attention_of_cudnn_is_off_once_the_engine_has_registered_its_own() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    attention.register()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


# --- fused layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "attend"),
    [*((name, decode_attention) for name in FUSED), ("llama", None), ("gemma3", None)],
)
def test_fused_layers_compute_what_the_model_does(name: str, attend: Any) -> None:
    model = tiny_model(name, dtype=torch.float64)
    expected = plain_logits(copy.deepcopy(model))
    forward = patch_model(model, rows=4, model_kernels=replace(ON_GPU, attend=attend))
    assert all("forward" in vars(layer) for layer in model.base_model.layers)
    assert distance(decoded(forward), expected) < NORM_ROUNDING


@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_round_no_more_than_the_model_does(name: str) -> None:
    exact = plain_logits(tiny_model(name, dtype=torch.bfloat16).double())
    plain = plain_logits(tiny_model(name, dtype=torch.bfloat16))
    fused = decoded(forward_of(name, ON_GPU, torch.bfloat16))
    error = [
        float(
            torch.cat(
                [(a.double() - b).abs().flatten() for a, b in zip(logits, exact, strict=True)]
            ).mean()
        )
        for logits in (fused, plain)
    ]
    assert error[0] < 1.1 * error[1]


def test_a_norm_that_multiplies_with_one_more_than_its_weight_does_not_round_the_sum() -> None:
    model = tiny_model("gemma3", dtype=torch.bfloat16)
    layer: Any = model.base_model.layers[0]
    weight = layer.post_attention_layernorm.weight
    weight.requires_grad_(False).fill_(0.0117)  # of 1.0117 bfloat16 makes 1.0078
    states = torch.randn(1000, 1, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        expected = layer.post_attention_layernorm(layer.self_attn.o_proj(states).double())
        found = FusedWeightKernels(layer).add_attention(torch.zeros_like(states), states).double()
        scale = float((found * expected).sum() / expected.square().sum())
    assert scale == pytest.approx(1, abs=1.5e-3)


@pytest.mark.parametrize("name", FUSED)
def test_new_weights_are_those_of_the_fused_layers(name: str) -> None:
    forward = forward_of(name, ON_GPU)
    new = tiny_model(name, dtype=torch.float64, seed=1)
    forward.load_weights(ModelWeights(new))
    assert distance(decoded(forward), plain_logits(new)) < NORM_ROUNDING


@pytest.mark.parametrize("name", ["tied llama", "qwen2", "gemma3"])
def test_dropped_weights_take_no_memory_and_come_back_with_the_next_load(name: str) -> None:
    forward = forward_of(name, ON_GPU)
    before = decoded(forward)
    for _ in range(2):
        forward.drop_weights()
        assert sum(p.untyped_storage().nbytes() for p in forward.model.parameters()) == 0
    forward.load_weights(ModelWeights(tiny_model(name, dtype=torch.float64)))
    assert distance(decoded(forward), before) == 0.0


def test_fused_weights_take_no_memory_of_their_own() -> None:
    model = tiny_model("qwen2", dtype=torch.float64)
    sizes = sum(p.numel() * p.element_size() for p in model.parameters())
    patch_model(model, rows=4, model_kernels=ON_GPU)
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    assert sum(storages.values()) == sizes
    products = model.base_model.layers[0].self_attn
    assert (
        products.q_proj.weight.untyped_storage().data_ptr()
        == products.v_proj.weight.untyped_storage().data_ptr()
    )


def test_a_gpu_computes_fused_layers_and_attends_by_lengths_where_a_kernel_does() -> None:
    def chosen(dtype: torch.dtype, *, reproducible: bool = True, **options: Any) -> ModelKernels:
        return model_kernels_for(
            fake_model("llama", dtype=dtype, **options), reproducible=reproducible
        )

    masked = ModelKernels(fuses_weights=True)
    with fake_cuda():
        assert chosen(torch.bfloat16) == replace(
            masked, attend=varlen_attn, num_splits=1, captures=True
        )
        assert chosen(torch.float16, reproducible=False) == replace(
            masked, attend=varlen_attn, captures=True
        )
        assert chosen(torch.float32) == masked
        assert chosen(torch.bfloat16, head_dim=20) == masked  # not a multiple of 8
        for clock, splits in (("history", 1), (None, 1), ("load", None)):
            model: Any = fake_model("llama", dtype=torch.bfloat16)
            engine = open_native_engine(RolloutConfig(clock=clock), model)
            assert engine._forward.model_kernels.num_splits == splits


# --- the engine -------------------------------------------------------------------------------------------------------


def requests(count: int, **options: Any) -> list[GenerationRequest]:
    base = GenerationRequest(
        id="",
        prompt_ids=(11, 42, 7),
        max_new_tokens=12,
        temperature=1.0,
        top_p=1.0,
        seed=0,
        stop_ids=(5,),
    )
    return [replace(base, id=f"r{i}", seed=i, **options) for i in range(count)]


def run(engine: NativeEngine, asked: Sequence[GenerationRequest]) -> dict[str, Generation]:
    engine.submit(asked)
    found: dict[str, Generation] = {}
    while len(found) < len(asked):
        found |= {g.request_id: g for g in engine.poll()}
    return found


@pytest.mark.parametrize("name", ["llama", "qwen2 with windows", "gemma3"])
def test_the_engine_samples_the_same_tokens_with_either_kernels(name: str) -> None:
    asked = [
        replace(
            r,
            prompt_ids=r.prompt_ids * (1 + i % 3),
            max_new_tokens=5 + 4 * (i % 4),
            top_p=0.9 if i % 2 else 1.0,
        )
        for i, r in enumerate(requests(9))
    ]
    engines = [
        NativeEngine(
            tiny_model(name, dtype=torch.float64),
            NativeConfig(slots=4),
            model_kernels=model_kernels,
        )
        for model_kernels in (MASKED, ON_GPU)
    ]
    masked, on_gpu = (run(engine, asked) for engine in engines)
    assert {i: g.token_ids for i, g in masked.items()} == {
        i: g.token_ids for i, g in on_gpu.items()
    }
    for i, generation in masked.items():
        assert generation.logprobs == pytest.approx(on_gpu[i].logprobs, abs=1e-4)


def test_the_cache_gets_its_share_of_the_memory_that_a_step_leaves() -> None:
    assert (
        cache_token_bound(10_000, position_bytes=10, step_bytes=2_000)
        == int(CACHE_SHARE * 8_000) // 10
    )
    assert cache_token_bound(1_000, position_bytes=10, step_bytes=2_000) == 1


def test_processes_that_share_a_gpu_divide_what_is_free() -> None:
    with fake_cuda():
        device = torch.device("cuda")
        assert (
            CudaMemory(device, processes=3).free_bytes() == CudaMemory(device).free_bytes() // 3 > 0
        )


def test_a_step_needs_the_larger_of_sampling_and_prefill() -> None:
    sizes = {"position_bytes": 100, "hidden": 20, "intermediate": 30, "width": 2}
    assert step_bytes(slots=10, vocabulary=1000, prefill_tokens=1, **sizes) == 3 * 4 * 10 * 1000
    assert step_bytes(slots=1, vocabulary=1, prefill_tokens=7, **sizes) == 7 * (
        2 * 100 + 4 * 50 * 2
    )


# --- decode steps as graphs -------------------------------------------------------------------------------------------


CAPTURED = replace(ON_GPU, attend=as_kernel(decode_attention), captures=True)


@pytest.mark.parametrize("name", FUSED)
def test_captured_steps_compute_what_the_model_does(name: str) -> None:
    with captured_on_cpu() as captured:
        forward = forward_of(name, CAPTURED)
        assert len(captured) == 1  # where the engine compares its logits with the model's
        expected = plain_logits(tiny_model(name, dtype=torch.float64))
        assert distance(decoded(forward), expected) < NORM_ROUNDING
    assert len(captured) > 1  # the cache has been resized


@pytest.mark.parametrize("name", ["llama", "qwen2 with windows", "gemma3"])
def test_the_engine_samples_the_same_tokens_with_captured_steps_after_new_weights(
    name: str,
) -> None:
    asked = [
        replace(r, prompt_ids=r.prompt_ids * (1 + i % 3), max_new_tokens=9 + 4 * (i % 4))
        for i, r in enumerate(requests(30))
    ]
    found = []
    for model_kernels in (ON_GPU, CAPTURED):
        with captured_on_cpu() as captured:
            model = tiny_model(name, dtype=torch.float64)
            engine = NativeEngine(
                model, NativeConfig(slots=20), model_kernels=model_kernels, memory=FakeMemory()
            )
            first = run(engine, asked)
            engine.drop_weights()
            engine.load_weights(ModelWeights(tiny_model(name, dtype=torch.float64, seed=1)), 1)
            found.append((first, run(engine, asked)))
        assert bool(captured) == model_kernels.captures
    assert [{i: g.token_ids for i, g in run.items()} for run in found[0]] == [
        {i: g.token_ids for i, g in run.items()} for run in found[1]
    ]
    assert found[0][0].keys() == found[0][1].keys()
    assert found[0][0]["r0"].token_ids != found[0][1]["r0"].token_ids


@torch.inference_mode()
def decoded_while_the_cache_grows(model_kernels: ModelKernels) -> list[Tensor]:
    """Logits of eight rows that grow three times; each time a row becomes a copy of the first."""
    forward = forward_of("llama", model_kernels)
    logits = []
    cache = forward.model_kernels.new_slots()
    cache.reserve(8, 3, 3)
    prefilled = forward.prefill([[11 * row, 2, 3] for row in range(8)])
    cache.store(prefilled.cache, range(8), range(8), 3)
    for length in range(3, 15):
        if length % 4 == 3:
            cache.reserve(8, length + 4, length + 4)
            cache.move([0], [length // 4 + 1], length)
        logits.append(forward.decode(cache, [7 * length] * 8, [length] * 8))
    cache.release()
    assert cache.graphs is None or cache.graphs._graphs == {}  # which hold memory
    return logits


def test_a_step_is_captured_again_where_the_cache_has_grown() -> None:
    with captured_on_cpu() as captured:
        assert (
            distance(decoded_while_the_cache_grows(CAPTURED), decoded_while_the_cache_grows(ON_GPU))
            == 0.0
        )
    assert len(captured) == 1 + 3


def test_memory_that_is_cached_is_free_before_a_capture_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a capture torch allocates from the GPU alone, which has not what the process keeps for
    other tensors.
    """
    order: list[str] = []
    graph = Mock()
    graph.capture_begin = lambda *_, **__: order.append("begin")
    graph.capture_end = lambda: order.append("end")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("empty"))
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(decode_graphs, "_capture_stream", Mock())
    _, output = decode_graphs.capture(lambda: order.append("compute") or torch.ones(1), (0, 0))
    assert output == 1
    assert order == ["empty", "begin", "compute", "end"]


def test_a_model_of_which_layers_are_not_fused_is_not_captured() -> None:
    with captured_on_cpu() as captured:
        assert not forward_of("gemma", CAPTURED).model_kernels.captures
    assert captured == []


def test_a_graph_serves_up_to_an_eighth_more_rows_than_there_are() -> None:
    padded = [padded_rows(n) for n in range(1, 1025)]
    assert all(n <= rows < n + max(8, n / 7) for n, rows in enumerate(padded, 1))
    assert padded == sorted(padded)
    assert len(set(padded[:256])) == 24
    assert len(set(padded)) == 40


def test_what_does_not_fit_the_free_memory_waits_and_memory_is_measured_again_each_time() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    memory = FakeMemory()
    engine = NativeEngine(model, NativeConfig(slots=8), model_kernels=ON_GPU, memory=memory)
    for sequences in (3, 5, 1):
        memory.free = bytes_for_cache(sequences * 15, slots=8)  # 3 + 12 positions each
        before = engine.stats
        run(engine, requests(8, stop_ids=()))
        steps = engine.stats.decode_steps - before.decode_steps
        assert engine.stats.decode_slot_steps - before.decode_slot_steps == 8 * 11
        assert steps == 11 * -(-8 // sequences)
        assert engine.stats.cache_bytes_peak <= max(5 * 15, sequences * 15) * POSITION_BYTES


def test_memory_is_given_back_when_nothing_runs_and_when_weights_are_dropped() -> None:
    memory = FakeMemory()
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=4), memory=memory)
    engine.submit(requests(2, stop_ids=()))
    engine.poll()
    assert memory.returned == 0
    while engine.in_flight:
        engine.poll()
    assert (memory.returned, engine.cache_bytes) == (1, 0)
    engine.poll()
    assert memory.returned == 1
    engine.drop_weights()
    assert memory.returned == 2


def test_rows_grow_by_half_where_copying_is_to_stay_rare() -> None:
    cache: SlotCache = LengthSlots(decode_attention, num_splits=1)
    sizes = []
    for rows in range(1, 30):
        cache.reserve(rows, 10, 100, max_rows=27)
        sizes.append(cache.rows)
    assert sorted(set(sizes)) == [1, 2, 3, 4, 6, 9, 13, 19, 27, 28, 29]
