"""Keeps the lines of a run's console in `logs/console.log`, so that they can be read afterwards."""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dapo.core.files import PRIVATE, atomic_file, make_private_folder, open_no_link
from dapo.core.secrets import mask_text
from dapo.core.terminal import printable
from dapo.runs.console import ProgressDisplay
from dapo.runs.sinks import Display, EndingSink, Metrics

MAX_BYTES = 4_000_000
"""A longer file loses its older half: it has room for about 15,000 steps."""


class ConsoleLog:
    """Appends texts to a file; each is there before the run continues, also if it is killed then.

    A file that cannot be written causes one warning, and does not end the run.
    """

    encoding = "utf-8"

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Take the path, whose folder is made for the first line, and what shows the warning."""
        self._path = path
        self._warn = warn
        self._pending = ""
        self._failed = False

    # the methods of a text stream that `ProgressDisplay` prints to

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> int:
        self._pending += text
        return len(text)

    def flush(self) -> None:
        text = self._pending
        self._pending = ""
        if not text or self._failed:
            return
        try:
            self._append(printable(mask_text(text)).encode())
        except OSError as error:
            self._failed = True
            self._warn(f"{self._path} gets no further lines: {error.strerror or error}")

    def line(self, text: str) -> None:
        """Append a line."""
        self.write(f"{text}\n")
        self.flush()

    def warned(self, text: str) -> None:
        """Append a warning, and show it."""
        self.line(f"warning: {text}")
        self._warn(text)

    def _append(self, data: bytes) -> None:
        # texts of models and of the user's code: for nobody else, as what verifiers print
        make_private_folder(self._path.parent)
        with open_no_link(self._path, "ab", permissions=PRIVATE) as file:
            file.write(data)
            size = file.tell()
        if size > MAX_BYTES:
            kept = self._path.read_bytes()[-MAX_BYTES // 2 :]
            # the first line may have lost its beginning
            lines = kept.partition(b"\n")[2].decode(errors="replace")
            with atomic_file(self._path, PRIVATE) as temporary:
                temporary.write_text(f"(earlier lines were removed)\n{lines}", encoding="utf-8")


class LoggedDisplay:
    """A display whose lines are also appended to a log, as a console without a terminal has them."""

    def __init__(self, shown: Display, log: ConsoleLog, num_steps: int, **options: Any) -> None:
        """Take the display, the log, and the arguments of `ProgressDisplay`."""
        self._shown = shown
        self._log = log
        self._lines = ProgressDisplay(num_steps, stream=log, **options)  # type: ignore[arg-type]
        self.phase = shown.phase
        now = datetime.now(UTC)
        first_step = options.get("first_step", 1)
        log.line(f"--- from step {first_step} of {num_steps}, {now:%Y-%m-%d %H:%M:%S} UTC")

    def log(self, step: int, metrics: Metrics) -> None:
        self._lines.log(step, metrics)
        self._shown.log(step, metrics)

    def message(self, text: str) -> None:
        self._log.line(text)
        self._shown.message(text)

    def recall(self, earlier_steps: Iterable[Mapping[str, float]]) -> None:
        steps = list(earlier_steps)
        self._lines.recall(steps)
        self._shown.recall(steps)

    def end(self, state: str) -> None:
        if isinstance(self._shown, EndingSink):
            self._shown.end(state)

    def close(self) -> None:
        self._shown.close()
