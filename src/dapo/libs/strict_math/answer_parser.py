"""Parses the text of an answer into typed parts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import pairwise

from .answer import (
    MIRRORED,
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
    signs_at,
    signs_expanded,
    split,
    split_items,
    split_list,
)
from .tokenizer import Token, clean, plain_words, tokenize
from .units import ANY_NOUN, Nouns, split_unit
from .vocabulary import SHORT_WORDS

_RELATIONS = tuple(MIRRORED)
_DIRECTIONS = {"≤": "<", "≥": ">"}  # each with the strict sign of its direction
_STATEMENT_SIGNS = frozenset(("=", "and", "or", *_RELATIONS))
_SEPARATORS = frozenset((",", "|"))  # of the elements of a set, and before its condition
_SET_SIGNS = frozenset(("∪", "∩", "∖", "∅", "ℝ"))
_MATRICES = frozenset(("pmatrix", "bmatrix", "Bmatrix", "matrix", "smallmatrix", "array"))
_MAX_TOKENS = 5000
_IMPLIES = ("implies", "\\implies", "\\Rightarrow", "\\Longrightarrow", "\\therefore", "⇒", "→")
_DENIALS = ("not", "no", "never")
_LIST_OF_ONE = re.compile(r"\[\s*[-+]?[\d.]+\s*\]")
_TWO_LETTERS = re.compile("[A-Za-z]{2}")
# A product of variables as a reference: `xy`; the tokenizer has taken out words such as `yes`
_VARIABLES = re.compile("[a-z]{2,3}")
_ONLY_WORDS = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z]+(?:(?:['.-]|[ .]+)[A-Za-z]+)*")
_VERBAL_SETS = {
    "all real numbers": REALS, "all reals": REALS, "the real numbers": REALS, "real numbers": REALS,
    "all real x": REALS, "no solution": (), "no solutions": (), "no real solution": (), "no real solutions": (),
    "empty set": (), "the empty set": (),
}  # fmt: skip
_NO_SOLUTION = re.compile(
    r"""
    (?:there\ (?:is|are|exists?)\ |(?:it|the\ (?:equation|system|inequality|problem))\ has\ )?
    no\ (?:real\ )?(?:solutions?|roots)
    (?:\ exists?)?
    (?:\ (?:to|of|for)\ (?:the|this)\ (?:equation|system|inequality|problem))?
    """,
    re.VERBOSE,
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
        Unreadable: A part is outside the grammar.
    """
    plain = clean(text, thousands=thousands)
    compact = "".join(plain.split())
    if names is not None and _LIST_OF_ONE.fullmatch(plain):
        raise Unreadable("a list of one number")
    label = label_of(plain)
    if label:
        return Answer((Part(TextAnswer(label)),), compact)
    tokens = tokenize(plain, names)
    has_unknown_signs = any(token.kind == "other" for token in tokens)
    if not tokens or len(tokens) > _MAX_TOKENS or has_unknown_signs:
        raise Unreadable("it is empty or has signs that are no mathematics")
    if names is None and len(tokens) > 1 and _is_phrase(plain):
        tokens = _word_tokens(plain)
    reader = _Reader(names or frozenset(), nouns)
    return Answer(tuple(reader.parts(tokens)), compact)


def _is_phrase(text: str) -> bool:
    """Return True if a reference is words, and not a product of variables."""
    return _ONLY_WORDS.fullmatch(text) is not None and _VARIABLES.fullmatch(text) is None


def _word_tokens(text: str) -> list[Token]:
    """Return a token for each word; only `and` and `or` keep their meaning."""
    tokens = []
    for word in text.split():
        kind = "sign" if word in ("and", "or") else "word"
        tokens.append(Token(kind, word, after_space=True))
    return tokens


@dataclass
class _LeftSides:
    """What the sides of an equation before its value are, as `Part` describes it."""

    names: tuple[str, ...] = ()
    claims: list[Quantity] = field(default_factory=list)
    expressions: list[Node] = field(default_factory=list)
    first: tuple[str, Node | None] | None = None

    def note_first(self, side: Sequence[Token], node: Node | None = None) -> None:
        """Store a side with variables, unless there was one before."""
        if self.first is None:
            self.first = (text_of(side), node)


@dataclass(frozen=True)
class _Reader:
    names: frozenset[str]
    nouns: Nouns

    def parts(self, tokens: Sequence[Token]) -> list[Part]:
        """Return the parts of a list, a set, or a single value."""
        # grouping braces around a list are those of a set, whose backslashes were left out
        if is_bracketed(tokens, "{") and not _SEPARATORS.isdisjoint(signs_at(tokens, depth=1)):
            tokens = [Token("sign", "{set"), *tokens[1:-1], Token("sign", "}set")]
        is_set = _is_listed_set(tokens)
        if is_set:
            tokens = tokens[1:-1]
            if not tokens:
                return [Part(NumberSet(()))]
        pieces, connectives = split_list(tokens)
        if not all(pieces):
            raise Unreadable("a part is empty")
        groups = [self._piece(piece) for piece in pieces]
        if len(groups) > 1:
            groups, connectives = _without_conditions(groups, connectives)
        joined = _joined_real_sets(groups, connectives)
        parts = [joined] if joined else [part for group in groups for part in group]
        if is_set and any(isinstance(part.value, NumberSet) for part in parts):
            raise Unreadable("a set of sets")
        return parts

    def _piece(self, tokens: Sequence[Token]) -> list[Part]:
        """Return the parts of one piece of a list; brackets around a statement are left out."""
        if is_bracketed(tokens, "("):
            inner = tokens[1:-1]
            if not _STATEMENT_SIGNS.isdisjoint(signs_at(inner)):
                return self.parts(inner)
        parts: list[Part] = []
        for reading in signs_expanded(tokens):
            parts += self._single(reading)
        return parts

    def _single(self, tokens: Sequence[Token]) -> list[Part]:
        """Return the parts of a statement or a value, by the sign that binds least."""
        signs = set(signs_at(tokens))
        # a membership may hold everything else, and an equation only values
        if "in" in signs:
            return self._membership(tokens)
        if "≈" in signs:
            return self._approximated(tokens)
        if "≡" in signs or "pmod" in signs:
            return [_congruence(tokens)]
        if not signs.isdisjoint(_RELATIONS):
            return [self._relation(tokens)]
        if "=" in signs:
            return self._equation(tokens)
        return [Part(self._value(tokens))]

    def _approximated(self, tokens: Sequence[Token]) -> list[Part]:
        r"""Parse `\sqrt{2} \approx 1.41` as the value before the sign; the decimal after it must be
        its rounding.
        """
        exact, *decimals = split(tokens, "≈")
        parts = self._single(exact)
        value = parts[0].value
        if len(parts) > 1 or not isinstance(value, Quantity) or names_of(value.node):
            raise Unreadable("an approximation of something other than a number")
        for decimal in decimals:
            if not approximation_holds(value.node, self._quantity(decimal).node):
                raise Unreadable("an approximation that is not the value")
        return parts

    def _value(self, tokens: Sequence[Token]) -> Value:
        """Parse a value: the first notation that fits."""
        if not tokens:
            raise Unreadable("a value is missing")
        words = _words(tokens)
        if words is not None:
            return words
        signs = set(signs_at(tokens))
        if signs & _SET_SIGNS or _is_set_builder(tokens[1:-1]):
            return NumberSet(self._real_set(tokens))
        bracketed = _bracket_matrix(tokens) or self._collection(tokens)
        if bracketed is not None:
            return bracketed
        if any(token.kind == "begin" for token in tokens):
            return _matrix(tokens)
        digits = base_number(tokens)
        if digits is not None:
            return digits
        has_to = any(token.kind == "word" and token.text == "to" for token in tokens)
        if ":" in signs or has_to:
            return self._ratio(tokens)
        try:
            return self._quantity(tokens)
        except Unreadable:
            compound = self._compound(tokens)
            if compound is None:
                raise
            return compound

    def _compound(self, tokens: Sequence[Token]) -> Collection | None:
        """Parse `2 hours 30 minutes`: several numbers, each with its unit."""
        starts = [
            index
            for index, token in enumerate(tokens)
            if index and token.kind == "number" and token.after_space
        ]
        if not starts:
            return None
        bounds = [0, *starts, len(tokens)]
        quantities = [self._quantity(tokens[start:end]) for start, end in pairwise(bounds)]
        if not all(quantity.unit for quantity in quantities):
            return None
        return Collection(tuple(map(Part, quantities)), "")

    def _quantity(self, tokens: Sequence[Token]) -> Quantity:
        """Parse an expression with its unit."""
        expression, unit, scale = split_unit(tokens, self.names, self.nouns)
        node = parse_expression(expression)
        if scale != 1:
            if node.op != "number" or node.value is None:
                raise Unreadable("a number word behind an expression")
            node = number(node.value * scale)
        return Quantity(node, unit)

    def _collection(self, tokens: Sequence[Token]) -> Collection | None:
        """Parse a tuple, a list, a vector or a set of values; None for anything else."""
        start = next((i for i, token in enumerate(tokens) if token.is_sign(*OPENING)), 0)
        has_comma = any(token.is_sign(",") for token in tokens)
        if has_comma and names_points(tokens[:start]):
            tokens = tokens[start:]  # `A(1, 2)`
        first = tokens[0]
        last = tokens[-1]
        # `[1, 2)` is an interval: the brackets may differ
        if not first.is_sign("(", "[", "⟨", "{set") or not last.is_sign(*CLOSING):
            return None
        if not closes_at_end(tokens):
            return None
        inner = tokens[1:-1]
        if first.text == "{set":
            pieces, _ = split_list(inner)
        else:
            pieces = split_items(inner)
        if len(pieces) < 2 and first.text in "([":
            return None  # brackets around an expression
        items = tuple(Part(self._value(piece)) for piece in pieces)
        brackets = first.text.removesuffix("set") + last.text.removesuffix("set")
        return Collection(items, brackets)

    def _ratio(self, tokens: Sequence[Token]) -> Ratio:
        """Parse `3:4` and `3 to 4`, with a unit."""
        colon = Token("sign", ":")
        with_colons = [colon if token.text == "to" else token for token in tokens]
        terms, unit, _ = split_unit(with_colons, self.names, self.nouns)
        return Ratio(tuple(map(parse_expression, split(terms, ":"))), unit)

    def _membership(self, tokens: Sequence[Token]) -> list[Part]:
        """Parse `x in S`; a set that lists its numbers gives a part for each."""
        variables, members, *more = split(tokens, "in")
        if more:
            raise Unreadable("a membership in a membership")
        names = names_of_side(variables)
        if not names:
            raise Unreadable("a membership of an expression")
        if _is_listed_set(members):
            return [replace(part, names=names) for part in self.parts(members)]
        if len(members) == 1 and members[0].is_sign("ℤ", "ℕ", "ℚ", "ℂ"):
            return [Part(TextAnswer(members[0].text), names)]
        return [Part(NumberSet(self._real_set(members)), names)]

    def _equation(self, tokens: Sequence[Token]) -> list[Part]:
        """Parse an equation: its last side that is more than a name is the value."""
        *sides, value = _sides_of_equation(tokens)
        left = self._left_sides(sides)
        is_only_names = not left.claims and not left.expressions
        names_set = is_only_names and len(left.names) == 1 and left.names[0].isupper()
        if names_set and _is_listed_set(value):
            return self.parts(value)  # `S = {1, 2}`
        claims = tuple(left.claims)
        expressions = tuple(left.expressions)
        return [
            Part(self._value(reading), left.names, claims, expressions, left.first)
            for reading in signs_expanded(value)
        ]

    def _left_sides(self, sides: Sequence[Sequence[Token]]) -> _LeftSides:
        """Sort the sides before the value into names, claims and expressions with variables."""
        left = _LeftSides()
        for side in sides:
            names = names_of_side(side)
            if names:
                left.names = left.names or names
                left.note_first(side)
                continue
            if _is_product_of_two(side):
                left.note_first(side)
                continue
            quantity = self._left_side(side)
            if quantity is None:
                # a description in words says nothing, unknown mathematics may be asked for
                if any(token.kind == "command" for token in side):
                    left.note_first(side)
            elif names_of(quantity.node):
                left.expressions.append(quantity.node)
                left.note_first(side, quantity.node)
            else:
                left.claims.append(quantity)
        return left

    def _left_side(self, side: Sequence[Token]) -> Quantity | None:
        """Parse a left side that is more than a name; None for a description in words or unknown
        mathematics.
        """
        try:
            return self._quantity(side)
        except Unreadable:
            kinds = {token.kind for token in side}
            is_prose = "word" in kinds and _words(side) is None
            if not side or (is_prose and "number" in kinds):
                raise Unreadable("prose with numbers before the equals sign") from None
            is_arithmetic = kinds <= {"number", "sign", "function"}
            if is_arithmetic or any(token.text.lower() in _DENIALS for token in side):
                raise
            return None

    def _relation(self, tokens: Sequence[Token]) -> Part:
        """Parse an inequality, as a set of numbers if it is solved for one variable."""
        signs = [sign for sign in signs_at(tokens) if sign == "=" or sign in _RELATIONS]
        sides = split(tokens, *_RELATIONS, "=")
        if "=" in signs:
            raise Unreadable("an equation with an inequality")
        nodes = tuple(self._quantity(side).node for side in sides)
        index = _solved_side(sides, nodes, signs)
        if index is None:
            return Part(Relation(nodes, tuple(signs)))
        # as a set, `x < 3` equals `(-\infty, 3)`
        real_set = REALS
        if index > 0:
            # `1 < x` is `x > 1`
            bound = Endpoint.read(nodes[index - 1])
            sign = MIRRORED[signs[index - 1]]
            real_set = intersection(real_set, half_line(bound, sign))
        if index < len(signs):
            bound = Endpoint.read(nodes[index + 1])
            real_set = intersection(real_set, half_line(bound, signs[index]))
        return Part(NumberSet(real_set), (nodes[index].text,))

    def _real_set(self, tokens: Sequence[Token]) -> RealSet:
        """Parse set notation: unions, intersections, differences, intervals, braces."""
        for sign, join in (("∪", union), ("∩", intersection)):
            pieces = split(tokens, sign)
            if len(pieces) > 1:
                return reduce(join, map(self._real_set, pieces))
        first, *excluded = split(tokens, "∖")
        if not excluded:
            return self._simple_real_set(tokens)
        real_set = self._real_set(first)
        for piece in excluded:
            real_set = intersection(real_set, complement(self._real_set(piece)))
        return real_set

    def _simple_real_set(self, tokens: Sequence[Token]) -> RealSet:
        """Parse a set of numbers without operations: a name, braces or an interval."""
        if len(tokens) == 1 and tokens[0].is_sign("ℝ"):
            return REALS
        if len(tokens) == 1 and tokens[0].is_sign("∅"):
            return ()
        if len(tokens) < 2 or not closes_at_end(tokens):
            raise Unreadable("a set of numbers is expected")
        opening = tokens[0]
        closing = tokens[-1]
        inner = tokens[1:-1]
        if opening.is_sign("{set", "{"):
            return self._braces(inner)
        pieces = split_items(inner)
        if len(pieces) == 1 and opening.is_sign("("):
            return self._real_set(inner)
        if len(pieces) != 2 or not opening.is_sign("(", "[") or not closing.is_sign(")", "]"):
            raise Unreadable("an interval has two ends")
        low, high = (Endpoint.read(self._quantity(piece).node) for piece in pieces)
        if high.before(low):
            raise Unreadable("the ends of an interval are in the wrong order")
        return union((Interval(low, high, opening.text == "[", closing.text == "]"),))

    def _braces(self, inner: Sequence[Token]) -> RealSet:
        """Parse the inside of braces: a condition behind a bar, or a list of numbers."""
        if _is_set_builder(inner):
            bar = next(i for i, token in enumerate(inner) if token.is_sign("|", ":"))
            condition, *more = self.parts(inner[bar + 1 :])
            if more or not isinstance(condition.value, NumberSet):
                raise Unreadable("a condition on numbers is expected")
            return condition.value.real_set
        points: list[RealSet] = []
        for part in self.parts(inner):
            if not isinstance(part.value, Quantity):
                raise Unreadable("a set of numbers is expected")
            points.append(point(Endpoint.read(part.value.node)))
        return union(*points)


def _words(tokens: Sequence[Token]) -> Value | None:
    """Parse words, some of which mean a set of numbers; None for anything else."""
    if not any(token.kind == "word" for token in tokens):
        return None
    for token in tokens:
        if token.kind in ("word", "name") or token.is_sign("(", ")", "'", "-", "in", "to"):
            continue
        return None
    text = plain_words(tokens)
    lower = text.casefold()
    if _NO_SOLUTION.fullmatch(lower):
        return NumberSet(())
    if lower in _VERBAL_SETS:
        return NumberSet(_VERBAL_SETS[lower])
    return TextAnswer(text)


def _matrix(tokens: Sequence[Token]) -> Matrix:
    r"""Parse a matrix in an environment such as `\begin{pmatrix}`, with or without brackets."""
    if len(tokens) > 4 and tokens[1].kind == "begin" and tokens[0].is_sign("(", "[", "{set"):
        tokens = tokens[1:-1]
    first = tokens[0]
    last = tokens[-1]
    inner = tokens[1:-1]
    is_nested = any(token.kind in ("begin", "end") for token in inner)
    if first.kind != "begin" or last.kind != "end" or is_nested:
        raise Unreadable("matrices in an expression")
    if first.text not in _MATRICES:
        raise Unreadable(f"the environment {first.text}")
    rows = [row for row in split(inner, "\\\\") if row]
    matrix = _matrix_of_rows(rows, "&")
    if matrix is None:
        raise Unreadable("rows of different lengths")
    return matrix


def _bracket_matrix(tokens: Sequence[Token]) -> Matrix | None:
    """Parse rows in brackets, `[[1, 2], [3, 4]]` or `[1, 2; 3, 4]`; None for any other brackets."""
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
    return _matrix_of_rows(rows, ",")


def _matrix_of_rows(rows: Sequence[Sequence[Token]], separator: str) -> Matrix | None:
    """Parse the cells of rows; None if there is no row, or their lengths differ."""
    cells = tuple(tuple(map(parse_expression, split(row, separator))) for row in rows)
    lengths = {len(row) for row in cells}
    return Matrix(cells) if len(lengths) == 1 else None


def _congruence(tokens: Sequence[Token]) -> Part:
    r"""Parse `x \equiv 3 \pmod 7` or the residue class alone; of numbers the congruence must
    hold.
    """
    sides = split(tokens, "≡")
    residue_class = sides[1] if len(sides) == 2 else sides[0]
    plain = [token for token in residue_class if not token.is_sign("(", ")")]
    pieces = split(plain, "pmod", "mod")
    if len(pieces) != 2 or len(sides) > 2:
        raise Unreadable("a congruence without a modulus")
    if len(sides) == 1:
        return Part(Congruence(*map(parse_expression, pieces)))
    left = sides[0]
    if any(token.kind == "name" for token in left):
        name = name_of(left)
        if name is None:
            raise Unreadable("a congruence of an expression")
        return Part(Congruence(*map(parse_expression, pieces)), (name,))
    number_node = parse_expression(left)
    residue, modulus = map(parse_expression, pieces)
    left_remainder = Node("mod", (number_node, modulus))
    right_remainder = Node("mod", (residue, modulus))
    if not same_exact(left_remainder, right_remainder):
        raise Unreadable("a congruence that does not hold")
    return Part(Congruence(residue, modulus))


def _sides_of_equation(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    """Return the sides of the last equation, the value last: `5` in `x = 5` and in `5 = x`."""
    arrows = [i for i, token in enumerate(tokens) if token.text in _IMPLIES]
    start = arrows[-1] + 1 if arrows else 0
    sides = split(tokens[start:], "=")
    if len(sides) < 2:
        raise Unreadable("an implication of no equation")
    if name_of(sides[-1]):
        # the last side that is more than a name changes places with the name
        for index in reversed(range(len(sides) - 1)):
            if not names_of_side(sides[index]):
                sides[-1], sides[index] = sides[index], sides[-1]
                break
    return sides


def _is_product_of_two(side: Sequence[Token]) -> bool:
    """Return True for a product of two variables that was read as one word: `xy`."""
    if len(side) != 1:
        return False
    text = side[0].text
    return _TWO_LETTERS.fullmatch(text) is not None and text.lower() not in SHORT_WORDS


def _solved_side(
    sides: Sequence[Sequence[Token]], nodes: Sequence[Node], signs: Sequence[str]
) -> int | None:
    """Return the index of the side that is a variable with bounds beside it: `x < 3`, `1 < x < 3`.

    None for any other inequality.
    """
    variables = [index for index, side in enumerate(sides) if name_of(side)]
    if len(variables) != 1:
        return None
    index = variables[0]
    if any(names_of(node) for position, node in enumerate(nodes) if position != index):
        return None
    if len(signs) == 1:
        return index
    directions = {_DIRECTIONS.get(sign, sign) for sign in signs}
    if len(signs) == 2 and index == 1 and len(directions) == 1:
        return index
    return None


def _is_listed_set(tokens: Sequence[Token]) -> bool:
    """Return True for braces that list their elements."""
    return is_bracketed(tokens, "{set") and not _is_set_builder(tokens[1:-1])


def _is_set_builder(inner: Sequence[Token]) -> bool:
    """Return True for the inside of `{x | x > 2}` and `{x in R : x > 2}`."""
    if len(inner) < 3 or name_of(inner[:1]) is None:
        return False
    has_bar = any(token.is_sign("|", ":") for token in inner[1:])
    return has_bar and inner[1].is_sign("|", ":", "in")


def _joined_real_sets(groups: Sequence[Sequence[Part]], connectives: Sequence[str]) -> Part | None:
    """Join inequalities connected by `and`, `or` and commas into one set of numbers; None if they
    are a list.
    """
    if len(groups) < 2 or any(len(group) != 1 for group in groups):
        return None
    parts = [group[0] for group in groups]
    names = {part.names for part in parts if part.names}
    if len(names) > 1:
        return None
    if not any(isinstance(part.value, NumberSet) for part in parts):
        # intervals such as `(1, 2)` may be points, unless one of them has no end
        is_union = set(connectives) == {"or"}
        if not is_union or not any(map(is_unbounded, parts)):
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
        # a comma means `and`, unless no number is in both
        if connective == "and" or (connective != "or" and both):
            joined[-1] = both
        else:
            joined.append(real_set)
    return Part(NumberSet(union(*joined)), next(iter(names), ()))


def _without_conditions(
    groups: list[list[Part]], connectives: list[str]
) -> tuple[list[list[Part]], list[str]]:
    r"""Return the groups without conditions such as `n \in \mathbb{Z}` next to a value, and the
    connectives between the others.
    """
    values: list[list[Part]] = []
    between: list[str] = []
    # the connective before each group; the first has none
    for group, connective in zip(groups, ["", *connectives], strict=True):
        first = group[0].value
        if isinstance(first, TextAnswer) and first.text in "ℤℕℚℂ":
            continue
        if values:
            between.append(connective)
        values.append(group)
    if not values:
        return groups, connectives
    return values, between
