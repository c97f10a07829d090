"""Mistakes made by rule rather than by hand: operators, comparisons, constants, conditions and
calls of a source.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Mutation:
    """A changed source, and where it differs."""

    line: int
    function: str
    """The qualified name of the function that the change is in; empty at the level of the module or
    a class.
    """
    change: str
    source: str


def mutations(source: str) -> Iterator[Mutation]:
    """Every mutation of a source, in the order of its lines."""
    for node, function in _nodes(ast.parse(source), (), ""):
        for new in _changed(node):
            text = f"({ast.unparse(new)})" if isinstance(new, ast.expr) else ast.unparse(new)
            change = f"{ast.unparse(node)} -> {ast.unparse(new)}"
            yield Mutation(node.lineno, function, change, _replaced(source, node, text))


def function_at(source: str, line: int) -> str:
    """The qualified name of the outermost function, or method, that a line is in."""
    inside = [
        name
        for node, name in _nodes(ast.parse(source), (), "")
        if node.lineno <= line <= (node.end_lineno or 0)
    ]
    return max(inside, key=len, default="")


def _nodes(
    node: ast.AST, scope: tuple[str, ...], function: str
) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        scope = (*scope, node.name)
        if not isinstance(node, ast.ClassDef):
            function = function or ".".join(scope)
    if isinstance(node, ast.stmt | ast.expr):
        yield node, function
    for name, value in ast.iter_fields(node):
        if name not in (
            "annotation",
            "returns",
            "decorator_list",
            "bases",
            "keywords" if not function else "",
        ):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child, scope, function)


def _changed(node: ast.stmt | ast.expr) -> Iterator[ast.stmt | ast.expr]:
    new = copy.copy(node)
    match new:
        case ast.BinOp() | ast.BoolOp() if type(new.op) in OPPOSITE:
            new.op = OPPOSITE[type(new.op)]()  # type: ignore[assignment]
            yield new
        case ast.Compare(ops=[op]):
            new.ops = [OPPOSITE[type(op)]()]  # type: ignore[list-item]
            yield new
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield new.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.IfExp():
            new.body, new.orelse = new.orelse, new.body
            yield new
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield ast.Pass()


def _replaced(source: str, node: ast.stmt | ast.expr, text: str) -> str:
    lines = source.encode().splitlines(keepends=True)
    first = node.lineno - 1
    last = (node.end_lineno or node.lineno) - 1
    end = node.end_col_offset or 0
    middle = lines[first][: node.col_offset] + text.encode() + lines[last][end:]
    return b"".join([*lines[:first], middle, *lines[last + 1 :]]).decode()
