"""Where the head's chunks end changes no gradient and no metric, for all pairs of loss options."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance import naive
from dapo.algo.loss import Responses, engine_weights, over_responses
from dapo.algo.surrogates import gspo_loss
from dapo.config import LossConfig
from dapo.policy.custom_loss import CustomLoss
from dapo.policy.policy import Policy
from dapo.types import Sample
from helpers.naive_update import whole_gradient
from helpers.tiny_models import VOCABULARY
from helpers.tiny_policies import (
    assert_close,
    float64_model,
    groups_of,
    loaded,
    make_policy,
    off_policy,
    plain_distributions,
    with_masked_tokens,
)

TEMPERATURE = 0.7
CHUNKS = (1, 4, 11, 1000)  # positions: one, less than a response, more than one, all
ESTIMATORS = ("k1", "k2", "k3", "full")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "surrogate": [
        {},
        {"dual_clip": 3.0},
        {"surrogate": "gspo", "clip_low": 0.05, "clip_high": 0.08},
        {"surrogate": "cispo", "clip_high": 0.5},
        {"surrogate": "sapo"},
    ],
    "aggregate": [{"aggregate": name} for name in ("token", "group", "sequence", "constant")],
    "correction": [
        {},
        *(
            {"engine_correction": 1.5, "engine_ratio": ratio, "engine_over_cap": over_cap}
            for ratio, over_cap in itertools.product(("token", "sequence"), ("truncate", "mask"))
        ),
    ],
    "kl": [{}, *({"kl_coef": 0.5, "kl_estimator": name} for name in ESTIMATORS)],
    "entropy": [{}, {"entropy_coef": 0.05}],
    "policy": [{"is_on_policy": True}, {"is_on_policy": False}],
}


def pairs() -> Iterator[dict[str, Any]]:
    """Combinations of options in which each value of one stands with each value of every other."""
    sizes = [len(values) for values in OPTIONS.values()]
    axes = list(itertools.combinations(range(len(sizes)), 2))
    missing = {(a, b, i, j) for a, b in axes for i in range(sizes[a]) for j in range(sizes[b])}
    every = list(itertools.product(*map(range, sizes)))

    def gain(chosen: tuple[int, ...]) -> int:
        return sum((a, b, chosen[a], chosen[b]) in missing for a, b in axes)

    while missing:
        best = max(every, key=gain)
        missing -= {(a, b, best[a], best[b]) for a, b in axes}
        yield {
            name: v
            for at, row in zip(best, OPTIONS.values(), strict=True)
            for name, v in row[at].items()
        }


def off_policy_samples() -> list[Sample]:
    """Two groups; the products of the engine's ratios lie on both sides of 1 / 1.5 and 1.5, and
    between them.
    """
    rows = with_masked_tokens(off_policy(groups_of([(3, (1, 14, 6)), (2, (9, 9, 2))]), seed=1))
    scales = (0.06, 0.02, -0.3, -0.1, 0.2, 0.1)
    return [
        replace(row, engine_logprobs=tuple(np.array(row.old_logprobs) + scale))
        for row, scale in zip(rows, scales, strict=True)
    ]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """A policy that has moved away from its reference; its gradients are taken with the options of
    each test.
    """
    directory = tmp_path_factory.mktemp("policy")
    make_policy(loaded(float64_model(seed=1))).save(directory)
    made = make_policy(
        loaded(float64_model()),
        loss={"kl_coef": 0.5},
        temperature=TEMPERATURE,
        microbatch_tokens=10_000,
    )
    made.load(directory)
    return made


def set_chunk(monkeypatch: pytest.MonkeyPatch, positions: int, options: dict[str, Any]) -> None:
    tensors = 3 if options.get("kl_estimator") == "full" else 1
    monkeypatch.setattr("dapo.policy.logprobs.CHUNK_LOGITS", positions * tensors * VOCABULARY)


@pytest.mark.parametrize("options", list(pairs()), ids=str)
def test_the_gradient_is_that_of_a_plain_forward_in_chunks_of_any_size(
    policy: Policy, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = off_policy_samples()
    expected = whole_gradient(
        float64_model(seed=1), samples, TEMPERATURE, reference=reference_of(options), **options
    )
    own = {name: value for name, value in options.items() if name != "is_on_policy"}
    if options["is_on_policy"]:
        # whole_gradient takes the engine's difference from the policy's own log-probabilities
        samples = [replace(row, old_logprobs=None) for row in samples]
    for positions in CHUNKS:
        set_chunk(monkeypatch, positions, options)
        assert_close(policy.gradient(samples, LossConfig(**own)), expected, relative=1e-9)


def reference_of(options: dict[str, Any]) -> Any:
    return float64_model() if "kl_coef" in options else None


@pytest.mark.parametrize("positions", CHUNKS)
@pytest.mark.parametrize("over_cap", ["truncate", "mask"])
def test_the_logged_divergence_is_the_corrected_one_whose_gradient_trains(
    over_cap: str, positions: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    samples = off_policy_samples()
    options = {
        "kl_coef": 0.5,
        "kl_estimator": "full",
        "engine_correction": 1.5,
        "engine_ratio": "sequence",
    }
    options["engine_over_cap"] = over_cap
    distributions = [
        plain_distributions(float64_model(seed=seed), samples, TEMPERATURE) for seed in (1, 0)
    ]
    masks = [list(row.mask) for row in samples]
    rows = [
        [list(getattr(row, name)) for row in samples]
        for name in ("old_logprobs", "engine_logprobs")
    ]
    factors = naive.importance_weights(*rows, masks, 1.5, over_cap, "sequence")
    assert {
        factor > 0 for row, mask in zip(factors, masks, strict=True) if any(mask) for factor in row
    } == ({True, False} if over_cap == "mask" else {True})
    expected = 0.0
    for p, q, factor, mask in zip(*distributions, factors, masks, strict=True):
        each = (p.exp() * (p - q)).sum(dim=1).detach()
        expected += float(
            each @ (torch.tensor(factor, dtype=torch.float64) * torch.tensor(mask))
        ) / sum(map(sum, masks))
    make_policy(loaded(float64_model(seed=1))).save(tmp_path)
    moved = make_policy(
        loaded(float64_model()), loss=options, temperature=TEMPERATURE, microbatch_tokens=10_000
    )
    moved.load(tmp_path)
    set_chunk(monkeypatch, positions, options)
    assert moved.update(samples, step=1)["loss/kl"] == pytest.approx(expected, rel=1e-9)


def reinforce(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
) -> Any:
    surrogate = advantages * (logprobs - old).exp().clamp(max=3.0)
    return -(weights * surrogate)[mask].sum(), {"mass": weights.sum()}


@pytest.mark.parametrize("correction", OPTIONS["correction"], ids=str)
def test_a_custom_loss_has_one_gradient_and_one_set_of_metrics_in_chunks_of_any_size(
    correction: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = {**correction, "kl_coef": 0.5, "kl_estimator": "full"}
    samples = off_policy_samples()
    custom = CustomLoss(reinforce, "reinforce")
    found = []
    for positions in CHUNKS:
        set_chunk(monkeypatch, positions, options)
        made = make_policy(loaded(float64_model(seed=1)), loss=options, microbatch_tokens=10_000)
        metrics = made.update(samples, step=1, custom=custom)
        found.append(
            {
                name: metrics[name]
                for name in metrics
                if name.startswith(("loss/", "optim/grad_norm"))
            }
        )
    assert "loss/mass" in found[0]
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-9, abs=1e-12)


def test_a_part_of_a_response_has_no_quantity_of_the_whole() -> None:
    responses = Responses.of(torch.tensor([0, 0, 1, 1, 1]))
    values = torch.tensor([0.1, 0.2, -0.1, 0.3, 0.4])
    mask = torch.tensor([True, True, True, True, False])
    sums, counts = over_responses(values, mask, responses)
    assert sums.tolist() == pytest.approx([0.3, 0.3, 0.2, 0.2, 0.2])
    assert counts.tolist() == [2, 2, 2, 2, 2]
    part = values[:4]
    trained = mask[:4]
    message = r"all their 5 tokens \(2 responses\), got \[4\] values"
    with pytest.raises(ValueError, match=message):
        engine_weights(part, part, trained, cap=2.0, responses=responses)
    with pytest.raises(ValueError, match=message):
        gspo_loss(part, part, part, trained, part, responses, clip_low=0.2, clip_high=0.2)
