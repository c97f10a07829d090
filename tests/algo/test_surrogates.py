"""GSPO, CISPO, SAPO and the engine correction: values by hand, gradients by finite differences, and
what they share.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dapo.algo.loss import Responses, engine_weights, over_responses, policy_loss
from dapo.algo.surrogates import cispo_loss, gspo_loss, sapo_loss

OF_TOKENS = torch.tensor([0, 1, 1, 0, 2, 1, 0])
RESPONSES = Responses.of(OF_TOKENS)
MASK = torch.tensor([True, True, True, True, True, False, True])
ADVANTAGES = torch.tensor([1.5, -0.5, -0.5, 1.5, 0.7, -0.5, 1.5], dtype=torch.float64)
WEIGHTS = torch.linspace(0.1, 0.7, 7, dtype=torch.float64)
OLD = torch.linspace(-2.0, -0.4, 7, dtype=torch.float64)
LOG_RATIOS = torch.tensor([0.05, -0.3, 0.1, -0.11, 0.4, 9.0, 0.02], dtype=torch.float64)
"""Response 0: geometric mean of r exp(-0.0133); response 1: exp(-0.1); response 2: exp(0.4)."""

Loss = Callable[[Tensor], Tensor]


def gspo(logprobs: Tensor, old: Tensor = OLD, clip: float = 0.2) -> Tensor:
    return gspo_loss(
        logprobs, old, ADVANTAGES, MASK, WEIGHTS, RESPONSES, clip_low=clip, clip_high=clip
    )[0]


def cispo(logprobs: Tensor, old: Tensor = OLD) -> Tensor:
    return cispo_loss(logprobs, old, ADVANTAGES, MASK, WEIGHTS, clip_high=0.3)[0]


def sapo(logprobs: Tensor, old: Tensor = OLD) -> Tensor:
    return sapo_loss(logprobs, old, ADVANTAGES, MASK, WEIGHTS)[0]


def gradient(loss: Callable[..., Tensor], logprobs: Tensor, *more: Tensor) -> Tensor:
    leaf = logprobs.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(leaf, *more), leaf)
    return found


def test_gspo_takes_one_ratio_for_each_response_and_clips_it_as_a_whole() -> None:
    logprobs = OLD + LOG_RATIOS
    s = {0: math.exp((0.05 - 0.11 + 0.02) / 3), 1: math.exp((-0.3 + 0.1) / 2), 2: math.exp(0.4)}
    surrogate = {0: 1.5 * s[0], 1: -0.5 * s[1], 2: 0.7 * 1.2}  # the third is clipped at 1 + 0.2
    expected = -sum(
        float(w) * surrogate[int(r)] for w, r, m in zip(WEIGHTS, OF_TOKENS, MASK, strict=True) if m
    )
    assert float(gspo(logprobs)) == pytest.approx(expected, rel=1e-12)
    found = gradient(gspo, logprobs)
    assert not found[[4, 5]].any()  # clipped as a whole, and masked
    # GSPO-token: the ratio of the response, and the weight of the token itself
    assert found[[0, 3, 6]].tolist() == pytest.approx(
        (-WEIGHTS[[0, 3, 6]] * 1.5 * s[0]).tolist(), rel=1e-12
    )
    assert found[[1, 2]].tolist() == pytest.approx(
        (WEIGHTS[[1, 2]] * 0.5 * s[1]).tolist(), rel=1e-12
    )
    _, sums = gspo_loss(
        logprobs, OLD, ADVANTAGES, MASK, WEIGHTS, RESPONSES, clip_low=0.05, clip_high=0.2
    )
    assert [int(sums[name]) for name in ("tokens", "clipped_high", "clipped_low")] == [6, 1, 2]
    _, wide = gspo_loss(
        logprobs, OLD, ADVANTAGES, MASK, WEIGHTS, RESPONSES, clip_low=0.2, clip_high=0.5
    )
    assert [int(wide[name]) for name in ("clipped_high", "clipped_low")] == [0, 0]
    assert float(sums["ratio_sum"]) == pytest.approx(3 * s[0] + 2 * s[1] + s[2])


def test_gspo_with_sequence_weights_is_the_papers_mean_over_responses() -> None:
    lengths = {0: 3, 1: 2, 2: 1}
    weights = torch.tensor([1 / (3 * lengths[int(r)]) for r in OF_TOKENS], dtype=torch.float64)
    logprobs = OLD + LOG_RATIOS
    loss, _ = gspo_loss(
        logprobs, OLD, ADVANTAGES, MASK, weights, RESPONSES, clip_low=0.2, clip_high=0.2
    )
    s = [math.exp(-0.04 / 3), math.exp(-0.1), 1.2]
    assert float(loss) == pytest.approx(-(1.5 * s[0] - 0.5 * s[1] + 0.7 * s[2]) / 3, rel=1e-12)


def test_gspo_gives_a_token_of_weight_zero_no_gradient_and_the_others_their_own() -> None:
    one = torch.ones(4, dtype=torch.float64)
    mask = torch.ones(4, dtype=torch.bool)
    weights = torch.tensor([0.25, 0.0, 0.25, 0.25], dtype=torch.float64)
    leaf = (-one).requires_grad_()
    responses = Responses.of(torch.zeros(4, dtype=torch.int64))
    loss, _ = gspo_loss(leaf, -one, one, mask, weights, responses, clip_low=0.2, clip_high=0.2)
    assert torch.autograd.grad(loss, leaf)[0].tolist() == [-0.25, 0.0, -0.25, -0.25]
    assert float(loss.detach()) == -0.75


def test_cispo_weighs_each_gradient_by_its_bounded_ratio_and_drops_none() -> None:
    logprobs = OLD + LOG_RATIOS
    found = gradient(cispo, logprobs)
    bounded = torch.where(MASK, LOG_RATIOS.exp().clamp(max=1.3), 0.0)
    torch.testing.assert_close(found, -WEIGHTS * ADVANTAGES * bounded, rtol=1e-12, atol=0)
    assert float(cispo(logprobs)) == pytest.approx(
        float(-(WEIGHTS * ADVANTAGES * bounded * logprobs).sum()), rel=1e-12
    )
    _, sums = cispo_loss(logprobs, OLD, ADVANTAGES, MASK, WEIGHTS, clip_high=0.3)
    assert int(sums["clipped_high"]) == 1


def test_sapo_has_hand_computed_values_and_its_gradient_fades_on_both_sides() -> None:
    def value(ratio: float, advantage: float) -> tuple[float, float]:
        logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        one = torch.ones(1, dtype=torch.float64)
        zero = torch.zeros(1, dtype=torch.float64)
        loss, _ = sapo_loss(logprobs, zero, advantage * one, one, one)
        (slope,) = torch.autograd.grad(loss, logprobs)
        return float(loss.detach()), float(slope)

    # 4 sigmoid(0) A = 2 A, and the slope is A
    assert value(1.0, 2.0) == pytest.approx((-4.0, -2.0))
    assert value(1.0, -2.0) == pytest.approx((4.0 / 1.05, 2.0))
    p = 1 / (1 + math.exp(-0.5))
    assert value(1.5, 1.0) == pytest.approx((-4 * p, -4 * p * (1 - p) * 1.5))
    slopes = {ratio: abs(value(ratio, 1.0)[1]) / ratio for ratio in (0.2, 0.5, 1.0, 2.0, 5.0)}
    assert slopes[0.2] < slopes[0.5] < slopes[1.0] > slopes[2.0] > slopes[5.0] > 0
    assert abs(value(2.0, -1.0)[1]) < abs(value(2.0, 1.0)[1])  # a larger temperature fades faster


def gspo_with_equal_weights(logprobs: Tensor) -> Tensor:
    """GSPO where the tokens of a response have one weight, so that the stopped gradient is that of
    the loss.
    """
    sums, counts = over_responses(WEIGHTS, MASK, RESPONSES)
    weights = sums / counts
    return gspo_loss(
        logprobs, OLD, ADVANTAGES, MASK, weights, RESPONSES, clip_low=0.2, clip_high=0.2
    )[0]


@pytest.mark.parametrize("loss", [gspo_with_equal_weights, sapo], ids=lambda f: f.__name__)
def test_gradients_equal_finite_differences(loss: Loss) -> None:
    logprobs = OLD + LOG_RATIOS
    found = gradient(loss, logprobs)
    step = 1e-6
    for i in range(len(logprobs)):
        shift = torch.zeros_like(logprobs)
        shift[i] = step
        slope = (loss(logprobs + shift) - loss(logprobs - shift)) / (2 * step)
        assert float(found[i]) == pytest.approx(float(slope), abs=1e-8)


@pytest.mark.parametrize("loss", [cispo, sapo, gspo], ids=lambda f: f.__name__)
def test_on_policy_every_surrogate_has_the_gradient_of_the_clipped_one(
    loss: Callable[..., Tensor],
) -> None:
    def clipped(logprobs: Tensor, old: Tensor) -> Tensor:
        clip = {"clip_low": 0.2, "clip_high": 0.2}
        return policy_loss(logprobs, old, ADVANTAGES, MASK, WEIGHTS, **clip)[0]

    leaf = OLD.clone().requires_grad_()
    torch.testing.assert_close(
        torch.autograd.grad(loss(leaf, leaf), leaf)[0],
        torch.autograd.grad(clipped(leaf, leaf), leaf)[0],
    )


@pytest.mark.parametrize("loss", [cispo, sapo, gspo], ids=lambda f: f.__name__)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_a_masked_token_holds_changes_nothing(loss: Loss, garbage: float) -> None:
    logprobs = OLD + LOG_RATIOS
    spoilt = torch.where(MASK, logprobs, garbage)
    assert float(loss(spoilt)) == float(loss(logprobs))
    assert torch.equal(gradient(loss, spoilt), gradient(loss, logprobs))


@pytest.mark.parametrize("loss", [cispo, sapo, gspo], ids=lambda f: f.__name__)
def test_shapes_that_do_not_fit_are_refused_by_name(loss: Callable[..., Tensor]) -> None:
    with pytest.raises(ValueError, match="old_logprobs must have a value for each token"):
        loss(OLD, OLD[:3])


# --- the engine correction


def test_engine_weights_by_token_and_by_response_truncated_and_masked() -> None:
    engine = OLD - LOG_RATIOS
    by_token = [
        math.exp(x) if m else 1.0 for x, m in zip(LOG_RATIOS.tolist(), MASK.tolist(), strict=True)
    ]
    product = {0: math.exp(-0.04), 1: math.exp(-0.2), 2: math.exp(0.4)}
    by_response = [product[int(r)] if m else 1.0 for r, m in zip(OF_TOKENS, MASK, strict=True)]

    def weights(**options: object) -> list[float]:
        return engine_weights(OLD, engine, MASK, **{"cap": 1.2, **options}).tolist()  # type: ignore[arg-type]

    assert weights() == pytest.approx([min(u, 1.2) for u in by_token])
    assert weights(responses=RESPONSES) == pytest.approx([min(u, 1.2) for u in by_response])
    assert weights(over_cap="mask") == pytest.approx(
        [u if 1 / 1.2 <= u <= 1.2 else 0.0 for u in by_token]
    )
    masked = weights(over_cap="mask", responses=RESPONSES)
    assert masked == pytest.approx([u if 1 / 1.2 <= u <= 1.2 else 0.0 for u in by_response])
    assert masked[4:6] == [0.0, 1.0]


def test_responses_ratio_weights_are_unbiased_where_nothing_is_bounded() -> None:
    """A two-token policy by enumeration: E_engine[u f] = E_old[f] for a function f of the whole
    response.
    """
    generator = torch.Generator().manual_seed(0)
    old, engine = (
        torch.rand(2, 3, generator=generator, dtype=torch.float64).softmax(-1).log()
        for _ in range(2)
    )
    total = exact = 0.0
    for a in range(3):
        for b in range(3):
            logs = torch.stack([old[0, a], old[1, b]]), torch.stack([engine[0, a], engine[1, b]])
            every = torch.ones(2, dtype=torch.bool)
            u = engine_weights(
                *logs, every, cap=1e9, responses=Responses.of(torch.zeros(2, dtype=torch.int64))
            )
            assert float(u[0]) == float(u[1])
            value = (a + 1) * (b + 2) ** 2
            total += float(logs[1].sum().exp()) * float(u[0]) * value
            exact += float(logs[0].sum().exp()) * value
    assert total == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("cap", "over_cap"), [(0.0, "truncate"), (math.nan, "truncate"), (0.5, "mask")]
)
def test_a_cap_that_leaves_nothing_is_refused(cap: float, over_cap: str) -> None:
    with pytest.raises(ValueError, match="cap must be"):
        engine_weights(OLD, OLD, MASK, cap=cap, over_cap=over_cap)  # type: ignore[arg-type]


@pytest.mark.parametrize("cap", [0.9, 1.2, 5.0])
def test_value_and_gradient_are_those_of_the_decoupled_objective(cap: float) -> None:
    """J = E[min(pi_prox / mu, c) x min(u A, clip(u) A)] with u = pi_theta / pi_prox, by the plain
    formula.
    """
    generator = torch.Generator().manual_seed(0)
    current, proximal, behaviour = (
        -2 * torch.rand(3, 64, dtype=torch.float64, generator=generator)
    ).unbind()
    advantages = torch.randn(64, dtype=torch.float64, generator=generator)
    mask = torch.ones(64, dtype=torch.bool)
    mean = torch.full((64,), 1 / 64, dtype=torch.float64)
    plain = current.clone().requires_grad_()
    ours = current.clone().requires_grad_()
    u = (plain - proximal).exp()
    surrogate = torch.minimum(u * advantages, u.clamp(0.8, 1.28) * advantages)
    objective = ((proximal - behaviour).exp().clamp(max=cap) * surrogate).mean()
    weights = mean * engine_weights(proximal, behaviour, mask, cap=cap)
    loss, _ = policy_loss(ours, proximal, advantages, mask, weights, clip_low=0.2, clip_high=0.28)
    objective.backward()
    loss.backward()
    torch.testing.assert_close(-loss, objective, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(-ours.grad, plain.grad, rtol=1e-12, atol=1e-12)  # type: ignore[operator]
