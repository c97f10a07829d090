"""A run whose reward or loss was wrong continues with a corrected function, which every later
process uses.
"""

import shlex
from pathlib import Path
from typing import Any

import pytest

import dapo
from dapo.core.errors import CheckpointError, LossFailed, VerifierFailed
from helpers.cells import run_cells
from helpers.commands import run as run_command

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
SMALL: dict[str, Any] = {
    "prompts_per_step": 2,
    "group_size": 4,
    "max_response_tokens": 6,
    "threads": 1,
    "workers": 1,
}
SMALL |= {"lr": 1e-3, "save_every": 1}
DIGITS = "dapo.rewards.examples:has_digit"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


CELLS = run_cells("""
def broken(completions, **columns):
    raise ValueError("oh no")

def length(text):
    return len(text)

def fixed(completions, **columns):
    return [any(c.isdigit() for c in text) for text in completions if length(text) >= 0]

def half(completions, **columns):
    return [0.5 * any(c.isdigit() for c in text) for text in completions]

calls = []

def broken_loss(logprobs, old_logprobs, advantages, mask, weights):
    calls.append(1)
    if len(calls) > 8:  # after the trial before the run
        raise ValueError("no loss")
    return -(logprobs * advantages * weights * mask).sum(), {}

def policy_gradient(logprobs, old_logprobs, advantages, mask, weights):
    return -(logprobs * advantages * weights * mask).sum(), {}
""")


def modules(path: str) -> set[str]:
    return {file.name for file in Path(path, "code").iterdir() if file.suffix == ".py"}


def test_the_commands_and_calls_of_a_failed_reward_work_where_they_stand(
    capsys: pytest.CaptureFixture[str],
):
    with pytest.raises(VerifierFailed) as failed:
        dapo.train(
            "tiny-random", data=ROWS, reward=CELLS["broken"], steps=2, run_dir="my run", **SMALL
        )
    assert "(the command dapo test 'my run' shows its verdicts)" in str(failed.value)
    assert str(failed.value).endswith(
        "with a corrected function: dapo.resume('my run', reward=FUNCTION)"
    )
    assert "continue with: dapo.resume('my run')\n" in capsys.readouterr().out
    code, out, err = run_command(capsys, *shlex.split("test 'my run'"))
    assert code == 1, err
    assert "raised ValueError: oh no" in " ".join(out.split())
    run = dapo.resume("my run", reward=CELLS["fixed"])
    assert run.status == "finished"
    assert run.config.reward.verifier.endswith(":fixed")
    assert run.metrics["rollout/verifier_errors"].sum() == 0


def test_a_resumed_run_judges_a_function_by_its_own_verdicts_not_by_those_of_before():
    """256 verdicts of before would hide 128 errors of the new function, or show errors that a
    function has no more.
    """
    many = {**SMALL, "prompts_per_step": 16, "group_size": 4}
    dapo.train("tiny-random", data=ROWS * 8, reward=CELLS["half"], steps=5, run_dir="run", **many)
    with pytest.raises(
        VerifierFailed, match=r"^none of the 32 responses judged last has a verdict. 32 times: "
    ):
        dapo.resume("run", reward=CELLS["broken"], steps=6)


def test_later_processes_use_the_function_and_the_run_records_it(
    capsys: pytest.CaptureFixture[str],
):
    first = dapo.train(
        "tiny-random", data=ROWS, reward=CELLS["fixed"], steps=1, run_dir="run", **SMALL
    )
    before = first.config.reward.verifier
    dapo.resume(first, reward={CELLS["half"]: 1.0, DIGITS: 1.0}, steps=2)
    assert run_command(capsys, "resume", "run", "train.num_steps=3")[0] == 0
    assert set(first.rollouts.query("step > 1")["score"]) <= {-1.0, 1.5}
    (name,) = (each for each in first.config.reward.verifier if each.endswith(":half"))
    assert first.config.reward.verifier == {name: 1.0, DIGITS: 1.0}
    changes = first.state.changes
    assert [change["after_step"] for change in changes] == [1, 2]
    assert changes[0]["options"]["reward.verifier"] == [before, None]
    assert changes[0]["options"][f"reward.verifier.{name}"] == [None, 1.0]
    assert len(modules("run")) == 2


def test_a_loss_is_corrected_in_the_same_way():
    with pytest.raises(
        LossFailed, match=r"with a corrected function: dapo.resume\('run', loss=FUNCTION\)$"
    ):
        dapo.train(
            "tiny-random",
            data=ROWS,
            reward=DIGITS,
            loss=CELLS["broken_loss"],
            steps=9,
            run_dir="run",
            **SMALL,
        )
    run = dapo.resume("run", loss=CELLS["policy_gradient"])
    assert run.status == "finished"
    assert run.config.loss.function is not None
    assert run.config.loss.function.endswith(":policy_gradient")


def test_a_finished_run_that_is_resumed_says_how_it_trains_on(capsys: pytest.CaptureFixture[str]):
    first = dapo.train(
        "tiny-random", data=ROWS, reward=CELLS["fixed"], steps=1, run_dir="a run", **SMALL
    )
    capsys.readouterr()
    same: dict[str, Any] = {"reward": CELLS["fixed"], "lr": 1e-3}
    for options in ({}, same):
        run = dapo.resume("a run", **options)
        assert (
            capsys.readouterr().out
            == "already at step 1 of 1; to train on: dapo.resume('a run', steps=2)\n"
        )
        assert run.status == "finished"
    code, _, err = run_command(
        capsys, "resume", "a run", "reward.verifier=math", "train.num_steps=1"
    )
    assert code == 2
    assert (
        err == "error: a run has no step left for a change of its options; add train.num_steps=2\n"
    )
    assert first.config.reward.verifier.endswith(":fixed")
    assert dapo.resume("a run", num_steps=2).state.step == 2


def test_a_function_that_is_refused_leaves_the_run_as_it_was():
    run = dapo.train(
        "tiny-random", data=ROWS, reward=CELLS["fixed"], steps=1, run_dir="run", **SMALL
    )
    before = {
        file: file.read_bytes()
        for file in run.path.rglob("*")
        if file.is_file() and file.name != "lock"
    }
    names = run_cells(
        "def needs(completions, level, **columns):\n    return [level] * len(completions)\n"
    )
    with pytest.raises(dapo.DapoError, match="level"):
        dapo.resume(run, reward=names["needs"], steps=2)
    with pytest.raises(dapo.RewardError, match="lambda"):
        dapo.resume(run, reward=lambda completions: [1.0], steps=2)
    with pytest.raises(dapo.ConfigError, match="loss: expected a function"):
        dapo.resume(run, loss=3, steps=2)
    for change in ({"reward": CELLS["half"]}, {"loss": CELLS["policy_gradient"]}, {"lr": 0.5}):
        with pytest.raises(
            dapo.ConfigError,
            match=r"run has no step left for a change of its options; add steps=2$",
        ):
            dapo.resume(run, **change)
    assert {file: file.read_bytes() for file in before} == before
    assert len(modules("run")) == 1
    with pytest.raises(CheckpointError, match="no run directory nothing"):
        dapo.resume("nothing", reward=CELLS["half"])
    assert not Path("nothing").exists()
