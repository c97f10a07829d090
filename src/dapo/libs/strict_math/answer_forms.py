"""Tells an answer from the question restated, by the operations that an expression leaves
unevaluated.
"""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from .arithmetic import names_of
from .expressions import Node, number

_COMBINATORIAL = ("binom", "!", "×", "/")
_ONE = number(1, "1")
_MIN_MANTISSA = 1
_MAX_MANTISSA = 10
_MIN_BARE_EXPONENT = 3  # 10^2 for 100 is the question restated


def is_literal(node: Node) -> bool:
    r"""Whether an expression is a rational number in a usual notation.

    Usual are decimals, repeating decimals, fractions of integers (reduced or not) that are no
    integers, mixed numbers and scientific notation (`1.6 \times 10^{-19}`, `10^6`).
    """
    if node.op == "neg":
        return node.args[0].op != "neg" and is_literal(node.args[0])
    return node.op in ("number", "repeating", "mixed") or _is_fraction(node) or _is_scientific(node)


def _is_fraction(node: Node) -> bool:
    if node.op != "/":
        return False
    above, below = (_unsigned(arg) for arg in node.args)
    if not all(part.op == "number" and part.text.isdigit() for part in (above, below)) and not (
        above.text == "1" and _is_power_of_ten(below)
    ):
        return False
    return _is_power_of_ten(below) or bool(
        below.value and (above.value or Fraction()) % below.value
    )


def _is_scientific(node: Node) -> bool:
    if _is_power_of_ten(node):
        return abs(int(_unsigned(node.args[1]).text[:9])) >= _MIN_BARE_EXPONENT
    if node.op != "*" or not _is_power_of_ten(node.args[1]):
        return False
    mantissa = _unsigned(node.args[0])
    if not _unsigned(node.args[1].args[1]).text.strip("0") and "." not in mantissa.text:
        return False  # 7 times 10^0
    return mantissa.op == "number" and _MIN_MANTISSA <= (mantissa.value or 0) < _MAX_MANTISSA


def _is_product_with_power(node: Node) -> bool:
    r"""Scientific notation with any mantissa: `16 \times 10^4`."""
    return (
        node.op == "*" and _unsigned(node.args[0]).op == "number" and _is_power_of_ten(node.args[1])
    )


def _is_power_of_ten(node: Node) -> bool:
    return node.op == "^" and node.args[0].text == "10" and _unsigned(node.args[1]).text.isdigit()


def _unsigned(node: Node) -> Node:
    return node.args[0] if node.op == "neg" else node


def form_allows(reference: Node, answer: Node) -> bool:
    """Whether the answer leaves no operation unevaluated that the reference does not."""
    if is_literal(answer):
        return True
    if is_literal(reference):
        return _is_product_with_power(_unsigned(reference)) and _is_product_with_power(
            _unsigned(answer)
        )
    reference = _uniform(reference)
    answer = _uniform(answer)
    if not constants_of(answer) <= constants_of(reference):
        return False
    named = bool(names_of(reference))
    allowed = _operations(reference)
    found = _operations(answer)
    if named:
        if not _has_factors(reference, answer):
            return False
        if len(list(_terms(answer))) > _num_additions(reference) + 1:
            return False
        if not allowed["binom"] and _degree_below(answer) > _degree_below(reference):
            return False  # a fraction that is not reduced
    free = _free(allowed, named=named)
    return all(op in free or count <= allowed[op] for op, count in found.items())


def _uniform(node: Node) -> Node:
    r"""The expression with `x^{-2}` as `1/x^2`, `x^{1/2}` as a root and `2 * (1/x)` as `2/x`: equal
    forms of one thing.

    Powers of rational numbers stay: `2^{-1}` is a computation that is not done.
    """
    args = tuple(map(_uniform, node.args))
    node = Node(node.op, args, node.value, node.text)
    if node.op == "^" and (names_of(args[0]) or constants_of(args[0])):
        return _uniform_power(*args)
    if node.op == "neg" and args[0].op == "neg":
        return args[0].args[0]
    if node.op != "*":
        return node
    for one, other in (args, args[::-1]):
        if one.op == "/" and one.args[0] == _ONE and not is_literal(one):
            return Node("/", (other, one.args[1]))
    return node


def _uniform_power(base: Node, exponent: Node) -> Node:
    if exponent.op == "/" and exponent.args[0].op == "neg":
        exponent = Node("neg", (Node("/", (exponent.args[0].args[0], exponent.args[1])),))
    if exponent.op == "neg" and not names_of(exponent):
        below = base if exponent.args[0] == _ONE else _uniform_power(base, exponent.args[0])
        return Node("/", (_ONE, below))
    ends = _fraction_ends(exponent)
    if ends is None:
        return Node("^", (base, exponent))
    power, index = ends
    radicand = base if power == 1 else Node("^", (base, number(power, str(power))))
    return Node("root", (radicand, number(index)))


def _fraction_ends(node: Node) -> tuple[int, int] | None:
    """Numerator and denominator of a positive fraction or decimal that is no integer."""
    if node.op == "number":
        value = node.value or Fraction()
    elif node.op == "/" and all(
        arg.op == "number" and arg.text.isdigit() and arg.value for arg in node.args
    ):
        value = (node.args[0].value or Fraction()) / (node.args[1].value or Fraction(1))
    else:
        return None
    return (value.numerator, value.denominator) if 1 < value.denominator < 100 else None


def _free(allowed: Counter[str], *, named: bool) -> set[str]:
    """The operations that an answer may contain any number of times."""
    free = {"name power"} | {op for op in allowed if op.startswith("call ")}
    if named:
        free.add("+")
    if allowed["log"]:
        free |= {"call ln", "call log", "call lg"}
    if allowed["root"]:
        free |= {"root"}
    if allowed["power"]:
        free.add("power")
    if allowed["binom"] or allowed["!"]:
        free |= {*_COMBINATORIAL, "names below", "repeated factor"}
    if allowed["names below"] or allowed["power of names below"]:
        free |= {"names below", "power of names below"}
    return free


def constants_of(node: Node) -> frozenset[str]:
    r"""The constants (`\pi`, `e`) of an expression."""
    found = frozenset([node.text]) if node.op == "constant" else frozenset()
    return found.union(*map(constants_of, node.args))


def _operations(node: Node) -> Counter[str]:
    """Count the operations that an expression leaves unevaluated; a literal number has none."""
    if is_literal(node) or node.op in ("name", "constant"):
        return Counter()
    if node.op == "neg":
        return _operations(node.args[0])
    if node.op == "+":
        return _of_sum(node)
    if node.op in ("*", "/"):
        return _of_product(node)
    if node.op == "^":
        return _of_power(node)
    found = sum((_operations(arg) for arg in node.args), Counter())
    if node.op == "root":
        found["nested root"] += any(_has_root(arg) for arg in node.args)
        found["root"] += 1
    elif node.op == "call":
        found[f"call {node.text}"] += 1
    else:
        found[node.op] += 1
    return +found


def _degree_below(node: Node) -> int:
    """The highest degree of a denominator in its variables."""
    if node.op == "/":
        return max(_degree(node.args[1]), *map(_degree_below, node.args))
    return max(map(_degree_below, node.args), default=0)


def _degree(node: Node) -> int:
    if node.op == "name":
        return 1
    if node.op in ("*", "/"):
        return _degree(node.args[0]) + (_degree(node.args[1]) if node.op == "*" else 0)
    if node.op == "^":
        return _degree(node.args[0]) * _multiplicity(node)
    return max(map(_degree, node.args), default=0)


def _num_additions(node: Node) -> int:
    """The number of additions outside exponents."""
    additions = 0
    operands = node.args
    if node.op == "+":
        operands = tuple(_terms(node))
        additions = len(operands) - 1
    elif node.op == "^":
        operands = node.args[:1]
    return additions + sum(map(_num_additions, operands))


def _of_sum(node: Node) -> Counter[str]:
    terms = list(_terms(node))
    found = sum((_operations(term) for term in terms), Counter())
    found["+"] += len(terms) - 1
    found["sum of numbers"] += max(0, sum(_is_rational(term) for term in terms) - 1)
    kinds = Counter(_kind_of_term(term) for term in terms if not _is_rational(term))
    found["like terms"] += sum(kinds.values()) - len(kinds)
    return +found


def _kind_of_term(term: Node) -> frozenset[tuple[Node, bool, int]]:
    """The factors of a term without its numbers: equal for `2x` and `x`, which are like terms."""
    above: list[Node] = []
    below: list[Node] = []
    _factors(term, above, below)
    factors = [
        (factor, is_below) for is_below, side in enumerate((above, below)) for factor in side
    ]
    counts = Counter(
        (factor, bool(is_below)) for factor, is_below in factors if not _is_rational(factor)
    )
    return frozenset((factor, is_below, count) for (factor, is_below), count in counts.items())


def _terms(node: Node) -> Iterator[Node]:
    if node.op == "+":
        for arg in node.args:
            yield from _terms(arg)
    elif node.op == "neg" and node.args[0].op == "+":
        yield from _terms(node.args[0])
    else:
        yield node


def _of_product(node: Node) -> Counter[str]:
    above: list[Node] = []
    below: list[Node] = []
    _factors(node, above, below)
    found = sum((_operations(factor) for factor in above + below), Counter())
    for factors in (above, below):
        numbers = [factor for factor in factors if _is_rational(factor)]
        found["×"] += max(0, len(numbers) - 1)
        roots = [
            factor
            for factor in factors
            if factor not in numbers and _has_root(factor) and factor.op != "+"
        ]
        found["product of roots"] += max(0, len(roots) - 1)
        bases = Counter(_base(f) for f in factors if f not in numbers and _base(f).op != "+")
        found["repeated factor"] += sum(bases.values()) - len(bases)
    bases_of = [{_base(f) for f in factors if not _is_rational(f)} for factors in (above, below)]
    found["common factor"] += len(bases_of[0] & bases_of[1])
    found["/"] += all(
        any(_is_rational(f) and not is_literal(f) for f in factors) for factors in (above, below)
    )
    numerators = [f for f in above if _is_rational(f)]
    denominators = [f for f in below if _is_rational(f)]
    if len(numerators) == len(above) == 1 and len(denominators) == len(below) == 1:
        found["quotient"] += is_literal(numerators[0]) and is_literal(denominators[0])
    found["names below"] += any(names_of(factor) for factor in below)
    found["sum below"] += any(factor.op == "+" for factor in below)
    return +found


def _factors(node: Node, above: list[Node], below: list[Node]) -> None:
    if node.op == "neg":
        _factors(node.args[0], above, below)
    elif is_literal(node) or node.op not in ("*", "/"):
        above.append(node)
    else:
        _factors(node.args[0], above, below)
        _factors(node.args[1], *((above, below) if node.op == "*" else (below, above)))


def _base(factor: Node) -> Node:
    return factor.args[0] if factor.op == "^" else factor


def _of_power(node: Node) -> Counter[str]:
    base, exponent = node.args
    found = _operations(base) + _operations(exponent)
    if base.op == "^" and _is_rational(base.args[1]):
        found["power of a power"] += 1
    if _is_rational(base) and _is_rational(exponent):
        found["power" if _is_integer(exponent) else "root"] += 1
    elif not names_of(base) and _is_rational(exponent):
        found["power of irrational"] += 1
    else:
        found["name power"] += 1
    if exponent.op == "neg" and names_of(base):
        found["power of names below"] += 1
    return +found


def _is_integer(node: Node) -> bool:
    node = _unsigned(node)
    return node.op == "number" and node.text.isdigit()


def _is_rational(node: Node) -> bool:
    """Whether it is arithmetic on numbers alone; roots and powers with a fractional exponent are
    not.
    """
    if node.op in ("name", "constant", "root", "call", "log", "degree"):
        return False
    if node.op == "^":
        return all(map(_is_rational, node.args)) and not any(
            arg.op in ("/", "repeating") or "." in arg.text for arg in node.args[1:]
        )
    return all(map(_is_rational, node.args))


def _has_root(node: Node) -> bool:
    if node.op == "root" or (
        node.op == "^" and not names_of(node.args[1]) and node.args[1].op == "/"
    ):
        return True
    return any(map(_has_root, node.args))


def _has_factors(reference: Node, answer: Node) -> bool:
    """Whether an answer to a product of sums, such as `(x-2)(x-3)` or `3(x+1)`, has at least as
    many factors.
    """
    below: list[Node] = []
    _factors(reference, [], below)
    expected = 0 if below else _num_factors(reference)
    return expected == 0 or _num_factors(answer) >= expected


def _num_factors(node: Node) -> int:
    """The number of factors with variables in a product that contains a sum; 0 for anything
    else.
    """
    above: list[Node] = []
    _factors(node, above, [])
    if not any(_base(factor).op == "+" for factor in above):
        return 0
    counts = [_multiplicity(factor) for factor in above if names_of(factor)]
    is_product = len(above) > 1 or above[0].op == "^"
    return sum(counts) if is_product else 0


def _multiplicity(factor: Node) -> int:
    if factor.op == "^" and factor.args[1].op == "number" and _is_integer(factor.args[1]):
        return min(int(factor.args[1].value or 1), 1000)
    return 1
