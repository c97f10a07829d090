"""Finds the expressions that a question asks for, such as `x` and `m + n`."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from .arithmetic import names_of
from .equality import same_expression
from .expressions import Node, Unreadable, parse_expression
from .tokenizer import Token, clean, tokenize

_MAX_CHARS = 20_000
TERM = r"(?:\d*[A-Za-z](?:_\d+)?(?:\([\w, ]{1,12}\))?(?:\^\d+)?|\d+)"
_PLAIN = (
    rf"(?![aI] [a-z])(?P<plain>{TERM}(?: ?[-+*/^] ?{TERM}){{0,5}})"
    r"(?=[.?,:;!]|\s*$|\s+(?:if|such|when|where|given|in|so|for|and|or|that|is|as|to)\b)"
)
_FORMULA = rf"(?:(?:\$\$?|\\[(\[])(?P<formula>[^$=<>]{{1,80}}?)[.,]?(?:\$|\\[)\]])|{_PLAIN})"
_RELATIONS = ("≤", "≥", "≠", "in", "≡", "≈", "|")
_FOLLOWING = re.compile(rf"(?:,|,? and|,? or) {_FORMULA}", re.IGNORECASE)
_REQUEST = re.compile(
    r"\b(?:find|compute|determine|calculate|evaluate|express|what (?:is|are)|solve(?:"
    r" [^.?!\n]{1,80}?)? for)\s+"
    r"(?:(?:the|all|exact|real|integer|possible|positive|negative|nonnegative|smallest|largest|least|greatest|minimum"
    r"|maximum|numerical|common) )*(?:values? (?:of|for) |solutions? for |integers? |numbers? )?"
    + _FORMULA,
    re.IGNORECASE,
)


class Asked(NamedTuple):
    """The expressions with variables that a question asks for; empty where it asks for something in
    words.
    """

    texts: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    nodes: tuple[Node, ...] = ()

    def has(self, text: str, node: Node | None) -> bool:
        """Return True if the left side of an answer is one of them; `x_1` is a value of `x`."""
        return (
            text in self.texts
            or any(re.fullmatch(rf"{re.escape(name)}_\w+", text) for name in self.texts)
            or (
                node is not None
                and any(same_expression(requested, node) for requested in self.nodes)
            )
        )


@lru_cache(1024)
def asked_expressions(question: str) -> Asked:
    """Return the expressions that a question asks for by `find`, `what is`, `the value of` and the
    like.
    """
    requests: list[list[Token]] = []
    for request in _REQUEST.finditer(question[-_MAX_CHARS:]):
        match: re.Match[str] | None = request
        while match:
            requests.append(tokenize(clean(match["formula"] or match["plain"])))
            match = _FOLLOWING.match(question[-_MAX_CHARS:], match.end())
    texts: set[str] = set()
    nodes: list[Node] = []
    for tokens in requests:
        if not any(token.kind == "name" for token in tokens) or any(
            token.is_sign(*_RELATIONS) for token in tokens
        ):
            continue
        texts.add(text_of(tokens))
        if tokens[0].is_sign("(") and any(token.is_sign(",") for token in tokens):
            texts.update(token.text for token in tokens if token.kind == "name")
        try:
            node = parse_expression(tokens)
            nodes += [node] if names_of(node) else []
        except (Unreadable, ArithmeticError, RecursionError):
            continue
    return Asked(frozenset(texts), frozenset().union(*map(names_of, nodes)), tuple(nodes))


def text_of(tokens: Sequence[Token]) -> str:
    """Return an expression as text, to be compared with another: without the marks over letters."""
    text = "".join(token.text for token in tokens if not token.is_sign("*"))
    return re.sub(r"\\(?:overline|vec|hat|bar|overrightarrow)|[{}]", "", text)
