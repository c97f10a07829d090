"""The table of chat templates: what counts as equal, and that our column comes from played
episodes.
"""

from collections.abc import Iterator
from contextlib import closing

import pytest

from benchmarks import turn_templates
from benchmarks.notes import EchoedNotes
from benchmarks.turn_templates import ENVIRONMENT, Played, Script
from dapo.environments.pool import EnvironmentPool
from helpers.chat_templates import FAMILIES, tokenizer

TURNS = [[1, 2, 9], [3, 9], [4, 9]]
CONTEXTS = [[7], [7, 1, 2, 9, 5], [7, 1, 2, 9, 5, 3, 9, 5, 9]]
WHOLE = [7, 1, 2, 9, 5, 3, 9, 5, 9, 4, 9]
PLAYED = Played([1, 2, 9, 3, 9, 4, 9], WHOLE, CONTEXTS)


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvironmentPool]:
    with closing(EnvironmentPool(ENVIRONMENT, memory_gib=4)) as pool:
        yield pool


def test_ids_are_equal_if_the_sampled_ones_train_behind_those_behind_which_they_were_sampled():
    assert PLAYED.outcome(TURNS) == "equal"
    assert Played([1, 2, 9, 3, 9, 4], WHOLE, CONTEXTS).outcome(TURNS) == "drifted"
    assert Played(PLAYED.trained, [8, *WHOLE[1:]], CONTEXTS).outcome(TURNS) == "drifted"
    assert PLAYED.forges(TURNS)  # the second gap has the end 9, the first one has none
    assert not Played(PLAYED.trained, [*WHOLE[:8], 5, *WHOLE[9:]], CONTEXTS).forges(TURNS)


def test_the_ids_of_scripted_turns_are_not_those_of_their_text():
    known = tokenizer("qwen 2.5")
    script = Script.of(known, "hermes")
    texts = [known.decode(turn[:-1]) for turn in script.turns]
    assert [text.count(note) for text, note in zip(texts, script.notes, strict=False)] == [1, 1]
    assert "<|im_end|>" in texts[1]
    for text, turn in zip(texts, script.turns, strict=True):
        assert known(text, add_special_tokens=False)["input_ids"] != turn[:-1]


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("qwen 2.5", "equal (exact)"),
        ("llama 3.1", "equal (exact)"),
        ("thoughts of the last answer", "equal (append)"),
        ("mistral 3", "refused: its form of calls"),
        ("counter", "refused"),
    ],
)
def test_our_column_is_from_episodes_whose_observations_forge_no_turn(
    name: str, result: str, pool: EnvironmentPool
):
    script = Script.of(tokenizer(name), "llama" if FAMILIES[name].calls == "llama" else "hermes")
    judgement, played = turn_templates.play_ours(tokenizer(name), pool, script)
    assert turn_templates.result_of_ours(judgement, played, script) == result
    if played is not None:
        assert not played.forges(script.turns)
        assert script.notes[1] in tokenizer(name).decode(played.contexts[2]).rpartition("Kept: ")[2]


def test_a_refusal_has_the_words_of_the_system_and_a_parser_set_by_hand_is_named():
    script = Script([], TURNS)
    refused = {
        "refused": "Unknown. Set it.",
        "refused_by_hand": "ValueError: No tools (in it). Sorry.",
    }
    assert turn_templates.result_of_trl(refused, script) == "refused: No tools"
    played = {
        "trained": PLAYED.trained,
        "whole": WHOLE,
        "contexts": CONTEXTS,
        "refused_by_hand": None,
    }
    assert (
        turn_templates.result_of_trl({**played, "refused": "Unknown."}, script)
        == "equal (parser of calls set by hand)"
    )
    assert turn_templates.result_of_trl({**played, "refused": None}, script) == "equal"


def test_the_reward_is_for_an_even_number_of_characters():
    notes = EchoedNotes()
    for texts, reward in [(["ab", "cd"], 1.0), (["ab", "c"], 0.0), ([], 1.0)]:
        notes.reset(prompt="x")
        assert [notes.note(text).endswith(f"Kept: {text}") for text in texts] == [True] * len(texts)
        assert notes.get_reward() == reward
