"""Normalization: the texts that are the same problem, and the type of an answer."""

from fractions import Fraction

import pytest

from dapo.data.prepare.normalize import (
    InstructionTemplate,
    answer_key,
    answer_type,
    answer_value,
    find_instruction_template,
    ngrams,
    normalize_text,
    numbers,
    words,
)
from helpers.tables import for_each_row

BEFORE = "Solve the following problem step by step."
AFTER = "Write the answer on the last line."
QUESTIONS = [
    "How many primes are below 20?",
    "Find x if 2x = 10.",
    "What is the area of a disc of radius 3?",
    "Compute 5!",
    "A train leaves at noon; when does it arrive?",
    "Name the largest divisor of 91 below 91.",
    "Let a + b = 3 and ab = 2. Find a.",
    "How many edges has a cube?",
    "Which digit is the last of 7^100?",
]


def test_the_instruction_around_most_questions_is_found_and_taken_off():
    instruction_template = find_instruction_template(
        f"{BEFORE}\n\n{question}  {AFTER}" for question in QUESTIONS
    )
    assert instruction_template == InstructionTemplate(
        (tuple(BEFORE.split()),), (tuple(AFTER.split()),)
    )
    assert [
        instruction_template.strip_instruction(f"{BEFORE}\n{question}\n\n{AFTER}")
        for question in QUESTIONS
    ] == QUESTIONS
    assert (
        instruction_template.strip_instruction("A question that stands alone.")
        == "A question that stands alone."
    )


def test_what_lies_between_keeps_its_own_spacing():
    instruction_template = InstructionTemplate((("Solve", "this:"),), (("Thank", "you."),))
    text = "Solve  this: a\n  b  \n Thank you."
    assert text[slice(*instruction_template.span(text))] == "a\n  b"


def test_a_second_instruction_is_found_among_the_rows_without_the_first():
    other = "Please think about this one carefully:"
    texts = [f"{BEFORE} {question}" for question in QUESTIONS] + [
        f"{other} {question}" for question in QUESTIONS[:8]
    ]
    instruction_template = find_instruction_template(texts)
    assert {instruction_template.strip_instruction(text) for text in texts} == set(QUESTIONS)


def test_a_word_that_most_questions_begin_with_is_not_taken_for_the_instruction():
    questions = [f"Let x be {n}; find x." for n in range(6)] + [
        f"Find {n} + {n}." for n in range(4)
    ]
    instruction_template = find_instruction_template(
        f"{BEFORE} {question}" for question in questions
    )
    assert instruction_template.prefixes == (tuple(BEFORE.split()),)


def test_copies_of_one_question_are_no_instruction():
    instruction_template = find_instruction_template(
        [*QUESTIONS, *["What is the area of a disc of radius 3?"] * 100]
    )
    assert instruction_template == InstructionTemplate()


def test_few_texts_and_short_beginnings_are_left_as_they_are():
    assert (
        find_instruction_template(f"{BEFORE} {question}" for question in QUESTIONS[:7])
        == InstructionTemplate()
    )
    assert (
        find_instruction_template(f"What is the {n}?" for n in range(20)) == InstructionTemplate()
    )


def test_nothing_is_stripped_to_nothing():
    instruction_template = InstructionTemplate((("a", "b"),), (("a", "b"), ("b",)))
    assert [
        instruction_template.strip_instruction(text) for text in ("a b", "a b b", "", "  ")
    ] == ["a", "b", "", "  "]


def test_the_instructions_of_two_data_sets_are_joined_longest_first():
    joined = InstructionTemplate((("a",),), (("x",),)) | InstructionTemplate((("a", "b"), ("a",)))
    assert joined == InstructionTemplate((("a", "b"), ("a",)), (("x",),))


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("Find x.", "  find\n X?", True),
        ("Find x", "“Find x.”", True),
        ("Compute 5!", "Compute 5", False),
        ("Compute x²", "Compute x2", False),
        ("Compute -5", "Compute 5", False),
        ("a+b", "a + b", False),
    ],
)
def test_normal_text_forgives_case_whitespace_and_punctuation_at_the_ends(left, right, same):
    assert (normalize_text(left) == normalize_text(right)) is same


def test_words_are_letters_and_digits_whatever_the_layout():
    assert words(r"Let $\left(\dfrac{a}{b}\right)$, 3x^2") == ["let", "frac", "a", "b", "3x", "2"]
    assert words(r"\text{If } x\,=\,1") == words("if x = 1") == ["if", "x", "1"]


def test_numbers_are_sorted_and_thousands_separators_are_none():
    assert numbers("3 men, 1,000 nuts and 2.5 hours") == ["1000", "2.5", "3"]


def test_runs_of_words_and_a_short_text_is_one_run():
    assert ngrams("abcd", 3) == [("a", "b", "c"), ("b", "c", "d")]
    assert ngrams("ab", 3) == [("a", "b")]
    assert ngrams("", 3) == []


@for_each_row(
    ("answer", "kind"),
    [
        ("12", "integer"),
        ("-1,234", "integer"),
        ("−7.", "integer"),
        ("\\boxed{$7$}", "integer"),
        ("$$", "text"),
        ("\\boxed{\\frac{1}{2}}", "fraction"),
        ("{1}/{2}", "expression"),
        ("2.50", "number"),
        ("3.0", "number"),
        ("50\\%", "number"),
        ("3/4", "fraction"),
        ("-\\frac{1}{2}", "fraction"),
        ("\\tfrac34", "fraction"),
        ("1/0", "expression"),
        ("(B)", "letter"),
        ("\\text{(D)}", "letter"),
        ("x", "expression"),
        ("2\\sqrt{3}", "expression"),
        ("\\sin x + \\arccos y", "expression"),
        ("[0, 1)", "expression"),
        ("\\frac{1}{2", "expression"),
        ("yes", "text"),
        ("\\text{Monday}", "text"),
        ("5 apples", "text"),
        ("?", "text"),
        ("the tree grew by $\\boxed{2}$ feet.", "integer"),
        ("3 + 5 = 8\n#### 8", "integer"),
        ("The answer is: 1/2", "fraction"),
        ("So Ann has 8 apples.", "text"),
    ],
)
def test_kinds_of_answers(answer, kind):
    assert answer_type(answer) == kind


def test_values_of_answers():
    assert answer_value("-\\frac{-3}{6}") == Fraction(1, 2)
    assert answer_value("$1,234.50$") == Fraction(2469, 2)
    assert answer_value("\\sqrt{4}") is None
    assert answer_value("9" * 5000) is None


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        ("0.5", "\\frac{1}{2}", True),
        ("1,000", "$1000.0$", True),
        ("Yes", "yes.", True),
        ("(B)", "\\text{B}", True),
        ("x + 1", "x+1", True),
        ("f", "F", False),
        ("1/2", "2/1", False),
        ("x", "-x", False),
        ("We add: $\\boxed{8}$.", "By counting. #### 8", True),
        ("We add: $\\boxed{8}$.", "We add: $\\boxed{9}$.", False),
    ],
)
def test_answers_are_the_same_by_value_or_text(left, right, same):
    assert (answer_key(left) == answer_key(right)) is same
