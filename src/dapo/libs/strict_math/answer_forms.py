"""Tells an answer from the question restated, by the operations that an expression leaves
unevaluated.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction

from .arithmetic import names_of
from .expressions import Node, number, unsigned

_COMBINATORIAL = ("binom", "!", "×", "/")
_ONE = number(1, "1")
_MIN_MANTISSA = 1
_MAX_MANTISSA = 10
_MIN_BARE_EXPONENT = 3  # 10^2 for 100 is the question restated
_MAX_ROOT_INDEX = 99
_MAX_MULTIPLICITY = 1000


def is_literal(node: Node) -> bool:
    r"""Return True if an expression is a rational number in a usual notation.

    Usual are decimals, repeating decimals, fractions of integers (reduced or not) that are not
    integers themselves, mixed numbers and scientific notation (`1.6 \times 10^{-19}`, `10^6`).
    """
    if node.op == "neg":
        return node.args[0].op != "neg" and is_literal(node.args[0])
    if node.op in ("number", "repeating", "mixed"):
        return True
    return _is_fraction(node) or _is_scientific(node)


def _is_fraction(node: Node) -> bool:
    if node.op != "/":
        return False
    above = unsigned(node.args[0])
    below = unsigned(node.args[1])
    if _is_power_of_ten(below):
        return above.text == "1"
    if not (above.is_integer and below.is_integer):
        return False
    # `6/3` is an integer that is not computed yet, and `6/0` is no number
    return bool(below.value) and (above.value or Fraction()) % (below.value or 1) != 0


def _is_scientific(node: Node) -> bool:
    if _is_power_of_ten(node):
        return abs(int(_exponent(node).text[:9])) >= _MIN_BARE_EXPONENT
    if node.op != "*" or not _is_power_of_ten(node.args[1]):
        return False
    mantissa = unsigned(node.args[0])
    has_exponent = _exponent(node.args[1]).text.strip("0") != ""
    if not has_exponent and "." not in mantissa.text:
        return False  # 7 times 10^0
    return mantissa.op == "number" and _MIN_MANTISSA <= (mantissa.value or 0) < _MAX_MANTISSA


def _is_product_with_power(node: Node) -> bool:
    r"""Return True for scientific notation with any mantissa: `16 \times 10^4`."""
    if node.op != "*":
        return False
    mantissa, power = node.args
    return unsigned(mantissa).op == "number" and _is_power_of_ten(power)


def _is_power_of_ten(node: Node) -> bool:
    return node.op == "^" and node.args[0].text == "10" and _exponent(node).text.isdigit()


def _exponent(power: Node) -> Node:
    """Return the exponent of a power without its sign."""
    return unsigned(power.args[1])


def form_allows(reference: Node, answer: Node) -> bool:
    """Return True if the answer leaves no operation unevaluated that the reference does not."""
    if is_literal(answer):
        return True
    if is_literal(reference):
        # `160 \times 10^3` may answer `16 \times 10^4`; any other expression is not computed
        both = (unsigned(reference), unsigned(answer))
        return all(map(_is_product_with_power, both))
    reference = _uniform(reference)
    answer = _uniform(answer)
    if not constants_of(answer) <= constants_of(reference):
        return False
    has_variables = bool(names_of(reference))
    allowed = _operations(reference)
    unevaluated = _operations(answer)
    if has_variables and not _is_as_simple(reference, answer, allowed):
        return False
    free = _free_operations(allowed, has_variables=has_variables)
    return all(op in free or count <= allowed[op] for op, count in unevaluated.items())


def _is_as_simple(reference: Node, answer: Node, allowed: Counter[str]) -> bool:
    """Return True if an answer with variables is factored, expanded and reduced as far as the
    reference.

    Args:
        reference: The uniform expression of the reference.
        answer: The uniform expression of the answer.
        allowed: The operations of the reference.
    """
    if not _has_factors(reference, answer):
        return False
    if len(list(_terms(answer))) > _num_additions(reference) + 1:
        return False
    # a higher degree below is a fraction that is not reduced; binomials have their own fractions
    return bool(allowed["binom"]) or _degree_below(answer) <= _degree_below(reference)


def _uniform(node: Node) -> Node:
    r"""Return the expression with `x^{-2}` as `1/x^2`, `x^{1/2}` as a root and `2 * (1/x)` as
    `2/x`: equal forms of one thing.

    Powers of rational numbers stay: `2^{-1}` is a computation that is not done.
    """
    args = tuple(map(_uniform, node.args))
    node = Node(node.op, args, node.value, node.text)
    if node.op == "^" and (names_of(args[0]) or constants_of(args[0])):
        return _uniform_power(*args)
    if node.op == "neg" and args[0].op == "neg":
        return args[0].args[0]
    if node.op == "*":
        return _uniform_product(node)
    return node


def _uniform_product(node: Node) -> Node:
    """Return `2 * (1/x)` as `2/x`; other products stay as they are."""
    first, second = node.args
    for fraction, factor in ((first, second), (second, first)):
        if fraction.op == "/" and fraction.args[0] == _ONE and not is_literal(fraction):
            return Node("/", (factor, fraction.args[1]))
    return node


def _uniform_power(base: Node, exponent: Node) -> Node:
    if exponent.op == "/" and exponent.args[0].op == "neg":
        # the sign of `x^{-1/2}` belongs to the whole exponent
        above, below = exponent.args
        exponent = Node("neg", (Node("/", (above.args[0], below)),))
    if exponent.op == "neg" and not names_of(exponent):
        if exponent.args[0] == _ONE:
            return Node("/", (_ONE, base))
        return Node("/", (_ONE, _uniform_power(base, exponent.args[0])))
    fraction = _plain_fraction(exponent)
    if fraction is None or not 1 < fraction.denominator <= _MAX_ROOT_INDEX:
        return Node("^", (base, exponent))
    radicand = base
    if fraction.numerator != 1:
        power = number(fraction.numerator, str(fraction.numerator))
        radicand = Node("^", (base, power))
    return Node("root", (radicand, number(fraction.denominator)))


def _plain_fraction(node: Node) -> Fraction | None:
    """Return the value of a number or a fraction of positive integers, None for anything else."""
    if node.op == "number":
        return node.value or Fraction()
    if node.op != "/":
        return None
    above, below = node.args
    if not (above.is_integer and below.is_integer and above.value and below.value):
        return None
    return above.value / below.value


def _free_operations(allowed: Counter[str], *, has_variables: bool) -> set[str]:
    """Return the operations that an answer may contain any number of times."""
    free = {op for op in allowed if op.startswith("call ")}
    free.add("name power")
    if has_variables:
        free.add("+")
    if allowed["log"]:
        free |= {"call ln", "call log", "call lg"}
    if allowed["root"]:
        free.add("root")
    if allowed["power"]:
        free.add("power")
    if allowed["binom"] or allowed["!"]:
        # each of these can be written by the others
        free.update(_COMBINATORIAL)
        free |= {"names below", "repeated factor"}
    if allowed["names below"] or allowed["power of names below"]:
        free |= {"names below", "power of names below"}
    return free


def constants_of(node: Node) -> frozenset[str]:
    r"""Return the constants (`\pi`, `e`) of an expression."""
    constants = frozenset().union(*map(constants_of, node.args))
    if node.op == "constant":
        return constants | {node.text}
    return constants


def _operations(node: Node) -> Counter[str]:
    """Count the operations that an expression leaves unevaluated; a literal number has none."""
    if is_literal(node) or node.op in ("name", "constant"):
        return Counter()
    if node.op == "neg":
        return _operations(node.args[0])
    if node.op == "+":
        return _sum_operations(node)
    if node.op in ("*", "/"):
        return _product_operations(node)
    if node.op == "^":
        return _power_operations(node)
    counts = _total_operations(node.args)
    if node.op == "root":
        counts["nested root"] += any(map(_has_root, node.args))
        counts["root"] += 1
    elif node.op == "call":
        counts[f"call {node.text}"] += 1
    else:
        counts[node.op] += 1
    return +counts


def _total_operations(nodes: Sequence[Node]) -> Counter[str]:
    return sum(map(_operations, nodes), Counter())


def _degree_below(node: Node) -> int:
    """Return the highest degree of a denominator in its variables."""
    degrees = [_degree_below(arg) for arg in node.args]
    if node.op == "/":
        degrees.append(_degree(node.args[1]))
    return max(degrees, default=0)


def _degree(node: Node) -> int:
    """Return the degree of an expression; a denominator does not lower it."""
    if node.op == "name":
        return 1
    if node.op == "*":
        return _degree(node.args[0]) + _degree(node.args[1])
    if node.op == "/":
        return _degree(node.args[0])
    if node.op == "^":
        return _degree(node.args[0]) * _multiplicity(node)
    return max(map(_degree, node.args), default=0)


def _num_additions(node: Node) -> int:
    """Return the number of additions outside exponents."""
    if node.op == "+":
        terms = list(_terms(node))
        return len(terms) - 1 + sum(map(_num_additions, terms))
    if node.op == "^":
        return _num_additions(node.args[0])
    return sum(map(_num_additions, node.args))


def _sum_operations(node: Node) -> Counter[str]:
    terms = list(_terms(node))
    counts = _total_operations(terms)
    counts["+"] += len(terms) - 1
    with_variables = [term for term in terms if not _is_rational(term)]
    num_rationals = len(terms) - len(with_variables)
    counts["sum of numbers"] += max(0, num_rationals - 1)
    kinds = set(map(_kind_of_term, with_variables))
    counts["like terms"] += len(with_variables) - len(kinds)
    return +counts


def _kind_of_term(term: Node) -> frozenset[tuple[Node, bool, int]]:
    """Return the factors of a term without its numbers: equal for `2x` and `x`, like terms."""
    above, below = _factors(term)
    kind: list[tuple[Node, bool, int]] = []
    for is_below, factors in ((False, above), (True, below)):
        counts = Counter(factor for factor in factors if not _is_rational(factor))
        kind += [(factor, is_below, count) for factor, count in counts.items()]
    return frozenset(kind)


def _terms(node: Node) -> Iterator[Node]:
    """Yield the terms of a sum, without the sign of a sum in brackets."""
    if node.op == "+":
        for arg in node.args:
            yield from _terms(arg)
    elif node.op == "neg" and node.args[0].op == "+":
        yield from _terms(node.args[0])
    else:
        yield node


def _product_operations(node: Node) -> Counter[str]:
    """Count the operations of a product or fraction, above and below the bar."""
    above, below = _factors(node)
    counts = _total_operations(above + below)
    rational_above = list(filter(_is_rational, above))
    rational_below = list(filter(_is_rational, below))
    other_above = [factor for factor in above if factor not in rational_above]
    other_below = [factor for factor in below if factor not in rational_below]
    for rationals, others in ((rational_above, other_above), (rational_below, other_below)):
        counts["×"] += max(0, len(rationals) - 1)
        roots = [factor for factor in others if factor.op != "+" and _has_root(factor)]
        counts["product of roots"] += max(0, len(roots) - 1)
        bases = [base for base in map(_base, others) if base.op != "+"]
        counts["repeated factor"] += len(bases) - len(set(bases))
    common = set(map(_base, other_above)) & set(map(_base, other_below))
    counts["common factor"] += len(common)
    # a fraction of two computations, such as `(2 * 3) / (4 * 5)`
    counts["/"] += not (
        all(map(is_literal, rational_above)) or all(map(is_literal, rational_below))
    )
    if len(rational_above) == len(above) == 1 and len(rational_below) == len(below) == 1:
        counts["quotient"] += is_literal(above[0]) and is_literal(below[0])
    counts["names below"] += any(map(names_of, below))
    counts["sum below"] += any(factor.op == "+" for factor in below)
    return +counts


def _factors(node: Node) -> tuple[list[Node], list[Node]]:
    """Return the factors above and below the fraction bar, without their signs."""
    above: list[Node] = []
    below: list[Node] = []
    # each part with the list of its own factors, and the list of those that divide it
    pending = [(node, above, below)]
    while pending:
        part, factors, divisors = pending.pop()
        if part.op == "neg":
            pending.append((part.args[0], factors, divisors))
        elif part.op not in ("*", "/") or is_literal(part):
            factors.append(part)
        else:
            first, second = part.args
            if part.op == "*":
                pending.append((second, factors, divisors))
            else:
                pending.append((second, divisors, factors))
            pending.append((first, factors, divisors))
    return above, below


def _base(factor: Node) -> Node:
    if factor.op == "^":
        return factor.args[0]
    return factor


def _power_operations(node: Node) -> Counter[str]:
    base, exponent = node.args
    counts = _operations(base) + _operations(exponent)
    has_rational_exponent = _is_rational(exponent)
    if base.op == "^" and _is_rational(base.args[1]):
        counts["power of a power"] += 1
    if has_rational_exponent and _is_rational(base):
        counts["power" if unsigned(exponent).is_integer else "root"] += 1
    elif has_rational_exponent and not names_of(base):
        counts["power of irrational"] += 1
    else:
        counts["name power"] += 1
    if exponent.op == "neg" and names_of(base):
        counts["power of names below"] += 1
    return +counts


def _is_rational(node: Node) -> bool:
    """Return True if the expression is arithmetic on numbers, without roots or fractional powers."""
    if node.op in ("name", "constant", "root", "call", "log", "degree"):
        return False
    if not all(map(_is_rational, node.args)):
        return False
    if node.op != "^":
        return True
    exponent = node.args[1]
    return exponent.op not in ("/", "repeating") and "." not in exponent.text


def _has_root(node: Node) -> bool:
    if node.op == "root":
        return True
    if node.op == "^":
        exponent = node.args[1]
        if exponent.op == "/" and not names_of(exponent):
            return True  # `2^{1/2}`
    return any(map(_has_root, node.args))


def _has_factors(reference: Node, answer: Node) -> bool:
    """Return True if an answer to a product of sums, such as `(x-2)(x-3)` or `3(x+1)`, has at
    least as many factors.
    """
    _, below = _factors(reference)
    if below:
        return True
    return _num_factors(answer) >= _num_factors(reference)


def _num_factors(node: Node) -> int:
    """Return the number of factors with variables in a product that contains a sum; 0 for anything
    else.
    """
    above, _ = _factors(node)
    is_product = len(above) > 1 or above[0].op == "^"
    if not is_product or not any(_base(factor).op == "+" for factor in above):
        return 0
    return sum(_multiplicity(factor) for factor in above if names_of(factor))


def _multiplicity(factor: Node) -> int:
    """Return the exponent of a factor that is an integer power, else 1."""
    if factor.op == "^" and factor.args[1].is_integer:
        return min(int(factor.args[1].value or 1), _MAX_MULTIPLICITY)
    return 1
