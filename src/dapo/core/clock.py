"""Decides at which poll of the engine an event takes effect: by the run's history, or by its
recorded arrival.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dapo.core.errors import CheckpointError
from dapo.core.files import append_line, open_no_link, open_regular

ClockKind: TypeAlias = Literal["history", "arrival", "load"]


class Clock:
    """Decides when a verdict, an environment's answer or new weights take effect while a batch is
    sampled.

    With `history` events take effect a fixed number of polls after their cause, and two runs are
    equal. With `arrival` they do at the first poll after they have arrived. That poll is written to
    `path` before the event takes effect, and the clock of a resumed run reads it: events in the
    file take effect at their poll, waited for if they are late, and no other event does before the
    last poll in the file. `load` is `arrival` without a file.

    Polls are counted within the batch of a step, from `begin` to `end`. Outside, as in an
    evaluation, the clock is `history`. Raises CheckpointError for a file that no run writes, and
    OSError if a line cannot be written.
    """

    def __init__(
        self, kind: ClockKind = "history", path: Path | None = None, *, first_step: int = 0
    ) -> None:
        """`path` may hold the polls of an earlier process; those of steps before `first_step` are
        not needed.
        """
        self.kind = kind
        self.poll = 0
        self._step: int | None = None
        self._recorded: dict[tuple[int, str, str], int] = {}
        self._last: dict[int, int] = {}
        self._file: Any = None
        if kind == "arrival" and path is not None:
            whole = self._read(path, first_step) if path.exists() else 0
            self._file = open_no_link(path, "ab", buffering=0)
            self._file.truncate(whole)

    @property
    def is_by_arrival(self) -> bool:
        """Whether events now take effect when they arrive."""
        return self.kind != "history" and self._step is not None

    def begin(self, step: int) -> None:
        """Begin to count the polls of a step's batch."""
        self._step = step
        self.poll = 0
        self._recorded = {key: poll for key, poll in self._recorded.items() if key[0] >= step}

    def end(self) -> None:
        """Record that the batch has closed."""
        self._record("close", "")
        self._step = None

    def takes(self, event: str, name: object, *, has_arrived: Callable[[], bool]) -> bool:
        """Whether an event that is not used yet takes effect at this poll.

        Only with `is_by_arrival`.
        """
        assert self._step is not None
        at = self._recorded.get((self._step, event, str(name)))
        if at is not None:
            return at <= self.poll
        if self.poll <= self._last.get(self._step, -1) or not has_arrived():
            return False
        self._record(event, str(name))
        return True

    def take(self, event: str, waiting: Mapping[str, "Future[Any]"], *, is_idle: bool) -> list[str]:
        """The names of the answers that take effect at this poll.

        With `is_idle` there is one, waited for.
        """
        found = [
            name for name, each in waiting.items() if self.takes(event, name, has_arrived=each.done)
        ]
        if is_idle and waiting and not found:
            wait(waiting.values(), return_when=FIRST_COMPLETED)
            found = [name for name, each in waiting.items() if each.done()]
            for name in found:
                self._record(event, name)
        return found

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _record(self, event: str, name: str) -> None:
        if self._file is None or self._step is None or (self._step, event, name) in self._recorded:
            return
        line = {
            "step": self._step,
            "poll": self.poll,
            "event": event,
            **({"id": name} if name else {}),
        }
        append_line(self._file, json.dumps(line))
        self._recorded[self._step, event, name] = self.poll

    def _read(self, path: Path, first_step: int) -> int:
        """Read the polls of an earlier process; return the number of bytes without a last line that
        is not finished.
        """
        with open_regular(path) as file:
            whole = file.read().rpartition(b"\n")[0]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                given = json.loads(line)
                step = int(given["step"])
                poll = int(given["poll"])
                key = step, str(given["event"]), str(given.get("id", ""))
            except (ValueError, KeyError, TypeError):
                raise CheckpointError(
                    f'{path}, line {number}: expected {{"step": 7, "poll": 118, "event": "verdict",'
                    f' "id": "431"}}, got {line[:80]!r}; remove the line'
                ) from None
            if step >= first_step:
                self._recorded.setdefault(key, poll)
                self._last[step] = max(poll, self._last.get(step, -1))
        return len(whole) + bool(whole)
