"""The rules of `dapo doctor` on every run of the evidence: no error in a run that has learned."""

import pytest

from benchmarks.stored_runs import EVIDENCE, stored_runs

EXPERIMENTS = sorted(path.parent.name for path in EVIDENCE.glob("results/*/results.json"))
NEVER_RIGHT = (
    "curriculum: hard alone",
    "hard alone, every group trains",
    "starvation: every group trains",
)
"""Rows of problems that the model never solves: the error is right."""


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_no_stored_run_that_has_learned_has_an_error(experiment: str):
    runs = list(stored_runs(experiment))
    assert runs
    assert {run.name: run.errors() for run in runs if run.is_healthy and run.errors()} == {}


def test_runs_that_learn_nothing_have_the_error_that_names_the_cause():
    found = {run.name: run for name in ("curriculum", "starvation") for run in stored_runs(name)}
    wrong = [run for name, run in found.items() if any(row in name for row in NEVER_RIGHT)]
    assert len(wrong) >= 8
    assert all("too_hard" in run.errors() for run in wrong)


def test_runs_whose_held_out_accuracy_falls_by_a_tenth_have_the_error_that_names_it():
    for run in (run for name in ("figure2", "figure3") for run in stored_runs(name)):
        accuracies = [accuracy for _, accuracy in run.accuracies]
        assert ("overfit" in run.errors()) is (max(accuracies) - accuracies[-1] >= 0.1), run.name
