"""The reference of the KL term: it stays, or follows the policy every few steps, and a resumed run
has the same one.
"""

import math
from pathlib import Path

import pytest

from dapo.algo.kl import KlEstimator
from dapo.core.errors import ConfigError
from dapo.policy.policy import Policy
from helpers.tiny_policies import (
    float64_model,
    loaded,
    make_policy,
    plain_copy,
    plain_scores,
    ragged,
    sample,
    with_masked_tokens,
)

LOSS = {"kl_coef": 0.1, "reference": {"every": 2}}


def kl_of_steps(policy: Policy, *, first: int, last: int) -> list[float]:
    """`loss/kl` of one update in each step."""
    return [policy.update(ragged(), step=step)["loss/kl"] for step in range(first, last + 1)]


def test_every_two_steps_the_reference_becomes_the_policy() -> None:
    kl = kl_of_steps(make_policy(loss=LOSS), first=1, last=6)
    assert [value < 1e-12 for value in kl] == [True, False, True, False, True, False]
    assert min(kl[1::2]) > 1e-6
    stays = kl_of_steps(make_policy(loss={"kl_coef": 0.1}), first=1, last=6)
    assert stays[:2] == kl[:2]
    assert min(stays[1:]) > 1e-6


def test_between_the_updates_of_a_step_it_stays() -> None:
    policy = make_policy(loss=LOSS)
    kl_of_steps(policy, first=1, last=2)
    first, second = (policy.update(ragged(), step=3)["loss/kl"] for _ in range(2))
    assert first < 1e-12
    assert second > 1e-6


@pytest.mark.parametrize("saved_after", [1, 2, 3, 4, 5])
def test_a_resumed_policy_has_the_same_reference_to_the_last_bit(
    saved_after: int, tmp_path: Path
) -> None:
    policy = make_policy(loss={"kl_coef": 0.1, "reference": {"every": 3}})
    kl_of_steps(policy, first=1, last=saved_after)
    (tmp_path / "background").mkdir()
    policy.snapshot()(tmp_path / "background")
    policy.save(tmp_path)
    expected = kl_of_steps(policy, first=saved_after + 1, last=8)
    for folder in (tmp_path, tmp_path / "background"):
        again = make_policy(loss={"kl_coef": 0.1, "reference": {"every": 3}})
        again.load(folder)
        assert kl_of_steps(again, first=saved_after + 1, last=8) == expected


def test_without_the_option_a_checkpoint_holds_no_reference_and_a_run_may_get_it_later(
    tmp_path: Path,
) -> None:
    policy = make_policy(loss={"kl_coef": 0.1})
    kl_of_steps(policy, first=1, last=3)
    policy.save(tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == [
        "exp_avg",
        "exp_avg_sq",
        "policy",
        "weights",
    ]
    moving = make_policy(loss=LOSS)
    moving.load(tmp_path)
    # it should have followed after step 2, so it does so at once
    assert [value < 1e-12 for value in kl_of_steps(moving, first=4, last=6)] == [True, True, False]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_of_each_token_is_that_of_the_two_models_also_where_nothing_trains(
    estimator: KlEstimator, tmp_path: Path
) -> None:
    make_policy(loaded(float64_model(seed=1))).save(tmp_path)
    model = loaded(float64_model())
    trained = float64_model(seed=1)
    initial = plain_copy(model)
    loss = {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": estimator}
    policy = make_policy(model, loss=loss, temperature=0.7, microbatch_tokens=20)
    policy.load(tmp_path)
    samples = [*with_masked_tokens(ragged()), sample(9, (1, 2), ())]
    found = policy.token_kl(samples, step=1)
    assert list(found[-1]) == []
    scores = zip(
        plain_scores(trained, samples[:-1], 0.7),
        plain_scores(initial, samples[:-1], 0.7),
        strict=True,
    )
    for row, ((own, _), (reference, _)) in zip(found[:-1], scores, strict=True):
        gaps = (own - reference).tolist()
        expected = {
            "k1": gaps,
            "k2": [d * d / 2 for d in gaps],
            "k3": [math.exp(-d) - 1 + d for d in gaps],
        }[estimator]
        assert list(row) == pytest.approx(expected, abs=1e-9)
    assert policy.response_kl(samples, step=1) == pytest.approx(
        [sum(row) for row in found], abs=1e-9
    )
    assert max(map(abs, policy.response_kl(samples, step=1))) > 0.1


def test_in_the_reward_the_divergence_is_no_term_of_the_loss(tmp_path: Path) -> None:
    plain = make_policy()
    penalised = make_policy(loss={"kl_coef": 0.5, "kl_in": "reward"})
    for step in (1, 2):
        assert penalised.update(ragged(), step=step) == plain.update(ragged(), step=step)


def test_a_reference_of_a_few_steps_ago_is_there_before_the_step_that_it_is_for() -> None:
    policy = make_policy(loss={**LOSS, "kl_in": "reward"})
    assert policy.response_kl(ragged(), step=1) == [0.0] * len(ragged())
    policy.update(ragged(), step=1)
    assert max(policy.response_kl(ragged(), step=2)) > 1e-6
    policy.update(ragged(), step=2)
    assert policy.response_kl(ragged(), step=3) == [0.0] * len(ragged())


def test_adapters_have_the_model_without_them_as_reference_and_no_other() -> None:
    with pytest.raises((ConfigError, ValueError), match=r"leave loss\.reference out"):
        make_policy(loss=LOSS, lora={"rank": 2})
    kl = make_policy(loss={"kl_coef": 0.1, "kl_in": "reward"}, lora={"rank": 2}, optim={"lr": 0.01})
    assert kl.response_kl(ragged(), step=1) == [0.0] * len(ragged())
    kl.update(ragged(), step=1)
    assert max(kl.response_kl(ragged(), step=2)) > 1e-9
