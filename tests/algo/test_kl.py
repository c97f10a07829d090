"""The three estimates of the divergence: values by hand, and the gradient of each by
enumeration.
"""

import math

import pytest
import torch
from torch import Tensor

from dapo.algo.kl import KlEstimator, kl_gradient, kl_penalty, token_kl

NAN = float("nan")
ESTIMATORS: list[KlEstimator] = ["k1", "k2", "k3"]
ALL = torch.ones(2, dtype=torch.bool)


# --- values


def test_k3_penalty_has_hand_computed_values_weights_and_gradient():
    logprobs = (
        torch.tensor([[0.5, 0.2, 0.9], [0.4, 0.4, 0.9]], dtype=torch.float64).log().requires_grad_()
    )
    reference = torch.tensor([[0.5, 0.4, NAN], [0.2, 0.4, NAN]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, False], [True, True, False]])
    penalty = kl_penalty(logprobs, reference, mask, torch.tensor([2.0, 10.0], dtype=torch.float64))
    penalty.backward()
    # q = 1 and 2: 0 and 1 - ln 2; q = 0.5 and 1: ln 2 - 0.5 and 0; the slope is w (1 - q)
    assert penalty.item() == pytest.approx(2 * 0.3068528 + 10 * 0.1931472, abs=1e-6)
    assert logprobs.grad.flatten().tolist() == pytest.approx([0, -2, 0, 5, 0, 0], abs=1e-12)


def test_the_reference_gets_no_gradient():
    reference = torch.tensor([[-1.0]], requires_grad=True)
    kl_penalty(
        torch.tensor([[-2.0]], requires_grad=True),
        reference,
        torch.ones(1, 1, dtype=torch.bool),
        torch.ones(1),
    ).backward()
    assert reference.grad is None


def test_k3_penalty_is_never_negative_and_zero_only_on_the_reference():
    logprobs = torch.linspace(-5, 0, 101, dtype=torch.float32).unsqueeze(0)
    reference = torch.full_like(logprobs, -2.5)
    each = torch.stack(
        [
            kl_penalty(
                logprobs[:, [t]],
                reference[:, [t]],
                torch.ones(1, 1, dtype=torch.bool),
                torch.ones(1),
            )
            for t in range(101)
        ]
    )
    assert (each[torch.arange(101) != 50] > 0).all()
    assert each[50] == 0


def test_k3_penalty_keeps_its_digits_near_the_reference():
    # (log q)^2 / 2 with log q = 1e-3 in float32; exp(x) - 1 - x would be wrong by several percent
    one = torch.ones(1)
    penalty = kl_penalty(
        torch.tensor([[-1e-3]]), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), one
    )
    assert penalty.item() == pytest.approx(0.5e-6, rel=2e-3)


def test_mean_of_k3_over_samples_of_the_policy_is_the_kl_divergence():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum()
    # each token of the vocabulary once, weighted by its probability: the expectation itself
    estimate = kl_penalty(
        policy.log().unsqueeze(1),
        reference.log().unsqueeze(1),
        torch.ones(3, 1, dtype=torch.bool),
        policy,
    )
    assert estimate.item() == pytest.approx(exact.item(), abs=1e-12)


def test_each_estimate_has_hand_computed_values_and_is_zero_where_nothing_trains():
    logprobs = torch.tensor([0.5, 0.2, 0.4, NAN], dtype=torch.float64).log()
    reference = torch.tensor([0.5, 0.4, 0.2, NAN], dtype=torch.float64).log()
    mask = torch.tensor([True, True, True, False])
    ln2 = math.log(2)
    expected = {
        "k1": [0, -ln2, ln2, 0],
        "k2": [0, ln2**2 / 2, ln2**2 / 2, 0],
        "k3": [0, 1 - ln2, ln2 - 0.5, 0],
    }
    for estimator in ESTIMATORS:
        found = token_kl(logprobs, reference, mask, estimator=estimator)
        assert found.tolist() == pytest.approx(expected[estimator], abs=1e-12), estimator


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_beyond_a_log_ratio_of_twenty_an_estimate_is_finite_and_has_no_gradient(
    estimator: KlEstimator,
):
    logprobs = torch.tensor(
        [500.0, -500.0, math.inf, -math.inf, 19.0], dtype=torch.float64, requires_grad=True
    )
    zeros = torch.zeros(5, dtype=torch.float64)
    kl_penalty(
        logprobs, zeros, torch.ones(5, dtype=torch.bool), zeros + 1, estimator=estimator
    ).backward()
    assert logprobs.grad is not None
    assert logprobs.grad[:4].tolist() == [0.0] * 4
    assert logprobs.grad[4] > 0
    assert token_kl(logprobs, zeros, zeros + 1, estimator=estimator).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_written_gradient_equals_that_of_autograd(estimator: KlEstimator, dtype: torch.dtype):
    gaps = torch.tensor(
        [0.0, 0.1, -0.1, 3.0, -3.0, 19.9, -19.9, 20.1, -20.1, 500.0, NAN], dtype=dtype
    ).repeat(2)
    mask = (torch.arange(22) < 11) & gaps.isfinite()
    reference = torch.linspace(-4, -0.5, 22, dtype=dtype)
    weights = torch.linspace(0.5, 2, 22, dtype=dtype)
    logprobs = (reference + gaps).requires_grad_()
    penalty = kl_penalty(logprobs, reference, mask, weights, estimator=estimator)
    (expected,) = torch.autograd.grad(penalty, logprobs)
    found = kl_gradient(logprobs.detach(), reference, mask, weights, estimator=estimator)
    torch.testing.assert_close(
        found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-14, atol=1e-7
    )
    assert found.count_nonzero() >= 6


# --- the gradient of each, by enumeration of a policy with two tokens


LOGITS = torch.tensor([0.9, -0.3], dtype=torch.float64)
REFERENCE = torch.tensor([0.35, 0.65], dtype=torch.float64)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p / q).log()).sum()


def exact(*, reverse: bool, logits: Tensor = LOGITS) -> Tensor:
    """The gradient by the logits of KL(policy || reference), or of KL(reference || policy)."""
    logits = logits.clone().requires_grad_()
    policy = logits.softmax(0)
    (gradient,) = torch.autograd.grad(
        divergence(policy, REFERENCE) if reverse else divergence(REFERENCE, policy), logits
    )
    return gradient


def in_loss(
    estimator: KlEstimator, sampled_by: Tensor | None = None, logits: Tensor = LOGITS
) -> Tensor:
    """The expected gradient of the penalty: each token once, weighted by the probability that it is
    sampled.
    """
    logits = logits.clone().requires_grad_()
    weights = logits.detach().softmax(0) if sampled_by is None else sampled_by
    penalty = kl_penalty(logits.log_softmax(0), REFERENCE.log(), ALL, weights, estimator=estimator)
    (gradient,) = torch.autograd.grad(penalty, logits)
    return gradient


def in_reward(
    estimator: KlEstimator, sampled_by: Tensor | None = None, logits: Tensor = LOGITS
) -> Tensor:
    """The expected policy gradient, r log pi by its derivative, of the estimate as a cost; r = pi /
    pi_old.
    """
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    old = logits.detach().softmax(0) if sampled_by is None else sampled_by
    cost = token_kl(logprobs.detach(), REFERENCE.log(), ALL, estimator=estimator)
    (gradient,) = torch.autograd.grad((old * (logprobs - old.log()).exp() * cost).sum(), logits)
    return gradient


def test_k1_in_the_loss_pulls_nowhere():
    assert in_loss("k1").tolist() == pytest.approx([0, 0], abs=1e-15)


def test_k2_in_the_loss_has_the_gradient_of_the_reverse_divergence():
    assert in_loss("k2").tolist() == pytest.approx(exact(reverse=True).tolist(), abs=1e-15)


def test_k3_in_the_loss_has_the_gradient_of_the_forward_divergence():
    assert in_loss("k3").tolist() == pytest.approx(exact(reverse=False).tolist(), abs=1e-15)
    assert in_loss("k3").tolist() != pytest.approx(exact(reverse=True).tolist(), rel=0.01)


def test_k1_in_the_reward_has_the_gradient_of_the_reverse_divergence():
    assert in_reward("k1").tolist() == pytest.approx(exact(reverse=True).tolist(), abs=1e-15)


def test_k3_in_the_reward_has_the_difference_of_the_two_gradients():
    expected = exact(reverse=True) - exact(reverse=False)
    assert in_reward("k3").tolist() == pytest.approx(expected.tolist(), abs=1e-15)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_near_the_reference_k2_and_k3_in_the_reward_pull_a_hundred_times_less(
    estimator: KlEstimator,
):
    near = REFERENCE.log() + torch.tensor([0.01, 0.0], dtype=torch.float64)
    pull = float(
        in_reward(estimator, logits=near).abs().max() / in_reward("k1", logits=near).abs().max()
    )
    assert 1e-5 < pull < 0.01


def test_off_policy_the_terms_of_the_loss_are_biased_and_the_reward_is_not():
    old = torch.tensor([0.5, 0.5], dtype=torch.float64)  # where the policy has 0.77 and 0.23
    assert in_loss("k1", old).abs().max() > 0.1
    for estimator, reverse in (("k2", True), ("k3", False)):
        assert not torch.allclose(in_loss(estimator, old), exact(reverse=reverse), rtol=0.05)
    assert in_reward("k1", old).tolist() == pytest.approx(exact(reverse=True).tolist(), abs=1e-15)


# --- wrong arguments


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match=r"estimator must be 'k1', 'k2' or 'k3', got 'k4'"):
        token_kl(torch.zeros(2), torch.zeros(2), ALL, estimator="k4")  # type: ignore[arg-type]
