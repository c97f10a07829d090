"""The controller's simulation: token counts, bytes and lengths are exact, and what is fitted is
linear.
"""

import json
import pickle
from dataclasses import replace

import pytest

# the benchmarks are not part of the package: they are run from the repository's root
from benchmarks import simulate
from benchmarks.async_simulation import MINIBATCHES, SimulatedUpdates
from benchmarks.controller_simulation import byte_tokenizer
from benchmarks.simulate import Size
from benchmarks.simulation_fakes import Clock, LengthDistribution, Texts

SMALL = Size(
    prompts=8,
    steps=2,
    median_tokens=60.0,
    limit=200,
    group_size=4,
    minibatch_groups=2,
    tokenizer="bytes",
    ranks=2,
)


@pytest.fixture(scope="module")
def found() -> dict:
    return simulate.simulate(SMALL)


def test_a_step_of_the_simulation_is_a_step_of_the_paper_in_small(found):
    for step in found["steps"]:
        assert 0.15 < step["keep_rate"] < 0.7  # a third of the problems carry a signal
        assert step["groups"] >= 8
        assert 0 < step["tokens_trained"] < step["tokens"]
        assert 0 < step["truncated"] < 0.3
    assert len(found["steps"]) == 2
    assert 0 < found["start_bytes"] <= found["peak_bytes"]
    assert 0 < found["ranks_start_bytes"] <= found["ranks_peak_bytes"]


def test_every_token_crosses_once_at_eight_bytes_and_little_more(found):
    for step in found["steps"]:
        payload = 8 * step["tokens"]  # a token id and a log-probability, four bytes each
        responses = step["groups"] * 4
        assert (
            payload
            < step["moved_bytes"]["engines to controller"]
            < payload + 500 * (responses + 64)
        )


def test_every_trained_token_goes_to_the_ranks_once_at_eight_bytes(found):
    for step in found["steps"]:
        # id, log-probability; masks of ones are but their lengths
        payload = (4 + 4) * step["tokens_trained"]
        prompts_and_headers = 8 * 4 * (8 * 120 + 600)
        assert (
            payload < step["moved_bytes"]["controller to trainer"] < payload + prompts_and_headers
        )


def test_a_second_simulation_makes_and_moves_the_same_also_with_shared_rows(found):
    shared = simulate.simulate(replace(SMALL, shared_rows=True))
    for one, other in zip(found["steps"], shared["steps"], strict=True):
        for name in ("groups", "tokens", "tokens_trained", "keep_rate"):
            assert one[name] == other[name]
        # rows that are shared begin alike, so the ranks' passes differ, and with them the columns
        # of what travels
        for name in ("engines to controller", "controller to trainer"):
            assert one["moved_bytes"][name] == pytest.approx(other["moved_bytes"][name], rel=0.05)


def test_parts_of_the_controllers_time_add_up_to_it(found):
    for step in found["steps"]:
        assert sum(step["by_part_s"].values()) == pytest.approx(step["controller_s"], abs=0.001)
        assert 0 < step["after_last_response_s"] <= step["controller_s"]
        assert len(step["by_part_s"]) == 11
        assert step["until_first_logprob_s"] > 0
        assert 0 < sum(step["until_scored_by_part_s"].values()) <= step["after_last_response_s"]


def test_lengths_are_a_function_of_the_seed_with_a_tail_at_the_limit():
    distribution = LengthDistribution(limit=20480, median=5000.0)
    lengths = [distribution.length(seed) for seed in range(3000)]
    assert lengths == [distribution.length(seed) for seed in range(3000)]
    assert 4000 < sum(lengths) / len(lengths) < 8000
    assert 0.03 < sum(length == 20480 for length in lengths) / len(lengths) < 0.10
    assert min(lengths) > 0


def test_a_response_ends_with_the_end_token_unless_the_limit_cuts_it():
    texts = Texts(byte_tokenizer(), 256, pool_tokens=5000)
    ended, finish = texts.response(11, 50, 100)
    assert (len(ended), ended[-1], finish) == (50, 256, "stop")
    cut, finish = texts.response(11, 100, 100)
    assert (len(cut), 256 in cut, finish) == (100, False, "length")
    assert cut[:49] == ended[:49]
    assert len(pickle.dumps(cut)) < 4 * 100 + 300


def test_a_clock_books_what_runs_inside_for_itself_alone():
    clock = Clock()
    with clock.inside("a"), clock.inside("engine's own"):
        pass
    clock.now("b")
    assert clock.own() == pytest.approx(sum(clock.spent.values()) - clock.spent["engine's own"])
    assert set(clock.spent) == {"metrics, log, checkpoint", "a", "engine's own", "b"}


def run_of(prompts: int, seconds: float, grown: float) -> dict:
    step = {
        "tokens": prompts * 1000,
        "controller_s": seconds,
        "groups": 3 * prompts,
        "until_first_logprob_s": seconds,
    }
    size = {"prompts": prompts, "group_size": 16, "shared_rows": False, "ranks": 8}
    memory = {
        "start_bytes": 10**9,
        "peak_bytes": 10**9 + grown,
        "ranks_start_bytes": 2e9,
        "ranks_peak_bytes": 2.5e9,
    }
    return {"size": size, "steps": [step] * 3} | memory


def test_growth_is_linear_where_ten_times_the_tokens_take_ten_times_as_much():
    runs = [run_of(64, 0.2, 1e9), run_of(640, 2.0, 1e10)]
    assert simulate.exponent(runs, "controller_s") == pytest.approx(1.0)
    assert simulate.exponent(runs, "memory") == pytest.approx(1.0)
    assert simulate.exponent([runs[0], run_of(640, 20.0, 1e10)], "controller_s") == pytest.approx(
        2.0
    )


def test_peak_memory_is_expected_from_what_the_largest_run_took_above_its_start():
    assert simulate.predicted_bytes([], Size(512)) is None
    assert simulate.predicted_bytes([run_of(64, 0.2, 1e9)], Size(640)) == pytest.approx(
        1e9 + 2e9 + 10 * 1.5e9
    )
    assert simulate.predicted_bytes([run_of(64, 0.2, 1e9)], Size(64, ranks=4)) == pytest.approx(
        1e9 + 1e9 + 1.5e9
    )
    assert simulate.predicted_bytes(
        [run_of(64, 0.2, 1e9), run_of(128, 0.4, 1.4e9)], Size(640)
    ) == pytest.approx(1e9 + 2e9 + 1.5e9 + 9 * 0.4e9)
    shared = simulate.predicted_bytes([run_of(64, 0.2, 1e9)], Size(5120, shared_rows=True))
    assert 10e9 < shared < 20e9  # of which the ranks hold 549 million tokens, at most twice
    assert "5,120 prompts" in simulate.expectation(Size(5120), None)
    assert simulate.expectation(Size(512), 1.5e10).endswith("and 8 ranks: about 15.0 GB")


def test_a_run_replaces_the_one_of_its_size_and_no_other():
    small = run_of(64, 0.2, 1e9)
    large = run_of(512, 1.0, 1e9)
    shared = run_of(64, 0.1, 0) | {"size": small["size"] | {"shared_rows": True}}
    again = run_of(64, 0.3, 1e9)
    assert simulate.with_run(simulate.with_run([small, shared], large), again) == [
        again,
        large,
        shared,
    ]


def test_the_tables_of_the_document_are_those_of_the_committed_results():
    runs = json.loads(simulate.RESULTS.read_text(encoding="utf-8"))["runs"]
    _, tables, _ = simulate.DOCUMENT.read_text(encoding="utf-8").split(simulate.MARK)
    assert tables.strip() == simulate.markdown(runs)


@pytest.mark.parametrize(
    ("seconds", "grown", "meets"), [(0.4, 6e9, True), (0.6, 6e9, False), (0.4, 7.5e9, False)]
)
def test_targets_are_those_of_the_papers_size_alone(seconds: float, grown: float, meets: bool):
    assert simulate.meets_targets([run_of(64, 9.0, 1e9), run_of(512, seconds, grown)]) is meets


def test_updates_wait_for_the_batch_or_early_for_their_minibatch():
    accepted_at = [float(i) for i in range(MINIBATCHES)]
    late = SimulatedUpdates(16.0, early=False)
    early = SimulatedUpdates(16.0, early=True)
    for updates in (late, early):
        updates.make(accepted_at, 20.0)
        updates.make([time + 20.0 for time in accepted_at], 40.0)
    assert late.ended_at == [36.0, 56.0]
    assert early.ended_at == [16.0, 36.0]
    # before the first steps there is nothing to wait for
    assert late.end_of(-2) == 36.0
    assert SimulatedUpdates(1.0, early=True).end_of(-1) == 0.0
