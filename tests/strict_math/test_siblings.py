r"""`math` on siblings of reported mistakes: units, disowned boxes, languages, symmetric forms,
decorations.

Half of the rows of `math_siblings.jsonl` were written before the rules and judged for the first
time after them.
"""

import json
import re
import time
from itertools import product
from pathlib import Path

import pytest

from benchmarks.verifier_report import read_cases
from dapo.libs.strict_math import Reference
from dapo.libs.strict_math.languages import LANGUAGES
from dapo.libs.strict_math.working import without_working
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

    assert accepted(REPEATED) == [sentence for group in REPEATED.values() for sentence in group]
    assert accepted(OTHER_STATEMENTS) == []


APPLES = (
    "Ann has 3 bags with 6 apples. She eats 4 apples. How many apples does Ann have left?",
    "14",
)
PENS = ("One pen costs $1.50. How much will 8 pens cost?", "12")
AGE = ("Jane is 27, as old as Bob. If Quinn is 30, how old will Trent be in 3 years?", "35")
CUPCAKES = ("Paul has 48 cupcakes and wants 63. How many more cupcakes should Paul buy?", "15")
LAPS = ("How many more laps can Beth run compared to Quinn?", "5")
START = ("At the end she has $100 and earned $40. How much money did Bea start with?", "60")
CARS = ("A red car costs $90 and a blue car costs $70. How much do both cars cost?", "160")
TOGETHER = ("Ann has 3 apples, Tom has 11. How many apples do Ann and Tom have together?", "14")
HAT = ("A bag costs $10 and a hat costs $8. How much do the bag and the hat cost?", "18")
STOPS = ("How many miles did he travel between his first and second stops?", "25")
FEE = ("The books cost $4, the fee is $2. How much does she have to pay in total?", "6")
WORKED = {
    APPLES: [
        "Ann has 18 - 4 = 14 apples left.", "So she has 6 * 3 - 4 = 14 apples left.",
        "She has 18 apples - 4 apples = 14 apples left", "Ann has 6 * 3 - 4 = 18 - 4 = 14 apples left.",
        "Ann has 3 bags, so she has 18 - 4 = 14 apples left.",
        "Since Ann eats 4 apples, she has 14 apples left.", "That means she has 14 apples left.",
        "Then subtract the apples she eats to find the number of apples Ann has left: 18 - 4 = 14 apples",
        "The number of apples Ann has left is 18 - 4 = 14.",
    ],
    PENS: [
        "So 8 pens will cost $1.50 x 8 = $12.", "8 pens cost $12.", "8 pens will cost 12 dollars.",
        "The cost of 8 pens is $12.", "The total cost of 8 pens is $1.50 * 8 = $12.",
    ],
    AGE: [
        "In 3 years, Trent will be 32 + 3 = 35 years old.", "Trent will be 35 years old in 3 years.",
        "In 3 years, he will be 35.",
    ],
    CUPCAKES: [
        "Paul needs to buy 63 - 48 = 15 more cupcakes.", "He should buy 15 more cupcakes.",
        "Paul has to buy 15 more cupcakes.",
    ],
    LAPS: ["Beth can run 11 - 6 = 5 laps more than Quinn.", "Beth can run 5 more laps than Quinn."],
    START: [
        "The amount of money Bea started with is $100 - $40 = $60.", "Bea started with $60.",
    ],
    CARS: ["The total cost of both cars is $90+$70=$160.", "Both cars cost $160."],
    TOGETHER: ["Ann and Tom have 3 + 11 = 14 apples together.", "They have 14 apples."],
    HAT: ["The bag and the hat cost $10 + $8 = $18."],
    STOPS: ["So, he traveled a total of 60 - 35 = 25 miles between his first and second stop."],
    FEE: ["Then add the fee to find the total cost: $4.00 + $2.00 = $6.00"],
}  # fmt: skip
"""Questions with their references, and sentences with a calculation, a reason or a number of the
question."""
NOT_WORKED = {
    APPLES: [
        "Ann has 18 - 3 = 14 apples left.", "Ann has 18 - 4 = 14 - 3 = 11 apples left.",
        "Ann has 18 - 4 = 14 or 15 apples left.", "Ann has 2 dozen - 10 = 14 apples left.",
        "Tom has 18 - 4 = 14 apples left.", "Ann eats 18 - 4 = 14 apples.",
        "Ann has 18 - 4 = 14 bags left.", "Ann has 18 - 4 = 14 dozen apples left.",
        "Maybe Ann has 18 - 4 = 14 apples left.", "Ann does not have 18 - 4 = 14 apples left.",
        "If Ann eats 5 apples, Ann has 18 - 4 = 14 apples left.",
        "Before she eats 4 apples, Ann has 14 apples left.",
        "Ann has 3 apples left, so she has 14 apples left.",
        "Ann has 14 apples left, so Tom has 18 - 4 = 14 apples left.",
        "Ann is not sure, so she has 14 apples left.", "The answer is 4, so Ann has 14 apples left.",
        "The radius is 18 - 4 = 14.", "Tom's age is 7 * 2 = 14.", "The sum is 14.",
        "The number of bags Ann has left is 18 - 4 = 14.",
        "Then add the weights to find the weight of the apples: 18 - 4 = 14 pounds",
    ],
    PENS: [
        "7 pens will cost $12.", "8 pencils will cost $12.", "8 pens will cost 12 cents.",
        "8 pens will cost $12 or $13.", "8 pens cost more than $12.", "8 pens - 12",
        "The weight of 8 pens is $12.", "8 pens will cost 8 * $1.50 = $12 each.",
        "8 pens will cost 7 * $1.50 = $12.",
    ],
    AGE: [
        "In 4 years, Trent will be 35 years old.", "In 3 months, Trent will be 35 years old.",
        "In 3 years, Jane will be 35 years old.", "In 3 years, Quinn will be 35 years old.",
        "In 3 years, Trent will be 35 months old.", "3 years ago, Trent was 35 years old.",
    ],
    CUPCAKES: [
        "Paul needs to buy 15 fewer cupcakes.", "Paul needs to sell 15 more cupcakes.",
        "Tim needs to buy 63 - 48 = 15 more cupcakes.", "Paul should buy at least 15 more cupcakes.",
    ],
    LAPS: [
        "Beth can run 5 laps fewer than Quinn.", "Quinn can run 5 laps more than Beth.",
        "Beth can run 5 miles more than Quinn.", "Beth can run 5 laps more than Ann.",
    ],
    START: [
        "The amount of money Bea earned is $60.", "Bea started with $100 - $30 = $60.",
        "The number of coins Bea started with is 60.", "Bea started with 60 cents.",
    ],
    CARS: ["The total cost of both bikes is $160.", "Both cars cost $90+$60=$160."],
    TOGETHER: ["Ann has 14 apples.", "Tom has 3 + 11 = 14 apples.", "Ann and Bob have 14 apples."],
    HAT: ["The bag costs $18.", "The cost of the hat is $18."],
    STOPS: ["It is between 24 and 25 miles.", "He traveled between 25 miles and 30 miles."],
    FEE: [
        "Then add the fee to find the total weight: $4 + $2 = $6",
        "Then add 7 to find the total cost: $6",
        "Then add the fee to find the total cost: $4.00 + $1.00 = $6.00",
    ],
}  # fmt: skip
"""Their siblings: untrue, hedged, of another unit, or about something else."""


@pytest.mark.parametrize("name", ["math", "gsm8k"])
def test_a_sentence_may_have_a_true_calculation_a_reason_and_numbers_of_its_question(name):
    verifier = get_verifier(name)

    def accepted(sentences):
        return [
            sentence
            for (question, reference), group in sentences.items()
            for sentence in group
            if verifier(Problem("1", question, reference), f"Answer: {sentence}").correct
        ]

    assert accepted(WORKED) == [sentence for group in WORKED.values() for sentence in group]
    assert accepted(NOT_WORKED) == []


def test_a_question_with_as_names_no_seconds():
    question = "Ann is 3 times as old as Jane. How old is Ann?"
    assert is_right("24", "Answer: 24 years", question)
    assert not is_right("24", "Answer: 24 miles", question)


CALCULATIONS = {
    "He bought 38 + 44 = 82 sausages.": "He bought 82 sausages.",
    "6 hours * $3 = $18 a day": "$18 a day",
    "80 slices/pizza / 8 slices/pizza = 10 pizzas": "10 pizzas",
    "(5 + 3) * 2 = 8 * 2 = 16": "16",
    "15/60 = 25%": "25%",
    "$1,000.50 * 2 = $2,001": "$2,001",
}
KEPT = [
    "27 + 5 = 31", "2 dozen * 3 = 6", "10 + 5 = 15 - 3 = 12", "2x + 3 = 7", "x = 3 + 4 = 7", "y - 3 * 2 = 6",
    "3^2 + 1 = 2", "7 = 7", "1/0 = 5", "8 maybe + 2 = 10", "-3 + 5 = 5",
]  # fmt: skip


def test_only_a_true_calculation_is_its_result():
    assert {text: without_working(text) for text in CALCULATIONS} == CALCULATIONS
    assert [without_working(text) for text in KEPT] == KEPT


@pytest.mark.parametrize(
    "piece",
    ["1 + ", "12 apples of a ", "1 = ", "(", "9", "1,111,", "a ", "5 ab/cd ", "so ", "if 1, "],
)
def test_calculations_are_looked_for_in_linear_time(piece):
    start = time.process_time()
    assert without_working(piece * 100_000) == piece * 100_000
    assert time.process_time() - start < 5
