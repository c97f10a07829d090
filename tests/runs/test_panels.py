"""What the curves of a run show, for the console, the notebook, curves.png and the pictures of dapo
ablate.
"""

from math import isnan, nan
from typing import Any

import pytest

from dapo.runs.panels import (
    MAX_EVALUATIONS,
    Panel,
    panels_of,
    points_of,
    smoothed,
    smoothing_window,
    training_series,
)

STEP = {
    "reward/accuracy": 0.5,
    "rollout/response_tokens_mean": 9.0,
    "rollout/truncated_fraction": 0.25,
    "rollout/keep_rate": 0.5,
    "rollout/all_wrong_fraction": 0.5,
    "loss/entropy": 0.3,
}


def named(panels: list[Panel]) -> dict[str, list[str]]:
    return {panel.title: [series.metric for series in panel.series] for panel in panels}


def evaluation(name: str, **values: float) -> dict[str, Any]:
    return {f"eval/{name}/{key}": value for key, value in values.items()}


def test_panels_hold_the_metrics_that_were_logged():
    found = panels_of(
        [{"step": 0, **evaluation("sums", accuracy=0.2, low=0.1, high=0.3)}, {"step": 1, **STEP}]
    )
    assert named(found) == {
        "Accuracy": ["reward/accuracy", "eval/sums/accuracy"],
        "Response length": ["rollout/response_tokens_mean"],
        "Entropy of the policy at the sampled positions": ["loss/entropy"],
        "Outcomes of the groups": ["rollout/keep_rate", "rollout/all_wrong_fraction"],
    }
    right = found[1].right
    assert right is not None
    assert [(series.metric, series.scale) for series in right.series] == [
        ("rollout/truncated_fraction", 100.0)
    ]
    assert [series.data for series in found[0].series] == [None, "sums"]


def test_supervised_steps_have_loss_and_probability_instead():
    found = named(panels_of([{"step": 1, "loss/nll": 1.0, "loss/token_prob_mean": 0.5}]))
    assert list(found.values()) == [[], ["loss/nll"], [], ["loss/token_prob_mean"]]


# new and old runs
@pytest.mark.parametrize("score", [{"score_mean": 0.4}, {"low": -0.5, "high": 1.5}])
def test_scores_are_drawn_as_scores_and_not_in_per_cent(score: dict[str, float]):
    records = [
        {"step": 0, **evaluation("sums", accuracy=0.4, **score)},
        {"step": 1, **STEP, "reward/score_mean": 0.3},
    ]
    panel = panels_of(records)[0]
    assert (panel.title, panel.unit) == ("Score", "mean score of the verifier")
    assert [(series.metric, series.scale) for series in panel.series] == [
        ("reward/score_mean", 1.0),
        ("eval/sums/accuracy", 1.0),
    ]


def test_training_is_drawn_by_verdicts_where_there_are_some():
    assert training_series(["reward/score_mean"], has_scores=False).metric == "reward/score_mean"
    assert (
        training_series(["reward/score_mean", "reward/accuracy"], has_scores=False).metric
        == "reward/accuracy"
    )
    assert (
        training_series(["reward/score_mean", "reward/accuracy"], has_scores=True).metric
        == "reward/score_mean"
    )


def test_evaluations_have_their_own_colours_and_a_panel_has_a_few():
    records = [
        {"step": 0}
        | evaluation("a", accuracy=0.1)
        | evaluation("b", accuracy=0.1, low=0.0, high=0.2)
    ]
    assert [series.data for series in panels_of(records)[0].series] == ["b"]  # one has an interval
    many = {"step": 0}
    for i in range(9):
        many |= evaluation(str(i), accuracy=0.1)
    series = panels_of([many])[0].series
    assert len({each.colour for each in series}) == len(series) == MAX_EVALUATIONS


def test_the_running_mean_is_that_of_the_neighbours_with_a_value():
    values = [nan if i in (3, 20) else float(i * i % 7) for i in range(40)]
    half = smoothing_window(40) // 2
    for i, mean in enumerate(smoothed(values)):
        near = [value for value in values[max(0, i - half) : i + half + 1] if not isnan(value)]
        assert isnan(mean) if isnan(values[i]) else mean == pytest.approx(sum(near) / len(near))
    assert smoothed(values[4:14]) == values[4:14]  # few steps


def test_points_are_scaled_and_a_missing_step_is_a_gap():
    steps, values = points_of(
        [{"step": 1, "m": 0.5}, {"step": 2, "m": 0.25}, {"step": 4, "m": 1.0}], "m", 100.0
    )
    assert steps == [1, 2, 3, 4]
    assert values[:2] + values[3:] == [50.0, 25.0, 100.0]
    assert isnan(values[2])
