"""The claims about stored experiments: measured by hand, verdicts, and documents that agree with what is stored."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dapo.analysis.ablate.experiment import ACCURACY, load_experiment
from dapo.analysis.ablate.results import Results, collect
from dapo.evaluation.intervals import student_quantile
from evidence import report
from evidence.report import Claim, Finding, find, load_claims
from helpers.ablations import write_run
from helpers.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [page for page in PAGES if re.search("<!-- (evidence|grid|claims): ", page.read_text("utf-8"))]


def results_of(curves: Mapping[tuple[str, int], Mapping[str, Sequence[float | None]]]) -> Results:
    """Results that hold nothing but curves, by row and seed."""
    runs = [
        {
            "condition": "",
            "variant": variant,
            "seed": seed,
            "curve": {"step": list(range(len(next(iter(metrics.values()))))), **metrics},
        }
        for (variant, seed), metrics in curves.items()
    ]
    return Results({"experiment": {"variants": [], "conditions": []}, "runs": runs})


def claim(expected: str, **more: Any) -> Claim:
    return Claim(text="t", experiment="e", row="a", expected=expected, **more)


class TestWhatIsMeasured:
    def test_the_end_of_a_metric_is_the_mean_of_its_last_tenth(self):
        rising = [float(step) for step in range(20)]
        results = results_of({("a", 0): {"m": rising}, ("a", 1): {"m": [2 * each for each in rising]}})
        found = find(claim("above 0", metric="m"), results)
        assert found.mean == pytest.approx((18.5 + 37) / 2)
        half = student_quantile(1) * (37 - 18.5) / 2  # the deviation of two numbers over sqrt(2)
        assert (found.low, found.high, found.seeds) == (pytest.approx(27.75 - half), pytest.approx(27.75 + half), 2)
        assert find(claim("above 0", metric="m", during="all"), results).mean == pytest.approx((9.5 + 19) / 2)

    def test_what_grows_is_measured_from_the_first_tenth_to_the_last(self):
        results = results_of({("a", seed): {"m": [1.0, 3.0, *[7.0] * 16, 5.0, 5.0 + seed]} for seed in range(3)})
        assert find(claim("grows", metric="m"), results).mean == pytest.approx(3.5)

    def test_an_evaluation_counts_alone_and_steps_without_it_do_not(self):
        values = [0.2, None, None, 0.4, None, 0.9]
        results = results_of({("a", seed): {"eval/x/accuracy": values} for seed in range(2)})
        assert find(claim("grows", metric="eval/x/accuracy"), results).mean == pytest.approx(0.7)

    def test_rows_are_paired_by_the_seeds_that_both_have(self):
        results = results_of(
            {("a", 0): {"m": [5.0]}, ("a", 1): {"m": [9.0]}, ("b", 0): {"m": [3.0]}, ("b", 2): {"m": [0.0]}}
        )
        found = find(claim("more", metric="m", than="b"), results)
        assert (found.mean, found.seeds) == (2.0, 1)

    def test_accuracies_are_compared_as_in_the_table(self, tmp_path: Path):
        (tmp_path / "mine.yaml").write_text(
            "base: tiny\nseeds: [0, 1]\n"
            "variants: {a: [], b: {set: [loss.clip_high=0.3]}, c: {set: [loss.clip_high=0.4]}}\n"
        )
        experiment = load_experiment(tmp_path / "mine.yaml")
        for run in experiment.runs():
            arguments = ["train", str(run.base), *run.overrides, "--run-dir", str(tmp_path / "runs" / run.name)]
            write_run(arguments, accuracy={"a": 0.4, "b": 0.5, "c": 0.7}[run.variant])
        results = collect(experiment, tmp_path)
        for row, than, difference in (("b", "a", 0.1), ("c", "b", 0.2), ("c", "a", 0.3)):
            found = find(Claim("t", "e", row, "more", than=than), results)
            assert found.mean == pytest.approx(difference)
        assert find(Claim("t", "e", "c", "above 0.5"), results).mean == pytest.approx(0.7)
        with pytest.raises(ValueError, match="b is compared with a, not with c"):
            find(Claim("t", "e", "b", "more", than="c"), results)
        with pytest.raises(ValueError, match="has no row x"):
            find(Claim("t", "e", "x", "more", than="a"), results)

    def test_the_tokens_to_an_accuracy_lie_on_the_line_between_two_evaluations(self):
        curves = {
            ("a", 0): {"tokens": [0, 100, 200, 300], ACCURACY: [0.0, 0.4, None, 0.8]},
            ("a", 1): {"tokens": [0, 100, 200, 300], ACCURACY: [0.0, None, 1.0, 0.2]},
            ("b", 0): {"tokens": [0, 10, 20, 30], ACCURACY: [0.0, 0.5, 0.6, 0.6]},
            ("b", 1): {"tokens": [0, 10, 20, 30], ACCURACY: [0.0, 0.2, 0.4, 0.6]},
        }
        found = find(claim("less", than="b", tokens_to=0.5), results_of(curves))
        assert found.mean == pytest.approx(((150 - 10) + (100 - 25)) / 2)
        with pytest.raises(ValueError, match=r"ends at 0\.6 has no position where it reaches 0\.7"):
            find(claim("less", than="b", tokens_to=0.7), results_of(curves))

    def test_an_accuracy_after_a_step_is_that_of_its_own_evaluation(self):
        curves = {
            ("a", 0): {ACCURACY: [0.0, None, 0.5, 0.9]},
            ("a", 1): {ACCURACY: [0.1, None, 0.6, 0.9]},
            ("b", 0): {ACCURACY: [0.0, None, 0.2, 1.0]},
            ("b", 1): {ACCURACY: [0.0, None, 0.4, 1.0]},
        }
        assert find(claim("more", than="b", at_step=2), results_of(curves)).mean == pytest.approx(0.25)
        with pytest.raises(ValueError, match="a run of a was not evaluated after step 1"):
            find(claim("more", than="b", at_step=1), results_of(curves))


class TestDocuments:
    @pytest.fixture
    def document(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        (tmp_path / "mine.yaml").write_text(
            "base: tiny\nseeds: [0, 1]\nconditions: {clean: [], noisy: [optim.weight_decay=0.5]}\n"
            "variants: {a: [], b: {set: [loss.clip_high=0.3]}, c: {inherits: a, set: [loss.clip_high=0.4]}}\n"
            "baseline: a\n"
        )
        experiment = load_experiment(tmp_path / "mine.yaml")
        for run in experiment.runs():
            arguments = ["train", str(run.base), *run.overrides, "--run-dir", str(tmp_path / "runs" / run.name)]
            accuracy = {"a": 0.4, "b": 0.5, "c": 0.3}[run.variant] + 0.1 * (run.condition == "noisy")
            write_run(arguments, accuracy=accuracy)
        results = collect(experiment, tmp_path)
        monkeypatch.setattr(report, "stored", {"mine": results}.__getitem__)
        monkeypatch.setattr(report, "FOLDER", tmp_path)
        return "before\n<!-- grid: mine -->\n<!-- grid: mine -->\nafter\n"

    def test_a_grid_has_a_line_for_each_condition(self, document: str, tmp_path: Path):
        filled = report.fill(document, tmp_path / "evidence")
        lines = filled.splitlines()
        assert lines[0] == "before"
        assert lines[-1] == "after"
        assert "|  | a, % | b vs a | c vs a |" in lines
        (clean,) = [line.split("|") for line in lines if line.startswith("| clean | 40.0")]
        (noisy,) = [line.split("|") for line in lines if line.startswith("| noisy | 50.0")]
        for cells in (clean, noisy):
            assert cells[3].startswith(" +10.0 (")
            assert cells[4].startswith(" -10.0 (")
        assert [len(line.split("|")) for line in lines if line.startswith(("| a / b / c |", "| noisy |"))] == [6, 8, 8]
        assert report.fill(filled, tmp_path / "evidence") == filled
        assert [path.name for path in (tmp_path / "evidence").iterdir()] == ["mine-differences.png"]


class TestVerdicts:
    @pytest.mark.parametrize(
        ("expected", "low", "high", "verdict"),
        [
            ("more", 0.1, 0.3, "confirmed"),
            ("more", -0.3, -0.1, "refuted"),
            ("more", -0.1, 0.1, "open"),
            ("less", 0.1, 0.3, "refuted"),
            ("falls", -0.3, -0.1, "confirmed"),
            ("above 0.95", 0.96, 0.98, "confirmed"),
            ("above 0.95", 0.9, 0.94, "refuted"),
            ("below 0.2", 0.1, 0.15, "confirmed"),
            ("below 0.2", 0.1, 0.3, "open"),
            ("more", None, None, "open"),
            ("within 0.2", -0.1, 0.2, "confirmed"),
            ("within 0.2", -0.3, 0.1, "open"),
            ("within 0.2", -0.1, 0.3, "open"),
            ("within 0.2", 0.21, 0.3, "refuted"),
            ("within 0.2", -0.3, -0.21, "refuted"),
        ],
    )
    def test_the_interval_decides(self, expected: str, low: float | None, high: float | None, verdict: str):
        mean = 0.0 if low is None or high is None else (low + high) / 2
        assert Finding(mean, low, high, 5).verdict(claim(expected)) == verdict

    def test_the_seeds_that_are_needed_are_the_fewest_whose_interval_leaves_out_the_bound(self):
        of_one = 2.0
        half = student_quantile(4) * of_one / 5**0.5
        needed = Finding(0.5, 0.5 - half, 0.5 + half, 5).seeds_needed(claim("more"))
        assert needed is not None
        assert student_quantile(needed - 1) * of_one / needed**0.5 < 0.5
        assert student_quantile(needed - 2) * of_one / (needed - 1) ** 0.5 >= 0.5
        assert Finding(0.0, -half, half, 5).seeds_needed(claim("more")) is None
        assert Finding(-0.5, -0.5 - half, -0.5 + half, 5).seeds_needed(claim("within 1")) == needed


class TestStoredResults:
    def test_every_claim_is_about_a_row_and_a_condition_of_its_experiment(self):
        for each in load_claims():
            experiment = load_experiment(ROOT / "evidence" / f"{each.experiment}.yaml")
            names = {variant.name for variant in experiment.variants}
            assert {each.row, each.than or each.row} <= names, each
            assert each.condition in {condition.name for condition in experiment.conditions}, each
            panels = {panel.metric for panel in experiment.panels}
            assert each.metric in panels | {ACCURACY, "reward/mean", "reward/accuracy"}, each

    @pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
    def test_a_documents_tables_are_those_of_the_stored_results(self, document: Path, tmp_path: Path):
        text = document.read_text(encoding="utf-8")
        assert report.fill(text, tmp_path / "evidence", with_pictures=False) == text
        for picture in re.findall(r"\((evidence/[^)]+\.png)\)", text):
            assert (document.parent / picture).is_file()

    def test_every_stored_experiment_has_its_file_and_no_run_of_it_is_missing(self):
        for folder in sorted(report.STORED.glob("*")):
            experiment = load_experiment(ROOT / "evidence" / f"{folder.name}.yaml")
            kept = report.stored(folder.name).facts
            assert [each["name"] for each in kept["experiment"]["variants"]] == [v.name for v in experiment.variants]
            assert kept["experiment"]["set"] == list(experiment.shared)
            states = {run["state"] for run in kept["runs"]}
            assert states <= {"finished", "solved", "failed"}, folder.name
