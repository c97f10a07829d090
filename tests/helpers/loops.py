"""Many cheap cases of a table as one test."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def loop_over(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test once for each case of a table, as one test, in place of `parametrize`.

    The error of a case that fails names it. Two decorators make the product of two tables. The
    cases share the test's fixtures, so it may not change them; a case that skips is an error, for
    the cases after it would not run.

    Args:
        names: the parameter of the test that gets a case, or the parameters that get its parts.
        cases: the table.
    """
    table = list(cases)
    assert table

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run_all(**fixtures: Any) -> None:
            for case in table:
                values = (
                    {names: case} if isinstance(names, str) else dict(zip(names, case, strict=True))
                )
                try:
                    test(**fixtures, **values)
                except pytest.skip.Exception as skipped:
                    raise AssertionError(f"the case {values} skips: parametrize it") from skipped
                except BaseException as error:
                    error.add_note(f"in the case {values}")
                    raise

        signature = inspect.signature(test)
        fixtures = [
            parameter
            for name, parameter in signature.parameters.items()
            if name not in ({names} if isinstance(names, str) else names)
        ]
        run_all.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run_all

    return decorate
