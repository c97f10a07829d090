"""Finds what a value of the program may decide in tests, so that a program cannot make usable tests
look unusable.
"""

import ast
from collections.abc import Iterable, Sequence

from .instrument import Names

_SETUP = {
    "setUp",
    "setUpClass",
    "setUpModule",
    "asyncSetUp",
    "setup",
    "setup_method",
    "setup_class",
    "setup_module",
}
_SETUP |= {"setup_function"}
_EVALUATES = {
    "eval",
    "exec",
    "compile",
    "open",
    "__import__",
    "import_module",
    "literal_eval",
    "parse",
    "getattr",
}
_EVALUATES |= {"Path", "run_path", "run_module", "find_spec", "read_text", "listdir", "stat"}
_ENDS = {"exit", "quit", "_exit", "skip", "skipTest", "importorskip"}
_APPLIES = {"map", "filter"}


def steerable_parts(trees: Iterable[ast.Module], of_program: Names) -> Sequence[str]:
    """List what values of the program may decide in these tests, which are not rewritten yet.

    Args:
        trees: the tests.
        of_program: the names that may hold values of the program.

    Returns:
        `assertions`: whether an assertion runs; `evaluation`: the text of an import, a path or an
        expression; `setup`: whether a fixture or a `setUp` fails.
    """
    found = set[str]()
    for node in (part for tree in trees for part in ast.walk(tree)):
        if _decides(node).intersects(of_program) and any(map(_is_assertion, ast.walk(node))):
            found.add("assertions")
        if (
            isinstance(node, ast.Call)
            and _name(node.func) in _EVALUATES
            and Names.of(node).intersects(of_program)
        ):
            found.add("evaluation")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_fixture = any("fixture" in ast.dump(decorator) for decorator in node.decorator_list)
            if (is_fixture or node.name in _SETUP) and Names.of(*node.body).intersects(of_program):
                found.add("setup")
    return sorted(found)


def _decides(node: ast.AST) -> Names:
    """Return the names of the values that decide whether, or how often, parts of a statement or
    expression run.
    """
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            return Names.of(node.test)
        case ast.For() | ast.AsyncFor():
            return Names.of(node.iter)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            return Names.of(*(part for loop in node.generators for part in (loop.iter, *loop.ifs)))
        case ast.Try(body=body):
            return Names.of(*body)
        case ast.Match(subject=subject):
            return Names.of(subject)
        case ast.BoolOp(values=values):
            return Names.of(*values)
        case ast.Call(func=function, args=args) if _name(function) in _APPLIES:
            return Names.of(*args)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return Names.of(*node.decorator_list)
    return Names()


def _is_assertion(node: ast.AST) -> bool:
    """Return whether a node may assert something, or keep later assertions from running."""
    if isinstance(node, ast.Call):
        return (
            _name(node.func) in _ENDS
            or "assert" in _name(node.func)
            or _name(node.func).startswith("check")
        )
    return isinstance(node, ast.Assert | ast.Raise | ast.Return | ast.Break | ast.Continue)


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
