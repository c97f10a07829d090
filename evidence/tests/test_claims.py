"""Claims: what is measured, by hand; verdicts; Holm's correction; and what the experiments' files
have to say.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dapo.analysis.ablate.experiment import ACCURACY, load_experiment
from dapo.analysis.ablate.results import Results, collect
from dapo.libs.sample_intervals import student_quantile, two_way_difference
from evidence import claims
from evidence.claims import Claim, adjust, judge, load_claims, parse_claim
from evidence.measures import Effect, measure, parse_measure
from helpers.ablations import write_run
from helpers.paths import ROOT

EVIDENCE = ROOT / "evidence"
Curves = Mapping[tuple[str, str, int], Mapping[str, Sequence[float | None]]]


def results_of(curves: Curves) -> Results:
    """Results that hold nothing but curves, by condition, row and seed."""
    runs = [
        {
            "condition": condition,
            "variant": variant,
            "seed": seed,
            "curve": {"step": list(range(len(next(iter(metrics.values()))))), **metrics},
        }
        for (condition, variant, seed), metrics in curves.items()
    ]
    conditions = [{"name": name} for name in dict.fromkeys(key[0] for key in curves)]
    return Results({"experiment": {"variants": [], "conditions": conditions}, "runs": runs})


def plain(curves: Mapping[tuple[str, int], Mapping[str, Sequence[float | None]]]) -> Results:
    return results_of({("", *key): metrics for key, metrics in curves.items()})


def value(results: Results, **given: Any) -> Effect:
    return measure(parse_measure({"row": "a", **given}), results)


def claim(expected: str = "more", **more: Any) -> Claim:
    """A claim on the metric m, whose technique acted."""
    delivered = more.pop("delivered", {"metric": "acts", "above": 0})
    entry = {
        "text": "t",
        "made": "before",
        "row": "a",
        "metric": "m",
        "expected": expected,
        "delivered": delivered,
    }
    return parse_claim({**entry, **more}, "e")


def verdict(numbers: Sequence[float], wanted: Claim, acts: float = 1.0) -> str:
    """The verdict on a claim alone in its family, when the seeds have these numbers."""
    results = plain(
        {("a", seed): {"m": [number], "acts": [acts]} for seed, number in enumerate(numbers)}
    )
    return judge([wanted], {"e": results})[wanted].verdict


class TestWhatIsMeasured:
    def test_the_end_of_a_metric_is_the_mean_of_its_last_tenth(self):
        rising = [float(step) for step in range(20)]
        results = plain({("a", 0): {"m": rising}, ("a", 1): {"m": [2 * each for each in rising]}})
        found = value(results, metric="m")
        assert found.mean == pytest.approx((18.5 + 37) / 2)
        half = student_quantile(1) * (37 - 18.5) / 2  # the deviation of two numbers over sqrt(2)
        assert (found.low, found.high, found.seeds) == (
            pytest.approx(27.75 - half),
            pytest.approx(27.75 + half),
            2,
        )
        assert found.error == pytest.approx((37 - 18.5) / 2)
        assert value(results, metric="m", steps="all").mean == pytest.approx((9.5 + 19) / 2)
        assert value(results, metric="m", steps=[2, 4]).mean == pytest.approx((3 + 6) / 2)
        with pytest.raises(ValueError, match="a run of a has no m from step 30 to 40"):
            value(results, metric="m", steps=[30, 40])

    def test_a_change_is_measured_from_the_first_tenth_to_the_last(self):
        results = plain(
            {("a", seed): {"m": [1.0, 3.0, *[7.0] * 16, 5.0, 5.0 + seed]} for seed in range(3)}
        )
        assert value(results, metric="m", change=True).mean == pytest.approx(3.5)
        assert claim("grows").criteria[0].measure.change
        assert not claim("more", than="b").criteria[0].measure.change

    def test_an_evaluation_counts_alone_and_steps_without_it_do_not(self):
        values = [0.2, None, None, 0.4, None, 0.9]
        results = plain({("a", seed): {"eval/x/accuracy": values} for seed in range(2)})
        assert value(results, metric="eval/x/accuracy", change=True).mean == pytest.approx(0.7)
        assert value(results, metric="eval/x/accuracy", steps=[3, 3]).mean == pytest.approx(0.4)

    def test_rows_are_paired_by_the_seeds_that_both_have(self):
        results = plain(
            {
                ("a", 0): {"m": [5.0]},
                ("a", 1): {"m": [9.0]},
                ("b", 0): {"m": [3.0]},
                ("b", 2): {"m": [0.0]},
            }
        )
        found = value(results, metric="m", than="b")
        assert (found.mean, found.seeds) == (2.0, 1)

    def test_two_metrics_of_one_run_are_compared(self):
        results = plain({("a", seed): {"m": [5.0], "n": [3.0 + seed]} for seed in range(2)})
        assert value(results, metric="m", than_metric="n").each == (2.0, 1.0)

    def test_the_tokens_to_an_accuracy_lie_on_the_line_between_two_evaluations(self):
        curves = {
            ("a", 0): {"tokens": [0, 100, 200, 300], ACCURACY: [0.0, 0.4, None, 0.8]},
            ("a", 1): {"tokens": [0, 100, 200, 300], ACCURACY: [0.0, None, 1.0, 0.2]},
            ("b", 0): {"tokens": [0, 10, 20, 30], ACCURACY: [0.0, 0.5, 0.6, 0.6]},
            ("b", 1): {"tokens": [0, 10, 20, 30], ACCURACY: [0.0, 0.2, 0.4, 0.6]},
        }
        found = value(plain(curves), than="b", until={"above": 0.5, "at": "tokens"})
        assert found.mean == pytest.approx(((150 - 10) + (100 - 25)) / 2)

    def test_the_steps_to_a_bound_end_with_the_first_mean_below_it_or_with_the_run(self):
        falling = [0.4, 0.4, 0.1, 0.3, 0.1, 0.1, 0.1]
        results = plain(
            {("a", 0): {"m": falling}, ("a", 1): {"m": [0.4] * 7}, ("a", 2): {"m": [0.1] * 7}}
        )
        assert value(results, metric="m", until={"below": 0.2, "mean_of": 3}).each == (
            4.0,
            6.0,
            2.0,
        )

    def test_accuracies_are_compared_as_in_the_table_and_any_two_rows_can_be(self, tmp_path: Path):
        (tmp_path / "mine.yaml").write_text(
            "base: tiny\nseeds: [0, 1]\nvariants: {a: [], b: {set: [loss.clip_high=0.3]}, c: {set:"
            " [loss.clip_high=0.4]}}\nbaseline: a\n"
        )
        experiment = load_experiment(tmp_path / "mine.yaml")
        for run in experiment.runs():
            arguments = [
                "train",
                str(run.base),
                *run.overrides,
                "--run-dir",
                str(tmp_path / "runs" / run.name),
            ]
            write_run(arguments, accuracy={"a": 0.4, "b": 0.5, "c": 0.7}[run.variant])
        results = collect(experiment, tmp_path)
        for row, than, difference in (
            ("b", "a", 0.1),
            ("c", "b", 0.2),
            ("c", "a", 0.3),
            ("b", "c", -0.2),
        ):
            assert value(results, row=row, than=than).mean == pytest.approx(difference)
        level = value(results, row="c")
        assert level.mean == pytest.approx(0.7)
        with pytest.raises(ValueError, match="no row x"):
            value(results, row="x")

    def test_the_p_value_of_an_accuracy_is_5_percent_where_its_interval_ends(self):
        rng = np.random.default_rng(0)
        for level in (0.1, 0.5, 0.9):
            tables = {"a": rng.binomial(1, level, (4, 60)), "b": rng.binomial(1, 0.5, (4, 60))}
            runs = [
                {
                    "condition": "",
                    "variant": name,
                    "seed": seed,
                    "accuracies": row.tolist(),
                    "curve": {},
                }
                for name, table in tables.items()
                for seed, row in enumerate(table)
            ]
            experiment = {
                "variants": [{"name": name} for name in tables],
                "conditions": [{"name": ""}],
            }
            results = Results({"experiment": experiment, "runs": runs})
            for found in (value(results), value(results, than="b")):
                assert found.low is not None
                assert found.high is not None
                for end in (found.low, found.high):
                    assert found.p_value(end) == pytest.approx(0.05, abs=3e-3)
            paired = two_way_difference(tables["b"], tables["a"])
            assert (value(results, than="b").low, value(results, than="b").high) == (
                paired.low,
                paired.high,
            )

    def test_base_models_and_seeds_are_two_factors(self):
        bases = {"x": 0.0, "y": 3.0, "z": 6.0}
        seeds = (0.0, 1.0)
        curves = {
            (name, row, seed): {"m": [level * (row == "a") + shift]}
            for name, level in bases.items()
            for row in "ab"
            for seed, shift in enumerate(seeds)
        }
        found = value(results_of(curves), metric="m", than="b", over="conditions")
        assert (found.mean, found.seeds, found.conditions) == (3.0, 2, 3)
        assert found.error == pytest.approx(sqrt(9 / 3))  # the variance between base models alone
        assert value(results_of(curves), metric="m", than="b", condition="z").mean == 6.0

    def test_a_row_is_compared_with_itself_in_another_condition(self):
        runs = [
            {
                "condition": name,
                "variant": "a",
                "seed": seed,
                "accuracies": [level, level, 1.0],
                "curve": {},
            }
            for name, level in (("clean", 1.0), ("noisy", 0.4))
            for seed in range(2)
        ]
        experiment = {
            "variants": [{"name": "a"}],
            "conditions": [{"name": "clean"}, {"name": "noisy"}],
        }
        results = Results({"experiment": experiment, "runs": runs})
        found = value(results, condition="noisy", than_condition="clean")
        assert found.mean == pytest.approx(-0.4)
        assert found.error is not None


class TestVerdicts:
    @pytest.mark.parametrize(
        ("expected", "numbers", "expectation"),
        [
            ("more", (0.2, 0.21, 0.19), "confirmed"),
            ("more", (-0.2, -0.21, -0.19), "refuted"),
            ("more", (-0.1, 0.1, 0.05), "open"),
            ("less", (0.2, 0.21, 0.19), "refuted"),
            ("less", (-0.2, -0.21, -0.19), "confirmed"),
            ("above 0.95", (0.965, 0.97, 0.975), "confirmed"),
            ("above 0.95", (0.9, 0.91, 0.92), "refuted"),
            ("below 0.2", (0.1, 0.11, 0.12), "confirmed"),
            ("below 0.2", (0.1, 0.2, 0.3), "open"),
            ("more", (0.2, 0.2, 0.2), "open"),  # equal numbers have no interval
            ("within 0.2", (-0.01, 0.02, 0.0), "confirmed"),
            ("within 0.2", (-0.15, 0.2, 0.0), "open"),
            ("within 0.2", (0.3, 0.31, 0.32), "refuted"),
            ("within 0.2", (-0.3, -0.31, -0.32), "refuted"),
            ("within 0.2", (0.1, 0.3, 0.23), "open"),
        ],
    )
    def test_the_numbers_decide(self, expected: str, numbers: Sequence[float], expectation: str):
        assert verdict(numbers, claim(expected)) == expectation

    def test_a_file_may_count_an_unclear_value_as_refuted_and_the_other_side_as_neither(self):
        unclear = (-0.1, 0.1, 0.05)
        above = (0.5, 0.51, 0.52)
        assert verdict(unclear, claim("more", otherwise="refuted")) == "refuted"
        assert verdict(above, claim("below 0.2", opposite="neither")) == "neither"
        assert verdict((0.1, 0.11, 0.12), claim("below 0.2", opposite="neither")) == "confirmed"

    def test_no_effect_is_found_within_a_bound_of_the_file_alone(self):
        small = (-0.01, 0.01, 0.005)
        assert verdict(small, claim("more")) == "open"
        assert verdict(small, claim("more", no_effect=0.05)) == "no effect beyond 0.05"
        assert verdict(small, claim("more", no_effect=0.01)) == "open"

    def test_every_seed_has_to_agree_where_the_file_says_so(self):
        numbers = (*[0.2] * 20, 0.3, -0.01)
        assert verdict(numbers, claim("more")) == "confirmed"
        assert verdict(numbers, claim("more", every_seed=True)) == "open"

    def test_a_technique_that_did_not_act_was_not_tested(self):
        numbers = (0.2, 0.21, 0.19)
        wanted = claim("more", delivered={"metric": "acts", "above": 0.01, "below": 0.9})
        assert verdict(numbers, wanted, acts=0.5) == "confirmed"
        assert verdict(numbers, wanted, acts=0.001) == "not delivered"
        assert verdict(numbers, wanted, acts=0.95) == "not delivered"
        assert verdict(numbers, claim(delivered={"metric": "gone", "above": 0})) == "not delivered"

    def test_all_criteria_of_a_claim_have_to_hold(self):
        parts = [
            {"expected": "below 0.2", "opposite": "neither"},
            {"expected": "less", "than_metric": "n"},
        ]
        entry = {
            "text": "t",
            "made": "before",
            "row": "a",
            "metric": "m",
            "delivered": {"metric": "n", "above": 0},
        }
        wanted = parse_claim({**entry, "all_of": parts}, "e")
        for numbers, other, expectation in (
            ((0.1, 0.11, 0.12), 0.9, "confirmed"),
            ((0.5, 0.51, 0.52), 0.9, "neither"),
            ((0.5, 0.51, 0.52), 0.3, "refuted"),
            ((0.1, 0.11, 0.12), 0.05, "refuted"),
        ):
            runs = {
                ("a", seed): {"m": [number], "n": [other + seed / 1000]}
                for seed, number in enumerate(numbers)
            }
            assert judge([wanted], {"e": plain(runs)})[wanted].verdict == expectation

    def test_holms_correction_is_that_of_the_textbook(self):
        # Holm (1979): .005 x 4, .01 x 3, .03 x 2, and .04 no smaller than the one before
        assert adjust({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
            {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06}
        )
        assert adjust({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}

    def test_a_claim_among_many_needs_a_smaller_p_value(self):
        numbers = (0.2, 0.3, 0.1, 0.25)  # p = .016
        curves = {
            ("a", seed): {"m": [number], "acts": [1.0]} for seed, number in enumerate(numbers)
        }
        for seed, noise in enumerate((0.1, -0.1, 0.05, -0.06)):
            curves["b", seed] = {"m": [noise], "acts": [1.0]}
        results = {"e": plain(curves)}
        first = claim(text="first")
        others = [claim(text=str(number), row="b") for number in range(4)]
        assert judge([first], results)[first].verdict == "confirmed"
        assert judge([first, *others], results)[first].verdict == "open"
        apart = [claim(text=str(number), row="b", family="another") for number in range(4)]
        assert judge([first, *apart], results)[first].verdict == "confirmed"

    def test_the_detectable_effect_is_found_in_80_percent_of_experiments(self):
        rng = np.random.default_rng(1)
        found = 0
        size = Effect(0.0, None, None, 5, 1 / sqrt(5), 4).detectable
        assert size == pytest.approx((2.776 + 0.941) / sqrt(5), abs=1e-3)  # Student's quantiles
        for _ in range(4000):
            numbers = rng.normal(size, 1, 5)
            found += numbers.mean() > student_quantile(4) * numbers.std(ddof=1) / sqrt(5)
        assert found / 4000 == pytest.approx(0.8, abs=0.03)
        assert Effect(0.0, None, None, 5, 1.0, 1.0e6).detectable == pytest.approx(2.8, abs=0.01)


class TestTheExperimentsFiles:
    def test_every_experiment_has_claims_with_their_time_and_a_bound_of_delivery(self):
        experiments = {
            path.stem
            for path in EVIDENCE.glob("*.yaml")
            if "\nvariants:" in path.read_text("utf-8")
        }
        assert {each.experiment for each in load_claims()} == experiments
        for each in load_claims():
            assert each.made.split()[0] in ("before", "after"), each
            assert (each.delivered.above, each.delivered.below) != (None, None), each

    def test_every_claim_is_about_rows_and_a_condition_of_its_experiment(self):
        for each in load_claims():
            experiment = load_experiment(EVIDENCE / f"{each.experiment}.yaml")
            names = {variant.name for variant in experiment.variants}
            conditions = {condition.name for condition in experiment.conditions}
            for found in (
                *(criterion.measure for criterion in each.criteria),
                each.delivered.measure,
            ):
                assert {found.row, found.than or found.row} <= names, each
                assert (
                    found.over
                    or {found.condition, found.than_condition or found.condition} <= conditions
                ), each
                if found.over:
                    assert all(
                        str(c.own).count("model.name=") == 1 for c in experiment.conditions
                    ), each

    def test_a_replication_is_on_seeds_that_the_first_experiment_does_not_have(self):
        named = {each.name: each for each in load_claims() if each.name}
        assert len(named) == sum(bool(each.name) for each in load_claims())
        again = [each for each in load_claims() if each.replicates]
        assert len(again) > 5
        for each in again:
            first = named[each.replicates]
            seeds = [
                set(load_experiment(EVIDENCE / f"{x.experiment}.yaml").seeds) for x in (first, each)
            ]
            assert not seeds[0] & seeds[1], each
            assert each.criteria[0].expected == first.criteria[0].expected
            assert each.criteria[0].measure.metric == first.criteria[0].measure.metric

    def test_an_unknown_key_is_refused(self):
        with pytest.raises(ValueError, match="unknown key 'expects' in a claim"):
            claim(expects="more")
        entry = {
            "text": "t",
            "row": "a",
            "expected": "more",
            "delivered": {"metric": "m", "above": 0},
        }
        with pytest.raises(TypeError, match="made"):
            parse_claim(entry, "e")

    def test_claims_that_their_files_call_refuted_are(self):
        """The files said "Refuted by: an interval that holds 0" before the runs."""
        found = {
            (
                each.experiment,
                each.criteria[0].measure.row,
                each.criteria[0].measure.metric,
            ): judged.verdict
            for each, judged in claims.judge_all().items()
            if each.criteria[0].otherwise == "refuted"
        }
        for key in (
            ("curriculum_small", "mixed", ACCURACY),
            ("curriculum_small", "mixed, predicted", ACCURACY),
            ("generalisation", "three tasks", "eval/larger/accuracy"),
            ("generalisation", "one task", "eval/larger/accuracy"),
            ("generalisation_small", "all three tasks", "eval/sums_larger/accuracy"),
        ):
            assert found[key] == "refuted", key
