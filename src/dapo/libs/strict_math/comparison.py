"""Compares answers with a reference."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import chain
from typing import TypeAlias

from .answer import (
    MIRRORED,
    Answer,
    BaseNumber,
    Collection,
    Congruence,
    Matrix,
    NumberSet,
    Part,
    Quantity,
    Ratio,
    Relation,
    TextAnswer,
    Value,
    nodes_of,
    real_set_of,
    units_of,
)
from .answer_forms import constants_of, form_allows, is_literal
from .answer_parser import read_answer
from .arithmetic import is_accurate, names_of, same_function, value_of
from .asked import asked_expressions
from .choices import chosen_letter, labelled_value
from .equality import (
    claim_holds,
    difference,
    is_below_one,
    is_hundredth,
    is_multiple,
    is_plain_number,
    same_exact,
    same_expression,
)
from .expressions import Node, Unreadable, letters_of
from .extraction import extract_answer
from .languages import value_in_language
from .question import Question
from .real_sets import infinity_of, same_endpoints
from .sentences import digits_for_words, statements_of, value_in_sentence, value_in_words_of
from .spellings import with_binomials
from .text import final_answer, last_box_list, normalize_number
from .units import PERCENT, Nouns, Unit, format_unit
from .vocabulary import COUNTED, GREEK

# An answer that exceeds the reference by more characters matches nothing
_EXTRA_CHARS = 500
_DECIMAL_COMMA = re.compile(
    r"(?<![\d.,])(?:(?=0,|\d{4}|\d+(?:,|\{,\})(?!\d{3}(?!\d))))(\d+)(?:,|\{,\})(\d+)(?![\d,]|\.\d)"
)
# The start of an answer that names its quantity
_QUANTITY = re.compile(
    r"(?:\\text\{)?(?:(?:the|its|their|his|her) )?(?:[a-z]+ ){0,2}(?P<name>[a-z]+)\}?(?: of"
    r" [^=<>]{1,80}?)?"
    r" (?:=|is|was|equals)(?: |$)",
    re.IGNORECASE,
)
_VALUE_OF_FUNCTION = re.compile(r"[A-Za-z]'*\([-\d,./]+\)")
_FUNCTION_OF_NAMES = re.compile(r"[A-Za-z]\((?P<names>[A-Za-z](?:,[A-Za-z])*)\)")
_LETTER = re.compile(rf"(?:[A-Za-z]|\\(?:{'|'.join(sorted(GREEK))}))(?:_\w+)?")
_CHANCE = re.compile(r"(?:\\mathbb|\\Pr|\\mathrm)?\{?[PE]r?\}?[(\[]")
_OF_FIGURE = re.compile(r"\\(?:angle|triangle|measuredangle)|[A-Z]{2,4}$|\|[A-Z]{2}\|$|[A-Za-z]\(")
# A decimal whose digits go on
_CUT_OFF = re.compile(r"\d ?(?:\.\.+|…|\\[lc]?dots)[^\w]*$")
_INFINITELY_MANY = "infinitely many"
_ENDLESS = re.compile(
    r"(?:there (?:are|is) )?(?:infinitely many|(?:an )?infinite(?: number(?: of)?)?)"
    r"(?: (?:(?:real |such )?(?:solutions?|values|numbers|ways|pairs|integers)))?(?: exist)?"
)
_TUPLE_BRACKETS = frozenset(("()", "⟨⟩"))
_BRACKET = frozenset("()[]{}<>|")
_DEGREE: Unit = (("degree", 1),)
_Solution: TypeAlias = dict[str, Value]  # the value of each variable


@dataclass(frozen=True)
class Reference:
    r"""A reference answer that can be read and computed; made by `Reference.read`.

    Example:
        >>> reference = Reference.read(r"2\sqrt{3}")
        >>> reference.matches(r"\sqrt{3} \cdot 2"), reference.matches(r"\sqrt{12}"), reference.matches("3.46")
        (True, True, False)
        >>> Reference.read("see the figure on page 3") is None
        True
    """

    answer: Answer
    names: frozenset[str]
    length: int
    question: Question
    statement: str
    """What a response that ends as the reference does states; empty unless the reference has a box."""
    label: str = ""
    """The letter of the option that the reference chooses, if it also has its value."""

    @classmethod
    def read(cls, text: str, question: str = "") -> "Reference | None":
        r"""Return the reference that `text` states; None if it is outside the grammar, undefined or
        too costly to compute.

        Args:
            text: LaTeX or plain text. Of a text with a `\boxed{}`, such as a whole solution, the
                content of the last box, or of the list of boxes that it ends. Of a text that is no
                mathematics, what its last line marks by `####` or `The answer is`.
            question: The question's text. An answer may use its nouns as units and name the
                quantity that it asks for; without it, only common ones.
        """
        candidates = [text]
        statement = ""
        if last_box_list(text):
            candidates.insert(0, final_answer(text))
            statement = extract_answer(text) or ""
        else:
            candidates.append(final_answer(text))
        label, value = labelled_value(candidates[0])
        if label:
            candidates = [value, label]
        for candidate in candidates:
            try:
                answer = read_answer(candidate)
                for part in answer.parts:
                    _check(part)
            except (Unreadable, ArithmeticError, RecursionError):
                continue
            names = frozenset().union(*map(_names, answer.parts))
            return cls(answer, names, len(candidate), Question(question), statement, label)
        return None

    @cached_property
    def _nouns(self) -> Nouns:
        """The nouns that may follow a number of an answer."""
        nouns = set(self.question.words)
        for part in self.answer.parts:
            for unit in units_of(part.value):
                for name, _ in unit:
                    nouns |= {name, *name.split()}
        if not self.question.is_known:
            nouns |= COUNTED
        return Nouns(frozenset(nouns), self.question.asked)

    @cached_property
    def _is_number(self) -> bool:
        """True for one rational number in a usual notation."""
        if len(self.answer.parts) != 1:
            return False
        value = self.answer.parts[0].value
        return isinstance(value, Quantity) and is_literal(value.node)

    @cached_property
    def _has_binomial(self) -> bool:
        values = [part.value for part in self.answer.parts]
        return any(_is_binomial(node) for value in values for node in nodes_of(value))

    @cached_property
    def _letter(self) -> str:
        """The letter of a choice; empty for any other reference."""
        if self.label:
            return self.label
        letter = self.answer.text.replace("\\text", "").strip("{}().")
        return letter if len(letter) == 1 and "A" <= letter <= "J" else ""

    @cached_property
    def normal_form(self) -> str:
        """The vote of every matching answer: the value without unit and name."""
        if any(part.left for part in self.answer.parts):
            return self.answer.text  # an equation
        return _normal_form(self.answer, units=False)

    def matches(self, answer: str) -> bool:
        """Return True if an answer has exactly the reference's values and leaves nothing to be
        computed.

        Args:
            answer: LaTeX or plain text, or a sentence with one reading, such as `The number of ways
                is 13.`
        """
        text = " ".join(answer.split())
        if text and text == self.statement:
            return True
        if self._is_too_long(text) or (_CUT_OFF.search(text) and self._is_number):
            return False
        quantity = _QUANTITY.match(text)
        if quantity and self.question.contradicts_quantity(quantity["name"].lower()):
            return False
        if self._letter and chosen_letter(text, self.question.text) == self._letter:
            return True
        if self.label:
            label, value = labelled_value(text)
            if label and label != self.label:
                return False
            text = value or text
        comparison = _Comparison(self.question)
        for form in self._forms(text):
            for reading in self._readings(form):
                if comparison.answers(self.answer, reading):
                    return True
        return False

    def vote(self, text: str, *, correct: bool) -> str:
        """Return the text by which majority votes count an answer: equal for all correct answers,
        else its normal form.

        Args:
            text: The answer.
            correct: What `matches(text)` returned.
        """
        if correct:
            return self.normal_form
        text = " ".join(text.split())
        readings = [] if self._is_too_long(text) else self._readings(text)
        if readings:
            form = _normal_form(readings[0], units=True)
        else:
            form = "".join(text[:_EXTRA_CHARS].split()).casefold()
        # a wrong answer must not be counted with the right ones
        return f"not {form}" if form == self.normal_form else form

    def _is_too_long(self, text: str) -> bool:
        return len(text) > self.length + _EXTRA_CHARS

    def _forms(self, text: str) -> Sequence[str]:
        """Return the texts to read: the answer, with words and commas as digits and points, and the
        values that these state as sentences.
        """
        forms = list(dict.fromkeys((text, digits_for_words(text), *self._with_decimal_point(text))))
        if self._is_number:
            statements = [statements_of(form, self.question) for form in forms]
            forms = list(dict.fromkeys(chain(forms, *statements)))
        values = [value_in_sentence(form, self.question) for form in forms]
        values += [value_in_language(form, self.question.text) for form in forms]
        values += [value_in_words_of(self.question, form) for form in forms]
        return list(dict.fromkeys((*forms, *filter(None, values))))

    def _with_decimal_point(self, text: str) -> Sequence[str]:
        """Return the text with `2,75` as `2.75`, where the reference is one number and the comma
        separates no thousands; nothing else.
        """
        if not self._is_number or text.count(",") != 1:
            return ()
        with_point = _DECIMAL_COMMA.sub(r"\1.\2", text)
        return (with_point,) if _BRACKET.isdisjoint(with_point) else ()

    def _readings(self, text: str) -> list[Answer]:
        """Return the answers that a text may mean; a list may separate `1,234` at the comma."""
        if self._has_binomial:
            text = with_binomials(text)
        names = self.names | asked_expressions(self.question.text).names
        notations = [True]
        if len(self.answer.parts) > 1 and "," in text:
            notations.append(False)
        readings: list[Answer] = []
        for thousands in notations:
            try:
                readings.append(read_answer(text, names, self._nouns, thousands=thousands))
            except (Unreadable, ArithmeticError, RecursionError):
                continue
        return readings


def is_equal(reference: str, answer: str) -> bool:
    """Return True if an answer has exactly the reference's values and leaves nothing to be computed.

    The two are not interchangeable: `3 + 4` is no answer to `7`. Use `Reference` to compare many
    answers with one reference.

    Raises:
        ValueError: the reference cannot be read or computed.

    Example:
        >>> is_equal("1/2", "50%"), is_equal("7", "3 + 4"), is_equal("(1, 2)", "(2, 1)")
        (True, False, False)
    """
    parsed = Reference.read(reference)
    if parsed is None:
        raise ValueError(f"expected a reference in LaTeX or plain notation, got {reference[:80]!r}")
    return parsed.matches(answer)


def _names(part: Part) -> frozenset[str]:
    """Return the variables of a part."""
    nodes = (*nodes_of(part.value), *part.left)
    return frozenset(part.names).union(*map(names_of, nodes))


def _check(part: Part) -> None:
    """Raise Unreadable or ArithmeticError if a value of a reference cannot be computed."""
    for node in (*nodes_of(part.value), *part.left):
        if infinity_of(node):
            continue
        if not names_of(node):
            if not is_accurate(node):
                raise Unreadable("its digits cancel")
        elif not same_function(node, node):
            raise Unreadable("it cannot be computed")
    if not all(claim_holds(claim, part.value) for claim in part.claims):
        raise Unreadable("its sides are not equal")


@dataclass(frozen=True)
class _Comparison:
    """Compares two answers value by value."""

    question: Question

    def answers(self, reference: Answer, answer: Answer) -> bool:
        """Return True if an answer has the values of the reference."""
        try:
            solutions = _solutions(reference.parts)
            answer_solutions = _solutions(answer.parts)
            if solutions:
                return self._answers_solutions(solutions, answer, answer_solutions)
            if self._match_all(reference.parts, answer.parts, self._part):
                return True
            compound = _compound(reference)
            if compound and [part.names for part in answer.parts] == [()] * len(compound):
                return all(map(self._part, compound, answer.parts))
            if answer_solutions is None:
                return False
            # `x = 1, y = 2` for `(1, 2)`: the coordinates in the order of their names
            points = []
            for solution in answer_solutions:
                names = sorted(solution)
                points.append(_point([solution[name] for name in names]))
            return self._match_all(reference.parts, points, self._part)
        except (ArithmeticError, RecursionError):
            return False

    def _answers_solutions(
        self,
        solutions: Sequence[_Solution],
        answer: Answer,
        answer_solutions: Sequence[_Solution] | None,
    ) -> bool:
        """Return True if an answer gives the same values to several variables, by name or in the
        reference's order.
        """
        if answer_solutions is not None:
            return self._match_all(solutions, answer_solutions, self._solution)
        is_bare = not any(part.names for part in answer.parts)
        if is_bare and len(solutions) == 1 and len(answer.parts) == len(solutions[0]):
            values = [part.value for part in answer.parts]
            return all(map(self._value, solutions[0].values(), values))
        points = [_point(solution.values()) for solution in solutions]
        return self._match_all(points, answer.parts, self._part)

    def _solution(self, reference: _Solution, solution: _Solution) -> bool:
        if reference.keys() != solution.keys():
            return False
        return all(self._value(value, solution[name]) for name, value in reference.items())

    def _match_all(self, references: Sequence, answers: Sequence, same: Callable) -> bool:  # type: ignore[type-arg]
        """Return True if references and answers pair up one to one; equality is transitive, so the
        first match serves.
        """
        unmatched = list(answers)
        if len(unmatched) != len(references):
            return False
        for reference in references:
            for index, candidate in enumerate(unmatched):
                if same(reference, candidate):
                    del unmatched[index]
                    break
            else:
                return False
        return True

    def _part(self, reference: Part, part: Part) -> bool:
        """Return True if a part of an answer has the value of the reference's, and no other
        name.
        """
        if reference.left and not reference.names:
            return self._equation(reference, part)
        if len(reference.names) == 1 and self.question.asks_for_equation:
            # every form of the equation is right: `2y = 4x` for `y = 2x`
            is_equation = part.left or part.names
            if is_equation and self._equation(reference, part):
                return True
        if reference.names and part.left:
            return False
        if reference.names and part.names and not _same_names(reference.names, part.names):
            return False
        if not reference.names and part.first and not self._is_asked(*part.first, part.value):
            return False
        if not all(claim_holds(claim, part.value) for claim in part.claims):
            return False
        return self._value(reference.value, part.value)

    def _is_asked(self, text: str, left: Node | None, value: Value) -> bool:
        """Return True if the question may ask for a left side: not for `2x`, nor for `y` where it
        asks for `x`.

        Args:
            text: The left side as text.
            left: The left side as an expression; None for a name or unknown mathematics.
            value: The right side.
        """
        names = frozenset().union(*map(names_of, nodes_of(value)))
        if left is not None and names and _is_function(left, value):
            return True  # `x^2 - 1 = (x-1)(x+1)`
        label = _FUNCTION_OF_NAMES.fullmatch(text)
        if label and names and not set(label["names"].split(",")) <= names:
            return False  # a function of something else
        requested = asked_expressions(self.question.text)
        if requested.texts:
            return requested.has(text, left)
        is_function_value = _VALUE_OF_FUNCTION.search(text) is not None
        if left is not None and len(names_of(left)) == 1 and not is_function_value:
            return False
        if _LETTER.fullmatch(text) or (label and names):
            return True
        if _CHANCE.match(text) and self.question.asks_for_chance:
            return True
        if not self.question.is_known:
            return left is not None or is_function_value or _OF_FIGURE.match(text) is not None
        if self.question.writes(text):
            return True
        return left is not None and self.question.uses_letters(names_of(left))

    def _equation(self, reference: Part, part: Part) -> bool:
        """Return True if two equations such as `2x + 3y = 6` describe the same curve: one is a
        multiple of the other.
        """
        side = _left_side(part)
        if side is None:
            return False
        if not isinstance(reference.value, Quantity) or not isinstance(part.value, Quantity):
            return False
        if reference.left:
            reference_side = reference.left[0]
        else:
            reference_side = Node("name", text=reference.names[0])
        return is_multiple(
            difference(reference_side, reference.value.node),
            difference(side, part.value.node),
        )

    def _number(self, reference: Quantity, value: Value) -> bool:
        """Return True if a value is a number, also as a remainder with its modulus or in the base
        that is asked for.
        """
        if isinstance(value, Congruence):
            if not self.question.asks_for_remainder:
                return False
            names_modulus = self.question.has([_digits_of(value.modulus)])
            return names_modulus and _is_remainder(reference.node, value)
        if isinstance(value, BaseNumber):
            same_digits = _digits_of(reference.node) == value.digits
            return same_digits and self.question.asks_for_base(value.base)
        return isinstance(value, Quantity | TextAnswer) and self._quantity(reference, value)

    def _value(self, reference: Value, value: Value) -> bool:
        """Return True if two values are equal, each kind by its own rule."""
        if isinstance(reference, Quantity):
            return self._number(reference, value)
        if isinstance(reference, TextAnswer):
            return _same_text(reference, value)
        if isinstance(reference, NumberSet) or isinstance(value, NumberSet):
            return _same_real_set(reference, value)
        if isinstance(reference, Collection):
            return isinstance(value, Collection) and self._collection(reference, value)
        if isinstance(reference, Matrix):
            return isinstance(value, Matrix) and _same_matrix(reference, value)
        if isinstance(reference, Relation):
            return isinstance(value, Relation) and _same_relation(reference, value)
        if isinstance(reference, Ratio):
            return isinstance(value, Ratio) and _same_ratio(reference, value)
        if isinstance(reference, Congruence):
            if isinstance(value, Quantity) and value.node.op == "mod":
                value = Congruence(*value.node.args)
            return isinstance(value, Congruence) and _same_residue(reference, value)
        return isinstance(reference, BaseNumber) and reference == value

    def _quantity(self, reference: Quantity, value: Quantity | TextAnswer) -> bool:
        """Return True if a number has the reference's value and no other unit."""
        if isinstance(value, TextAnswer):
            # a product of variables, or a name of several letters, was read as a word
            word = value.text.strip("()")
            if reference.node.op == "name" and word == reference.node.text:
                return True
            return word != "" and word == letters_of(reference.node)
        if reference.unit and value.unit and reference.unit != value.unit:
            return False
        if not reference.unit and value.unit == PERCENT:
            return self._share(reference.node, value.node)
        if not reference.unit and self.question.contradicts(value.unit):
            return False
        if not reference.unit and value.unit == _DEGREE and "pi" in constants_of(reference.node):
            return False  # the reference is in radians
        if same_expression(reference.node, value.node):
            return True
        is_percentage = reference.unit == PERCENT and not value.unit
        return is_percentage and is_hundredth(value.node, reference.node)  # 0.5 for 50 %

    def _share(self, reference: Node, percentage: Node) -> bool:
        """Return True if a percentage is the reference: a hundredth of it, or the number of per
        cent that is asked for.
        """
        if is_hundredth(reference, percentage):
            return True
        if not is_plain_number(reference) or is_below_one(reference):
            return False
        if self.question.contradicts(PERCENT):
            return False
        return same_expression(reference, percentage)

    def _collection(self, reference: Collection, value: Collection) -> bool:
        """Return True if the items are equal, in any order in a set."""
        brackets = {reference.brackets, value.brackets}
        if len(brackets) > 1 and not brackets <= _TUPLE_BRACKETS:
            return False
        if len(reference.items) != len(value.items):
            return False
        if reference.brackets == "{}":
            return self._match_all(reference.items, value.items, self._part)
        return all(map(self._part, reference.items, value.items))


def _is_function(left: Node, value: Value) -> bool:
    return isinstance(value, Quantity) and same_function(left, value.node)


def _left_side(part: Part) -> Node | None:
    """Return the left side of an equation, if it has one: an expression, a number or a name."""
    if len(part.left) == 1:
        return part.left[0]
    if len(part.claims) == 1:
        return part.claims[0].node
    if len(part.names) == 1:
        return Node("name", text=part.names[0])
    return None


def _point(values: Iterable[Value]) -> Part:
    """Return the values as the coordinates of one point."""
    return Part(Collection(tuple(map(Part, values)), "()"))


def _same_matrix(reference: Matrix, value: Matrix) -> bool:
    if list(map(len, reference.rows)) != list(map(len, value.rows)):
        return False
    return all(map(same_expression, nodes_of(reference), nodes_of(value)))


def _same_real_set(reference: Value, value: Value) -> bool:
    """Return True if two sets have the same intervals, whose ends are computed."""
    reference_set = real_set_of(reference)
    value_set = real_set_of(value)
    if reference_set is None or value_set is None:
        return False
    pairs = same_endpoints(reference_set, value_set)
    if pairs is None:
        return False
    for reference_end, end in pairs:
        if reference_end.node is None or end.node is None:
            continue  # infinity
        if not form_allows(reference_end.node, end.node):
            return False
    return True


def _same_relation(reference: Relation, value: Relation) -> bool:
    """Return True if two inequalities have equal sides, or one is a multiple of the other."""
    for candidate in (value, _mirrored(value)):
        if candidate.signs != reference.signs:
            continue
        if all(map(same_expression, reference.sides, candidate.sides)):
            return True
        if len(reference.signs) > 1:
            continue
        reference_difference = difference(*reference.sides)
        # a negative factor would turn the sign around
        positive = reference.signs != ("≠",)
        if is_multiple(reference_difference, difference(*candidate.sides), positive=positive):
            # an inequality that is solved for a variable has to be answered so
            return not any(side.op == "name" for side in reference.sides)
    return False


def _same_ratio(reference: Ratio, value: Ratio) -> bool:
    units = {reference.unit, value.unit}
    # one of the two may leave its unit out, unless it is a per cent
    if len(units) > 1 and (() not in units or PERCENT in units):
        return False
    if len(reference.terms) != len(value.terms):
        return False
    return all(map(same_expression, reference.terms, value.terms))


def _mirrored(relation: Relation) -> Relation:
    signs = tuple(MIRRORED[sign] for sign in reversed(relation.signs))
    return Relation(relation.sides[::-1], signs)


def _same_names(reference: Sequence[str], names: Sequence[str]) -> bool:
    """Return True if the names match the reference's; `x_1` names a solution for `x`."""
    if len(reference) != len(names):
        return False
    for reference_name, name in zip(reference, names, strict=True):
        is_indexed = "_" not in reference_name and name.startswith(f"{reference_name}_")
        if name != reference_name and not is_indexed:
            return False
    return True


def _digits_of(node: Node) -> str:
    """Return the digits of an integer without leading zeros; nothing for anything else."""
    return node.text.lstrip("0") if node.is_integer else ""


def _is_remainder(reference: Node, value: Congruence) -> bool:
    r"""Return True if `13 \pmod{29}` states the remainder 13: a literal number from 0 to the
    modulus.
    """
    if not all(map(is_literal, (value.residue, value.modulus, reference))):
        return False
    if not same_exact(reference, value.residue):
        return False
    return 0 <= value_of(value.residue) < value_of(value.modulus)


def _same_residue(reference: Congruence, value: Congruence) -> bool:
    """Return True if two residues of one modulus differ by a multiple of it."""
    if not same_exact(reference.modulus, value.modulus):
        return False
    distance = value_of(difference(reference.residue, value.residue))
    modulus = value_of(reference.modulus)
    if not is_literal(value.residue) or not isinstance(distance, Fraction):
        return False
    return bool(distance % modulus == 0)


def _is_binomial(node: Node) -> bool:
    return node.op == "binom" or any(map(_is_binomial, node.args))


def _same_text(reference: TextAnswer, value: Value) -> bool:
    if isinstance(value, Quantity) and infinity_of(value.node) == 1:
        return _plain(reference.text) == _INFINITELY_MANY
    if isinstance(value, TextAnswer):
        return _plain(reference.text) == _plain(value.text)
    if not isinstance(value, Quantity) or value.node.op != "name":
        return False
    return value.node.text == reference.text.strip("()")


def _plain(text: str) -> str:
    """Return a text in words in one form, without case and brackets."""
    text = " ".join(text.casefold().split())
    if _ENDLESS.fullmatch(text):
        return _INFINITELY_MANY
    if text in ("does not exist", "doesn't exist", "the limit does not exist"):
        return "dne"
    if text.startswith("(") and text.endswith(")"):
        return text[1:-1]
    return text


def _compound(answer: Answer) -> Sequence[Part]:
    """Return the parts of `2 hours 30 minutes`, which may be joined by `and`."""
    if len(answer.parts) != 1:
        return ()
    value = answer.parts[0].value
    if not isinstance(value, Collection) or value.brackets:
        return ()
    return value.items


def _solutions(parts: Sequence[Part]) -> list[_Solution] | None:
    """Group assignments into solutions: `p=5, q=2; p=7, q=2` and `(p, q) = (5, 2), (7, 2)` have two
    each.

    None for parts that are no assignments to several variables.
    """
    if parts and all(isinstance(part.value, Collection) for part in parts):
        names = next((part.names for part in parts if len(part.names) > 1), ())
        if names:
            return _solutions_of_tuples(parts, names)
    solutions: list[_Solution] = [{}]
    for part in parts:
        if len(part.names) != 1 or part.left or part.claims:
            return None
        name = part.names[0]
        if name in solutions[-1]:
            # a second value of a variable begins the next solution
            solutions.append({})
        solutions[-1][name] = part.value
    variables = set(map(frozenset, solutions))
    return solutions if len(solutions[0]) > 1 and len(variables) == 1 else None


def _solutions_of_tuples(parts: Sequence[Part], names: Sequence[str]) -> list[_Solution] | None:
    """Return a solution for each tuple; None if one has other variables, or not a value for
    each.
    """
    solutions = []
    for part in parts:
        assert isinstance(part.value, Collection)
        items = part.value.items
        if part.names not in ((), names) or len(items) != len(names):
            return None
        solutions.append({name: item.value for name, item in zip(names, items, strict=True)})
    return solutions


def _normal_form(answer: Answer, *, units: bool) -> str:
    """Return numbers by value, sorted; any other answer as written."""
    forms = []
    for part in answer.parts:
        value = part.value
        if not isinstance(value, Quantity) or not is_literal(value.node):
            return _written_form(answer)
        try:
            form = normalize_number(value_of(value.node))
        except ArithmeticError:
            return _written_form(answer)  # `1 0/0`, a mixed number without a value
        if units and value.unit:
            form += f" {format_unit(value.unit)}"
        forms.append(form)
    return ", ".join(sorted(forms))


def _written_form(answer: Answer) -> str:
    """Return the text of an answer; case is ignored in words alone."""
    if any(isinstance(part.value, TextAnswer) for part in answer.parts):
        return answer.text.casefold()
    return answer.text
