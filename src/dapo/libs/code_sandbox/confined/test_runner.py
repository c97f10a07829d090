"""Runs compiled tests on a submission and counts the assertions that pass, in the process of the
test runner.

The tests are executed as `__main__`. Functions `test*`, classes `Test*`, cases of unittest and
`check(candidate)` are then collected and called, unless the tests have called them.
"""

from __future__ import annotations

import base64
import importlib
import marshal
import sys
import types

import remote  # from this script's own folder
import rpc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

_DATA_ERRORS = (ImportError, NameError, SyntaxError, OSError, remote.UnusableTest)
_SETUP = {
    "setUp",
    "setUpClass",
    "setUpModule",
    "asyncSetUp",
    "setup_method",
    "setup_class",
    "setup_module",
    "fixture_value",  # in `pytest_subset`, which is imported only to collect tests
}


class Counter:
    """Counts the assertions on values of the program; `instrument` writes calls of its methods into
    the tests.
    """

    def __init__(self, connection: remote.Connection, steerable: Sequence[str]) -> None:
        self._connection = connection
        self._steerable = steerable
        self._entered: dict[int, int] = {}
        self.num_passed = 0
        self.failed = False  # an assertion has failed and the tests have not handled it

    def _used(self) -> int:
        """Count the values that the program has given and the exceptions that it has raised."""
        return self._connection.values + len(self._connection.raised)

    def names(self) -> dict[str, Any]:
        """Return the functions that the rewritten tests call, by name."""
        return {
            "__count_pass__": self.count_pass,
            "__fail__": self.fail,
            "__clear_failure__": self.clear_failure,
            "__enter_raises__": self.enter,
            "__raised__": self.raised,
            "__on_except__": self.on_except,
            "__method__": self.method,
            "__track_mutation__": self.track_mutation,
            "__assertion_error__": AssertionError,
        }

    def count_pass(self, value: Any) -> bool:
        """Count an assertion if its expression is true; return whether it is."""
        true = bool(value)
        self.num_passed += true and self._used() > 0
        return true

    def fail(self) -> None:
        """Record that an assertion is false or has raised, unless the tests are at fault."""
        error = sys.exc_info()[1]
        self.failed |= error is None or not is_fault_of_tests(
            error, self._connection, self._steerable
        )

    def clear_failure(self) -> None:
        """Forget a failed assertion that the tests handle themselves."""
        self.failed = False

    def enter(self, site: int) -> None:
        """Enter the body of a `with` that expects an exception."""
        self._entered[site] = self._used()

    def raised(self, site: int) -> None:
        """Count an exception that was expected and has come, if the body used the program."""
        self.num_passed += self._used() > self._entered[site]
        self.failed = False

    def on_except(self) -> None:
        """Enter the handler of a `try` that fails if nothing is raised; count an exception of the
        program.
        """
        if _is_raised(sys.exc_info()[1], self._connection):
            self.num_passed += 1
            self.failed = False

    def method(self, function: Any) -> Any:
        """Wrap an assertion method of unittest or pytest so that it is counted; return other
        functions unchanged.
        """
        owner = getattr(function, "__func__", function)
        if not str(getattr(owner, "__module__", "")).startswith(("unittest.case", "pytest")):
            return function

        def counted(*args: Any, **kwargs: Any) -> Any:
            used_before = self._used()
            try:
                result = function(*args, **kwargs)
            except BaseException:
                self.failed = True
                raise
            if function.__name__ in ("raises", "assertRaises", "assertRaisesRegex"):
                if len(args) > 1 + (function.__name__ == "assertRaisesRegex") or "func" in kwargs:
                    self.num_passed += self._used() > used_before
            else:
                self.num_passed += self._used() > 0
            return result

        return counted

    def track_mutation(self, function: Any) -> Any:
        """Wrap a function whose result the tests ignore, so that it changes their lists."""
        if not isinstance(function, remote.RemoteObject):
            return function
        return lambda *args, **kwargs: self._connection.call(
            rpc.CALL_MUTATING, function._handle, args, kwargs
        )


class _ProgramModule(types.ModuleType):
    """A module that tests import, with the public names of the program."""

    def __init__(self, name: str, public: Mapping[str, Any], connection: remote.Connection) -> None:
        super().__init__(name)
        self.__dict__.update(public, __connection__=connection)

    def __getattr__(self, name: str) -> Any:
        values = self.__connection__.large_values([name])
        if name in values:
            return values[name]
        message = f"module {self.__name__!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=self)


class Runner:
    """Runs the tests of one message. The first failure ends the run with an exception."""

    def __init__(self, connection: remote.Connection, steerable: Sequence[str]) -> None:
        self.connection = connection
        self.counter = Counter(connection, steerable)
        self.called: set[str] = set()  # names of the functions that the tests have called
        self.module = types.ModuleType("__main__")
        self.names = vars(self.module)

    def run(self, codes: Sequence[types.CodeType], check: str | None) -> None:
        """Execute the tests, then call `check`."""
        sys.modules["__main__"] = self.module
        self.names.update(self.counter.names())
        self.names["__called__"] = self.called.add
        for code in codes:
            exec(code, self.names)
        if check is not None and "check" not in self.called and callable(self.names.get("check")):
            finished(self.names["check"](eval(check, self.names)))

    def run_collected(self) -> None:
        """Run the functions and classes that the tests have defined."""
        import inspect

        import pytest_subset  # `rpc.load` has read it

        # by identity, because a value may have several names
        defined = {
            id(value): value
            for value in self.names.values()
            if getattr(value, "__module__", None) == "__main__"
        }
        functions: list[Any] = []
        classes: list[type] = []
        cases: list[type] = []
        for value in defined.values():
            if isinstance(value, type):
                if _is_case(value):
                    cases.append(value)
                elif _is_test_class(value):
                    classes.append(value)
            elif inspect.isfunction(value) and self._is_uncalled_test(value.__name__):
                functions.append(value)
        fixtures = pytest_subset.Fixtures(self.names, finished)
        if functions or classes:
            _call(self.names, "setup_module", self.module)
        for function in functions:
            _call(self.names, "setup_function", function)
            fixtures.run(function)
            _call(self.names, "teardown_function", function)
        for kind in classes:
            self._run_class(kind, fixtures)
        if functions or classes:
            _call(self.names, "teardown_module", self.module)
        if cases:
            _run_cases(cases, self.counter)

    def _is_uncalled_test(self, name: str) -> bool:
        return name.startswith("test") and name not in self.called

    def _run_class(self, kind: type, fixtures: Any) -> None:
        methods = [
            name for name in dir(kind) if name.startswith("test") and callable(getattr(kind, name))
        ]
        if methods:
            _call_on(kind, "setup_class")
        for name in methods:
            owner = kind()
            _call_on(owner, "setup_method", getattr(owner, name))
            _call_on(owner, "setup")
            fixtures.run(getattr(owner, name), owner)
            _call_on(owner, "teardown_method", getattr(owner, name))
            _call_on(owner, "teardown")
        if methods:
            _call_on(kind, "teardown_class")


def run(connection: remote.Connection, message: Mapping[str, Any]) -> str:
    """Run tests on a submission.

    Args:
        connection: the connection to the submission.
        message: `code`: the compiled tests, in order; `names`: the names that they take from the
            program; `classes`: those that they use as classes; `constants`: those that must be
            plain values; `steerable`: what a value of the program may decide in them: `assertions`
            (whether one runs), `evaluation` (what is imported, opened or evaluated), `setup`
            (whether it fails); `standard_modules`: modules that the tests use without an import;
            `program_modules`: modules from which they import the program; `check`: the argument of
            `check` ("": the function of the program; None: `check` is not called); `mentioned`: the
            words of the prompt, for `check=""`; `collect`: whether the tests define functions or
            classes; `asynchronous`, `pytest`, `unittest`: whether the tests may need these.

    Returns:
        `passed`; `failed`; `unchecked` if no assertion on a value of the program has run; `broken:
        reason` if the tests cannot run.
    """
    runner = Runner(connection, message["steerable"])
    try:
        public = connection.public_names(frozenset(message["classes"]))
        names = message["names"]
        public.update(connection.large_values(names))
        if not public.keys() >= set(names):
            return "failed"
        remotes = {name for name in public if isinstance(public[name], remote.RemoteObject)}
        if not remotes.isdisjoint(message["constants"]):
            return "failed"
        runner.names.update({name: public[name] for name in names})
        connection.values += sum(name not in remotes for name in names)
        for name in message["standard_modules"]:
            runner.names[name] = importlib.import_module(name)
        prepare(message, public, connection)
        argument = message["check"]
        if argument == "":
            argument = _main_function(public, message["mentioned"])
            if argument is None:
                return "failed"
            runner.names[argument] = public[argument]
        codes = [marshal.loads(base64.b64decode(code)) for code in message["code"]]
        runner.run(codes, argument)
        if message["collect"]:
            runner.run_collected()
    except BaseException as error:
        result = assign_fault(error, runner, message["steerable"])
        if result is not None:
            return result
    if connection.lost or connection.refused or runner.counter.failed:
        return "failed"
    if connection.rejection is not None:
        return f"broken: {connection.rejection}"
    if runner.counter.num_passed:
        return "passed"
    return "failed" if "assertions" in message["steerable"] else "unchecked"


def assign_fault(error: BaseException, runner: Runner, steerable: Sequence[str]) -> str | None:
    """Decide whose fault an exception is that ends the tests: `failed`, `broken: reason`, or None
    if it is no failure.

    The tests are at fault if no program could avoid the exception: a missing module, name or file,
    a fixture that fails, or anything before the first use of the program.
    """
    connection = runner.connection
    counter = runner.counter
    if connection.rejection is not None and not connection.refused:
        return f"broken: {connection.rejection}"
    if connection.lost or connection.refused or counter.failed or _is_raised(error, connection):
        return "failed"
    if isinstance(error, SystemExit):
        return "failed" if error.code else None
    if isinstance(error, remote.Unsendable | remote.SubmissionLost):
        return "failed"
    if is_fault_of_tests(error, connection, steerable):
        return f"broken: {type(error).__name__}: {error}"
    return "failed"


def is_fault_of_tests(
    error: BaseException, connection: remote.Connection, steerable: Sequence[str] = ()
) -> bool:
    """Return True if no program could have avoided the exception; `steerable` as in `run`."""
    if _is_raised(error, connection) or isinstance(error, remote.NotPlain):
        return False
    if _is_lack_of_name(error):
        return False
    unused = not connection.values and not connection.raised
    if isinstance(error, AssertionError):
        return unused
    if isinstance(error, TypeError) and remote.RemoteObject.__name__ in str(error):
        return False
    if _is_data_error(error):
        return unused or "evaluation" not in steerable
    return unused or ("setup" not in steerable and bool(_functions_of(error) & _SETUP))


def _is_lack_of_name(error: BaseException) -> bool:
    """Return True if the tests use a name of the program's module that the program lacks.

    Private names are never in the module, whatever the program is.
    """
    if not isinstance(error, AttributeError) or not isinstance(error.obj, _ProgramModule):
        return False
    return error.name is not None and not error.name.startswith("_")


def _is_data_error(error: BaseException) -> bool:
    """Return True if a name, a module, its attribute or a file is not there."""
    if isinstance(error, AttributeError) and isinstance(error.obj, types.ModuleType):
        return True
    if isinstance(error, TimeoutError | UnboundLocalError):
        return False  # an OSError and a NameError that a program may cause
    return isinstance(error, _DATA_ERRORS)


def _is_raised(error: BaseException | None, connection: remote.Connection) -> bool:
    """Return True if the program has raised this exception."""
    return any(error is raised for raised in connection.raised)


def finished(result: Any) -> Any:
    """Return the result of a call, and run it to its end if it is a coroutine."""
    if isinstance(result, types.CoroutineType):
        import asyncio

        return asyncio.run(result)
    return result


def prepare(
    message: Mapping[str, Any], public: Mapping[str, Any], connection: remote.Connection
) -> None:
    """Provide the modules that the tests may import; `public` are the names of the program."""
    for name in message["program_modules"]:
        sys.modules[name] = _ProgramModule(name, public, connection)
    if message["asynchronous"]:
        rpc.use_event_loop_without_sockets(remote.RemoteObject)
        import asyncio

        run_coroutine = asyncio.run
        asyncio.run = lambda main, **options: run_coroutine(
            rpc.coroutine(main) if isinstance(main, remote.RemoteObject) else main, **options
        )
    if message["pytest"]:
        import pytest_subset

        sys.modules["pytest"] = pytest_subset.module()
    if message["unittest"]:
        import unittest

        unittest.main = lambda *args, **options: None  # type: ignore[assignment]  # cases are collected anyway


def _main_function(public: Mapping[str, Any], mentioned: Sequence[str]) -> str | None:
    """Return the last public function, of those that the prompt mentions if there are any: helpers
    stand before it.
    """
    functions = [name for name, value in public.items() if isinstance(value, remote.RemoteObject)]
    return next(reversed([name for name in functions if name in mentioned] or functions), None)


def _functions_of(error: BaseException) -> set[str]:
    names = set()
    trace = error.__traceback__
    while trace is not None:
        names.add(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    return names


def _is_test_class(kind: type) -> bool:
    """Return True for a class of tests without a constructor, which pytest would not collect."""
    import inspect

    if not kind.__name__.startswith("Test"):
        return False
    return bool(inspect.getattr_static(kind, "__init__") is object.__init__)


def _is_case(kind: type) -> bool:
    return any(base.__module__ == "unittest.case" for base in kind.__mro__)


def _run_cases(cases: Sequence[type], counter: Counter) -> None:
    import unittest

    class Result(unittest.TestResult):
        def addError(self, test: Any, err: Any) -> None:  # noqa: N802
            raise err[1]

        addFailure = addError  # noqa: N815

        def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802
            if err is not None:
                raise err[1]

        def addExpectedFailure(self, test: Any, err: Any) -> None:  # noqa: N802
            counter.clear_failure()

        def addUnexpectedSuccess(self, test: Any) -> None:  # noqa: N802
            raise AssertionError("an expected failure did not come")

    loader = unittest.defaultTestLoader
    unittest.TestSuite(loader.loadTestsFromTestCase(case) for case in cases).run(Result())


def _call(names: dict[str, Any], name: str, argument: Any) -> None:
    function = names.get(name)
    if isinstance(function, types.FunctionType):
        finished(function(argument) if function.__code__.co_argcount else function())


def _call_on(owner: Any, name: str, *arguments: Any) -> None:
    function = getattr(owner, name, None)
    if isinstance(function, types.FunctionType | types.MethodType):
        takes = function.__code__.co_argcount - isinstance(function, types.MethodType)
        finished(function(*arguments) if takes else function())
