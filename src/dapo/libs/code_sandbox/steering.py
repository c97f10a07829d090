"""Finds what a value of the program may decide in tests, so that a program cannot make usable tests
look unusable.
"""

import ast
from collections.abc import Iterable, Sequence

from .instrument import FunctionNode, Names, last_name

_SETUP = {
    "setUp",
    "setUpClass",
    "setUpModule",
    "asyncSetUp",
    "setup",
    "setup_method",
    "setup_class",
    "setup_module",
    "setup_function",
}
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
    "Path",
    "run_path",
    "run_module",
    "find_spec",
    "read_text",
    "listdir",
    "stat",
}
_ENDS = {"exit", "quit", "_exit", "skip", "skipTest", "importorskip"}
_APPLIES = {"map", "filter"}


def steerable_parts(trees: Iterable[ast.Module], program_names: Names) -> Sequence[str]:
    """List what values of the program may decide in these tests, which are not rewritten yet.

    Args:
        trees: The tests.
        program_names: The names that may hold values of the program.

    Returns:
        `assertions`: whether an assertion runs; `evaluation`: the text of an import, a path or an
        expression; `setup`: whether a fixture or a `setUp` fails.
    """
    parts = set[str]()
    for tree in trees:
        for node in ast.walk(tree):
            decides = _deciding_names(node).intersects(program_names)
            if decides and any(map(_is_assertion, ast.walk(node))):
                parts.add("assertions")
            if _evaluates(node) and Names.of(node).intersects(program_names):
                parts.add("evaluation")
            if isinstance(node, FunctionNode) and _prepares(node):
                body = Names.of(*node.body)
                if body.intersects(program_names):
                    parts.add("setup")
    return sorted(parts)


def _evaluates(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and last_name(node.func) in _EVALUATES


def _prepares(function: FunctionNode) -> bool:
    """Return True for a fixture, and for a function that a test runner calls before tests."""
    if function.name in _SETUP:
        return True
    return any("fixture" in ast.dump(decorator) for decorator in function.decorator_list)


def _deciding_names(node: ast.AST) -> Names:
    """Return the names of the values that decide whether, or how often, parts of a statement or
    expression run.
    """
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            return Names.of(node.test)
        case ast.For() | ast.AsyncFor():
            return Names.of(node.iter)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            names = Names()
            for loop in node.generators:
                names.add(Names.of(loop.iter, *loop.ifs))
            return names
        case ast.Try(body=body):
            return Names.of(*body)
        case ast.Match(subject=subject):
            return Names.of(subject)
        case ast.BoolOp(values=values):
            return Names.of(*values)
        case ast.Call(func=function, args=args) if last_name(function) in _APPLIES:
            return Names.of(*args)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return Names.of(*node.decorator_list)
    return Names()


def _is_assertion(node: ast.AST) -> bool:
    """Return True if a node may assert something, or keep later assertions from running."""
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        return name in _ENDS or "assert" in name or name.startswith("check")
    return isinstance(node, ast.Assert | ast.Raise | ast.Return | ast.Break | ast.Continue)
