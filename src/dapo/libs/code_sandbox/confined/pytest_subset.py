"""Implements the part of pytest that tests of small functions use; the test runner does not have
pytest itself.

Covered: `raises` (also with `match`, and with a function), `approx` (numbers, sequences, mappings),
`fixture` (of the module or a class, with arguments that are fixtures, with `yield`, `autouse`),
`mark.parametrize` (stacked, with `param`), `mark.skip`, `mark.skipif`, `skip`, `fail`,
`importorskip`, `capsys.readouterr`, `main` (does nothing); every other mark is ignored. Not
covered, and an error: the other fixtures of pytest's own (`tmp_path`, `monkeypatch`, `request`),
fixtures with `params`, `warns`, `mark.xfail`, plugins.
"""

from __future__ import annotations

import cmath
import inspect
import io
import re
import sys
import types
from collections import namedtuple

import remote  # from this script's own folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any


class Skipped(BaseException):
    """The test is not to be run."""


def module() -> types.ModuleType:
    """Create the module that tests import as pytest."""
    pytest = types.ModuleType("pytest")
    for part in (raises, approx, fixture, param, skip, fail, importorskip, main, ExceptionInfo):
        part.__module__ = "pytest"
        setattr(pytest, part.__name__, part)
    vars(pytest).update(
        mark=_Mark(), warns=_not_covered, deprecated_call=_not_covered, xfail=_not_covered
    )
    return pytest


def _not_covered(*args: Any, **kwargs: Any) -> Any:
    raise remote.UnusableTest("the tests use a part of pytest that is not covered")


def main(*args: Any, **kwargs: Any) -> int:
    """Do nothing: the tests are collected in any case."""
    return 0


def skip(reason: str = "", **options: Any) -> None:
    """End the test without a result."""
    raise Skipped(reason)


def fail(reason: str = "", **options: Any) -> None:
    """Let the test fail."""
    raise AssertionError(reason)


def importorskip(name: str, *args: Any, **options: Any) -> Any:
    """Import a module, or end the test without a result."""
    try:
        return __import__(name)
    except ImportError:
        raise Skipped(name) from None


class ExceptionInfo:
    """The exception that `raises` has caught."""

    value: Any = None

    @property
    def type(self) -> Any:
        """The class of the exception."""
        return type(self.value)

    @property
    def typename(self) -> str:
        """The name of the class of the exception."""
        return type(self.value).__name__

    def match(self, pattern: str) -> bool:
        """Fail the test unless the pattern occurs in the text of the exception."""
        if not re.search(pattern, str(self.value)):
            raise AssertionError(f"{pattern!r} is not in {str(self.value)!r}")
        return True


class _Raises(ExceptionInfo):
    def __init__(self, expected: Any, match: str | None) -> None:
        self._expected = expected
        self._match = match

    def __enter__(self) -> ExceptionInfo:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            raise AssertionError(f"{self._expected!r} was not raised")
        if not isinstance(error, self._expected):
            return False
        self.value = error
        return self._match is None or self.match(self._match)


def raises(expected: Any, *args: Any, match: Any = None, **kwargs: Any) -> Any:
    """Create a context in which an exception must be raised; call the function in it if there is
    one.
    """
    context = _Raises(expected, match)
    if args:
        with context:
            args[0](*args[1:], **kwargs)
    return context


class approx:  # noqa: N801
    """Equals a number, or a sequence or mapping of numbers, within a tolerance."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        expected: Any,
        rel: float | None = None,
        abs: float | None = None,
        nan_ok: bool = False,
    ) -> None:
        self._expected = expected
        self._rel = rel
        self._abs = abs
        self._nan_ok = nan_ok

    def __eq__(self, actual: object) -> bool:
        return self._close(self._expected, actual)

    def __repr__(self) -> str:
        return f"approx({self._expected!r})"

    def _close(self, expected: Any, actual: Any) -> bool:
        if isinstance(expected, dict):
            same_keys = isinstance(actual, dict) and expected.keys() == actual.keys()
            return same_keys and all(
                self._close(value, actual[key]) for key, value in expected.items()
            )
        if isinstance(expected, list | tuple):
            same_length = isinstance(actual, list | tuple) and len(expected) == len(actual)
            return same_length and all(map(self._close, expected, actual))
        is_number = isinstance(expected, int | float | complex) and not isinstance(expected, bool)
        if (
            not is_number
            or isinstance(actual, bool)
            or not isinstance(actual, int | float | complex)
        ):
            return bool(expected == actual)
        if cmath.isnan(expected):
            return self._nan_ok and cmath.isnan(actual)
        if expected == actual:
            return True
        if abs(expected) == float("inf"):
            return False
        absolute = 1e-12 if self._abs is None else self._abs
        relative = 1e-6 if self._rel is None and self._abs is None else self._rel or 0.0
        return abs(expected - actual) <= max(absolute, relative * abs(expected))


class param:  # noqa: N801
    """One set of arguments of `mark.parametrize`."""

    def __init__(self, *values: Any, id: Any = None, marks: Any = ()) -> None:
        self.values = values


def fixture(
    function: Any = None,
    *,
    params: Any = None,
    autouse: bool = False,
    name: Any = None,
    **options: Any,
) -> Any:
    """Mark a function as a fixture."""

    def mark(function: Any) -> Any:
        function.fixture_name = name or function.__name__
        function.fixture_autouse = autouse
        function.fixture_params = params
        return function

    return mark(function) if function is not None else mark


class _Mark:
    def __getattr__(self, name: str) -> Any:
        def identity(*args: Any, **kwargs: Any) -> Any:
            return (
                args[0]
                if len(args) == 1 and callable(args[0]) and not kwargs
                else lambda function: function
            )

        return identity

    def parametrize(self, names: Any, values: Any, **options: Any) -> Any:
        # as in pytest: the values of "x" are the rows themselves, those of ["x"] are rows of one
        is_bare = False
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
            is_bare = len(names) == 1

        def mark(function: Any) -> Any:
            rows = []
            for value in values:
                if isinstance(value, param):
                    row = value.values
                elif is_bare:
                    row = (value,)
                else:
                    row = tuple(value)
                if len(row) != len(names):
                    raise remote.UnusableTest(
                        f"parametrize names {len(names)} arguments and gives {len(row)}"
                    )
                rows.append(dict(zip(names, row, strict=True)))
            function.parameter_rows = [*getattr(function, "parameter_rows", []), rows]
            return function

        return mark

    def skip(self, *args: Any, **options: Any) -> Any:
        def mark(function: Any) -> Any:
            function.is_skipped = True
            return function

        return mark(args[0]) if args and callable(args[0]) else mark

    def skipif(self, condition: Any = True, **options: Any) -> Any:
        return self.skip() if condition else lambda function: function

    xfail = staticmethod(_not_covered)


Captured = namedtuple("Captured", ["out", "err"])


class Capsys:
    """The fixture `capsys`: reads the buffer into which the test runner prints the output of the
    program.
    """

    def __init__(self) -> None:
        self.readouterr()

    def readouterr(self) -> tuple[str, str]:
        """Return the output since the last call."""
        assert isinstance(sys.stdout, io.StringIO)
        text = sys.stdout.getvalue()
        sys.stdout.seek(0)
        sys.stdout.truncate()
        return Captured(text, "")


class Fixtures:
    """Calls test functions with their fixtures."""

    def __init__(self, names: dict[str, Any], finished: Callable[[Any], Any]) -> None:
        self._names = names
        self._finished = finished

    def run(self, function: Any, owner: Any = None) -> None:
        """Call a test function with its fixtures, once for each of its parameter sets."""
        if getattr(function, "is_skipped", False) or getattr(type(owner), "is_skipped", False):
            return
        marks = [
            *getattr(function, "parameter_rows", []),
            *getattr(type(owner), "parameter_rows", []),
        ]
        rows: list[dict[str, Any]] = [{}]
        for parameter_rows in marks:
            rows = [{**first, **second} for first in rows for second in parameter_rows]
        for row in rows:
            try:
                self._run_once(function, row, self._fixtures_of(owner))
            except Skipped:
                continue

    def _fixtures_of(self, owner: Any) -> dict[str, Any]:
        members = [getattr(owner, name) for name in dir(owner)] if owner is not None else []
        routines: list[Any] = [
            value for value in [*self._names.values(), *members] if inspect.isroutine(value)
        ]
        return {value.fixture_name: value for value in routines if hasattr(value, "fixture_name")}

    def _run_once(self, function: Any, row: dict[str, Any], fixtures: dict[str, Any]) -> None:
        """Call a test function with one row of parameters, then end its fixtures."""
        open_fixtures: list[Iterator[Any]] = []
        values: dict[str, Any] = {"capsys": Capsys(), **row}
        for name, fixture_function in fixtures.items():
            if fixture_function.fixture_autouse:
                self._value(name, values, fixtures, open_fixtures)
        arguments = {}
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.default is parameter.empty or name in values:
                arguments[name] = self._value(name, values, fixtures, open_fixtures)
        self._finished(function(**arguments))
        for generator in reversed(open_fixtures):
            next(generator, None)

    def _value(
        self,
        name: str,
        values: dict[str, Any],
        fixtures: dict[str, Any],
        opened: list[Iterator[Any]],
    ) -> Any:
        if name not in values:
            if name not in fixtures:
                raise remote.UnusableTest(f"there is no fixture {name!r}")
            function = fixtures[name]
            if function.fixture_params is not None:
                raise remote.UnusableTest(f"fixture {name!r} has params, which are not covered")
            arguments = {
                parameter: self._value(parameter, values, fixtures, opened)
                for parameter in inspect.signature(function).parameters
            }
            values[name] = fixture_value(function, arguments, opened, self._finished)
        return values[name]


def fixture_value(
    function: Any, arguments: dict[str, Any], opened: list[Iterator[Any]], finished: Any
) -> Any:
    """Return the value of a fixture; a fixture that yields is added to `opened`, to be continued
    after the test.
    """
    result = finished(function(**arguments))
    if inspect.isgenerator(result):
        opened.append(result)
        return next(result)
    return result
