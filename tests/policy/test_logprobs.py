"""Log-probabilities and entropies: packed and chunked they are what a plain forward gives, and
nothing large exists.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, Lfm2Config, Lfm2ForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dapo.core.errors import ConfigError
from dapo.libs.cpu_kernels import is_compiled
from dapo.policy.logprobs import (
    CHUNK_LOGITS,
    chunk_bytes,
    chunk_tokens,
    chunks,
    hidden_states,
    score_tokens,
    token_logprobs,
)
from dapo.policy.packed_attention import (
    IMPLEMENTATION,
    UNSUPPORTED_ARGUMENTS,
    PackedAttentionPlan,
    packed_attention,
    use_packed_attention,
)
from dapo.policy.packed_forward import check_packed_forward, use_packed_forward
from dapo.policy.packing import Microbatch, in_callers_order, pack
from dapo.policy.segments import Segment
from dapo.types import Sample
from helpers.fake_cuda import fake_cuda
from helpers.products import params_of_product
from helpers.tiny_models import REFUSED, SERVED, llama, randomised, tiny_model
from helpers.tiny_policies import (
    branching,
    float64_model,
    groups_of,
    ids,
    loaded,
    make_policy,
    plain_scores,
    ragged,
    sample,
)

CHECKED_TYPES = (torch.bfloat16, torch.float32, torch.float64)


def packed_scores(
    model: PreTrainedModel, samples: list[Sample], *, max_tokens: int, temperature: float = 1.0
) -> tuple[list[Microbatch], list[Tensor], list[Tensor]]:
    """Microbatches with their differentiable log-probabilities and entropies, in the order of their
    targets.
    """
    microbatches = pack(samples, max_tokens=max_tokens)
    head: Any = model.get_output_embeddings()
    options: dict[str, Any] = {"temperature": temperature, "differentiable_entropy": True}
    pairs = [
        score_tokens(hidden_states(model, m), head, m.targets, m.rows, **options)
        for m in microbatches
    ]
    entropies = [of_rows[m.rows] for m, (_, of_rows) in zip(microbatches, pairs, strict=True)]
    return microbatches, [logprobs for logprobs, _ in pairs], entropies


def padded_scores(model: PreTrainedModel, samples: list[Sample]) -> list[Tensor]:
    """By the model's own forward over one right-padded batch."""
    rows = [row.prompt_ids + row.response_ids for row in samples]
    width = max(map(len, rows))
    tokens = torch.tensor([row + (0,) * (width - len(row)) for row in rows])
    present = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    log_p = model(input_ids=tokens, attention_mask=present, use_cache=False).logits.log_softmax(
        dim=-1
    )
    return [
        log_p[i, range(len(row.prompt_ids) - 1, len(rows[i]) - 1), torch.tensor(row.response_ids)]
        for i, row in enumerate(samples)
    ]


def weighted_sum_gradients(model: PreTrainedModel, scores: list[Tensor]) -> list[Tensor]:
    """Of a sum in which every token has a weight of its own."""
    flat = torch.cat(scores)
    total = (flat * torch.linspace(-1, 2, len(flat), dtype=flat.dtype)).sum()
    return list(torch.autograd.grad(total, list(model.parameters()), retain_graph=True))


def assert_all_forwards_agree(
    plain: PreTrainedModel, model: PreTrainedModel, tolerance: float
) -> None:
    """`model` packed, `plain` padded and `plain` on single sequences; the two hold the same
    weights.
    """
    samples = ragged()[:7] + [replace(each, group_id=9 + each.group_id) for each in branching()]
    single = [logprobs for logprobs, _ in plain_scores(plain, samples)]
    for together, alone in zip(padded_scores(plain, samples), single, strict=True):
        torch.testing.assert_close(together, alone, rtol=0, atol=tolerance)
    use_packed_forward(model)
    for max_tokens in (1, 60, 10_000):  # one at a time; groups cut apart; each prompt once
        microbatches, scores, _ = packed_scores(model, samples, max_tokens=max_tokens)
        expected = [
            torch.cat([single[i] for i in m.indices])[torch.from_numpy(m.order)]
            for m in microbatches
        ]
        torch.testing.assert_close(torch.cat(scores), torch.cat(expected), rtol=0, atol=tolerance)
        gradients = weighted_sum_gradients(model, scores), weighted_sum_gradients(plain, expected)
        for ours, theirs in zip(*gradients, strict=True):
            assert float((ours - theirs).abs().max()) <= tolerance * max(
                1.0, float(theirs.abs().max())
            )


@pytest.mark.parametrize("family", SERVED)
def test_packed_padded_and_single_forwards_agree_in_values_and_gradients(family: str) -> None:
    # float32's rounding by other instructions of the processor; the next test is sharp
    assert_all_forwards_agree(tiny_model(family), tiny_model(family), tolerance=2e-5)


def test_in_float64_they_agree_to_the_last_digits() -> None:
    assert_all_forwards_agree(float64_model(), float64_model(), tolerance=1e-10)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_entropies_agree_and_come_back_with_their_sample(family: str) -> None:
    samples = list(reversed(ragged()))
    expected = [
        entropies for _, entropies in plain_scores(tiny_model(family), samples, temperature=0.7)
    ]
    model = tiny_model(family)
    use_packed_forward(model)
    microbatches, _, entropies = packed_scores(model, samples, max_tokens=40, temperature=0.7)
    rows = in_callers_order(microbatches, entropies, len(samples))
    for ours, entropy in zip(rows, expected, strict=True):
        torch.testing.assert_close(torch.tensor(ours), entropy, rtol=0, atol=1e-5)


def test_no_token_feels_another_group_a_sibling_or_its_own_future() -> None:
    model = loaded().model
    use_packed_forward(model)

    def scores(*responses: tuple[int, ...], other_prompt: int = 3) -> list[tuple[float, ...]]:
        rows = [sample(0, (5, 6, 7), response) for response in responses]
        rows += [sample(1, (other_prompt, 4), (9, 9, 9))]
        (microbatch,) = pack(rows, max_tokens=1000)
        return in_callers_order(
            [microbatch], [token_logprobs(model, microbatch, temperature=1.0)], len(rows)
        )

    base = scores((11, 12, 13), (21, 22, 23, 24))
    changed = scores((11, 12, 13), (31, 22, 23, 24), other_prompt=8)
    assert base[0] == changed[0]
    assert base[1][0] != changed[1][0]
    assert base[2] != changed[2]
    assert scores((11, 12, 99), (21, 22, 23, 24))[0][:2] == base[0][:2]
    assert scores((11, 12, 99), (21, 22, 23, 24))[0][2] != base[0][2]


def test_the_first_response_token_is_scored_by_the_last_token_of_the_prompt() -> None:
    model = loaded().model
    with torch.no_grad():
        log_p = model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].log_softmax(dim=0)
    use_packed_forward(model)
    (microbatch,) = pack([sample(0, (5, 6, 7), (42,))], max_tokens=10)
    assert token_logprobs(model, microbatch, temperature=1.0).item() == pytest.approx(
        float(log_p[42]), abs=1e-12
    )


class Head(torch.nn.Linear):
    """A head with keyed weights."""

    def __init__(self, hidden: int, vocabulary: int, *, bias: bool) -> None:
        super().__init__(hidden, vocabulary, bias=bias, dtype=torch.float64)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_written_backward_is_that_of_log_softmax_and_entropy(
    bias: bool, temperature: float
) -> None:
    head = Head(6, 11, bias=bias)
    hidden = torch.randn(
        4, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True
    )
    targets = torch.tensor([0, 10, 3, 3])
    weights = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64)
    log_p = (head(hidden) / temperature).log_softmax(dim=1)
    expected = (log_p[torch.arange(4), targets], -(log_p.exp() * log_p).sum(dim=1))
    found = score_tokens(
        hidden, head, targets, temperature=temperature, differentiable_entropy=True
    )
    gradients = []
    for logprobs, entropies in (found, expected):
        total = (weights * logprobs).sum() + (weights.flip(0) * entropies).sum()
        gradients.append(torch.autograd.grad(total, [hidden, *head.parameters()]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_entropies_carry_no_gradient_unless_asked_to() -> None:
    head = Head(6, 11, bias=False)
    logprobs, entropies = score_tokens(
        torch.ones(2, 6).double(), head, torch.tensor([1, 2]), temperature=1.0
    )
    assert logprobs.requires_grad
    assert not entropies.requires_grad
    logprobs.sum().backward()
    assert head.weight.grad is not None


def test_hand_computed_logprob_and_entropy() -> None:
    head = torch.nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[math.log(3.0)], [0.0]]))
    logprobs, entropies = score_tokens(torch.ones(1, 1), head, torch.tensor([0]), temperature=1.0)
    assert logprobs.item() == pytest.approx(math.log(0.75))
    assert entropies.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    halved, _ = score_tokens(torch.ones(1, 1), head, torch.tensor([0]), temperature=2.0)
    assert halved.item() == pytest.approx(math.log(3**0.5 / (1 + 3**0.5)))


def test_a_probability_that_underflows_gives_finite_gradients() -> None:
    head = torch.nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[500.0], [-500.0]]))
    hidden = torch.ones(1, 1, requires_grad=True)
    scores = score_tokens(
        hidden, head, torch.tensor([1]), temperature=1.0, differentiable_entropy=True
    )
    assert [s.item() for s in scores] == [-1000.0, 0.0]
    sum(scores).sum().backward()  # type: ignore[union-attr]
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_bfloat16_models_are_scored_in_float32() -> None:
    samples = ragged()
    model = loaded(dtype=torch.bfloat16).model
    use_packed_forward(model)
    exact = [logprobs for logprobs, _ in plain_scores(tiny_model("llama"), samples)]
    microbatches = pack(samples, max_tokens=64)
    scores = [token_logprobs(model, m, temperature=1.0) for m in microbatches]
    assert {s.dtype for s in scores} == {torch.float32}
    rows = in_callers_order(microbatches, scores, len(samples))
    gaps = torch.cat([torch.tensor(a) - b for a, b in zip(rows, exact, strict=True)])
    assert gaps.abs().mean().item() < 0.05


def test_chunks_cover_every_position_and_bound_the_logits() -> None:
    for vocabulary in (100, 49_152, 151_936, 2 * CHUNK_LOGITS):
        parts = list(chunks(5_000 if vocabulary < CHUNK_LOGITS else 3, vocabulary, "cpu"))
        assert all(
            (part.stop - part.start) * vocabulary <= CHUNK_LOGITS or part.stop - part.start == 1
            for part in parts
        )
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert list(chunks(0, 100, "cpu")) == []


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_of_all_tokens_by_the_vocabulary_exists_in_an_update() -> None:
    vocabulary = 2**17
    samples = groups_of([(4, (150, 200, 180, 170))])
    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    model = randomised(
        llama(vocab_size=vocabulary, num_hidden_layers=1, tie_word_embeddings=True, **small), 0
    )
    policy = make_policy(loaded(model.eval()), microbatch_tokens=10_000)
    assert 700 * vocabulary > CHUNK_LOGITS
    with LargestTensor() as largest:
        policy.update(policy.record_old_logprobs(samples), step=1)
    assert CHUNK_LOGITS / 2 < largest.elements <= CHUNK_LOGITS


def test_a_chunk_on_a_gpu_is_four_times_one_on_a_cpu_and_its_bytes_follow_its_tensors() -> None:
    assert [chunk_tokens(151_936, kind) for kind in ("cpu", "cuda")] == [441, 1_766]
    assert chunk_tokens(2**40, "cuda") == 1
    by_type = {
        dtype: (chunk_bytes(1, "cpu", dtype), chunk_bytes(1, "cuda", dtype))
        for dtype in CHECKED_TYPES
    }
    of_scores = 2 if is_compiled() else 6  # PyTorch's functions hold them in float32 as well
    assert by_type == {
        torch.bfloat16: (of_scores, 10),
        torch.float32: (4, 8),
        torch.float64: (8, 16),
    }


class LiveBytes(TorchDispatchMode):
    """The most bytes on the device that tensors which operators returned hold at one time."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, list[int]] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                storage = tensor.untyped_storage()
                held = self._live.setdefault(storage._cdata, [0, storage.nbytes()])
                self.now += 0 if held[0] else held[1]
                held[0] += 1
                weakref.finalize(tensor, self._forget, storage._cdata)
        self.most = max(self.most, self.now)
        return out

    def _forget(self, key: int) -> None:
        self._live[key][0] -= 1
        if not self._live[key][0]:
            self.now -= self._live.pop(key)[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("differentiable_entropy", [False, True])
def test_a_chunk_on_a_gpu_holds_the_bytes_that_are_stated(
    dtype: torch.dtype, differentiable_entropy: bool
) -> None:
    num_tokens = 1_000
    vocabulary = 50_000
    with fake_cuda() as gpu:
        head = torch.nn.Linear(4, vocabulary, bias=False, device="cuda", dtype=dtype)
        hidden = torch.empty(num_tokens, 4, device="cuda", dtype=dtype, requires_grad=True)
        targets = torch.empty(num_tokens, device="cuda", dtype=torch.long)
        with LiveBytes() as memory, gpu.record() as trace:
            scores = score_tokens(
                hidden,
                head,
                targets,
                temperature=0.9,
                differentiable_entropy=differentiable_entropy,
            )
            sum(each.sum() for each in scores if each.requires_grad).backward()
    assert memory.most == pytest.approx(
        num_tokens * chunk_bytes(vocabulary, "cuda", dtype), rel=0.005
    )
    assert trace.num_kernels < 40, trace.table()


def test_a_policy_switches_cudnn_attention_off() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    make_policy()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_logprobs_would_be_wrong_are_refused(name: str) -> None:
    make, _ = REFUSED[name]
    with pytest.raises(ConfigError, match="cannot be trained here"):
        use_packed_forward(randomised(make(), 0).eval())


@pytest.mark.parametrize("name", UNSUPPORTED_ARGUMENTS)
def test_what_a_layer_asks_of_its_attention_is_computed_or_refused(name: str) -> None:
    """Sparse layers choose keys only in sequences that are longer than those of the check."""
    states = torch.zeros(1, 1, 2, 4)
    asked: Any = {name: torch.zeros(1)}
    with pytest.raises(ConfigError, match=f"packed attention has no {name}"):
        packed_attention(torch.nn.Identity(), states, states, states, None, **asked)


def attends_in_float64(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **options: Any
) -> tuple[Tensor, None]:
    """A correct attention that rounds at other places, as another kernel does."""
    output, _ = packed_attention(
        module, query.double(), key.double(), value.double(), mask, *args, **options
    )
    return output.to(query.dtype), None


def with_contexts(
    context: Callable[[np.ndarray], np.ndarray],
) -> Callable[..., tuple[Tensor, None]]:
    """Packed attention in which `context` replaces the keys before a segment's own tokens."""

    def attend(
        *args: Any, packed_attention_plan: PackedAttentionPlan, **options: Any
    ) -> tuple[Tensor, None]:
        segments = []
        for segment in packed_attention_plan.segments:
            before = segment.keys[: segment.context_length]
            own = segment.keys[segment.context_length :]
            segments.append(Segment(np.concatenate([context(before), own]), segment.length))
        plan = PackedAttentionPlan(tuple(segments), packed_attention_plan.device)
        return packed_attention(*args, packed_attention_plan=plan, **options)

    return attend


def sees_one_stream(
    *args: Any, packed_attention_plan: PackedAttentionPlan, **options: Any
) -> tuple[Tensor, None]:
    """Packed attention in which a token also sees the sequences before its own."""
    stream = np.arange(sum(segment.length for segment in packed_attention_plan.segments))
    plan = PackedAttentionPlan((Segment(stream, len(stream)),), packed_attention_plan.device)
    return packed_attention(*args, packed_attention_plan=plan, **options)


@pytest.fixture
def check_attention() -> Iterator[Callable[[PreTrainedModel, Callable[..., Any]], None]]:
    """Runs the check of packed sequences on a model whose packed attention is the given
    function.
    """

    def check(model: PreTrainedModel, attention: Callable[..., Any]) -> None:
        use_packed_attention(model)
        AttentionInterface.register(IMPLEMENTATION, attention)
        check_packed_forward(model, "sdpa")

    yield check
    AttentionInterface.register(IMPLEMENTATION, packed_attention)


@pytest.mark.parametrize(
    ("family", "dtype", "scale"),
    params_of_product(list(SERVED), [torch.bfloat16, torch.float32], [1, 16]),
)
def test_another_rounding_is_accepted_and_a_wrong_mask_refused(
    family: str, dtype: torch.dtype, scale: float, check_attention: Any
) -> None:
    """With logits 16 times as large, correct forwards in bfloat16 differ by 0.05 to 0.3 nats on
    average.
    """
    model = tiny_model(family, dtype=dtype)
    norm: Any = model.base_model.norm
    with torch.no_grad():
        # its values are near 1, or near 0 in a family that adds 1 to them
        norm.weight.add_(scale - 1)
    check_attention(model, packed_attention)
    check_attention(model, attends_in_float64)
    for wrong in (
        sees_one_stream,
        with_contexts(lambda keys: keys[:0]),
        with_contexts(lambda keys: keys[1:]),
    ):
        with pytest.raises(ConfigError, match=r"differ by [\d.]+ nats .*, and two plain forwards"):
            check_attention(model, wrong)


def test_a_model_that_mixes_tokens_outside_of_attention_is_found_by_its_numbers() -> None:
    options = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": ["conv", "full_attention"],
    }
    model = randomised(Lfm2ForCausalLM(Lfm2Config(**options, **heads)), 0).eval()
    transformers_logging.set_verbosity_error()  # it advises on faster kernels
    with pytest.raises(ConfigError, match=r"lfm2 .* differ by 0\.\d+ nats"):
        use_packed_forward(model)


def test_tokens_outside_the_vocabulary_of_the_check_do_not_matter() -> None:
    model = randomised(llama(vocab_size=4), 0).eval()
    use_packed_forward(model)
    (microbatch,) = pack([sample(0, (1, 2), ids(5, "few", vocabulary=4))], max_tokens=10)
    assert token_logprobs(model, microbatch, temperature=1.0).isfinite().all()
