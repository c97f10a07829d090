"""`dapo.session`: its steps are those of a run, what it shows is what it trains on, and mistakes
are one sentence.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

import dapo
from dapo.algo.advantages import group_advantages
from dapo.api.session import Session
from dapo.cli.train import start_run
from dapo.core.errors import (
    ConfigError,
    DataError,
    LossFailed,
    RewardError,
    ShortfallError,
    VerifierFailed,
)
from dapo.policy.checkpoint import SavedWeights
from examples.losses import dapo as dapo_loss
from examples.losses import reinforce
from helpers.commands import run as run_command
from helpers.paths import CONFIGS
from helpers.tiny_runs import metrics, tiny

ROWS = [
    {"prompt": f"What is {a} + {b}?", "answer": str(a + b), "level": a}
    for a in range(4)
    for b in range(5)
]


def has_digit(completions: list[str], **columns: Any) -> list[bool]:
    return [any(character.isdigit() for character in text) for text in completions]


def small(**options: Any) -> Session:
    given: dict[str, Any] = {
        "prompts_per_step": 4,
        "group_size": 4,
        "max_response_tokens": 8,
        "lr": 3e-3,
        "steps": 4,
    }
    return dapo.session("tiny-random", **(given | {"threads": 1, "dtype": "float32"} | options))


@pytest.fixture(scope="module")
def shared() -> Iterator[Session]:
    """A session for tests that update nothing."""
    with small() as s:
        yield s


def weights(s: Session) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone() for name, tensor in s._policy.weights(version=s.step).named_tensors()
    }


def test_five_lines_of_a_session_equal_the_steps_of_a_run_in_loss_and_weights(
    tmp_path: Path,
) -> None:
    options = [
        "train.num_steps=2",
        "train.save_every=1",
        "data.eval=null",
        "train.minibatch_groups=2",
    ]
    start_run(tiny(*options), run_dir=tmp_path / "run", config_name="tiny")
    expected = metrics(tmp_path / "run")
    with dapo.session(config=CONFIGS / "tiny.yaml", threads=1, steps=2, **{"data.eval": None}) as s:
        for step in (1, 2):
            found = s.update(batch := s.collect())
            assert found == expected[step - 1]
            saved = SavedWeights(tmp_path / "run" / "checkpoints" / f"step_{step:06d}")
            for name, tensor in saved.named_tensors():
                assert torch.equal(tensor, weights(s)[name]), name
            stored = dapo.load(tmp_path / "run").read_rollouts(steps=step)
            table = batch.rollouts
            assert list(table.columns) == list(stored.columns)
            assert table["response"].tolist() == stored["response"].tolist()
            assert table["advantage"].fillna(9).tolist() == stored["advantage"].fillna(9).tolist()
        assert s.metrics["loss/policy"].tolist() == [row["loss/policy"] for row in expected]
        assert s.step == 2


def test_a_batch_shows_groups_outcomes_rewards_and_advantages(shared: Session) -> None:
    limit = 3

    # a closure
    def short_and_early(completions: list[str], level: list[int], **columns: Any) -> list[bool]:
        return [
            any(c.isdigit() for c in text[:limit]) and a < limit
            for a, text in zip(level, completions, strict=True)
        ]

    batch = shared.collect(pd.DataFrame(ROWS), short_and_early)
    assert len(batch.groups) == len(batch.rewards) == len(batch.advantages) == 4
    assert sum(batch.outcomes.values()) == len(batch.judged) + batch.outcomes.get("aborted", 0)
    for group, rewards, advantages in zip(
        batch.groups, batch.rewards, batch.advantages, strict=True
    ):
        assert rewards == list(group.rewards)
        expected = group_advantages(torch.tensor(rewards, dtype=torch.float64))
        assert advantages == pytest.approx(expected.tolist())
        correct = [
            any(c.isdigit() for c in text[:3]) and group.problem.fields["level"] < 3
            for text in group.texts
        ]
        assert correct == [verdict.correct for verdict in group.verdicts]
    trained = batch.rollouts.query("outcome == 'trained'")
    assert trained["reward"].tolist() == [reward for rewards in batch.rewards for reward in rewards]
    assert str(batch).startswith("batch of step 1: 4 trained, ")
    assert len(str(batch).splitlines()) == 5
    assert batch.metrics["rollout/groups_trained"] == 4


def test_model_text_is_escaped_in_a_notebook(shared: Session) -> None:
    batch = shared.collect(
        [{"prompt": f"<script>{i}</script>", "answer": "1"} for i in range(8)], has_digit
    )
    html = batch._repr_html_()
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert html.count("<tr>") == 1 + len(batch.judged)
    assert "<code>batch.rollouts</code> has every response" in html


def test_equal_sessions_collect_equal_batches_and_each_goes_on_where_the_last_closed(
    shared: Session,
) -> None:
    with small() as first, small() as second:
        pairs = [
            (s.collect(ROWS, has_digit), s.collect(list(ROWS), has_digit)) for s in (first, second)
        ]
        assert pairs[0][0].samples == pairs[1][0].samples
        assert pairs[0][1].samples == pairs[1][1].samples
        positions = [group.id for batch in pairs[0] for group, _ in batch.batch.decided]
        assert positions == list(range(len(positions)))
        other = first.collect(ROWS[:7], has_digit)  # other problems are a stream of their own
        assert min(group.id for group, _ in other.judged) == 0


def test_the_rows_of_a_generator_are_there_for_each_batch() -> None:
    with small(data=(row for row in ROWS), reward=has_digit) as s, small() as other:
        for _ in range(2):
            assert s.collect().samples == other.collect(ROWS, has_digit).samples


def test_a_loss_of_ones_own_replaces_the_papers() -> None:
    found = []
    for loss in (None, dapo_loss, "examples.losses:dapo", reinforce):
        with small(minibatch_groups=1, lr=0.01, warmup_steps=0) as s:
            line = s.update(s.collect(ROWS, has_digit), loss=loss)
            line = s.update(s.collect(ROWS, has_digit), loss=loss)
            found.append((line, weights(s)))
    (built_in, expected), (own, equal), (named, same), (other, different) = found
    assert all(torch.allclose(equal[name], expected[name], atol=1e-6, rtol=0) for name in expected)
    assert all(torch.equal(equal[name], same[name]) for name in expected)
    assert own["loss/policy"] == pytest.approx(built_in["loss/policy"], abs=1e-6)
    assert "loss/clipped_up" in own
    assert own == named
    assert 0 < other["loss/pushed_up"] < 1
    assert any(float((different[name] - expected[name]).abs().max()) > 1e-4 for name in expected)


def test_a_run_writes_a_typed_loss_into_its_directory_and_resumes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    strength = 0.5

    def typed(logprobs: Any, old_logprobs: Any, advantages: Any, mask: Any, weights: Any) -> Any:
        return -(strength * weights * advantages * logprobs).sum(), {
            "strength": (strength * weights).sum()
        }

    given: dict[str, Any] = {
        "prompts_per_step": 2,
        "group_size": 4,
        "max_response_tokens": 6,
        "threads": 1,
    }
    run = dapo.train(
        "tiny-random",
        data=ROWS,
        reward="dapo.rewards.examples:has_digit",
        loss=typed,
        steps=1,
        **given,
    )
    name = run.config.loss.function
    assert name is not None
    assert name.startswith("loss_")
    assert name.endswith(":typed")
    sys.path[:] = [entry for entry in sys.path if str(run.path) not in entry]
    del sys.modules[name.partition(":")[0]]  # as in another process
    assert run_command(capsys, "resume", str(run.path), "train.num_steps=2")[0] == 0
    assert run.metrics["loss/strength"].tolist() == pytest.approx([0.5, 0.5])
    with pytest.raises(ConfigError, match="is not a sum over tokens"):
        dapo.train("tiny-random", data=ROWS, loss="helpers.loss_functions:mean", steps=1, **given)
    assert len(list((tmp_path / "runs").iterdir())) == 1  # nothing is written before it is verified


def test_advantages_of_ones_own_replace_those_of_equation_9() -> None:
    def equation_9(rewards: list[float]) -> list[float]:
        return group_advantages(torch.tensor(rewards, dtype=torch.float64)).tolist()

    def only_the_best(rewards: list[float]) -> list[float]:
        return [float(reward == max(rewards)) for reward in rewards]

    lines = []
    changes: list[Callable[[list[float]], list[float]] | None] = [None, equation_9, only_the_best]
    for change in changes:
        with small() as s:
            batch = s.collect(ROWS, has_digit)
            batch = batch if change is None else batch.with_advantages(change)
            lines.append(s.update(batch))
    assert set(batch.rollouts.query("outcome == 'trained'")["advantage"]) == {0.0, 1.0}
    assert lines[0] == lines[1]
    assert lines[2]["loss/policy"] < -0.2 < lines[0]["loss/policy"]
    for wrong, expected in (
        (lambda rewards: rewards[1:], "expected 4 finite numbers"),
        (lambda rewards: [float("nan")] * 4, "expected 4 finite numbers"),
        (lambda rewards: 1 / 0, "the function raised ZeroDivisionError"),
    ):
        with pytest.raises(DataError, match=expected):
            batch.with_advantages(wrong)  # type: ignore[arg-type]


def test_a_batch_is_used_once_and_one_without_a_signal_says_why() -> None:
    with small(max_groups_per_step=4) as s:
        batch = s.collect(ROWS, has_digit)
        s.update(batch)
        with pytest.raises(DataError, match="collected for step 1, and step 1 is done"):
            s.update(batch)
        empty = s.collect(ROWS, lambda completions, **columns: [False] * len(completions))
        assert empty.outcomes["all_wrong"] == 4
        assert empty.groups == ()
        for _ in range(2):  # as in a run, a few such steps are chance
            assert "loss/policy" not in s.update(
                s.collect(ROWS, lambda completions, **columns: [False] * 4)
            )
        with pytest.raises(ShortfallError, match="all wrong"):
            s.update(s.collect(ROWS, lambda completions, **columns: [False] * 4))


def test_what_a_reward_or_a_loss_raises_is_named_and_the_session_goes_on() -> None:
    def broken(completions: list[str], **columns: Any) -> list[float]:
        raise ValueError("no such table")

    def needs_unit(completions: list[str], unit: list[str]) -> list[float]:
        return [0.0] * len(completions)

    def failing(logprobs: Any, old: Any, advantages: Any, mask: Any, weights: Any) -> Any:
        if len(logprobs) > 12:
            raise RuntimeError("not here")
        return reinforce(logprobs, old, advantages, mask, weights)

    with small(max_groups_per_step=100) as s:
        with pytest.raises(VerifierFailed, match="no such table"):
            s.collect(ROWS, broken)
        with pytest.raises(DataError, match=r"needs_unit"):
            s.collect(ROWS, needs_unit)
        with pytest.raises(RewardError, match="unknown verifier 'maht'; did you mean math"):
            s.collect(ROWS, "maht")
        batch = s.collect(ROWS, {has_digit: 2.0, "dapo.rewards.examples:has_digit": 1.0})
        assert {verdict.score for group in batch.groups for verdict in group.verdicts} == {
            -3.0,
            3.0,
        }
        with pytest.raises(LossFailed, match=r"loss failing raised RuntimeError: not here"):
            s.update(batch, loss=failing)
        assert s.step == 0
        assert s.update(batch)["step"] == 1


def test_ctrl_c_undoes_the_batch() -> None:
    presses = 1

    def pressing(completions: list[str], **columns: Any) -> list[bool]:
        nonlocal presses
        if presses:
            presses -= 1
            os.kill(os.getpid(), signal.SIGINT)
        return has_digit(completions)

    handler = signal.getsignal(signal.SIGINT)
    with small() as s, small() as undisturbed:
        with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT"):
            s.collect(ROWS, pressing)
        assert s.collect(ROWS, pressing).samples == undisturbed.collect(ROWS, has_digit).samples
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_session_with_adapters_exports_the_merged_model(tmp_path: Path) -> None:
    with small(lora={"rank": 2, "alpha": 4}) as s:
        s.update(s.collect(ROWS, has_digit))
        path = s.export(tmp_path / "model")
        expected = weights(s)
    exported = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert all(torch.equal(value, expected[name]) for name, value in exported.named_parameters())


def test_answers_and_scores_are_those_of_the_exported_model(
    shared: Session, tmp_path: Path
) -> None:
    answer = shared.generate("What is 2 + 3?", temperature=0)
    assert answer == shared.generate(["What is 2 + 3?", "2"], temperature=0)[0]
    several = shared.generate([{"role": "user", "content": "2"}], samples=3)
    assert len(several) == 3
    assert len(set(several)) > 1
    path = shared.export(tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = weights(shared)
    assert all(torch.equal(value, expected[name]) for name, value in exported.named_parameters())
    with dapo.session(
        str(path), max_response_tokens=8, prompts_per_step=4, group_size=4, dtype="float32"
    ) as again:
        assert again.generate("What is 2 + 3?", temperature=0) == answer
        one, two = (s.evaluate(ROWS, has_digit, samples_per_problem=2) for s in (shared, again))
    assert one.table.equals(two.table)
    digits = [
        any(c.isdigit() for c in r["text"])
        for responses in one.table["responses"]
        for r in responses
    ]
    assert one.accuracy == pytest.approx(sum(digits) / 40)


def test_the_number_of_samples_of_an_evaluation_is_checked(shared: Session):
    for number in (0, -1, 1.5):
        with pytest.raises(dapo.ConfigError, match=f"whole number of at least 1, got {number}"):
            shared.evaluate(ROWS, has_digit, samples_per_problem=number)  # type: ignore[arg-type]
    result = shared.evaluate(ROWS[:1], has_digit, samples_per_problem=np.int64(2))
    assert [len(responses) for responses in result.table["responses"]] == [2]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"engines": 1}, "rollout.engines, .* need dapo.train"),
        ({"trainer_ranks": 2}, "distributed.trainer_ranks above 1 need dapo.train"),
        ({"schedule": "one_step_off", "engines": 1}, 'schedule="async" needs dapo.train'),
        ({"predict": True}, "predict=True predicts from a run's history"),
        ({"promts_per_step": 4}, "unknown option promts_per_step; did you mean prompts_per_step"),
    ],
)
def test_what_a_session_cannot_do_is_one_sentence(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        small(**options)


def test_without_problems_a_session_asks_for_them(shared: Session) -> None:
    with pytest.raises(DataError, match="pass them to session"):
        shared.collect()


@pytest.mark.parametrize("score", [1e308, -1e308, 10**400, float("nan")])
def test_scores_that_no_sum_can_hold_are_errors_that_show_them(score: Any) -> None:
    def reward(completions: list[str], **columns: Any) -> list[Any]:
        return [score, *map(float, range(1, len(completions)))]

    with small() as s:
        batch = s.collect(ROWS, reward)
        (error,) = {
            v.error for group, _ in batch.judged for v in group.verdicts if v.error is not None
        }
        assert f"{score:g}"[:4] in error if isinstance(score, float) else "1000000" in error
        with pytest.raises(
            DataError, match=r"finite numbers, at most 1e\+12 in size|too large to convert"
        ):
            batch.with_advantages(lambda rewards: [score] * len(rewards))


def test_an_error_of_the_python_interface_cannot_drive_a_terminal() -> None:
    def hostile(completions: list[str], **columns: Any) -> list[Any]:
        raise ValueError("\x1b]0;owned\x07\x1b[2J")

    with small() as s, pytest.raises(VerifierFailed, match=r"\\x1b\]0;owned\\x07\\x1b\[2J"):
        s.collect(ROWS, hostile)
