"""A token of weight 0 has no gradient, with any surrogate, correction, term of the loss and path of
the computation.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dapo.algo.kl import token_kl
from dapo.algo.loss import Responses, aggregation_weights
from dapo.algo.surrogate_table import SURROGATES
from dapo.config import LossConfig
from dapo.policy import objective
from dapo.policy.custom_loss import CustomLoss
from dapo.policy.policy import Policy
from dapo.types import Sample
from helpers.products import params_of_product
from helpers.tiny_policies import (
    branching,
    float64_model,
    gradient_of,
    loaded,
    make_policy,
    off_policy,
    ragged,
)

CORRECTIONS = [
    {},
    *(
        {"engine_correction": 1.3, "engine_ratio": ratio, "engine_over_cap": over_cap}
        for ratio, over_cap in itertools.product(("token", "sequence"), ("truncate", "mask"))
    ),
]
AGGREGATES = ("token", "group", "sequence", "constant")
TERMS: list[dict[str, Any]] = [
    {},
    {"entropy_coef": 0.1},
    *(
        {"kl_coef": 0.5, "kl_estimator": estimator, "entropy_coef": 0.1}
        for estimator in ("k1", "k2", "k3")
    ),
]
LENGTHS = (3, 5, 1, 4, 2, 6)
GROUPS = (0, 0, 1, 1, 2, 2)
RESPONSES = Responses.of(torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)))


def ignores_weights(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
) -> Any:
    return -(advantages * logprobs * mask).sum(), {}


def packed(
    aggregate: str, *, is_on_policy: bool, seed: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Six responses of three groups: masked tokens, a response without a trained token, a group of
    factor 0.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS)
    tokens = int(lengths.sum())
    responses = torch.arange(len(LENGTHS)).repeat_interleave(lengths)
    logprobs = -torch.rand(tokens, dtype=torch.float64, generator=generator) - 0.1
    mask = (torch.rand(tokens, generator=generator) < 0.8) & (responses != 2)
    trained = torch.zeros(len(LENGTHS), dtype=torch.int64).index_add(0, responses, mask.long())
    weights = aggregation_weights(trained, torch.tensor(GROUPS), aggregate=aggregate, max_length=8)  # type: ignore[arg-type]
    weights = weights * torch.tensor([1.0, 1.0, 2.0, 2.0, 0.0, 0.0])

    def near(scale: float) -> Tensor:
        return logprobs + scale * torch.randn(tokens, dtype=torch.float64, generator=generator)

    found = {
        "advantages": torch.randn(len(LENGTHS), dtype=torch.float64, generator=generator)[
            responses
        ],
        "weights": weights[responses],
        "mask": mask,
        "engine": near(0.25),
        "reference": near(0.3),
    }
    return logprobs, found if is_on_policy else {**found, "old": near(0.1)}


@pytest.mark.parametrize(
    ("surrogate", "correction", "terms", "is_on_policy"),
    params_of_product([*SURROGATES, "custom"], CORRECTIONS, TERMS, [True, False]),
    ids=str,
)
def test_no_term_of_the_loss_differentiates_a_token_of_weight_zero(
    surrogate: str, correction: dict[str, Any], terms: dict[str, Any], is_on_policy: bool
) -> None:
    custom = (
        CustomLoss(lambda *given: ignores_weights(*given), "test")
        if surrogate == "custom"
        else None
    )
    config = LossConfig(surrogate="clip" if custom else surrogate, **correction, **terms)
    masked_by_correction = 0
    for aggregate, seed in itertools.product(AGGREGATES, range(3)):
        logprobs, tokens = packed(aggregate, is_on_policy=is_on_policy, seed=seed)
        if not config.has_kl_term:
            del tokens["reference"]
        known = objective.gradient_terms(tokens, config, RESPONSES, logprobs)
        weight = objective.correct_engine(logprobs, known, config).weight
        corrected = known["weights"] if weight is None else known["weights"] * weight
        is_zero = ~tokens["mask"] | (corrected == 0)
        assert is_zero.any()
        masked_by_correction += int((is_zero & tokens["mask"] & (tokens["weights"] > 0)).sum())
        by_logprob, by_entropy, *_ = objective.objective_gradient(logprobs, known, config, custom)
        assert not by_logprob[is_zero].any()
        assert by_logprob[~is_zero].any() == (not is_zero.all())
        assert (by_entropy is None) == (config.entropy_coef == 0)
        if by_entropy is not None:
            assert not by_entropy[is_zero].any()
            torch.testing.assert_close(by_entropy, torch.where(is_zero, 0.0, -0.1 * corrected))
        sums = objective.objective_sums(
            logprobs, torch.zeros_like(logprobs), known, config, responses=RESPONSES
        )
        if config.has_kl_term:
            estimates = token_kl(
                logprobs, tokens["reference"], tokens["mask"], estimator=config.kl_estimator
            )
            assert float(sums["kl"]) == pytest.approx(
                float((corrected * estimates)[tokens["mask"]].sum())
            )
    assert (masked_by_correction > 0) == (correction.get("engine_over_cap") == "mask")


@pytest.mark.parametrize(
    ("surrogate", "correction", "terms"),
    params_of_product([*SURROGATES], CORRECTIONS, TERMS),
    ids=str,
)
def test_the_weight_of_a_token_multiplies_its_gradient_and_no_other(
    surrogate: str, correction: dict[str, Any], terms: dict[str, Any]
) -> None:
    config = LossConfig(surrogate=surrogate, **correction, **terms)
    logprobs, tokens = packed("token", is_on_policy=False)
    if not config.has_kl_term:
        del tokens["reference"]

    def gradient(weights: Tensor) -> Tensor:
        terms_of_tokens = objective.gradient_terms(
            {**tokens, "weights": weights}, config, RESPONSES, logprobs
        )
        return objective.objective_gradient(logprobs, terms_of_tokens, config).by_logprob

    before = gradient(tokens["weights"])
    at = int(before.abs().argmax())
    changed = tokens["weights"].clone()
    changed[at] *= 3
    after = gradient(changed)
    assert after[at] == pytest.approx(3 * before[at])
    before[at] = after[at]
    torch.testing.assert_close(after, before, rtol=1e-12, atol=0)


def without_weight(samples: list[Sample]) -> list[Sample]:
    """Samples whose tokens have the weight 0: masked, or masked by the engine correction."""
    found = []
    for i, row in enumerate(samples):
        old = np.array(row.old_logprobs)
        is_masked = row.group_id % 2 == 0
        if is_masked:
            row = replace(row, mask=(False,) * len(row.mask))
        far = 5.0 if i % 2 else -5.0
        found.append(replace(row, engine_logprobs=tuple(old if is_masked else old + far)))
    return found


@pytest.mark.parametrize(
    ("surrogate", "ratio", "terms", "lora"),
    params_of_product(
        [*SURROGATES, "custom"],
        ["token", "sequence"],
        [{}, {"kl_coef": 0.5, "kl_estimator": "k2", "entropy_coef": 0.1}],
        [None, {"rank": 2, "alpha": 2}],
    ),
    ids=str,
)
def test_a_minibatch_of_tokens_without_weight_gives_no_weight_of_the_model_a_gradient(
    surrogate: str, ratio: str, terms: dict[str, Any], lora: dict[str, Any] | None, tmp_path: Path
) -> None:
    loss = {"engine_correction": 1.5, "engine_ratio": ratio, "engine_over_cap": "mask", **terms}
    loss |= (
        {"function": f"{__name__}:ignores_weights"}
        if surrogate == "custom"
        else {"surrogate": surrogate}
    )
    for make, tokens in ((branching, 64), (ragged, 20)):
        policy = make_policy(
            loaded(float64_model()), loss=loss, lora=lora, temperature=0.7, microbatch_tokens=tokens
        )
        if terms:
            move_from_reference(policy)
        gradient = gradient_of(policy, without_weight(off_policy(make())), tmp_path / make.__name__)
        assert gradient
        for name, values in gradient.items():
            assert not values.any(), name


def move_from_reference(policy: Policy) -> None:
    with torch.no_grad():
        for weight in policy._optimizer.master_weights.values():
            weight.add_(
                0.01 * torch.linspace(-1, 1, weight.numel(), dtype=weight.dtype).view_as(weight)
            )


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_tokens_without_weight_among_others_change_no_gradient(
    surrogate: str, tmp_path: Path
) -> None:
    """What such tokens are rewarded with, or compared with, does not matter; prefixes are shared
    with other tokens.
    """
    loss = {
        "surrogate": surrogate,
        "engine_correction": 1.5,
        "engine_over_cap": "mask",
        "entropy_coef": 0.1,
    }
    rows = off_policy(branching())
    rows = [replace(row, engine_logprobs=row.old_logprobs or ()) for row in rows]

    def with_idle(advantage: float, distance: float) -> list[Sample]:
        idle = [
            (
                replace(row, advantage=advantage, mask=(False,) * len(row.mask))
                if row.group_id == 1
                else row
            )
            for row in rows
        ]
        return [
            (
                replace(
                    row,
                    advantage=advantage,
                    engine_logprobs=tuple(np.array(row.old_logprobs) + distance),
                )
                if i % 5 == 4
                else row
            )
            for i, row in enumerate(idle)
        ]

    first, second = (
        gradient_of(
            make_policy(loaded(float64_model()), loss=loss, temperature=0.7),
            with_idle(*values),
            tmp_path / f"{values}",
        )
        for values in [(1.0, 1.0), (-3.0, -2.0)]
    )
    assert any(values.any() for values in first.values())
    for name, values in first.items():
        torch.testing.assert_close(second[name], values, rtol=0, atol=0)
