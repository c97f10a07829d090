"""The native engine's own laws: the work it saves, the memory it takes, what it refuses, and how it
draws.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from dapo.config.rollout_options import NativeConfig
from dapo.core.errors import EngineError
from dapo.core.rng import keyed_uniforms
from dapo.engines.native.cache_rows import Row, Rows
from dapo.engines.native.engine import PREFILL_TOKENS, NativeEngine, prefill_batches
from dapo.engines.native.scheduler import FIRST_UNIFORMS, RunningSequence, Scheduler
from dapo.engines.native.token_sampling import (
    BLOCK,
    FIRST_CANDIDATES,
    SamplingSettings,
    UniformDraws,
    invert_cdf,
    sample,
)
from dapo.types import Generation, GenerationRequest
from helpers.fake_memory import POSITION_BYTES, FakeMemory, bytes_for_cache
from helpers.tables import for_each_row
from helpers.tiny_models import (
    REFUSED,
    SERVED,
    VOCABULARY,
    ModelWeights,
    llama,
    randomised,
    tied_llama,
    tiny_model,
)

PROMPT = (11, 42, 7, 99)
BELOW_ONE = math.nextafter(1.0, 0.0)


def request(label: str, **options: object) -> GenerationRequest:
    defaults = GenerationRequest(
        id=label,
        prompt_ids=PROMPT,
        max_new_tokens=6,
        temperature=1.0,
        top_p=1.0,
        seed=sum(label.encode()),
        stop_ids=(),
    )
    return replace(defaults, **options)


def group(label: str, size: int, **options: object) -> list[GenerationRequest]:
    return [request(f"{label}{i}", seed=1000 * len(label) + i, **options) for i in range(size)]


def run(
    engine: NativeEngine, requests: Sequence[GenerationRequest], polls: int = 2000
) -> dict[str, Generation]:
    engine.submit(requests)
    done: dict[str, Generation] = {}
    for _ in range(polls):
        done |= {g.request_id: g for g in engine.poll()}
        if len(done) == len(requests):
            return done
    raise AssertionError(f"{len(requests) - len(done)} requests are still unanswered")


# --- the same answer whatever the schedule ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in SERVED), ("llama", torch.float64)]
)
def test_token_ids_do_not_depend_on_the_number_of_slots(name: str, dtype: torch.dtype) -> None:
    stop_ids = (50, 150)
    requests = [
        request(
            f"{prompt}/{i}", prompt_ids=PROMPT * prompt, max_new_tokens=limit, stop_ids=stop_ids
        )
        for prompt, (i, limit) in itertools.product((1, 3, 2), enumerate((12, 1, 5, 8)))
    ]
    engines = [
        NativeEngine(tiny_model(name, dtype=dtype), NativeConfig(slots=slots))
        for slots in (1, 3, 64)
    ]
    answers = [run(engine, requests) for engine in engines]
    for r in requests:
        assert len({tuple(answer[r.id].token_ids) for answer in answers}) == 1
    assert len({len(g.token_ids) for g in answers[0].values()}) >= 4


def test_rows_of_different_distributions_share_a_batch() -> None:
    sampling_settings = [(1.0, 1.0), (0.0, 1.0), (0.7, 1.0), (1.0, 0.5), (0.0, 0.3), (1.3, 0.9)]
    requests = [
        request(f"r{i}", temperature=t, top_p=p) for i, (t, p) in enumerate(sampling_settings)
    ]
    together = run(NativeEngine(tiny_model("llama"), NativeConfig(slots=8)), requests)
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=8))
    for r in requests:
        alone = run(engine, [r])[r.id]
        assert alone.token_ids == together[r.id].token_ids
        assert alone.logprobs == pytest.approx(together[r.id].logprobs, abs=1e-5)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8)])
def test_answers_are_arrays_of_four_bytes_per_number_unless_that_would_round(
    dtype: torch.dtype, size: int
) -> None:
    answer = run(
        NativeEngine(tiny_model("llama", dtype=dtype), NativeConfig(slots=2)), [request("a")]
    )["a"]
    assert (answer.token_ids.itemsize, answer.logprobs.itemsize) == (4, size)  # type: ignore[attr-defined]


def test_bfloat16_log_probabilities_stay_near_the_float32_ones() -> None:
    engine = NativeEngine(tiny_model("llama", dtype=torch.bfloat16), NativeConfig(slots=4))
    answer = run(engine, group("a", 4, max_new_tokens=12))
    model = tiny_model("llama", dtype=torch.bfloat16).float()
    for g in answer.values():
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*PROMPT, *g.token_ids]])).logits[
                0, len(PROMPT) - 1 : -1
            ]
        expected = logits.log_softmax(-1)[range(12), list(g.token_ids)]
        assert (torch.tensor(g.logprobs) - expected).abs().mean() < 0.05


def test_dropped_weights_free_their_memory_and_come_back_with_the_next_load() -> None:
    model = tiny_model("tied llama")
    source = ModelWeights(tiny_model("tied llama"))
    requests = group("a", 3)
    engine = NativeEngine(model, NativeConfig(slots=4))
    before = run(engine, requests)
    engine.submit(group("b", 1))
    with pytest.raises(EngineError, match="drop_weights while 1 requests are in flight"):
        engine.drop_weights()
    engine.abort(["b0"])
    for _ in range(2):
        engine.drop_weights()
        assert not any("prepacked" in vars(module) for module in model.modules())
        with pytest.raises(EngineError, match="incomplete \\(dropped"):
            engine.submit(requests)
        engine.load_weights(source, 1)
        assert {i: g.token_ids for i, g in run(engine, requests).items()} == {
            i: g.token_ids for i, g in before.items()
        }


# --- the work it saves ------------------------------------------------------------------------------------------------


def test_a_group_is_prefilled_once() -> None:
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=64))
    run(engine, group("a", 8))
    assert (engine.stats.prefills, engine.stats.prefill_prompts, engine.stats.prefill_tokens) == (
        1,
        1,
        4,
    )
    # the first of six tokens comes from the prefill
    assert (engine.stats.decode_steps, engine.stats.decode_tokens) == (5, 8 * 5)
    assert engine.stats.sampled_tokens == 8 * 6


def test_waiting_prompts_are_prefilled_together() -> None:
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=64))
    run(
        engine,
        [*group("a", 3), *group("b", 3, prompt_ids=PROMPT * 3), *group("c", 2, prompt_ids=(1,))],
    )
    assert (engine.stats.prefills, engine.stats.prefill_prompts, engine.stats.prefill_tokens) == (
        1,
        3,
        4 + 12 + 1,
    )


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_a_group_that_starts_over_many_polls_is_still_prefilled_once(slots: int) -> None:
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=slots))
    requests = [
        *group("a", 7),
        *group("b", 4, prompt_ids=PROMPT * 2),
        *group("c", 5, prompt_ids=PROMPT * 3),
    ]
    done = run(engine, requests)
    assert (engine.stats.prefill_prompts, engine.stats.prefill_tokens) == (3, 4 + 8 + 12)
    plenty = run(NativeEngine(tiny_model("llama"), NativeConfig(slots=64)), requests)
    assert {i: g.token_ids for i, g in done.items()} == {i: g.token_ids for i, g in plenty.items()}


def test_a_prompt_that_no_request_waits_for_is_not_kept() -> None:
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=2))
    engine.submit(group("a", 3, max_new_tokens=50))
    engine.poll()
    engine.abort(["a2"])
    engine.submit([request("again")])
    engine.abort(["a0"])
    engine.poll()
    assert engine.stats.prefill_prompts == 2


def test_finished_rows_are_refilled_in_the_same_poll() -> None:
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=2))
    run(
        engine,
        [
            request("a", max_new_tokens=3),
            request("b", max_new_tokens=9),
            request("c", max_new_tokens=6),
        ],
    )
    # a's slot goes to c with a's third token, and c's last comes with b's: eight full steps
    assert (engine.stats.decode_steps, engine.stats.decode_slot_steps) == (8, 15)


def test_finished_rows_cost_nothing_once_the_queue_is_empty() -> None:
    limits = (2, 9, 4, 1, 7)
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=8))
    requests = [request(f"r{i}", max_new_tokens=n) for i, n in enumerate(limits)]
    done = run(engine, requests)
    assert engine.stats.decode_slot_steps == sum(limits) - len(limits)
    assert engine.stats.decode_steps == max(limits) - 1
    alone = NativeEngine(tiny_model("llama"), NativeConfig(slots=1))
    assert all(run(alone, [r])[r.id].token_ids == done[r.id].token_ids for r in requests)


def test_one_poll_is_one_token_for_every_live_sequence() -> None:
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=8))
    engine.submit(group("a", 3, max_new_tokens=20))
    for polls in range(1, 5):
        engine.poll()
        assert engine.stats.sampled_tokens == 3 * polls


def test_prefills_are_bounded_with_their_padding() -> None:
    def lengths(*prompts: int) -> list[list[int]]:
        return [list(map(len, batch)) for batch in prefill_batches([(1,) * n for n in prompts])]

    half = PREFILL_TOKENS // 2
    third = PREFILL_TOKENS // 3
    assert lengths(half, half, 1) == [[half, half], [1]]
    assert lengths(1, third, third, third) == [[1, third, third], [third]]
    assert lengths(PREFILL_TOKENS + 5, 1) == [[PREFILL_TOKENS + 5], [1]]
    assert lengths() == []


# --- the memory it takes ----------------------------------------------------------------------------------------------


def bytes_per_position() -> int:
    """Of the tiny Llama in float32: keys and values, 2 layers, 2 heads of 8."""
    return 2 * 2 * 2 * 8 * 4


def test_memory_follows_what_is_live_and_is_given_back() -> None:
    engine = NativeEngine(llama(max_position_embeddings=30_000), NativeConfig(slots=64))
    engine.submit(group("a", 2, max_new_tokens=20_480))
    engine.poll()
    assert engine.cache_bytes == 2 * 64 * bytes_per_position()
    for _ in range(70):
        engine.poll()
    assert engine.cache_bytes == 2 * 128 * bytes_per_position()
    engine.abort(["a0", "a1"])
    assert engine.cache_bytes == 0
    assert engine.stats.cache_bytes_peak == 2 * 128 * bytes_per_position()


def test_memory_never_exceeds_what_is_free() -> None:
    memory = FakeMemory(bytes_for_cache(120, slots=64))
    model = tiny_model("llama", dtype=torch.float64)
    engine = NativeEngine(model, NativeConfig(slots=64), memory=memory)
    limits = [(4, 20), (30, 60), (8, 5), (1, 10), (80, 40), (5, 5), (9, 9), (60, 6)]
    requests = [
        request(f"r{i}{j}", prompt_ids=tuple(range(prompt)), max_new_tokens=new)
        for i, (prompt, new) in enumerate(limits)
        for j in range(2)
    ]
    done = run(engine, requests)
    assert engine.stats.cache_bytes_peak <= 120 * POSITION_BYTES
    plenty = run(
        NativeEngine(tiny_model("llama", dtype=torch.float64), NativeConfig(slots=64)), requests
    )
    assert {i: g.token_ids for i, g in done.items()} == {i: g.token_ids for i, g in plenty.items()}


def test_memory_is_divided_for_a_model_that_names_no_intermediate_size() -> None:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=6, bos_token_id=None, eos_token_id=None
    )
    assert not hasattr(config, "intermediate_size")
    model = randomised(GPT2LMHeadModel(config), seed=0).eval()
    engine = NativeEngine(model, NativeConfig(slots=4), memory=FakeMemory())
    assert len(run(engine, group("g", 4))) == 4


def admit(scheduler, rows):
    return scheduler.admit(rows.sequences, len(rows.in_use), rows.num_branches)


def rows_of(groups: Sequence[list[RunningSequence]]) -> Rows:
    rows = Rows()
    for started in groups:
        rows.assign(Row(started))
    return rows


def names(groups: Sequence[list[RunningSequence]]) -> list[str]:
    return [" ".join(seq.request.id for seq in started) for started in groups]


def test_admission_counts_rows_times_the_longest_reservation() -> None:
    scheduler = Scheduler(slots=8, max_positions=None, vocabulary=200)
    scheduler.cache_tokens = 100
    # 20 positions each
    small = [request(f"s{i}", prompt_ids=(*PROMPT, i), max_new_tokens=15) for i in range(7)]
    scheduler.submit(
        [*small, request("big", max_new_tokens=46), request("last", max_new_tokens=1, top_p=0.5)]
    )
    started = admit(scheduler, rows_of([]))
    assert names(started) == ["s0", "s1", "s2", "s3", "s4"]  # 5 x 20
    assert admit(scheduler, rows_of(started)) == []
    # one of 50 beside two of 20 would take 3 x 50; nobody overtakes it
    assert names(admit(scheduler, rows_of(started[:2]))) == ["s5", "s6"]
    assert admit(scheduler, rows_of(started[:2])) == []
    assert names(admit(scheduler, rows_of(started[:1]))) == ["big"]


def test_a_group_that_starts_counts_with_all_its_requests_and_later_with_its_branches() -> None:
    scheduler = Scheduler(slots=8, max_positions=None, vocabulary=200)
    groups = [group(letter, 5, prompt_ids=(*PROMPT, i)) for i, letter in enumerate("abcd")]
    scheduler.submit([r for each in groups for r in each])
    started = admit(scheduler, rows_of([]))
    # with five of eight taken another may start
    assert names(started) == ["a0 a1 a2 a3 a4", "b0 b1 b2 b3 b4"]
    # once each of them has drawn a token that all have drawn, they are two
    assert names(admit(scheduler, rows_of(started))) == ["c0 c1 c2 c3 c4", "d0 d1 d2 d3 d4"]
    parted = Rows()
    parted.assign(
        Row([RunningSequence(groups[0][0])], paused=[[RunningSequence(r)] for r in groups[0][1:]])
    )
    parted.assign(
        Row(
            [RunningSequence(r) for r in groups[1][:2]],
            paused=[[RunningSequence(r)] for r in groups[1][2:]],
        )
    )
    assert parted.num_branches == 9
    scheduler.submit([request("e")])
    assert admit(scheduler, parted) == []


@pytest.mark.parametrize(
    "options", [{"temperature": 0.5}, {"top_p": 0.5}, {"stop_ids": (1,)}, {"min_new_tokens": 1}]
)
def test_only_requests_with_the_same_distributions_start_in_one_row(
    options: dict[str, object],
) -> None:
    scheduler = Scheduler(slots=8, max_positions=None, vocabulary=200)
    scheduler.submit([request("a"), request("b", max_new_tokens=9), request("c", **options)])
    assert names(admit(scheduler, rows_of([]))) == ["a b", "c"]


@for_each_row(
    ("options", "words"),
    [
        (
            {"max_new_tokens": 509},
            ("513 positions", "4 prompt", "509 max_new_tokens", "embeddings is 512"),
        ),
        ({"temperature": -0.1}, ("temperature", "-0.1")),
        ({"temperature": math.nan}, ("temperature", "nan")),
        ({"top_p": 0.0}, ("top_p", "0.0")),
        ({"top_p": 1.5}, ("top_p", "1.5")),
        ({"seed": -1}, ("seed", "-1")),
        ({"prompt_ids": (3, VOCABULARY)}, (f"token {VOCABULARY}", f"vocabulary of {VOCABULARY}")),
        ({"prompt_ids": (-1, 3)}, ("token -1",)),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_with_its_numbers(
    options: dict[str, object], words: tuple[str, ...]
) -> None:
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=2))
    with pytest.raises(EngineError) as caught:
        engine.submit([request("good"), request("bad", **options)])
    assert "'bad'" in str(caught.value)
    assert all(word in str(caught.value) for word in words)
    assert engine.poll() == []  # the good one was not queued either


def test_an_engine_of_no_size_is_refused() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        NativeEngine(tiny_model("llama"), NativeConfig(slots=0))


# --- weights ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensors:
    """A `WeightSource` of these."""

    tensors: dict[str, Tensor]

    def named_tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self.tensors.items()


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def test_missing_and_unexpected_names_are_named_and_the_engine_waits_for_a_complete_set() -> None:
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=2))
    tensors = weights(tiny_model("llama", seed=1))
    broken = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"} | {
        "extra": torch.ones(1)
    }
    with pytest.raises(EngineError, match=r"missing: model\.norm\.weight; unexpected: extra"):
        engine.load_weights(Tensors(broken), 1)
    with pytest.raises(EngineError, match="incomplete"):
        engine.submit([request("a")])
    engine.load_weights(Tensors(tensors), 2)
    assert run(engine, [request("a")])["a"].version == 2


def test_a_weight_of_another_shape_is_named_with_both_shapes() -> None:
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=2))
    tensors = weights(tiny_model("llama")) | {"model.norm.weight": torch.ones(47)}
    with pytest.raises(
        EngineError,
        match=r"model\.norm\.weight has shape \(47,\), the engine's model needs \(48,\)",
    ):
        engine.load_weights(Tensors(tensors), 1)


@pytest.mark.parametrize("left_out", [(), ("lm_head.weight",), ("model.embed_tokens.weight",)])
def test_a_tied_weight_may_come_under_any_of_its_names(left_out: tuple[str, ...]) -> None:
    engine = NativeEngine(tiny_model("tied llama"), NativeConfig(slots=2))
    new = tiny_model("tied llama", seed=1)
    engine.load_weights(
        Tensors({k: v.clone() for k, v in weights(new).items() if k not in left_out}), 1
    )
    expected = run(NativeEngine(new, NativeConfig(slots=2)), [request("a")])["a"]
    assert run(engine, [request("a")])["a"].token_ids == expected.token_ids


def test_a_tied_weight_with_two_values_is_an_error() -> None:
    engine = NativeEngine(tiny_model("tied llama"), NativeConfig(slots=2))
    tensors = weights(tiny_model("tied llama"))
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
    with pytest.raises(
        EngineError, match=r"model\.embed_tokens\.weight and lm_head\.weight are one tied weight"
    ):
        engine.load_weights(Tensors(tensors), 1)


def test_weights_are_converted_to_the_engines_precision() -> None:
    engine = NativeEngine(tiny_model("llama", dtype=torch.bfloat16), NativeConfig(slots=2))
    new = tiny_model("llama", seed=1)
    engine.load_weights(ModelWeights(new), 1)
    expected = run(NativeEngine(new.to(torch.bfloat16), NativeConfig(slots=2)), [request("a")])["a"]
    assert run(engine, [request("a")])["a"].token_ids == expected.token_ids


def test_logits_that_are_not_finite_are_an_error_that_names_the_version() -> None:
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=2))
    tensors = weights(tiny_model("llama"))
    engine.load_weights(Tensors(tensors | {"model.norm.weight": torch.full((48,), math.nan)}), 7)
    for options in ({}, {"temperature": 0.0}, {"top_p": 0.5}):
        engine.submit([request("a", **options)])
        with pytest.raises(EngineError, match=r"not finite \(weights version 7\)"):
            engine.poll()


def test_the_callers_weights_are_not_the_engines() -> None:
    engine = NativeEngine(tiny_model("llama"), NativeConfig(slots=2))
    source = tiny_model("llama", seed=1)
    engine.load_weights(ModelWeights(source), 1)
    before = run(engine, [request("a")])["a"]
    randomised(source, seed=2)
    assert run(engine, [request("a")])["a"] == before


# --- models that it refuses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_it_cannot_serve_is_refused_by_name(name: str) -> None:
    make, reason = REFUSED[name]
    model = randomised(make(), seed=0).eval()
    plain = model.config._attn_implementation
    with pytest.raises(EngineError, match=r"rollout\.engine=vllm") as caught:
        NativeEngine(model, NativeConfig(slots=2))
    assert type(model).__name__ in str(caught.value)
    assert reason in str(caught.value)
    assert model.config._attn_implementation == plain


def test_a_head_that_differs_from_the_models_own_logits_is_found_by_numbers() -> None:
    class Shifted(type(llama())):
        def forward(self, *args: object, **kwargs: object) -> object:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 1.01
            return output

    with pytest.raises(EngineError, match="differ from its plain forward"):
        NativeEngine(randomised(Shifted(llama().config), seed=0).eval(), NativeConfig(slots=2))
    NativeEngine(randomised(tied_llama(), seed=0).eval(), NativeConfig(slots=2))


# --- how it draws -----------------------------------------------------------------------------------------------------


def draw(
    logits: Tensor, u: Sequence[float], *, temperature: float = 1.0, top_p: float = 1.0
) -> tuple[list[int], Tensor]:
    settings = np.array([[temperature] * len(logits), [top_p] * len(logits)])
    draws = UniformDraws(torch.tensor(u, dtype=torch.float64)[:, None])
    tokens, logprobs = sample(
        logits, SamplingSettings.of(settings, torch.from_numpy(settings), draws)
    )
    return tokens.tolist(), logprobs


def test_sampling_inverts_the_cumulative_sum() -> None:
    distribution = torch.tensor([[0.1, 0.2, 0.0, 0.3, 0.4]], dtype=torch.float64)
    for u, token in (
        (0.0, 0),
        (0.05, 0),
        (0.15, 1),
        (0.29, 1),
        (0.31, 3),
        (0.59, 3),
        (0.61, 4),
        (BELOW_ONE, 4),
    ):
        tokens, logprobs = draw(distribution.log(), [u])
        assert tokens == [token]
        assert float(logprobs[0]) == pytest.approx(math.log(float(distribution[0, token])))


@for_each_row(
    "size", [2, 197, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 7, 32_000, 151_669]
)
def test_two_levels_sample_what_one_cumulative_sum_samples(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(6, size, generator=generator, dtype=torch.float64) * 3
    uniforms = torch.rand(6, 1, generator=generator, dtype=torch.float64)
    cumulative = logits.softmax(-1).cumsum(-1)
    expected = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    assert draw(logits, uniforms[:, 0].tolist())[0] == expected[:, 0].tolist()


@for_each_row("dtype", [torch.float32, torch.float64, torch.bfloat16])
@for_each_row("size", [5, BLOCK, 3 * BLOCK, 2000])
def test_a_token_of_probability_zero_is_never_sampled(size: int, dtype: torch.dtype) -> None:
    uniforms = [0.0, 5e-324, 1e-300, 1e-9, 0.25, 0.5, 0.75, 1 - 1e-9, BELOW_ONE]
    generator = torch.Generator().manual_seed(size)
    for kept in ([0], [size - 1], [size // 2], [1, size - 2], [size // 3, size // 2]):
        logits = torch.full((len(uniforms), size), -math.inf, dtype=dtype)
        logits[:, kept] = torch.randn(len(uniforms), len(kept), generator=generator).to(dtype)
        for top_p in (1.0, 0.9):
            tokens, logprobs = draw(logits, uniforms, top_p=top_p)
            assert set(tokens) <= set(kept)
            assert torch.isfinite(logprobs).all()
        assert draw(logits, uniforms)[0][0] == min(kept)
        assert draw(logits, uniforms)[0][-1] == max(kept)


def test_sums_that_round_apart_stay_inside_the_block() -> None:
    # float32 block sums and the tokens' own sum differ in the last bits, and u just under 1 falls
    # between them
    generator = torch.Generator().manual_seed(0)
    distribution = torch.rand(400, 5 * BLOCK + 3, generator=generator)
    distribution[:, -10:] = 0.0
    sampled = invert_cdf(
        distribution, UniformDraws(torch.full((400, 1), BELOW_ONE, dtype=torch.float64))
    )
    assert (distribution.gather(1, sampled[:, None]) > 0).all()
    assert (sampled >= 4 * BLOCK).all()


def test_the_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.5]])
    _, logprobs = draw(logits, [0.999], temperature=0.5)
    assert float(logprobs[0]) == pytest.approx(
        float((logits / 0.5).log_softmax(-1)[0, 2]), abs=1e-6
    )
    tiny, _ = draw(logits, [BELOW_ONE], temperature=1e-3)
    assert tiny == [1]


def naive_nucleus(distribution: Tensor, u: float, top_p: float) -> tuple[int, float]:
    """Sort all, add up one by one, keep, draw."""
    order = sorted(range(len(distribution)), key=lambda token: (-float(distribution[token]), token))
    kept = []
    mass = 0.0
    for token in order:
        kept.append(token)
        mass += float(distribution[token])
        if mass >= top_p:
            break
    below = 0.0
    for token in kept:
        below += float(distribution[token])
        if below > u * mass:
            return token, math.log(float(distribution[token]) / mass)
    raise AssertionError("the nucleus adds up to less than its mass")


@for_each_row("spread", [0.1, 1.0, 4.0])
@for_each_row("top_p", [0.01, 0.5, 0.7, 0.95, 0.999])
def test_the_nucleus_is_that_of_a_full_sort(spread: float, top_p: float) -> None:
    # a flat law needs more than the first candidates, a steep one a few
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(8, 3000, generator=generator, dtype=torch.float64) * spread
    uniforms = torch.rand(8, generator=generator, dtype=torch.float64).tolist()
    tokens, logprobs = draw(logits, uniforms, top_p=top_p)
    for distribution, u, token, logprob in zip(
        logits.softmax(-1), uniforms, tokens, logprobs.tolist(), strict=True
    ):
        assert (token, pytest.approx(logprob, abs=1e-9)) == naive_nucleus(distribution, u, top_p)


@pytest.mark.parametrize("top_p", [0.05, 0.25])
def test_equally_probable_tokens_enter_the_nucleus_by_id(top_p: float) -> None:
    # fewer and more of them than are looked at first
    size = 10 * FIRST_CANDIDATES
    logits = torch.zeros(50, size)
    tokens, logprobs = draw(logits, [(i + 0.5) / 50 for i in range(50)], top_p=top_p)
    assert tokens == [int((i + 0.5) / 50 * size * top_p) for i in range(50)]
    assert logprobs.tolist() == pytest.approx([-math.log(size * top_p)] * 50, abs=1e-5)


def test_the_nucleus_reaches_its_mass_and_no_further() -> None:
    distribution = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    for top_p, kept in (
        (0.5, [0]),
        (0.51, [0, 1]),
        (0.75, [0, 1]),
        (0.76, [0, 1, 2]),
        (0.9, [0, 1, 2, 3]),
    ):
        assert draw(distribution, [BELOW_ONE], top_p=top_p)[0] == [kept[-1]]


def test_a_response_longer_than_the_first_uniforms_continues_the_same_stream() -> None:
    seq = RunningSequence(request("a", seed=9, max_new_tokens=1000))
    uniforms = keyed_uniforms(9, 5 * FIRST_UNIFORMS)
    for u in uniforms:
        assert seq.next_uniform() == u
        seq.append(0, 0.0)
