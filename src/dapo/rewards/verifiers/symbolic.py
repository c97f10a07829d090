"""The only user of math-verify: parses and compares LaTeX, without its timers."""

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_CACHE_SIZE = 1024


class Symbolic:
    """Parses and compares LaTeX expressions.

    Its timers, which use SIGALRM, cancel other alarms and turn a timeout into "not equal", are off: the pool limits the
    time. Only its LaTeX parser is used; the one for plain expressions passes text to `eval`.
    """

    def __init__(self) -> None:
        """Import math-verify, which takes most of a second."""
        import math_verify

        # it warns once for each timer that is off
        for module in (math_verify.parser, math_verify.grader):
            logging.getLogger(module.__name__).setLevel(logging.ERROR)
        self._latex = [math_verify.LatexExtractionConfig()]
        self._parse: Callable[..., list[Any]] = math_verify.parse
        self._verify: Callable[..., bool] = math_verify.verify
        self.cached_parse = lru_cache(_CACHE_SIZE)(self.parse)
        """`parse` for references, which are the same for every response of a group."""

    def parse(self, latex: str) -> list[Any]:
        """The expression's interpretations; empty if it cannot be parsed."""
        return self._parse(
            f"${latex}$", extraction_config=self._latex, fallback_mode="no_fallback", parsing_timeout=None
        )

    def equal(self, reference: list[Any], candidate: list[Any]) -> bool:
        """Whether two parsed expressions are equal. Not symmetric: the reference's form decides what is an answer."""
        return self._verify(reference, candidate, timeout_seconds=None)
