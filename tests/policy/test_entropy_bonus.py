"""`loss.entropy_target`: the weight of the entropy in each update, also after a resume and on
skipped updates.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from dapo.algo.entropy import DELTA
from dapo.policy.policy import Policy
from helpers.tiny_policies import assert_close, make_policy, master_weights_of, ragged

ABOVE = {"entropy_target": 99.0}
"""No policy reaches it, so that the weight grows with each update."""


def coefficients(policy: Policy, steps: int, *, first: int = 1) -> list[float]:
    return [policy.update(ragged(), step=first + i)["loss/entropy_coef"] for i in range(steps)]


def test_the_weight_is_zero_in_the_first_update_and_grows_below_the_target() -> None:
    assert coefficients(make_policy(loss=ABOVE), 4) == pytest.approx(
        [0, DELTA, 2 * DELTA, 3 * DELTA]
    )
    assert coefficients(make_policy(loss={"entropy_target": 0.01}), 4) == [0] * 4
    assert "loss/entropy_coef" not in make_policy().update(ragged(), step=1)


def test_all_updates_of_a_step_have_its_weight_and_a_checkpoint_between_them_is_exact(
    tmp_path: Path,
) -> None:
    policy = make_policy(loss=ABOVE)
    again = make_policy(loss=ABOVE)
    for step in (1, 2, 3):
        found = [policy.update(ragged(), step=step)["loss/entropy_coef"] for _ in range(3)]
        assert found == pytest.approx([(step - 1) * DELTA] * 3)
    policy.update(ragged(), step=4)
    policy.save(tmp_path)
    again.load(tmp_path)
    for step in (4, 5):
        assert again.update(ragged(), step=step) == policy.update(ragged(), step=step)
    again.save(tmp_path)
    saved = (tmp_path / "policy.json").read_bytes()
    policy.save(tmp_path)
    assert (tmp_path / "policy.json").read_bytes() == saved


def test_an_update_has_the_gradient_of_a_fixed_weight_of_the_same_size(tmp_path: Path) -> None:
    policy = make_policy(loss=ABOVE)
    policy.update(ragged(), step=1)
    policy.save(tmp_path)
    policy.update(ragged(), step=2)
    fixed = make_policy(loss={"entropy_coef": DELTA})
    without = make_policy()
    for other in (fixed, without):
        other.load(tmp_path)
        other.update(ragged(), step=2)
    assert_close(master_weights_of(policy), master_weights_of(fixed), relative=0)
    with pytest.raises(AssertionError):
        assert_close(master_weights_of(policy), master_weights_of(without), relative=0)


def test_a_resumed_policy_goes_on_with_the_weight_it_had(tmp_path: Path) -> None:
    policy = make_policy(loss=ABOVE)
    coefficients(policy, 3)
    policy.save(tmp_path)
    again = make_policy(loss=ABOVE)
    again.load(tmp_path)
    for step in (4, 5):
        assert again.update(ragged(), step=step) == policy.update(ragged(), step=step)
    # another target judges the step before by itself
    lower = make_policy(loss={"entropy_target": 0.01})
    lower.load(tmp_path)
    assert lower.update(ragged(), step=4)["loss/entropy_coef"] == 0
    assert lower._entropy_bonus is not None
    assert lower._entropy_bonus.coefficient == pytest.approx(DELTA)  # 2 DELTA, and one less
    new = make_policy(loss=ABOVE)
    make_policy().save(tmp_path)
    new.load(tmp_path)  # of a run without a target
    assert coefficients(new, 2) == pytest.approx([0, DELTA])


def test_a_skipped_update_changes_no_weight() -> None:
    policy = make_policy(loss=ABOVE)
    policy.update(ragged(), step=1)
    broken = [replace(row, advantage=math.inf) for row in ragged()]
    metrics = policy.update(broken, step=2)
    assert (metrics["optim/skipped"], metrics["loss/entropy_coef"]) == (1, pytest.approx(DELTA))
    assert policy.update(ragged(), step=2)["loss/entropy_coef"] == pytest.approx(DELTA)


def test_responses_without_an_advantage_are_computed_also_while_the_weight_is_zero() -> None:
    idle = [replace(row, advantage=0.0) for row in ragged()]
    tokens = sum(len(row.response_ids) for row in idle)
    assert make_policy(loss=ABOVE).update(idle, step=1)["optim/update_tokens"] == tokens
