"""The one door to math-verify: LaTeX in, equal or not out, without its alarms."""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_CACHE_SIZE = 1024


class Symbolic:
    """Parses and compares LaTeX expressions.

    Its clocks, which work by SIGALRM, cancel other alarms and call their own timeout "not equal", are off: time is kept
    by whoever runs this process. Only its LaTeX parser is used; the one for plain expressions hands text to `eval`.
    """

    def __init__(self) -> None:
        """Imports math-verify, which takes most of a second."""
        import math_verify

        # it warns once for each clock that is off
        for module in (math_verify.parser, math_verify.grader):
            logging.getLogger(module.__name__).setLevel(logging.ERROR)
        self._latex = [math_verify.LatexExtractionConfig()]
        self._parse: Callable[..., list[Any]] = math_verify.parse
        self._verify: Callable[..., bool] = math_verify.verify
        self.cached_parse = lru_cache(_CACHE_SIZE)(self.parse)
        """`parse` for references, which come back with every response of a group."""

    def parse(self, latex: str) -> list[Any]:
        """The expression's readings; empty if it cannot be read."""
        return self._parse(
            f"${latex}$", extraction_config=self._latex, fallback_mode="no_fallback", parsing_timeout=None
        )

    def equal(self, reference: list[Any], candidate: list[Any]) -> bool:
        """Are two parsed expressions the same? Not symmetric: the reference's form decides what counts as an answer."""
        return self._verify(reference, candidate, timeout_seconds=None)
