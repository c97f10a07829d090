"""Which columns of a row are a demonstration, by their usual names and by those that are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from dapo.config.data_spec import Columns, parse_spec
from dapo.core.errors import DataError
from dapo.data.demonstrations import demonstration_from_row, load_demonstrations, turns_of
from dapo.types import Problem
from helpers.tables import for_each_row

QUESTION = {"role": "user", "content": "Sum?"}
ANSWER = {"role": "assistant", "content": "<<1+2>>3"}


def read(row: dict[str, Any], **columns: str) -> Problem:
    return demonstration_from_row(
        row, where="a.jsonl, line 1", source="a", columns=Columns(**columns)
    )


@for_each_row(
    ("row", "columns", "message"),
    [
        # NuminaMath's columns, and a name with a slip: the conversation is not taken instead
        (
            {"problem": "Sum?", "solution": "3", "messages": [QUESTION, ANSWER]},
            {"prompt": "problem", "answer": "soluton"},
            "no column soluton, which is named as answer; columns here: problem, solution,"
            " messages",
        ),
        (
            {"problem": "Sum?", "messages": [QUESTION, ANSWER]},
            {"prompt": "problem"},
            "no demonstration; expected the columns prompt and response or completion or output, or"
            " messages or conversations or conversation alone, columns here: problem, messages;"
            " name yours with {path: FILE, prompt: COLUMN, answer: COLUMN}, and one of whole"
            " conversations with {path: FILE, prompt: COLUMN}",
        ),
        (
            {"prompt": "Sum?", "response": "3"},
            {"prompt": "question"},
            "no column question, which is named as prompt; columns here: prompt, response",
        ),
        (
            {"prompt": "Sum?", "response": "3", "solution": None},
            {"answer": "solution"},
            "solution is null; a demonstration needs a response: fill it in or drop the row",
        ),
        # a set of programs whose prompts end with the program
        (
            {"instruction": "Add.", "prompt": "### Add. ### Output: a + b", "output": "a + b"},
            {},
            "prompt and instruction differ, and each may be the prompt; name the one that is with"
            " {path: FILE, prompt: COLUMN}",
        ),
        (
            {"prompt": [QUESTION, ANSWER], "response": "3"},
            {},
            "prompt: the last message is the assistant's, as in a finished conversation; a prompt"
            " here ends before the answer (preset=sft imitates whole conversations)",
        ),
        (
            {"prompt": "Sum?", "chosen": [QUESTION, ANSWER]},
            {"answer": "chosen"},
            "chosen: the first message has the role user; a response starts with the assistant's,"
            " and earlier messages belong in the prompt (a column of whole conversations is named"
            " as prompt, without an answer)",
        ),
        (
            {"prompt": "Sum?", "response": "3", "messages": [QUESTION, ANSWER, QUESTION, ANSWER]},
            {},
            "messages has 1 answer more than the columns of the prompt and the response; drop these"
            " columns to imitate the conversation, or name them with {path: FILE, prompt: COLUMN,"
            " answer: COLUMN}",
        ),
        (
            {"input": "Sum?", "response": "3"},
            {},
            "no prompt beside response; expected a column prompt or question or problem or query or"
            " instruction, columns here: input, response; name yours with {path: FILE, prompt:"
            " COLUMN}",
        ),
    ],
)
def test_a_column_that_is_named_is_used_or_refused(
    row: dict[str, Any], columns: dict[str, str], message: str
) -> None:
    with pytest.raises(DataError) as error:
        read(row, **columns)
    assert str(error.value) == f"a.jsonl, line 1: {message}"


def test_what_remove_matches_is_deleted_from_each_turn_of_the_assistant() -> None:
    parts = [{"type": "text", "text": "<<2>>"}, {"type": "text", "text": "two"}]
    asked = {"role": "user", "content": "Why <<so>>?"}
    row = {"messages": [QUESTION, ANSWER, asked, {"role": "assistant", "content": parts}]}
    first, question, second = turns_of(read(row, remove="<<.*?>>"))
    assert (first["content"], question["content"]) == ("3", "Why <<so>>?")
    assert [part["text"] for part in second["content"]] == ["", "two"]
    row = {"prompt": [QUESTION], "completion": [ANSWER]}
    assert read(row, remove="<<.*?>>").answer == "3"
    with pytest.raises(DataError, match="a response is empty; the pattern of remove deletes all"):
        read(row, remove=".*")


def test_names_of_other_letters_and_conversations_of_any_name_are_read() -> None:
    whole = read({"messages": [QUESTION, ANSWER]})
    for row in ({"Messages": [QUESTION, ANSWER]}, {"conversation": [QUESTION, ANSWER]}):
        assert read(row) == whole
    chosen = {"prompt": "Sum?", "chosen": [QUESTION, ANSWER], "rejected": [QUESTION]}
    assert read(chosen, prompt="chosen") == whole
    assert read({"dialog": json.dumps([QUESTION, ANSWER])}, prompt="dialog") == whole
    plain = read({"prompt": "Sum?", "response": "3"})
    for names in (("Question", "Response"), ("query", "response"), ("PROMPT", "Completion")):
        assert read(dict(zip(names, ("Sum?", "3"), strict=True))) == plain
    # a name that is written letter by letter comes first
    assert read({"Question": "Other?", "question": "Sum?", "response": "3"}) == plain


def test_the_context_of_dollys_rows_is_part_of_the_question() -> None:
    row = {"instruction": "When did it begin?", "response": "2000", "category": "closed_qa"}
    assert read({**row, "context": "It began in 2000."}).prompt == (
        "When did it begin?\nIt began in 2000."
    )
    assert read({**row, "context": ""}).prompt == "When did it begin?"
    with pytest.raises(DataError, match="context goes on with the instruction, so it must be a"):
        read({**row, "context": ["It began in 2000."]})


def test_numbers_of_a_csv_column_are_texts_of_a_demonstration() -> None:
    found = read({"instruction": "Square it.", "input": 12, "output": 144})
    assert (found.prompt, found.answer) == ("Square it.\n12", "144")
    zero = read({"instruction": "Square it.", "input": 0, "output": 0.0})
    assert (zero.prompt, zero.answer) == ("Square it.\n0", "0")


def test_the_history_of_a_text_is_read_beside_every_name_of_a_prompt() -> None:
    pair = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}]
    for name in ("prompt", "question", "problem", "instruction"):
        row = {name: "Sum?", "response": "3", "history": [["Hello.", "Hi."]]}
        assert read(row).prompt == [*pair, QUESTION]
        assert read({**row, "history": []}).prompt == "Sum?"


def test_the_same_prompt_and_conversation_in_several_columns_is_one_demonstration() -> None:
    columns = {"instruction": "Sum?", "response": "3"}
    plain = read(columns)
    assert read({**columns, "prompt": "Sum?"}) == plain
    assert read({**columns, "conversations": [QUESTION, ANSWER]}) == plain
    named = read({**columns, "prompt": "Add: Sum?"}, prompt="prompt")
    assert named.prompt == "Add: Sum?"


def test_a_thought_in_a_column_stands_before_the_response() -> None:
    row = {"prompt": "Sum?", "response": "3"}
    thought = read({**row, "reasoning_content": "1 and 2"})
    assert turns_of(thought) == [
        {"role": "assistant", "content": "3", "reasoning_content": "1 and 2"}
    ]
    # a response that has its thought, and a row without one
    whole = {**row, "response": "<think>1 and 2</think>3"}
    assert read({**whole, "reasoning_content": "1 and 2"}) == read(whole)
    assert read({**row, "reasoning_content": " "}) == read(row)


def test_parts_of_questions_that_are_not_read_are_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "When?", "context": "In 2000.", "response": "2000"},
        {"question": "When? In  2000.", "context": "In 2000.", "response": "2000"},
        {"instruction": "When?", "context": "In 2000.", "response": "2000", "system": "Be brief."},
        {"messages": [{"role": "system", "content": "Hi."}, QUESTION, ANSWER], "system": "Be."},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    demonstrations, warnings = load_demonstrations(parse_spec(str(path)))
    assert len(demonstrations) == len(rows)
    assert warnings == [
        "data.demonstrations: 1 of 4 rows have a text in the column context that their prompts do"
        " not show, so the model is asked without it; write it into the prompt where the question"
        " needs it",
        "data.demonstrations: 1 of 4 rows have a text in the column system that their prompts do"
        " not show, so the model is asked without it; write it into the prompt as a message with"
        " the role system",
    ]
