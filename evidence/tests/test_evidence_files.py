"""The experiments of `evidence/`: each is valid, its rows differ, and runs are evaluated often."""

from functools import cache
from pathlib import Path

import pytest

from dapo.analysis.ablate.experiment import Experiment, PlannedRun, load_experiment
from dapo.config.load import read_options
from dapo.config.option_entries import flat_options
from dapo.rewards.combine import build_verifier
from dapo.start.ignored_options import ignored_options
from helpers.paths import ROOT

EVIDENCE = ROOT / "evidence"
EXPERIMENTS = sorted(path for path in EVIDENCE.glob("*.yaml") if "variants" in read_options(path))
PILOT_SEEDS = 100
"""Seeds from here on are for choosing hyper-parameters."""
NO_GRADIENT = {"GRPO, k1 in the loss", "GRPO, k2 in the reward", "GRPO, k3 in the reward"}
"""Rows whose divergence has next to no gradient: the experiment is there to show it."""


@cache
def experiment(path: Path) -> Experiment:
    """The experiment of a file, whose rows are valid."""
    return load_experiment(path)


def rows(experiment: Experiment) -> list[PlannedRun]:
    """One run of each row, of the first seed."""
    return [run for run in experiment.runs() if run.seed == experiment.seeds[0]]


def header(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_is_valid_and_none_of_its_rows_sets_an_option_in_vain(path: Path):
    found = experiment(path)
    assert len(found.seeds) >= 3
    assert max(found.seeds) < PILOT_SEEDS
    in_vain = set()
    for run in rows(found):
        unused = {line.partition(":")[0] for line in ignored_options(run.config)}
        own = {override.partition("=")[0] for override in found.variant(run.variant).own}
        in_vain |= {run.variant} if unused & own else set()
    assert in_vain == (NO_GRADIENT if path.stem == "kl" else set())


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_no_two_rows_of_an_experiment_are_the_same_run(path: Path):
    seen: dict[str, str] = {}
    for run in rows(experiment(path)):
        options = str(
            {name: value for name, value in flat_options(run.config).items() if name != "preset"}
        )
        assert seen.setdefault(options, run.describe()) == run.describe()


@pytest.mark.parametrize("path", sorted(EVIDENCE.glob("figure*.yaml")), ids=lambda path: path.stem)
def test_every_figures_head_states_the_papers_claim(path: Path):
    text = header(path)
    number = path.stem.removeprefix("figure")
    assert text.startswith(f"Fig. {number}: ")
    for part in (f"dapo ablate evidence/{path.name}", "The paper's claim"):
        assert part in text


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_runs_are_evaluated_every_3_steps_since_most_is_learned_in_the_first_20(path: Path):
    assert all(run.config.train.eval_every == 3 for run in rows(experiment(path)))


def test_there_is_a_file_for_each_figure_of_the_paper():
    assert [path.stem for path in sorted(EVIDENCE.glob("figure*.yaml"))] == [
        f"figure{n}" for n in range(2, 8)
    ]


def test_the_verifiers_that_err_do_so_by_the_seed_of_the_run():
    found = experiment(EVIDENCE / "when.yaml")
    last = [run for run in found.runs() if run.seed == found.seeds[-1]]
    erring = [run for run in last if "rewards:" in str(run.config.reward.verifier)]
    assert len(erring) == 3 * len(found.variants)
    for run in erring:
        assert run.config.reward.options["seed"] == run.seed
    reward = erring[0].config.reward
    build_verifier(reward.verifier, options=reward.options)
