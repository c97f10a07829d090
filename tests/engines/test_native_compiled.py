"""The native engine with `cpu_kernels` between its products: the same distributions, prompts read
once, recorded.
"""

import copy
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dapo.config.rollout_options import NativeConfig
from dapo.core.errors import EngineError
from dapo.engines.native.compatibility import patch_model
from dapo.engines.native.engine import NativeEngine
from dapo.engines.native.linear_probe import linear_shapes, resolve_kernels
from dapo.libs import cpu_kernels
from dapo.libs.cpu_kernels.prepacked import COMPILED, LAYERS, shape_name
from dapo.types import GenerationRequest
from helpers import tiny_models
from helpers.fake_engines import answers
from helpers.tiny_models import SERVED, tiny_model

# of the largest, and of the mean difference in nats
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.1}
KERNELS = {LAYERS: COMPILED}
PROMPT = tuple((7 * i + 3 * i * i) % 197 for i in range(40))
PROMPTS = {PROMPT: 5, (*PROMPT, 3): 4, (5, 5, 120): 3}


@pytest.fixture(autouse=True)
def wide_heads(monkeypatch: pytest.MonkeyPatch):
    """Of the narrowest width that the kernels serve."""
    monkeypatch.setitem(tiny_models.COMMON, "head_dim", 32)
    monkeypatch.setitem(tiny_models.COMMON, "hidden_size", 192)


def requests(**options: object) -> list[GenerationRequest]:
    settings: dict = {
        "max_new_tokens": 30,
        "temperature": 0.9,
        "top_p": 1.0,
        "stop_ids": (),
        **options,
    }
    return [
        GenerationRequest(id=f"{p}/{i}", prompt_ids=prompt, seed=10 * p + i, **settings)
        for p, (prompt, size) in enumerate(PROMPTS.items())
        for i in range(size)
    ]


@pytest.mark.needs_kernels
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in SERVED),
        *((name, torch.bfloat16) for name in ("llama", "qwen3", "gemma3")),
    ],
)
def test_each_log_probability_is_the_plain_models(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    calls: list[bool] = []
    attend = cpu_kernels.attend

    def counted(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        calls.append(arguments[2].prompts is not None)
        return attend(query, *arguments)

    monkeypatch.setattr("dapo.engines.native.attention.attend", counted)
    model = tiny_model(name, dtype=dtype)
    plain = copy.deepcopy(model).double()
    done = answers(
        NativeEngine(model, NativeConfig(slots=8, kernels=KERNELS)), submitted := requests()
    )
    has_windows = "window" in name or name == "gemma3"
    assert calls
    assert any(calls) != has_windows  # prompts are shared where every layer sees all of them
    with torch.inference_mode():
        for each in submitted:
            tokens = done[each.id].token_ids
            logits = plain(input_ids=torch.tensor([[*each.prompt_ids, *tokens]])).logits[
                0, len(each.prompt_ids) - 1 : -1
            ]
            log_p = (logits / each.temperature).log_softmax(-1)
            expected = log_p[torch.arange(len(tokens)), torch.tensor(tokens)]
            difference = (torch.tensor(done[each.id].logprobs) - expected).abs()
            assert (
                float(difference.max() if dtype == torch.float32 else difference.mean())
                < TOLERANCE[dtype]
            )


@pytest.mark.needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "tied llama", "qwen2", "qwen3"])
def test_all_layers_in_one_call_give_the_bits_of_single_calls(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    if not cpu_kernels.can_multiply(dtype):
        pytest.skip("this processor does not multiply pairs of bfloat16")
    shapes = linear_shapes(tiny_model(name))
    compiled = {LAYERS: COMPILED} | {shape_name(*shape): COMPILED for shape in shapes}
    steps: list[int] = []
    decode_ = cpu_kernels.decode_

    def counted(hidden: torch.Tensor, *arguments: Any) -> torch.Tensor:
        steps.append(len(hidden))
        return decode_(hidden, *arguments)

    def sampled() -> dict[str, Any]:
        return answers(
            NativeEngine(tiny_model(name, dtype=dtype), NativeConfig(slots=8, kernels=compiled)),
            requests(),
        )

    monkeypatch.setattr("dapo.engines.native.fused_layers.decode_", counted)
    together = sampled()
    assert max(steps) == 8
    monkeypatch.setattr("dapo.engines.native.forward.CompiledDecoder.of", lambda backbone: None)
    count = len(steps)
    assert sampled() == together
    assert len(steps) == count


@pytest.mark.needs_kernels
@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.9}, {"temperature": 0.0}, {"min_new_tokens": 4, "stop_ids": (3,)}]
)
def test_a_response_is_the_same_alone_and_among_others(options: dict):
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=16, kernels=KERNELS))
    submitted = [each for each in requests(**options) if len(each.prompt_ids) < 32]
    together = answers(
        engine, [*submitted, *(each for each in requests(**options) if each not in submitted)]
    )
    for each in submitted:
        alone = answers(engine, [each])[each.id]
        assert alone.token_ids == together[each.id].token_ids
        # the products of a layer may round differently for another number of rows
        assert alone.logprobs == pytest.approx(together[each.id].logprobs, abs=1e-5)


@pytest.mark.needs_kernels
def test_dropped_weights_are_freed_with_those_of_all_layers_in_one_call():
    model = tiny_model("llama", dtype=torch.float32)
    compiled = KERNELS | {shape_name(*shape): COMPILED for shape in linear_shapes(model)}
    engine = NativeEngine(model, NativeConfig(slots=4, kernels=compiled))
    decoder = engine._forward._decoder
    assert decoder is not None
    assert decoder.layers is not None
    packed = [
        weakref.ref(weight)
        for layer in decoder.layers._layers
        for weight in layer
        if weight is not None
    ]
    engine.drop_weights()
    gc.collect()
    kept = {id(weight) for weight in model.parameters()}
    assert [
        weight for each in packed if (weight := each()) is not None and id(weight) not in kept
    ] == []
    tensors = {
        name: weight.detach().clone()
        for name, weight in model.named_parameters(remove_duplicate=False)
    }
    engine.load_weights(SimpleNamespace(named_tensors=tensors.items), version=1)
    assert decoder.layers is not None


@pytest.mark.needs_kernels
def test_a_run_records_compiled_layers_and_one_without_them_does_not_use_them(
    monkeypatch: pytest.MonkeyPatch,
):
    model = tiny_model("llama")
    recorded = resolve_kernels(NativeConfig(), model, dtype=torch.float32, device="cpu").kernels
    assert recorded is not None
    assert recorded[LAYERS] == COMPILED
    for dtype, device in ((torch.float64, "cpu"), (torch.bfloat16, "cuda")):
        assert LAYERS not in (
            resolve_kernels(NativeConfig(), model, dtype=dtype, device=device).kernels or {}
        )
    monkeypatch.setattr("dapo.engines.native.attention.attend", None)
    monkeypatch.setattr("dapo.libs.cpu_kernels.sample", None)
    assert answers(NativeEngine(tiny_model("llama"), NativeConfig(slots=8, kernels={})), requests())


def test_a_run_with_compiled_layers_needs_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu_kernels, "library", lambda: None)
    assert (
        LAYERS
        not in resolve_kernels(
            NativeConfig(), tiny_model("llama"), dtype=torch.float32, device="cpu"
        ).kernels
    )
    with pytest.raises(
        EngineError, match=r"rollout\.native\.kernels: the run uses compiled layers.*C\+\+ compiler"
    ):
        patch_model(tiny_model("llama"), rows=4, kernels=KERNELS)
