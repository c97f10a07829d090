"""Answers as they grow: what is seen before the end never changes, and changes nothing."""

import pytest

from dapo.cli.answer_text import GrowingText
from dapo.data.sources.rows import prompted_problem
from dapo.start.conversation import Conversation, ModelSource
from dapo.start.generate import OpenModel, SamplingOptions, responses_to, settled
from dapo.start.model_choice import choose_model


def test_a_growing_answer_is_a_beginning_of_the_answer_that_is_sampled_whole():
    model = OpenModel(choose_model("tiny-random"))
    sampler = model.sampler(SamplingOptions(samples=3, max_new_tokens=12))
    problems = [prompted_problem(text) for text in ("1 + 2 =", "4 + 4 =")]
    whole = {(index, i): response for index, i, response in responses_to(sampler, problems)}
    grown: dict[tuple[int, int], list[str]] = {}
    for index, i, response in responses_to(sampler, problems, partial=True):
        grown.setdefault((index, i), []).append(response.text)
        if response.finish is not None:
            assert (response.text, response.tokens) == (
                whole[index, i].text,
                whole[index, i].tokens,
            )
    assert grown.keys() == whole.keys()
    assert max(map(len, grown.values())) > 6
    for key, texts in grown.items():
        assert all(whole[key].text.startswith(text) for text in texts)
    # an iteration that ends early leaves nothing in the engine
    next(responses_to(sampler, problems, partial=True))
    assert len(list(responses_to(sampler, problems))) == 6
    model.close()


def test_half_a_character_is_not_shown():
    assert settled("17 \N{EURO SIGN}".encode()[:-1].decode(errors="replace")) == "17 "


def test_a_stopped_answer_stays_in_the_conversation_and_a_retry_replaces_it():
    model = OpenModel(choose_model("tiny-random"))
    conversation = Conversation(ModelSource(model, SamplingOptions(max_new_tokens=12)))
    stream = conversation.ask("1 + 2 =")
    first = next(stream)
    stream.close()
    assert [exchange.answer for exchange in conversation.exchanges] == [first]
    *_, last = conversation.retry()
    assert [exchange.answer for exchange in conversation.exchanges] == [last]
    assert last.finish is not None
    assert conversation.undo() is not None
    assert conversation.messages == []
    model.close()


def test_a_growing_text_breaks_lines_between_words(capsys: pytest.CaptureFixture[str]):
    text = "one two three four\n\n  five sixteen\x1b[2J"
    paper = GrowingText(10)
    for end in range(len(text) + 1):
        paper.show(text[:end])
    paper.end()
    assert capsys.readouterr().out.split("\n") == [
        "one two ",
        "three four",
        "",
        "  five ",
        "sixteen\\x1b[2J",
        "",
    ]
