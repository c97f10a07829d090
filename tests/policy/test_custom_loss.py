"""A loss of the user's own: the paper's, written as such a function, is the built-in one; mistakes
are refused.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dapo.core.errors import ConfigError, LossFailed
from dapo.policy.custom_loss import CustomLoss, load_loss
from dapo.policy.logprobs import CHUNK_LOGITS
from dapo.types import Sample
from examples.losses import dapo, reinforce
from helpers.loss_functions import mean
from helpers.tables import for_each_row
from helpers.tiny_models import VOCABULARY
from helpers.tiny_policies import (
    assert_close,
    branching,
    float64_model,
    gradient_of,
    groups_of,
    loaded,
    make_policy,
    off_policy,
    ragged,
    with_masked_tokens,
)

DAPO = "examples.losses:dapo"
EXACT = 1e-10


@pytest.mark.parametrize(
    "options",
    [{}, {"aggregate": "group", "kl_coef": 0.1, "entropy_coef": 0.05, "engine_correction": "tis"}],
    ids=["dapo", "everything"],
)
@pytest.mark.parametrize("minibatch", [ragged, branching], ids=lambda make: make.__name__)
def test_the_papers_loss_as_a_function_has_the_gradient_and_metrics_of_the_built_in(
    options: dict[str, Any], minibatch: Callable[[], list[Sample]], tmp_path: Path
) -> None:
    samples = with_masked_tokens(off_policy(minibatch()))
    samples = [
        replace(row, engine_logprobs=tuple(old - 0.3 for old in row.old_logprobs or ()))
        for row in samples
    ]
    network = float64_model()
    built_in = make_policy(loaded(network), loss=options, temperature=0.7)
    expected = gradient_of(built_in, samples, tmp_path / "built-in")
    expected_metrics = make_policy(loaded(float64_model()), loss=options, temperature=0.7).update(
        samples, step=1
    )
    for microbatch_tokens in (20, 10_000):
        loss = options | {"function": DAPO}
        arguments: dict[str, Any] = {
            "loss": loss,
            "temperature": 0.7,
            "microbatch_tokens": microbatch_tokens,
        }
        found = gradient_of(
            make_policy(loaded(float64_model()), **arguments),
            samples,
            tmp_path / f"{microbatch_tokens}",
        )
        assert_close(found, expected, relative=EXACT)
        metrics = make_policy(loaded(float64_model()), **arguments).update(samples, step=1)
        assert metrics["loss/policy"] == pytest.approx(expected_metrics["loss/policy"], rel=1e-9)
        assert ("loss/kl" in metrics) == bool(options)
        for name in {
            "loss/entropy",
            "loss/approx_kl",
            "loss/ratio_mean",
            "optim/grad_norm",
            "loss/kl",
        } & metrics.keys():
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-9), name
        assert not {name for name in metrics if "clip_" in name}
        if not options:
            assert metrics["loss/clipped_up"] == pytest.approx(
                expected_metrics["loss/clip_high_fraction"], rel=1e-9
            )


def test_weights_sum_to_one_over_all_parts_with_advantages_of_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, Tensor]] = []

    def counting(
        logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
    ) -> Any:
        calls.append(
            {
                "old": old,
                "advantages": advantages,
                "mask": mask,
                "weights": weights,
                "now": logprobs.detach(),
            }
        )
        return (weights * logprobs).sum(), {"one": weights.sum(), "tokens_max": mask.sum()}

    custom = CustomLoss(counting, "counting")
    calls.clear()  # those of its example
    samples = with_masked_tokens(groups_of([(5, (30, 40, 7)), (2, (3, 60))]))
    samples = [replace(row, advantage=0.0) if i == 3 else row for i, row in enumerate(samples)]
    monkeypatch.setattr("dapo.policy.logprobs.CHUNK_LOGITS", 16 * VOCABULARY)
    metrics = make_policy(microbatch_tokens=100).update(samples, step=1, custom=custom)
    assert CHUNK_LOGITS > 16 * VOCABULARY
    assert len(calls) > 8  # parts of 16 positions
    trained = sum(row.num_trained_tokens for row in samples)
    assert metrics["loss/one"] == pytest.approx(1, abs=1e-6)
    # added, whatever it is called
    assert metrics["loss/tokens_max"] == trained == metrics["optim/update_tokens"]
    for call in calls:
        assert {tuple(value.shape) for value in call.values()} == {call["mask"].shape}
        assert call["mask"].dtype == torch.bool
        assert not call["weights"][~call["mask"]].any()
        assert torch.equal(call["old"], call["now"])  # on policy: pi_old is the policy, detached
        assert not call["old"].requires_grad
    assert {float(a) for call in calls for a in call["advantages"]} == {
        row.advantage for row in samples if any(row.mask)
    }


def test_without_advantages_the_papers_loss_trains_nothing_and_ones_own_may() -> None:
    flat = [replace(row, advantage=0.0) for row in ragged()]

    def likelihood(
        logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
    ) -> Any:
        return -(weights * logprobs).sum(), {}

    assert make_policy().update(flat, step=1)["optim/grad_norm"] == 0
    assert (
        make_policy().update(flat, step=1, custom=CustomLoss(likelihood, "own"))["optim/grad_norm"]
        > 0
    )


def per_token(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
) -> Any:
    return -(weights * advantages * logprobs), {}


def detached(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
) -> Any:
    return -(weights * advantages * logprobs.detach()).sum(), {}


def of_other_things(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
) -> Any:
    return weights.clone().requires_grad_().sum(), {}


def alone(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor) -> Any:
    return reinforce(logprobs, old, advantages, mask, weights)[0]


def infinite(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
) -> Any:
    return (weights * logprobs / torch.zeros(())).sum(), {}


def with_metrics(**metrics: Any) -> Callable[..., Any]:
    def loss(
        logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
    ) -> Any:
        own = {
            name: value(logprobs) if callable(value) else value for name, value in metrics.items()
        }
        return (weights * logprobs).sum(), own

    return loss


@for_each_row(
    ("function", "expected"),
    [
        (mean, "the loss is not a sum over tokens: 1.204 .* 2.859 in three parts"),
        (per_token, r"the loss is a tensor of shape \[12\]: expected a scalar tensor"),
        (detached, "has no gradient: compute it from logprobs"),
        (of_other_things, "does not depend on logprobs"),
        (alone, r"returned a Tensor: expected \(loss, metrics\)"),
        (infinite, "the loss is -inf for an example of 12 tokens|the gradient is not finite"),
        (lambda logprobs: None, r"\(logprobs\): a loss is called with 5 tensors and returns"),
        (lambda *tensors: tensors[9], "raised IndexError"),
        (with_metrics(entropy=1.0), "the metric 'entropy' is reserved for the trainer"),
        (with_metrics(**{"a/b": 1.0}), "the metric 'a/b' needs a name of letters"),
        (with_metrics(values=[1.0]), "the metric 'values' is a list: expected a number"),
        (
            with_metrics(mean=lambda logprobs: logprobs.mean()),
            "the metric 'mean' is not a sum over tokens",
        ),
        (
            with_metrics(bad=lambda logprobs: logprobs.sum() * float("nan")),
            "the metric 'bad' is nan",
        ),
    ],
)
def test_what_is_no_loss_is_refused_before_anything_is_sampled(
    function: Any, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        CustomLoss(function, "loss.function=my:loss")
    assert str(caught.value).startswith("loss.function=my:loss")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_such_module:loss", "there is no module 'no_such_module'"),
        (
            "examples.losses:renforce",
            "module examples.losses has no 'renforce'; did you mean reinforce",
        ),
    ],
)
def test_a_name_that_leads_to_no_function_is_refused_with_the_option(
    name: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=f"loss.function='{name}'.*{expected}"):
        load_loss(name)


def test_a_loss_that_fails_in_an_update_leaves_the_policy_as_it_was_and_says_where(
    tmp_path: Path,
) -> None:
    def sometimes(
        logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
    ) -> Any:
        if len(logprobs) > 12:
            raise RuntimeError("too many tokens")
        return dapo(logprobs, old, advantages, mask, weights)

    policy = make_policy()
    before = {name: weight.clone() for name, weight in policy.weights(version=0).named_tensors()}
    with pytest.raises(
        LossFailed, match=r"mine raised RuntimeError: too many tokens \(test_custom_loss.py"
    ):
        policy.update(ragged(), step=1, custom=CustomLoss(sometimes, "mine"))
    assert_close(dict(policy.weights(version=0).named_tensors()), before, relative=0)


def test_a_loss_that_is_not_finite_skips_the_update_and_a_metric_that_is_not_ends_it() -> None:
    def diverging(
        logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor
    ) -> Any:
        return (weights * logprobs).sum() * (float("nan") if len(logprobs) > 12 else 1.0), {}

    assert (
        make_policy().update(ragged(), step=1, custom=CustomLoss(diverging, "own"))["optim/skipped"]
        == 1
    )
    unbounded = with_metrics(
        big=lambda logprobs: logprobs.detach().sum() * (float("inf") if len(logprobs) > 12 else 1)
    )
    with pytest.raises(LossFailed, match="returned -inf for the metric loss/big"):
        make_policy().update(ragged(), step=1, custom=CustomLoss(unbounded, "own"))
