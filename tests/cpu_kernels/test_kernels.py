"""Compiled kernels against float64 at all shapes of a decode step; alone and in a batch they give
equal bits.
"""

import copy
import itertools
import os
import platform
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import dapo.libs.cpu_kernels.compiled as loading
from dapo.libs.cpu_kernels import (
    DTYPES,
    OneDnnLinear,
    Prompts,
    RMSNorm,
    Rows,
    SegmentAttention,
    Segments,
    SiluGate,
    TokenScores,
    add_gradient_,
    attend,
    can_attend,
    can_attend_to_segments,
    can_multiply,
    can_sample,
    fuse_layers,
    is_compiled,
    linear,
    multiply,
    pack_panels,
    rms_norm,
    rotate_,
    sample,
    store_positions_,
    use_sparse_embeddings,
)
from dapo.libs.cpu_kernels.build import SOURCE, find_compiler
from helpers.tables import for_each_row

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
CAPACITY = 150


@pytest.fixture(autouse=True)
def without_gradients():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@needs_compiler
def test_an_installation_with_a_compiler_has_the_kernels():
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT" and platform.machine().lower() in (
        "x86_64",
        "amd64",
    ):
        pytest.skip("there are no kernels for a processor of x86 without AVX2")
    assert is_compiled(), "run `make install` (or pip install --editable .) again"


def test_a_missing_library_is_logged_once_with_what_to_do(
    caplog: pytest.LogCaptureFixture, monkeypatch, tmp_path
):
    monkeypatch.setattr(loading, "library_path", lambda folder, capability: tmp_path / "kernels.so")
    loading.library.cache_clear()
    try:
        assert not is_compiled()
        assert not can_sample(torch.zeros(1, 4))
    finally:
        loading.library.cache_clear()
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / 'kernels.so'} is missing: PyTorch's functions stand in")
    assert message.endswith(
        "install a C++ compiler (g++), then run python -m dapo.libs.cpu_kernels"
    )


def test_the_command_of_that_message_compiles_and_removes_older_libraries(tmp_path):
    """By a compiler that writes its target at once; the test above is of libraries that a real one
    has made.
    """
    (tmp_path / "compiler.py").write_text(
        "import sys\nopen(sys.argv[sys.argv.index('-o') + 1], 'w')\n"
    )
    copy_of_package = tmp_path / "cpu_kernels"
    shutil.copytree(
        SOURCE.parent, copy_of_package, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    (copy_of_package / "kernels-of-an-older-source.so").touch()
    command = [sys.executable, "-m", "cpu_kernels"]
    compiler = f"{sys.executable} {tmp_path / 'compiler.py'}"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CXX": compiler}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    made = sorted(str(path) for path in copy_of_package.glob("*.so"))
    assert made
    assert (sorted(done.stdout.split()), done.stderr) == (made, "")
    assert "older" not in done.stdout
    environment["CXX"] = "false"
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, sorted(map(str, copy_of_package.glob("*.so")))) == (1, made)
    assert "could not be compiled: install a C++ compiler (g++)" in done.stderr


@pytest.mark.needs_kernels
def test_the_default_type_of_pytorch_changes_nothing():
    logits = torch.randn(3, 300)
    x = torch.randn(5, 64)
    given = (
        torch.ones(3, dtype=torch.float64),
        torch.rand(3, dtype=torch.float64),
        torch.arange(1, 4),
    )
    expected = (*sample(logits, *given), rms_norm(x, x[0], 1e-5))
    torch.set_default_dtype(torch.float64)
    try:
        found = (*sample(logits, *given), rms_norm(x, x[0], 1e-5))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(
        torch.equal(one, other) and one.dtype == other.dtype
        for one, other in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32), (3, 1, 576), (2, 5, 4, 64), (64, 1, 4096)])
def test_rms_norm_is_that_of_pytorch(shape: tuple[int, ...], dtype: torch.dtype):
    x = torch.randn(shape).to(dtype) * 3
    weight = torch.randn(shape[-1]).to(dtype)
    expected = torch.nn.functional.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    for compiled in (True, False):
        got = rms_norm(x, weight, 1e-5, compiled=compiled)
        assert got.dtype == dtype
        torch.testing.assert_close(
            got.double(), expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("n", "length", "width"), [(5, 1, 64), (2, 7, 128), (1, 3, 32)])
def test_the_rotary_embedding_is_that_of_transformers_and_leaves_the_values(
    n: int, length: int, width: int, is_normed: bool, dtype: torch.dtype
):
    heads = torch.randn(n, length, 3 + 2 + 2, width).to(dtype)
    for rows in {1, n}:
        cosines, sines = torch.randn(2, rows, length, width).to(dtype)
        weights = torch.randn(2, width).to(dtype)
        x = heads[:, :, :5].double()
        if is_normed:
            each = torch.cat((weights[:1].expand(3, -1), weights[1:].expand(2, -1))).double()
            x = torch.nn.functional.rms_norm(x, (width,), eps=1e-6) * each
        turned = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), -1)
        expected = x * cosines.double().unsqueeze(2) + turned * sines.double().unsqueeze(2)
        for compiled in (True, False):
            norms = (weights[0], weights[1], 1e-6) if is_normed else None
            got = rotate_(heads.clone(), cosines, sines, 3, 2, norms, compiled=compiled)
            torch.testing.assert_close(
                got[:, :, :5].double(), expected, atol=4 * ROUNDING[dtype], rtol=ROUNDING[dtype]
            )
            assert torch.equal(got[:, :, 5:], heads[:, :, 5:])


@pytest.mark.needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_position_is_written_where_it_belongs_and_nowhere_else(dtype: torch.dtype):
    heads = torch.randn(4, 9, 32).to(dtype)
    keys, values = torch.zeros(2, 6, 3, CAPACITY, 32, dtype=dtype)
    positions = torch.tensor([0, 149, 7, 7])
    store_positions_(heads[:, 3:], keys, values, positions)
    for row, position in enumerate(positions.tolist()):
        assert torch.equal(keys[row, :, position], heads[row, 3:6])
        assert torch.equal(values[row, :, position], heads[row, 6:])
    assert int((keys != 0).any(-1).sum()) == int((values != 0).any(-1).sum()) == 4 * 3


def attention(
    query: Tensor, keys: Tensor, values: Tensor, first: int, length: int, prompt: tuple[Tensor, ...]
) -> Tensor:
    """One row's attention in float64: `[heads, d]`."""
    joined = [
        torch.cat((p, own[:, first:length]), 1).double()
        for p, own in zip(prompt, (keys, values), strict=True)
    ]
    k, v = (states.repeat_interleave(len(query) // len(keys), 0)[None] for states in joined)
    return scaled_dot_product_attention(query.double()[None, :, None], k, v)[0, :, 0]


@pytest.mark.needs_kernels
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    key_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7, 16, 18]),
    width=st.sampled_from([32, 64, 96, 256]),
    dtype=st.sampled_from(list(DTYPES)),
    prompts=st.lists(st.sampled_from([1, 2, 63, 64, 65, 130]), max_size=3),
    window=st.sampled_from([None, 1, 20]),
    draw=st.randoms(use_true_random=False),
)
def test_attention_is_that_of_each_row_over_its_prompt_and_its_own_positions(
    rows: int,
    key_heads: int,
    group: int,
    width: int,
    dtype: torch.dtype,
    prompts: list[int],
    window: int | None,
    draw,
):
    heads = torch.randn(rows, key_heads * (group + 2), width).to(dtype)
    query = heads[:, : key_heads * group]
    keys, values = torch.randn(2, rows + 1, key_heads, CAPACITY, width).to(dtype)
    lengths = torch.tensor([draw.choice([1, 2, 63, 64, 65, 128, CAPACITY]) for _ in range(rows)])
    first = (
        torch.zeros_like(lengths) if window is None or prompts else (lengths - window).clamp(min=0)
    )
    states = [torch.randn(2, 1, key_heads, length, width).to(dtype).unbind() for length in prompts]
    of_row = torch.tensor([draw.randrange(-1, len(prompts)) for _ in range(rows)])
    shared = None
    if prompts:
        other = torch.zeros(2, len(prompts), dtype=torch.int64)  # of another layer
        of_layer = torch.tensor([[state.data_ptr() for state in pair] for pair in states]).T
        shared = Prompts(of_row, torch.tensor(prompts), torch.stack((other, of_layer)))
    assert can_attend(keys, values)
    split = torch.tensor([draw.choice([0, 1, 64, 70, 200]) for _ in range(rows)])
    got = attend(query, keys, values, Rows(first, split, lengths, shared), layer=1)
    nothing = torch.empty(key_heads, 0, width, dtype=dtype)
    for row in range(rows):
        prompt = (
            (nothing, nothing)
            if of_row[row] < 0
            else tuple(state[0] for state in states[of_row[row]])
        )
        expected = attention(
            query[row], keys[row], values[row], int(first[row]), int(lengths[row]), prompt
        )
        torch.testing.assert_close(
            got[row].double(), expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype]
        )
        alone = (
            None
            if shared is None
            else Prompts(of_row[row : row + 1], shared.lengths, shared.pointers)
        )
        one = slice(row, row + 1)
        again = attend(
            query[one],
            keys[one],
            values[one],
            Rows(first[one], split[one], lengths[one], alone),
            layer=1,
        )
        assert torch.equal(again[0], got[row])


@pytest.mark.needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 40, 64, 100])
def test_a_prompt_in_the_row_gives_the_bits_of_one_outside(length: int, dtype: torch.dtype):
    query = torch.randn(5, 6, 64).to(dtype)
    keys, values = torch.randn(2, 5, 2, CAPACITY, 64).to(dtype)
    keys[:, :, :length] = keys[:1, :, :length]
    values[:, :, :length] = values[:1, :, :length]
    prompt = [states[:1, :, :length].contiguous() for states in (keys, values)]
    shared = Prompts(torch.zeros(5, dtype=torch.int64), torch.tensor([length]), addresses(prompt))
    own = [states[:, :, length:].contiguous() for states in (keys, values)]
    lengths = torch.tensor([1, 2, 20, 33, 50])
    zeros = torch.zeros(5, dtype=torch.int64)
    outside = attend(query, *own, Rows(zeros, zeros, lengths, shared), 0.1)
    assert torch.equal(
        outside, attend(query, keys, values, Rows(zeros, zeros + length, lengths + length), 0.1)
    )


def addresses(prompt: list[Tensor]) -> Tensor:
    return torch.tensor([[[states.data_ptr()] for states in prompt]])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_types_and_widths_are_not_served_and_have_pytorchs_functions(dtype: torch.dtype):
    states = torch.randn(2, 1, 4, 32).to(dtype)
    assert not can_attend(states, states)
    assert not can_sample(states[0, 0])
    assert not can_attend(*torch.randn(2, 1, 1, 4, 24))
    assert not can_attend(*torch.randn(2, 1, 1, 4, 288))
    assert rms_norm(states, torch.ones(32, dtype=dtype), 1e-5).dtype == dtype


# --- sampling


@pytest.mark.needs_kernels
@for_each_row("dtype", DTYPES)
@for_each_row("vocabulary", [1, 7, 255, 256, 257, 4099])
@for_each_row("temperature", [0.6, 1.0, 2.5])
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(
    temperature: float, vocabulary: int, dtype: torch.dtype
):
    n = 5
    draws = [1, 3, 2, 64, 1]
    logits = (4 * torch.randn(n, vocabulary)).to(dtype)
    uniforms = torch.rand(sum(draws), dtype=torch.float64)
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-53])
    assert can_sample(logits)
    tokens, logprobs = sample(
        logits,
        torch.full((n,), temperature, dtype=torch.float64),
        uniforms,
        torch.tensor(draws).cumsum(0),
    )
    log_p = (logits.double() / temperature).log_softmax(-1)
    rows = torch.repeat_interleave(torch.arange(n), torch.tensor(draws))
    upper = log_p.exp().cumsum(-1)[rows, tokens]
    assert bool((upper >= uniforms - 1e-6).all())
    assert bool((upper - log_p.exp()[rows, tokens] <= uniforms + 1e-6).all())
    torch.testing.assert_close(logprobs.double(), log_p[rows, tokens], atol=2e-6, rtol=1e-6)


@pytest.mark.needs_kernels
@for_each_row("dtype", DTYPES)
@for_each_row("vocabulary", [1, 7, 256, 257, 4099])
@for_each_row("spread", [0.0, 0.5, 2.0, 40.0])
def test_a_draw_from_a_nucleus_is_the_inverse_of_its_cumulative_distribution(
    spread: float, vocabulary: int, dtype: torch.dtype
):
    draws = [1, 3, 2, 64, 1, 8]
    top_ps = torch.tensor([1e-9, 0.3, 0.7, 0.95, 0.999999, 0.5], dtype=torch.float64)
    n = len(draws)
    ends = torch.tensor(draws).cumsum(0)
    temperature = 0.8
    logits = (spread * torch.randn(n, vocabulary)).to(dtype)
    logits[-1, vocabulary // 2 :] = -torch.inf if vocabulary > 1 else 0.0
    uniforms = torch.rand(sum(draws), dtype=torch.float64)
    uniforms[1:3] = torch.tensor([0.0, 1 - 2**-53])
    temperatures = torch.full((n,), temperature, dtype=torch.float64)
    tokens, logprobs = sample(logits, temperatures, uniforms, ends, top_ps)
    first = 0
    for row, count in enumerate(draws):
        # equal logits in the order of their ids
        p, ids = (logits[row].double() / temperature).softmax(0).sort(descending=True, stable=True)
        mass = p.cumsum(0)
        size = int((mass < top_ps[row] - 1e-6).sum()) + 1
        # rounding may move the end by the tokens in between
        largest = int((mass < top_ps[row] + 1e-6).sum()) + 1
        for u, token, logprob in zip(
            uniforms[first : first + count],
            tokens[first : first + count],
            logprobs[first : first + count],
            strict=True,
        ):
            rank = int((ids == token).nonzero())
            assert rank < largest
            assert p[rank] > 0
            log_mass = (p[rank].log() - logprob.double()).exp()
            assert mass[size - 1] - 2e-6 <= log_mass <= mass[min(largest, vocabulary) - 1] + 2e-6
            assert mass[rank] - p[rank] - 2e-6 <= u * log_mass <= mass[rank] + 2e-6
        first += count


@pytest.mark.needs_kernels
def test_a_nucleus_of_the_whole_mass_has_every_token_and_a_broken_row_is_nan():
    logits = torch.randn(1, 300).repeat(3, 1)
    uniforms = torch.rand(3, dtype=torch.float64)
    logits[1, 299] = torch.nan
    ones = torch.ones(3, dtype=torch.float64)
    ends = torch.arange(1, 4)
    tokens, logprobs = sample(logits, ones, uniforms, ends, ones)
    assert logprobs.isnan().tolist() == [False, True, False]
    assert 0 <= int(tokens[1]) < 300
    torch.testing.assert_close(logprobs[0], logits[0].log_softmax(0)[tokens[0]])


@pytest.mark.needs_kernels
def test_a_token_without_probability_is_never_sampled():
    logits = torch.full((4, 600), -torch.inf)
    for row, token in enumerate((0, 255, 256, 599)):
        logits[row, token] = -5.0
    for uniform in (0.0, 0.5, 1 - 2**-53):
        uniforms = torch.full((4,), uniform, dtype=torch.float64)
        tokens, logprobs = sample(
            logits, torch.ones(4, dtype=torch.float64), uniforms, torch.arange(1, 5)
        )
        assert tokens.tolist() == [0, 255, 256, 599]
        assert logprobs.tolist() == [0.0] * 4


@pytest.mark.needs_kernels
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_nan_log_probabilities_and_disturbs_no_other(bad: float):
    logits = torch.randn(3, 300)
    ones = torch.ones(3, dtype=torch.float64)
    uniforms = torch.rand(3, dtype=torch.float64)
    ends = torch.arange(1, 4)
    expected = sample(logits, ones, uniforms, ends)
    for token in (0, 150, 299):
        broken = logits.clone()
        broken[1, token] = bad
        tokens, logprobs = sample(broken, ones, uniforms, ends)
        assert bool(logprobs[1].isnan())
        assert 0 <= int(tokens[1]) < 300
        for row in (0, 2):
            assert (tokens[row], logprobs[row]) == (expected[0][row], expected[1][row])


@pytest.mark.needs_kernels
def test_results_do_not_depend_on_the_number_of_threads():
    logits = torch.randn(9, 5000)
    keys = torch.randn(9, 3, CAPACITY, 64)
    query = torch.randn(9, 6, 64)
    lengths = torch.arange(100, 109)
    zeros = torch.zeros(9, dtype=torch.int64)
    uniforms = torch.rand(9, dtype=torch.float64)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sampled = sample(
                logits, torch.ones(9, dtype=torch.float64), uniforms, torch.arange(1, 10)
            )
            found.append(
                (
                    *sampled,
                    attend(query, keys, keys, Rows(zeros, zeros, lengths), 0.125),
                )
            )
    finally:
        torch.set_num_threads(before)
    for one, other in itertools.pairwise(found):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# --- gradients


@pytest.mark.needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 32), (3, 21, 576), (1, 200, 64)])
def test_the_gradients_of_a_norm_are_autograds(shape: tuple[int, ...], dtype: torch.dtype):
    with torch.inference_mode(False):
        given = [torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)]
        x, weight, gradient = (each.to(dtype) for each in given)
        ours = [each.clone().requires_grad_() for each in (x, weight)]
        exact = [each.double().requires_grad_() for each in (x, weight)]
        out = RMSNorm.apply(*ours, 1e-5)
        expected = torch.nn.functional.rms_norm(exact[0], shape[-1:], exact[1], 1e-5)
        out.backward(gradient)
        expected.backward(gradient.double())
        compared = [
            (out, expected),
            *((one.grad, other.grad) for one, other in zip(ours, exact, strict=True)),
        ]
        for got, right in compared:
            assert got.dtype == dtype
            torch.testing.assert_close(
                got.double(), right, atol=8 * ROUNDING[dtype], rtol=8 * ROUNDING[dtype]
            )


@pytest.mark.needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradients_of_a_gate_are_autograds_also_far_from_zero(dtype: torch.dtype):
    with torch.inference_mode(False):
        gate = torch.cat(
            (
                torch.randn(7, 64),
                torch.tensor([[-300.0, -100, -88, -87, -30, 0, 30, 88, 300, 1e4] * 32]).view(5, 64),
            )
        )
        up, gradient = torch.randn(2, *gate.shape)
        gate, up, gradient = (each.to(dtype) for each in (gate, up, gradient))
        ours = [each.clone().requires_grad_() for each in (gate, up)]
        exact = [each.double().requires_grad_() for each in (gate, up)]
        out = SiluGate.apply(*ours)
        expected = torch.nn.functional.silu(exact[0]) * exact[1]
        out.backward(gradient)
        expected.backward(gradient.double())
        compared = [
            (out, expected),
            *((one.grad, other.grad) for one, other in zip(ours, exact, strict=True)),
        ]
        for got, right in compared:
            torch.testing.assert_close(
                got.double(), right, atol=ROUNDING[dtype], rtol=4 * ROUNDING[dtype]
            )


def packed_segments(shared: int, lengths: list[int]) -> Segments:
    """A prompt, and responses to its first `shared` tokens; the first length is the prompt's."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    own = [torch.arange(a, b) for a, b in itertools.pairwise(starts.tolist())]
    keys = [own[0], *(torch.cat((torch.arange(shared), each)) for each in own[1:])]
    offsets = torch.tensor([0, *map(len, keys)]).cumsum(0)
    return Segments(starts[:-1].contiguous(), torch.tensor(lengths), offsets, torch.cat(keys))


def attention_by_hand(
    query: Tensor, keys: Tensor, values: Tensor, segments: Segments, scale: float
) -> Tensor:
    out = torch.zeros_like(query)
    group = query.shape[1] // keys.shape[1]
    for i, (start, length) in enumerate(
        zip(segments.starts.tolist(), segments.lengths.tolist(), strict=True)
    ):
        of_segment = segments.indices[segments.offsets[i] : segments.offsets[i + 1]]
        k, v = (states[of_segment].repeat_interleave(group, 1) for states in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[start : start + length], k) * scale
        hidden = torch.ones(length, len(of_segment)).triu(len(of_segment) - length + 1).bool()
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[start : start + length] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


@pytest.mark.needs_kernels
@for_each_row("dtype", DTYPES)
@for_each_row(("heads", "width"), [((9, 3), 64), ((4, 4), 32), ((2, 1), 96)])
@for_each_row("lengths", [[1], [50], [33, 1, 7, 100], [64, 31, 32, 33]])
def test_the_gradients_of_attention_in_segments_are_autograds(
    lengths: list[int], heads: tuple[int, int], width: int, dtype: torch.dtype
):
    with torch.inference_mode(False):
        segments = packed_segments(min(30, lengths[0]), lengths)
        tokens = sum(lengths)
        # heads of a token lie together
        joined = torch.randn(tokens, sum(heads) + heads[1], width).to(dtype)
        query, keys, values = joined.split([heads[0], heads[1], heads[1]], 1)
        gradient = torch.randn(query.shape).to(dtype)
        assert can_attend_to_segments(query, keys, values)
        exact = [each.double().requires_grad_() for each in (query, keys, values)]
        expected = attention_by_hand(*exact, segments, 0.2)
        expected.backward(gradient.double())
        before = torch.get_num_threads()
        found = []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                ours = [each.detach().requires_grad_() for each in (query, keys, values)]
                out = SegmentAttention.apply(*ours, segments, 0.2)
                out.backward(gradient)
                found.append((out, *(each.grad for each in ours)))
        finally:
            torch.set_num_threads(before)
        for one, other in itertools.pairwise(found):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        for got, right in zip(found[0], (expected, *(each.grad for each in exact)), strict=True):
            assert got.dtype == dtype
            torch.testing.assert_close(
                got.double(), right, atol=8 * ROUNDING[dtype], rtol=8 * ROUNDING[dtype]
            )


@pytest.mark.needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("vocabulary", "temperature", "with_entropy"),
    [(7, 1.0, True), (1_003, 0.7, True), (512, 2.0, False)],
)
def test_scores_of_tokens_and_their_gradients_are_autograds(
    vocabulary: int, temperature: float, with_entropy: bool, dtype: torch.dtype
):
    with torch.inference_mode(False):
        # a row may predict several targets, equal ones too, or none
        counts = torch.tensor([1, 0, 3, 1, 64, 1])
        ends = counts.cumsum(0)
        rows = torch.repeat_interleave(torch.arange(6), counts)
        targets = torch.randint(0, vocabulary, (70,))
        by_logprob = torch.randn(70)
        logits = (4 * torch.randn(6, vocabulary)).to(dtype)
        logits[3, 0] = -1e4  # a token of probability zero
        targets[4] = 0
        by_entropy = torch.randn(6) * with_entropy
        exact = logits.double().requires_grad_()
        log_p = (exact / temperature).log_softmax(1)
        expected = log_p[rows, targets], -(log_p.exp() * log_p).sum(1)
        (expected[0] @ by_logprob.double() + expected[1] @ by_entropy.double()).backward()
        ours = logits.clone().requires_grad_()
        logprobs, entropies = TokenScores.apply(ours * 1, targets, ends, temperature, with_entropy)
        assert entropies.requires_grad == with_entropy
        (logprobs @ by_logprob + (entropies @ by_entropy if with_entropy else 0)).backward()
        for got, right in zip((logprobs, entropies), expected, strict=True):
            torch.testing.assert_close(got.double(), right, atol=4e-6, rtol=4e-6)
        torch.testing.assert_close(
            ours.grad.double(), exact.grad, atol=ROUNDING[dtype] / 2, rtol=ROUNDING[dtype] / 2
        )


@pytest.mark.needs_kernels
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_scores_of_logits_that_are_not_finite_are_nan(broken: float):
    logits = torch.zeros(2, 40)
    logits[1, 37] = broken
    logprobs, entropies = TokenScores.apply(
        logits, torch.tensor([3, 3]), torch.tensor([1, 2]), 1.0, False
    )
    assert torch.isnan(logprobs).tolist() == torch.isnan(entropies).tolist() == [False, True]


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 5)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_by_onednn_has_autograds_gradients_and_the_same_bits_again(
    shape: tuple[int, ...], with_bias: bool
):
    with torch.inference_mode(False):
        x = torch.randn(*shape, 40)
        weight = torch.randn(24, 40)
        bias = torch.randn(24)
        tensors = [x, weight, bias][: 3 if with_bias else 2]
        gradient = torch.randn(*shape, 24)
        found = []
        for _ in range(2):
            ours = [each.clone().requires_grad_() for each in tensors]
            out = OneDnnLinear.apply(*ours, *([] if with_bias else [None]))
            out.backward(gradient)
            found.append([out.detach(), *(each.grad for each in ours)])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
        exact = [each.double().requires_grad_() for each in tensors]
        expected = torch.nn.functional.linear(*exact)
        expected.backward(gradient.double())
        for got, right in zip(found[0], (expected, *(each.grad for each in exact)), strict=True):
            torch.testing.assert_close(got.double(), right, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("is_preferred", [False, True])
def test_float32_is_multiplied_by_onednn_where_that_is_preferred(
    is_preferred: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("dapo.libs.cpu_kernels.training.prefers_onednn", lambda: is_preferred)
    calls: list[Tensor] = []
    multiply_ = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        "dapo.libs.cpu_kernels.training._multiply",
        lambda *given: calls.append(given[0]) or multiply_(*given, "none", [], ""),
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(3, 8).to(dtype)
        weight = torch.randn(4, 8).to(dtype)
        torch.testing.assert_close(linear(x, weight), torch.nn.functional.linear(x, weight))
    assert [each.dtype for each in calls] == [torch.float32] * is_preferred


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_gradients_are_added_up_in_float32_whole_and_by_rows(dtype: torch.dtype):
    with torch.inference_mode(False):
        embedding = torch.nn.Embedding(9, 40, dtype=dtype)
        use_sparse_embeddings(embedding)
        ids = torch.tensor([3, 1, 3, 8])
        slopes = torch.randn(4, 40).to(dtype)
        embedding(ids).backward(slopes)
        sums = torch.randn(9, 40)
        dense = torch.randn(9, 40).to(dtype)
        expected = sums.double() + dense.double()
        expected.index_add_(0, ids, slopes.double())
        add_gradient_(sums, dense)
        add_gradient_(sums, embedding.weight.grad)
        assert embedding.weight.grad.is_sparse
        torch.testing.assert_close(sums.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.needs_kernels
def test_gradients_do_not_depend_on_the_number_of_threads():
    with torch.inference_mode(False):
        before = torch.get_num_threads()
        found = []
        x = torch.randn(999, 64, requires_grad=True)
        weight = torch.randn(64, requires_grad=True)
        gradient = torch.randn(999, 64)
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(
                    torch.autograd.grad(RMSNorm.apply(x, weight, 1e-5), (x, weight), gradient)
                )
        finally:
            torch.set_num_threads(before)
        for one, other in itertools.pairwise(found):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_fused_layers_has_the_plain_models_gradients(family: str, dtype: torch.dtype):
    config, model_class = FAMILIES[family]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 99,
        "head_dim": 32,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.inference_mode(False):
        ids = torch.arange(40).view(2, 20)
        exact = model_class(config(**sizes, **heads)).double()
        plain, fused = (copy.deepcopy(exact).to(dtype) for _ in range(2))
        norms = 2 * 2 + 1 + (4 if family == "qwen3" else 0)
        assert fuse_layers(fused) == norms + 2
        fused = copy.deepcopy(fused)  # as the frozen reference of a policy is made
        found = []
        for model in (exact, plain, fused):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            found.append(
                {name: parameter.grad.double() for name, parameter in model.named_parameters()}
            )
    for name, right in found[0].items():
        # at most what PyTorch's own functions differ from float64 by
        allowed = 2 * float((found[1][name] - right).norm()) + 1e-6 * float(right.norm())
        assert float((found[2][name] - right).norm()) <= allowed, name


def require_products(dtype: torch.dtype) -> None:
    """Skip on a processor without the instruction."""
    if not can_multiply(dtype):
        pytest.skip("this processor does not multiply pairs of bfloat16")


MULTIPLIED = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)
FINISHES = {
    "plain": lambda y, other: y,
    "silu": lambda y, other: y * y.sigmoid(),
    "plus": lambda y, other: y + other,
    "times": lambda y, other: y * other,
}


@pytest.mark.needs_kernels
@MULTIPLIED
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 130),
    inputs=st.integers(1, 80),
    outputs=st.integers(1, 100),
    finish=st.sampled_from(list(FINISHES)),
    has_bias=st.booleans(),
)
def test_products_with_a_packed_weight_are_those_of_float64(
    dtype: torch.dtype, rows: int, inputs: int, outputs: int, finish: str, has_bias: bool
) -> None:
    require_products(dtype)
    with torch.inference_mode():
        shapes = (rows, inputs), (outputs, inputs), (rows, outputs), (outputs,)
        x, weight, other, some = (torch.randn(shape, dtype=dtype) for shape in shapes)
        bias = some if has_bias else None
        found = multiply(x, pack_panels(weight), outputs, bias, finish, other)
        wide = x.double() @ weight.double().T + (0.0 if bias is None else bias.double())
        expected = FINISHES[finish](wide, other.double())
        assert found.dtype == dtype
        bound = 1e-6 * (x.double().abs() @ weight.double().abs().T + 2) * (1 + other.double().abs())
        rounding = 0.0 if dtype == torch.float32 else 2**-8 * expected.abs()
        assert ((found.double() - expected).abs() <= bound + rounding).all()


@pytest.mark.needs_kernels
@MULTIPLIED
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_product_depends_neither_on_the_other_rows_nor_on_the_threads(
    threads: int, dtype: torch.dtype
) -> None:
    require_products(dtype)
    before = torch.get_num_threads()
    x = torch.randn(3, 67, 96, dtype=dtype)
    weight = torch.randn(147, 96, dtype=dtype)
    packed = pack_panels(weight)
    whole = multiply(x, packed, 147)
    try:
        torch.set_num_threads(threads)
        for number in (1, 5, 6, 66):
            assert torch.equal(multiply(x[1, :number], packed, 147), whole[1, :number])
        assert torch.equal(multiply(x[:, ::3], packed, 147), whole[:, ::3])
    finally:
        torch.set_num_threads(before)
