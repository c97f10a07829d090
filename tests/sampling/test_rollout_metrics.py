"""The metrics of a reward of several verifiers, and of what responses share."""

from hypothesis import given
from hypothesis import strategies as st

from dapo.sampling.rollout_metrics import rollout_metrics, shared_tokens
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


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=6))
def test_shared_tokens_are_all_tokens_less_the_distinct_beginnings(responses):
    beginnings = {tuple(tokens[:n]) for tokens in responses for n in range(1, len(tokens) + 1)}
    assert shared_tokens(responses) == sum(map(len, responses)) - len(beginnings)


def test_the_shared_fraction_is_over_all_groups_and_long_beginnings_count_in_full():
    def group(*responses):
        generations = tuple(Generation("", ids, (0.0,) * len(ids), "stop", 0) for ids in responses)
        verdicts = tuple(Verdict(True, 1.0) for _ in responses)
        return Group(Problem("1", "Q", "A"), (1,), generations, verdicts), "trained"

    long = tuple(range(600))
    judged = [group((*long, 1), (*long, 2, 3)), group((7, 8), (8, 7))]
    found = rollout_metrics(judged, {"trained": 2}, {"trained": 1207}, shortfall=0)
    assert found["rollout/shared_token_fraction"] == 600 / 1207


def test_the_pass_rate_is_over_trained_groups_with_right_and_wrong_responses():
    right = Verdict(True, 1.0)
    wrong = Verdict(False, -1.0)
    graded = Verdict(None, 0.3)
    error = Verdict(None, 0.0, error="timed out")
    judged = [
        ("trained", right, wrong, wrong, wrong),
        ("trained", right, wrong, right, error),
        # no signal: without dynamic sampling it is in the batch
        ("trained", wrong, wrong, wrong, wrong),
        ("trained", graded, right, wrong, wrong),
        ("excess", right, right, right, wrong),
        ("all_correct", right, right, right, right),
    ]
    generations = tuple(Generation(str(i), (1,), (0.0,), "stop", 0) for i in range(4))
    groups = [
        (Group(Problem("1", "Q", "A"), (1,), generations, tuple(v)), outcome)
        for outcome, *v in judged
    ]
    found = rollout_metrics(groups, {"trained": 4}, {"trained": 16}, shortfall=0)
    assert found["rollout/trained_pass_rate_mean"] == (1 / 4 + 2 / 3) / 2
    no_signal = rollout_metrics(groups[2:4], {"trained": 2}, {"trained": 8}, shortfall=0)
    assert "rollout/trained_pass_rate_mean" not in no_signal


def test_all_correct_and_all_wrong_are_counted_by_verdict_whether_the_groups_train_or_not():
    right = Verdict(True, 1.0)
    wrong = Verdict(False, -1.0)
    graded = Verdict(None, 0.3)
    error = Verdict(None, 0.0, error="timed out")
    judged = [
        ("trained", right, right, right),  # without dynamic sampling
        ("all_correct", right, right, error),
        ("trained", wrong, wrong, wrong),
        ("trained", right, wrong, wrong),
        ("trained", graded, graded, graded),
        ("invalid", right, error, error),
    ]
    generations = tuple(Generation(str(i), (1,), (0.0,), "stop", 0) for i in range(3))
    groups = [
        (Group(Problem("1", "Q", "A"), (1,), generations, tuple(v)), outcome)
        for outcome, *v in judged
    ]
    found = rollout_metrics(groups, {"trained": 6}, {"trained": 18}, shortfall=0)
    assert (found["rollout/all_correct_fraction"], found["rollout/all_wrong_fraction"]) == (
        2 / 6,
        1 / 6,
    )


def test_the_entropy_estimate_is_over_the_tokens_of_all_judged_responses():
    logprobs = [(-1.0, -2.0, -3.0), (-0.5,)]
    generations = tuple(
        Generation("", (1,) * len(values), values, "stop", 0) for values in logprobs
    )
    dropped = Group(Problem("1", "Q", "A"), (1,), generations, (Verdict(True, 1.0),) * 2)
    found = rollout_metrics(
        [(dropped, "all_correct")], {"all_correct": 1}, {"all_correct": 4}, shortfall=0
    )
    assert found["rollout/entropy_estimate"] == 6.5 / 4
