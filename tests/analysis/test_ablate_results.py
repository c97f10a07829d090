"""Results: the table by hand, the small form that is kept, and the pictures made of it."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo.analysis.ablate.experiment import Experiment, Panel, load_experiment
from dapo.analysis.ablate.figures import (
    differences_figure,
    mean_curve,
    plot_results,
    results_figure,
)
from dapo.analysis.ablate.results import Results, collect, merge, read_results, write_results
from dapo.analysis.ablate.table import make_table
from dapo.core.errors import DataError
from helpers.ablations import write_run

FILE = """
base: tiny
seeds: [0, 1, 2]
variants: {a: [], b: {inherits: a, set: [loss.clip_high=0.3]}, c: {inherits: a, set: [loss.clip_high=0.4]}}
plots: [{metric: accuracy, against: [steps, tokens, seconds]}, {metric: rollout/entropy_estimate, against: [steps]}]
"""
ACCURACIES = {"a": 0.4, "b": 0.5, "c": 0.7}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    path = tmp_path_factory.mktemp("experiment") / "mine.yaml"
    path.write_text(FILE)
    return load_experiment(path)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, experiment: Experiment) -> Path:
    """The runs of the experiment, which each test gets a copy of."""
    folder = tmp_path_factory.mktemp("written") / "x"
    for run in experiment.runs():
        path = folder / "runs" / run.name
        steps = 3 if run.seed == 2 else 4
        arguments = ["train", str(run.base), *run.overrides, "--run-dir", str(path)]
        write_run(arguments, accuracy=ACCURACIES[run.variant], steps=steps)
    return folder


@pytest.fixture
def folder(tmp_path: Path, written: Path) -> Path:
    return shutil.copytree(written, tmp_path / "x")


def test_the_table_has_means_over_seeds_and_differences_to_the_row_before_and_the_baseline(
    experiment, folder
):
    (table,) = make_table(collect(experiment, folder))
    a, b, c = table["rows"]
    assert table["accuracy_before"]["mean"] == 0.25
    assert (table["problems"], table["samples_per_problem"], table["notes"]) == (6, 4, [])
    assert [row["accuracy"]["mean"] for row in (a, b, c)] == pytest.approx([0.4, 0.5, 0.7])
    assert (a["to_previous"], a["to_baseline"]) == (None, None)
    assert (b["previous"], c["previous"]) == ("a", "a")
    assert b["to_baseline"]["mean"] == pytest.approx(0.1)
    assert c["to_previous"]["mean"] == pytest.approx(0.3)
    assert c["to_previous"]["seeds"] == 3
    # tokens: 100 + 200 + 300 (+ 400); seconds: 3 per step less 1 of the evaluation
    assert a["tokens"]["mean"] == pytest.approx((1000 + 1000 + 600) / 3)
    assert a["seconds"]["mean"] == pytest.approx((11 + 11 + 8) / 3)
    # the last tenth of four steps is the last one
    assert a["length"]["mean"] == pytest.approx((14 + 14 + 13) / 3)
    assert a["entropy"]["mean"] == pytest.approx((1 / 4 + 1 / 4 + 1 / 3) / 3)
    # four groups trained in minibatches of two: two updates per step, one of a run's is skipped
    assert a["skipped"]["mean"] == pytest.approx((1 / 8 + 1 / 8 + 1 / 6) / 3)


def test_each_pass_over_a_batch_has_updates_of_its_own(experiment, folder):
    twice = replace(experiment, shared=(*experiment.shared, "train.passes_per_step=2"))
    (table,) = make_table(collect(twice, folder))
    # four updates per step
    skipped = table["rows"][0]["skipped"]["mean"]
    assert skipped == pytest.approx((1 / 16 + 1 / 16 + 1 / 12) / 3)


def test_a_problem_without_a_verdict_in_one_run_is_left_out_of_all(experiment, folder):
    results = collect(experiment, folder)
    (whole,) = make_table(results)
    for run in results.facts["runs"]:  # in every run but one the first problem is solved
        run["accuracies"][0] = None if is_b1(run) else 1.0
    (table,) = make_table(results)
    assert (whole["problems"], table["problems"]) == (6, 5)
    assert table["notes"] == ["left out: 1 problems that have no verdict in one of the runs"]
    for run in results.facts["runs"]:
        del run["accuracies"][0]
    results.facts["problems"][""].pop(0)
    (without,) = make_table(results)
    for row, expected in zip(table["rows"], without["rows"], strict=True):
        assert [row[name] for name in ("accuracy", "to_previous", "to_baseline")] == [
            expected[name] for name in ("accuracy", "to_previous", "to_baseline")
        ]


def test_runs_that_have_not_finished_are_left_out_and_named(experiment, folder):
    (folder / "runs" / "b-seed1" / "summary.json").unlink()
    (table,) = make_table(collect(experiment, folder, {"b-seed1": "NumericsError: it broke"}))
    assert table["rows"][1]["seeds"] == [0, 2]
    assert table["rows"][2]["to_previous"]["seeds"] == 3
    assert table["rows"][1]["to_previous"]["seeds"] == 2
    assert table["notes"] == ["left out: b, seed 1 (failed: NumericsError: it broke)"]


def test_a_finished_run_without_its_last_evaluation_is_named(experiment, folder):
    (folder / "runs" / "b-seed1" / "eval" / "step_000004.json").write_text("{")
    (table,) = make_table(collect(experiment, folder))
    assert table["rows"][1]["seeds"] == [0, 2]
    assert table["notes"] == [
        "left out: b, seed 1 (finished, without a readable evaluation after its last step)"
    ]


def test_runs_left_out_for_one_reason_are_named_once_by_its_first_line(experiment, folder):
    for seed in range(3):
        (folder / "runs" / f"b-seed{seed}" / "summary.json").unlink()
    reason = "ShortfallError: nothing to learn from\nRead the responses"
    (table,) = make_table(collect(experiment, folder, {f"b-seed{seed}": reason for seed in (0, 2)}))
    assert table["notes"] == [
        "left out: b, seeds 0, 2 (failed: ShortfallError: nothing to learn from)",
        "left out: b, seed 1 (unfinished)",
    ]


def test_base_evaluations_of_a_seed_that_differ_are_noted(experiment, folder):
    path = folder / "runs" / "b-seed1" / "eval" / "step_000000.json"
    path.write_text(path.read_text().replace('"accuracy": 0.25', '"accuracy": 0.5'))
    (table,) = make_table(collect(experiment, folder))
    assert [
        note
        for note in table["notes"]
        if "before training differs between the rows of seed 1" in note
    ]


def test_what_is_kept_gives_the_same_table_and_picture_without_the_runs(
    experiment, folder, tmp_path
):
    results = collect(experiment, folder)
    write_results(results, make_table(results), tmp_path / "kept")
    again = read_results(tmp_path / "kept")
    assert make_table(again) == make_table(results)
    assert again == results
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["results.json"]
    assert str(tmp_path) not in (tmp_path / "kept" / "results.json").read_text()
    pictures = plot_results(again, tmp_path / "kept")
    assert [picture.name for picture in pictures] == ["curves.png", "differences.png"]
    assert all(picture.stat().st_size > 10_000 for picture in pictures)


def test_a_list_of_values_takes_one_line_and_no_text_changes(experiment, folder, tmp_path):
    results = collect(experiment, folder, {"b-seed1": "[1,\n  2] and [\n"})
    results.facts["runs"][0]["reason"] = "a [list,\n    of] two ]"
    write_results(results, [], tmp_path)
    text = (tmp_path / "results.json").read_text()
    assert json.loads(text) == {**results.facts, "table": []}
    assert all(
        line.count("]")
        for line in text.splitlines()
        if '"accuracies": [' in line or '"tokens": [' in line
    )


def part_of(results: Results, seeds: set[int]) -> Results:
    """What an experiment with fewer seeds would have kept."""
    facts = results.facts
    experiment = {**facts["experiment"], "seeds": sorted(seeds)}
    runs = [run for run in facts["runs"] if run["seed"] in seeds]
    return Results({**facts, "experiment": experiment, "runs": runs})


class TestPuttingResultsTogether:
    def test_seeds_of_two_machines_give_the_table_of_one(self, experiment, folder):
        whole = collect(experiment, folder)
        again = merge([part_of(whole, {1}), part_of(whole, {0, 2})])
        assert make_table(again) == make_table(whole)
        assert again.facts["experiment"] == whole.facts["experiment"]
        assert again.facts["runs"] == whole.facts["runs"]

    def test_of_a_run_in_both_the_one_that_has_ended_is_taken(self, experiment, folder):
        whole = collect(experiment, folder)
        (folder / "runs" / "b-seed1" / "summary.json").unlink()
        broken = collect(experiment, folder, {"b-seed1": "it broke"})
        only = Results({**whole.facts, "runs": [run for run in whole.facts["runs"] if is_b1(run)]})
        assert make_table(merge([broken, part_of(only, {1})])) == make_table(whole)
        assert make_table(merge([part_of(only, {1}), broken])) == make_table(whole)
        with pytest.raises(DataError, match="seed 0, has ended in two of the folders"):
            merge([whole, broken])

    def test_other_options_or_problems_are_refused_and_machines_named(self, experiment, folder):
        first, second = (part_of(collect(experiment, folder), {seed}) for seed in (0, 1))
        changed = {**second.facts["experiment"], "set": ["optim.lr=1"]}
        with pytest.raises(
            DataError, match="different experiments cannot be merged: `set` differs"
        ):
            merge([first, Results({**second.facts, "experiment": changed})])
        with pytest.raises(DataError, match="different problems"):
            merge([first, Results({**second.facts, "problems": {"": ["x"]}})])
        elsewhere = {**second.facts["made_with"], "processor": "abacus"}
        both = merge([first, Results({**second.facts, "made_with": elsewhere})])
        assert (
            both.facts["made_with"]["processor"]
            == f"{first.facts['made_with']['processor']}, abacus"
        )
        assert both.facts["made_with"]["packages"] == first.facts["made_with"]["packages"]


def is_b1(run: Mapping[str, Any]) -> bool:
    return (run["variant"], run["seed"]) == ("b", 1)


def test_damaged_or_missing_results_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        read_results(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(DataError, match="cannot read"):
        read_results(tmp_path)
    (tmp_path / "results.json").write_text('{"format": 1}')
    with pytest.raises(DataError, match="another version"):
        read_results(tmp_path)


def curve_of(results: Results, variant: str, seed: int) -> dict[str, list[Any]]:
    (run,) = (run for run in results.runs("", variant) if run["seed"] == seed)
    found: dict[str, list[Any]] = run["curve"]
    return found


def test_a_curve_has_what_was_spent_by_each_step(experiment, folder):
    curve = curve_of(collect(experiment, folder), "a", 0)
    assert curve["step"] == [0, 1, 2, 3, 4]
    assert curve["tokens"] == [0, 100, 300, 600, 1000]
    assert curve["seconds"] == [0, 3, 6, 9, 11]
    assert curve["accuracy"][:4] == [0.25, None, None, None]
    assert curve["rollout/entropy_estimate"] == [None, 1, 0.5, 0.333333, 0.25], "six digits"
    assert "reward/mean" not in curve, "a metric without a value in the run"


def test_the_picture_of_differences_shows_the_tables_intervals_and_fills_those_without_0(
    experiment, folder
):
    results = collect(experiment, folder)
    # c differs from a by other amounts on other problems, and everywhere upwards
    for run in results.facts["runs"]:
        run["accuracies"] = [
            min(1.0, value + 0.02 * i * (run["variant"] == "c"))
            for i, value in enumerate(run["accuracies"])
        ]
    figure = differences_figure(results)
    assert figure is not None
    (axes,) = figure.axes
    (table,) = make_table(results)
    shown = [row["to_baseline"] for row in table["rows"] if row["to_baseline"] is not None]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b", "c"]
    intervals = [line.get_xdata() for line in axes.lines[1::2]]
    assert np.allclose(intervals, [[100 * found["low"], 100 * found["high"]] for found in shown])
    for found, point in zip(shown, axes.lines[2::2], strict=True):
        assert point.get_xdata() == pytest.approx([100 * found["mean"]])
        assert (point.get_markerfacecolor() == "white") == (found["low"] <= 0 <= found["high"])
    assert [found["low"] <= 0 <= found["high"] for found in shown] == [True, False]


def test_pictures_count_the_seeds_that_they_show_and_not_those_that_are_planned(experiment, folder):
    planned = replace(experiment, seeds=(0, 1, 2, 3, 4))
    shutil.rmtree(folder / "runs" / "b-seed1")
    results = collect(planned, folder)
    difference = differences_figure(results)
    assert difference is not None
    note = "points, with 95 % intervals over seeds and problems; 2 to 3 seeds; filled: without 0"
    assert difference.axes[0].get_xlabel() == note
    notes = [text.get_text() for text in results_figure(results, "").texts]
    assert notes[-1] == "mean of 2 to 3 seeds; band: 95 % interval over seeds"
    one = collect(replace(experiment, seeds=(0,)), folder)
    difference = differences_figure(one)
    assert difference is not None
    note = "points, with 95 % intervals over problems; 1 seed; filled: without 0"
    assert difference.axes[0].get_xlabel() == note
    assert results_figure(one, "").texts[-1].get_text() == "mean of 1 seed"


def test_one_row_or_one_without_an_interval_has_no_picture_of_differences(experiment, folder):
    results = collect(experiment, folder)
    runs = [each for each in results.facts["runs"] if each["variant"] == "a"]
    alone = Results({**results.facts, "runs": runs})
    assert differences_figure(alone) is None


def test_a_mean_curve_ends_with_the_shortest_and_its_band_is_students():
    short = np.array([1.0, 2.0]), np.array([1.0, 3.0])
    long = np.array([1.0, 2.0, 3.0]), np.array([3.0, 5.0, 9.0])
    at, mean, low, high = mean_curve([short, long], is_by_step=True)
    assert at.tolist() == [1.0, 2.0]
    assert mean.tolist() == [2.0, 4.0]
    assert high - mean == pytest.approx([12.7062] * 2, abs=1e-3)
    assert mean - low == pytest.approx(high - mean)
    at, mean, *_ = mean_curve([short, long], is_by_step=False)
    assert (at[0], at[-1]) == (1.0, 2.0)
    assert mean[len(mean) // 2] == pytest.approx(3.0, abs=0.02)


def test_a_picture_has_a_panel_per_axis_and_a_line_per_row(experiment, folder):
    figure = results_figure(collect(experiment, folder), "")
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_xlabel() for axes in panels] == [
        "training step",
        "generated tokens",
        "seconds without evaluations",
        "training step",
    ]
    assert all(
        [line.get_label() for line in axes.get_lines()] == ["a", "b", "c"] for axes in panels
    )
    last = panels[0].get_lines()[2]
    assert last.get_ydata()[0] == pytest.approx(25.0)
    assert len(figure.axes) == 4, "two rows of two, and no empty panel"


def test_a_metric_without_a_value_has_no_panel(experiment, folder):
    results = collect(experiment, folder)
    for run in results.facts["runs"]:
        del run["curve"]["rollout/entropy_estimate"]
    figure = results_figure(results, "")
    assert [axes.get_title(loc="left") for axes in figure.axes if axes.get_visible()] == [
        "Held-out accuracy"
    ] * 3


def test_bands_over_few_seeds_end_where_their_values_do(experiment, folder):
    results = collect(experiment, folder)
    for run in results.facts["runs"]:
        run["curve"]["rollout/entropy_estimate"] = [0.0 if run["seed"] < 2 else 1.0] * len(
            run["curve"]["step"]
        )
    figure = results_figure(results, "")
    band, *_ = figure.axes[3].collections
    heights = band.get_paths()[0].vertices[:, 1]
    # the mean is 1/3, and Student's interval over (0, 0, 1) reaches from -1.1 to 1.8
    assert min(heights) == 0
    assert max(heights) == pytest.approx(1 / 3 + 4.303 / 3, abs=1e-3)


def test_a_divergence_is_not_below_0_and_a_reward_may_be(experiment, folder):
    results = collect(experiment, folder)
    for metric, lowest in (("loss/kl", 0), ("reward/mean", 1 / 3 - 4.303 / 3)):
        for run in results.facts["runs"]:
            run["curve"][metric] = [0.0 if run["seed"] < 2 else 1.0] * len(run["curve"]["step"])
        results.facts["experiment"]["plots"] = [{"metric": metric, "against": "steps"}]
        band, *_ = results_figure(results, "").axes[0].collections
        assert min(band.get_paths()[0].vertices[:, 1]) == pytest.approx(lowest, abs=1e-3)


def test_a_panel_has_its_title_and_marks_its_windows(experiment, folder):
    panels = (
        Panel("accuracy", "steps", "b is ahead", ((1, 2), (4, 4))),
        Panel("accuracy", "tokens", "b is ahead"),
    )
    results = collect(replace(experiment, panels=panels), folder)
    assert results.panels == list(panels)
    first, second = results_figure(results, "").axes
    assert [axes.get_title(loc="left") for axes in (first, second)] == ["b is ahead"] * 2
    assert [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in first.patches] == [
        (0.5, 2.5),
        (3.5, 4.5),
    ]
    assert not second.patches


def test_an_experiment_without_a_finished_step_has_no_picture(experiment, tmp_path):
    results = collect(experiment, tmp_path / "nowhere")
    assert plot_results(results, tmp_path) == []
    (table,) = make_table(results)
    assert table["rows"][0]["accuracy"] is None
