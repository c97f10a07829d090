"""The metrics of a reward of several verifiers."""

from dapo.telemetry.metrics import rollout_metrics
from dapo.types import Generation, Group, Problem, Verdict


def metrics_of(*verdicts):
    generations = tuple(Generation(str(i), (1,), (0.0,), "stop", 0) for i in range(len(verdicts)))
    group = Group(Problem("1", "Q", "A"), (1,), generations, verdicts)
    return rollout_metrics([(group, "trained")], {"trained": 1}, {"trained": 2}, shortfall=0)


def test_each_component_is_averaged_over_the_responses_to_which_it_applied():
    found = metrics_of(
        Verdict(True, 1.1, components={"math": 1.0, "mine:brevity": 0.5}),
        Verdict(False, -1.0, components={"math": -1.0}),
        Verdict(None, 0.0, error="timed out"),
    )
    assert found["reward/component/math"] == 0.0
    assert found["reward/component/mine.brevity"] == 0.5


def test_a_single_verifier_has_no_components():
    assert not [name for name in metrics_of(Verdict(True, 1.0)) if "component" in name]
