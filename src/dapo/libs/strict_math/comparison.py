"""Compares answers with a reference."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

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
from .choices import chosen_letter
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
from .sentences import digits_for_words, value_in_sentence
from .spellings import with_binomials
from .text import normalize_number
from .units import PERCENT, Nouns, Unit, format_unit
from .vocabulary import COUNTED, GREEK

_EXTRA_CHARS = 500
"""An answer that exceeds the reference by more characters matches nothing."""
_DECIMAL_COMMA = re.compile(
    r"(?<![\d.,])(?:(?=0,|\d{4}|\d+(?:,|\{,\})(?!\d{3}(?!\d))))(\d+)(?:,|\{,\})(\d+)(?![\d,]|\.\d)"
)
_QUANTITY = re.compile(
    r"(?:\\text\{)?(?:(?:the|its|their|his|her) )?(?:[a-z]+ ){0,2}(?P<name>[a-z]+)\}?(?: of"
    r" [^=<>]{1,80}?)?"
    r" (?:=|is|was|equals)(?: |$)",
    re.IGNORECASE,
)
"""The start of an answer that names its quantity."""
_VALUE_OF_FUNCTION = re.compile(r"[A-Za-z]'*\([-\d,./]+\)")
_FUNCTION_OF_NAMES = re.compile(r"[A-Za-z]\((?P<names>[A-Za-z](?:,[A-Za-z])*)\)")
_LETTER = re.compile(rf"(?:[A-Za-z]|\\(?:{'|'.join(sorted(GREEK))}))(?:_\w+)?")
_CHANCE = re.compile(r"(?:\\mathbb|\\Pr|\\mathrm)?\{?[PE]r?\}?[(\[]")
_OF_FIGURE = re.compile(r"\\(?:angle|triangle|measuredangle)|[A-Z]{2,4}$|\|[A-Z]{2}\|$|[A-Za-z]\(")
_CUT_OFF = re.compile(r"\d ?(?:\.\.+|…|\\[lc]?dots)[^\w]*$")
"""A decimal whose digits go on."""
_INFINITELY_MANY = "infinitely many"
_ENDLESS = re.compile(
    r"(?:there (?:are|is) )?(?:infinitely many|(?:an )?infinite(?: number(?: of)?)?)"
    r"(?: (?:(?:real |such )?(?:solutions?|values|numbers|ways|pairs|integers)))?(?: exist)?"
)
_BRACKET = frozenset("()[]{}<>|")
_DEGREE: Unit = (("degree", 1),)


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

    @classmethod
    def read(cls, text: str, question: str = "") -> "Reference | None":
        """The reference that `text` states; None if it is outside the grammar, undefined or too
        costly to compute.

        Args:
            text: LaTeX or plain text; of a whole solution its last box.
            question: the question's text. An answer may use its nouns as units and name the
                quantity that it asks for; without it, only common ones.
        """
        for candidate in (
            text,
            extract_answer(text) if "boxed" in text or "fbox" in text else None,
        ):
            try:
                answer = read_answer(candidate or "")
                for part in answer.parts:
                    _check(part)
            except (Unreadable, ArithmeticError, RecursionError):
                continue
            return cls(
                answer, frozenset().union(*map(_names, answer.parts)), len(text), Question(question)
            )
        return None

    @cached_property
    def _nouns(self) -> Nouns:
        own = {
            name for part in self.answer.parts for unit in units_of(part.value) for name, _ in unit
        }
        known = {word for name in own for word in (name, *name.split())} | self.question.words
        return Nouns(
            frozenset(known if self.question.is_known else known | COUNTED), self.question.asked
        )

    @cached_property
    def _is_number(self) -> bool:
        """Whether it is one rational number in a usual notation."""
        values = [part.value for part in self.answer.parts]
        return [isinstance(value, Quantity) and is_literal(value.node) for value in values] == [
            True
        ]

    @cached_property
    def _has_binomial(self) -> bool:
        return any(
            map(_is_binomial, (node for part in self.answer.parts for node in nodes_of(part.value)))
        )

    @cached_property
    def _letter(self) -> str:
        """The letter of a choice; empty for any other reference."""
        letter = self.answer.text.replace("\\text", "").strip("{}().")
        return letter if len(letter) == 1 and "A" <= letter <= "J" else ""

    @cached_property
    def normal_form(self) -> str:
        """The vote of every matching answer: the value without unit and name."""
        is_equation = any(part.left for part in self.answer.parts)
        return self.answer.text if is_equation else _normal_form(self.answer, units=False)

    def matches(self, answer: str) -> bool:
        """Whether an answer has exactly the reference's values and leaves nothing to be computed.

        Args:
            answer: LaTeX or plain text, or a sentence with one reading, such as `The number of ways
                is 13.`
        """
        text = " ".join(answer.split())
        if len(text) > self.length + _EXTRA_CHARS or (_CUT_OFF.search(text) and self._is_number):
            return False
        named = _QUANTITY.match(text)
        if named and self.question.contradicts_quantity(named["name"].lower()):
            return False
        if self._letter and chosen_letter(text, self.question.text) == self._letter:
            return True
        forms = dict.fromkeys((text, digits_for_words(text), *self._with_decimal_point(text)))
        stated = [value_in_sentence(form, self.question) for form in forms]
        stated += [value_in_language(form, self.question.text) for form in forms]
        texts = dict.fromkeys((*forms, *filter(None, stated)))
        readings = (reading for each in texts for reading in self._readings(each))
        return any(_Comparison(self.question).answers(self.answer, reading) for reading in readings)

    def vote(self, text: str, *, correct: bool) -> str:
        """The text by which majority votes count an answer: equal for all correct answers, else its
        normal form.

        Args:
            text: the answer.
            correct: what `matches(text)` returned.
        """
        if correct:
            return self.normal_form
        text = " ".join(text.split())
        readings = self._readings(text) if len(text) <= self.length + _EXTRA_CHARS else []
        form = (
            _normal_form(readings[0], units=True)
            if readings
            else "".join(text[:_EXTRA_CHARS].split()).casefold()
        )
        return f"not {form}" if form == self.normal_form else form

    def _with_decimal_point(self, text: str) -> Sequence[str]:
        """The text with `2,75` as `2.75`, where the reference is one number and the comma separates
        no thousands.
        """
        if not self._is_number or text.count(",") != 1:
            return ()
        pointed = _DECIMAL_COMMA.sub(r"\1.\2", text)
        return (pointed,) if _BRACKET.isdisjoint(pointed) else ()

    def _readings(self, text: str) -> list[Answer]:
        found: list[Answer] = []
        if self._has_binomial:
            text = with_binomials(text)
        names = self.names | asked_expressions(self.question.text).names
        for thousands in (True, False) if len(self.answer.parts) > 1 and "," in text else (True,):
            try:
                found.append(read_answer(text, names, self._nouns, thousands=thousands))
            except (Unreadable, ArithmeticError, RecursionError):
                continue
        return found


def is_equal(reference: str, answer: str) -> bool:
    """Whether an answer has exactly the reference's values and leaves nothing to be computed.

    The two are not interchangeable: `3 + 4` is no answer to `7`. Use `Reference` to compare many
    answers with one reference.

    Raises:
        ValueError: the reference cannot be read or computed.

    Example:
        >>> is_equal("1/2", "50%"), is_equal("7", "3 + 4"), is_equal("(1, 2)", "(2, 1)")
        (True, False, False)
    """
    read = Reference.read(reference)
    if read is None:
        raise ValueError(f"expected a reference in LaTeX or plain notation, got {reference[:80]!r}")
    return read.matches(answer)


def _names(part: Part) -> frozenset[str]:
    return frozenset(part.names).union(*map(names_of, (*nodes_of(part.value), *part.left)))


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
        try:
            groups = _groups(reference.parts)
            others = _groups(answer.parts)
            if groups:
                return self._answers_groups(groups, answer, others)
            if self._match_all(reference.parts, answer.parts, self._part):
                return True
            compound = _compound(reference)
            if compound and [part.names for part in answer.parts] == [()] * len(compound):
                return all(map(self._part, compound, answer.parts))
            if others is None:
                return False
            in_order = [
                Part(Collection(tuple(Part(group[name]) for name in sorted(group)), "()"))
                for group in others
            ]
            return self._match_all(reference.parts, in_order, self._part)
        except (ArithmeticError, RecursionError):
            return False

    def _answers_groups(
        self,
        groups: "Sequence[dict[str, Value]]",
        answer: Answer,
        others: "Sequence[dict[str, Value]] | None",
    ) -> bool:
        """Whether an answer gives the same values to several variables, by name or in the
        reference's order.
        """
        if others is not None:
            return self._match_all(groups, others, self._group)
        if (
            len(groups) == 1
            and len(answer.parts) == len(groups[0])
            and not any(part.names for part in answer.parts)
        ):
            return all(
                self._value(value, part.value)
                for value, part in zip(groups[0].values(), answer.parts, strict=True)
            )
        in_order = [Part(Collection(tuple(map(Part, group.values())), "()")) for group in groups]
        return self._match_all(in_order, answer.parts, self._part)

    def _group(self, reference: "dict[str, Value]", group: "dict[str, Value]") -> bool:
        return reference.keys() == group.keys() and all(
            self._value(v, group[name]) for name, v in reference.items()
        )

    def _match_all(self, references: Sequence, answers: Sequence, same: Callable) -> bool:  # type: ignore[type-arg]
        """Whether references and answers pair up one to one; equality is transitive, so the first
        match serves.
        """
        left = list(answers)
        if len(left) != len(references):
            return False
        for reference in references:
            index = next(
                (i for i, candidate in enumerate(left) if same(reference, candidate)), None
            )
            if index is None:
                return False
            del left[index]
        return True

    def _part(self, reference: Part, part: Part) -> bool:
        if reference.left and not reference.names:
            return self._equation(reference, part)
        is_equation = (
            len(reference.names) == 1
            and self.question.asks_for_equation
            and (part.left or part.names)
        )
        if is_equation and self._equation(reference, part):
            return True
        if reference.names and (
            part.left or (part.names and not _same_names(reference.names, part.names))
        ):
            return False
        if not reference.names and part.first and not self._is_asked(*part.first, part.value):
            return False
        if not all(claim_holds(claim, part.value) for claim in part.claims):
            return False
        return self._value(reference.value, part.value)

    def _is_asked(self, text: str, left: Node | None, value: Value) -> bool:
        """Whether the question may ask for a left side: not for `2x`, nor for `y` where it asks for
        `x`.
        """
        names = frozenset().union(*map(names_of, nodes_of(value)))
        if (
            left is not None
            and isinstance(value, Quantity)
            and names
            and same_function(left, value.node)
        ):
            return True  # `x^2 - 1 = (x-1)(x+1)`
        label = _FUNCTION_OF_NAMES.fullmatch(text)
        if label and names and not set(label["names"].split(",")) <= names:
            return False  # a function of something else
        asked = asked_expressions(self.question.text)
        if asked.texts:
            return asked.has(text, left)
        if left is not None and len(names_of(left)) == 1 and not _VALUE_OF_FUNCTION.search(text):
            return False
        if (
            _LETTER.fullmatch(text)
            or (label and names)
            or (_CHANCE.match(text) and self.question.asks_for_chance)
        ):
            return True
        if self.question.is_known:
            return self.question.writes(text) or (
                left is not None and self.question.uses_letters(names_of(left))
            )
        return (
            left is not None
            or _VALUE_OF_FUNCTION.search(text) is not None
            or _OF_FIGURE.match(text) is not None
        )

    def _equation(self, reference: Part, part: Part) -> bool:
        """Whether two equations such as `2x + 3y = 6` describe the same curve: one is a multiple of
        the other.
        """
        side = part.left[0] if len(part.left) == 1 else None
        if side is None and len(part.claims) == 1:
            side = part.claims[0].node
        if side is None and len(part.names) == 1:
            side = Node("name", text=part.names[0])
        if (
            side is None
            or not isinstance(reference.value, Quantity)
            or not isinstance(part.value, Quantity)
        ):
            return False
        own_side = reference.left[0] if reference.left else Node("name", text=reference.names[0])
        own = difference(own_side, reference.value.node)
        other = difference(side, part.value.node)
        return is_multiple(own, other)

    def _number(self, reference: Quantity, value: Value) -> bool:
        """Whether a value is a number, also as a remainder with its modulus or in the base that is
        asked for.
        """
        if isinstance(value, Congruence):
            asked = self.question.asks_for_remainder and self.question.has(
                [_digits_of(value.modulus)]
            )
            return asked and _is_remainder(reference.node, value)
        if isinstance(value, BaseNumber):
            return (
                self.question.asks_for_base(value.base)
                and _digits_of(reference.node) == value.digits
            )
        return isinstance(value, Quantity | TextAnswer) and self._quantity(reference, value)

    def _value(self, reference: Value, value: Value) -> bool:
        if isinstance(reference, Quantity):
            return self._number(reference, value)
        if isinstance(reference, TextAnswer):
            return _same_text(reference, value)
        if isinstance(reference, NumberSet) or isinstance(value, NumberSet):
            return self._real_set(reference, value)
        if isinstance(reference, Collection):
            return isinstance(value, Collection) and self._collection(reference, value)
        if isinstance(reference, Matrix):
            return isinstance(value, Matrix) and self._matrix(reference, value)
        if isinstance(reference, Relation):
            return isinstance(value, Relation) and self._relation(reference, value)
        if isinstance(reference, Ratio):
            return isinstance(value, Ratio) and self._ratio(reference, value)
        if isinstance(reference, Congruence):
            if isinstance(value, Quantity) and value.node.op == "mod":
                value = Congruence(*value.node.args)
            return isinstance(value, Congruence) and _same_residue(reference, value)
        return isinstance(reference, BaseNumber) and reference == value

    def _quantity(self, reference: Quantity, value: Quantity | TextAnswer) -> bool:
        if isinstance(value, TextAnswer):
            letters = letters_of(reference.node)
            return (bool(letters) and letters == value.text.strip("()")) or (
                reference.node.op == "name" and value.text.strip("()") == reference.node.text
            )
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
        return is_percentage and is_hundredth(value.node, reference.node)

    def _share(self, reference: Node, percentage: Node) -> bool:
        """Whether a percentage is the reference: a hundredth of it, or the number of per cent that
        is asked for.
        """
        if is_hundredth(reference, percentage):
            return True
        if (
            not is_plain_number(reference)
            or is_below_one(reference)
            or self.question.contradicts(PERCENT)
        ):
            return False
        return same_expression(reference, percentage)

    def _collection(self, reference: Collection, value: Collection) -> bool:
        round_or_angle = ("()", "⟨⟩")
        if reference.brackets != value.brackets and not {reference.brackets, value.brackets} <= set(
            round_or_angle
        ):
            return False
        if len(reference.items) != len(value.items):
            return False
        if reference.brackets == "{}":
            return self._match_all(reference.items, value.items, self._part)
        return all(self._part(a, b) for a, b in zip(reference.items, value.items, strict=True))

    def _matrix(self, reference: Matrix, value: Matrix) -> bool:
        return [len(row) for row in reference.rows] == [len(row) for row in value.rows] and all(
            map(same_expression, nodes_of(reference), nodes_of(value))
        )

    def _real_set(self, reference: Value, value: Value) -> bool:
        one = real_set_of(reference)
        other = real_set_of(value)
        if one is None or other is None:
            return False
        pairs = same_endpoints(one, other)
        return pairs is not None and all(
            a.node is None or b.node is None or form_allows(a.node, b.node) for a, b in pairs
        )

    def _relation(self, reference: Relation, value: Relation) -> bool:
        for candidate in (value, _mirrored(value)):
            if candidate.signs != reference.signs:
                continue
            if all(map(same_expression, reference.sides, candidate.sides)):
                return True
            if len(reference.signs) == 1 and is_multiple(
                difference(*reference.sides),
                difference(*candidate.sides),
                positive=reference.signs != ("≠",),
            ):
                return not any(side.op == "name" for side in reference.sides)
        return False

    def _ratio(self, reference: Ratio, value: Ratio) -> bool:
        if value.unit != reference.unit and (
            (reference.unit and value.unit) or PERCENT in (value.unit, reference.unit)
        ):
            return False
        return len(reference.terms) == len(value.terms) and all(
            map(same_expression, reference.terms, value.terms)
        )


def _mirrored(relation: Relation) -> Relation:
    signs = tuple(MIRRORED[sign] for sign in reversed(relation.signs))
    return Relation(relation.sides[::-1], signs)


def _same_names(reference: Sequence[str], names: Sequence[str]) -> bool:
    """Whether the names match the reference's; `x_1` names a solution for `x`."""
    return len(reference) == len(names) and all(
        name == other or ("_" not in name and other.startswith(f"{name}_"))
        for name, other in zip(reference, names, strict=True)
    )


def _digits_of(node: Node) -> str:
    """The digits of an integer without leading zeros; empty for anything else."""
    return node.text.lstrip("0") if node.op == "number" and node.text.isdigit() else ""


def _is_remainder(reference: Node, value: Congruence) -> bool:
    r"""Whether `13 \pmod{29}` states the remainder 13: a literal number from 0 to the modulus."""
    if not is_literal(value.residue) or not is_literal(value.modulus) or not is_literal(reference):
        return False
    return same_exact(reference, value.residue) and 0 <= value_of(value.residue) < value_of(
        value.modulus
    )


def _same_residue(reference: Congruence, value: Congruence) -> bool:
    if not same_exact(reference.modulus, value.modulus):
        return False
    distance = value_of(difference(reference.residue, value.residue))
    modulus = value_of(reference.modulus)
    return is_literal(value.residue) and isinstance(distance, Fraction) and distance % modulus == 0


def _is_binomial(node: Node) -> bool:
    return node.op == "binom" or any(map(_is_binomial, node.args))


def _same_text(reference: TextAnswer, value: Value) -> bool:
    if isinstance(value, Quantity) and infinity_of(value.node) == 1:
        return _plain(reference.text) == _INFINITELY_MANY
    if isinstance(value, TextAnswer):
        return _plain(reference.text) == _plain(value.text)
    return (
        isinstance(value, Quantity)
        and value.node.op == "name"
        and value.node.text == reference.text.strip("()")
    )


def _plain(text: str) -> str:
    text = " ".join(text.casefold().split())
    if _ENDLESS.fullmatch(text):
        return _INFINITELY_MANY
    if text in ("does not exist", "doesn't exist", "the limit does not exist"):
        return "dne"
    return text[1:-1] if text.startswith("(") and text.endswith(")") else text


def _compound(answer: Answer) -> Sequence[Part]:
    """The parts of `2 hours 30 minutes`, which may be joined by `and`."""
    value = answer.parts[0].value if len(answer.parts) == 1 else None
    return value.items if isinstance(value, Collection) and not value.brackets else ()


def _groups(parts: Sequence[Part]) -> "list[dict[str, Value]] | None":
    """Group assignments into solutions: `p=5, q=2; p=7, q=2` and `(p, q) = (5, 2), (7, 2)` have two
    each.
    """
    tuples = [part for part in parts if isinstance(part.value, Collection)]
    names = next((part.names for part in tuples if len(part.names) > 1), ())
    if tuples and len(tuples) == len(parts) and names:
        groups = []
        for part in tuples:
            assert isinstance(part.value, Collection)
            if part.names not in ((), names) or len(part.value.items) != len(names):
                return None
            groups.append(dict(zip(names, (item.value for item in part.value.items), strict=True)))
        return groups
    if not parts or any(len(part.names) != 1 or part.left or part.claims for part in parts):
        return None
    groups = [{}]
    for part in parts:
        if part.names[0] in groups[-1]:
            groups.append({})
        groups[-1][part.names[0]] = part.value
    return (
        groups if len(groups[0]) > 1 and len({frozenset(group) for group in groups}) == 1 else None
    )


def _normal_form(answer: Answer, *, units: bool) -> str:
    """Numbers by value, sorted; any other answer as written."""
    values = [part.value for part in answer.parts]
    if not all(isinstance(value, Quantity) and is_literal(value.node) for value in values):
        return (
            answer.text.casefold()
            if any(isinstance(value, TextAnswer) for value in values)
            else answer.text
        )
    forms = [
        (normalize_number(value_of(value.node)), value.unit)
        for value in values
        if isinstance(value, Quantity)
    ]
    return ", ".join(
        sorted(f"{form} {format_unit(unit)}" if units and unit else form for form, unit in forms)
    )
