"""The rules while a run trains: each finding is reported once, when it first holds."""

from collections.abc import Iterable, Mapping
from typing import Any

from dapo.config import Config
from dapo.training.rules.all_rules import holding
from dapo.training.rules.finding import Finding
from dapo.training.rules.history import History


class Watch:
    """The rules over the last steps of a run that trains.

    It keeps nothing in checkpoints: a resumed run reads what it has logged so far, and so reports no finding twice.
    """

    def __init__(self, config: Config, logged: Iterable[Mapping[str, Any]] = ()) -> None:
        """Begin with the lines of `metrics.jsonl` that the run has logged already."""
        self._config = config
        self._history = History()
        self._reported: set[str] = set()
        for record in logged:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> tuple[list[Finding], int]:
        """Add a step's metrics: the findings that are new, and how many hold. Notes are neither."""
        self._history.add(record)
        found = [each for each in holding(self._history, self._config) if each.severity != "note"]
        new = [each for each in found if each.name not in self._reported]
        self._reported |= {each.name for each in new}
        return new, len(found)


def warning(found: Finding) -> str:
    """A finding on one line."""
    return f"{found.cause}; try {' or '.join(found.change)}" if found.change else f"{found.cause}; {found.advice}"
