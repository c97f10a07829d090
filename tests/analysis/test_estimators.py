"""What `dapo explain` says of runs whose advantages are not those of Eq. 9."""

from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from pyarrow.parquet import read_table

from dapo.analysis.explain import explain_group
from dapo.training.train import train
from helpers.commands import run as command
from helpers.tiny_runs import new_run, tiny

OPTIONS = ("data.eval=null", "train.num_steps=1", "train.save_every=0", "overlong.buffer_tokens=5")
RUNS = {
    "group": (),
    "rloo": ("advantage.estimator=rloo",),
    "reinforce_pp": ("advantage.estimator=reinforce_pp", "dynamic_sampling.enabled=false"),
    "reinforce_pp_baseline": (
        "advantage.estimator=reinforce_pp_baseline",
        "dynamic_sampling.enabled=false",
    ),
    "kl": ("loss.kl_coef=0.1", "loss.kl_in=reward"),
    "coef": ("reward.coef=0.5",),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of one step for each of RUNS."""
    folder = tmp_path_factory.mktemp("runs")
    for name, options in RUNS.items():
        with new_run(tiny(*OPTIONS, *options), folder / name) as run:
            train(run)
    return {name: folder / name for name in RUNS}


def trained(run: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_table(run / "rollouts/step_000001.parquet").to_pylist()
    return [row for row in rows if row["outcome"] == "trained"]


def test_explain_names_what_each_response_is_compared_with(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in (
        ("rloo", "4 / 3 (reward"),
        ("reinforce_pp", "the 16 rewards of the whole step (REINFORCE++) have mean"),
        (
            "reinforce_pp_baseline",
            "and the 16 rewards of the whole step, less the means of their groups, have standard",
        ),
    ):
        rows = trained(runs[name])
        found = explain_group(runs[name], 1)
        of_groups: dict[int, list[float]] = {}
        for row in rows:
            of_groups.setdefault(row["group_id"], []).append(row["reward"])
        compared = (
            [row["reward"] for row in rows]
            if name == "reinforce_pp"
            else of_groups[found["group_id"]]
        )
        differences = compared
        if name == "reinforce_pp_baseline":
            differences = [
                reward - fmean(group) for group in of_groups.values() for reward in group
            ]
        eq9 = found["eq9"]
        assert (eq9["estimator"], eq9["rewards"], eq9["differences"]) == (
            name,
            len(compared),
            len(differences),
        )
        assert eq9["mean"] == pytest.approx(fmean(compared))
        assert eq9["std"] == pytest.approx(stdev(differences))
        for response in found["responses"]:
            above = response["reward"] - eq9["mean"]
            expected = above * 4 / 3 if name == "rloo" else above / (eq9["std"] + 1e-6)
            assert response["advantage"] == pytest.approx(expected, abs=1e-12)
        code, printed, _ = command(capsys, "explain", str(runs[name]), "--step", "1", "--equations")
        assert code == 0
        assert words in " ".join(printed.split())


def test_the_weight_of_the_rewards_is_a_factor_of_the_formula(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = explain_group(runs["coef"], 1)
    eq9 = found["eq9"]
    assert eq9["coef"] == 0.5
    for response in found["responses"]:
        expected = 0.5 * (response["reward"] - eq9["mean"]) / (eq9["std"] + 1e-6)
        assert response["advantage"] == pytest.approx(expected, abs=1e-12)
    printed = command(capsys, "explain", str(runs["coef"]), "--step", "1", "--equations")[1]
    assert "1e-06), times reward.coef=0.5" in " ".join(printed.split())


def test_advantages_of_rewards_that_no_file_holds_have_no_formula(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = explain_group(runs["kl"], 1)
    stored = {
        row["sample"]: row["advantage"]
        for row in trained(runs["kl"])
        if row["group_id"] == found["group_id"]
    }
    assert found["eq9"] is None
    assert [response["advantage"] for response in found["responses"]] == list(stored.values())
    (note,) = found["notes"]
    assert "loss.kl_in=reward" in note
    printed = command(capsys, "explain", str(runs["kl"]), "--step", "1", "--equations")[1]
    assert f"note: {note}" in " ".join(printed.split())
    assert "advantage = " not in printed
