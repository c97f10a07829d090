"""Splits lists of tokens at signs outside all brackets."""

from collections.abc import Iterator, Sequence

from .expressions import Unreadable
from .tokenizer import Token

OPENING = {"(": ")", "[": "]", "{": "}", "{set": "}set", "⟨": "⟩", "⌊": "⌋", "⌈": "⌉"}
CLOSING = frozenset(OPENING.values())
_DOUBLE_SIGNS = {"±": "+-", "∓": "-+"}  # each with its first and its second reading


def split_list(tokens: Sequence[Token]) -> tuple[list[Sequence[Token]], list[str]]:
    """Return the pieces between commas, semicolons, `and` and `or`, and these separators; `, and`
    counts as one.
    """
    pieces: list[list[Token]] = [[]]
    connectives: list[str] = []
    for token, depth in with_depth(tokens):
        if depth or not token.is_sign(",", ";", "and", "or", "&"):
            pieces[-1].append(token)
            continue
        follows_comma = not pieces[-1] and bool(connectives) and connectives[-1] in ",;"
        if follows_comma and token.text not in ",;":
            # the word of `, and` says more than its comma
            connectives[-1] = token.text
        else:
            connectives.append(token.text)
            pieces.append([])
    return list(pieces), connectives


def split(tokens: Sequence[Token], *signs: str) -> list[Sequence[Token]]:
    """Return the pieces between these signs outside all brackets."""
    pieces: list[list[Token]] = [[]]
    for token, depth in with_depth(tokens):
        if depth == 0 and token.is_sign(*signs):
            pieces.append([])
        else:
            pieces[-1].append(token)
    return list(pieces)


def split_items(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    """Return the coordinates of a tuple: the pieces between commas, or between semicolons if it
    has no comma.
    """
    pieces = split(tokens, ",")
    if len(pieces) > 1:
        return pieces
    return split(tokens, ";")


def with_depth(tokens: Sequence[Token]) -> Iterator[tuple[Token, int]]:
    """Yield each token with the number of brackets around it; a bracket itself counts as inside."""
    depth = 0
    for token in tokens:
        depth += _opens(token)
        yield token, depth
        depth -= _closes(token)
        if depth < 0:
            raise Unreadable("a bracket closes that was not opened")
    if depth:
        raise Unreadable("a bracket is not closed")


def signs_at(tokens: Sequence[Token], depth: int = 0) -> Iterator[str]:
    """Yield the signs that this number of brackets is around."""
    for token, token_depth in with_depth(tokens):
        if token_depth == depth and token.kind == "sign":
            yield token.text


def closes_at_end(tokens: Sequence[Token]) -> bool:
    """Return True if the first bracket closes at the last token."""
    depth = 0
    for index, token in enumerate(tokens):
        depth += _opens(token) - _closes(token)
        if depth == 0:
            return index == len(tokens) - 1
    return False


def _opens(token: Token) -> bool:
    return token.kind == "begin" or (token.kind == "sign" and token.text in OPENING)


def _closes(token: Token) -> bool:
    return token.kind == "end" or (token.kind == "sign" and token.text in CLOSING)


def is_bracketed(tokens: Sequence[Token], opening: str) -> bool:
    """Return True if one pair of these brackets is around everything."""
    return (
        len(tokens) > 1
        and tokens[0].is_sign(opening)
        and tokens[-1].is_sign(OPENING[opening])
        and closes_at_end(tokens)
    )


def signs_expanded(tokens: Sequence[Token]) -> list[Sequence[Token]]:
    r"""Return both readings of `\pm`; `\mp` has the other sign."""
    if not any(token.is_sign(*_DOUBLE_SIGNS) for token in tokens):
        return [tokens]
    readings: list[Sequence[Token]] = []
    for index in (0, 1):
        reading = []
        for token in tokens:
            if token.is_sign(*_DOUBLE_SIGNS):
                token = token._replace(text=_DOUBLE_SIGNS[token.text][index])
            reading.append(token)
        readings.append(reading)
    return readings
