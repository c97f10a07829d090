"""Parses the tokens of one expression into a tree.

Anything outside the grammar is rejected, never guessed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from .tokenizer import Token

_MAX_DEPTH = 60
_MAX_PERIOD = 1000
_MAX_EXPONENT = 20_000  # of scientific notation, in decimal digits


class Unreadable(ValueError):
    """The text is outside the grammar."""


@dataclass(frozen=True)
class Node:
    r"""An operation on `args`.

    `op` is `number` (with `value`), `name` and `constant` (with `text`), `+`, `neg`, `*`, `/`, `÷`,
    `^`, `root` (radicand, index), `log` (argument, base), `!`, `mixed`, `repeating`, `call` (with
    the function in `text`), `abs`, `floor`, `ceil`, `binom`, `mod` or `degree`.
    """

    op: str
    args: tuple["Node", ...] = ()
    value: Fraction | None = None
    text: str = ""

    @property
    def is_integer(self) -> bool:
        """Return True for an integer written in digits, without a sign."""
        return self.op == "number" and self.text.isdigit()


def number(value: int | Fraction, text: str = "") -> Node:
    """Return the node of a number; `text` is its notation."""
    return Node("number", value=Fraction(value), text=text or "computed")


def unsigned(node: Node) -> Node:
    """Return an expression without its minus sign."""
    if node.op == "neg":
        return node.args[0]
    return node


def letters_of(node: Node) -> str:
    """Return the letters of a product of single letters (`xy`), in their order; empty for any other
    expression.
    """
    if node.op == "*":
        first, last = map(letters_of, node.args)
        return first + last if first and last else ""
    if node.op in ("name", "constant") and len(node.text) == 1:
        return node.text
    return ""


def parse_expression(tokens: Sequence[Token]) -> Node:
    """Return the tree of all tokens; raises Unreadable."""
    parser = _Parser(tokens)
    node = parser.sum()
    if parser.index < len(tokens):
        raise Unreadable(f"{tokens[parser.index].text!r} is not expected")
    return node


def decimal_value(text: str) -> Fraction:
    """Return the exact value of `1`, `.5`, `1.50`, `1.6e-19`."""
    mantissa, _, exponent = text.lower().partition("e")
    if exponent and abs(int(exponent[:12])) > _MAX_EXPONENT:
        raise Unreadable("the exponent is too large")
    # not Fraction(text), which refuses numbers of more than 4300 digits
    return Fraction(*Decimal(mantissa).as_integer_ratio()) * Fraction(10) ** int(exponent or 0)


class _Parser:
    """Recursive descent: sum, product, sign, power, atom."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._tokens = tokens
        self.index = 0
        self._depth = 0
        self._bars = 0

    def sum(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unreadable("it is nested too deeply")
        node = self._product()
        while self._at("+", "-"):
            sign = self._take().text
            term = self._product()
            node = Node("+", (node, term if sign == "+" else Node("neg", (term,))))
        self._depth -= 1
        return node

    def _product(self) -> Node:
        node = self._signed()
        while True:
            if self._at("*", "/", "÷", "mod"):
                op = self._take().text
                node = Node(op, (node, self._signed()))
            elif self._starts_factor():
                node = self._juxtaposed(node)
            else:
                return node

    def _juxtaposed(self, left: Node) -> Node:
        following = self._peek()
        if following is not None and following.kind == "number" and not _ends_in_factorial(left):
            raise Unreadable("a number follows a factor")
        right = self._power()
        if left.op == "number" and right.op == "number" and right.text != "frac":
            raise Unreadable("a number in brackets follows a number")
        return Node("*", (left, right))

    def _mixed(self, left: Node) -> Node | None:
        r"""Parse a mixed number, an integer and a fraction of integers: `2\frac{1}{2}`."""
        token = self._peek()
        if (
            left.op != "number"
            or not left.text.isdigit()
            or token is None
            or not token.is_sign("frac")
        ):
            return None
        start = self.index
        fraction = self._atom()
        above, below = fraction.args
        if all(
            part.op == "number" and part.text.isdigit() for part in (above, below)
        ) and not self._at("^", "!"):
            return Node("mixed", (left, fraction))
        self.index = start
        return None

    def _signed(self) -> Node:
        if self._at("-"):
            self._take()
            return Node("neg", (self._nested(self._signed),))
        if self._at("+"):
            self._take()
            return self._nested(self._signed)
        return self._power()

    def _nested(self, parse) -> Node:  # type: ignore[no-untyped-def]
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise Unreadable("it is nested too deeply")
        node: Node = parse()
        self._depth -= 1
        return node

    def _power(self) -> Node:
        atom = self._atom()
        if mixed := self._mixed(atom):
            return mixed
        node = self._postfix(atom)
        if self._at("^"):
            self._take()
            node = Node("^", (node, self._exponent()))
            if self._at("^"):
                raise Unreadable("a power of a power needs brackets")
            node = self._postfix(node)
        return node

    def _postfix(self, node: Node) -> Node:
        while self._at("!", "°"):
            node = Node("!" if self._take().text == "!" else "degree", (node,))
            if self._at("!"):
                raise Unreadable("a double factorial")
        return node

    def _exponent(self) -> Node:
        if self._at("-", "+"):
            sign = self._take().text
            node = self._atom()
            return Node("neg", (node,)) if sign == "-" else node
        return self._atom()

    def _atom(self) -> Node:
        token = self._take()
        if token.kind == "number":
            return self._number(token)
        if token.kind == "name":
            return self._name(token)
        if token.kind == "function":
            return self._function(token.text)
        if token.kind != "sign":
            raise Unreadable(f"{token.text!r} is not mathematics")
        return self._sign(token)

    def _sign(self, token: Token) -> Node:
        closing = {"(": ")", "[": "]", "{": "}", "⌊": "⌋", "⌈": "⌉"}.get(token.text)
        if closing:
            node = self.sum()
            self._expect(closing)
            return (
                Node({"⌊": "floor", "⌈": "ceil"}[token.text], (node,))
                if token.text in "⌊⌈"
                else node
            )
        if token.text == "|":
            self._bars += 1
            node = self.sum()
            self._bars -= 1
            self._expect("|")
            return Node("abs", (node,))
        if token.text in ("frac", "binom"):
            above = self._argument()
            below = self._argument()
            return Node("/" if token.text == "frac" else "binom", (above, below), text=token.text)
        if token.text == "sqrt":
            return self._root()
        if token.text in ("pi", "infinity"):
            return Node("constant", text=token.text)
        raise Unreadable(f"{token.text!r} is not expected")

    def _root(self) -> Node:
        index = number(2)
        if self._at("["):
            self._take()
            index = self.sum()
            self._expect("]")
        return Node("root", (self._argument(), index))

    def _argument(self) -> Node:
        r"""Parse an argument: a group, or one digit, letter or command, as in `\frac12` and
        `\sqrt3`.
        """
        token = self._peek()
        if token is None:
            raise Unreadable("an argument is missing")
        if token.kind == "number" and len(token.text) > 1:
            if not token.text.isdigit() or len(token.text) != 2:
                raise Unreadable("the argument is not in braces")
            first = token.text[0]
            second = token.text[1]
            tokens = list(self._tokens)
            tokens[self.index : self.index + 1] = [Token("number", first), Token("number", second)]
            self._tokens = tokens
        return self._atom()

    def _number(self, token: Token) -> Node:
        following = self._peek()
        if (
            following is not None
            and following.kind == "command"
            and following.text in ("\\overline", "\\bar", "\\dot")
        ):
            return self._repeating(token)
        if (
            "." in token.text
            and following is not None
            and following.is_sign("(")
            and not following.after_space
        ):
            inner = self._tokens[self.index + 1 : self.index + 3]
            if len(inner) == 2 and inner[0].text.isdigit() and inner[1].is_sign(")"):
                self.index += 3
                return _repeating(token.text, inner[0].text)
        return number(decimal_value(token.text), token.text)

    def _repeating(self, token: Token) -> Node:
        r"""Parse the period of a repeating decimal: `0.1\overline{6}`."""
        self._take()
        bare = self._tokens[self.index : self.index + 1]
        if bare and bare[0].text.isdigit():
            self.index += 1
            return _repeating(token.text, bare[0].text)
        self._expect("{")
        digits = self._take().text
        self._expect("}")
        return _repeating(token.text, digits)

    def _name(self, token: Token) -> Node:
        text = token.text
        if self._at("_"):
            self._take()
            text += "_" + self._subscript()
        while self._at("'"):
            self._take()
            text += "'"
        return Node("constant", text="e") if text == "e" else Node("name", text=text)

    def _subscript(self) -> str:
        if not self._at("{"):
            return self._take().text
        self._take()
        start = self.index
        while not self._at("}"):
            if self._take().text == "{":
                raise Unreadable("nested subscripts")
        self.index += 1
        return "".join(token.text for token in self._tokens[start : self.index - 1])

    def _function(self, name: str) -> Node:
        base: Node | None = None
        power: Node | None = None
        while self._at("_", "^"):
            if self._take().text == "_":
                base = self._atom()
            else:
                power = self._exponent()
        arguments = self._arguments()
        if power is not None and power == Node("neg", (number(1, "1"),)):
            name = f"arc{name}"
            power = None
        if name == "log" and base == Node("constant", text="e"):
            node = _call("ln", arguments)
        elif name == "log" and base is not None and len(arguments) == 1:
            node = Node("log", (arguments[0], base))
        elif base is not None:
            raise Unreadable("a subscript of a function")
        else:
            node = _call(name, arguments)
        return node if power is None else Node("^", (node, power))

    def _arguments(self) -> tuple[Node, ...]:
        if not self._at("(", "{", "{set", "["):
            return (self._bare_argument(),)
        closing = {"(": ")", "{": "}", "{set": "}set", "[": "]"}[self._take().text]
        arguments = [self.sum()]
        while self._at(","):
            self._take()
            arguments.append(self.sum())
        self._expect(closing)
        return tuple(arguments)

    def _bare_argument(self) -> Node:
        r"""Parse an argument without brackets, up to an operator or another function: `\sin 2x`,
        `\ln 2`.
        """
        node = self._power()
        while (token := self._peek()) is not None and (
            token.kind == "name" or token.is_sign("pi", "frac", "sqrt")
        ):
            node = Node("*", (node, self._power()))
        return node

    def _starts_factor(self) -> bool:
        token = self._peek()
        if token is None:
            return False
        if token.kind == "sign":
            bar = token.text == "|" and not self._bars
            return bar or token.text in (
                "(",
                "[",
                "{",
                "frac",
                "sqrt",
                "binom",
                "pi",
                "infinity",
                "⌊",
                "⌈",
            )
        return token.kind in ("number", "name", "function")

    def _peek(self) -> Token | None:
        return self._tokens[self.index] if self.index < len(self._tokens) else None

    def _at(self, *signs: str) -> bool:
        token = self._peek()
        return token is not None and token.is_sign(*signs)

    def _take(self) -> Token:
        token = self._peek()
        if token is None:
            raise Unreadable("it ends too early")
        self.index += 1
        return token

    def _expect(self, sign: str) -> None:
        if not self._at(sign):
            raise Unreadable(f"{sign!r} is missing")
        self.index += 1


def _ends_in_factorial(node: Node) -> bool:
    return node.op == "!" or (node.op == "*" and _ends_in_factorial(node.args[1]))


def _call(name: str, arguments: tuple[Node, ...]) -> Node:
    if name in ("floor", "ceil", "abs") and len(arguments) == 1:
        return Node(name, arguments)
    if name == "exp" and len(arguments) == 1:
        return Node("^", (Node("constant", text="e"), arguments[0]))
    if len(arguments) != 1 and name not in ("gcd", "lcm", "max", "min"):
        raise Unreadable(f"{name} of several arguments")
    return Node("call", arguments, text=name)


def _repeating(text: str, digits: str) -> Node:
    r"""Return the node of a repeating decimal: `0.1` and `6` make 0.1666..."""
    if not re.fullmatch(r"\d*\.\d*", text) or not digits.isdigit() or len(digits) > _MAX_PERIOD:
        raise Unreadable("a repeating decimal")
    decimals = len(text.partition(".")[2])
    tail = Fraction(int(digits), (10 ** len(digits) - 1) * 10**decimals)
    return Node("repeating", value=decimal_value(text) + tail, text=f"{text}({digits})")
