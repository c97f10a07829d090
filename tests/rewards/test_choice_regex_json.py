"""The verifiers of a form: a letter of several, a regular expression, JSON with a schema."""

import pytest

from dapo.config.reward_options import RewardConfig
from dapo.core.errors import RewardError
from dapo.rewards import get_verifier
from dapo.rewards.combine import RewardSpec
from dapo.types import Problem
from helpers.tables import for_each_row
from helpers.verifier_pools import open_pool


def judged(name, answer, response, /, fields=None, **options):
    """True, False, or the error."""
    verdict = get_verifier(name, **options)(
        Problem("1", "Q", answer, fields=fields or {}), response
    )
    if verdict.error is None:
        assert verdict.score == (1.0 if verdict.correct else -1.0)
    return verdict.error or verdict.correct


# --- choice


@for_each_row(
    "response",
    [
        "B",
        "b",
        "(B)",
        "B.",
        "**B**",
        "Answer: B",
        "answer: b",
        "**Answer:** B",
        "**Answer: (B)**",
        "Final answer: B)",
        "The answer is: option B",
        "Answer: $\\boxed{B}$",
        "Answer: \\boxed{\\text{(B)}}",
        "Answer: B. A triangle",
        "Answer: B) 42",
        "Answer: (B) hepatitis B and a cold",
        "Answer: B: the mitochondria",
        "Answer: B - 1,200 cm",
        "Answer:\nB",
        "so \\boxed{B}",
        "so \\boxed{\\text{B}}",
        "so $\\boxed{\\mathrm{(B)}}$.",
        "A is wrong, C too.\nB",
        "A and C cannot be.\n\nThe answer is B.",
        "A and C cannot be.\n\nTherefore, the correct option is (B).",
        "The best choice: **B**",
        "<think>Answer: A</think>Answer: B",
        "Answer: B\nI am sure.\nAnswer: (B)",
        "Answer: B\nthat is \\boxed{C} in the book",
        "Ｂ",
    ],
)
def test_the_letter_is_found_in_many_forms(response):
    assert judged("choice", "B", response) is True
    assert judged("choice", "C", response) is False


@for_each_row(
    "response",
    [
        "",
        "Answer:",
        "\\boxed{}",
        "A or B",
        "Answer: A or B",
        "Answer: A, B",
        "Answer: A/B",
        "Answer: B and C",
        "Answer: AB",
        "Answer: B C",
        "Answer: (A) (B)",
        "Answer: B. C",
        "Answer: B) or C)",
        "Answer: B: C",
        "Answer: B. or maybe D",
        "Answer: B. the first, (C) the second",
        "Answer: B. vitamin C",
        "Answer: not B",
        "Answer: A\nAnswer: B",
        "Answer: B\nAnswer: A",
        "Answer: B\nAnswer:",
        "\\boxed{A} \\boxed{B}",
        "\\boxed{B} \\boxed{A}",
        "\\boxed{A, B}",
        "Answer: Because it is so",
        "Answer: Banana",
        "Answer: F",
        "I think that B",
        "It is A.\nOr the answer is B, I am not sure.",
        "A B C D E",
        "A\nB\nC",
        "B is right because\nof the sum",
        "A. red B. blue C. green",
        "<think>Answer: B",
    ],
)
def test_no_letter_or_several_letters_are_wrong_whatever_the_reference(response):
    for answer in "ABCDE":
        if (answer, response) != ("B", "<think>Answer: B"):
            assert judged("choice", answer, response) is False, answer


WITHOUT_OPTIONS = """
(B) is wrong|(B) or (c)|B) is certainly false; c) holds|(B) if x > 0, otherwise (d)|(B) was my first guess|B) no
(B) unless n = 0|B) but c) fits as well|(B) because a) fails|B. c) too|(B) rejected|B) cannot be|B) isn't it|(B)?
B) maybe|B) either way; d)|B: excluded|(B) not|B) 42 or 43|(B) d)|B. e. as well|(B) eliminated, so (c)|B) hardly; try e)
(B) looks right|B) probably|(B) rather than (a)|B) and (d)|(B) if even|B) is true only for n > 2|B) are both false
(B) and then again, after having thought of it for some more time, the third one of them|B) none of these|B) wrong!
"""


@for_each_row(
    "answer",
    [each for line in WITHOUT_OPTIONS.split("\n") for each in line.split("|") if each],
)
def test_a_clause_about_the_choice_is_no_choice(answer):
    for letter in "ABCDE":
        assert judged("choice", letter, f"Answer: {answer}") is False
        assert judged("choice", letter, f"\\boxed{{{answer}}}") is False


@pytest.mark.parametrize(
    "response", ["It is not {}.", "Anything except {}.", "{} is false.", "It can't be {}."]
)
def test_words_around_a_box_that_deny_it_make_no_choice(response):
    assert judged("choice", "B", response.format("\\boxed{B}")) is False
    assert judged("choice", "B", "It is \\boxed{B}.") is True


def test_a_text_after_the_letter_is_the_text_of_its_option_where_the_question_has_options():
    prompt = (
        "Which holds?\nA) x is odd\nB) x is even or not an integer\nC. the empty set\nD) 4.5 cm"
    )
    verifier = get_verifier("choice")
    for letter, text, expected in [
        ("B", "B) x is even or not an integer", True), ("B", "B) x is even or not an integer.", True),
        ("B", "B) x is even", True), ("C", "C) empty set", True), ("C", "C. The empty set", True),
        ("D", "(D) $4.5$ cm", True), ("A", "A) x is odd", True), ("B", "B", True),
        ("B", "B) x is odd", False), ("B", "B) is wrong", False), ("B", "B) the empty set", False),
        ("A", "A) x is even", False), ("D", "D) 45 cm", False), ("C", "C) empty set or A", False),
    ]:  # fmt: skip
        assert verifier(Problem("1", prompt, letter), f"Answer: {text}").correct is expected, text


EVEN = "Which number is even?\n(A) 17\n(B) 22\n(C) 19\n(D) 25"


@for_each_row(
    ("response", "expected"),
    [
        ("The answer is B) 22.", True),
        ("The correct answer is (B) 22.", True),
        ("A is odd, and so is C.\nSo the answer is: **(B) 22**", True),
        ("Option A is too small.\nThe answer is B) 22.", True),
        ("The best choice is B. 22", True),
        ("The answer is B) 25.", False),
        ("The answer is B) 22 or D) 25.", False),
        ("The answer is B, since 22 is even.", False),
        ("The answer is not B) 22.", False),
        ("The answer is C) 19.\nThe answer is B) 22.", False),
        ("The answers are B) 22.", False),
    ],
)
def test_the_last_line_may_name_the_option_with_its_text(response, expected):
    assert get_verifier("choice")(Problem("1", EVEN, "B"), response).correct is expected


RETRACTIONS = [
    "Wait, it is D.",
    "No, D.",
    "That is wrong.",
    "Actually, D.",
    "Sorry, I made a mistake.",
    "Hmm, no.",
]


@pytest.mark.parametrize("mark", ["Answer: {}\n", "\\boxed{{{}}}. "])
@for_each_row("retraction", RETRACTIONS)
def test_an_answer_that_is_taken_back_is_none(mark, retraction):
    assert judged("choice", "B", mark.format("B") + "I am sure.") is True
    assert judged("choice", "B", mark.format("B") + retraction) is False
    assert judged("gsm8k", "42", mark.format("42") + "I am sure.") is True
    assert judged("gsm8k", "42", mark.format("42") + retraction) is False
    assert judged("gsm8k", "42", "#### 42\nI am sure.") is True
    assert judged("gsm8k", "42", f"#### 42\n{retraction}") is False
    assert judged("gsm8k", "42", f"#### 41\n{retraction}\n#### 42") is True
    assert judged("exact", "42", mark.format("42") + "I am sure.", extract="final") is True
    assert judged("exact", "42", mark.format("42") + retraction, extract="final") is False


def test_lines_that_hold_only_a_letter_must_hold_the_same():
    assert judged("choice", "C", "A\nB\nC") is False
    assert judged("choice", "C", "The answer is A.\nC") is False
    assert judged("choice", "C", "C\nA is too small.\n(C)") is True


@pytest.mark.parametrize(
    ("answer", "reads"), [("(B)", True), ("b", True), ("B. red", True), ("\\text{B}", True)]
)
def test_a_reference_may_be_written_as_an_answer_may(answer, reads):
    assert judged("choice", answer, "Answer: B") is reads


@pytest.mark.parametrize("answer", ["", "F", "A or B", "42"])
def test_a_reference_that_is_no_letter_is_an_error_whatever_the_response(answer):
    message = f"choice: the reference {answer!r} is not one of the letters ABCDE"
    assert {judged("choice", answer, response) for response in ("A", "", answer)} == {message}


def test_there_may_be_two_letters_and_more_than_five():
    assert judged("choice", "J", "Answer: J", letters="ABCDEFGHIJ") is True
    assert judged("choice", "B", "Answer: B", letters="AB") is True


def test_the_letter_is_the_normalized_answer():
    verifier = get_verifier("choice")
    votes = [
        verifier(Problem("1", "Q", "B"), response).answer
        for response in ("Answer: (c)", "A or B", "B")
    ]
    assert votes == ["C", "", "B"]


# --- regex


@for_each_row(
    ("answer", "options", "response", "expected"),
    [
        (r"yes|no", {}, "yes", True),
        (r"yes|no", {}, " no\n", True),
        (r"yes|no", {}, "yes, no", False),
        (r"yes|no", {}, "Yes", False),
        (r"yes|no", {"ignore_case": True}, "Yes", True),
        (r"yes|no", {"match": "search"}, "I say no.", True),
        (r"\d+ km", {}, "<think>none</think>12 km", True),
        ("ignored", {"pattern": r"\d{4}-\d\d"}, "2024-05", True),
        ("ignored", {"pattern": r"\d{4}-\d\d"}, "2024-5", False),
        ("42", {"pattern": r"Result: (\d+)"}, "so\nResult: 42.", True),
        ("42", {"pattern": r"Result: (\d+)"}, "Result: 43", False),
        ("42", {"pattern": r"Result: (\d+)"}, "Result: 43\nResult: 42", False),
        ("42", {"pattern": r"Result: (\d+)"}, "Result: 42 and again Result: 42", True),
        ("42", {"pattern": r"(\d+)"}, " ".join(map(str, range(1000))), False),
        ("Ja", {"pattern": r"<(\w+)>", "ignore_case": True}, "<JA>", True),
        ("42", {"pattern": r"Result: (\d+)"}, "", False),
    ],
)  # fmt: skip
def test_the_pattern_comes_from_the_reference_or_its_group_is_compared_with_it(
    answer, options, response, expected
):
    assert judged("regex", answer, response, **options) is expected


def test_a_reference_that_is_no_pattern_is_an_error():
    assert "regex: the reference '(' raised" in judged("regex", "(", "(")
    assert (
        judged("regex", "", "")
        == "regex: the reference is empty, and there is no reward.options.pattern"
    )
    assert (
        judged("regex", "", "x", pattern="(x)")
        == "regex: the reference is empty, and the pattern's group is compared with it"
    )


def test_what_is_no_pattern_reads_no_answer_so_that_the_constructor_names_it():
    for pattern, reads in (("(a)", True), ("a", False), ("(", False), (3, False)):
        assert RewardSpec.of("regex", options={"pattern": pattern}).reads_answer is reads
    assert RewardSpec.of("regex").reads_answer is True


SLOW = ("a" * 60, "aab")
"""A text for which `(a+)+b` has no end, and one that matches."""


def test_a_response_for_which_a_pattern_takes_forever_is_wrong():
    with open_pool("regex", workers=1) as pool:
        verdicts = pool.submit(Problem("1", "Q", "(a+)+b"), SLOW, [(), ()]).result(60)
    assert [(verdict.correct, verdict.error) for verdict in verdicts] == [
        (False, None),
        (True, None),
    ]
    for options in ({"pattern": "((?:a+)+b)"}, {"pattern": "(?:a+)+b"}):
        assert [judged("regex", "aab", text, **options) for text in SLOW] == [False, True]


def test_the_limit_of_a_verdict_must_leave_time_for_a_pattern():
    RewardConfig(verifier="json_schema", timeout_s=1.5)
    for name in ("regex", "json_schema"):
        with pytest.raises(
            ValueError,
            match=f"{name}'s limit for a pattern=1 .s. must be less than reward.timeout_s",
        ):
            RewardConfig(verifier=name, timeout_s=1)


def test_a_pattern_that_takes_forever_for_any_text_is_an_error():
    pattern = "^((((.+)+)+)+)+!$"
    assert "took over 1 s of processor time" in judged("regex", pattern, "x")
    with pytest.raises(RewardError, match="took over 1 s of processor time"):
        get_verifier("regex", pattern=pattern)


def test_a_value_for_which_a_schema_takes_forever_is_wrong():
    pytest.importorskip("jsonschema")
    schema = {"type": "string", "pattern": "^(a+)+b$"}
    assert [judged("json_schema", "", f'"{text}"', schema=schema) for text in SLOW] == [False, True]


# --- json_schema

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer", "minimum": 0}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


@pytest.fixture
def jsonschema():
    return pytest.importorskip("jsonschema", reason="needs jsonschema")


GOOD = '{"city": "Rome", "people": 3}'


@for_each_row(
    ("response", "expected"),
    [
        (GOOD, True),
        (f"\n {GOOD}\n", True),
        (f"Here it is:\n```json\n{GOOD}\n```\nDone.", True),
        (f"```\n{GOOD}\n```", True),
        (f"<think>{{}}</think>{GOOD}", True),
        (f"```json\n{GOOD}\n```\n```json\n{GOOD}\n```", False),
        (f"```python\n{GOOD}\n```", False),
        (f"Here: {GOOD}", False),
        (f"{GOOD} {GOOD}", False),
        ("", False),
        ("{}", False),
        ("null", False),
        ('{"city": "Rome", "people": -1}', False),
        ('{"city": "Rome", "people": "3"}', False),
        ('{"city": "Rome", "people": 3, "more": 1}', False),
        ('{"city": "Rome", "people": NaN}', False),
        ('{"city": 1, "city": "Rome", "people": 3}', False),
        ("{'city': 'Rome', 'people': 3}", False),
        ('{"city": "Rome", "people": 3', False),
        ("[" * 100_000, False),
        ('{"city": "Rome", "people": ' + "9" * 5000 + "}", False),
    ],
)
def test_the_response_is_one_json_value_that_the_schema_allows(jsonschema, response, expected):
    assert judged("json_schema", "", response, fields={"schema": SCHEMA}) is expected


def test_the_schema_may_stand_in_the_row_as_text_in_the_reference_or_in_the_options(jsonschema):
    text = '{"type": "integer"}'
    for answer, fields, options in [
        ("", {"schema": text}, {}),
        (text, {}, {}),
        ("", {}, {"schema": {"type": "integer"}}),
    ]:
        assert judged("json_schema", answer, "3", fields=fields, **options) is True
        assert judged("json_schema", answer, '"3"', fields=fields, **options) is False


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", "json_schema: problem '1' has no schema: no field 'schema', an empty reference"),
        ("42", "json_schema: the schema '42' raised ValueError: expected a mapping, got a int"),
        ("{", "json_schema: the schema '{' raised JSONDecodeError"),
        ('{"type": "whole"}', "raised SchemaError: 'whole' is not valid"),
        ('{"$ref": "http://127.0.0.1:9/x"}', "raised Unresolvable: http://127.0.0.1:9/x"),
    ],
)
def test_a_row_without_a_usable_schema_is_an_error_and_nothing_is_fetched(
    jsonschema, answer, message
):
    assert message in judged("json_schema", answer, "{}")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "choice",
            {"letters": "abc"},
            "choice: letters must be different capitals such as ABCDE, got 'abc'",
        ),
        ("choice", {"letters": "AA"}, "choice: letters must be different capitals"),
        ("regex", {"pattern": "("}, "regex: the pattern '(' raised"),
        ("regex", {"pattern": ""}, "regex: pattern must be a regular expression, got ''"),
        (
            "regex",
            {"pattern": "(a)(b)"},
            "regex: the pattern '(a)(b)' has 2 groups; one is compared",
        ),
        ("regex", {"match": "part"}, "regex: match must be one of full, search, got 'part'"),
        ("regex", {"ignore_case": 1}, "regex: ignore_case must be true or false, got 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(name, options, message):
    with pytest.raises(RewardError) as caught:
        get_verifier(name, **options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{}", "schema must be a JSON schema as a mapping, got '{}'"),
        ({"type": 3}, "is not a JSON schema: it raised"),
    ],
)
def test_a_schema_in_the_options_is_checked_before_anything_runs(jsonschema, schema, message):
    with pytest.raises(RewardError, match="json_schema") as caught:
        get_verifier("json_schema", schema=schema)
    assert message in str(caught.value)
