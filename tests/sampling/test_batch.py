"""Dynamic sampling with a scripted engine: what is accepted, when the batch closes, and that the
account adds up.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scripted_engine import ScriptedEngine
from dapo.algo.sampling import SignalRule
from dapo.core.errors import EngineError, RewardError, ShortfallError, VerifierFailed
from dapo.core.rng import keyed_uniforms
from dapo.data.stream import ProblemStream
from dapo.engines.checked import CheckedEngine
from dapo.engines.engine import RolloutEngine
from dapo.rewards.combine import RewardSpec
from dapo.runs.outcomes import Outcome
from dapo.sampling.batch import Sampling, SamplingPlan, collect
from dapo.sampling.dynamic_sampling import DynamicSampler, RollingErrorRate
from dapo.sampling.queue import Batch
from dapo.training.stopping import (
    MAX_EMPTY_STEPS,
    ProblemsSolved,
    describe_short_batch,
    require_groups,
)
from dapo.types import Generation, GenerationRequest, Group, Problem, Verdict
from helpers.fake_rollout import (
    BROKEN,
    END,
    FILL,
    RIGHT,
    WRONG,
    FakeEncoder,
    FakeJudge,
    in_order,
    plan,
    problems,
    random_script,
    sampler,
)
from helpers.tables import for_each_row
from helpers.tiny_runs import tiny


def by_group(marks: Callable[[int], str]) -> Callable[[GenerationRequest], tuple[list[int], str]]:
    """A script from a problem's number to its responses: `r`, `w` or `e` for each sample."""

    def script(request: GenerationRequest) -> tuple[list[int], str]:
        sample = int(request.id.split("/")[-1])
        mark = {"r": RIGHT, "w": WRONG, "e": BROKEN}[marks(request.prompt_ids[0])[sample]]
        return [mark, *[FILL] * (request.prompt_ids[0] % 3 + sample), END], "stop"

    return script


def run(
    stream: ProblemStream,
    engine: RolloutEngine,
    chosen: DynamicSampler,
    *,
    step: int = 1,
    **kw: int,
) -> Batch:
    return collect(
        Sampling(stream, engine, FakeJudge(), chosen, FakeEncoder(), plan(**kw)), step=step
    )


def assert_account_adds_up(batch: Batch, engine: ScriptedEngine) -> None:
    assert batch.group_counts["trained"] == len(batch.groups)
    judged_tokens = sum(group.num_tokens for group, _ in batch.judged)
    assert batch.num_generated_tokens == judged_tokens + batch.token_counts["aborted"]
    judged = {group.id for group, _ in batch.judged}
    cut_short = {position_of(request) for request in engine.submitted} - judged
    # of what was submitted and not judged, only groups that had begun are in the account
    assert batch.group_counts["aborted"] <= len(cut_short)
    assert sum(batch.group_counts.values()) == len(batch.judged) + batch.group_counts["aborted"]
    assert not engine.in_flight


def position_of(request: GenerationRequest) -> int:
    return int(request.id.split("/")[1])


def test_the_batch_closes_at_exactly_the_number_of_informative_groups():
    engine = ScriptedEngine(random_script)
    batch = run(in_order(50), engine, sampler(prompts=6))
    assert len(batch.groups) == 6
    assert batch.shortfall == 0
    assert all(0 < group.num_correct < group.size == 4 for group in batch.groups)
    assert_account_adds_up(batch, engine)


def test_groups_are_accepted_in_the_order_of_submission_whichever_finishes_first():
    later_is_faster = ScriptedEngine(
        random_script, delay=lambda request: 500 - int(request.id.split("/")[1])
    )
    batch = run(in_order(50), later_is_faster, sampler())
    group_ids = [group.id for group in batch.groups]
    assert group_ids == sorted(group_ids)
    slow_and_ordered = ScriptedEngine(random_script, slots=1)
    assert run(in_order(50), slow_and_ordered, sampler()).groups == batch.groups


def test_an_engine_that_finishes_short_answers_first_trains_on_the_same_lengths():
    def lengths(engine: ScriptedEngine) -> list[int]:
        stream = in_order(200)
        chosen = sampler(prompts=20, bound=200)
        return [
            len(g.token_ids)
            for s in (1, 2, 3)
            for group in run(stream, engine, chosen, step=s).groups
            for g in group.generations
        ]

    short_first = lengths(ScriptedEngine(random_script))  # a token takes a poll
    assert short_first == lengths(ScriptedEngine(random_script, slots=4, delay=lambda request: 1))
    assert len(short_first) == 3 * 20 * 4


@settings(max_examples=60)
@given(
    slots=st.integers(1, 64),
    delays=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    size=st.integers(5, 60),
    prompts=st.integers(1, 6),
)
def test_what_is_trained_never_depends_on_timing_or_on_how_much_was_in_flight(
    slots, delays, size, prompts
):
    def steps(engine: ScriptedEngine) -> list[tuple[Group, ...]]:
        stream = in_order(size)
        chosen = sampler(prompts=prompts, bound=60)
        batches = []
        for step in range(1, 5):
            batch = run(stream, engine, chosen, step=step)
            decided = [group for group, outcome in batch.judged if outcome != "excess"]
            # the stream stands right after the last decided problem
            assert stream.position == decided[-1].id + 1
            batches.append(batch.groups)
        return batches

    jittery = ScriptedEngine(
        random_script, slots=slots, delay=lambda r: delays[r.seed % len(delays)]
    )
    assert steps(jittery) == steps(ScriptedEngine(random_script, slots=1))


def test_an_excess_group_is_dropped_and_counted_and_its_problem_sampled_again():
    mixed = by_group(lambda problem: "rwrw")
    engine = ScriptedEngine(mixed)
    chosen = sampler(prompts=2)
    # a low keep rate: eight are put in flight for two
    chosen.load_state_dict({"kept": 1.0, "decided": 4.0})
    stream = in_order(30)
    batch = run(stream, engine, chosen)
    assert len(engine.submitted) == 8 * 4
    assert [group.id for group in batch.groups] == [0, 1]
    assert batch.group_counts["excess"] + batch.group_counts["aborted"] > 0
    assert stream.position == 2
    again = run(stream, ScriptedEngine(mixed), sampler(prompts=2), step=2)
    assert [group.id for group in again.groups] == [2, 3]


def test_all_wrong_and_all_correct_groups_are_dropped_and_a_lone_winner_keeps_its_losers():
    kinds = {0: "wwww", 1: "rrrr", 2: "rwww"}
    batch = run(in_order(30), ScriptedEngine(by_group(lambda p: kinds[p % 3])), sampler(prompts=3))
    assert [group.num_correct for group in batch.groups] == [1, 1, 1]
    decided = [outcome for _, outcome in batch.judged if outcome != "excess"]
    assert decided.count("all_wrong") == batch.group_counts["all_wrong"] > 0
    assert decided.count("all_correct") == batch.group_counts["all_correct"] > 0


def test_the_same_prompt_twice_in_a_batch_is_two_groups():
    one = ProblemStream(problems(1), seed=0)
    batch = run(one, ScriptedEngine(random_script_mixed), sampler(prompts=3))
    assert [group.problem.id for group in batch.groups] == ["0", "0", "0"]
    assert len({group.id for group in batch.groups}) == 3
    assert all(group.size == 4 for group in batch.groups)


def random_script_mixed(request: GenerationRequest) -> tuple[list[int], str]:
    return [RIGHT if keyed_uniforms(request.seed, 1)[0] < 0.5 else WRONG, END], "stop"


def test_an_epoch_that_ends_in_the_middle_of_a_batch_loses_and_repeats_nothing():
    stream = in_order(7)
    everything = by_group(lambda problem: "rwrw")
    seen = [
        group.problem.id
        for step in range(1, 8)
        for group in run(stream, ScriptedEngine(everything), sampler(prompts=3), step=step).groups
    ]
    assert len(seen) == 21  # three epochs of seven
    for epoch in range(3):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == list("0123456")


def test_an_impossible_data_set_reaches_the_bound_and_says_why():
    engine = ScriptedEngine(by_group(lambda problem: "wwww" if problem % 2 else "rrrr"))
    batch = run(in_order(100), engine, sampler(prompts=4, bound=10))
    assert batch.groups == ()
    assert (batch.group_counts["all_wrong"] + batch.group_counts["all_correct"]) == 10
    assert len(engine.submitted) == 40
    assert_account_adds_up(batch, engine)
    with pytest.raises(
        ShortfallError,
        match=r"^step 1: nothing to learn from, in 10 groups: \d all wrong, \d all correct\n",
    ):
        require_groups(batch)


def test_a_short_batch_trains():
    engine = ScriptedEngine(by_group(lambda problem: "rwrw" if problem % 4 == 0 else "wwww"))
    batch = run(in_order(40), engine, sampler(prompts=40, bound=40))
    assert len(batch.groups) == 10
    assert batch.shortfall == 30
    require_groups(batch)
    assert (
        describe_short_batch(batch)
        == "10 of the 40 groups wanted to learn from, in 40 groups: 30 all wrong"
    )


@pytest.mark.parametrize(
    ("marks", "found", "advice"),
    [
        ("wwww", "8 all wrong", "Read the responses in rollouts/"),
        (
            "wwww",
            "8 all wrong",
            "too hard, mix in problems that the model solves at times, data.train={mix: {easy:",
        ),
        (
            "rrrr",
            "8 all correct",
            "the reward accepts too much: dapo test f --data d.jsonl shows",
        ),
    ],
)
def test_where_nothing_can_be_learned_the_cause_comes_first_and_then_what_to_do(
    marks, found, advice
):
    batch = run(
        in_order(20), ScriptedEngine(by_group(lambda problem: marks)), sampler(prompts=2, bound=8)
    )
    with pytest.raises(ShortfallError) as error:
        require_groups(batch, reward_test="dapo test f --data d.jsonl")
    first, second = str(error.value).split("\n")
    assert first.startswith(f"step 1: nothing to learn from, in 8 groups: {found}")
    assert advice in second


def test_where_most_responses_have_no_verdict_the_error_is_about_these():
    batch = run(
        in_order(20), ScriptedEngine(by_group(lambda problem: "eeee")), sampler(prompts=2, bound=8)
    )
    with pytest.raises(VerifierFailed) as error:
        require_groups(batch, reward_test="dapo test f --data d.jsonl")
    first, second = str(error.value).split("\n")
    assert first.startswith(
        "step 1: 32 of the 32 responses judged have no verdict. 32 times: timed"
    )
    assert second.startswith("Correct the verifier or the references (dapo test f --data d.jsonl")


def equal_correctness(correct: bool, *, deciders: tuple[str, ...] = ()) -> Batch:
    """Two groups that are dropped as all right or all wrong; the scores of the second differ."""
    outcome: Outcome = "all_correct" if correct else "all_wrong"
    judged = []
    for number, scores in enumerate([(0.0, 0.0), (0.0, 1.0)]):
        verdicts = tuple(Verdict(correct, score, deciders=deciders) for score in scores)
        generations = (Generation("0", (1,), (-1.0,), "stop", 0),) * len(scores)
        group = Group(Problem(str(number), "Q", ""), (1,), generations, verdicts, number)
        judged.append((group, outcome))
    counts = {outcome: 2}
    return Batch((), tuple(judged), counts, counts, shortfall=2, epoch=0, prediction=None)


@for_each_row(
    ("correct", "deciders", "options", "who"),
    [
        (False, ("f_0123abcd:exact",), (), "`exact` says right or wrong"),
        (False, ("math",), (), "`math` says right or wrong"),
        (
            True,
            (),
            ("reward.verifier=my:verl",),
            "`my:verl` says right or wrong",
        ),
        (
            False,
            (),
            ("environment=environment_0123abcd:Game", "reward.verifier=environment"),
            "`Game` says `correct`",
        ),
        (
            False,
            (),
            ("reward.verifier=my:score", "reward.threshold=2"),
            "reward.threshold=2 says right or wrong",
        ),
    ],
)
def test_groups_that_are_dropped_although_their_scores_differ_are_counted_with_who_decides(
    correct, deciders, options, who
):
    config = tiny(*options)
    with pytest.raises(ShortfallError) as error:
        require_groups(equal_correctness(correct, deciders=deciders), config=config)
    advice = str(error.value).split("\n")[1]
    word = "correct" if correct else "wrong"
    assert advice.startswith(f"In 1 of the 2 groups all {word} the scores differ, but {who}, and")
    assert advice.endswith(". To learn from the scores, set dynamic_sampling.metric=score")


def test_a_combined_verdict_names_which_of_several_verifiers_decide():
    spec = RewardSpec.of({"exact": 1.0, "digits": 0.2})
    combined = spec.combine([Verdict(False, -1.0), Verdict(None, 3.0)])
    assert (combined.correct, combined.deciders) == (False, ("exact",))
    assert spec.combine([Verdict(None, 1.0), Verdict(None, 3.0)]).deciders == ()
    assert RewardSpec.of("exact").combine([Verdict(True, 1.0)]).deciders == ()


def test_after_training_all_correct_is_solved_and_all_wrong_is_tolerated_twice():
    def searched(marks):
        return run(
            in_order(20),
            ScriptedEngine(by_group(lambda problem: marks)),
            sampler(prompts=2, bound=8),
        )

    with pytest.raises(
        ProblemsSolved, match=r"^all 8 groups of step 5 are all correct: .* ends after step 4$"
    ):
        require_groups(searched("rrrr"), step=5)
    for empty_steps in range(MAX_EMPTY_STEPS - 1):
        require_groups(searched("wwww"), step=5, empty_steps=empty_steps)
    with pytest.raises(
        ShortfallError, match="step 5: nothing to learn from, in 8 groups: 8 all wrong"
    ) as error:
        require_groups(searched("wwww"), step=5, empty_steps=MAX_EMPTY_STEPS - 1)
    assert not isinstance(error.value, ProblemsSolved)


def test_verdicts_with_an_error_do_not_count_and_a_group_of_them_is_invalid():
    kinds = {0: "eeee", 1: "eeer", 2: "eerr", 3: "eerw"}
    engine = ScriptedEngine(by_group(lambda problem: kinds[problem % 4]))
    batch = run(in_order(40), engine, sampler(prompts=2))
    assert [(group.num_correct, group.num_errors) for group in batch.groups] == [(1, 2), (1, 2)]
    outcomes = {group.problem.id: outcome for group, outcome in batch.judged if outcome != "excess"}
    expected = {"0": "invalid", "1": "invalid", "2": "all_correct", "3": "trained"}
    assert all(outcome == expected[str(int(problem) % 4)] for problem, outcome in outcomes.items())
    assert_account_adds_up(batch, engine)


def test_only_verifier_errors_are_named_as_the_cause():
    batch = run(
        in_order(9), ScriptedEngine(by_group(lambda problem: "eeee")), sampler(prompts=1, bound=3)
    )
    assert (
        describe_short_batch(batch)
        == "nothing to learn from, in 3 groups: 3 with fewer than two verdicts (12 verifier errors,"
        " most often: timed out after 1 s)"
    )


def test_without_dynamic_sampling_every_valid_group_trains():
    engine = ScriptedEngine(by_group(lambda problem: ["wwww", "rrrr", "rwww", "eeee"][problem % 4]))
    batch = run(in_order(40), engine, sampler(prompts=6, enabled=False))
    assert [outcome for _, outcome in batch.judged if outcome == "trained"] == ["trained"] * 6
    assert {group.num_correct for group in batch.groups} <= {0, 1, 4}
    assert batch.group_counts["all_wrong"] == batch.group_counts["all_correct"] == 0


def test_a_users_filter_decides_instead_of_equation_11():
    engine = ScriptedEngine(by_group(lambda problem: "rrrr" if problem % 2 else "rwww"))
    batch = run(in_order(40), engine, sampler(prompts=3, keep=lambda group: group.num_correct == 4))
    assert [group.num_correct for group in batch.groups] == [4, 4, 4]
    assert batch.group_counts["filtered"] > 0
    with pytest.raises(RewardError, match=r"dynamic_sampling.filter must return a bool, got 4"):
        run(in_order(4), ScriptedEngine(random_script), sampler(keep=lambda group: group.size))
    with pytest.raises(
        RewardError, match=r"dynamic_sampling.filter raised ZeroDivisionError: division by zero"
    ):
        run(in_order(4), ScriptedEngine(random_script), sampler(keep=lambda group: bool(1 / 0)))


def test_thresholds_on_scores_apply_in_addition_to_equation_11():
    """`rwww` has mean -0.5, `rrww` 0: the threshold refuses the first, Eq. 11 the uniform ones."""
    marks = ("rwww", "rrww", "wwww", "rrrr")
    engine = ScriptedEngine(by_group(lambda problem: marks[problem % 4]))
    batch = run(in_order(40), engine, sampler(prompts=3, rule=SignalRule(mean_above=-0.5)))
    assert [group.num_correct for group in batch.groups] == [2, 2, 2]
    outcomes = {
        group.num_correct: outcome for group, outcome in batch.judged if outcome != "excess"
    }
    assert outcomes == {0: "all_wrong", 1: "filtered", 2: "trained", 4: "all_correct"}


def test_how_many_are_in_flight_follows_the_shortfall_and_the_keep_rate():
    chosen = sampler(prompts=8)
    assert chosen.in_flight_target(8) == 8  # nothing is known yet: no group in vain
    all_wrong = Group(problems(1)[0], (0,), (), (Verdict(False, -1.0),) * 4)
    informative = Group(problems(1)[0], (0,), (), (Verdict(False, -1.0), Verdict(True, 1.0)))
    for _ in range(100):
        chosen.outcome(all_wrong)
        chosen.outcome(informative)
    assert chosen.in_flight_target(8) == pytest.approx(16, abs=1)
    assert chosen.in_flight_target(1) in (2, 3)
    copy = sampler(prompts=8)
    copy.load_state_dict(chosen.state_dict())
    assert copy.in_flight_target(1000) == chosen.in_flight_target(1000)


class UnknownRequestEngine(ScriptedEngine):
    """Answers a request that nobody made."""

    def poll(self) -> list[Generation]:
        return [Generation("nobody", (END,), (-1.0,), "stop", 0)]


def test_an_answer_to_an_unknown_request_is_an_engine_error():
    with pytest.raises(
        EngineError, match="the engine answered request 'nobody', which is not in flight"
    ):
        run(
            in_order(4),
            CheckedEngine(UnknownRequestEngine(random_script), vocabulary=10**6),
            sampler(),
        )


def test_every_request_is_sampled_as_the_plan_says_with_a_seed_of_its_own():
    stop_ids = (END, FILL + 1, FILL + 2)
    chosen = SamplingPlan(4, 9, temperature=0.7, stop_ids=stop_ids, seed=0)
    seeds = []
    for step in (1, 2, 1):
        engine = ScriptedEngine(random_script)
        collect(
            Sampling(in_order(50), engine, FakeJudge(), sampler(), FakeEncoder(), chosen), step=step
        )
        asked = {
            (r.temperature, r.top_p, tuple(r.stop_ids), r.max_new_tokens) for r in engine.submitted
        }
        assert asked == {(0.7, 1.0, stop_ids, 9)}
        seeds.append({request.id.split("/", 1)[1]: request.seed for request in engine.submitted})
    first, second, again = seeds
    assert len(set(first.values())) == len(first) >= 16, "distinct over problems and samples"
    assert not set(first.values()) & set(second.values()), "and over steps"
    assert again == first


class CountingEngine(ScriptedEngine):
    """Counts the tokens of all that it returns."""

    tokens = 0

    def poll(self) -> list[Generation]:
        return self._count(super().poll())

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        return self._count(super().abort(request_ids))

    def _count(self, generations: list[Generation]) -> list[Generation]:
        self.tokens += sum(len(generation.token_ids) for generation in generations)
        return generations


def test_all_tokens_of_the_engine_are_in_the_account_and_responses_at_their_index():
    aborted = 0
    for seed in range(5):
        engine = CountingEngine(random_script, slots=6)
        batch = collect(
            Sampling(
                ProblemStream(problems(50), seed=seed),
                engine,
                FakeJudge(),
                sampler(bound=100),
                FakeEncoder(),
                plan(),
            ),
            step=1,
        )
        assert batch.num_generated_tokens == engine.tokens
        aborted += batch.token_counts["aborted"]
        for group, _ in batch.judged:
            assert [g.request_id.split("/")[-1] for g in group.generations] == ["0", "1", "2", "3"]
    assert aborted > 0, "some of these batches close with groups in flight"


def test_a_least_response_length_reaches_every_request():
    engine = ScriptedEngine(random_script)
    least = replace(plan(limit=9), min_response_tokens=7)
    collect(Sampling(in_order(50), engine, FakeJudge(), sampler(), FakeEncoder(), least), step=1)
    assert {(r.min_new_tokens, r.max_new_tokens) for r in engine.submitted} == {(7, 9)}


def error_fraction(fraction: float) -> Callable[[GenerationRequest], tuple[list[int], str]]:
    """Of each group of four, the first responses cannot be judged."""
    return by_group(lambda problem: ("e" * round(4 * fraction) + "rwrw")[:4])


def test_more_errors_than_allowed_over_the_window_end_the_run_with_causes_and_an_example():
    chosen = sampler(prompts=100, bound=100, max_error_rate=0.4)
    stream = in_order(100)
    with pytest.raises(VerifierFailed) as caught:
        run(stream, ScriptedEngine(error_fraction(0.5)), chosen)
    assert str(caught.value).startswith(
        "128 of the last 256 judged responses have no verdict, more than the 40% that a run"
        " accepts. 128 times: timed out after 1 s. For example problem "
    )
    assert str(caught.value).endswith(
        "Correct the verifier or the references (dapo test VERIFIER --data DATA shows its"
        " verdicts), and continue"
    )


def test_a_run_stops_after_the_first_few_groups_where_none_of_their_responses_has_a_verdict():
    engine = ScriptedEngine(error_fraction(1.0))
    with pytest.raises(
        VerifierFailed,
        match=r"^none of the 32 responses judged last has a verdict. 32 times: timed out",
    ):
        run(in_order(100), engine, sampler(prompts=4, bound=100, max_error_rate=0.5))
    assert len(engine.submitted) < 200


def test_as_many_errors_as_allowed_do_not_end_the_run():
    chosen = sampler(prompts=100, bound=100, max_error_rate=0.5)
    assert len(run(in_order(100), ScriptedEngine(error_fraction(0.5)), chosen).groups) == 100


def test_the_window_holds_the_last_responses_only_and_is_part_of_the_state():
    def group(*verdicts: Verdict) -> Group:
        return Group(problems(1)[0], (0,), (), verdicts, texts=("a",) * len(verdicts))

    good = Verdict(True, 1.0)
    bad = Verdict(None, 0.0, "exact: the reference 'x1' is empty")
    chosen = sampler(max_error_rate=0.25)
    for _ in range(100):
        chosen.outcome(group(good, good, good))  # 300 good ones
    for _ in range(32):
        chosen.outcome(group(bad, bad))  # 64 of the last 256: not more than a quarter
    restored = sampler(max_error_rate=0.25)
    restored.load_state_dict(json.loads(json.dumps(chosen.state_dict())))
    for each in (chosen, restored):
        with pytest.raises(
            VerifierFailed,
            match=r"^65 of the last 256 judged .* 65 times: exact: the reference 'x1'",
        ):
            each.outcome(group(bad, good))


def test_causes_that_differ_in_a_number_or_a_quotation_are_one_and_three_are_named():
    errors = [f"math: the reference '{i}' cannot be read" for i in range(100)]
    errors += (
        ["timed out after 1 s"] * 80
        + ["the worker process exited with code 3"] * 50
        + ["rare"] * 26
    )
    window = RollingErrorRate(0.9)
    with pytest.raises(VerifierFailed) as caught:
        window.add("p7", ["what it said"] * 256, [Verdict(None, 0.0, error) for error in errors])
    assert (
        "100 times: math: the reference '99' cannot be read; 80 times: timed out after 1 s; 50"
        " times: the worker process exited with code 3. For example problem p7, response 'what it"
        " said'." in str(caught.value)
    )
    assert "rare" not in str(caught.value)
