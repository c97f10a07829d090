"""Arrays of token ids and log-probabilities are small, cross to other processes small, and are used
like tuples.
"""

import math
import pickle
from array import array

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from benchmarks.scripted_engine import ScriptedEngine, cut
from dapo.config import DataConfig
from dapo.core.errors import EngineError
from dapo.data.byte_level import ByteDecoder, byte_alphabet
from dapo.data.prompts import PromptEncoder
from dapo.engines.checked import CheckedEngine
from dapo.engines.engine import float_array
from dapo.types import Generation, GenerationRequest, Sample
from helpers.fake_engines import FaultyEngine


def row(*values: float) -> "array[int] | array[float]":
    if isinstance(values[0], float):
        return float_array(values)
    return array("b" if isinstance(values[0], bool) else "i", values)


def request(name: str = "a", limit: int = 8, least: int = 0) -> GenerationRequest:
    return GenerationRequest(name, (1, 2), limit, 1.0, 1.0, 0, stop_ids=(9,), min_new_tokens=least)


@pytest.mark.parametrize(
    ("values", "size"),
    [((0.5, -1.25), 4), ((0.1, 1 / 3), 8), ((1e300, 0.0), 8), ((-math.inf, -0.0), 4), ((), 4)],
)
def test_floats_take_four_bytes_where_that_holds_them_exactly_and_eight_otherwise(values, size):
    found = float_array(values)
    assert found.itemsize == size
    assert [value.hex() for value in found] == [value.hex() for value in values]
    assert math.isnan(float_array((math.nan, 0.1))[0])


def test_a_generation_and_a_sample_cross_to_another_process_equal_and_small():
    count = 1000
    ids = array("i", range(count))
    logprobs = float_array([-i / 8 for i in range(count)])
    generation = Generation("a", ids, logprobs, "stop", 3)
    sample = Sample(7, (1, 2), ids, 1.0, 0.5, logprobs, None, array("b", [True]) * count)
    for value, bytes_per_token in ((generation, 8), (sample, 9)):
        sent = pickle.dumps(value)
        assert len(sent) < bytes_per_token * count + 1000
        assert pickle.loads(sent) == value
    received = pickle.loads(pickle.dumps(sample))
    assert (received.old_logprobs, received.prompt_ids, received.num_trained_tokens) == (
        None,
        (1, 2),
        count,
    )


def test_masks_count_trained_tokens_as_tuples_and_as_arrays():
    for mask in ((True, False, True), row(True, False, True)):
        assert Sample(0, (1,), (1, 2, 3), 0.0, 0.0, (), None, mask).num_trained_tokens == 2


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
def test_a_script_of_arrays_is_cut_like_one_of_tuples(ids, limit, least, expected):
    plain = cut(request(limit=limit, least=least), ids, "aborted")
    kept, finish = cut(request(limit=limit, least=least), row(*ids), "aborted")
    assert isinstance(kept, array)
    assert (tuple(kept), finish) == plain
    if least == 0:
        assert plain == expected


def test_right_answers_of_arrays_pass_the_checks():
    script = {"a": (row(3, 9), "stop"), "b": (row(*[3] * 8), "length")}
    engine = ScriptedEngine(
        lambda r: script[r.id], delay=lambda r: 1, logprob=lambda count: array("f", [-0.5]) * count
    )
    checked = CheckedEngine(engine, vocabulary=10)
    checked.submit([request("a"), request("b")])
    assert [(tuple(g.token_ids), g.logprobs[0]) for g in checked.poll()] == [
        ((3, 9), -0.5),
        ((3,) * 8, -0.5),
    ]


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
            lambda found, wrap=wrap: [
                Generation(g.request_id, wrap(ids), wrap(logprobs), "stop", 0) for g in found
            ],
            delay=lambda r: 1,
        )
        checked = CheckedEngine(engine, vocabulary=10)
        checked.submit([request()])
        with pytest.raises(EngineError, match=message):
            checked.poll()


TEXT = "Wait, 12 × 7 = 84 — naïve? 答え: 𝟖𝟒 \\boxed{84}\n\tlet me check: \x00 ok"


@pytest.fixture(scope="module")
def byte_level() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=list(byte_alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    fast.add_tokens(["<tool é>"])
    return fast


def test_a_byte_table_says_what_the_tokenizer_says_of_any_ids(byte_level):
    encoded = byte_level(TEXT + "<tool é>" + "<eos>" + TEXT)["input_ids"]
    cases = [
        encoded,
        encoded[3:-2],
        [],
        [byte_level.eos_token_id],
        *([i] for i in range(len(byte_level))),
    ]
    for skip in (True, False):
        table = ByteDecoder.of(byte_level, skip_special_tokens=skip)
        assert table is not None
        for ids in cases:
            expected = byte_level.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert table.decode(ids) == expected
            if ids:
                assert table.decode(row(*ids)) == expected
    assert table.decode([10**6]) == ""
    assert "\ufffd" in table.decode(
        [byte_alphabet()["ç"] and byte_level.convert_tokens_to_ids("ç")]
    )


def test_a_tokenizer_of_another_kind_decodes_by_itself():
    from dapo.policy.builtin_models import _tiny_tokenizer

    tokenizer = _tiny_tokenizer()
    assert ByteDecoder.of(tokenizer, skip_special_tokens=True) is None
    ids = tokenizer("12+3")["input_ids"]
    encoder = PromptEncoder(tokenizer, DataConfig(train="builtin:sums"))
    assert encoder.decode(row(*ids)) == encoder.decode(tuple(ids)) == "12+3"
