"""Rewrites tests so that the assertions on values of a program are counted while they run.

An assertion counts if its expression can be false and mentions the program: one of its names, or a
variable, attribute, parameter or function of the tests that a value of the program can reach by
assignment, loop, call or return. `DataFlow` follows values by name through the whole text, in any
order, and finds too many names rather than too few; the test runner requires a call of the program
as well.

The rewritten forms are `assert`; `if ...: raise`; the body of `with pytest.raises(...)` and `with
self.assertRaises(...)`; calls of unittest's assertion methods; and `try` with an `assert False` for
the case that nothing is raised. A counted assertion that fails is recorded even if the tests catch
it, unless the handler has an assertion of its own or names an exception other than AssertionError.
The rewritten text calls methods of `confined.test_runner.Counter`.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

EXPECTS_EXCEPTION = ("raises", "assertRaises", "assertRaisesRegex")
_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_REDIRECTS = ("redirect_stdout", "redirect_stderr")
_CATCHES_ASSERTIONS = ("AssertionError", "Exception", "BaseException")


@dataclass
class Names:
    """Names of variables and attributes: those that a text uses, or those that a value can
    reach.
    """

    variables: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, *nodes: ast.AST | None) -> "Names":
        """Collect the names that these trees mention."""
        found = cls()
        for node in nodes:
            for part in ast.walk(node) if node is not None else ():
                if isinstance(part, ast.Name):
                    found.variables.add(part.id)
                elif isinstance(part, ast.Attribute):
                    found.attributes.add(part.attr)
        return found

    def intersects(self, other: "Names") -> bool:
        """Whether the two have a name in common."""
        return not (
            self.variables.isdisjoint(other.variables)
            and self.attributes.isdisjoint(other.attributes)
        )

    def add(self, other: "Names") -> bool:
        """Add the names of `other`; return whether one of them is new."""
        before = len(self.variables) + len(self.attributes)
        self.variables |= other.variables
        self.attributes |= other.attributes
        return len(self.variables) + len(self.attributes) > before


class DataFlow:
    """The names that values can reach in tests: each expression flows from its names to those that
    it is bound to.

    Output of the program flows into every object to which the tests redirect the output.
    """

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        self._edges: list[tuple[Names, Names]] = []
        self._printed = Names({"capsys"})  # the names that can hold output of the program
        self.parameters: dict[str, set[str]] = {}
        nodes = [node for tree in trees for node in ast.walk(tree)]
        for node in nodes:
            if isinstance(node, _FunctionNode):
                self.parameters.setdefault(node.name, set()).update(parameters_of(node))
        for node in nodes:
            self._edges.extend(self._edges_of(node))

    def reached_from(self, names: Iterable[str]) -> Names:
        """Return the names that a value of the variables `names` can reach, including these."""
        reached = Names(set(names))
        reached.add(self._printed)
        grows = True
        while grows:
            grows = False
            for source, to in self._edges:
                grows |= source.intersects(reached) and reached.add(to)
        return reached

    def _edges_of(self, node: ast.AST) -> Iterator[tuple[Names, Names]]:
        match node:
            case ast.Assign(targets=targets, value=value):
                if any(
                    isinstance(target, ast.Attribute) and target.attr == "stdout"
                    for target in targets
                ):
                    self._printed.add(_bound_by(value, *targets))
                yield Names.of(value), _bound_by(*targets)
            case ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr():
                yield Names.of(node.value), _bound_by(node.target)
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                yield Names.of(node.iter), _bound_by(node.target)
            case ast.With() | ast.AsyncWith():
                yield from self._edges_of_with(node)
            case ast.If() | ast.While():
                yield Names.of(node.test), _bound_in([*node.body, *node.orelse])
            case ast.Try(body=body, handlers=handlers, orelse=orelse):
                yield Names.of(*body), Names({handler.name for handler in handlers if handler.name})
                # whether the body raises decides what is assigned: `raised = True`
                yield (
                    Names.of(*body),
                    _bound_in([*body, *orelse, *(part for h in handlers for part in h.body)]),
                )
            case ast.Match(subject=subject):
                captures = [
                    part for part in ast.walk(node) if isinstance(part, ast.MatchAs | ast.MatchStar)
                ]
                yield Names.of(subject), Names({part.name for part in captures if part.name})
                yield (
                    Names.of(subject),
                    _bound_in([part for case in node.cases for part in case.body]),
                )
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield Names.of(*node.body), Names({node.name}, {node.name})
                defaults = [*node.args.defaults, *node.args.kw_defaults]
                yield Names.of(*node.decorator_list, *defaults), Names(parameters_of(node))
            case ast.ClassDef(name=name, body=body):
                yield Names.of(*body), Names({name})
            case ast.Call() | ast.Expr(value=ast.Call()):
                yield from self._edges_of_call(node)

    def _edges_of_with(self, node: ast.With | ast.AsyncWith) -> Iterator[tuple[Names, Names]]:
        for item in node.items:
            if (
                isinstance(item.context_expr, ast.Call)
                and _last_name(item.context_expr.func) in _REDIRECTS
            ):
                self._printed.add(_bound_by(*item.context_expr.args))
            if item.optional_vars is not None:
                yield Names.of(item.context_expr, *node.body), _bound_by(item.optional_vars)

    def _edges_of_call(self, call: ast.Call | ast.Expr) -> Iterator[tuple[Names, Names]]:
        if isinstance(call, ast.Expr):  # such as sort_numbers(numbers)
            assert isinstance(call.value, ast.Call)
            yield Names.of(call.value.func), _bound_by(*call.value.args)
            return
        given = Names.of(*call.args, *call.keywords)
        called = Names.of(call.func)
        for function in called.variables | called.attributes | given.variables:
            if function in self.parameters:
                yield given, Names(set(self.parameters[function]))
        if isinstance(call.func, ast.Attribute):  # such as results.append(value)
            yield given, _bound_by(call.func.value)


def parameters_of(function: _FunctionNode) -> set[str]:
    """Return the names of the parameters of a function, except `self` and `cls`."""
    every = ast.walk(function.args)
    return {part.arg for part in every if isinstance(part, ast.arg)} - {"self", "cls"}


def _bound_by(*targets: ast.expr) -> Names:
    """Return the names that an assignment to these targets changes; for `self.x`, the attribute
    alone.
    """
    bound = Names()
    for target in targets:
        match target:
            case ast.Name(id=name):
                bound.variables |= {name} - {"self", "cls"}
            case ast.Attribute(value=value, attr=attribute):
                bound.attributes.add(attribute)
                bound.add(_bound_by(value))
            case ast.Subscript(value=value) | ast.Starred(value=value):
                bound.add(_bound_by(value))
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                bound.add(_bound_by(*parts))
    return bound


def _bound_in(statements: Iterable[ast.stmt]) -> Names:
    """Return the names that statements such as `ok = False` and `errors.append(x)` can change."""
    bound = Names()
    for part in _walk(statements):
        match part:
            case ast.Assign(targets=targets):
                bound.add(_bound_by(*targets))
            case (
                ast.AnnAssign(target=target)
                | ast.AugAssign(target=target)
                | ast.NamedExpr(target=target)
            ):
                bound.add(_bound_by(target))
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=value))):
                bound.add(_bound_by(value))
    return bound


_NEVER_FALSE = ("str", "repr", "map", "filter", "zip", "iter", "enumerate", "reversed")


def constant_truth(test: ast.expr | None) -> bool | None:
    """Return whether an expression is always true or always false for any program; None if it
    depends or is unclear.
    """
    match test:
        case ast.Constant(value=value):
            return bool(value)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return any(not isinstance(part, ast.Starred) for part in parts) or (
                None if parts else False
            )
        case ast.Dict(keys=keys):
            return any(key is not None for key in keys) or (None if keys else False)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            truth = constant_truth(operand)
            return None if truth is None else not truth
        case ast.BoolOp(op=operator, values=values):
            truths = [constant_truth(value) for value in values]
            decisive = isinstance(operator, ast.Or)
            if decisive in truths:
                return decisive
            if None in truths:
                return None
            return not decisive
        case ast.NamedExpr(value=value):
            return constant_truth(value)
        case ast.IfExp(body=body, orelse=orelse):
            truth = constant_truth(body)
            return truth if truth == constant_truth(orelse) else None
        case ast.Compare(
            left=left, ops=[ast.Eq() | ast.Is() | ast.LtE() | ast.GtE()], comparators=[right]
        ):
            return True if ast.dump(left) == ast.dump(right) else None
    return True if _is_never_false(test) else None


def _is_never_false(test: ast.expr | None) -> bool:
    """Return whether an expression is true whatever its parts are, such as a list of comparisons
    without `all`.
    """
    match test:
        case (
            ast.ListComp(elt=part, generators=loops)
            | ast.SetComp(elt=part, generators=loops)
            | ast.DictComp(value=part, generators=loops)
        ):
            return isinstance(part, ast.Compare) and not any(loop.ifs for loop in loops)
        case ast.Call(func=ast.Name(id=name), args=[_, *_]):
            return name in _NEVER_FALSE
    return isinstance(test, ast.GeneratorExp | ast.Lambda | ast.JoinedStr)


class Instrument(ast.NodeTransformer):
    """Rewrites the assertions of a tree and counts in `num_counted` those on values of the
    program.
    """

    def __init__(self, of_program: Names, defined: Iterable[str]) -> None:
        """Create a rewriter; `of_program`: names that hold values of the program, `defined`: names
        of the tests.
        """
        self._of_program = of_program
        self._defined = set(defined)
        self.num_counted = 0
        self._in_class = False

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        outside = self._in_class
        self._in_class = True
        self.generic_visit(node)
        self._in_class = outside
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._record_call(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._record_call(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        counts = self._counts(node.test)
        self.generic_visit(node)
        fail = ast.Raise(_call("__assertion_error__", *([node.msg] if node.msg else [])))
        check = ast.If(ast.UnaryOp(ast.Not(), _call("__count_pass__", node.test)), [fail], [])
        return _recorded(check) if counts else node

    def visit_If(self, node: ast.If) -> ast.AST:
        counts = not node.orelse and _only_fails(node.body) and self._counts(node.test)
        self.generic_visit(node)
        if not counts:
            return node
        node.test = ast.UnaryOp(
            ast.Not(), _call("__count_pass__", ast.UnaryOp(ast.Not(), node.test))
        )
        return _recorded(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = _last_name(node.func)
        of_program = Names.of(*node.args, *node.keywords).intersects(self._of_program)
        if (
            name in ("assertTrue", "assertFalse")
            and node.args
            and constant_truth(node.args[0]) is not None
        ):
            of_program = False
        self.generic_visit(node)
        if (
            of_program
            and name not in self._defined
            and (name.startswith("assert") or name == "raises")
        ):
            self.num_counted += 1
            node.func = _call("__method__", node.func)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        tracks = isinstance(node.value, ast.Call) and Names.of(node.value.func).intersects(
            self._of_program
        )
        self.generic_visit(node)
        if tracks and isinstance(node.value, ast.Call):
            node.value.func = _call("__track_mutation__", node.value.func)
        return node

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.AST]:
        called = [
            _last_name(i.context_expr.func)
            for i in node.items
            if isinstance(i.context_expr, ast.Call)
        ]
        expects = any(name in EXPECTS_EXCEPTION and name not in self._defined for name in called)
        counts = expects and Names.of(*node.body).intersects(self._of_program)
        self.generic_visit(node)
        if not counts:
            return node
        self.num_counted += 1
        site = ast.Constant(self.num_counted)
        node.body.insert(0, ast.Expr(_call("__enter_raises__", site)))
        return [node, ast.Expr(_call("__raised__", site))]

    def visit_Try(self, node: ast.Try) -> ast.AST:
        body_fails = any(map(_always_fails, [*node.body, *node.orelse]))
        expects = body_fails and Names.of(*node.body).intersects(self._of_program)
        own = [
            any(isinstance(part, ast.Assert) for part in _walk(handler.body))
            for handler in node.handlers
        ]
        self.generic_visit(node)
        for handler, asserts in zip(node.handlers, own, strict=True):
            if expects:
                self.num_counted += 1
                handler.body.insert(0, ast.Expr(_call("__on_except__")))
            elif asserts or not _catches_assertions(handler.type):
                handler.body.insert(0, ast.Expr(_call("__clear_failure__")))
        return node

    def _record_call(self, node: _FunctionNode) -> _FunctionNode:
        """Record calls of a function that the runner would otherwise call."""
        self.generic_visit(node)
        if not self._in_class and (node.name.startswith("test") or node.name == "check"):
            node.body.insert(0, ast.Expr(_call("__called__", ast.Constant(node.name))))
        return node

    def _counts(self, test: ast.expr) -> bool:
        counts = constant_truth(test) is None and Names.of(test).intersects(self._of_program)
        self.num_counted += counts
        return counts


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _recorded(check: ast.stmt) -> ast.Try:
    """Wrap a statement so that an exception in it is recorded."""
    record: list[ast.stmt] = [ast.Expr(_call("__fail__")), ast.Raise()]
    return ast.Try([check], [ast.ExceptHandler(None, None, record)], [], [])


def _last_name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _only_fails(body: Sequence[ast.stmt]) -> bool:
    match body:
        case [ast.Raise()]:
            return True
        case [ast.Expr(value=ast.Call(func=function))]:
            return _last_name(function) == "fail"
    return False


def _always_fails(statement: ast.stmt) -> bool:
    """`assert False`, `raise AssertionError`, `self.fail()`, `pytest.fail()`."""
    match statement:
        case ast.Assert(test=test):
            return constant_truth(test) is False
        case ast.Raise(exc=ast.Call(func=raised)) | ast.Raise(exc=raised):
            return isinstance(raised, ast.expr) and _last_name(raised) == "AssertionError"
    return _only_fails([statement])


def _catches_assertions(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(each is None or _last_name(each) in _CATCHES_ASSERTIONS for each in kinds)


def _walk(body: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    return (part for statement in body for part in ast.walk(statement))
