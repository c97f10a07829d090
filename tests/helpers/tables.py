"""Tests that meet all rows of a table, as one case."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def for_each_row(
    names: str | Sequence[str], rows: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with each row of a table of its arguments, and fail with all rows that fail.

    With a single name a row is its value. A long table of cheap cases is one test. Its fixtures are
    shared by the rows: a test that changes what a fixture gives, such as a folder, has parameters
    instead. Two decorators make the product of two tables. A row that skips fails the test.
    """
    table = [(row,) for row in rows] if isinstance(names, str) else [tuple(row) for row in rows]
    columns = [names] if isinstance(names, str) else list(names)
    assert table, "a test of no rows cannot fail"

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def meets_all_rows(*own: Any, **fixtures: Any) -> None:  # of a class, or none
            failures = []
            for row in table:
                try:
                    test(*own, **fixtures, **dict(zip(columns, row, strict=True)))
                except pytest.skip.Exception as skipped:
                    failures.append(f"{row!r:.500}\n  skips: {skipped}")
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"{row!r:.500}\n  {type(error).__name__}: {error}")
            if failures:
                count = f"{len(failures)} of {len(table)} rows fail"
                pytest.fail("\n".join([count, *failures]), pytrace=False)

        signature = inspect.signature(test)
        fixtures = [
            parameter for name, parameter in signature.parameters.items() if name not in columns
        ]
        meets_all_rows.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return meets_all_rows

    return decorate
