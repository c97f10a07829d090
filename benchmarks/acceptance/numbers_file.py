"""The file of numbers: a line of JSON for each, written when it is known, from which a later call
goes on.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from benchmarks.acceptance.check import Measurement
from benchmarks.acceptance.report import Result, without_names

ONE_MACHINE = ("commit", "processor", "GPUs", "torch")
"""What the numbers of one report have in common."""


class NumbersFile:
    """Opened for writing: behind earlier lines, or anew."""

    def __init__(
        self, path: Path, device: str, environment: Mapping[str, Any], *, goes_on: bool
    ) -> None:
        """Begin with a line that describes the machine."""
        self._file: TextIO = path.open("a" if goes_on else "w", encoding="utf-8")
        self._write({"device": device, "environment": dict(environment)})

    def number(self, stage: str, measurement: Measurement) -> None:
        """Write a number of a stage."""
        self._write({"stage": stage, **asdict(measurement), "ok": measurement.ok})

    def ended(self, result: Result) -> None:
        """Write how a stage ended; its numbers are there."""
        line = asdict(result)
        del line["measurements"]
        self._write({"stage": line.pop("name"), **line})

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        # flushed: whoever ends this process, or its machine, keeps what was measured
        print(without_names(json.dumps(line)), file=self._file, flush=True)


def read_results(path: Path, device: str, environment: Mapping[str, Any]) -> dict[str, Result]:
    """The stages that ended in earlier calls, by name; of one that ran twice the last.

    Raises ValueError where the file is of another machine or commit: one report is of one.
    """
    found: dict[str, Result] = {}
    numbers: dict[str, list[Measurement]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line: dict[str, Any] = {}
        with suppress(ValueError):  # the last line of a process that was ended may be a half
            line = json.loads(text)
        if "environment" in line:
            _require_same(path, line, device, environment)
        elif "status" in line:
            name = line.pop("stage")
            found[name] = Result(name=name, measurements=numbers.pop(name, []), **line)
        elif "stage" in line:
            stage = line.pop("stage")
            del line["ok"]
            numbers.setdefault(stage, []).append(Measurement(**line))
    return found


def _require_same(
    path: Path, line: Mapping[str, Any], device: str, environment: Mapping[str, Any]
) -> None:
    here = {"device": device} | {name: environment.get(name) for name in ONE_MACHINE}
    there = {"device": line["device"]}
    there |= {name: line["environment"].get(name) for name in ONE_MACHINE}
    for name, value in here.items():
        if there[name] != value:
            raise ValueError(
                f"{path.name} has numbers of another {name}: {there[name]}, and here it is {value};"
                " run without --from, or give another --out"
            )
