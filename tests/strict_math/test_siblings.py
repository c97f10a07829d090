r"""`math` on siblings of reported mistakes: units, disowned boxes, languages, symmetric forms,
decorations.

Half of the rows of `math_siblings.jsonl` were written before the rules and judged for the first
time after them.
"""

import json
import re
from itertools import product
from pathlib import Path

import pytest

from benchmarks.verifier_report import read_cases
from dapo.libs.strict_math import Reference
from dapo.libs.strict_math.languages import LANGUAGES
from dapo.rewards import get_verifier
from dapo.types import Problem

ROWS = [
    json.loads(line)
    for line in (
        (Path(__file__).parents[1] / "data" / "math_siblings.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
]
MISJUDGED = {
    ("408", "Answer: 408*"),
    ("13", "Answer: x = 13"),
    ("13", "Answer: 13 is the largest prime factor of 91"),
    ("57", "--- \n\\boxed{57}\n---"),
    ("13", "Answer: x: 13"),
    ("3:4", "Answer: The ratio is 3:4."),
    ("1234", "Answer: 1\\quad 234"),
    ("38", "Answer: x==38"),
    ("26", "Answer: ${26}"),
    ("\\binom{10}{3}", "Answer: C_{10}^{3}"),
    ("\\binom{10}{3}", "Answer: _{10}C_3"),
    ("13", "Answer: remainder 13"),
    ("\\frac{3}{4}", "Answer: \\frac{3}{4} (or 0.75)"),
    ("\\frac{3}{4}", "Answer: 0.75 (i.e., 3/4)"),
    ("1-\\frac{1}{e}", "Answer: -\\frac1e+1"),
}
"""The rows that `math` judges otherwise than their label."""
VERIFIER = get_verifier("math")


def is_right(truth, response, question="Compute the value."):
    return VERIFIER(Problem("1", question, truth), response).correct is True


def test_the_siblings_are_judged_as_labelled_but_for_those_named():
    found = {
        (row["truth"], row["response"])
        for row in ROWS
        if is_right(row["truth"], row["response"], row["question"]) != row["expected"]
    }
    assert len(ROWS) > 1900
    assert found == MISJUDGED


UNITS = {
    "m": "m meters metres", "s": "s seconds sec", "kg": "kg kilograms", "cm": "cm centimeters", "km": "km kilometers",
    "h": "h hours hr",
    "g": "g grams", "N": "N newtons", "J": "J joules", "W": "W watts", "V": "V volts", "Hz": "Hz hertz",
    "Pa": "Pa pascals", "mL": "mL milliliters", "cm^2": "cm^2 cm²", "m^3": "m^3 m³", "km/h": "km/h", "m/s^2": "m/s^2",
}  # fmt: skip
OTHERS = {"m": "cm", "s": "minutes", "kg": "g", "cm": "mm", "km": "m", "h": "s", "g": "mg", "N": "kN", "J": "kJ",
          "W": "kW", "V": "mV", "Hz": "kHz", "Pa": "kPa", "mL": "L", "cm^2": "m^2", "m^3": "cm^3", "km/h": "m/s",
          "m/s^2": "m/s"}  # fmt: skip
ASKED = [
    "What is the result in {}?",
    "Find the length (in {}).",
    "Express it in $\\mathrm{{{}}}$.",
    "Find it in $\\text{{{}}}$.",
]


@pytest.mark.parametrize("unit", UNITS)
def test_each_unit_in_each_spelling_of_question_and_answer_is_itself_and_no_other(unit):
    base, power, exponent = unit.partition("^")
    for text, spelling in product(ASKED, UNITS[unit].split()):
        question = text.format(unit)
        assert is_right("13", f"Answer: 13 {spelling}", question), (question, spelling)
        assert is_right("13", f"Answer: 13 \\text{{ {base}}}{power}{exponent}", question), question
        assert not is_right("13", f"Answer: 13 {OTHERS[unit]}", question), question
        assert not is_right("13", f"Answer: 13 {unit} per day", question)


@pytest.mark.parametrize("capitals", ["5 cM", "5 Mm", "5 Cm", "5 MM", "5 dm"])
def test_capitals_make_another_prefix(capitals):
    assert is_right("5 cm", "Answer: 5 CM")
    assert not is_right("5 cm", f"Answer: {capitals}")


FINISHED = [
    ("e^{-1}", "\\frac{1}{e}"), ("2\\pi^{-1}", "\\frac{2}{\\pi}"), ("x^{1/2}", "\\sqrt{x}"),
    ("x^{3/2}", "\\sqrt{x^3}"),
    ("(x+1)^{1/2}", "\\sqrt{x+1}"), ("x^{-2}", "\\frac{1}{x^2}"), ("3x^{-4}", "\\frac{3}{x^4}"),
    ("xy", "y \\cdot x"),
    ("abc", "b c a"), ("kx", "xk"), ("1-e^{-2}", "1-\\frac{1}{e^2}"), ("0.5", "50\\%"),
    ("\\binom{9}{4}", "{9 \\choose 4}"),
    ("1101_2", "1101 base 2"), ("[2, 5)", "[2, 5["),
    ("\\text{no solution}", "there are no real solutions"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "[[1, 2], [3, 4]]"), ("\\frac{3}{4}", "75\\%"),
    ("e^{2x}", "\\exp(2x)"), ("y^{-1/2}", "\\frac{1}{\\sqrt{y}}"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), FINISHED)
def test_two_finished_forms_are_equal_in_either_order(one, other):
    assert is_right(one, f"Answer: {other}")
    assert is_right(other, f"Answer: {one}")


def test_no_pair_of_numbers_in_the_tables_depends_on_the_order():
    number = re.compile(r"-?\d+(?:\.\d+)?|[a-z]{2}|-?[a-z]\^\{-?\d\}")
    for name in ("cases", "families", "unseen", "notations"):
        for case in read_cases(name):
            answer = case.response.removeprefix("Answer: ").strip("$")
            if number.fullmatch(answer) and number.fullmatch(case.truth):
                one = Reference.read(case.truth)
                other = Reference.read(answer)
                assert one is not None
                assert other is not None
                assert one.matches(answer) == other.matches(case.truth), (case.truth, answer)


@pytest.mark.parametrize("sign", ["\\%", "%", " percent", "\\text{ per cent}", "\\%\\%"])
@pytest.mark.parametrize(
    "truth", ["\\sqrt{2}", "2\\frac13", "3:4", "3.2 \\times 10^5", "\\frac{\\sqrt3}{2}", "\\pi"]
)
def test_per_cent_of_a_value_is_not_the_value(truth, sign):
    assert is_right(truth, f"Answer: {truth}")
    assert not is_right(truth, f"Answer: {truth}{sign}", "Q")


SENTENCES = {
    "Chinese": ("所以答案是 BOX。", "答案不是 BOX。"), "Japanese": ("答えは BOX です。", "答えは BOX ではない。"),
    "Korean": ("따라서 답은 BOX 입니다.", "답은 BOX 가 아니다."),
    "German": ("Die Antwort ist BOX.", "Die Antwort ist nicht BOX."),
    "Spanish": ("La respuesta es BOX.", "La respuesta no es BOX."),
    "French": ("On obtient BOX.", "environ BOX"),
    "Portuguese": ("A resposta é BOX.", "talvez BOX"),
    "Italian": ("Il risultato è BOX.", "Il risultato non è BOX."),
    "Dutch": ("Het antwoord is BOX.", "Het antwoord is niet BOX."),
    "Russian": ("Ответ: BOX.", "Ответ не BOX."),
    "Polish": ("Odpowiedź to BOX.", "Odpowiedź to nie BOX."), "Turkish": ("Cevap BOX.", "BOX yanlış"),
    "Arabic": ("الجواب هو BOX.", "الجواب ليس BOX."), "Hindi": ("उत्तर BOX है।", "उत्तर BOX नहीं है।"),
    "Vietnamese": ("Đáp án là BOX.", "Đáp án không phải là BOX."),
    "Thai": ("คำตอบคือ BOX", "คำตอบไม่ใช่ BOX"),
}  # fmt: skip


@pytest.mark.parametrize("language", SENTENCES)
def test_a_sentence_of_another_language_states_its_box_and_a_denial_does_not(language):
    states, denies = SENTENCES[language]
    assert language in LANGUAGES
    for box in ("\\boxed{13}", "$\\boxed{13}$", "\\(\\boxed{13}\\)"):
        assert is_right("13", states.replace("BOX", box), "Q"), box
        assert not is_right("13", denies.replace("BOX", box), "Q"), box
    assert is_right("13", "Answer: " + states.replace("BOX", "13"))
    assert not is_right("13", "Answer: " + denies.replace("BOX", "13"))


def test_the_page_names_each_language_that_is_read():
    page = (Path(__file__).parents[2] / "docs" / "verifiers.md").read_text(encoding="utf-8")
    assert [name for name in LANGUAGES if name not in " ".join(page.split())] == []


def test_a_value_behind_a_box_wins():
    response = "It is tempting to write \\boxed{13}; the answer is 14"
    assert is_right("14", response)
    assert not is_right("13", response)


LEFT = "Ann has 3 bags with 6 apples. She eats 4 apples. How many apples does Ann have left?"
TALL = "Tom is 60 inches tall. Ann is 8 inches taller than Tom. How many inches tall is Ann?"
MORE = "How many more pages did Ann read than Tom?"
EARNS = "Ann earns $3 an hour and works 6 hours. How much does she earn every day at the market?"
AREA = "What is the area of the circle whose radius is 3?"
TOOK = "How many months did it take Ann to build her house?"
YARDS = "How many square yards of grass will Tom need?"
COST = "A box holds 4 red balls. How much does each ball cost?"
REPEATED = {
    LEFT: ["Ann has 18 apples left.", "She has 18 apples left."],
    TALL: ["Ann is 18 inches tall.", "So Ann is 18 inches tall", "Ann would be 18 inches tall."],
    MORE: ["Ann read 18 more pages than Tom.", "So she read 18 more pages than Tom."],
    EARNS: [
        "She earns $18 every day.",
        "Ann earns $18 every day at the market.",
        "She earns 6 * 3 = $18 every day.",
        "She earns 6 hours * $3 = $18 every day.",
    ],
    TOOK: [
        "It took Ann 18 months to build her house.",
        "It took her 18 months.",
        "Ann took 18 months to build her house.",
        "It took 18 months for Ann to build the house.",
    ],
    YARDS: ["Tom will need 18 square yards of grass.", "Tom needs 18 square yards."],
    COST: ["Each ball costs $18."],
}
"""Questions, and sentences that answer them in their own words."""
OTHER_STATEMENTS = {
    LEFT: [
        "Tom has 18 apples left.", "Ann had 18 apples.", "Ann has at least 18 apples left.",
        "If Ann has 18 apples left", "Maybe Ann has 18 apples left.", "Ann has 18 more apples left.",
        "Ann has 18 bags left.", "Ann eats 18 apples.", "Does Ann have 18 apples left?",
        "Ann does not have 18 apples left.", "Ann has 18 apples in each bag.",
        "Ann has nearly 18 apples left.", "Ann has 18 apples or so left.",
        "Ann has 18 apples left and 3 bags.", "Ann has 18 dozen apples left.",
        "Ann has 18% of the apples left.", "Ann has twice 18 apples left.", "2x = 18 apples",
    ],
    TALL: [
        "Ann is 18 feet tall.", "Tom is 18 inches tall.", "Ann is 18 inches taller.", "Ann is 18 years old.",
        "Ann should be 18 inches tall.",
    ],
    MORE: [
        "Ann read 18 fewer pages than Tom.", "Tom read 18 more pages than Ann.", "Ann read more than 18 pages.",
        "Ann read 18 more pages than Bob.", "Ann read 18 more books than Tom.",
    ],
    EARNS: [
        "She earns $18 an hour.", "She earns $18 every week.", "She spends $18 every day.",
        "She earns 18 cents every day.",
    ],
    AREA: ["The radius is 18.", "The circle is 18.", "The circle has a radius of 18."],
    TOOK: [
        "It took Ann 18 years to build her house.", "It took Tom 18 months to build his house.",
        "It took Ann 18 months longer.",
    ],
    YARDS: [
        "Tom needs 18 yards of grass.", "Tom needs 18 cubic yards of grass.",
        "Tom needs 18 square feet of grass.",
    ],
    COST: ["The box costs $18.", "4 balls cost $18."],
}  # fmt: skip
"""Sentences about something else, with the number of the reference."""


@pytest.mark.parametrize("name", ["math", "gsm8k"])
def test_a_sentence_answers_where_it_repeats_its_question(name):
    verifier = get_verifier(name)

    def accepted(sentences):
        return [
            sentence
            for question, group in sentences.items()
            for sentence in group
            if verifier(Problem("1", question, "18"), f"Answer: {sentence}").correct
        ]

    with_working = [
        sentence for group in REPEATED.values() for sentence in group if "=" in sentence
    ]
    answers = [sentence for group in REPEATED.values() for sentence in group]
    if name == "math":  # it reads the working as an equation
        answers = [sentence for sentence in answers if sentence not in with_working]
    assert accepted(REPEATED) == answers
    assert accepted(OTHER_STATEMENTS) == []


def test_a_question_with_as_names_no_seconds():
    question = "Ann is 3 times as old as Jane. How old is Ann?"
    assert is_right("24", "Answer: 24 years", question)
    assert not is_right("24", "Answer: 24 miles", question)
