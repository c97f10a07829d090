"""The native engine against the policy and against itself on the CPU."""

import copy
import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from benchmarks.acceptance.check import Measurement, Setting, compute_exactly, mean_and_largest_gap
from benchmarks.acceptance.correctness import MEAN_GAP_NATS
from benchmarks.acceptance.models import (
    as_loaded,
    compared_geometries,
    policy_config,
    random_model,
    token_ids,
)
from benchmarks.acceptance.references import Numbers, Reference
from dapo.config.rollout_options import NativeConfig
from dapo.core.rng import keyed_seed
from dapo.engines.engine import RolloutEngine
from dapo.engines.native.engine import NativeEngine
from dapo.policy.policy import Policy
from dapo.types import Generation, GenerationRequest, Sample

PROMPTS = (3, 40, 90)
"""Lengths in tokens."""
GROUP_SIZE = 4
RESPONSE_TOKENS = 60
EQUAL_RESPONSES = 0.9
"""Smallest share of equal float32 responses: rounding by 1e-6 changes one sampled token in
thousands.
"""
FLOAT32_GAP_NATS = 1e-3


def check_engine_gap(setting: Setting) -> Iterator[Measurement]:
    """In bfloat16, the engine's log-probabilities of what it sampled against the policy's of the
    same tokens.
    """
    for name, geometry in compared_geometries(on_gpu=setting.on_gpu).items():
        model = random_model(geometry, device=setting.device, dtype=torch.bfloat16)
        requests = sampling_requests(
            geometry.vocabulary, tokens=RESPONSE_TOKENS if setting.on_gpu else 20
        )
        done = answers(NativeEngine(copy.deepcopy(model), NativeConfig(slots=8)), requests)
        config = policy_config(
            setting.device, microbatch_tokens=512, max_response_tokens=RESPONSE_TOKENS
        )
        mean, largest = engine_gap(Policy(config, as_loaded(model, name)), requests, done)
        yield Measurement(f"{name}: mean gap", mean, "nats", at_most=MEAN_GAP_NATS)
        yield Measurement(f"{name}: largest gap", largest, "nats")


def token_references(*, on_gpu: bool) -> list[Reference]:
    """Of each geometry: the tokens that a CPU samples in float32, with their log-probabilities."""
    found = []
    for name, geometry in compared_geometries(on_gpu=on_gpu).items():
        requests = sampling_requests(geometry.vocabulary)
        compute = partial(_sampled_tokens, requests)
        found.append(Reference(f"equal-tokens, {name}", geometry, requests, compute, torch.float32))
    return found


def check_equal_tokens(setting: Setting) -> Iterator[Measurement]:
    """In float32 the engine samples on the device what it samples on the CPU, with another number
    of slots.
    """
    compute_exactly()
    for reference in token_references(on_gpu=setting.on_gpu):
        name = reference.name.partition(", ")[2]
        model = reference.model()
        numbers = reference.numbers(model, setting.references)
        there = [
            Generation(request.id, tokens, logprobs, "length", 0)
            for request, tokens, logprobs in zip(
                reference.given,
                numbers["tokens"].tolist(),
                numbers["logprobs"].tolist(),
                strict=True,
            )
        ]
        here = answers(
            NativeEngine(model.to(setting.device), NativeConfig(slots=8)), reference.given
        )
        equal = [
            (a.logprobs, b.logprobs) for a, b in zip(here, there, strict=True) if _same_tokens(a, b)
        ]
        yield Measurement(f"{name}: equal responses", equal_share(here, there))
        yield Measurement(
            f"{name}: equal but for rounding", rounded_share(here, there), at_least=EQUAL_RESPONSES
        )
        yield Measurement(
            f"{name}: largest gap in equal responses",
            mean_and_largest_gap(*zip(*equal, strict=True))[1] if equal else math.inf,
            "nats",
            at_most=FLOAT32_GAP_NATS,
        )


def _sampled_tokens(requests: Sequence[GenerationRequest], model: PreTrainedModel) -> Numbers:
    """`[responses, tokens]` tokens, and their log-probabilities."""
    done = answers(NativeEngine(model, NativeConfig(slots=12)), requests)
    return {
        "tokens": torch.tensor([list(each.token_ids) for each in done], dtype=torch.int32),
        "logprobs": torch.tensor([list(each.logprobs) for each in done]),
    }


def sampling_requests(vocabulary: int, *, tokens: int = RESPONSE_TOKENS) -> list[GenerationRequest]:
    """Groups of requests for exactly `tokens` tokens."""
    return [
        GenerationRequest(
            id=f"{p}/{i}",
            prompt_ids=token_ids(length, "prompt", p, vocabulary=vocabulary),
            max_new_tokens=tokens,
            temperature=1.0,
            top_p=1.0,
            seed=keyed_seed("acceptance", p, i),
            stop_ids=(),
        )
        for p, length in enumerate(PROMPTS)
        for i in range(GROUP_SIZE)
    ]


def answers(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    """All responses, in the order of the requests; closes the engine."""
    found = sampled(engine, requests)
    engine.close()
    return found


def sampled(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    """All responses, in the order of the requests."""
    engine.submit(requests)
    done: dict[str, Generation] = {}
    while len(done) < len(requests):
        done |= {generation.request_id: generation for generation in engine.poll()}
    return [done[request.id] for request in requests]


def engine_gap(
    policy: Policy, requests: Sequence[GenerationRequest], done: Sequence[Generation]
) -> tuple[float, float]:
    """Nats, mean and largest, between an engine's log-probabilities and the policy's."""
    scored = policy.record_old_logprobs(
        [
            Sample(
                group_id=int(request.id.split("/")[0]),
                prompt_ids=request.prompt_ids,
                response_ids=generation.token_ids,
                reward=0.0,
                advantage=0.0,
                engine_logprobs=generation.logprobs,
                old_logprobs=None,
                mask=(True,) * len(generation.token_ids),
            )
            for request, generation in zip(requests, done, strict=True)
        ]
    )
    return mean_and_largest_gap(
        [sample.old_logprobs or () for sample in scored], [g.logprobs for g in done]
    )


def equal_share(found: Sequence[Generation], expected: Sequence[Generation]) -> float:
    """The fraction of responses whose tokens are all equal."""
    equal = [_same_tokens(a, b) for a, b in zip(found, expected, strict=True)]
    return sum(equal) / len(equal)


def rounded_share(found: Sequence[Generation], expected: Sequence[Generation]) -> float:
    """The fraction of responses that are equal, or equal up to a token whose neighbour in the
    vocabulary was sampled.

    Sampling inverts the cumulative distribution: a rounding of it can only move a uniform number
    that lies at the bound of two tokens from one to the other. How often that happens grows with
    the number of probable tokens: an H100 gave 7 of 12 equal responses of 60 tokens over a flat
    distribution of 262,144 tokens, 35 of 36 over smaller vocabularies.
    """
    alike = 0
    for a, b in zip(found, expected, strict=True):
        parted = [pair for pair in zip(a.token_ids, b.token_ids, strict=True) if pair[0] != pair[1]]
        alike += not parted or abs(parted[0][0] - parted[0][1]) == 1
    return alike / len(found)


def _same_tokens(found: Generation, expected: Generation) -> bool:
    return list(found.token_ids) == list(expected.token_ids)
