"""Packed rows read like tuples, cross to other processes small, and nothing that takes them sees a difference."""

import math
import pickle

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from dapo.config import DataConfig
from dapo.core.background import in_background
from dapo.core.errors import EngineError
from dapo.core.packed import CompactArray, array_of, compact
from dapo.data.byte_decoder import ByteDecoder, byte_alphabet
from dapo.data.prompts import PromptEncoder
from dapo.engines.checked import CheckedEngine
from dapo.engines.scripted import FaultyEngine, ScriptedEngine, cut
from dapo.telemetry.metrics import engine_gap_metrics
from dapo.types import Generation, GenerationRequest, Sample


def row(*values: float) -> CompactArray:
    found = compact(values)
    assert isinstance(found, CompactArray)
    return found


def request(name: str = "a", limit: int = 8, least: int = 0) -> GenerationRequest:
    return GenerationRequest(name, (1, 2), limit, 1.0, 1.0, 0, stop_ids=(9,), min_new_tokens=least)


@pytest.mark.parametrize("values", [(3, 1, 2), (0.5, -1.25), (True, False), (2**40, 1), (0.1, 1 / 3), (1e300, 0.0)])
def test_a_packed_row_equals_the_tuple_and_hashes_like_it(values):
    found = row(*values)
    assert found == values
    assert values == found
    assert hash(found) == hash(values)
    assert {values: 1}[found] == 1
    assert (list(found), len(found), repr(found)) == (list(values), len(values), repr(values))
    assert [type(value) for value in found] == [type(value) for value in values]
    assert type(found[0]) is type(values[0])
    assert found[1:] == values[1:]
    assert found[-1] == values[-1]
    assert values + found == found + values == (*values, *values)
    assert found != values[:1]
    assert found != list(values)


def test_numbers_take_four_bytes_where_that_holds_them_exactly_and_eight_otherwise():
    kinds = {row(1, 2): "int32", row(2**31, 1): "int64", row(0.5): "float32", row(0.1): "float64", row(True): "bool"}
    for found, kind in kinds.items():
        assert found.array.dtype == kind


@pytest.mark.parametrize("values", [(), (1, 2.0), (1, True), ("a",), (None,), (2**70,), (np.int64(1),)])
def test_what_is_not_of_one_type_of_numbers_stays_as_it_is(values):
    assert compact(values) is values


def test_a_packed_row_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        row(1, 2).array[0] = 5
    with pytest.raises(ValueError, match=r"expected \[n\] numbers"):
        CompactArray(np.zeros((2, 2)))


def test_torch_and_numpy_take_packed_rows():
    assert torch.tensor(row(1, 2)).tolist() == [1, 2]
    assert np.asarray(row(1, 2)).tolist() == [1, 2]
    assert array_of((0.1,), np.float64).tolist() == array_of(row(0.1), np.float64).tolist() == [0.1]


def test_a_generation_and_a_sample_cross_to_another_process_packed_equal_and_small():
    count = 1000
    ids, logprobs = tuple(range(count)), tuple(-i / 8 for i in range(count))
    generation = Generation("a", ids, logprobs, "stop", 3)
    sample = Sample(7, (1, 2), ids, 1.0, 0.5, logprobs, None, (True,) * count)
    for value, bytes_per_token in ((generation, 8), (sample, 9)):
        sent = pickle.dumps(value)
        assert len(sent) < bytes_per_token * count + 1000
        assert pickle.loads(sent) == value
    received = pickle.loads(pickle.dumps(sample))
    assert isinstance(received.response_ids, CompactArray)
    assert (received.old_logprobs, received.prompt_ids, received.num_trained_tokens) == (None, (1, 2), count)


def test_a_wrong_row_crosses_as_it_is_so_that_the_inspection_sees_it():
    assert pickle.loads(pickle.dumps(Generation("a", (1, "x"), (0.0,), "stop", 0))).token_ids == (1, "x")


@pytest.mark.parametrize(
    ("ids", "limit", "least", "expected"),
    [
        ((3, 4, 9, 5), 8, 0, ((3, 4, 9), "stop")),
        ((3, 4, 5), 2, 0, ((3, 4), "length")),
        ((3, 4, 5), 8, 0, ((3, 4, 5), "aborted")),
        ((9, 3, 9, 4, 9, 5), 8, 3, ((3, 4, 9), "stop")),
        ((9, 9, 3), 2, 1, ((9,), "stop")),
        ((3, 9), 2, 0, ((3, 9), "stop")),
    ],
)
def test_a_packed_script_is_cut_like_a_plain_one(ids, limit, least, expected):
    plain = cut(request(limit=limit, least=least), ids, "aborted")
    assert cut(request(limit=limit, least=least), row(*ids), "aborted") == plain
    if least == 0:
        assert plain == expected


def test_sound_packed_answers_pass_the_inspection():
    script = {"a": (row(3, 9), "stop"), "b": (row(*[3] * 8), "length")}
    engine = ScriptedEngine(
        lambda r: script[r.id], delay=lambda r: 1, logprob=lambda count: CompactArray(np.full(count, -0.5, np.float32))
    )
    checked = CheckedEngine(engine, vocabulary=10)
    checked.submit([request("a"), request("b")])
    assert [(g.token_ids, g.logprobs[0]) for g in checked.poll()] == [((3, 9), -0.5), ((3,) * 8, -0.5)]


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        ((3, 10), (-1.0, -1.0), "token ids from 0 to 9, got 10 at token 1"),
        ((-1, 9), (-1.0, -1.0), "token ids from 0 to 9, got -1 at token 0"),
        ((3.0, 9.0), (-1.0, -1.0), "token ids from 0 to 9, got 3.0 at token 0"),
        ((3, 9), (-1.0, 0.5), "finite log-probabilities of at most 0, got 0.5 at token 1"),
        ((3, 9), (math.nan, -1.0), "finite log-probabilities of at most 0, got nan at token 0"),
        ((9, 9), (-1.0, -1.0), "an end at the first stop id"),
        ((3, 4), (-1.0, -1.0), "a last token among 9"),
    ],
)
def test_invalid_compact_answers_get_the_message_of_plain_ones(ids, logprobs, message):
    for wrap in (tuple, lambda values: row(*values)):
        engine = FaultyEngine(
            lambda r: ((3, 9), "stop"),
            lambda found, wrap=wrap: [Generation(g.request_id, wrap(ids), wrap(logprobs), "stop", 0) for g in found],
            delay=lambda r: 1,
        )
        checked = CheckedEngine(engine, vocabulary=10)
        checked.submit([request()])
        with pytest.raises(EngineError, match=message):
            checked.poll()


def test_the_gap_between_sampler_and_trainer_counts_trained_tokens_only():
    def sample(engine, old, mask):
        return Sample(0, (1,), (1,) * len(mask), 0.0, 0.0, engine, old, mask)

    samples = [
        sample((-1.0, -2.0), row(-1.5, -9.0), row(True, False)),
        sample(row(-1.0), (-2.0,), (True,)),
        sample((-1.0,), None, (True,)),
        sample((-1.0,), (-5.0,), (False,)),
    ]
    assert engine_gap_metrics(samples) == {
        "rollout/engine_logprob_gap_mean": 0.75,
        "rollout/engine_logprob_gap_max": 1.0,
    }
    with pytest.raises(ValueError, match="1 log-probabilities of the engine, 2 of the trainer"):
        engine_gap_metrics([sample((-1.0,), (-1.0, -1.0), (True,))])


def test_work_beside_a_block_is_done_at_its_end_and_its_error_comes_there():
    def fail() -> None:
        raise OSError("no room")

    done: list[str] = []
    with in_background(lambda: done.append("work"), name="test"):
        pass
    assert done == ["work"]
    with pytest.raises(OSError, match="no room"), in_background(fail, name="test"):
        done.append("the end of the block")
    assert done[-1] == "the end of the block"
    with pytest.raises(KeyError, match="block"), in_background(fail, name="test"):
        raise KeyError("block")


TEXT = "Wait, 12 × 7 = 84 — naïve? 答え: 𝟖𝟒 \\boxed{84}\n\tlet me check: \x00 ok"


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<eos>"], initial_alphabet=list(byte_alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)
    fast.add_tokens(["<tool é>"])
    return fast


def test_a_byte_table_says_what_the_tokenizer_says_of_any_ids(byte_level):
    encoded = byte_level(TEXT + "<tool é>" + "<eos>" + TEXT)["input_ids"]
    cases = [encoded, encoded[3:-2], [], [byte_level.eos_token_id], *([i] for i in range(len(byte_level)))]
    for skip in (True, False):
        table = ByteDecoder.of(byte_level, skip_special_tokens=skip)
        assert table is not None
        for ids in cases:
            expected = byte_level.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert table.decode(ids) == expected
            if ids:
                assert table.decode(row(*ids)) == expected
    assert table.decode([10**6]) == ""
    assert "\ufffd" in table.decode([byte_alphabet()["ç"] and byte_level.convert_tokens_to_ids("ç")])


def test_a_tokenizer_of_another_kind_decodes_by_itself():
    from dapo.policy.builtin_models import _tiny_tokenizer

    tokenizer = _tiny_tokenizer()
    assert ByteDecoder.of(tokenizer, skip_special_tokens=True) is None
    ids = tokenizer("12+3")["input_ids"]
    encoder = PromptEncoder(tokenizer, DataConfig(train="builtin:sums"))
    assert encoder.decode(row(*ids)) == encoder.decode(tuple(ids)) == "12+3"
