"""Packed attention by the kernel for variable lengths, which a CPU lacks: by its formulas it is
PyTorch's attention.
"""

import inspect
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AttentionInterface,
    PreTrainedModel,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from dapo.policy.logprobs import token_logprobs
from dapo.policy.packed_attention import PackedAttentionPlan, packed_attention
from dapo.policy.packed_forward import recompute_layers, use_packed_forward
from dapo.policy.packing import pack
from dapo.policy.varlen_attention import (
    attends_by_varlen,
    build_varlen_plan,
    padded_attention_notes,
    supports_varlen,
    varlen_attention,
)
from helpers.fake_cuda import fake_cuda
from helpers.paths import ROOT
from helpers.tiny_models import COMMON, randomised
from helpers.tiny_policies import (
    assert_close,
    branching,
    gradient_of,
    groups_of,
    loaded,
    make_policy,
    ragged,
    sample,
)
from helpers.varlen_operators import varlen_on_cpu

EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-10}

LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=4)
GROUPS = st.lists(st.tuples(st.integers(1, 6), LENGTHS), min_size=1, max_size=3)
"""The length of each group's prompt, and those of its responses."""


@pytest.fixture(autouse=True, scope="module")
def operators() -> Iterator[None]:
    with varlen_on_cpu():
        yield


def plan_of(groups: list[tuple[int, list[int]]]) -> PackedAttentionPlan:
    (microbatch,) = pack(groups_of(groups), max_tokens=10_000)
    return microbatch.attention_plan


def states_of(plan: PackedAttentionPlan, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """Query, key and value of one layer, `[1, heads, T, 8]`, and a gradient of its output."""
    num_tokens = sum(segment.length for segment in plan.segments)
    generator = torch.Generator().manual_seed(0)

    def random(num_heads: int) -> Tensor:
        # the layout of a layer: tokens before heads in memory
        return torch.randn(
            1, num_tokens, num_heads, 8, generator=generator, dtype=torch.float64
        ).transpose(1, 2)

    return random(heads), random(kv_heads), random(kv_heads), random(heads).transpose(1, 2)


def rows(states: Tensor) -> Tensor:
    """`[1, heads, T, d]` -> `[T, heads, d]`."""
    return states[0].transpose(0, 1)


@settings(max_examples=30)
@given(
    groups=GROUPS,
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    window=st.none() | st.integers(1, 14),
    keys_per_call=st.sampled_from([1, 20, 10_000]),
)
def test_outputs_and_gradients_are_those_of_padded_attention(
    groups: list[tuple[int, list[int]]],
    heads: tuple[int, int],
    window: int | None,
    keys_per_call: int,
) -> None:
    plan = plan_of(groups)
    *inputs, upstream = states_of(plan, *heads)
    query, key, value = (states.requires_grad_() for states in inputs)
    expected, _ = packed_attention(
        torch.nn.Identity(),
        query,
        key,
        value,
        None,
        0.3,
        sliding_window=window,
        packed_attention_plan=plan,
    )
    calls = build_varlen_plan(plan.segments, plan.device, window, keys_per_call=keys_per_call)
    found = varlen_attention(rows(query), rows(key), rows(value), calls, scale=0.3).unsqueeze(0)
    torch.testing.assert_close(found, expected, **EXACT)
    gradients = [
        torch.autograd.grad(out, (query, key, value), upstream) for out in (found, expected)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


def test_calls_are_cut_at_a_number_of_keys_and_cover_the_stream_in_order() -> None:
    prompt = tuple(range(20, 60))
    other = (1, 2, 3)
    samples = [sample(0, prompt, range(100 * i, 100 * i + n)) for i, n in ((1, 9), (2, 8), (3, 7))]
    samples += [sample(1, other, (4, 5, 6, 7, 8)), sample(1, other, (4, 6, 7, 8, 9))]
    (microbatch,) = pack(samples, max_tokens=10_000)
    segments = microbatch.attention_plan.segments
    # keys with all context; the last token of a response is no input
    assert [len(segment.keys) for segment in segments] == [7, 4 + 3, 48, 40 + 7, 40 + 6]
    calls = build_varlen_plan(segments, torch.device("cpu"), None, keys_per_call=70).calls
    assert [len(call.keys) for call in calls] == [7 + 7 + 48, 47, 46]
    assert [(call.rows.start, call.rows.stop) for call in calls] == [(0, 58), (58, 65), (65, 71)]
    # a window of 4 keys sees 3 tokens of the context
    (windowed,) = build_varlen_plan(segments, torch.device("cpu"), 4, keys_per_call=1_000).calls
    assert windowed.cu_keys.diff().tolist() == [7, 6, 48, 10, 9]
    assert windowed.keys[7:13].tolist() == [1, 2, 3, 7, 8, 9]
    assert windowed.keys[61:71].tolist() == [47, 48, 49, *range(58, 65)]


def test_a_window_that_holds_every_sequence_shares_the_plan_of_no_window() -> None:
    plan = plan_of([(5, [4])])
    assert plan.varlen(8) is plan.varlen(None)
    assert plan.varlen(7) is not plan.varlen(None)


def test_gradients_of_a_shared_prompt_are_added_up_in_float32() -> None:
    """In bfloat16 a sum of equal numbers stops at 256 of them."""
    responses = 400
    (microbatch,) = pack([sample(0, (0,), (i + 1, 0)) for i in range(responses)], max_tokens=10_000)
    plan = microbatch.attention_plan
    assert len(plan.segments) == responses
    query, key, value, upstream = (
        torch.ones(responses + 1, 1, 8, dtype=torch.bfloat16) for _ in range(4)
    )
    value[1:] = 3
    upstream[0] = 0
    key.requires_grad_()
    value.requires_grad_()
    varlen_attention(query, key, value, plan.varlen(None), scale=None).backward(upstream)
    assert value.grad is not None
    assert key.grad is not None
    # each response has one token, which looks at the prompt's and at itself with weights of 1/2
    assert value.grad[0].unique().item() == pytest.approx(responses / 2, rel=2**-8)
    assert key.grad[0].unique().item() == pytest.approx(
        -float(key.grad[1, 0, 0]) * responses, rel=2**-7
    )


def varlen_everywhere(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention function of a model that attends as on a GPU."""
    plan = options["packed_attention_plan"].varlen(options["sliding_window"])
    return (
        varlen_attention(
            rows(query), rows(key), rows(value), plan, scale=options["scaling"]
        ).unsqueeze(0),
        None,
    )


def exact_model(window: int | None) -> PreTrainedModel:
    options: dict[str, Any] = COMMON | {
        "head_dim": None,
        "pad_token_id": None,
        "sliding_window": window,
    }
    return randomised(Starcoder2ForCausalLM(Starcoder2Config(**options)), 0).double().eval()


@pytest.mark.parametrize(("window", "recompute"), [(None, False), (7, True)])
def test_a_whole_model_has_the_same_logprobs_and_gradients(
    window: int | None, recompute: bool, tmp_path: Path
) -> None:
    AttentionInterface.register("varlen_everywhere", varlen_everywhere)
    samples = ragged() + [replace(each, group_id=9 + each.group_id) for each in branching()]
    logprobs = []
    gradients = []
    for name in ("dapo_packed", "varlen_everywhere"):
        model = exact_model(window)
        use_packed_forward(model)
        if recompute:
            recompute_layers(model)
        policy = make_policy(loaded(model), loss={"entropy_coef": 0.01})
        model.set_attn_implementation(name)
        logprobs.append(
            torch.cat(
                [token_logprobs(model, m, temperature=1.0) for m in pack(samples, max_tokens=64)]
            )
        )
        gradients.append(gradient_of(policy, samples, tmp_path / name))
    torch.testing.assert_close(*logprobs, **EXACT)
    assert_close(gradients[1], gradients[0], relative=1e-10)


@pytest.mark.parametrize(
    ("dtype", "width", "capability", "supported"),
    [
        (torch.bfloat16, 128, (9, 0), True),
        (torch.float16, 64, (8, 0), True),
        (torch.bfloat16, 256, (12, 0), True),
        (torch.bfloat16, 208, (8, 9), False),
        (torch.bfloat16, 264, (9, 0), False),
        (torch.bfloat16, 100, (9, 0), False),
        (torch.bfloat16, 128, (7, 5), False),
        (torch.float32, 128, (9, 0), False),
    ],
)
def test_the_kernel_serves_16_bit_types_on_gpus_since_ampere_in_its_head_widths(
    dtype: torch.dtype, width: int, capability: tuple[int, int], supported: bool
) -> None:
    assert supports_varlen(dtype, width, capability) is supported


def test_the_lowest_pytorch_that_the_package_allows_has_the_arguments_that_are_used() -> None:
    from torch.nn.attention.varlen import varlen_attn

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "torch>=2.13" in project["dependencies"]
    # what this test looks at; a newer one is another version to look at
    assert torch.__version__.startswith("2.13.")
    assert {"seqused_k", "num_splits", "enable_gqa", "window_size"} <= set(
        inspect.signature(varlen_attn).parameters
    )
    operators = torch.ops.torch_attn._varlen_attn, torch.ops.torch_attn._varlen_attn_backward
    forward, backward = (
        {a.name for a in operator.default._schema.arguments} for operator in operators
    )
    assert {"window_size", "enable_gqa"} <= forward
    assert "window_size" in backward


def test_16_bits_on_a_gpu_without_the_kernel_are_warned_of() -> None:
    (note,) = padded_attention_notes(torch.bfloat16, "cuda", (7, 5))
    assert note.startswith(
        "warning: model.dtype=bfloat16 on a GPU of compute capability 7.5, below 8.0: bfloat16 is "
    )
    for dtype, device, capability in (
        (torch.bfloat16, "cuda", (8, 0)),
        (torch.bfloat16, "cuda", None),
        (torch.float32, "cuda", (7, 5)),
        (torch.bfloat16, "cpu", None),
    ):
        assert padded_attention_notes(dtype, device, capability) == []


def test_layers_choose_the_kernel_on_a_gpu_only_and_for_states_of_one_width() -> None:
    states = torch.empty(5, 4, 64, dtype=torch.bfloat16)
    assert not attends_by_varlen(states, states)
    with fake_cuda():
        query, narrow = (
            torch.empty(5, 4, width, dtype=torch.bfloat16, device="cuda") for width in (64, 32)
        )
        assert attends_by_varlen(query, query)
        assert not attends_by_varlen(query, narrow)
        assert not attends_by_varlen(query.float(), query.float())
