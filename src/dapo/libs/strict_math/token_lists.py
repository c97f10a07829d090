"""Splits lists of tokens at signs outside all brackets."""

from collections.abc import Iterator, Sequence

from .expressions import Unreadable
from .tokenizer import Token

OPENING = {"(": ")", "[": "]", "{": "}", "{set": "}set", "⟨": "⟩", "⌊": "⌋", "⌈": "⌉"}
CLOSING = frozenset(OPENING.values())


def split_list(tokens: Sequence[Token]) -> tuple[list[Sequence[Token]], list[str]]:
    """The pieces between commas, semicolons, `and` and `or`, and these separators; `, and` counts
    as one.
    """
    pieces: list[list[Token]] = [[]]
    connectives: list[str] = []
    for token, depth in with_depth(tokens):
        if depth or not token.is_sign(",", ";", "and", "or", "&"):
            pieces[-1].append(token)
        elif not pieces[-1] and connectives and connectives[-1] in ",;" and token.text not in ",;":
            connectives[-1] = token.text
        else:
            connectives.append(token.text)
            pieces.append([])
    return list(pieces), connectives


def split(tokens: Sequence[Token], *signs: str) -> list[Sequence[Token]]:
    """The pieces between these signs outside all brackets."""
    pieces: list[list[Token]] = [[]]
    for token, depth in with_depth(tokens):
        if depth == 0 and token.is_sign(*signs):
            pieces.append([])
        else:
            pieces[-1].append(token)
    return list(pieces)


def split_items(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    """The coordinates of a tuple: the pieces between commas, or between semicolons if it has no
    comma.
    """
    pieces = split(tokens, ",")
    return pieces if len(pieces) > 1 else split(tokens, ";")


def with_depth(tokens: Sequence[Token]) -> Iterator[tuple[Token, int]]:
    """Each token with the number of brackets around it; a bracket itself counts as inside."""
    depth = 0
    for token in tokens:
        opens = token.kind == "begin" or (token.kind == "sign" and token.text in OPENING)
        closes = token.kind == "end" or (token.kind == "sign" and token.text in CLOSING)
        depth += opens
        yield token, depth
        depth -= closes
        if depth < 0:
            raise Unreadable("a bracket closes that was not opened")
    if depth:
        raise Unreadable("a bracket is not closed")


def closes_at_end(tokens: Sequence[Token]) -> bool:
    """Whether the first bracket closes at the last token."""
    return returns_only_at_end(tokens)


def returns_only_at_end(tokens: Sequence[Token]) -> bool:
    """Whether no bracket is open before the last token for the first time."""
    depth = 0
    for index, token in enumerate(tokens):
        depth += token.kind == "begin" or (token.kind == "sign" and token.text in OPENING)
        depth -= token.kind == "end" or (token.kind == "sign" and token.text in CLOSING)
        if depth == 0:
            return index == len(tokens) - 1
    return False


def is_bracketed(tokens: Sequence[Token], opening: str) -> bool:
    """Whether one pair of these brackets is around everything."""
    return (
        len(tokens) > 1
        and tokens[0].is_sign(opening)
        and tokens[-1].is_sign(OPENING[opening])
        and returns_only_at_end(tokens)
    )


def signs_expanded(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    r"""Both readings of `\pm`; `\mp` has the other sign."""
    if not any(t.is_sign("±", "∓") for t in tokens):
        return [tokens]
    first = {"±": "+", "∓": "-"}
    second = {"±": "-", "∓": "+"}
    return [
        [t._replace(text=signs[t.text]) if t.is_sign("±", "∓") else t for t in tokens]
        for signs in (first, second)
    ]
