"""Compare two commits on the same work: `python -m benchmarks.paired --base COMMIT [PART ...]`.

The base commit's sources are taken from git into a temporary folder; the other side is a copy of
this checkout as it is when the command starts. Both do every repetition in turn, with the same
seeds, on a machine that nobody else uses. Parts measured before stay in the results file, which
`--document FILE` puts between the markers of a document.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench import RESULTS, require_same_machine, signals_as_exceptions
from benchmarks.machine import describe_machine, today
from benchmarks.paired.quickstart import measure_quickstart
from benchmarks.paired.repeated import (
    measure_four_updates,
    measure_long_prompts,
    measure_nothing_shared,
)
from benchmarks.paired.sides import Side, open_sides
from benchmarks.paired.table import MARKER, markdown
from benchmarks.protocol import WorkerFailed
from benchmarks.quiet import QUIET_SHARE, busy_share, require_quiet
from benchmarks.report import replace_between_markers
from benchmarks.worker_session import Session, Settings

REPEATED: dict[str, Callable[[Session, Sequence[Side]], dict[str, Any]]] = {
    "long_prompts": measure_long_prompts,
    "four_updates": measure_four_updates,
    "nothing_shared": measure_nothing_shared,
}
PARTS = ("quickstart", *REPEATED)


def main() -> int:
    """0: everything measured; 1: a part failed (the others are in the results); 2: nothing could be
    measured.
    """
    arguments = parse_arguments(sys.argv[1:])
    path = RESULTS / f"{arguments.name}.json"
    signals_as_exceptions()
    failures = []
    if arguments.base is not None:
        try:
            require_same_machine(path)
            failures = _measure(arguments, path)
        except (RuntimeError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
    if path.is_file():
        table = markdown(json.loads(path.read_text(encoding="utf-8")))
        if arguments.document is not None:
            text = arguments.document.read_text(encoding="utf-8")
            arguments.document.write_text(
                replace_between_markers(text, table, marker=MARKER), encoding="utf-8"
            )
        print(table)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paired", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; none: all"
    )
    parser.add_argument(
        "--base", metavar="COMMIT", help="what this checkout is compared with; none: print results"
    )
    parser.add_argument(
        "--rounds", type=int, help="repetitions of each side (quickstart 3, the others 5)"
    )
    parser.add_argument("--steps", type=int, default=18, help="of the quickstart")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the quickstart's first round; the next has the next"
    )
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="options of the quickstart, both sides",
    )
    parser.add_argument(
        "--threads", type=int, default=Settings().threads, help="of the other parts"
    )
    parser.add_argument("--model", default=Settings().model, help="of the other parts")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the other parts",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the other parts small and noisy: does everything run?"
    )
    parser.add_argument(
        "--allow-busy", action="store_true", help="measure on a busy machine, and mark the results"
    )
    parser.add_argument("--name", default="paired", help="of the results file")
    parser.add_argument(
        "--document", type=Path, help=f"put the table between its two lines {MARKER}"
    )
    arguments = parser.parse_args(words)
    if unknown := [name for name in arguments.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    if arguments.base is None and not (RESULTS / f"{arguments.name}.json").is_file():
        parser.error("there are no results yet: give --base COMMIT")
    return arguments


def _measure(arguments: argparse.Namespace, path: Path) -> list[str]:
    """Measure the parts, each into the results file as soon as it is there; returns what failed,
    and why.
    """
    failures = []
    with tempfile.TemporaryDirectory(prefix="dapo-base-") as folder:
        sides = open_sides(arguments.base, Path(folder))
        for name in arguments.parts or PARTS:
            if not arguments.allow_busy:
                require_quiet()
            before = busy_share()
            try:
                part = _run_part(name, arguments, sides)
            except (WorkerFailed, ValueError, subprocess.CalledProcessError) as error:
                failures.append(f"{name}: {error}")
                print(failures[-1], file=sys.stderr)
                continue
            shares = [before, busy_share()]
            shares += [
                run["others_share"] for runs in part.get("runs", {}).values() for run in runs
            ]
            part |= {"base": sides[0].commit, "commit": sides[1].commit, "date": today()}
            part |= {"others_share": shares, "is_quiet": max(shares) <= QUIET_SHARE}
            _write(path, name, part)
    return failures


def _run_part(name: str, arguments: argparse.Namespace, sides: Sequence[Side]) -> dict[str, Any]:
    if name == "quickstart":
        rounds = arguments.rounds or 3
        log = partial(print, file=sys.stderr, flush=True)
        measured = measure_quickstart(
            sides,
            steps=arguments.steps,
            rounds=rounds,
            seed=arguments.seed,
            options=arguments.set,
            log=log,
        )
    else:
        # pi_old of the engine needs float32
        dtype = "float32" if name == "four_updates" else arguments.dtype
        settings = Settings(
            model=arguments.model, dtype=dtype, threads=arguments.threads, quick=arguments.quick
        )
        if arguments.quick:
            settings = replace(settings, prompts=4, group=4, tokens=8, rounds=1)
        settings = replace(settings, rounds=arguments.rounds or settings.rounds)
        rounds = settings.rounds
        with Session(settings) as session:
            measured = REPEATED[name](session, sides)
    return measured | {"rounds": rounds}


def _write(path: Path, name: str, part: dict[str, Any]) -> None:
    """Put a part into the results file, in place of its earlier figures."""
    parts = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.is_file() else {}
    parts[name] = part
    ordered = {key: parts[key] for key in PARTS if key in parts}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"machine": describe_machine(), "parts": ordered}, indent=1) + "\n",
        encoding="utf-8",
    )


if __name__ == "__main__":
    sys.exit(main())
