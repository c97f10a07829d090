"""The stream: every problem once per epoch, rewinding to any position, two integers of state."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.core.errors import CheckpointError, DataError
from dapo.core.rng import keyed_permutation
from dapo.data.stream import ProblemStream
from dapo.types import Problem

PROBLEMS = [Problem(str(n), f"q{n}", "a") for n in range(7)]


def take(stream, count):
    return [stream.take() for _ in range(count)]


def test_an_epoch_is_the_keyed_permutation_of_the_problems():
    taken = take(ProblemStream(PROBLEMS, seed=3), 14)
    expected = [*keyed_permutation(7, 3, "epoch", 0), *keyed_permutation(7, 3, "epoch", 1)]
    assert taken == [(position, PROBLEMS[index]) for position, index in enumerate(expected)]


def test_every_epoch_meets_every_problem_once_and_epochs_differ_in_order():
    ids = [problem.id for _, problem in take(ProblemStream(PROBLEMS, seed=0), 70)]
    epochs = [tuple(ids[start : start + 7]) for start in range(0, 70, 7)]
    assert all(sorted(epoch) == list("0123456") for epoch in epochs)
    assert len(set(epochs)) > 1


def test_another_seed_is_another_order():
    orders = {
        tuple(p.id for _, p in take(ProblemStream(PROBLEMS, seed=seed), 7)) for seed in range(5)
    }
    assert len(orders) > 1


def test_position_and_epoch_are_those_of_the_next_problem():
    stream = ProblemStream(PROBLEMS, seed=0)
    assert (len(stream), stream.position, stream.epoch) == (7, 0, 0)
    take(stream, 6)
    assert (stream.position, stream.epoch) == (6, 0)
    stream.take()
    assert (stream.position, stream.epoch) == (7, 1)


@given(
    batches=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=30),
    seed=st.integers(0, 5),
)
def test_after_a_rewind_no_problem_is_lost_and_none_is_repeated(batches, seed):
    stream = ProblemStream(PROBLEMS, seed=seed)
    used = []
    for count, excess in batches:
        taken = take(stream, count + excess)
        used += taken[:count]
        if excess:
            stream.rewind(taken[count][0])
    assert used == take(ProblemStream(PROBLEMS, seed=seed), len(used))
    assert max(Counter(p.id for _, p in used).values(), default=0) <= -(-len(used) // 7)


def test_a_batch_over_the_end_of_an_epoch_can_go_back_across_it():
    stream = ProblemStream(PROBLEMS, seed=1)
    first = take(stream, 10)
    stream.rewind(5)
    assert stream.epoch == 0
    assert take(stream, 5) == first[5:]


@given(taken=st.integers(0, 40))
def test_a_stream_continues_from_its_state(taken):
    stream = ProblemStream(PROBLEMS, seed=2)
    resumed = ProblemStream(PROBLEMS, seed=2)
    take(stream, taken)
    state = stream.state_dict()
    assert state == {"epoch": taken // 7, "offset": taken % 7, "size": 7}
    resumed.load_state_dict({"epoch": state["epoch"], "offset": state["offset"]})
    assert take(resumed, 15) == take(stream, 15)


def test_data_that_has_changed_is_noticed():
    state = ProblemStream(PROBLEMS, seed=0).state_dict()
    with pytest.raises(CheckpointError) as caught:
        ProblemStream(PROBLEMS[:6], seed=0).load_state_dict(state)
    assert (
        str(caught.value)
        == "the checkpoint was made with 7 training problems, the data source now gives 6; "
        "resume with the data the run began with"
    )


@pytest.mark.parametrize(
    "state",
    [
        {"epoch": 0, "offset": 7},
        {"epoch": 0, "offset": -1},
        {"epoch": -1, "offset": 0},
        {"epoch": 1},
        {},
    ],
)
def test_a_state_outside_the_data_is_refused(state):
    stream = ProblemStream(PROBLEMS, seed=0)
    with pytest.raises(CheckpointError) as caught:
        stream.load_state_dict(state)
    assert (
        str(caught.value)
        == f"stream state {state}: expected epoch >= 0 and 0 <= offset < 7 problems; "
        "the checkpoint is damaged or belongs to other data"
    )
    assert stream.position == 0


def test_rewinding_to_a_position_that_was_not_reached_is_an_error():
    stream = ProblemStream(PROBLEMS, seed=0)
    take(stream, 3)
    stream.rewind(3)
    for position in (4, -1):
        with pytest.raises(ValueError, match=f"cannot rewind to {position}: the stream is at 3"):
            stream.rewind(position)


def test_a_stream_of_nothing_is_refused():
    with pytest.raises(DataError, match="there is no problem to train on"):
        ProblemStream([], seed=0)


def test_one_problem_comes_again_and_again():
    stream = ProblemStream(PROBLEMS[:1], seed=0)
    assert [(position, p.id) for position, p in take(stream, 3)] == [(0, "0"), (1, "0"), (2, "0")]
    assert stream.epoch == 3


def row(number, **fields):
    return Problem(str(number), f"q{number}", "a", fields=fields)


@pytest.mark.parametrize(
    ("order", "size"),
    [
        ("rate", lambda problem: problem.fields["rate"]),
        ("-rate", lambda problem: -problem.fields["rate"]),
        ("solution", lambda problem: len(problem.fields["solution"])),
    ],
)
def test_the_first_epoch_has_the_order_of_a_column_with_equal_ones_shuffled(order, size):
    rows = [row(i, rate=i % 3 / 2, solution="x" * (i % 4)) for i in range(24)]
    first = take(ProblemStream(rows, seed=1, order=order), 24)
    sizes = [size(problem) for _, problem in first]
    assert sizes == sorted(sizes)
    assert Counter(problem.id for _, problem in first) == Counter(str(i) for i in range(24))
    second = take(ProblemStream(rows, seed=2, order=order), 24)
    assert first != second
    assert sizes == [size(problem) for _, problem in second]


def test_epochs_after_the_first_are_shuffled_as_without_an_order():
    rows = [row(i, rate=i) for i in range(24)]
    ordered = take(ProblemStream(rows, seed=1, order="rate"), 72)
    assert ordered[24:] == take(ProblemStream(rows, seed=1), 72)[24:]


def test_an_order_by_a_column_that_a_problem_lacks_is_refused():
    rows = [row(0, rate=0.5), row(1, rate=True), row(2)]
    with pytest.raises(DataError, match=r"data.order=-rate: 2 of 3 problems have neither a number"):
        ProblemStream(rows, seed=1, order="-rate")
