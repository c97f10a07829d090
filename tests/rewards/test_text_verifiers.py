"""The verifiers that compare text or numbers: exact, gsm8k, math_dapo."""

import json

import pytest

from benchmarks.verifier_report import read_cases
from dapo.rewards import get_verifier
from dapo.rewards.verifiers.math_dapo import normalize
from dapo.types import Problem
from helpers.released import GSM8K_TEST, GSM8K_TRAIN, released
from helpers.tables import for_each_row


def judged(name, answer, response, question="Q", **options):
    """True, False, or the error."""
    verdict = get_verifier(name, **options)(Problem("1", question, answer), response)
    if verdict.error is None:
        assert verdict.score == (1.0 if verdict.correct else -1.0)
    return verdict.error or verdict.correct


@for_each_row(
    "response",
    ["12", " 12\n", "12.", "**12**", "**12.**", "$12$", "`12`", '"12"', "\\boxed{12}"],
)
def test_exact_takes_the_answer_itself_in_any_wrapping(response):
    assert judged("exact", "12", response) is True


@for_each_row(
    "response",
    [
        "",
        "13",
        "12 13",
        "12 or 13",
        "3 + 9 = 12",
        "The answer is 12",
        "Answer: 12",
        "12\n12",
        "1 2",
        "-12",
        "12%",
        "012",
    ],
)
def test_exact_takes_nothing_else(response):
    assert judged("exact", "12", response) is False


def test_exact_ignores_case_by_default():
    assert judged("exact", "Paris", "paris.") is True
    assert judged("exact", "Paris", "paris", ignore_case=False) is False
    assert judged("exact", "New  York", "new york") is True
    assert judged("exact", "12", "<think>3 + 9</think>\n12") is True


@pytest.mark.parametrize(
    ("options", "response", "expected"),
    [
        ({"extract": "answer_line"}, "3 + 9 is\nAnswer: 12.", True),
        ({"extract": "answer_line"}, "12", False),
        ({"extract": "last_number"}, "3 + 9 = 12, I think.", True),
        ({"extract": "last_number"}, "12.0 dollars", True),
        ({"extract": "last_number"}, "12, no: 13", False),
        ({"extract": "last_number"}, "twelve", False),
        ({"extract": "final"}, "The answer is 12.", True),
        ({"extract": "final"}, "12, no: 13", False),
    ],
)
def test_exact_reads_the_configured_part_of_the_response(options, response, expected):
    assert judged("exact", "12", response, **options) is expected


@pytest.mark.parametrize(
    ("name", "options", "response"),
    [
        ("math", {}, "Answer: {}"),
        ("math_dapo", {}, "Answer: {}"),
        ("gsm8k", {}, "#### {}"),
        ("exact", {}, "{}"),
        ("exact", {"extract": "answer_line"}, "Answer: {}"),
        ("exact", {"extract": "last_number"}, "It is {}"),
        ("exact", {"extract": "final"}, "It is {}."),
    ],
)
def test_a_reference_that_is_a_json_list_of_one_text_is_that_text(name, options, response):
    assert judged(name, '["36"]', response.format(36), **options) is True
    assert judged(name, '["36"]', response.format(63), **options) is False


def test_exact_accepts_a_list_of_one_where_the_question_asks_for_a_list():
    assert judged("exact", '["a"]', '["a"]') is True
    assert judged("exact", '["a", "b"]', "a") is False
    assert judged("exact", '["..."]', "") is False


def test_exact_without_a_usable_reference_is_an_error_not_a_wrong_answer():
    assert judged("exact", " ", "12") == "exact: the reference is empty (' ')"
    assert "is not a number, which extract=last_number needs" in judged(
        "exact", "x", "x", extract="last_number"
    )


@for_each_row(
    ("response", "expected"),
    [
        ("It is 6 * 200.\n#### 1200", True),
        ("#### 1,200", True),
        ("#### $1,200.00", True),
        ("#### \\$1{,}200", True),
        ("#### 1200 dollars", True),
        ("#### **1200**", True),
        ("####1200.", True),
        ("#### 5\nno, wait\n#### 1200\nbye", True),
        ("Answer: she makes $1200.", True),
        ("\\boxed{1200}", True),
        ("#### 1200 or 1300", False),
        ("#### 1200\n#### 5", False),
        ("#### -1200", False),
        ("#### 1,2,0,0", False),
        ("#### twelve hundred", False),
        ("#### ", False),
        ("1200", False),
        ("", False),
    ],
)
def test_gsm8k_compares_the_one_marked_number_by_value(response, expected):
    assert judged("gsm8k", "6 * 200 = <<6*200=1200>>1200\n#### 1,200", response) is expected


def test_gsm8k_flexible_takes_the_last_number_where_nothing_is_marked():
    assert judged("gsm8k", "7", "so 3 and then 7", flexible=True) is True
    assert judged("gsm8k", "7", "so 3, 5 and then 7", flexible=True) is True
    assert judged("gsm8k", "7", "#### 3\nor 7", flexible=True) is False
    assert judged("gsm8k", "7", "none", flexible=True) is False


SOLUTION = "He has 2*8 = <<2*8=16>>16 and 16-3=<<16-3=13>>13.\n#### 13"


@for_each_row(
    ("response", "score"),
    [
        ("2*8 = 16 and 16-3 = 13.\n#### 13", 1.0),
        ("#### 13", 1.0),
        ("2*8 = 16 and 16-3 = 13.\n#### 12", 0.0),
        ("<<2*8=16>>16 and $16-$3 = \\$13.00\n#### 12", 0.0),
        ("2*8 = 16 and 16-3 = 12.\n#### 12", -0.5),
        ("2*8 = 16.\n#### 16", -0.5),
        ("2*8 = 16, 16+1 = 17, 17-4 = 13, 13+1 = 14.\n#### 14", -0.5),
        ("1+1 = 2, 2*8 = 16, 16-3 = 13, 13+1 = 14.\n#### 14", -0.5),
        ("2*8 = 16 = 16 = 16.\n#### 16", -0.5),
        ("= 16 - 3 = 13 x 2 = 26\n#### 26", -1.0),
        ("= 16 \\times 3 = 13 \\cdot 2 = 26\n#### 26", -1.0),
        ("= 16(3) = 13 (2) = 26\n#### 26", -1.0),
        ("2*8 = 16 (boxes) and 16-3 = 13 (one is open).\n#### 12", 0.0),
        ("$2*8 = 16$ and $16-3 = \\$13$ dollars.\n#### 12", 0.0),
        ("16 and 13\n#### 12", -1.0),
        ("", -1.0),
    ],
)
def test_gsm8k_partial_credit_is_the_share_of_the_solutions_results_among_as_many_first_ones(
    response, score
):
    verifier = get_verifier("gsm8k", partial_credit=True)
    verdict = verifier(Problem("1", "Q", "13", fields={"note": 7, "answer": SOLUTION}), response)
    assert verdict.score == pytest.approx(score)
    assert verdict.correct is (score == 1)
    assert verifier(Problem("1", "Q", SOLUTION), response) == verdict
    whole = get_verifier("gsm8k")(Problem("1", "Q", SOLUTION), response)
    assert (whole.correct, whole.answer) == (verdict.correct, verdict.answer)


def test_gsm8k_partial_credit_without_a_worked_solution_is_an_error():
    verdict = get_verifier("gsm8k", partial_credit=True)(Problem("1", "Q", "#### 13"), "#### 13")
    assert verdict.error == (
        "gsm8k: partial_credit compares with a worked solution, and no column of the row has text"
        " before ####"
    )


def test_gsm8k_reads_signs_and_decimals_of_the_reference():
    assert judged("gsm8k", "#### -7.50", "#### -7.5") is True
    assert judged("gsm8k", "18", "#### 18.0") is True
    assert "does not end in a number" in judged("gsm8k", "#### many", "#### 7")
    assert "does not end in a number" in judged("gsm8k", "", "#### 7")


@pytest.mark.parametrize("file", [GSM8K_TRAIN, GSM8K_TEST, *released("gsm8k/test.jsonl")])
def test_every_gsm8k_reference_judges_its_own_solution_right(file):
    verifier = get_verifier("gsm8k")
    for row in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        problem = Problem("1", row["question"], row["answer"])
        assert verifier(problem, row["answer"]).correct is True
        assert verifier(problem, row["answer"] + "1").correct is False


@for_each_row(
    ("answer", "response", "expected"),
    [
        ("34", "Answer: 34", True),
        ("34", "answer : 34", True),
        ("34", "The Answer:34", True),
        ("34", "Answer:\n\n34", True),
        ("34", "Answer: $34$", True),
        ("34", "Answer: \\boxed{34}", True),
        ("34", "Answer: $\\boxed{34}$.", True),
        ("34", "Answer: 3\nAnswer: 34", True),
        ("34", "Answer: x = 34", True),
        ("34", "Answer: 34 square units", True),
        ("34", "Answer: 34^\\circ", True),
        ("34", "Answer: \\text{34}", True),
        ("34", 'Answer: "34"', True),
        ("1234", "Answer: 1,234", True),
        ("1234", "Answer: 1{,}234", True),
        ("\\frac{1}{2}", "Answer: \\frac12", True),
        ("\\sqrt{2}", "Answer: \\sqrt2", True),
        # quirks, kept
        ("34", "**Answer:** 34", False),
        ("34", "Answer: 34.", False),
        ("34", "Answer: \\(34\\)", False),
        ("34", "Answer: 34.0", False),
        ("34", "Answer: 5 = 34", True),
        ("34", "Answer: one of $34$ and $35$", True),
        ("34", "Answer: 3 4", True),
        ("34", "Answer: 34 is it. Answer: 35", False),
        ("34", "Answer: 34 minutes feet km", True),
        ("can", "Answer: c", False),
        ("0.5", "Answer: 1/2", False),
        ("34", "\\boxed{34}", False),
        ("34", "34", False),
        ("34", "", False),
        ("34", "Answer: 34\n" + "x" * 300, False),
        ("34", "Answer: 34\n" + "x" * 289, True),
        ("34", "x" * 400 + "Answer: 34", True),
        ("[INVALID]", "nothing", True),
    ],
)
def test_math_dapo_judges_as_released(answer, response, expected):
    assert judged("math_dapo", answer, response) is expected


@for_each_row(
    ("answer", "expected"),
    [
        ("a cat", "cat"),
        ("banana ", "banan"),
        ("an apple", "apple"),
        ("x = y = 5", "5"),
        ("$5.$", "5"),
        ("\\$5", "5"),
        ("5\\ 6", "56"),
        ("\\mbox{even}", "even"),
        ("x,\\text{and}y", "x,y"),
        ("1,\\text{and}2", "12"),
        ("1 \\text{ and } 2", "12"),
        ("5\\text{ m}", "5"),
        ("5\\text{ m}^2", "5"),
        ("5 \\text{s}", "5"),
        ("7\\mathrm{th}", "7"),
        ("90^{\\circ}", "90"),
        ("1,\\!000", "1000"),
        ("12,34", "1234"),
        ("1,2.5", "1,2.5"),
        ("-1,234", "-1,234"),
        ("before $x$ after $y$", "x"),
        ("\\textbf{7}", "7"),
        ("\\overline{AB}", "AB"),
        ("\\text{a}\\text{b}", "ab"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1}+\\boxed{2}", "1}+\\boxed{2"),
        ("\\frac123", "\\frac{1}{2}3"),
        ("\\frac1{2}", "\\frac{1}{{}2}"),
        ("\\sqrt3x", "\\sqrt{3}x"),
        ("issue", "is"),
        ("always", "al"),
        ("1,2,\\ldots", "12"),
        ("\\dots5", "5"),
        ("", ""),
    ],
)
def test_math_dapo_normalises_as_released(answer, expected):
    assert normalize(answer) == expected


def test_exact_final_reads_a_number_only_where_the_reference_is_one():
    assert judged("exact", "2 7 9", "2 7 9.", extract="final") is True
    assert judged("exact", "2 7 9", "sorted: 2 7 9", extract="final") is False
    question = "Which is the largest of these numbers: 2, 7, 9?"
    assert judged("exact", "9", "the largest is 9", question, extract="final") is True
    assert judged("exact", "9", "sorted: 2 7 9", question, extract="final") is False


STATED = r"""42 | 42. | **42** | $42$ | "42" | (42) | 42.0 | ４２ | ＝ 42 | 42 😀 | 42 apples | There are 42.
It is 42! | The answer is 42. | The answer is **42**. | 42 is the answer. | Answer: 42 | \boxed{42}
The answer is $\boxed{42}$. | 12 + 30 = 42 | 12 + 30 = 42. | 12 + 30\n= 42 | 12 × 30 = 42
The sum of 12 and 30 is 42. | 12 plus 30 is 42 | 12 + 30 → 42 | 12 + 30 equals 42, so the answer is 42.
So, 12 + 30 = 42.\n\nThe answer is 42 | 4 + 3 = 7. 12 + 30 = 42 | The sum is: 42
12 + 30 = 42\n\nI am ready to help. | <think>41</think> 42
What is 12 + 30? 42"""
HEDGED = r"""1 or 2 or 42 | 1, 2, 42 | 1/42 | 1 2 3 42 | 0 1 2 3 4 42 | 42 41 | 41 and 42 | either 41 or 42
42; 43 | 42 … 43 | 42 to 43 | 42-43 | 42–43 | between 42 and 43 | [41, 42] | {42, 41} | (41) (42) | 41 → 42
41 = 42 | 40 = 41 = 42 | 42 or so | 42 or forty-three | maybe 41, maybe 42 | is 41, is 42
It is 1, it is 2, it is 42. | It is 1. It is 2. It is 42. | 41? 42? | It could be 41. It could be 42.
The answer is 41 or 42 | The answer is 1. The answer is 42. | 1\n2\n42 | - 1\n- 2\n- 42 | 1.\n2.\n42.
1. 2. 42. | Answer: 41\nAnswer: 42 | Answer: 42\nAnswer: something | Answer: 41, 42 | \boxed{41} \boxed{42}
12 or 30 or 42 | 12, 30, 42 | 12/30/42 | What is 12 + 30?"""
DENIED = r"""anything but 42 | 42 is false | all except 42
not 42 | It is not 42 | It isn't 42. | 42 is wrong | 42. No, that is wrong.
The answer is 42. No, 41. | never 42 | ≠ 42 | 42? | Is it 42? | about 42 | less than 42 | more than 42
at least 42 | ~42 | ≈ 42 | < 42"""
ANOTHER = r"""-42 | −42 | - 42 | minus 42 | negative 42 | ±42 | \pm 42 | +-42 | --42 | 4 2 | 1,42 | 4,2 | 42k
x42 | 42 million | 42e1 | 1e42 | 0x42 | 42_1 | √42 | \sqrt{42} | 42² | ½ 42 | 42/1 | \frac{42}{1} | 42^1 | |-42
42 + 0 | 12 + 30 | 42%41 | 41.42 | ٤٢ | 42万 | 420 | 0.42 | 42.5 | twice 42 | half of 42 | 42 squared
42 hundred | a dozen 42 | \lnot 42 | !42 | (42!)! | int(42) | one of the 42 | 4{,}2 | 4\,2"""


def texts(table):
    return [
        text.strip().replace(r"\n", "\n")
        for line in table.splitlines()
        for text in line.split(" | ")
    ]


@for_each_row("response", texts(STATED))
def test_exact_final_reads_the_one_number_that_a_response_states(response):
    assert judged("exact", "42", response, extract="final") is True


@for_each_row("response", texts(HEDGED) + texts(DENIED) + texts(ANOTHER))
def test_exact_final_refuses_several_numbers_a_denial_and_another_value(response):
    assert judged("exact", "42", response, extract="final") is False


@for_each_row(
    "other",
    texts(
        "minus 42 | twice 42 | half of 42 | 42 squared | 42 thousand | at least 42 | about 42 | one"
        " of 42 | root 42"
    ),
)
def test_exact_final_refuses_a_response_whose_earlier_sentence_states_another_value(other):
    assert judged("exact", "42", f"It is {other}. It is 42.", extract="final") is False
    assert judged("exact", "42", "It is 42. It is 42.", extract="final") is True


TIMES = 'How many times does the letter "t" appear in the word "parrot"?'
LARGEST = "Which is the largest of these numbers: 17, 91, 86? Reply with only the answer."


@for_each_row(
    ("question", "response", "value"),
    [
        (
            "What is the greatest common divisor of 4 and 20?",
            "The greatest common divisor of 4 and 20 is 4.",
            4,
        ),
        (
            "What is the remainder when 142 is divided by 100?",
            "The remainder when 142 is divided by 100 is 42.",
            42,
        ),
        (
            "What is 90 + 7?",
            "This is a classic problem involving integer arithmetic. The answer is 97.",
            97,
        ),
        ("What is 2 * 6?", "2 * 6 equals 12.", 12),
        (TIMES, 'The letter "t" appears 1 time in the word "parrot."', 1),
        ("What is 12 + 12?", "12 + 12 equals 24, so that's the answer you asked.", 24),
        ("What is 12 + 12?", "12 + 12 equals 24, so the answer is 24.", 24),
        ("What is 1 + 10?", "1 + 10 = 11 in this context.", 11),
        ("What is 9 * 6?", "The answer to 9 * 6 would be 54.", 54),
        (LARGEST, "17 is the largest of these numbers.", 17),
        (LARGEST, "The largest of the given numbers is 17", 17),
        (LARGEST, "The largest number is 17.", 17),
        (LARGEST, "The largest of these numbers is 91, and it's a multiple of both 97", None),
        (LARGEST, "The largest of these numbers is 86, which is 4 more than 86.", None),
        (LARGEST, "The smallest of these numbers is 17.", None),
        (LARGEST, "One of these numbers is 17.", None),
        (LARGEST, "17 is one of the numbers.", None),
        (LARGEST, "The square of the largest of these numbers is 17.", None),
        (LARGEST, "It is the square root of 17.", None),
        (LARGEST, "It is 17 twelfths.", None),
        ("What is 9 * 6?", "The answer plus 1 is 54.", None),
        ("What is 9 * 6?", "The next answer is 54.", None),
        (
            "What is 1 ÷ 7?",
            "To calculate 1 ÷ 7, you can simply perform the division operation, which is ",
            None,
        ),
        (LARGEST, "1. 5\n2. 3\n3. 6", None),
        ("What is 12 + 30?", "1. Add 12 and 30 to get 42.\n2. So the answer is 42.", 42),
        ("What is 12 + 30?", "1. Add the tens.\n2. Add the ones.\n\nThe answer is 42.", 42),
        ("What is 12 + 30?", "1) Add.\n2) It is 42.", 42),
        ("What is 12 + 30?", "1. It is 41.\n2. It is 42.", None),
        ("What is 3 + 2?", "3 + 2 = 5 in decimal form", 5),
        ("What is 3 + 2?", "3 + 2 = 5 in binary", None),
    ],
)
def test_exact_final_reads_sentences_of_a_small_model_as_a_person_does(question, response, value):
    stated = {
        n
        for n in range(100)
        if judged("exact", str(n), response, question, extract="final") is True
    }
    assert stated == ({value} - {None})


@pytest.mark.parametrize("table", ["subjects", "unseen 2", "contexts"])
def test_exact_final_and_gsm8k_read_sentences_and_nouns_as_math_does(table):
    cases = [case for case in read_cases(table) if not case.expected]
    for name, options in (("gsm8k", {}), ("exact", {"extract": "final"})):
        paid = [
            c for c in cases if judged(name, c.truth, c.response, c.question, **options) is True
        ]
        assert [(c.truth, c.response) for c in paid] == []


COST = "A pen costs $3 and a book costs $10. What is the total cost?"


@pytest.mark.parametrize("mark", ["#### {}", "Answer: {}"])
def test_gsm8k_takes_only_the_currency_of_the_reference_or_of_the_question(mark):
    for other in texts(
        "13 cents | 13 euros | €13 | £13 | 13¢ | 13% | 13 percent | 13 dollars per day"
    ):
        assert judged("gsm8k", "#### \\$13", mark.format(other)) is False, other
        assert judged("gsm8k", "#### 13", mark.format(other), COST) is False, other
        assert judged("math", "13", f"Answer: {other}", COST) is False, other
    for own in texts("$13 | 13 dollars | 13 | $13.00"):
        assert judged("gsm8k", "#### $13", mark.format(own)) is True, own
        assert judged("gsm8k", "#### 13", mark.format(own), COST) is True, own
    assert (
        judged(
            "gsm8k",
            "#### 13",
            mark.format("13 cents"),
            "A pen costs $0.13. How many cents is that?",
        )
        is True
    )


@pytest.mark.parametrize("mark", ["#### {}", "Answer: {}", "so \\boxed{{{}}}"])
def test_gsm8k_refuses_signs_and_symbols_that_make_another_value(mark):
    for text in [
        *texts(DENIED),
        *texts(ANOTHER),
        "1 or 42",
        "41} or \\boxed{42",
        "41 and 42",
        "41/42",
        "42, 43",
        "41 = 42",
        "42 or so",
    ]:
        assert judged("gsm8k", "#### 42", mark.format(text)) is False, text


@for_each_row(
    "text",
    texts(r"-42 | −42 | –42 | - 42 | -$42 | $-42 | -\$42 | - $42 | (-42) | －４２ | x = -42"),
)
def test_gsm8k_reads_one_sign(text):
    assert judged("gsm8k", "#### -42", f"#### {text}") is True
    assert judged("gsm8k", "#### 42", f"#### {text}") is False


UNITS = r"""$42 | \$42.00 | 42 dollars | €42 | 42% | 42\% | (42) | +42 | 42 km/h | $42/hour | 42 cents per day
**42** | 42. | 42! | There are 42 apples | She has 42 left over. | \text{42} | 42\text{ cm} | 42cm | 42°
x = 42 | 12 + 30 = 42 | $\$42$ | \(42\) | 42-inch | USD 42 | Rs. 42 | a total of 42 | 42 square feet"""


def test_gsm8k_reads_units_and_money_around_its_number():
    for text in texts(UNITS):
        assert judged("gsm8k", "#### 42", f"#### {text}") is True, text
    for text, question in (
        ("42 times", "How many times did it rain?"),
        ("42 more", "How many more does she need?"),
    ):
        assert judged("gsm8k", "#### 42", f"#### {text}", question) is True, text
        assert judged("gsm8k", "#### 42", f"#### {text}") is False, text


NESTED = 12_000
HOSTILE = {
    "nested boxes": "\\boxed{" * NESTED + "41" + "}" * NESTED,
    "nested text commands": "\\text{" * NESTED + "41" + "}" * NESTED,
    "nested emphasis": "**" * NESTED + "41" + "**" * NESTED,
    "nested quotes": "“" * NESTED + "41" + "”" * NESTED,
    "brackets": "(" * NESTED + "41" + ")" * NESTED,
    "half a pair": "Answer: \ud83d42",
    "the other half": "#### 42\udc00",
    "NUL": "Answer: 4\x002",
    "escape": "Answer: \x1b[31m41\x1b[0m",
    "right to left": "Answer: \u202e24\u202c or 42",
    "zero width": "\u200b".join("Answer: 42"),
    "combining": "Answer: 4\u03382",
    "byte order": "\ufeffAnswer\ufeff: 4\ufeff2",
    "superscript": "Answer: ⁴²",
    "subscript": "Answer: ₄₂",
    "circled": "Answer: ㊷",
    "bold digits": "Answer: 𝟒𝟐 or 𝟒𝟑",
    "Roman": "Answer: ⅩⅬⅡ",
    "Arabic digits": "Answer: ٤٢",
    "Chinese": "答案是四十二",
    "Thai digits": "Answer: ๔๒",
    "digits without end": "Answer: " + "4" * 50_000,
    "decimals without end": "Answer: 42." + "0" * 50_000 + "1",
    "zeros in front": "Answer: " + "0" * 50_000 + "43",
    "commas": "Answer: 42" + "," * 50_000 + "1",
    "signs": "Answer: " + "-" * 50_000 + "42",
    "equals signs": "Answer: " + "41 = " * 20_000 + "42",
    "sentences": "It is 41. " * 10_000 + "It is 42.",
    "claims": "is 41 " * 10_000 + "is 42",
    "operations": "Answer: " + "1 + " * 20_000 + "1",
    "spaces": "Answer: 41" + " " * 90_000 + "42",
    "line ends": "41" + "\r\n\x0b\x0c\x85\u2028" * 10_000 + "42",
    "open emphasis": "Answer: " + "*a" * 40_000,
    "open underscores": "Answer: " + "_4_" * 30_000,
    "open ticks": "`" * 50_001 + "42",
    "infinity": "Answer: inf",
    "not a number": "Answer: nan",
    "exponent": "Answer: 4.2e1000000000",
    "hexadecimal": "Answer: 0x2a",
    "binary": "Answer: 0b101010",
    "Python's digits": "Answer: 4_2",
    "a program": "Answer: int('41')",
    "all letters": "A B C D E",
    "letters, one a line": "A\nB\nC\nD\nE\nB or C",
    "a Cyrillic letter": "Answer: В",
    "a Greek letter": "Answer: Β",
    "a letter in a word": "Answer: But",
    "two letters in one box": "\\boxed{B\\text{ or C}}",
    "HTML": "<b>42</b> <i>43</i>",
    "markers": "#### " * 20_000 + "#### 41",
    "a marker without text": "#### 41 ####",
    "think without end": "<think>" * 10_000 + "</think>" * 10_000,
}


@for_each_row("name", HOSTILE)
def test_no_hostile_text_is_right_or_an_error_for_any_text_verifier(name):
    response = HOSTILE[name]
    for verifier, options, answer in (
        ("exact", {}, "42"),
        ("exact", {"extract": "final"}, "42"),
        ("exact", {"extract": "answer_line"}, "42"),
        ("gsm8k", {}, "#### 42"),
        ("choice", {}, "B"),
        ("regex", {}, r"Answer: 42|\{\"x\": 42\}"),
        ("regex", {"pattern": r"Answer: ([\d.,]+)"}, "42"),
        ("math_dapo", {}, "42"),
    ):
        assert judged(verifier, answer, response, **options) is False, (verifier, options)


NOT_THE_JSON = {
    "JSON twice": '{"x": 42} {"x": 42}',
    "JSON, repeated key": '{"x": 41, "x": 42}',
    "JSON, deep": '{"x":' * 5_000 + "42" + "}" * 5_000,
    "JSON in a list": '[{"x": 42}]',
    "JSON, text": '{"x": "42"}',
    "JSON, comment": '{"x": 42} // right',
    "a fence of another language": '```python\n{"x": 42}\n```',
    "a schema": '{"const": {"x": 42}}',
}


@for_each_row("name", [*HOSTILE, *NOT_THE_JSON])
def test_no_hostile_text_is_right_or_an_error_as_json(name):
    pytest.importorskip("jsonschema", reason="needs jsonschema")
    assert judged("json_schema", '{"const": {"x": 42}}', (HOSTILE | NOT_THE_JSON)[name]) is False


def test_a_number_of_any_length_is_judged_and_a_denial_is_no_answer():
    digits = "9" * 50_000
    for name, options in (("gsm8k", {}), ("exact", {"extract": "last_number"})):
        verifier = get_verifier(name, **options)
        for answer, expected in (("42", False), (digits, True)):
            verdict = verifier(Problem("1", "Q", answer), f"Answer: {digits}")
            assert (verdict.correct, verdict.error) == (expected, None)
    assert get_verifier("gsm8k")(Problem("1", "Q", "42"), "Answer: not 42").correct is False
    assert get_verifier("gsm8k")(Problem("1", "Q", "42"), "#### isn't 42").correct is False
