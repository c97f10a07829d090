"""Laws of shared beginnings: each distinct one is computed once, and each token is predicted by the
one before it.
"""

from hypothesis import given, settings
from hypothesis import strategies as st

from dapo.policy.packing import (
    Microbatch,
    RankMicrobatch,
    pack_microbatch,
    partition,
)
from dapo.policy.prefixes import HEAD_TOKENS, sorted_prefixes, token_array
from dapo.types import Sample
from helpers.tiny_policies import branching, ids, sample

TOKENS = st.lists(st.sampled_from([0, 1, 300]), min_size=1, max_size=6).map(tuple)
GROUPS = st.lists(
    st.tuples(TOKENS, st.lists(TOKENS, min_size=1, max_size=5)), min_size=1, max_size=4
)
"""The prompt of each group with its responses, over so few tokens that many begin alike."""


def samples_of(groups: list[tuple[tuple[int, ...], list[tuple[int, ...]]]]) -> list[Sample]:
    return [
        sample(g, prompt, response)
        for g, (prompt, responses) in enumerate(groups)
        for response in responses
    ]


def packed(samples: list[Sample]) -> Microbatch:
    count = len(samples)
    return pack_microbatch(
        RankMicrobatch(tuple(range(count)), tuple(samples), (0.0,) * count), "cpu"
    )


def beginnings(samples: list[Sample]) -> set[tuple[int, ...]]:
    """The distinct ones of all sequences, without each one's last token, which predicts nothing."""
    whole = [(*each.prompt_ids, *each.response_ids) for each in samples]
    return {ids[: end + 1] for ids in whole for end in range(len(ids) - 1)}


@settings(max_examples=200)
@given(groups=GROUPS)
def test_every_distinct_beginning_is_computed_once(
    groups: list[tuple[tuple[int, ...], list[tuple[int, ...]]]],
) -> None:
    samples = samples_of(groups)
    microbatch = packed(samples)
    ids = microbatch.input_ids.tolist()
    found: list[tuple[int, ...]] = [()] * microbatch.num_tokens
    for segment in microbatch.attention_plan.segments:
        path = [ids[k] for k in segment.keys]
        for at in range(segment.context_length, len(path)):
            found[segment.keys[at]] = tuple(path[: at + 1])
    assert len(set(found)) == len(found)
    assert set(found) == beginnings(samples)
    assert microbatch.positions.tolist() == [len(beginning) - 1 for beginning in found]


@settings(max_examples=200)
@given(groups=GROUPS)
def test_each_beginning_that_predicts_is_scored_once_and_every_response_token_is_there(
    groups: list[tuple[tuple[int, ...], list[tuple[int, ...]]]],
) -> None:
    samples = samples_of(groups)
    microbatch = packed(samples)
    ids = microbatch.input_ids.tolist()
    beginning_at = {
        int(segment.keys[at]): tuple(ids[k] for k in segment.keys[: at + 1])
        for segment in microbatch.attention_plan.segments
        for at in range(len(segment.keys))
    }
    predictors = microbatch.predictors.tolist()
    targets = microbatch.targets.tolist()
    found = [
        (beginning_at[predictors[row]], y)
        for row, y in zip(microbatch.rows.tolist(), targets, strict=True)
    ]
    expected = [
        ((*each.prompt_ids, *each.response_ids[:t]), token)
        for each in samples
        for t, token in enumerate(each.response_ids)
    ]
    assert [expected[number] for number in microbatch.order] == found
    assert sorted(microbatch.order) == list(range(len(expected)))
    assert len(predictors) == len({beginning for beginning, _ in expected})
    for row in range(len(predictors)):
        of_row = microbatch.target_slice(slice(row, row + 1))
        assert microbatch.rows.tolist()[of_row] == [row] * (of_row.stop - of_row.start)


@settings(max_examples=200)
@given(
    sequences=st.lists(TOKENS, min_size=1, max_size=8),
    beginning=st.sampled_from([0, HEAD_TOKENS - 1, HEAD_TOKENS, 2 * HEAD_TOKENS]),
)
def test_no_earlier_sequence_shares_more_than_the_one_before(
    sequences: list[tuple[int, ...]], beginning: int
) -> None:
    sequences = [(1,) * beginning + each for each in sequences]
    found = sorted_prefixes([token_array(each) for each in sequences])
    in_order = [sequences[i] for i in found.order]
    assert in_order == sorted(sequences)
    for k, shared in enumerate(found.shared):
        assert shared == max((common(in_order[k], earlier) for earlier in in_order[:k]), default=0)


def common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


@settings(max_examples=100)
@given(groups=GROUPS, ranks=st.integers(1, 3), max_tokens=st.integers(1, 30))
def test_a_pass_computes_no_more_than_its_tokens_unless_one_sequence_is_longer(
    groups: list[tuple[tuple[int, ...], list[tuple[int, ...]]]], ranks: int, max_tokens: int
) -> None:
    for passes in partition(samples_of(groups), ranks=ranks, max_tokens=max_tokens):
        for each in passes:
            assert len(beginnings(list(each.samples))) <= max_tokens or len(each.samples) == 1


def test_a_microbatch_holds_more_responses_that_begin_alike_and_a_cut_leaves_them_together() -> (
    None
):
    """Two kinds of 20 tokens, each four times with another end, in turns: 10 + 20 + 3 x 8 tokens
    each.
    """
    starts = ids(18, "a"), ids(18, "b")
    samples = [sample(0, ids(10), (*starts[i % 2], i, 3)) for i in range(8)]
    (passes,) = partition(samples, ranks=1, max_tokens=54)
    assert sorted(sorted(each.indices) for each in passes) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    for own in partition(samples, ranks=2, max_tokens=54):
        assert [sorted(each.indices) for each in own] in ([[0, 2, 4, 6]], [[1, 3, 5, 7]])
    different = [sample(0, ids(10), ids(20, i)) for i in range(8)]
    (passes,) = partition(different, ranks=1, max_tokens=54)
    assert [len(each.indices) for each in passes] == [2, 2, 2, 2]


def test_a_repeated_response_adds_no_position_and_no_keys() -> None:
    samples = [sample(0, (1, 2), (3, 4, 5))] * 50
    microbatch = packed(samples)
    assert microbatch.num_tokens == 4
    assert microbatch.separate_tokens == 2 + 50 * 2
    assert [len(segment.keys) for segment in microbatch.attention_plan.segments] == [4]
    (passes,) = partition(samples, ranks=1, max_tokens=5)
    assert [len(each.indices) for each in passes] == [50]


def test_the_example_of_the_other_tests_shares_more_than_half() -> None:
    microbatch = packed(branching())
    assert microbatch.num_tokens == len(beginnings(branching()))
    assert microbatch.num_tokens < 0.5 * microbatch.separate_tokens
