"""Rows of every layout become problems; a row that cannot says why."""

import json
import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from uuid import UUID

import pytest

from dapo.config.data_spec import Columns
from dapo.core.errors import DataError
from dapo.data.question_parts import unshown_parts
from dapo.data.sources.rows import problem_from_row, problem_id, prompt_text, tool_schemas
from dapo.rewards.verdicts import problem_to_json
from helpers.tables import for_each_row

USER = {"role": "user", "content": "1+1?"}


def read(row, **columns):
    return problem_from_row(row, where="f.jsonl, line 3", source="f", columns=Columns(**columns))


def error_message(row, **columns):
    with pytest.raises(DataError) as caught:
        read(row, **columns)
    return str(caught.value)


@pytest.mark.parametrize("column", ["answer", "solution", "ground_truth", "target"])
def test_trl_layout_with_each_answer_column(column):
    problem = read({"prompt": "1+1?", column: "2", "level": 4})
    assert (problem.prompt, problem.answer, problem.source) == ("1+1?", "2", "f")
    # a reward finds it under its own name, too, without a second copy
    assert problem.fields == ({"level": 4} if column == "answer" else {"level": 4, column: "2"})
    assert problem.fields.get(column, problem.answer) is problem.answer


def test_trl_layout_with_messages_keeps_role_and_content():
    problem = read({"prompt": [{"role": "user", "content": "1+1?", "name": None}], "answer": "2"})
    assert problem.prompt == [USER]


def test_verl_layout_reads_the_ground_truth_and_keeps_the_other_columns():
    row = {
        "data_source": "math_dapo",
        "prompt": [USER],
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 7, "split": None},
        "__index_level_0__": 3,
    }
    problem = read(row)
    assert (problem.answer, problem.source) == ("2", "math_dapo")
    assert problem.fields == {
        "data_source": "math_dapo",
        "ability": "MATH",
        "reward_model": {"ground_truth": "2", "style": "rule"},
        "extra_info": {"index": 7, "split": None},
    }


def test_gsm8k_answer_is_the_number_after_the_mark_and_the_solution_is_kept():
    problem = read({"question": "How many?", "answer": "1000 + 80 = 1080\n#### 1,080"})
    assert problem.answer == "1080"
    whole = "1000 + 80 = 1080\n#### 1,080"
    assert problem.fields == {"question": "How many?", "answer": whole, "solution": whole}


@pytest.mark.parametrize("text", ["#### 1\nand more", "see #### 1", "5\n####", "1,2"])
def test_text_without_a_marked_last_line_stays_as_it_is(text):
    assert read({"prompt": "q", "answer": text}).answer == text


def test_columns_can_be_named_also_inside_a_column():
    problem = read(
        {"prompt": "no", "info": {"q": "1+1?", "a": 2}}, prompt="info.q", answer="info.a"
    )
    assert (problem.prompt, problem.answer) == ("1+1?", "2")
    assert problem.fields == {"prompt": "no", "info": {"q": "1+1?", "a": 2}}
    # as SYNTHETIC-1 has it
    row = {"prompt": "1+1?", "verification_info": '{"ground_truth": "2"}'}
    problem = read(row, answer="verification_info.ground_truth")
    assert (problem.answer, problem.fields["verification_info"]) == ("2", '{"ground_truth": "2"}')
    assert "no column verification_info.truth, which is named as answer; columns" in error_message(
        row, answer="verification_info.truth"
    )
    # TriviaQA's answer
    assert error_message({"question": "Who?", "answer": {"aliases": ["Ann"], "value": "Ann"}}) == (
        "f.jsonl, line 3: answer must be a string or a number, got dict {'aliases': ['Ann'],"
        " 'value': 'Ann'}; name the part that is the answer with {path: FILE, answer: COLUMN.PART};"
        " parts here: aliases, value"
    )


def test_a_column_tools_without_schemas_is_text_where_it_holds_a_date():
    problem = read({"prompt": "q", "answer": 1, "tools": {"since": date(2024, 5, 6)}})
    assert problem.fields["tools"] == {"since": "2024-05-06"}


def test_tools_are_read_from_a_list_of_json_texts_as_from_a_list_of_schemas():
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
        for name in ("add", "multiply")
    ]
    whole = read({"prompt": "q", "answer": 1, "tools": tools})
    assert whole.fields["tools"] == tools
    for written in ([json.dumps(tool) for tool in tools], json.dumps(tools)):
        assert read({"prompt": "q", "answer": 1, "tools": written}) == whole
    # names are no schemas
    assert tool_schemas({"tools": ["add", "multiply"]}, "f") == {}


@for_each_row(
    "row",
    [
        {"Problem": "1+1?", "Answer": 2, "Solution": "One and one.", "ID": "2024-I-1"},
        {"question": "1+1?", "final_answer": "2", "r1_solution_1": "One and one."},
        {"problem": "1+1?", "expected_answer": "2", "generated_solution": "One and one."},
        {"query": "1+1?", "Ground_Truth": "2"},
        {"QUESTION": "2+2?", "question": "1+1?", "ANSWER": "4", "answer": "2"},
    ],
)
def test_published_names_are_read_in_other_letters_too_and_stay_columns(row):
    loaded = read(row)
    assert (loaded.prompt, loaded.answer) == ("1+1?", "2")
    kept = {name: value for name, value in row.items() if name != "answer"}
    assert kept.items() <= loaded.fields.items()


def test_a_part_of_the_question_in_another_column_is_named_in_any_letters():
    row = {"Body": "Tom has 3 pens.", "Question": "How many has he?", "Answer": 3.0}
    loaded = read(row)
    assert unshown_parts(loaded.fields, loaded.prompt) == ["Body"]


def test_a_column_of_whole_conversations_is_no_prompt_also_where_it_is_named():
    row = {"messages": [USER, {"role": "assistant", "content": "2"}], "answer": "2"}
    with pytest.raises(DataError, match=r"as in a finished conversation; a prompt here ends"):
        read(row, prompt="messages")


def test_an_answer_of_which_remove_leaves_nothing_is_refused():
    row = {"prompt": "q", "answer": "<<1+1=2>>"}
    assert error_message(row, remove="<<.*>>") == (
        "f.jsonl, line 3: answer is empty; the pattern of remove deletes all of it: narrow it"
    )
    problem = problem_from_row(
        row, where="f", source="f", columns=Columns(remove="<<.*>>"), require_answer=False
    )
    assert problem.answer == ""


def test_copies_share_an_id_whatever_their_other_columns_say():
    first = read({"prompt": "q", "answer": 1, "id": 5})
    second = read({"question": "q", "target": "1", "id": 6})
    assert first.id == second.id == problem_id("q", "1")
    assert len(first.id) == 16
    assert (first.fields, second.fields) == (
        {"answer": 1, "id": 5},
        {"question": "q", "target": "1", "id": 6},
    )


def test_a_column_reaches_rewards_as_it_is_in_the_data():
    problem = read(
        {"q": [{**USER, "name": None}], "label": 7, "solution": None}, prompt="q", answer="label"
    )
    assert (problem.answer, problem.fields) == ("7", {"q": [USER], "label": 7, "solution": None})
    assert problem.fields["q"] is problem.prompt


@pytest.mark.parametrize(
    "answer", [{}, {"answer": None}, {"answer": " "}, {"answer": ["1", "2"]}, {"target": True}]
)
def test_without_a_need_for_it_an_answer_may_be_missing_or_of_any_type(answer):
    problem = problem_from_row(
        {"prompt": "q", **answer}, where="f, line 3", source="f", require_answer=False
    )
    assert (problem.answer, problem.fields) == ("", answer)
    with pytest.raises(DataError, match=r"f\.jsonl, line 3: (no )?(answer|target)"):
        read({"prompt": "q", **answer})


def test_a_named_answer_column_must_be_there_also_where_no_answer_is_needed():
    with pytest.raises(
        DataError, match="no column label, which is named as answer; columns here: prompt"
    ):
        problem_from_row(
            {"prompt": "q"},
            where="f",
            source="f",
            columns=Columns(answer="label"),
            require_answer=False,
        )


def test_another_answer_or_role_is_another_problem():
    assert problem_id("q", "1") != problem_id("q", "2")
    system = [{"role": "system", "content": "1+1?"}]
    assert problem_id([USER], "2") != problem_id(system, "2")
    assert problem_id([USER], "2") == problem_id([{"content": "1+1?", "role": "user"}], "2")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        (3.0, "3"),
        (-0.5, "-0.5"),
        (6.02e23, "602000000000000000000000"),
        (Decimal("1.50"), "1.50"),
    ],
)
def test_a_number_as_reference_answer_becomes_text(value, text):
    assert read({"prompt": "q", "answer": value}).answer == text
    # a list of one, which a reward gets as it is in the data
    listed = read({"prompt": "q", "answer": [value]})
    assert (listed.answer, listed.fields) == (text, {"answer": [value]})


@pytest.mark.parametrize("answer", [[True], [["36"]], [], [None]])
def test_another_list_is_no_reference_answer(answer):
    assert "answer must be a string or a number, got list" in error_message(
        {"prompt": "q", "answer": answer}
    )


def test_fields_are_values_of_their_own_types_and_json_has_their_texts():
    row = {
        "nan": math.nan,
        "inf": math.inf,
        "when": datetime(2024, 5, 6, 7, 8, tzinfo=UTC),
        "day": date(2024, 5, 6),
        "took": timedelta(seconds=90),
        "price": Decimal("1.50"),
        "key": UUID(int=1),
        "pairs": (("a", 1), ("b", None)),
        "flag": True,
    }
    problem = read({"prompt": "q", "answer": "a", **row})
    assert problem.fields == row | {"nan": None, "pairs": [["a", 1], ["b", None]]}
    assert problem_to_json(problem)["fields"] == {
        "nan": None,
        "inf": "inf",
        "when": "2024-05-06T07:08:00+00:00",
        "day": "2024-05-06",
        "took": "0:01:30",
        "price": "1.50",
        "key": "00000000-0000-0000-0000-000000000001",
        "pairs": [["a", 1], ["b", None]],
        "flag": True,
    }


def test_prompt_text_collapses_whitespace_and_leaves_the_system_out():
    assert prompt_text(" a\n\tb ") == "a b"
    assert (
        prompt_text([{"role": "system", "content": "s"}, {"role": "user", "content": "a\n b"}])
        == "a b"
    )


KNOWN_ANSWERS = (
    "reward_model.ground_truth, answer, final_answer, expected_answer, solution, ground_truth or"
    " target"
)


@for_each_row(
    ("row", "message"),
    [
        (
            {"text": "q", "answer": "a"},
            (
                ": no prompt; expected a column prompt, question, problem or query, columns here: text,"
                " answer; name yours with {path: FILE, prompt: COLUMN}"
            ),
        ),
        (
            {"prompt": "q", "reward_model": {"style": "rule"}},
            (
                f": no answer; expected a column {KNOWN_ANSWERS}, columns here: prompt,"
                " reward_model; name yours with {path: FILE, answer: COLUMN}"
            ),
        ),
        (
            {"prompt": " \n", "answer": "a"},
            ": prompt is empty; expected the question as a string or messages",
        ),
        (
            {"prompt": [], "answer": "a"},
            ": prompt is empty; expected at least one message with content",
        ),
        (
            {"prompt": [{"role": "user", "content": " "}], "answer": "a"},
            ": prompt is empty; expected at least one message with content",
        ),
        (
            {"prompt": None, "answer": "a"},
            ": prompt is null; expected the question as a string or messages",
        ),
        (
            {"prompt": 5, "answer": "a"},
            ": prompt must be a string or a list of messages, got int 5",
        ),
        (
            {"prompt": [{"role": "user", "text": "q"}], "answer": "a"},
            (
                ": prompt, message 1: expected a mapping with role and content, got the keys role,"
                " text"
            ),
        ),
        (
            {"prompt": ["q"], "answer": "a"},
            ": prompt, message 1: expected a mapping with role and content, got str 'q'",
        ),
        (
            {
                "prompt": [USER, {"role": "user", "content": [{"type": "image", "image": "q"}]}],
                "answer": "a",
            },
            (
                ": prompt, message 2, part 1 of its content: models get text only; expected the"
                " type text with a text, got the type image"
            ),
        ),
        (
            {"prompt": [{"role": None, "content": "q"}], "answer": "a"},
            ": prompt, message 1: role must be a string, got NoneType None",
        ),
        (
            {"messages": [{"from": ["human"], "value": "q"}], "answer": "a"},
            ": messages, message 1: role must be a string, got list ['human']",
        ),
        (
            {"messages": [{"from": "observation", "value": "q"}], "answer": "a"},
            (
                ": messages, message 1: from must be human, gpt or one of system, developer, user,"
                " assistant, tool, got observation; rename it, and write a call of a tool as"
                " tool_calls of an assistant's message with role and content"
            ),
        ),
        (
            {"prompt": "q", "answer": "a", "tools": "[{'name': 'add'}]"},
            (
                ": tools holds schemas as Python prints them, which cannot be read; write .jsonl or"
                " .parquet, or the schemas as JSON"
            ),
        ),
        (
            {"prompt": [USER, {"role": "assistant", "content": ""}], "answer": "2"},
            (
                ": prompt: the last message is the assistant's, which the model is to continue: it"
                " needs a text, and no tool_calls; or remove it"
            ),
        ),
        (
            {"prompt": [{"role": "assistant", "content": "2"}], "answer": "2"},
            ": prompt: the only message is the assistant's; expected a question before it",
        ),
        (
            {"prompt": "q", "answer": None},
            ": answer is null; every problem needs a reference answer: fill it in or drop the row",
        ),
        (
            {"prompt": "q", "reward_model": {"ground_truth": math.nan}},
            (
                ": reward_model.ground_truth is null; every problem needs a reference answer: fill"
                " it in or drop the row"
            ),
        ),
        (
            {"prompt": "q", "answer": ""},
            ": answer is empty; every problem needs a reference answer: fill it in or drop the row",
        ),
        (
            {"prompt": "q", "answer": True},
            (
                ": answer must be a string or a number, got bool True; write the reference answer"
                " as a string (a CSV column of true and false alone holds none: write yes and no,"
                " or .jsonl)"
            ),
        ),
        (
            {"prompt": "q", "answer": ["1", "2"]},
            (
                ": answer must be a string or a number, got list ['1', '2']; write the reference"
                " answer as a string"
            ),
        ),
        (
            {"prompt": "q", "answer": math.inf},
            (
                ": answer must be a string or a number, got float inf; write the reference answer"
                " as a string"
            ),
        ),
        (
            {"prompt": "q", "answer": "a", "image": {"bytes": b"\x89PNG"}},
            (
                ": image.bytes holds a value of type bytes; only strings, numbers, times, lists and"
                " mappings are read: drop this column or write it as a string"
            ),
        ),
        (
            {"prompt": "ab\ud83d", "answer": "a"},
            (
                ": prompt: character 3 is half of a surrogate pair ('\\ud83d'), not text; write the"
                " text in UTF-8"
            ),
        ),
    ],
)
def test_a_row_that_is_no_problem_says_why(row, message):
    assert error_message(row) == "f.jsonl, line 3" + message


def test_a_named_column_that_is_absent_lists_those_present():
    assert (
        error_message({"prompt": "q", "answer": "a"}, answer="label")
        == "f.jsonl, line 3: no column label, which is named as answer; columns here: prompt,"
        " answer"
    )
