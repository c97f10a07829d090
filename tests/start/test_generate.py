"""Answers as they grow: what is seen before the end never changes, and changes nothing."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from dapo.cli.answer_text import GrowingText
from dapo.core.errors import ConfigError, DataError, EngineError
from dapo.data.sources.rows import prompted_problem
from dapo.start.conversation import Conversation, ModelSource
from dapo.start.generate import OpenModel, SamplingOptions, answers_of, responses_to, settled
from dapo.start.model_choice import choose_model
from helpers.tables import for_each_row


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_run_that_was_trained_on_a_gpu_answers_where_there_is_none():
    choice = choose_model("tiny-random")
    trained = choice.config.changed("train", device="cuda")
    trained = trained.changed("rollout", engine="vllm", engines=2, clock="load")
    model = OpenModel(replace(choice, config=trained))
    assert (model.config.train.device, model.config.rollout.engine) == ("cpu", "native")
    answer = answers_of(model.sampler(SamplingOptions(max_new_tokens=4)), "1 + 2 =")
    assert isinstance(answer, str)
    model.close()


def test_questions_may_be_texts_messages_or_rows_and_a_refused_one_leaves_nothing_behind():
    model = OpenModel(choose_model("tiny-random"))
    sampler = model.sampler(SamplingOptions(max_new_tokens=4, temperature=0.0))
    text = answers_of(sampler, "1 + 2 =")
    assert answers_of(sampler, {"prompt": "1 + 2 =", "answer": "3"}) == text
    assert answers_of(sampler, [{"question": "1 + 2 ="}, "1 + 2 ="]) == [text, text]
    message = {"role": "user", "content": "1 + 2 ="}
    assert answers_of(sampler, [message]) == answers_of(sampler, message)
    assert answers_of(sampler, []) == []
    with pytest.raises(DataError, match="a question is empty"):
        answers_of(sampler, ["1 + 2 =", ""])
    with pytest.raises(
        DataError, match="no column prompt, question, problem or query; columns here: a"
    ):
        answers_of(sampler, [{"a": 1}])
    # of the engine, for a prompt that reaches it
    with pytest.raises(EngineError, match="prompt length must be at least 1 token"):
        list(responses_to(sampler, [prompted_problem("")]))
    assert answers_of(sampler, "1 + 2 =") == text
    model.close()


@for_each_row(
    ("options", "expected"),
    [
        ({"samples": 0}, "samples: expected a whole number of at least 1, got 0"),
        ({"temperature": -1}, "1e-20 to 1e+20, got -1"),
        ({"temperature": 1e-40}, "1e-20 to 1e+20, got 1e-40"),
        ({"temperature": "0"}, "1e-20 to 1e+20, got '0'"),
        ({"top_p": 2}, "top_p: expected a number above 0 and up to 1, got 2"),
        ({"top_p": float("nan")}, "top_p: expected"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected a whole number of at least 1, got 0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: expected a whole number of at least 1, got 2.5"),
        ({"samples": 1.5}, "samples: expected a whole number of at least 1, got 1.5"),
        ({"seed": 1.5}, "seed: expected a whole number, got 1.5"),
    ],
)
def test_numbers_that_cannot_be_sampled_with_are_refused(options: dict[str, Any], expected: str):
    with pytest.raises(ConfigError, match=re.escape(expected)):
        SamplingOptions(**options)


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
