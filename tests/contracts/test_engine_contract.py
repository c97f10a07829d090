"""What every rollout engine promises, run over each of them.

A new engine joins by an entry in `ENGINES`.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.scripted_engine import ScriptedEngine
from dapo.config.rollout_options import NativeConfig
from dapo.core.errors import EngineError
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.distributed.engine_pool import EnginePool
from dapo.engines.engine import RolloutEngine
from dapo.engines.native.engine import NativeEngine
from dapo.engines.native.model_kernels import ModelKernels
from dapo.types import Finish, Generation, GenerationRequest
from helpers import vllm_engines
from helpers.launchers import SHARED_WORKERS, engine_spec
from helpers.tiny_models import SERVED, VOCABULARY, ModelWeights, tiny_model, wide_model
from helpers.varlen_operators import decode_attention

pytestmark = pytest.mark.usefixtures("forked_workers")

PROMPT = (11, 42, 7, 99)
LONGER_PROMPT = (5, 5, 120, 64, 3, 190, 17, 1, 80)
TOLERANCE = 1e-5


@dataclass(frozen=True)
class EngineUnderTest:
    """How to make an engine, and a twin of the model that it samples from, if it has one."""

    make: Callable[[int], RolloutEngine]
    """From the number of slots."""
    model: Callable[[int], PreTrainedModel] | None = None
    """From a seed for its weights; the engine starts with those of seed 0."""
    tolerance: float = TOLERANCE
    """Of its log-probabilities against the model's plain forward, in nats."""


def keyed_script(request: GenerationRequest) -> tuple[list[int], Finish]:
    """As a model's answer would be, a function of the seed alone."""
    return [int(u * VOCABULARY) for u in keyed_uniforms(request.seed, 64)], "stop"


def native(name: str) -> EngineUnderTest:
    """The native engine on a tiny model."""
    return EngineUnderTest(
        make=lambda slots: NativeEngine(tiny_model(name), NativeConfig(slots=slots)),
        model=lambda seed: tiny_model(name, seed=seed),
    )


def native_on_gpu(name: str) -> EngineUnderTest:
    """The native engine as it computes on a GPU, with its attention in plain arithmetic."""
    model_kernels = ModelKernels(fuses_weights=True, attend=decode_attention, num_splits=1)
    return replace(
        native(name),
        make=lambda slots: NativeEngine(
            tiny_model(name), NativeConfig(slots=slots), model_kernels=model_kernels
        ),
    )


def pool(size: int, **options: Any) -> EngineUnderTest:
    """Native engines in processes of their own."""

    def make(slots: int) -> RolloutEngine:
        SHARED_WORKERS.release_all()
        specs = [engine_spec("native", model=pickle.dumps(tiny_model("llama")), slots=slots)] * size
        return EnginePool(SHARED_WORKERS, specs, max_restarts=0, log=print, **options)

    return EngineUnderTest(make=make, model=lambda seed: tiny_model("llama", seed=seed))


def vllm(name: str) -> EngineUnderTest:
    """vLLM on a tiny model, in a process of its own."""

    def make(slots: int) -> RolloutEngine:
        engine = vllm_engines.fresh(name, slots=slots)
        engine.load_weights(ModelWeights(wide_model(name)), 0)
        return engine

    return EngineUnderTest(
        make=make, model=lambda seed: wide_model(name, seed=seed), tolerance=1e-4
    )


ENGINES: dict[str, EngineUnderTest] = {
    "scripted": EngineUnderTest(make=lambda slots: ScriptedEngine(keyed_script, slots=slots)),
    **{f"native, {name}": native(name) for name in SERVED},
    **{f"native as on a GPU, {name}": native_on_gpu(name) for name in ("qwen2", "gemma3")},
    "pool of 1": pool(1),
    "pool of 2": pool(2),
    "pool of 2 by load": pool(2, reproducible=False),
    **({"vllm, llama": vllm("llama")} if vllm_engines.AVAILABLE else {}),
}
PROTOCOL = [
    name
    for name in ENGINES
    if name in ("scripted", "native, llama", "vllm, llama") or name.startswith("pool")
]
MODELLED = [name for name, entry in ENGINES.items() if entry.model is not None]
# a law over tokens is drawn the same way whatever the model
STATISTICAL = [name for name in ENGINES if name in ("native, llama", "vllm, llama")]


@pytest.fixture(autouse=True)
def one_step_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """In POLL_S, for which a pool by load decodes in one poll, the tiny model ends a whole
    response.
    """
    monkeypatch.setattr("dapo.distributed.engine_pool.POLL_S", 0.0)


def each(names: Sequence[str]) -> pytest.MarkDecorator:
    """Run a test for each of these engines."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=[pytest.mark.vllm] if name.startswith("vllm") else [])
            for name in names
        ],
    )


each_engine = each(PROTOCOL)
each_model = each(MODELLED)
each_statistical = each(STATISTICAL)


def new_weights(name: str) -> ModelWeights:
    """That the engine can load, if it looks at them at all."""
    return ModelWeights((ENGINES[name].model or tiny_model_of)(1))


def tiny_model_of(seed: int) -> PreTrainedModel:
    """Any."""
    return tiny_model("llama", seed=seed)


def request(label: str = "a", **options: object) -> GenerationRequest:
    """A request whose seed follows its label, so that equal labels ask for the same response."""
    defaults = GenerationRequest(
        id=label,
        prompt_ids=PROMPT,
        max_new_tokens=8,
        temperature=1.0,
        top_p=1.0,
        seed=keyed_seed("test", label),
        stop_ids=(),
    )
    return replace(defaults, **options)


def group(label: str, size: int, **options: object) -> list[GenerationRequest]:
    """Adjacent requests for responses to one prompt."""
    return [request(f"{label}{i}", **options) for i in range(size)]


def finish_all(engine: RolloutEngine, count: int, *, polls: int = 2000) -> dict[str, Generation]:
    """Poll until `count` requests have been answered, each once."""
    done: dict[str, Generation] = {}
    for _ in range(polls):
        if len(done) == count:
            break
        for generation in engine.poll():
            assert generation.request_id not in done
            done[generation.request_id] = generation
    assert len(done) == count
    assert engine.poll() == []
    return done


def run(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> dict[str, Generation]:
    """All requests at once, to the end."""
    engine.submit(requests)
    return finish_all(engine, len(requests))


def mixed_requests() -> list[GenerationRequest]:
    """Two groups, limits from 1 to 12, stop ids that some responses meet."""
    limits = (1, 12, 3, 7, 12, 2, 9)
    stop_ids = tuple(range(0, VOCABULARY, 9))
    first = [request(f"p{i}", max_new_tokens=n, stop_ids=stop_ids) for i, n in enumerate(limits)]
    second = [
        replace(r, id=f"q{i}", prompt_ids=LONGER_PROMPT, seed=r.seed + 1)
        for i, r in enumerate(first)
    ]
    return first + second


# --- any engine -------------------------------------------------------------------------------------------------------


@each_engine
@pytest.mark.parametrize("slots", [1, 3])
def test_every_request_is_answered_once_within_its_limits(name: str, slots: int) -> None:
    engine = ENGINES[name].make(slots)
    requests = mixed_requests()
    done = run(engine, requests)
    for r in requests:
        g = done[r.id]
        assert len(g.token_ids) == len(g.logprobs) <= r.max_new_tokens
        assert all(0 <= token < VOCABULARY for token in g.token_ids)
        assert all(logprob <= 0 for logprob in g.logprobs)
        stopped = g.token_ids[-1] in r.stop_ids
        assert g.finish == ("stop" if stopped else "length")
        assert stopped or len(g.token_ids) == r.max_new_tokens
        assert not set(g.token_ids[:-1]) & set(r.stop_ids)
    assert {g.finish for g in done.values()} == {"stop", "length"}


@each_engine
def test_an_end_token_exactly_at_the_limit_is_stop(name: str) -> None:
    engine = ENGINES[name].make(4)
    free = run(engine, [request(max_new_tokens=6)])["a"]
    last = free.token_ids[-1]
    limit = free.token_ids.index(last) + 1
    done = run(engine, [request(max_new_tokens=limit, stop_ids=(last,))])["a"]
    assert done.finish == "stop"
    assert done.token_ids == free.token_ids[:limit]


@each_engine
def test_no_end_token_comes_among_the_first_min_new_tokens(name: str) -> None:
    # every other token: five in a row without one are rare by chance
    stop_ids = tuple(range(0, VOCABULARY, 2))
    done = run(
        ENGINES[name].make(8),
        group("a", 24, max_new_tokens=12, min_new_tokens=5, stop_ids=stop_ids),
    )
    for generation in done.values():
        assert not set(generation.token_ids[:5]) & set(stop_ids)
        assert (len(generation.token_ids) >= 6 and generation.finish == "stop") or len(
            generation.token_ids
        ) == 12
    assert any(generation.finish == "stop" for generation in done.values())


@each_engine
def test_a_least_length_outside_the_limit_is_refused(name: str) -> None:
    engine = ENGINES[name].make(2)
    for least in (-1, 9):
        with pytest.raises(
            EngineError, match=f"min_new_tokens must be from 0 to max_new_tokens=8, got {least}"
        ):
            engine.submit([request(max_new_tokens=8, min_new_tokens=least)])


@each_engine
def test_either_of_two_stop_ids_ends_a_response(name: str) -> None:
    engine = ENGINES[name].make(4)
    free = run(engine, [request(max_new_tokens=8)])["a"].token_ids
    early = free[2]
    late = next(token for token in free[3:] if token not in free[:3])
    for stop_ids, end in (((late, early), early), ((early, late), early), ((late,), late)):
        done = run(engine, [request(stop_ids=stop_ids)])["a"]
        assert (done.finish, done.token_ids) == ("stop", free[: free.index(end) + 1])


@each_engine
def test_a_response_depends_on_its_seed_not_on_its_company(name: str) -> None:
    requests = mixed_requests()
    together = run(ENGINES[name].make(5), requests)
    backwards = run(ENGINES[name].make(64), requests[::-1])
    engine = ENGINES[name].make(2)
    for r in requests:
        alone = run(engine, [r])[r.id]
        assert alone.token_ids == together[r.id].token_ids == backwards[r.id].token_ids
        assert alone.finish == together[r.id].finish == backwards[r.id].finish


@each_engine
def test_requests_may_come_while_others_are_live(name: str) -> None:
    requests = mixed_requests()
    expected = run(ENGINES[name].make(4), requests)
    engine = ENGINES[name].make(4)
    done: dict[str, Generation] = {}
    for r in requests:
        engine.submit([r])
        done |= {g.request_id: g for g in engine.poll()}
    done |= finish_all(engine, len(requests) - len(done))
    assert {i: g.token_ids for i, g in done.items()} == {
        i: g.token_ids for i, g in expected.items()
    }


@each_engine
def test_service_is_first_come_first_served(name: str) -> None:
    engine = ENGINES[name].make(2)
    engine.submit(group("a", 6, max_new_tokens=3))
    order = [g.request_id for _ in range(12) for g in engine.poll()]
    assert [set(order[i : i + 2]) for i in (0, 2, 4)] == [{"a0", "a1"}, {"a2", "a3"}, {"a4", "a5"}]


@each_engine
def test_abort_gives_partial_responses_and_queued_ones_give_none(name: str) -> None:
    # of different prompts: an engine may start a group as a whole; six, so that two engines of two
    # slots have queues
    requests = [request(f"a{i}", max_new_tokens=10, prompt_ids=(*PROMPT, i)) for i in range(6)]
    whole = run(ENGINES[name].make(2), requests)
    engine = ENGINES[name].make(2)
    engine.submit(requests)
    for _ in range(3):
        assert engine.poll() == []
    stopped = engine.abort(["a5", "a0"])
    assert [g.request_id for g in stopped] == ["a5", "a0"]
    assert [g.finish for g in stopped] == ["aborted", "aborted"]
    assert len(stopped[0].token_ids) == len(stopped[0].logprobs) == 0
    assert 0 < len(stopped[1].token_ids) < 10
    assert stopped[1].token_ids == whole["a0"].token_ids[: len(stopped[1].token_ids)]
    assert len(stopped[1].logprobs) == len(stopped[1].token_ids)
    # the slot is free for the queue, and nobody else noticed
    rest = finish_all(engine, 4)
    assert {i: g.token_ids for i, g in rest.items()} == {
        i: whole[i].token_ids for i in ("a1", "a2", "a3", "a4")
    }
    # the ids are free again, and the answer is the one it would have been
    assert run(engine, requests[:1])["a0"].token_ids == whole["a0"].token_ids


def continuation(r: GenerationRequest, part: Generation) -> GenerationRequest:
    """The request for the rest of a response."""
    n = len(part.token_ids)
    return replace(
        r,
        id=f"{r.id}+",
        prompt_ids=(*r.prompt_ids, *part.token_ids),
        max_new_tokens=r.max_new_tokens - n,
        min_new_tokens=max(0, r.min_new_tokens - n),
        offset=r.offset + n,
        previous=r.id,
    )


def assert_continued_equals_whole(
    engine: RolloutEngine, requests: list[GenerationRequest], tolerance: float
) -> set[int]:
    """Abort and continue these requests together after several numbers of polls; returns the
    numbers of tokens left.
    """
    left: set[int] = set()
    whole = run(engine, requests)
    longest = max(len(g.token_ids) for g in whole.values())
    for polls in (0, 1, 2, longest // 2, longest - 1):
        engine.submit(requests)
        done = {g.request_id: g for _ in range(polls) for g in engine.poll()}
        parts = {
            g.request_id: g for g in engine.abort([r.id for r in requests if r.id not in done])
        }
        for name, part in parts.items():
            if part.finish != "aborted":  # it had ended before the abort
                assert (part.token_ids, part.finish) == (whole[name].token_ids, whole[name].finish)
        unfinished = [r for r in requests if r.id in parts and parts[r.id].finish == "aborted"]
        rest = run(engine, [continuation(r, parts[r.id]) for r in unfinished])
        left |= {len(whole[name].token_ids) - len(part.token_ids) for name, part in parts.items()}
        for r in unfinished:
            part = parts[r.id]
            last = rest[f"{r.id}+"]
            assert [*part.token_ids, *last.token_ids] == list(whole[r.id].token_ids)
            assert [*part.logprobs, *last.logprobs] == pytest.approx(
                list(whole[r.id].logprobs), abs=tolerance
            )
            assert last.finish == whole[r.id].finish
    return left


def requests_to_continue(name: str) -> list[GenerationRequest]:
    """A group with a least length and stop ids, alone samples, a nucleus, and a greedy one; vLLM's
    are all greedy.
    """
    stop_ids = tuple(range(0, VOCABULARY, 9))
    grouped = group("g", 4, max_new_tokens=12, min_new_tokens=5, stop_ids=stop_ids)
    alone = [
        request(f"a{i}", max_new_tokens=10 + i, prompt_ids=(*LONGER_PROMPT, i), temperature=0.7)
        for i in range(2)
    ]
    others = [
        request("n", max_new_tokens=12, top_p=0.8),
        request("z", max_new_tokens=12, temperature=0.0),
    ]
    found = [*grouped, *alone, *others]
    return [replace(r, temperature=0.0) for r in found] if name.startswith("vllm") else found


@each([name for name in ENGINES if name in PROTOCOL or name in MODELLED])
def test_a_response_aborted_and_continued_equals_the_whole_one(name: str) -> None:
    assert_continued_equals_whole(
        ENGINES[name].make(16), requests_to_continue(name), ENGINES[name].tolerance
    )


@pytest.mark.parametrize("name", SERVED)
def test_in_float64_a_continued_response_has_the_same_log_probabilities_to_1e_9(name: str) -> None:
    engine = NativeEngine(tiny_model(name).double(), NativeConfig(slots=16))
    assert {1, 10, 11, 12} <= assert_continued_equals_whole(
        engine, requests_to_continue(name), 1e-9
    )


@each([name for name in ENGINES if name.startswith("vllm")])
def test_vllm_continues_a_response_repeatably_and_with_new_numbers(
    name: str,
) -> None:
    engine = ENGINES[name].make(8)
    r = request(max_new_tokens=24, prompt_ids=(*PROMPT, 3, 3))
    first = run(engine, [r])["a"]
    again = [run(engine, [replace(r, offset=2)])["a"] for _ in range(2)]
    assert again[0].token_ids == again[1].token_ids != first.token_ids
    assert_logprobs_agree(name, twin(name), r, again[0])


@each_engine
def test_a_negative_offset_is_refused(name: str) -> None:
    with pytest.raises(
        EngineError, match="'a': offset must be 0 or more, the tokens sampled before, got -1"
    ):
        ENGINES[name].make(2).submit([request(offset=-1)])


@each_engine
def test_aborting_nothing_gives_nothing(name: str) -> None:
    assert ENGINES[name].make(2).abort([]) == []


@each_engine
def test_aborting_an_unknown_id_is_an_error_and_stops_no_request(name: str) -> None:
    engine = ENGINES[name].make(2)
    engine.submit([request()])
    with pytest.raises(EngineError, match="'b' is not in flight"):
        engine.abort(["a", "b"])
    assert set(finish_all(engine, 1)) == {"a"}
    with pytest.raises(EngineError, match="'a' is not in flight"):
        engine.abort(["a"])


@each_engine
def test_an_id_in_flight_is_refused_and_nothing_of_that_call_is_queued(name: str) -> None:
    engine = ENGINES[name].make(1)
    engine.submit([request("a"), request("b")])
    engine.poll()
    for taken in ("a", "b"):  # live and waiting
        with pytest.raises(EngineError, match=f"'{taken}' is in flight already"):
            engine.submit([request("new"), request(taken)])
    with pytest.raises(EngineError, match="'twice' is in flight already"):
        engine.submit([request("twice"), request("twice")])
    assert set(finish_all(engine, 2)) == {"a", "b"}


@each_engine
def test_a_request_for_no_tokens_or_without_a_prompt_is_refused(name: str) -> None:
    engine = ENGINES[name].make(1)
    with pytest.raises(EngineError, match="max_new_tokens"):
        engine.submit([request(max_new_tokens=0)])
    with pytest.raises(EngineError, match="prompt"):
        engine.submit([request(prompt_ids=())])
    assert engine.poll() == []


@each_engine
def test_polling_an_idle_engine_gives_nothing(name: str) -> None:
    engine = ENGINES[name].make(2)
    assert engine.poll() == []
    engine.submit([])
    assert engine.poll() == []


@each_engine
def test_every_generation_carries_the_version_of_the_weights(name: str) -> None:
    engine = ENGINES[name].make(2)
    weights = new_weights(name)
    for version in (3, 4):
        engine.load_weights(weights, version)
        engine.submit(group("a", 3))
        stopped = engine.abort(["a2"])
        assert {g.version for g in [*finish_all(engine, 2).values(), *stopped]} == {version}


@each_engine
def test_loading_weights_under_way_is_refused(name: str) -> None:
    engine = ENGINES[name].make(1)
    weights = new_weights(name)
    engine.submit(group("a", 2))
    with pytest.raises(EngineError, match="in flight"):
        engine.load_weights(weights, 1)
    engine.poll()
    engine.abort(["a1"])
    with pytest.raises(EngineError, match="in flight"):
        engine.load_weights(weights, 1)
    engine.abort(["a0"])
    engine.load_weights(weights, 1)


@each_engine
def test_a_closed_engine_refuses_every_call(name: str) -> None:
    engine = ENGINES[name].make(1)
    engine.submit(group("a", 2))
    engine.poll()
    engine.close()
    calls: list[Callable[[], object]] = [
        engine.poll,
        lambda: engine.submit([request("b")]),
        lambda: engine.abort(["a0"]),
        lambda: engine.load_weights(new_weights(name), 1),
    ]
    for call in calls:
        with pytest.raises(EngineError, match="closed"):
            call()
    engine.close()


# --- engines with a model: against its plain forward ------------------------------------------------------------------


def twin(name: str, seed: int = 0) -> PreTrainedModel:
    """The model that the engine samples from, run plainly."""
    make = ENGINES[name].model
    assert make is not None
    return make(seed)


@torch.no_grad()
def response_logits(
    model: PreTrainedModel, prompt_ids: Sequence[int], response: Sequence[int]
) -> Tensor:
    """`[tokens, vocabulary]` that the model's own forward gives for each token of a response."""
    logits = model(input_ids=torch.tensor([[*prompt_ids, *response]]), use_cache=False).logits[0]
    return logits[len(prompt_ids) - 1 : -1]


def assert_logprobs_agree(
    name: str, model: PreTrainedModel, r: GenerationRequest, g: Generation
) -> None:
    distribution = (response_logits(model, r.prompt_ids, g.token_ids) / r.temperature).log_softmax(
        -1
    )
    expected = distribution[range(len(g.token_ids)), list(g.token_ids)]
    assert (torch.tensor(g.logprobs) - expected).abs().max() < ENGINES[name].tolerance


@each_model
def test_logprobs_are_those_of_the_plain_forward(name: str) -> None:
    requests = [
        replace(r, temperature=t, id=f"{r.id}{t}") for t in (1.0, 0.7) for r in mixed_requests()
    ]
    requests.append(request("long", max_new_tokens=90))
    done = run(ENGINES[name].make(9), requests)
    model = twin(name)
    for r in requests:
        assert_logprobs_agree(name, model, r, done[r.id])


@each_statistical
def test_before_the_least_length_the_distribution_is_renormalised_without_end_tokens(
    name: str,
) -> None:
    entry = ENGINES[name]
    assert entry.model is not None
    stop_ids = tuple(range(0, VOCABULARY, 2))
    done = run(entry.make(4), [request(max_new_tokens=1, min_new_tokens=1, stop_ids=stop_ids)])["a"]
    logits = entry.model(0)(input_ids=torch.tensor([PROMPT])).logits[0, -1].detach()
    logits[list(stop_ids)] = -torch.inf
    assert done.logprobs[0] == pytest.approx(
        float(logits.log_softmax(-1)[done.token_ids[0]]), abs=entry.tolerance
    )


@each_model
def test_new_weights_are_sampled_from_and_old_ones_are_gone(name: str) -> None:
    engine = ENGINES[name].make(4)
    requests = group("a", 3, temperature=0.7)
    before = run(engine, requests)
    new = twin(name, seed=1)
    engine.load_weights(ModelWeights(new), 1)
    after = run(engine, requests)
    for r in requests:
        assert_logprobs_agree(name, new, r, after[r.id])
    with pytest.raises(AssertionError):
        assert_logprobs_agree(name, new, requests[0], before["a0"])


@each_model
def test_greedy_takes_the_argmax_of_the_plain_forward(name: str) -> None:
    requests = [
        request("a", temperature=0.0, max_new_tokens=20),
        request("b", temperature=0.0, top_p=0.5),
    ]
    done = run(ENGINES[name].make(4), requests)
    for r in requests:
        logits = response_logits(twin(name), r.prompt_ids, done[r.id].token_ids)
        assert list(done[r.id].token_ids) == logits.argmax(-1).tolist()
        # the law sampled from has one token
        assert list(done[r.id].logprobs) == [0.0] * r.max_new_tokens


SAMPLES = 3000
# 0.999 quantiles of chi-square
QUANTILE_30 = 59.70
QUANTILE_12 = 32.91


def chi_square(counts: Tensor, distribution: Tensor, tokens: Sequence[int]) -> float:
    """Over the bins `tokens` and "any other"."""
    observed = torch.cat((counts[list(tokens)], (counts.sum() - counts[list(tokens)].sum())[None]))
    expected = (
        torch.cat(
            (
                distribution[list(tokens)],
                (distribution.sum() - distribution[list(tokens)].sum())[None],
            )
        )
        * counts.sum()
    )
    return float(((observed - expected) ** 2 / expected).sum())


def count(tokens: Sequence[int]) -> Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=VOCABULARY).double()


def next_token_distributions(model: PreTrainedModel, temperature: float) -> tuple[Tensor, Tensor]:
    """`[vocabulary]` of the first token after `PROMPT`, and of the second whatever the first."""
    with torch.no_grad():
        prompts = torch.tensor([[*PROMPT, token] for token in range(VOCABULARY)])
        distributions = (
            model(input_ids=prompts, use_cache=False).logits[:, -2:].double() / temperature
        ).softmax(-1)
    return distributions[0, 0], distributions[0, 0] @ distributions[:, 1]


@each_statistical
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_follow_the_models_distribution(name: str, temperature: float) -> None:
    done = run(
        ENGINES[name].make(500), group("a", SAMPLES, max_new_tokens=2, temperature=temperature)
    )
    distributions = next_token_distributions(twin(name), temperature)
    for position, distribution in enumerate(distributions):
        counts = count([g.token_ids[position] for g in done.values()])
        assert (
            chi_square(counts, distribution, distribution.topk(30).indices.tolist()) < QUANTILE_30
        )
        # the test can tell one law from another
        assert (
            chi_square(counts, distributions[1 - position], distribution.topk(30).indices.tolist())
            > 10 * QUANTILE_30
        )


@each_statistical
def test_top_p_samples_from_the_renormalised_nucleus(name: str) -> None:
    distribution, _ = next_token_distributions(twin(name), 1.3)
    ordered, ids = distribution.sort(descending=True)
    size = int((ordered.cumsum(0) < 0.7).sum()) + 1
    nucleus = ids[:size].tolist()
    mass = ordered[:size].sum()
    assert size > 20
    entry = ENGINES[name]
    done = run(entry.make(500), group("a", SAMPLES, max_new_tokens=1, temperature=1.3, top_p=0.7))
    tokens = [g.token_ids[0] for g in done.values()]
    assert set(tokens) <= set(nucleus)
    assert len(set(tokens)) == size
    inside = torch.zeros(VOCABULARY, dtype=torch.float64)
    inside[nucleus] = distribution[nucleus] / mass
    assert chi_square(count(tokens), inside, nucleus[:12]) < QUANTILE_12
    for g in done.values():
        assert g.logprobs[0] == pytest.approx(
            float(inside[g.token_ids[0]].log()), abs=entry.tolerance
        )


# --- the scripted engine's own promises -------------------------------------------------------------------------------


def test_a_script_is_cut_at_the_first_stop_id_and_at_the_limit() -> None:
    def answer(
        token_ids: Sequence[int], finish: Finish = "stop", **options: object
    ) -> tuple[tuple[int, ...], Finish]:
        g = run(ScriptedEngine(lambda _: (token_ids, finish)), [request(**options)])["a"]
        return g.token_ids, g.finish

    assert answer([5, 6, 7], stop_ids=(7, 6)) == ((5, 6), "stop")
    assert answer([5, 6, 7], max_new_tokens=2) == ((5, 6), "length")
    assert answer([5, 6, 7], max_new_tokens=2, stop_ids=(6,)) == ((5, 6), "stop")
    assert answer([5, 6, 7], max_new_tokens=2, stop_ids=(7,)) == ((5, 6), "length")
    # shorter than every limit: the script's own word, and no tokens at all if it says so
    assert answer([5, 6]) == ((5, 6), "stop")
    assert answer([5, 6], "length") == ((5, 6), "length")
    assert answer([]) == ((), "stop")


def test_a_delay_decides_the_order_of_finishing() -> None:
    lengths = {"a": 4, "b": 1, "c": 2}
    engine = ScriptedEngine(lambda r: ([1] * lengths[r.id], "stop"))
    engine.submit([request(label) for label in lengths])
    assert [[g.request_id for g in engine.poll()] for _ in range(4)] == [["b"], ["c"], [], ["a"]]
    slowest_first = ScriptedEngine(
        lambda r: ([1] * lengths[r.id], "stop"), delay=lambda r: 5 - lengths[r.id]
    )
    slowest_first.submit([request(label) for label in lengths])
    assert [[g.request_id for g in slowest_first.poll()] for _ in range(4)] == [
        ["a"],
        [],
        ["c"],
        ["b"],
    ]
    with pytest.raises(EngineError, match="delay must be at least 1 poll, got 0"):
        ScriptedEngine(keyed_script, delay=lambda _: 0).submit([request()])


def test_an_aborted_script_has_given_tokens_evenly_over_its_delay() -> None:
    engine = ScriptedEngine(lambda _: ([1, 2, 3, 4], "stop"), delay=lambda _: 8)
    engine.submit([request()])
    for _ in range(5):
        engine.poll()
    assert engine.abort(["a"])[0].token_ids == (1, 2)


def test_what_was_asked_of_a_scripted_engine_can_be_read() -> None:
    engine = ScriptedEngine(keyed_script, slots=1)
    requests = group("a", 3, max_new_tokens=1)
    engine.load_weights(ModelWeights(tiny_model("llama")), 5)
    engine.submit(requests)
    engine.poll()
    engine.abort(["a2"])
    assert (engine.submitted, engine.aborted, engine.loaded, engine.polls) == (
        requests,
        ["a2"],
        [5],
        1,
    )
    assert list(engine.in_flight) == ["a1"]
