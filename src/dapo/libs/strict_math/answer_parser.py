"""Parses the text of an answer into typed parts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .answer import (
    Answer,
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
    is_unbounded,
    real_set_of,
)
from .arithmetic import names_of
from .asked import text_of
from .equality import approximation_holds, same_exact
from .expressions import Node, Unreadable, number, parse_expression
from .notations import base_number, label_of, name_of, names_of_side, names_points
from .real_sets import (
    REALS,
    Endpoint,
    Interval,
    RealSet,
    complement,
    half_line,
    intersection,
    point,
    union,
)
from .token_lists import (
    CLOSING,
    OPENING,
    closes_at_end,
    is_bracketed,
    signs_expanded,
    split,
    split_items,
    split_list,
    with_depth,
)
from .tokenizer import Token, clean, plain_words, tokenize
from .units import ANY_NOUN, Nouns, split_unit
from .vocabulary import SHORT_WORDS

_RELATIONS = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠"}  # each with its mirror image
_MATRICES = frozenset(("pmatrix", "bmatrix", "Bmatrix", "matrix", "smallmatrix", "array"))
_MAX_TOKENS = 5000
_PRODUCT = re.compile(r"[A-Za-z]{2}")
_IMPLIES = ("implies", "\\implies", "\\Rightarrow", "\\Longrightarrow", "\\therefore", "⇒", "→")
_LIST_OF_ONE = re.compile(r"\[\s*[-+]?[\d.]+\s*\]")
_LETTERS = re.compile("[a-z]{2,3}")
"""A product of variables as a reference: `xy`; the tokenizer has taken out words such as `yes`."""
_ONLY_WORDS = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z]+(?:(?:['.-]|[ .]+)[A-Za-z]+)*")
_VERBAL_SETS = {
    "all real numbers": REALS, "all reals": REALS, "the real numbers": REALS, "real numbers": REALS,
    "all real x": REALS, "no solution": (), "no solutions": (), "no real solution": (), "no real solutions": (),
    "empty set": (), "the empty set": (),
}  # fmt: skip
_NO_SOLUTION = re.compile(
    r"(?:there (?:is|are|exists?) |(?:it|the (?:equation|system|inequality"
    r"|problem)) has )?no (?:real )?(?:solutions?|roots)"
    r"(?: exists?)?(?: (?:to|of|for) (?:the|this) (?:equation|system|inequality|problem))?"
)


def read_answer(
    text: str,
    names: frozenset[str] | None = None,
    nouns: Nouns = ANY_NOUN,
    *,
    thousands: bool = True,
) -> Answer:
    """Parse the text of an answer.

    Args:
        text: LaTeX or plain text.
        names: The variables of the reference; None for the reference itself.
        nouns: The nouns that may follow a number.
        thousands: Whether `1,234` is one number.

    Raises:
        Unreadable: a part is outside the grammar.
    """
    cleaned = clean(text, thousands=thousands)
    if names is not None and _LIST_OF_ONE.fullmatch(cleaned):
        raise Unreadable("a list of one number")
    if label := label_of(cleaned):
        return Answer((Part(TextAnswer(label)),), "".join(cleaned.split()))
    tokens = tokenize(cleaned, names)
    if not tokens or len(tokens) > _MAX_TOKENS or any(token.kind == "other" for token in tokens):
        raise Unreadable("it is empty or has signs that are no mathematics")
    if (
        names is None
        and len(tokens) > 1
        and _ONLY_WORDS.fullmatch(cleaned)
        and not _LETTERS.fullmatch(cleaned)
    ):
        signs = ("and", "or")
        tokens = [
            Token("sign" if word in signs else "word", word, after_space=True)
            for word in cleaned.split()
        ]
    reader = _Reader(names or frozenset(), nouns)
    return Answer(tuple(reader.parts(tokens)), "".join(cleaned.split()))


@dataclass(frozen=True)
class _Reader:
    names: frozenset[str]
    nouns: Nouns

    def parts(self, tokens: Sequence[Token]) -> list[Part]:
        """The parts of a list, a set, or a single value."""
        if is_bracketed(tokens, "{") and any(
            t.is_sign(",", "|") for t, depth in with_depth(tokens) if depth == 1
        ):
            tokens = [Token("sign", "{set"), *tokens[1:-1], Token("sign", "}set")]
        is_set = is_bracketed(tokens, "{set") and not self._is_set_builder(tokens[1:-1])
        if is_set:
            if len(tokens) == 2:
                return [Part(NumberSet(()))]
            tokens = tokens[1:-1]
        pieces, connectives = split_list(tokens)
        if not all(pieces):
            raise Unreadable("a part is empty")
        found = [self._piece(piece) for piece in pieces]
        if len(found) > 1:
            found = _without_conditions(found)
        real_sets = _joined_real_sets(found, connectives)
        if is_set and (
            real_sets or any(isinstance(part.value, NumberSet) for parts in found for part in parts)
        ):
            raise Unreadable("a set of sets")
        return [real_sets] if real_sets else [part for parts in found for part in parts]

    def _piece(self, tokens: Sequence[Token]) -> list[Part]:
        if is_bracketed(tokens, "(") and any(
            t.is_sign("=", "and", "or", *_RELATIONS) for t in tokens
        ):
            inner = tokens[1:-1]
            if any(
                t.is_sign("=", "and", "or", *_RELATIONS)
                for t, depth in with_depth(inner)
                if depth == 0
            ):
                return self.parts(inner)
        return [part for expanded in signs_expanded(tokens) for part in self._single(expanded)]

    def _single(self, tokens: Sequence[Token]) -> list[Part]:
        signs = [t.text for t, depth in with_depth(tokens) if depth == 0 and t.kind == "sign"]
        if "in" in signs:
            return self._membership(tokens)
        if "≈" in signs:
            return self._approximated(tokens)
        if "≡" in signs or "pmod" in signs:
            return [self._congruence(tokens)]
        if any(sign in _RELATIONS for sign in signs):
            return [Part(*self._relation(tokens))]
        if "=" in signs:
            return self._equation(tokens)
        return [Part(self._value(tokens))]

    def _approximated(self, tokens: Sequence[Token]) -> list[Part]:
        r"""Parse `\sqrt{2} \approx 1.41` as the value before the sign; the decimal after it must be
        its rounding.
        """
        exact, *decimals = split(tokens, "≈")
        parts = self._single(exact)
        (value,) = [part.value for part in parts]
        if not isinstance(value, Quantity) or names_of(value.node):
            raise Unreadable("an approximation of something other than a number")
        for decimal in decimals:
            if not approximation_holds(value.node, self._quantity(decimal).node):
                raise Unreadable("an approximation that is not the value")
        return parts

    def _value(self, tokens: Sequence[Token]) -> Value:
        if not tokens:
            raise Unreadable("a value is missing")
        if words := self._words(tokens):
            return words
        signs = {t.text for t, depth in with_depth(tokens) if depth == 0 and t.kind == "sign"}
        if signs & {"∪", "∩", "∖", "∅", "ℝ"} or self._is_set_builder(tokens[1:-1]):
            return NumberSet(self._real_set(tokens))
        if matrix := self._bracket_matrix(tokens):
            return matrix
        if collection := self._collection(tokens):
            return collection
        if any(t.kind == "begin" for t in tokens):
            return self._matrix(tokens)
        if digits := base_number(tokens):
            return digits
        if ":" in signs or any(t.kind == "word" and t.text == "to" for t in tokens):
            return self._ratio(tokens)
        try:
            return self._quantity(tokens)
        except Unreadable:
            if compound := self._compound(tokens):
                return compound
            raise

    def _compound(self, tokens: Sequence[Token]) -> Collection | None:
        """Parse `2 hours 30 minutes`: several numbers, each with its unit."""
        starts = (
            [i for i, token in enumerate(tokens) if token.kind == "number" and token.after_space]
            if tokens
            else []
        )
        bounds = [0, *(i for i in starts if i > 0), len(tokens)]
        if len(bounds) < 3:
            return None
        found = [self._quantity(tokens[start:end]) for start, end in pairwise(bounds)]
        return (
            Collection(tuple(map(Part, found)), "")
            if all(quantity.unit for quantity in found)
            else None
        )

    def _quantity(self, tokens: Sequence[Token]) -> Quantity:
        rest, unit, scale = split_unit(tokens, self.names, self.nouns)
        node = parse_expression(rest)
        if scale != 1:
            if node.op != "number" or node.value is None:
                raise Unreadable("a number word behind an expression")
            node = number(node.value * scale)
        return Quantity(node, unit)

    def _words(self, tokens: Sequence[Token]) -> Value | None:
        if not any(t.kind == "word" for t in tokens) or not all(
            t.kind in ("word", "name") or t.is_sign("(", ")", "'", "-", "in", "to") for t in tokens
        ):
            return None
        text = plain_words(tokens)
        real_set = (
            () if _NO_SOLUTION.fullmatch(text.casefold()) else _VERBAL_SETS.get(text.casefold())
        )
        return TextAnswer(text) if real_set is None else NumberSet(real_set)

    def _collection(self, tokens: Sequence[Token]) -> Collection | None:
        start = next((i for i, token in enumerate(tokens) if token.is_sign(*OPENING)), 0)
        if names_points(tokens[:start]) and any(token.is_sign(",") for token in tokens):
            tokens = tokens[start:]
        first = tokens[0]
        last = tokens[-1]
        if first.kind != "sign" or first.text not in ("(", "[", "⟨", "{set") or last.kind != "sign":
            return None
        if last.text not in CLOSING or not closes_at_end(tokens):
            return None
        pieces = split_items(tokens[1:-1]) if first.text != "{set" else split_list(tokens[1:-1])[0]
        if len(pieces) < 2 and first.text in "([":
            return None
        items = tuple(Part(self._value(piece)) for piece in pieces)
        return Collection(items, first.text.removesuffix("set") + last.text.removesuffix("set"))

    def _matrix(self, tokens: Sequence[Token]) -> Matrix:
        if len(tokens) > 4 and tokens[1].kind == "begin" and tokens[0].is_sign("(", "[", "{set"):
            tokens = tokens[1:-1]
        inner = tokens[1:-1]
        if (
            tokens[0].kind != "begin"
            or tokens[-1].kind != "end"
            or any(t.kind in ("begin", "end") for t in inner)
        ):
            raise Unreadable("matrices in an expression")
        if tokens[0].text not in _MATRICES:
            raise Unreadable(f"the environment {tokens[0].text}")
        rows = [row for row in split(inner, "\\\\") if row]
        cells = tuple(tuple(parse_expression(cell) for cell in split(row, "&")) for row in rows)
        if not cells or len({len(row) for row in cells}) != 1:
            raise Unreadable("rows of different lengths")
        return Matrix(cells)

    def _bracket_matrix(self, tokens: Sequence[Token]) -> Matrix | None:
        """Parse rows in brackets, `[[1, 2], [3, 4]]` or `[1, 2; 3, 4]`; None for any other
        brackets.
        """
        if not is_bracketed(tokens, "["):
            return None
        inner = tokens[1:-1]
        rows = split(inner, ",")
        if all(is_bracketed(row, "[") for row in rows):
            rows = [row[1:-1] for row in rows]
        else:
            rows = split(inner, ";")
            if len(rows) < 2 or not all(len(split(row, ",")) > 1 for row in rows):
                return None
        cells = tuple(tuple(parse_expression(cell) for cell in split(row, ",")) for row in rows)
        return Matrix(cells) if len({len(row) for row in cells}) == 1 else None

    def _ratio(self, tokens: Sequence[Token]) -> Ratio:
        rest, unit, _ = split_unit(
            [Token("sign", ":") if t.text == "to" else t for t in tokens], self.names, self.nouns
        )
        return Ratio(tuple(parse_expression(term) for term in split(rest, ":")), unit)

    def _congruence(self, tokens: Sequence[Token]) -> Part:
        left, *right = split(tokens, "≡")
        number_left = right and not any(t.kind == "name" for t in left)
        names, value = ((name_of(left),), right[0]) if len(right) == 1 else ((), left)
        pieces = split([t for t in value if not t.is_sign("(", ")")], "pmod", "mod")
        if len(pieces) != 2 or len(right) > 1:
            raise Unreadable("a congruence without a modulus")
        residue, modulus = pieces
        if number_left:
            claim = Node("mod", (parse_expression(left), parse_expression(modulus)))
            residue_of = Node("mod", (parse_expression(residue), parse_expression(modulus)))
            if not same_exact(claim, residue_of):
                raise Unreadable("a congruence that does not hold")
            names = ()
        if None in names:
            raise Unreadable("a congruence of an expression")
        return Part(
            Congruence(parse_expression(residue), parse_expression(modulus)),
            tuple(name for name in names if name),
        )

    def _membership(self, tokens: Sequence[Token]) -> list[Part]:
        left, right, *others = split(tokens, "in")
        if others:
            raise Unreadable("a membership in a membership")
        names = names_of_side(left)
        if not names:
            raise Unreadable("a membership of an expression")
        if is_bracketed(right, "{set") and not self._is_set_builder(right[1:-1]):
            return [replace(part, names=names) for part in self.parts(right)]
        if len(right) == 1 and right[0].is_sign("ℤ", "ℕ", "ℚ", "ℂ"):
            return [Part(TextAnswer(right[0].text), names)]
        return [Part(NumberSet(self._real_set(right)), names)]

    def _equation(self, tokens: Sequence[Token]) -> list[Part]:
        implied = max((i for i, t in enumerate(tokens) if t.text in _IMPLIES), default=-1)
        *sides, last = split(tokens[implied + 1 :], "=")
        if not sides:
            raise Unreadable("an implication of no equation")
        if name_of(last) and any(not names_of_side(side) for side in sides):
            index = next(i for i in reversed(range(len(sides))) if not names_of_side(sides[i]))
            sides[index], last = last, sides[index]
        names: tuple[str, ...] = ()
        claims: list[Quantity] = []
        left: list[Node] = []
        first: tuple[str, Node | None] | None = None
        for side in sides:
            if found := names_of_side(side):
                names = names or found
                first = first or (text_of(side), None)
            elif (
                len(side) == 1
                and re.fullmatch("[A-Za-z]{2}", side[0].text)
                and side[0].text.lower() not in SHORT_WORDS
            ):
                first = first or (side[0].text, None)  # a product of two variables
            elif (claim := self._left_side(side)) is None:
                is_formula = any(token.kind == "command" for token in side)
                first = first or ((text_of(side), None) if is_formula else None)
            elif names_of(claim.node):
                left.append(claim.node)
                first = first or (text_of(side), claim.node)
            else:
                claims.append(claim)
        is_named = len(names) == 1 and names[0].isupper() and not (claims or left)
        if is_named and is_bracketed(last, "{set") and not self._is_set_builder(last[1:-1]):
            return self.parts(last)  # `S = {1, 2}`
        values = signs_expanded(last)
        return [
            Part(self._value(value), names, tuple(claims), tuple(left), first) for value in values
        ]

    def _left_side(self, side: Sequence[Token]) -> Quantity | None:
        """Parse a left side that is more than a name; None for a description in words or unknown
        mathematics.
        """
        has_words = any(t.kind == "word" for t in side)
        if not side or (
            has_words and self._words(side) is None and any(t.kind == "number" for t in side)
        ):
            try:
                return self._quantity(side)
            except Unreadable:
                raise Unreadable("prose with numbers before the equals sign") from None
        try:
            return self._quantity(side)
        except Unreadable:
            is_arithmetic = all(t.kind in ("number", "sign", "function") for t in side)
            if is_arithmetic or any(t.text.lower() in ("not", "no", "never") for t in side):
                raise
            return None

    def _relation(self, tokens: Sequence[Token]) -> tuple[Value, tuple[str, ...]]:
        signs = [
            t.text for t, depth in with_depth(tokens) if depth == 0 and t.is_sign(*_RELATIONS, "=")
        ]
        sides = split(tokens, *_RELATIONS, "=")
        if "=" in signs:
            raise Unreadable("an equation with an inequality")
        nodes = tuple(self._quantity(side).node for side in sides)
        variables = [i for i, side in enumerate(sides) if name_of(side)]
        if len(variables) == 1 and not any(
            names_of(node) for i, node in enumerate(nodes) if i != variables[0]
        ):
            index = variables[0]
            real_set = REALS
            monotone = len({_direction(sign) for sign in signs}) == 1 or len(signs) == 1
            if monotone and len(signs) <= 2 and not (len(signs) == 2 and index != 1):
                if index > 0:
                    real_set = intersection(
                        real_set,
                        half_line(Endpoint.read(nodes[index - 1]), _RELATIONS[signs[index - 1]]),
                    )
                if index < len(signs):
                    real_set = intersection(
                        real_set, half_line(Endpoint.read(nodes[index + 1]), signs[index])
                    )
                return NumberSet(real_set), (nodes[index].text,)
        return Relation(nodes, tuple(signs)), ()

    def _is_set_builder(self, inner: Sequence[Token]) -> bool:
        return (
            len(inner) > 2
            and any(t.is_sign("|", ":") for t in inner[1:])
            and (
                name_of(inner[:1]) is not None
                and (inner[1].is_sign("|", ":") or inner[1].is_sign("in"))
            )
        )

    def _real_set(self, tokens: Sequence[Token]) -> RealSet:
        """Parse set notation: unions, intersections, differences, intervals, braces."""
        for sign, join in (("∪", union), ("∩", intersection)):
            pieces = split(tokens, sign)
            if len(pieces) > 1:
                real_set = self._real_set(pieces[0])
                for piece in pieces[1:]:
                    real_set = join(real_set, self._real_set(piece))
                return real_set
        first, *others = split(tokens, "∖")
        if others:
            real_set = self._real_set(first)
            for other in others:
                real_set = intersection(real_set, complement(self._real_set(other)))
            return real_set
        return self._simple_real_set(tokens)

    def _simple_real_set(self, tokens: Sequence[Token]) -> RealSet:
        if len(tokens) == 1 and tokens[0].is_sign("ℝ", "∅"):
            return REALS if tokens[0].text == "ℝ" else ()
        if len(tokens) < 2 or not closes_at_end(tokens):
            raise Unreadable("a set of numbers is expected")
        inner = tokens[1:-1]
        if tokens[0].is_sign("{set", "{"):
            return self._braces(inner)
        pieces = split_items(inner)
        if len(pieces) == 1 and tokens[0].is_sign("("):
            return self._real_set(inner)
        if len(pieces) != 2 or not tokens[0].is_sign("(", "[") or not tokens[-1].is_sign(")", "]"):
            raise Unreadable("an interval has two ends")
        low, high = (Endpoint.read(self._quantity(piece).node) for piece in pieces)
        interval = Interval(low, high, tokens[0].text == "[", tokens[-1].text == "]")
        if high.before(low):
            raise Unreadable("the ends of an interval are in the wrong order")
        return union((interval,))

    def _braces(self, inner: Sequence[Token]) -> RealSet:
        if self._is_set_builder(inner):
            index = next(i for i, t in enumerate(inner) if t.is_sign("|", ":"))
            part, *others = self.parts(inner[index + 1 :])
            if others or not isinstance(part.value, NumberSet):
                raise Unreadable("a condition on numbers is expected")
            return part.value.real_set
        parts = self.parts(inner)
        if not all(isinstance(part.value, Quantity) for part in parts):
            raise Unreadable("a set of numbers is expected")
        return union(
            *(
                point(Endpoint.read(part.value.node))
                for part in parts
                if isinstance(part.value, Quantity)
            )
        )


def _joined_real_sets(found: Sequence[Sequence[Part]], connectives: Sequence[str]) -> Part | None:
    """Join inequalities connected by `and`, `or` and commas into one set of numbers; None if they
    are a list.
    """
    if len(found) < 2 or any(len(parts) != 1 for parts in found):
        return None
    parts = [parts[0] for parts in found]
    names = {part.names for part in parts if part.names}
    is_set = any(isinstance(part.value, NumberSet) for part in parts)
    if len(names) > 1 or not (
        is_set or (set(connectives) == {"or"} and any(map(is_unbounded, parts)))
    ):
        return None
    real_sets: list[RealSet] = []
    for part in parts:
        real_set = real_set_of(part.value)
        if real_set is None and isinstance(part.value, Quantity) and part.names:
            real_set = point(Endpoint.read(part.value.node))
        if real_set is None:
            return None
        real_sets.append(real_set)
    joined = [real_sets[0]]
    for connective, real_set in zip(connectives, real_sets[1:], strict=True):
        both = intersection(joined[-1], real_set)
        if connective == "and" or (connective != "or" and both):
            joined[-1] = both
        else:
            joined.append(real_set)
    return Part(NumberSet(union(*joined)), next(iter(names), ()))


def _without_conditions(found: list[list[Part]]) -> list[list[Part]]:
    r"""Drop conditions such as `n \in \mathbb{Z}` next to a value."""
    kept = [
        parts
        for parts in found
        if not (isinstance(parts[0].value, TextAnswer) and parts[0].value.text in "ℤℕℚℂ")
    ]
    return kept or found


def _direction(sign: str) -> str:
    return {"≤": "<", "≥": ">"}.get(sign, sign)
