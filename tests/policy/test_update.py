"""The update: one gradient however it is cut, exact masters, guarded steps, and state that comes
back bit for bit.
"""

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dapo.config import OptimConfig
from dapo.core.errors import CheckpointError
from dapo.policy.checkpoint import SavedWeights
from dapo.policy.logprobs import score_tokens
from dapo.policy.objective import add_sums
from dapo.policy.optim import MasterAdamW, learning_rate
from dapo.policy.policy import Policy
from dapo.types import Sample
from helpers.naive_update import whole_gradient
from helpers.tables import for_each_row
from helpers.tiny_policies import (
    RATIOS,
    assert_close,
    branching,
    float64_model,
    gradient_of,
    groups_of,
    loaded,
    make_policy,
    master_weights_of,
    off_policy,
    plain_copy,
    plain_distributions,
    plain_scores,
    ragged,
    sample,
    weights_of,
    with_masked_tokens,
)

LOSSES: list[dict[str, Any]] = [
    {},
    {"aggregate": "group"},
    {"aggregate": "sequence"},
    {"aggregate": "constant", "dual_clip": 3.0},
    {"entropy_coef": 0.05},
]


@pytest.mark.parametrize(
    ("minibatch", "options"),
    [*((branching, options) for options in LOSSES), (ragged, {}), (ragged, LOSSES[-1])],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_any_cut_into_microbatches_gives_the_gradient_of_the_whole(
    options: dict[str, Any], minibatch: Callable[[], list[Sample]], tmp_path: Path
) -> None:
    samples = with_masked_tokens(off_policy(minibatch()))
    expected = whole_gradient(float64_model(), samples, 0.7, **options)
    for microbatch_tokens in (1, 20, 10_000):
        policy = make_policy(
            loaded(float64_model()),
            loss=options,
            temperature=0.7,
            microbatch_tokens=microbatch_tokens,
        )
        found = gradient_of(policy, samples, tmp_path / str(microbatch_tokens))
        assert_close(found, expected, relative=1e-10)


SURROGATES: list[dict[str, Any]] = [
    {"surrogate": "gspo", "clip_low": 0.01, "clip_high": 0.01, "aggregate": "sequence"},
    {"surrogate": "cispo", "clip_high": 0.5},
    {"surrogate": "sapo", "aggregate": "sequence"},
    {"engine_correction": 1.5, "engine_ratio": "sequence"},
    {"engine_correction": 3.0, "engine_over_cap": "mask"},
    {
        "surrogate": "gspo",
        "engine_correction": 3.0,
        "engine_ratio": "sequence",
        "engine_over_cap": "mask",
    },
    {
        "surrogate": "gspo",
        "clip_low": 0.01,
        "clip_high": 0.01,
        "engine_correction": 1.15,
        "engine_over_cap": "mask",
    },
    {"surrogate": "gspo", "engine_correction": 1.1, "entropy_coef": 0.05},
    {
        "engine_correction": 1.15,
        "engine_over_cap": "mask",
        "entropy_coef": 0.05,
        "aggregate": "group",
    },
]


def by_another_engine(samples: list[Sample]) -> list[Sample]:
    """With log-probabilities of an engine that differ from the old ones by up to .2."""
    return [
        replace(row, engine_logprobs=tuple(np.array(row.old_logprobs) + 0.1 * (i % 5 - 2)))
        for i, row in enumerate(samples)
    ]


@pytest.mark.parametrize("is_on_policy", [False, True], ids=["second_update", "first_update"])
@pytest.mark.parametrize("options", SURROGATES, ids=str)
def test_every_surrogate_and_correction_gives_the_gradient_of_the_whole(
    options: dict[str, Any], is_on_policy: bool, tmp_path: Path
) -> None:
    rows = by_another_engine(with_masked_tokens(off_policy(branching())))
    expected = whole_gradient(float64_model(), rows, 0.7, is_on_policy=is_on_policy, **options)
    if is_on_policy:
        rows = [dataclasses.replace(row, old_logprobs=None) for row in rows]
    for microbatch_tokens in (20, 10_000):
        policy = make_policy(
            loaded(float64_model()),
            loss=options,
            temperature=0.7,
            microbatch_tokens=microbatch_tokens,
        )
        found = gradient_of(policy, rows, tmp_path / str(microbatch_tokens))
        assert_close(found, expected, relative=1e-10)


CAP = 2.0
RATIO_TO_ENGINE = [
    ("clip", "truncate", lambda r, logprob, a: torch.min(r * a, r.clamp(0.8, 1.28) * a)),
    ("clip", "mask", lambda r, logprob, a: torch.min(r * a, r.clamp(0.8, 1.28) * a)),
    ("cispo", "truncate", lambda r, logprob, a: r.clamp(max=1.28).detach() * a * logprob),
]


@for_each_row(("surrogate", "over_cap", "term"), RATIO_TO_ENGINE)
def test_with_the_engine_s_logprobs_as_old_ones_the_loss_is_the_one_of_the_capped_ratio(
    surrogate: str, over_cap: str, term: Callable[[Tensor, Tensor, float], Tensor], tmp_path: Path
) -> None:
    """The formula of docs/losses.md, by autograd."""
    network = float64_model()
    rows = with_masked_tokens(off_policy(branching()))
    count = sum(sum(row.mask) for row in rows)
    loss = torch.zeros((), dtype=torch.float64)
    weights = []
    gaps = []
    for row, (logprobs, entropies) in zip(rows, plain_scores(network, rows, 0.7), strict=True):
        mask = torch.tensor(row.mask).bool()
        engine = torch.tensor(row.old_logprobs, dtype=torch.float64)
        u = (logprobs - engine).exp()
        weight = u.detach().clamp(max=CAP)
        if over_cap == "mask":
            weight = torch.where((u > CAP) | (u < 1 / CAP), 0.0, u.detach())
        # a capped ratio keeps its gradient: it is a weight of the gradient of log pi
        r = u * (weight / u.detach())
        terms = term(r, logprobs, row.advantage) + 0.05 * weight * entropies
        if over_cap == "mask":
            terms = torch.where(weight > 0, terms, 0.0)
        loss = loss - torch.where(mask, terms, 0.0).sum() / count
        weights += weight[mask].tolist()
        gaps += (logprobs - engine)[mask].abs().tolist()
    loss.backward()
    expected = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    options = {
        "old_logprobs": "engine",
        "engine_correction": CAP,
        "engine_over_cap": over_cap,
        "surrogate": surrogate,
        "entropy_coef": 0.05,
    }
    first = [replace(row, engine_logprobs=row.old_logprobs) for row in rows]
    for microbatch_tokens in (20, 10_000):
        policy = make_policy(
            loaded(float64_model()),
            loss=options,
            temperature=0.7,
            microbatch_tokens=microbatch_tokens,
        )
        metrics = copy.deepcopy(policy).update(first, step=1)
        later = [replace(row, engine_logprobs=()) for row in rows]
        path = tmp_path / f"{surrogate}-{over_cap}-{microbatch_tokens}"
        assert_close(gradient_of(policy, later, path), expected, relative=1e-10)
        assert metrics["loss/engine_weight_mean"] == pytest.approx(np.mean(weights))
        changed = [weight in (0.0, CAP) for weight in weights]
        assert metrics["loss/engine_weight_truncated_fraction"] == pytest.approx(np.mean(changed))
        assert 0 < np.mean(changed) < 1
        # of the policy to the engine, in the first update
        assert metrics["rollout/engine_logprob_gap_mean"] == pytest.approx(np.mean(gaps))
        bonus = 0.05 * _entropy_term(rows, weights, count)
        assert metrics["loss/policy"] == pytest.approx(loss.item() + bonus)


def _entropy_term(rows: list[Sample], weights: list[float], count: int) -> float:
    """The weighted mean of the entropies, which `loss/policy` leaves out."""
    entropies = [
        float(entropy)
        for row, (_, values) in zip(rows, plain_scores(float64_model(), rows, 0.7), strict=True)
        for entropy, is_trained in zip(values.detach(), row.mask, strict=True)
        if is_trained
    ]
    return math.fsum(map(math.prod, zip(weights, entropies, strict=True))) / count


def test_the_example_above_clips_on_both_sides_at_the_two_limits() -> None:
    samples = off_policy(ragged())
    metrics = make_policy(loaded(float64_model()), temperature=0.7).update(samples, step=1)
    signs = [
        (row.advantage > 0, i + 3 * t)
        for i, row in enumerate(samples)
        for t in range(len(row.mask))
    ]
    ratios = [(is_positive, RATIOS[index % len(RATIOS)]) for is_positive, index in signs]
    assert metrics["loss/clip_high_fraction"] == pytest.approx(
        ratios.count((True, 3.5)) / len(ratios)
    )
    assert metrics["loss/clip_low_fraction"] == pytest.approx(
        (ratios.count((False, 0.4)) + ratios.count((False, 0.76))) / len(ratios)
    )
    # where clips that change sides would show
    assert min(ratios.count((True, 1.24)), ratios.count((False, 0.76))) > 5
    assert 0 < metrics["loss/clipped_high_prob_mean"] < 1


@pytest.mark.parametrize("loss", [{}, {"kl_coef": 0.1, "entropy_coef": 0.01}], ids=str)
def test_adapters_get_from_shared_beginnings_the_gradient_of_sequences_on_their_own(
    loss: dict[str, Any], tmp_path: Path
) -> None:
    rows = [
        dataclasses.replace(row, advantage=0.0) if i % 4 == 3 else row
        for i, row in enumerate(branching())
    ]
    rows = with_masked_tokens(off_policy(rows))
    lora = {"rank": 3, "alpha": 4.5}
    alone, together = (
        gradient_of(
            make_policy(
                loaded(float64_model()),
                loss=loss,
                lora=lora,
                temperature=0.7,
                microbatch_tokens=tokens,
            ),
            rows,
            tmp_path / str(tokens),
        )
        for tokens in (1, 10_000)
    )
    assert any(bool(gradient.any()) for gradient in alone.values())
    assert_close(together, alone, relative=1e-10)


def test_the_fraction_of_shared_tokens_counts_what_is_there_without_each_groups_prompt() -> None:
    rows = [
        sample(0, (1, 2, 3), (4, 5, 6)),
        sample(0, (1, 2, 3), (4, 5, 7)),
        sample(1, (1, 2), (8, 8, 8)),
    ]
    # each prompt once: 3 + 2 + 2 + 2 + 2 tokens, of which (4, 5) and (1, 2) are there twice
    metrics = make_policy().update(rows, step=1)
    assert metrics["optim/shared_token_fraction"] == pytest.approx(4 / 11)
    alone = make_policy(microbatch_tokens=1).update(rows, step=1)
    assert alone["optim/shared_token_fraction"] == 0


def test_rows_without_advantage_stay_in_the_denominator(tmp_path: Path) -> None:
    rows = groups_of([(4, (5, 5))])
    idle = [sample(7, (1, 2, 3), row.response_ids, advantage=0.0) for row in rows]
    alone = gradient_of(make_policy(), rows, tmp_path / "alone")
    diluted = gradient_of(make_policy(), rows + idle, tmp_path / "diluted")
    assert_close(diluted, {name: g / 2 for name, g in alone.items()}, relative=1e-6)
    metrics = make_policy().update(rows + idle, step=1)
    assert metrics["optim/update_tokens"] == 10
    assert (
        make_policy(loss={"kl_coef": 0.1}).update(rows + idle, step=1)["optim/update_tokens"] == 20
    )
    assert (
        make_policy(loss={"entropy_coef": 0.1}).update(rows + idle, step=1)["optim/update_tokens"]
        == 20
    )


def test_a_minibatch_without_any_advantage_is_an_update_by_nothing() -> None:
    policy = make_policy(optim={"weight_decay": 0.0})
    before = weights_of(policy)
    metrics = policy.update([sample(0, (1,), (2, 3), advantage=0.0)], step=1)
    assert metrics == {
        "loss/policy": 0.0,
        "optim/update_tokens": 0.0,
        "optim/grad_norm": 0.0,
        "optim/lr": 1e-3,
        "optim/skipped": 0.0,
    }
    assert_close(weights_of(policy), before, relative=0)


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 0.7), (torch.float64, 1.0)])
def test_on_policy_the_ratio_is_one_and_after_an_update_it_is_not(
    dtype: torch.dtype, temperature: float
) -> None:
    policy = make_policy(loaded(dtype=dtype), temperature=temperature)
    samples = policy.record_old_logprobs(ragged())
    first = policy.update(samples[:7], step=1)
    assert first["loss/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert first["loss/approx_kl"] == pytest.approx(0, abs=1e-9)
    second = policy.update(samples[7:], step=1)
    assert second["loss/ratio_mean"] != pytest.approx(1, abs=1e-4)
    assert second["loss/approx_kl"] > 1e-5


@pytest.mark.parametrize(("rounding", "relative"), [("float32", 1e-6), ("float64", 1e-12)])
@pytest.mark.parametrize(
    "loss", [{}, {"dual_clip": 3.0, "kl_coef": 0.1, "entropy_coef": 0.1}, {"engine_correction": 2}]
)
def test_without_recorded_logprobs_the_ratio_is_exactly_one_and_the_gradient_the_same(
    tmp_path: Path, rounding: str, relative: float, loss: dict[str, Any]
) -> None:
    def make() -> Policy:
        return make_policy(
            loaded(float64_model()) if rounding == "float64" else None, temperature=0.7, loss=loss
        )

    policy = make()
    samples = with_masked_tokens(ragged())
    samples = [dataclasses.replace(row, engine_logprobs=(-5.0,) * len(row.mask)) for row in samples]
    # in other microbatches, as it is where all of a step are recorded at once
    others = [dataclasses.replace(row, group_id=row.group_id + 100) for row in reversed(ragged())]
    recorded = policy.record_old_logprobs([*others, *samples])[len(others) :]
    with_old = gradient_of(policy, recorded, tmp_path / "recorded")
    without = gradient_of(make(), samples, tmp_path / "none")
    assert_close(without, with_old, relative=relative)
    assert make().update(samples, step=1)["loss/ratio_mean"] == 1


@pytest.mark.parametrize("minibatch", [ragged, branching], ids=lambda make: make.__name__)
def test_old_logprobs_are_recorded_in_order_at_the_temperature(
    minibatch: Callable[[], list[Sample]],
) -> None:
    model = loaded(float64_model())
    plain = plain_copy(model)
    samples = [*reversed(minibatch()), sample(9, (1, 2), ())]
    recorded = make_policy(model, temperature=0.7).record_old_logprobs(samples)
    assert [dataclasses.replace(row, old_logprobs=None) for row in recorded] == samples
    assert recorded[-1].old_logprobs == ()
    for row, (expected, _) in zip(
        recorded[:-1], plain_scores(plain, samples[:-1], 0.7), strict=True
    ):
        assert row.old_logprobs == pytest.approx(expected.tolist(), abs=1e-10)


def test_a_sampled_end_token_that_is_also_the_padding_is_trained_on(tmp_path: Path) -> None:
    pad = 0
    samples = [sample(0, (5, 6), (7, 8, pad)), sample(0, (5, 6), (9, pad), advantage=-1.0)]
    assert make_policy().update(samples, step=1)["optim/update_tokens"] == 5
    policy = make_policy(loaded(float64_model()))
    expected = whole_gradient(float64_model(), policy.record_old_logprobs(samples), 1.0)
    assert_close(gradient_of(policy, samples, tmp_path / "x"), expected, relative=1e-10)


def test_responses_of_zero_tokens_change_nothing(tmp_path: Path) -> None:
    samples = ragged()
    empty = [sample(0, samples[0].prompt_ids, ()), sample(8, (4, 4), (), advantage=0.5)]
    expected = gradient_of(make_policy(), samples, tmp_path / "without")
    assert_close(
        gradient_of(make_policy(), empty[:1] + samples + empty[1:], tmp_path / "with"),
        expected,
        relative=0,
    )
    assert make_policy().update(empty, step=1)["optim/update_tokens"] == 0


def test_metrics_are_means_over_the_trained_tokens() -> None:
    model = loaded(float64_model())
    samples = with_masked_tokens(ragged(engine_logprobs=()))
    samples = [dataclasses.replace(row, engine_logprobs=(-4.0,) * len(row.mask)) for row in samples]
    scores = plain_scores(plain_copy(model), samples)
    trained = torch.cat([torch.tensor(row.mask) for row in samples])
    logprobs, entropies = (torch.cat(list(s))[trained] for s in zip(*scores, strict=True))
    metrics = make_policy(model, microbatch_tokens=20).update(samples, step=1)
    assert metrics["optim/update_tokens"] == int(trained.sum())
    assert metrics["loss/entropy"] == pytest.approx(entropies.mean().item())
    assert metrics["loss/token_prob_mean"] == pytest.approx(logprobs.exp().mean().item())
    gaps = (logprobs + 4).abs()
    assert metrics["rollout/engine_logprob_gap_mean"] == pytest.approx(gaps.mean().item())
    assert metrics["rollout/engine_logprob_gap_max"] == pytest.approx(gaps.max().item())
    assert metrics["loss/clip_high_fraction"] == 0
    assert "loss/clipped_high_prob_mean" not in metrics
    assert "loss/kl" not in metrics


@pytest.mark.parametrize(
    ("minibatch", "estimator"),
    [
        (branching, "k3"),
        (ragged, "k1"),
        (ragged, "k2"),
        (branching, "full"),
    ],
    ids=["k3", "k1", "k2", "full"],
)
def test_the_kl_term_pulls_to_the_initial_model_not_to_the_weights_that_were_loaded(
    minibatch: Callable[[], list[Sample]], estimator: str, tmp_path: Path
) -> None:
    samples = with_masked_tokens(off_policy(minibatch(), seed=1))
    make_policy(loaded(float64_model(seed=1))).save(tmp_path)
    options = {"kl_coef": 0.5, "entropy_coef": 0.05, "kl_estimator": estimator}
    policy = make_policy(
        loaded(float64_model()), loss=options, temperature=0.7, microbatch_tokens=20
    )
    policy.load(tmp_path)
    expected = whole_gradient(
        float64_model(seed=1), samples, 0.7, reference=float64_model(), **options
    )
    without = whole_gradient(float64_model(seed=1), samples, 0.7, entropy_coef=0.05)
    assert not torch.allclose(
        expected["model.norm.weight"], without["model.norm.weight"], rtol=0.01
    )
    assert_close(gradient_of(policy, samples, tmp_path / "x"), expected, relative=1e-10)


@pytest.mark.parametrize(
    "correction", [{}, {"engine_correction": 1.5}, {"surrogate": "gspo", "clip_low": 0.01}], ids=str
)
def test_the_whole_divergence_with_corrections_in_any_cut_and_its_value(
    correction: dict[str, Any], tmp_path: Path
) -> None:
    samples = by_another_engine(with_masked_tokens(off_policy(branching(), seed=1)))
    make_policy(loaded(float64_model(seed=1))).save(tmp_path)
    options = {"kl_coef": 0.5, "kl_estimator": "full", **correction}
    expected = whole_gradient(
        float64_model(seed=1), samples, 0.7, reference=float64_model(), **options
    )
    for microbatch_tokens in (1, 64, 10_000):
        policy = make_policy(
            loaded(float64_model()),
            loss=options,
            temperature=0.7,
            microbatch_tokens=microbatch_tokens,
        )
        policy.load(tmp_path)
        found = gradient_of(policy, samples, tmp_path / str(microbatch_tokens))
        assert_close(found, expected, relative=1e-10)
    rows = [plain_distributions(float64_model(seed=seed), samples, 0.7) for seed in (1, 0)]
    values = [
        ((p.exp() * (p - q)).sum(1) @ mask_of(row)).item()
        for p, q, row in zip(*rows, samples, strict=True)
    ]
    policy = make_policy(
        loaded(float64_model()), loss={"kl_coef": 0.5, "kl_estimator": "full"}, temperature=0.7
    )
    policy.load(tmp_path)
    trained = sum(row.num_trained_tokens for row in samples)
    assert policy.update(samples, step=1)["loss/kl"] == pytest.approx(
        sum(values) / trained, rel=1e-12
    )


def mask_of(row: Sample) -> Tensor:
    return torch.tensor(list(row.mask), dtype=torch.float64)


def test_a_policy_that_is_its_reference_has_no_divergence_and_no_gradient_of_one(
    tmp_path: Path,
) -> None:
    samples = [replace(row, advantage=0.0) for row in ragged()]
    policy = make_policy(loaded(float64_model()), loss={"kl_coef": 1.0, "kl_estimator": "full"})
    assert policy.update(samples, step=1)["loss/kl"] == pytest.approx(0, abs=1e-14)
    policy.save(tmp_path)
    moments = load_file(tmp_path / "exp_avg.safetensors").values()
    assert max(float(moment.abs().max()) for moment in moments) < 1e-14


def test_the_expected_gradient_of_k2_is_that_of_the_whole_divergence() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, reference = (
        torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    head, other = (torch.nn.Linear(6, 11, bias=bias, dtype=torch.float64) for bias in (True, False))
    inputs = hidden.clone().requires_grad_()
    _, _, whole = score_tokens(
        inputs,
        head,
        torch.zeros(4, dtype=torch.long),
        temperature=0.7,
        reference=(reference, other),
    )
    (expected,) = torch.autograd.grad(whole.sum(), inputs)
    sampled = hidden.clone().requires_grad_()
    log_p, log_q = (
        (layer(states) / 0.7).log_softmax(1)
        for layer, states in ((head, sampled), (other, reference))
    )
    k2 = (log_p - log_q.detach()).square() / 2  # of each token that may be sampled
    (found,) = torch.autograd.grad((log_p.detach().exp() * k2).sum(), sampled)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", [(11, 13), (13, 11), (12, 12)])
def test_padded_vocabularies_are_compared_on_the_tokens_of_both_in_value_and_gradient(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their padding has much of the mass: a tenth or more."""
    monkeypatch.setattr("dapo.policy.logprobs.BLOCK_LOGITS", 2 * sizes[0])
    generator = torch.Generator().manual_seed(3)
    hidden, states = (torch.randn(5, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    head, other = (torch.nn.Linear(6, size, dtype=torch.float64) for size in sizes)
    targets = torch.tensor([0, 3, 1, 2, 2, 5, 0])
    rows = torch.tensor([0, 0, 1, 2, 3, 4, 4])
    factors = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (7, 5, 5)]
    by_score = hidden.clone().requires_grad_()
    by_hand = hidden.clone().requires_grad_()
    scores = score_tokens(
        by_score,
        head,
        targets,
        rows,
        temperature=0.7,
        differentiable_entropy=True,
        reference=(states, other),
    )
    log_p = (head(by_hand) / 0.7).log_softmax(1)
    common = min(sizes)
    own, reference = (
        (layer(of)[:, :common] / 0.7).log_softmax(1)
        for layer, of in ((head, by_hand), (other, states))
    )
    divergences = (own.exp() * (own - reference.detach())).sum(1)
    expected = (log_p[rows, targets], -(log_p.exp() * log_p).sum(1), divergences)
    gradients = []
    for leaf, values in ((by_score, scores), (by_hand, expected)):
        total = sum((factor * value).sum() for factor, value in zip(factors, values, strict=True))
        gradients += torch.autograd.grad(total, [leaf, head.weight, head.bias])
    for one, two in zip((*scores, *gradients[:3]), (*expected, *gradients[3:]), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-12)
    if sizes[0] > common:
        assert float(log_p[:, common:].detach().exp().sum(1).max()) > 0.1


def test_kl_grows_from_zero_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    options = {"kl_coef": 0.1}
    policy = make_policy(loss=options)
    assert policy.update(ragged(), step=1)["loss/kl"] == pytest.approx(0, abs=1e-12)
    moved = policy.update(ragged(), step=2)["loss/kl"]
    assert moved > 1e-6
    policy.save(tmp_path)
    again = make_policy(loss=options)
    again.load(tmp_path)
    assert again.update(ragged(), step=3) == policy.update(ragged(), step=3)


def test_the_learning_rate_over_the_first_steps() -> None:
    rates = [learning_rate(step, lr=1e-6, warmup_steps=4) for step in range(1, 7)]
    assert rates == pytest.approx([0.25e-6, 0.5e-6, 0.75e-6, 1e-6, 1e-6, 1e-6])
    assert [learning_rate(step, lr=3.0, warmup_steps=0) for step in (1, 2)] == [3.0, 3.0]
    assert learning_rate(1, lr=1.0, warmup_steps=20) == pytest.approx(0.05)
    decay = {"lr": 1.0, "warmup_steps": 2, "num_steps": 6, "min_fraction": 0.2}
    linear = [learning_rate(step, schedule="linear", **decay) for step in range(1, 8)]  # type: ignore[arg-type]
    assert linear == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = [learning_rate(step, schedule="cosine", **decay) for step in range(1, 8)]  # type: ignore[arg-type]
    bend = 0.4 * math.sqrt(0.5)
    assert cosine == pytest.approx([0.5, 1.0, 0.6 + bend, 0.6, 0.6 - bend, 0.2, 0.2])
    with pytest.raises(ValueError, match="count from 1"):
        learning_rate(0, lr=1.0, warmup_steps=20)


def test_the_rate_follows_training_steps_not_updates() -> None:
    policy = make_policy(optim={"lr": 1e-3, "warmup_steps": 4})
    rates = [policy.update(ragged(), step=step)["optim/lr"] for step in (1, 1, 2, 4, 9)]
    assert rates == pytest.approx([0.25e-3, 0.25e-3, 0.5e-3, 1e-3, 1e-3])


def test_a_step_of_adamw_computed_by_hand(tmp_path: Path) -> None:
    """At the first step the moments cancel: w -> w (1 - lr decay) - lr sign(g), for |g| far above
    eps.
    """
    policy = make_policy(optim={"lr": 1e-2, "weight_decay": 0.5})
    before = weights_of(policy)
    gradient = gradient_of(policy, ragged(), tmp_path / "x")
    after = weights_of(policy)
    for name, g in gradient.items():
        clear = g.abs() > 1e-5
        expected = before[name] * (1 - 1e-2 * 0.5) - 1e-2 * g.sign()
        torch.testing.assert_close(after[name][clear], expected[clear], rtol=0, atol=1e-4)
    assert any(bool((g.abs() > 1e-5).any()) for g in gradient.values())


def test_gradients_are_clipped_to_the_global_norm_and_the_norm_is_logged_before_it(
    tmp_path: Path,
) -> None:
    free = gradient_of(make_policy(), ragged(), tmp_path / "free")
    norm = sum(float((g**2).sum()) for g in free.values()) ** 0.5
    policy = make_policy(optim={"max_grad_norm": norm / 4})
    clipped = gradient_of(policy, ragged(), tmp_path / "clipped")
    assert_close(clipped, {name: g / 4 for name, g in free.items()}, relative=1e-6)
    assert make_policy(optim={"max_grad_norm": norm / 4}).update(ragged(), step=1)[
        "optim/grad_norm"
    ] == pytest.approx(norm)


def test_a_gradient_that_is_not_finite_skips_the_update_and_skips_in_a_row_are_counted() -> None:
    policy = make_policy()
    good = ragged()
    bad = [dataclasses.replace(row, advantage=float("nan")) for row in ragged()]
    policy.update(good, step=1)
    before = weights_of(policy)
    for count in (1, 2):
        metrics = policy.update(bad, step=1)
        assert metrics["optim/skipped"] == 1
        assert not metrics["optim/grad_norm"] < float("inf")
        assert policy.skipped_in_a_row == count
    assert_close(weights_of(policy), before, relative=0)
    assert policy.update(good, step=1)["optim/skipped"] == 0  # ends the row
    assert policy.skipped_in_a_row == 0


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_is_not_applied_though_the_loss_is_valid(
    wrong: float,
) -> None:
    layer = torch.nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    optimizer = MasterAdamW(layer, OptimConfig(lr=0.1))
    layer.weight.grad = torch.full_like(layer.weight, 0.5)
    layer.weight.grad[1, 2] = wrong
    norm, skipped = optimizer.update(0.1, add_sums([optimizer.measure()]), is_valid=True)
    assert skipped
    assert not math.isfinite(norm)
    assert torch.equal(layer.weight, before)


def test_updates_make_rewarded_responses_likelier_and_punished_ones_less_likely() -> None:
    policy = make_policy(loaded("tied llama", dtype=torch.bfloat16), optim={"lr": 3e-3})
    samples = groups_of([(4, (6, 6))])
    before = policy.record_old_logprobs(samples)
    for step in range(1, 6):
        policy.update(samples, step=step)
    after = policy.record_old_logprobs(samples)
    for old, new in zip(before, after, strict=True):
        assert old.old_logprobs is not None
        assert new.old_logprobs is not None
        gain = sum(new.old_logprobs) - sum(old.old_logprobs)
        assert gain > 0.5 if old.advantage > 0 else gain < -0.5


def test_float32_master_weights_take_steps_below_the_resolution_of_bfloat16() -> None:
    model = loaded("tied llama", dtype=torch.bfloat16)
    policy = make_policy(model, optim={"lr": 1e-6, "weight_decay": 0.0})
    before = master_weights_of(policy)
    rounded = {name: p.detach().clone() for name, p in model.model.named_parameters()}
    for step in range(1, 4):
        policy.update(ragged(), step=step)
    after = master_weights_of(policy)
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    moves = torch.cat([(after[name] - before[name]).abs().flatten() for name in after])
    assert 1e-6 < moves.max() < 4e-6
    assert (moves > 0).double().mean() > 0.4
    name = "model.layers.0.mlp.up_proj.weight"
    stayed = dict(model.model.named_parameters())[name] == rounded[name]
    assert stayed.double().mean() > 0.95
    for name, working in model.model.named_parameters():
        assert torch.equal(working, after[name].bfloat16())


@pytest.mark.parametrize("adapters", [{}, {"lora": {"rank": 2}}])
def test_engines_get_the_weights_in_the_type_that_the_model_computes_in(
    adapters: dict[str, Any],
) -> None:
    """Half the bytes of float32 master weights, and what an engine that rounds them itself would
    compute with.
    """
    policy = make_policy(loaded("tied llama", dtype=torch.bfloat16), **adapters)
    policy.update(ragged(), step=1)
    source = policy.weights(version=1)
    found = dict(source.named_tensors())
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert {dtype for dtype, _ in source.layout().tensors.values()} == {"bfloat16"}
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == source.layout().shapes
    if not adapters:
        for name, master in master_weights_of(policy).items():
            assert torch.equal(found[name], master.bfloat16())


def test_bfloat16_gradients_are_added_up_in_float32(tmp_path: Path) -> None:
    samples = groups_of([(3, (4, 4))] * 40)
    exact = gradient_of(make_policy(loaded("llama")), samples, tmp_path / "exact")
    cut = gradient_of(
        make_policy(loaded("llama", dtype=torch.bfloat16), microbatch_tokens=11),
        samples,
        tmp_path / "cut",
    )
    for name, gradient in exact.items():
        assert cut[name].dtype == torch.float32
        difference = float((cut[name] - gradient).norm() / gradient.norm())
        assert difference < 0.05, name


def test_weights_come_under_every_name_and_tied_ones_are_one() -> None:
    policy = make_policy(loaded("tied llama", dtype=torch.bfloat16))
    policy.update(ragged(), step=1)
    weights = weights_of(policy)
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert "model.norm.weight" in weights
    untied = weights_of(make_policy(loaded("llama")))
    assert not torch.equal(untied["lm_head.weight"], untied["model.embed_tokens.weight"])


def test_weights_are_read_when_asked_for_and_any_number_of_times() -> None:
    policy = make_policy()
    source = policy.weights(version=0)
    before = {name: tensor.clone() for name, tensor in source.named_tensors()}
    policy.update(ragged(), step=1)
    after = dict(source.named_tensors())
    assert before.keys() == after.keys()
    assert not torch.equal(before["model.norm.weight"], after["model.norm.weight"])


@pytest.mark.parametrize(
    ("dtype", "updates"),
    [(torch.bfloat16, 2), (torch.bfloat16, 0), (torch.float32, 2), (torch.float64, 2)],
)
def test_a_saved_policy_goes_on_bit_for_bit(
    dtype: torch.dtype, updates: int, tmp_path: Path
) -> None:
    policy = make_policy(loaded("tied llama", dtype=dtype))
    for step in range(updates):
        policy.update(ragged(), step=step + 1)
    policy.save(tmp_path)
    resumed = make_policy(loaded("tied llama", dtype=dtype))
    resumed.update(groups_of([(2, (3, 3))]), step=1)  # whatever it did before is forgotten
    resumed.load(tmp_path)
    for step in (3, 4):
        assert resumed.update(ragged(), step=step) == policy.update(ragged(), step=step)
        assert_close(master_weights_of(resumed), master_weights_of(policy), relative=0)


def test_the_count_of_skips_in_a_row_is_saved(tmp_path: Path) -> None:
    bad = [dataclasses.replace(row, advantage=float("nan")) for row in ragged()]
    policy = make_policy()
    policy.update(bad, step=1)
    policy.save(tmp_path)
    resumed = make_policy()
    resumed.load(tmp_path)
    resumed.update(bad, step=1)
    assert resumed.skipped_in_a_row == 2


def test_a_checkpoint_holds_safetensors_and_json_and_can_be_overwritten(tmp_path: Path) -> None:
    policy = make_policy()
    for step in (1, 2):
        policy.update(ragged(), step=step)
        policy.save(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}
    assert json.loads((tmp_path / "policy.json").read_text())["num_updates"] == 2


def test_saved_weights_are_a_weight_source_with_tied_names(tmp_path: Path) -> None:
    policy = make_policy(loaded("tied llama", dtype=torch.bfloat16))
    policy.update(ragged(), step=1)
    policy.save(tmp_path)
    source = SavedWeights(tmp_path)
    assert source.layout().shapes == policy.weights(version=0).layout().shapes
    for _ in range(2):
        found = dict(source.named_tensors())
        assert torch.equal(found.pop("lm_head.weight"), found["model.embed_tokens.weight"])
        assert_close(found, master_weights_of(policy), relative=0)


def saved(directory: Path) -> Policy:
    policy = make_policy()
    policy.update(ragged(), step=1)
    policy.save(directory)
    return policy


def test_a_damaged_or_foreign_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    saved(tmp_path)
    other = make_policy(loaded("qwen3"))
    with pytest.raises(CheckpointError, match="another model"):
        other.load(tmp_path)
    with pytest.raises(CheckpointError, match=r"float32.*model\.dtype"):
        make_policy(loaded(dtype=torch.float32)).load(tmp_path)
    policy = make_policy()
    before = weights_of(policy)
    (tmp_path / "exp_avg_sq.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="exp_avg_sq"):
        policy.load(tmp_path)
    (tmp_path / "policy.json").unlink()
    with pytest.raises(CheckpointError, match=r"policy\.json"):
        policy.load(tmp_path)
    assert_close(weights_of(policy), before, relative=0)


def test_a_checkpoint_of_other_shapes_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    weights = load_file(tmp_path / "weights.safetensors")
    save_file(
        weights | {"model.norm.weight": torch.ones(3, dtype=torch.float64)},
        tmp_path / "weights.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is torch\.float64 \[3\]"):
        make_policy().load(tmp_path)


def test_logprobs_for_some_samples_only_are_an_error() -> None:
    first, *others = make_policy().record_old_logprobs(ragged())
    with pytest.raises(
        ValueError, match="all samples of a minibatch have old_logprobs or none has"
    ):
        make_policy(microbatch_tokens=1).update(
            [dataclasses.replace(first, old_logprobs=None), *others], step=1
        )


@pytest.mark.parametrize("field", ["mask", "old_logprobs", "engine_logprobs"])
def test_values_that_do_not_match_the_response_are_an_error(field: str) -> None:
    rows = [
        sample(0, (1, 2), (3, 4, 5), **{field: (1.0,)}),
        sample(0, (1, 2), (6,), **{field: (1.0,)}),
    ]
    with pytest.raises(ValueError, match="one value for each response token"):
        make_policy().update(rows, step=1)


def test_an_aborted_update_leaves_no_gradient_behind(tmp_path: Path) -> None:
    policy = make_policy(microbatch_tokens=20)
    broken = [*ragged(), sample(5, (1, 2), (VOCABULARY_END,))]
    with pytest.raises((IndexError, RuntimeError)):
        policy.update(broken, step=1)
    expected = gradient_of(make_policy(microbatch_tokens=20), ragged(), tmp_path / "fresh")
    assert_close(gradient_of(policy, ragged(), tmp_path / "after"), expected, relative=0)


VOCABULARY_END = 10_000
