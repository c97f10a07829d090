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
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
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
        names = cls()
        for node in filter(None, nodes):
            for part in ast.walk(node):
                if isinstance(part, ast.Name):
                    names.variables.add(part.id)
                elif isinstance(part, ast.Attribute):
                    names.attributes.add(part.attr)
        return names

    def intersects(self, names: "Names") -> bool:
        """Return True if the two have a name in common."""
        if not self.variables.isdisjoint(names.variables):
            return True
        return not self.attributes.isdisjoint(names.attributes)

    def add(self, names: "Names") -> bool:
        """Add these names; return True if one of them is new."""
        old_size = len(self.variables) + len(self.attributes)
        self.variables |= names.variables
        self.attributes |= names.attributes
        return len(self.variables) + len(self.attributes) > old_size


class DataFlow:
    """The names that values can reach in tests: each expression flows from its names to those that
    it is bound to.

    Output of the program flows into every object to which the tests redirect the output.
    """

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        self._edges: list[tuple[Names, Names]] = []
        self._printed = Names({"capsys"})  # the names that can hold output of the program
        self.parameters: dict[str, set[str]] = {}
        nodes = list(_walk(trees))
        for node in nodes:
            if isinstance(node, FunctionNode):
                self.parameters.setdefault(node.name, set()).update(parameters_of(node))
        # a call may come before the function: its edges need the parameters of all functions
        for node in nodes:
            self._edges.extend(self._edges_of(node))

    def reached_from(self, names: Iterable[str]) -> Names:
        """Return the names that a value of the variables `names` can reach, including these."""
        reached = Names(set(names))
        reached.add(self._printed)
        grows = True
        while grows:
            grows = False
            for source, target in self._edges:
                grows |= source.intersects(reached) and reached.add(target)
        return reached

    def _edges_of(self, node: ast.AST) -> Iterator[tuple[Names, Names]]:
        """Yield the flows of one statement or expression: from its names to those it binds."""
        match node:
            case ast.Assign(targets=targets, value=value):
                if any(map(_is_stdout, targets)):
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
            case ast.Try():
                yield from self._edges_of_try(node)
            case ast.Match():
                yield from self._edges_of_match(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                # what it may return, called as a function or as a method
                yield Names.of(*node.body), Names({node.name}, {node.name})
                # what its parameters may be
                defaults = [*node.args.defaults, *node.args.kw_defaults]
                sources = Names.of(*node.decorator_list, *defaults)
                yield sources, Names(parameters_of(node))
            case ast.ClassDef(name=name, body=body):
                yield Names.of(*body), Names({name})
            case ast.Call() | ast.Expr(value=ast.Call()):
                yield from self._edges_of_call(node)

    def _edges_of_try(self, node: ast.Try) -> Iterator[tuple[Names, Names]]:
        """Yield the flows of a `try`: from its body to its handlers, and to all that it assigns."""
        names = Names.of(*node.body)
        exceptions = {handler.name for handler in node.handlers if handler.name}
        yield names, Names(exceptions)
        # whether the body raises decides what is assigned: `raised = True`
        statements = [*node.body, *node.orelse]
        for handler in node.handlers:
            statements += handler.body
        yield names, _bound_in(statements)

    def _edges_of_match(self, node: ast.Match) -> Iterator[tuple[Names, Names]]:
        """Yield the flows of a `match`: from its subject to its captures and all it assigns."""
        names = Names.of(node.subject)
        captures = Names()
        for part in ast.walk(node):
            if isinstance(part, ast.MatchAs | ast.MatchStar) and part.name:
                captures.variables.add(part.name)
        yield names, captures
        # the subject decides which case runs
        statements = [statement for case in node.cases for statement in case.body]
        yield names, _bound_in(statements)

    def _edges_of_with(self, node: ast.With | ast.AsyncWith) -> Iterator[tuple[Names, Names]]:
        """Yield the flows of a `with`, and note the objects that receive the output."""
        for item in node.items:
            context = item.context_expr
            if isinstance(context, ast.Call) and last_name(context.func) in _REDIRECTS:
                self._printed.add(_bound_by(*context.args))
            if item.optional_vars is not None:
                yield Names.of(context, *node.body), _bound_by(item.optional_vars)

    def _edges_of_call(self, call: ast.Call | ast.Expr) -> Iterator[tuple[Names, Names]]:
        """Yield the flows of a call: from its arguments to parameters, or to a changed object."""
        if isinstance(call, ast.Expr):  # such as sort_numbers(numbers)
            assert isinstance(call.value, ast.Call)
            yield Names.of(call.value.func), _bound_by(*call.value.args)
            return
        arguments = Names.of(*call.args, *call.keywords)
        callee = Names.of(call.func)
        # a function among the arguments may be called with the others
        for function in callee.variables | callee.attributes | arguments.variables:
            if function in self.parameters:
                yield arguments, Names(set(self.parameters[function]))
        if isinstance(call.func, ast.Attribute):  # such as results.append(value)
            yield arguments, _bound_by(call.func.value)


def _is_stdout(target: ast.expr) -> bool:
    """Return True for an assignment to `sys.stdout`."""
    return isinstance(target, ast.Attribute) and target.attr == "stdout"


def parameters_of(function: FunctionNode) -> set[str]:
    """Return the names of the parameters of a function, except `self` and `cls`."""
    names = {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}
    return names - {"self", "cls"}


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
    """Return the truth of an expression that is the same for any program; None if it depends or is
    unclear.
    """
    match test:
        case ast.Constant(value=value):
            return bool(value)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return _container_truth(isinstance(part, ast.Starred) for part in parts)
        case ast.Dict(keys=keys):
            return _container_truth(key is None for key in keys)
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


def _container_truth(are_unpacked: Iterable[bool]) -> bool | None:
    """Return the truth of a container: false without elements, unclear if all are unpacked."""
    unpacked = list(are_unpacked)
    if not unpacked:
        return False
    return None if all(unpacked) else True


def _is_never_false(test: ast.expr | None) -> bool:
    """Return True if an expression is true whatever its parts are, such as a list of comparisons
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

    def __init__(self, program_names: Names, defined: Iterable[str]) -> None:
        """Create a rewriter; `program_names` hold values of the program, `defined` are names of the
        tests.
        """
        self._program_names = program_names
        self._defined = set(defined)
        self.num_counted = 0
        self._in_class = False

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Visit a class, whose methods the runner calls with their object."""
        outside = self._in_class
        self._in_class = True
        self.generic_visit(node)
        self._in_class = outside
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Record calls of a function."""
        return self._record_call(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        """Record calls of a coroutine function."""
        return self._record_call(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Count `assert x` if it is an assertion on the program, and record its failure."""
        counts = self._counts(node.test)
        self.generic_visit(node)
        if not counts:
            return node
        arguments = [node.msg] if node.msg else []
        fail = ast.Raise(_call("__assertion_error__", *arguments))
        passes = _call("__count_pass__", node.test)
        return _recorded(ast.If(_negated(passes), [fail], []))

    def visit_If(self, node: ast.If) -> ast.AST:
        """Count `if x: raise`, which asserts that `x` is false."""
        counts = not node.orelse and _only_fails(node.body) and self._counts(node.test)
        self.generic_visit(node)
        if not counts:
            return node
        # `if x != 3: fail()` asserts the opposite of its test
        node.test = _negated(_call("__count_pass__", _negated(node.test)))
        return _recorded(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Count calls of assertion methods on values of the program."""
        counts = self._is_assertion_method(node)
        self.generic_visit(node)
        if counts:
            self.num_counted += 1
            node.func = _call("__method__", node.func)
        return node

    def _is_assertion_method(self, node: ast.Call) -> bool:
        """Return True if a method of a test library asserts something of the program."""
        name = last_name(node.func)
        if name in self._defined or not (name.startswith("assert") or name == "raises"):
            return False
        if name in ("assertTrue", "assertFalse") and node.args:
            is_the_same_for_all_programs = constant_truth(node.args[0]) is not None
            if is_the_same_for_all_programs:
                return False
        return self._uses_program(*node.args, *node.keywords)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """Copy what a call such as `sort(numbers)` changes back into the objects of the tests."""
        call = node.value
        tracks = isinstance(call, ast.Call) and self._uses_program(call.func)
        self.generic_visit(node)
        if tracks and isinstance(node.value, ast.Call):
            node.value.func = _call("__track_mutation__", node.value.func)
        return node

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.AST]:
        """Count the body of `with raises(...)`, which must use the program and raise."""
        contexts = [item.context_expr for item in node.items]
        callees = {last_name(part.func) for part in contexts if isinstance(part, ast.Call)}
        expects = not (callees - self._defined).isdisjoint(EXPECTS_EXCEPTION)
        counts = expects and self._uses_program(*node.body)
        self.generic_visit(node)
        if not counts:
            return node
        self.num_counted += 1
        site = ast.Constant(self.num_counted)
        node.body.insert(0, ast.Expr(_call("__enter_raises__", site)))
        return [node, ast.Expr(_call("__raised__", site))]

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """Count a `try` whose body fails unless the program raises."""
        body_fails = any(map(_always_fails, [*node.body, *node.orelse]))
        expects = body_fails and self._uses_program(*node.body)
        # before the visit, which replaces the assertions
        have_assertions = [_has_assertion(handler) for handler in node.handlers]
        self.generic_visit(node)
        for handler, has_assertion in zip(node.handlers, have_assertions, strict=True):
            if expects:
                self.num_counted += 1
                handler.body.insert(0, ast.Expr(_call("__on_except__")))
            elif has_assertion or not _catches_assertions(handler.type):
                handler.body.insert(0, ast.Expr(_call("__clear_failure__")))
        return node

    def _record_call(self, node: FunctionNode) -> FunctionNode:
        """Record calls of a function that the runner would otherwise call."""
        self.generic_visit(node)
        if not self._in_class and (node.name.startswith("test") or node.name == "check"):
            node.body.insert(0, ast.Expr(_call("__called__", ast.Constant(node.name))))
        return node

    def _counts(self, test: ast.expr) -> bool:
        """Return True if an expression can be false and uses the program, and count it."""
        counts = constant_truth(test) is None and self._uses_program(test)
        self.num_counted += counts
        return counts

    def _uses_program(self, *nodes: ast.AST) -> bool:
        """Return True if one of these trees mentions a name of the program."""
        return Names.of(*nodes).intersects(self._program_names)


def _negated(test: ast.expr) -> ast.expr:
    """Return the negation of an expression."""
    return ast.UnaryOp(ast.Not(), test)


def _call(name: str, *arguments: ast.expr) -> ast.Call:
    """Return a call of a function of `Counter.names`."""
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _recorded(check: ast.stmt) -> ast.Try:
    """Wrap a statement so that an exception in it is recorded."""
    record: list[ast.stmt] = [ast.Expr(_call("__fail__")), ast.Raise()]
    return ast.Try([check], [ast.ExceptHandler(None, None, record)], [], [])


def last_name(function: ast.expr) -> str:
    """Return the name of a function or method that is called; nothing for any other expression."""
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _only_fails(body: Sequence[ast.stmt]) -> bool:
    """Return True for a single `raise`, or call of a method `fail`."""
    match body:
        case [ast.Raise()]:
            return True
        case [ast.Expr(value=ast.Call(func=function))]:
            return last_name(function) == "fail"
    return False


def _always_fails(statement: ast.stmt) -> bool:
    """Return True for `assert False`, `raise AssertionError`, `self.fail()`, `pytest.fail()`."""
    match statement:
        case ast.Assert(test=test):
            return constant_truth(test) is False
        case ast.Raise(exc=ast.Call(func=raised)) | ast.Raise(exc=raised):
            return isinstance(raised, ast.expr) and last_name(raised) == "AssertionError"
    return _only_fails([statement])


def _has_assertion(handler: ast.ExceptHandler) -> bool:
    """Return True if a handler asserts something itself."""
    return any(isinstance(part, ast.Assert) for part in _walk(handler.body))


def _catches_assertions(kind: ast.expr | None) -> bool:
    """Return True if a handler of these exceptions catches failed assertions."""
    if kind is None:
        return True
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(last_name(part) in _CATCHES_ASSERTIONS for part in kinds)


def _walk(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield all nodes of trees."""
    return (part for node in nodes for part in ast.walk(node))
