"""`run.generate` within `on_step` answers with the weights after that step, and changes nothing of
the run.
"""

from pathlib import Path
from typing import Any

import pytest

import dapo
from helpers.tiny_runs import contents, differences

ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
ARGUMENTS: dict[str, Any] = {
    "data": ROWS,
    "reward": "dapo.rewards.examples:has_digit",
    "steps": 2,
    "prompts_per_step": 2,
    "group_size": 4,
    "max_response_tokens": 6,
    "threads": 1,
    "workers": 1,
    "lr": 0.05,
    "save_every": 2,
}
QUESTIONS = ["1 + 1 =", "7 + 1 ="]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"schedule": "async", "max_staleness": 2, "rollout.engines": 1},
    "supervised": {
        "data": None,
        "reward": None,
        "demonstrations": [row | {"response": row["answer"]} for row in ROWS],
        "minibatch_groups": 2,
        "prompts_per_step": 512,
    },
}


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_answers_within_on_step_are_those_of_the_present_weights(options: dict[str, Any]) -> None:
    found: dict[int, list[list[str]]] = {}

    def on_step(run: dapo.Run, metrics: dict[str, Any]) -> None:
        found[metrics["step"]] = run.generate(QUESTIONS, samples=8)

    run = dapo.train("tiny-random", run_dir="watched", on_step=on_step, **(ARGUMENTS | options))
    assert run.generate(QUESTIONS, samples=8) == found[2]
    run.close()
    assert found[1] != found[2]
    other = dapo.train("tiny-random", run_dir="alone", **(ARGUMENTS | options))
    assert differences(contents(run.path), contents(other.path)) == []


def test_an_unfit_prompt_within_on_step_leaves_nothing_in_the_engine() -> None:
    def on_step(run: dapo.Run, metrics: dict[str, Any]) -> None:
        with pytest.raises(TypeError):
            run.generate(["1 + 1 =", 5])
        for reads_a_checkpoint in (lambda: run.evaluate(ROWS), lambda: run.export("model")):
            with pytest.raises(dapo.DapoError, match=f"none of step {metrics['step']} yet: call"):
                reads_a_checkpoint()

    assert (
        dapo.train("tiny-random", run_dir="run", on_step=on_step, **ARGUMENTS).status == "finished"
    )
