"""Laws of a step's samples on the way to trainer ranks and between them: nothing is lost, and no
bit changes.
"""

import pickle
import threading
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dapo.distributed.channel import Buffers
from dapo.distributed.protocol import WorkerSpec
from dapo.distributed.rank_samples import (
    ALL,
    IDS,
    REMAINING_COLUMNS,
    NumberedPass,
    RankSamples,
    decode,
    encode,
    join,
    split,
)
from dapo.distributed.trainer_group import TrainerGroup
from dapo.policy.packing import DUMMY_MICROBATCH
from dapo.types import Sample
from helpers.tiny_policies import groups_of
from helpers.tiny_runs import tiny

SAMPLES = {
    4: Sample(7, (1, 2), (3, 4), 0.1, -1 / 3, (-0.1, -1 / 3), (-0.25, -1e-300), (True, False), 5),
    9: Sample(
        7,
        (1, 2),
        array("i", [5]),
        1.0,
        1 / 3,
        array("f", [-0.1]),
        array("d", [-1 / 7]),
        array("b", [1]),
    ),
    2: Sample(8, (2**31,), array("i"), 0.0, 0.0, (), array("f"), ()),
}


def plain(samples: dict[int, Sample]) -> dict[int, Sample]:
    """The samples with tuples for arrays, which are compared by value and not by type."""
    rows = {name: lambda row: None if row is None else tuple(row) for name in ALL}
    return {
        number: replace(sample, **{name: of(getattr(sample, name)) for name, of in rows.items()})
        for number, sample in samples.items()
    }


def test_samples_arrive_as_they_were_to_the_last_bit_also_in_one_message() -> None:
    for buffers in (encode(SAMPLES, ALL), split(join(encode(SAMPLES, ALL)))):
        found = decode(buffers)
        assert plain(found) == plain(SAMPLES)
        assert [found[9].engine_logprobs.format, found[9].old_logprobs.format] == ["f", "d"]  # type: ignore[union-attr]
        assert list(found) == [4, 9, 2]


def test_members_of_a_group_keep_their_own_prompts() -> None:
    """An agent writes its own prompts, and its branches begin behind different tokens."""
    prompts = ((1, 2), (1, 2, 30), (5,))
    samples = {
        number: replace(SAMPLES[4], prompt_ids=prompt) for number, prompt in enumerate(prompts)
    }
    assert tuple(sample.prompt_ids for sample in decode(encode(samples, ALL)).values()) == prompts


def test_a_prompt_that_members_share_travels_once() -> None:
    prompt = tuple(range(1000))
    samples = {number: replace(SAMPLES[4], prompt_ids=prompt) for number in range(3)}
    encoded = encode(samples, ALL)
    assert sum(part.nbytes == 8 * len(prompt) for part in encoded.parts) == 1
    found = decode(encoded)
    assert all(sample.prompt_ids is found[0].prompt_ids for sample in found.values())
    assert found[0].prompt_ids == prompt


def test_masks_of_equal_values_travel_as_their_lengths_and_others_as_they_are() -> None:
    rows = [(True,) * 1000, (True, False, True), (False,) * 500, (), (False, True)]
    samples = {
        number: replace(SAMPLES[4], mask=mask, response_ids=array("i", range(len(mask))))
        for number, mask in enumerate(rows)
    }
    encoded = encode(samples, (*IDS, "mask"))
    assert {number: tuple(sample.mask) for number, sample in decode(encoded).items()} == dict(
        enumerate(rows)
    )
    assert sum(part.nbytes for part in encoded.parts[-len(rows) :]) == 3 + 2


def test_what_scoring_does_not_need_may_come_later() -> None:
    rank = RankSamples(lambda messages: list(messages))
    unscored = {number: replace(sample, old_logprobs=None) for number, sample in SAMPLES.items()}
    rank.store(encode(unscored, IDS), first=0)
    [microbatch] = rank.microbatches([NumberedPass((9,), (0.5,))])
    assert (microbatch.samples[0].response_ids, microbatch.samples[0].mask) == (array("i", [5]), ())
    assert rank.microbatches([NumberedPass((), ())]) == [DUMMY_MICROBATCH]
    rank.set_old_logprobs({4: (-0.25, -1e-300), 9: array("d", [-1 / 7]), 2: array("f")})
    rank.add_columns(encode(unscored, REMAINING_COLUMNS))
    [microbatch] = rank.microbatches([NumberedPass((4, 9, 2), (1.0, 2.0, 3.0))])
    assert plain(dict(zip((4, 9, 2), microbatch.samples, strict=True))) == plain(SAMPLES)


def test_storing_replaces_the_samples_from_a_number_on_and_keeps_those_below_it() -> None:
    rank = RankSamples(lambda messages: list(messages))
    rank.store(encode(SAMPLES, ALL), first=0)
    rank.store(encode({10: SAMPLES[2], 11: SAMPLES[4]}, ALL), first=9)
    for number, kept in ((2, SAMPLES[2]), (4, SAMPLES[4]), (10, SAMPLES[2]), (11, SAMPLES[4])):
        [microbatch] = rank.microbatches([NumberedPass((number,), (1.0,))])
        assert plain({0: microbatch.samples[0]}) == plain({0: kept})
    with pytest.raises(KeyError):
        rank.microbatches([NumberedPass((9,), (1.0,))])


class Exchange:
    """Ranks in threads: every message waits until all ranks have sent theirs."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._sent: list[Sequence[bytes]] = [()] * ranks

    def of(self, rank: int) -> Any:
        def exchange(messages: Sequence[bytes]) -> list[bytes]:
            self._sent[rank] = messages
            self._barrier.wait()
            found = [row[rank] for row in self._sent]
            self._barrier.wait()
            return found

        return exchange


class ThreadRank:
    """A rank without a model: the log-probability of a token is its negative, and an update
    remembers what it got.
    """

    def __init__(self, name: str, exchange: Any) -> None:
        self.name = name
        self.samples = RankSamples(exchange)
        self.stored = 0
        self.updates = []
        self._thread = ThreadPoolExecutor(1)

    def call(self, method: str, /, *arguments: Any, **options: Any) -> "Future[Any]":
        own = pickle.loads(pickle.dumps(arguments, protocol=5))  # as between processes
        return self._thread.submit(getattr(self, method), *own, **options)

    def can_access(self, folder: Path) -> bool:
        return True

    def init_process_group(self, rendezvous: Any, *, timeout_s: float) -> None: ...

    def store(self, buffers: Buffers, *, first: int = 0) -> None:
        self.stored += 1
        self.samples.store(buffers, first=first)

    def score(self, buffers: Buffers, passes: Sequence[NumberedPass], *, is_first: bool) -> None:
        if is_first:
            self.store(buffers)
        else:
            self.samples.store(buffers, first=None)
        for each, microbatch in zip(passes, self.samples.microbatches(passes), strict=True):
            rows = [
                array("d", [-float(t) for t in sample.response_ids])
                for sample in microbatch.samples
            ]
            self.samples.set_old_logprobs(dict(zip(each.numbers, rows, strict=False)))

    def add_columns(self, buffers: Buffers) -> None:
        self.samples.add_columns(buffers)

    def update(
        self, passes: Sequence[NumberedPass], moved: Any, *, step: int
    ) -> tuple[dict[str, float], int]:
        if moved is not None:
            self.samples.move(moved)
        found = self.samples.microbatches(passes)
        self.updates.append(
            (moved, [s for m in found if m is not DUMMY_MICROBATCH for s in m.samples])
        )
        return {}, 0

    def kill(self) -> None: ...

    def close(self) -> None:
        self._thread.shutdown()


class ThreadLauncher:
    """Three of them."""

    nodes = ()

    def start(
        self, names: Sequence[str], specs: Sequence[WorkerSpec], *, together: bool = False
    ) -> list[ThreadRank]:
        exchange = Exchange(len(names))
        self.ranks = [ThreadRank(name, exchange.of(i)) for i, name in enumerate(names)]
        return self.ranks


def test_the_first_groups_are_on_their_way_before_the_rest_is_partitioned() -> None:
    launcher: Any = ThreadLauncher()
    group = TrainerGroup(
        tiny("distributed.trainer_ranks=2", "train.microbatch_tokens=60"), launcher
    )
    samples = groups_of([(4, (20, 20)), (4, (20, 20)), (4, (20, 20))])
    without_prompt = [replace(sample, prompt_ids=()) for sample in samples[4:]]
    with pytest.raises(ValueError, match="have no prompt"):  # which the partition of the rest finds
        group.record_old_logprobs([*samples[:4], *without_prompt])
    group.close()
    assert [rank.stored for rank in launcher.ranks] == [1, 1]
    held = [number for rank in launcher.ranks for number in rank.samples._samples]
    assert sorted(held) == [0, 1, 2, 3]


def test_a_step_s_samples_are_sent_once_and_every_update_gets_them_with_their_old_logprobs() -> (
    None
):
    launcher: Any = ThreadLauncher()
    config = tiny(
        "distributed.trainer_ranks=3",
        "train.microbatch_tokens=60",
        "rollout.max_response_tokens=64",
    )
    group = TrainerGroup(config, launcher, call_timeout_s=60)
    lengths = [(3, (5, 9)), (4, (30, 2)), (2, (7, 7)), (5, (40, 1)), (1, (3, 16)), (6, (11, 0))]
    samples = [
        replace(sample, engine_logprobs=array("d", [1.0 - t for t in sample.response_ids]))
        for sample in groups_of(lengths)
    ]
    first = samples[3:8]
    recorded = group.record_old_logprobs(samples)
    assert [sample.old_logprobs for sample in recorded] == [None] * len(samples)
    # sent with it: the policy is pi_old itself; those recorded stay where they are
    group.update(first, step=1)
    found = [sample for rank in launcher.ranks for sample in rank.updates.pop()[1]]
    assert sorted(len(sample.response_ids) for sample in found) == sorted(
        len(s.response_ids) for s in first
    )
    assert [sample.old_logprobs for sample in found] == [None] * len(found)
    for step in range(2):
        group.update(recorded[6 * step : 6 * step + 6], step=1)
    updates = [[rank.updates[i] for rank in launcher.ranks] for i in range(2)]
    for i, update in enumerate(updates):
        found = sorted(
            (s.group_id, len(s.response_ids), s.advantage) for _, own in update for s in own
        )
        wanted = [s for s in recorded[6 * i : 6 * i + 6] if s.response_ids]
        assert found == sorted((s.group_id, len(s.response_ids), s.advantage) for s in wanted)
        for own in (s for _, samples in update for s in samples):
            assert list(own.old_logprobs) == [-float(t) for t in own.response_ids]
            assert list(own.engine_logprobs) == [1.0 - t for t in own.response_ids]
            assert list(own.mask) == [1] * len(own.response_ids)
    # other ranks score than update
    assert any(moved is not None for update in updates for moved, _ in update)
    assert [rank.stored for rank in launcher.ranks] == [2, 2, 2]
    group.record_old_logprobs(samples)
    with pytest.raises(ValueError, match="newest batch only"):
        group.update(recorded[:6], step=2)
    group.update(samples[:4], step=2)  # a single update per step: sent with it
    assert [rank.stored for rank in launcher.ranks] == [4, 4, 4]
    # pi_old is the engine's, which no rank has computed: sent with the update
    engines = [replace(s, old_logprobs=s.engine_logprobs, engine_logprobs=()) for s in samples[:4]]
    group.update(engines, step=3)
    found = [sample for rank in launcher.ranks for sample in rank.updates[-1][1]]
    assert len(found) == 4
    for sample in found:
        assert list(sample.old_logprobs) == [1.0 - t for t in sample.response_ids]
        assert list(sample.engine_logprobs) == []
    group.close()
