"""References that are whole solutions: the content of the last box is the answer."""

import itertools

import pytest

from dapo.libs.strict_math import Reference, extract_answer

QUESTION = "What is the value?"
ENDINGS = [
    r"\boxed{%s}",
    r"The answer is $\boxed{%s}$.",
    r"By inspection, $\boxed{%s}$.",
    r"Thus, $3x=\boxed{%s}$.",
    r"Therefore $x > 1$ and the smallest such number is $\boxed{%s}$.",
    r"So $n\geq \boxed{%s}$.",
    r"Rounding up, $a \approx \boxed{%s}$.",
    r"the shelf was raised by $\boxed{%s}$ centimetres.",
    r"Lina can do so in $\boxed{%s}$ ways.",
    r"the largest number below $c$ is $\boxed{%s}$.",
    r"Tom must be $\boxed{%s}$ years old.",
    r"so $\boxed{%s}$ is what the line measures.",
    r"has slope $\boxed{%s}$.",
    r"which leaves us with an answer of $\boxed{%s}$ as wanted. - solved by a reader",
    r"A first guess is $\boxed{1000}$, which fails. We add. Text \boxed{%s}.",
]
VALUES = ["42", r"\frac{3}{4}", "-7", r"2\sqrt{3}", "2x+3", "[0,1)", "(3, 4)"]
OTHER = "1234"


@pytest.mark.parametrize("ending", ENDINGS)
def test_of_a_solution_the_boxed_value_is_the_reference(ending: str):
    for value in VALUES:
        solution = "First we add.\n" + ending % value
        reference = Reference.read(solution, QUESTION)
        assert reference is not None, value
        for response in (rf"So it is \boxed{{{value}}}.", f"Answer: {value}", solution):
            answer = extract_answer(response)
            assert answer is not None
            assert reference.matches(answer), (value, response)
        assert not reference.matches(OTHER)


@pytest.mark.parametrize(
    "ending",
    [
        "#### %s",
        "so it is that. #### %s",
        "#### %s\nThe answer is: %s",
        "The answer is %s.",
        "Worked answer: 5 + 6 = 11. The answer is %s.",
        "Final Answer: %s",
        "The answer is $%s$",
    ],
)
def test_a_solution_without_a_box_ends_in_a_mark(ending: str):
    for value in VALUES:
        reference = Reference.read("We add 3 and 5.\n" + ending.replace("%s", value), QUESTION)
        assert reference is not None, value
        assert reference.matches(value)
        assert not reference.matches(OTHER)


def test_a_sentence_without_a_mark_is_no_reference():
    assert Reference.read("Ann buys 5 more.\n\nTherefore, Ann has 8 apples.") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"It is $\boxed 7$.", "7"),
        (r"It is $\boxed\frac{1}{2}$.", r"\frac{1}{2}"),
        (r"so \(x = \boxed -3\)", "-3"),
        (r"$\boxed{7}$, with \boxed as $x$ was.", "7"),
    ],
)
def test_a_box_may_lack_its_braces(text: str, value: str):
    reference = Reference.read(text)
    assert reference is not None
    assert reference.matches(value)
    answer = extract_answer(text)
    assert answer is not None
    plain = Reference.read(value)
    assert plain is not None
    assert plain.matches(answer)
    assert extract_answer(text + " Wait, that is wrong.") is None


LABELS = [
    r"\textbf{(B)}\ %s",
    r"\textbf{(B) }%s",
    r"\textbf{(B)}%s",
    r"\textbf{(B)}\hspace{.05in}%s",
    r"\mathrm{(B)}\ %s",
    r"\text{B) }%s",
    r"(\textbf{B})~%s",
    r"(B) %s",
]


@pytest.mark.parametrize("label", LABELS)
def test_an_option_in_a_box_is_its_letter_or_its_value(label: str):
    questions = (QUESTION, r"Which? $\textbf{(A)}\ 1\qquad\textbf{(B)}\ 42\qquad\textbf{(C)}\ 3$")
    for value, question in itertools.product([*VALUES, r"\text{Monday}"], questions):
        text = label % value
        reference = Reference.read(rf"This is $\boxed{{{text}}}$.", question)
        assert reference is not None
        for right in (text, value, "B", "(B)", f"(B) {value}"):
            assert reference.matches(right), (value, right)
        for wrong in ("C", f"(C) {value}", OTHER, f"(B) {OTHER}", label % OTHER):
            assert not reference.matches(wrong), (value, wrong)


def test_a_product_of_letters_is_no_option():
    reference = Reference.read("(A)(B)")
    assert reference is not None
    assert not reference.matches("B")
    assert reference.matches("AB")
