"""How many of the last responses no verifier could judge, and when that is too many."""

import re
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from dapo.core.errors import VerifierFailed
from dapo.types import Verdict

WINDOW = 256
"""Responses that are looked back on."""
MAX_ERROR_RATE = 0.5
"""Fraction of error verdicts among the last WINDOW responses above which a run stops."""
_CAUSES = 3
_SHOWN_CHARS = 200
# what differs between errors of one cause: quoted texts and numbers
_PARTICULAR = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")

_Entry: TypeAlias = tuple[str, str, str] | None
"""Error, problem and response of a response without a verdict; None for one with."""


class RollingErrorRate:
    """The last WINDOW judged responses, in the order in which their groups were decided."""

    def __init__(self, max_rate: float) -> None:
        self._max_rate = max_rate
        self._last: deque[_Entry] = deque(maxlen=WINDOW)

    def add(self, problem_id: str, responses: Sequence[str], verdicts: Sequence[Verdict]) -> None:
        """A group's verdicts. Raises VerifierFailed when a full window holds more errors than `max_rate` allows."""
        for response, verdict in zip(responses, verdicts, strict=True):
            shown = repr(response[:_SHOWN_CHARS])
            self._last.append(None if verdict.error is None else (verdict.error, problem_id, shown))
        errors = [entry for entry in self._last if entry is not None]
        if len(self._last) == WINDOW and len(errors) > self._max_rate * WINDOW:
            raise VerifierFailed(self._explain(errors))

    def state(self) -> list[Any]:
        """JSON values."""
        return [entry and list(entry) for entry in self._last]

    def load(self, state: Iterable[Any]) -> None:
        """Continue with a saved window."""
        self._last = deque((entry and tuple(entry) for entry in state), maxlen=WINDOW)

    def _explain(self, errors: Sequence[tuple[str, str, str]]) -> str:
        by_cause: dict[str, list[tuple[str, str, str]]] = {}
        for entry in errors:
            by_cause.setdefault(_PARTICULAR.sub("", entry[0]), []).append(entry)
        counts = Counter({cause: len(entries) for cause, entries in by_cause.items()}).most_common(_CAUSES)
        message = "; ".join(f"{count} times: {by_cause[cause][-1][0]}" for cause, count in counts)
        _, problem, response = by_cause[counts[0][0]][-1]
        return (
            f"{len(errors)} of the last {WINDOW} judged responses have no verdict, more than the {self._max_rate:.0%} "
            f"that a run accepts. {message}. For example problem {problem}, response {response}. Mend the verifier or "
            "the references, and resume the run"
        )
