"""`make bench`: measure the chosen parts, write them to a results file, print the table.

One persistent process for each system, in its own virtual environment; every round asks each of
them once, so that a drift of the machine affects all alike. Parts that were measured before stay in
the results file.
"""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.accuracy import MODULES, measure_accuracy
from benchmarks.compare import COMPARED, measure_four_updates, measure_one_update
from benchmarks.dapo_only import (
    measure_checkpoint,
    measure_growth,
    measure_longtail,
    measure_shared,
)
from benchmarks.distillation import measure_distillation
from benchmarks.episodes import measure_episodes
from benchmarks.geometries import NAMES
from benchmarks.gsm8k import EVALUATION, UPDATE, measure_evaluation, measure_update
from benchmarks.machine import describe_commit, describe_machine, today
from benchmarks.natural import measure_natural
from benchmarks.protocol import WorkerFailed
from benchmarks.report import console_table
from benchmarks.schedule import measure_schedule
from benchmarks.supervised import measure_supervised
from benchmarks.time_breakdown import measure_profile
from benchmarks.worker_session import (
    ON_A_GPU,
    ROOT,
    VENVS,
    Session,
    Settings,
    install_command,
    missing_packages,
    python_of,
)

RESULTS = ROOT / "benchmarks" / "results"
VARIANT = "update4"
OURS_ALONE = {
    "shared": measure_shared,
    "growth": measure_growth,
    "longtail": measure_longtail,
    "checkpoint": measure_checkpoint,
    "schedule": measure_schedule,
    "profile": measure_profile,
}
WITH_OPPONENTS = {
    "natural": measure_natural,
    "episodes": measure_episodes,
    "supervised": measure_supervised,
    "distillation": measure_distillation,
    UPDATE: measure_update,
    EVALUATION: measure_evaluation,
    "accuracy": measure_accuracy,
}
PARTS = (
    *COMPARED,
    VARIANT,
    "natural",
    "episodes",
    "supervised",
    "distillation",
    *OURS_ALONE,
    UPDATE,
    EVALUATION,
    "accuracy",
)
GPU_WORK: dict[str, Any] = {
    "prompts": 64,
    "group": 8,
    "tokens": 256,
    "microbatch_tokens": None,
    "dtype": "bfloat16",
}
"""A step that fills a GPU; the CPU's 64 rows would measure the starts of kernels."""
QUICK = Settings(
    rounds=1, prompts=4, group=4, tokens=16, seeds=1, trl_microbatches=(8, 16), quick=True
)


def main() -> int:
    """0: everything measured; 1: a part failed (the others are in the results); 2: the command line
    is wrong.
    """
    arguments = parse_arguments(sys.argv[1:])
    settings = settings_of(arguments)
    parts = arguments.parts or arguments.names or parts_without_files(settings)
    signals_as_exceptions()
    if not python_of("ours").exists():
        print("there is no .venv: run `make install` first", file=sys.stderr)
        return 2
    try:
        require_peers(settings, parts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    results_path = RESULTS / f"{arguments.name or default_name(settings)}.json"
    settings = replace(settings, results=results_path)
    try:
        require_same_machine(results_path)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    failures = []
    for measure, names in plan_of(parts):
        try:
            with Session(settings) as session:
                found = measure(session)
        except (WorkerFailed, ValueError) as error:
            failures.append(f"{', '.join(names)}: {error}")
            print(failures[-1], file=sys.stderr)
            continue
        write_results(results_path, found, settings)
    if results_path.is_file():
        print(console_table(json.loads(results_path.read_text(encoding="utf-8"))))
        shown = (
            results_path.relative_to(ROOT) if results_path.is_relative_to(ROOT) else results_path
        )
        print(f"\nwritten to {shown}")
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    defaults = Settings()
    parser.add_argument(
        "names", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; none: all"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), help="(default auto; on a GPU bfloat16)"
    )
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument("--device", choices=("cpu", "cuda"), default=defaults.device)
    parser.add_argument(
        "--model",
        default=defaults.model,
        help=f"alias, directory, or {' / '.join(NAMES)} (random)",
    )
    parser.add_argument(
        "--microbatch-tokens", type=int, help="ours (default 1024; on a GPU what fits)"
    )
    parser.add_argument(
        "--trl-microbatch", type=int, help="responses; none: a probe finds the fastest"
    )
    accuracy = parser.add_argument_group(
        "of the accuracy part, whose complete curves are kept and join"
    )
    accuracy.add_argument("--seeds", type=int, help=f"races (default {defaults.seeds})")
    accuracy.add_argument(
        "--first-seed", type=int, help="of the first race; the next one has the next"
    )
    accuracy.add_argument(
        "--systems",
        nargs="+",
        choices=list(MODULES),
        help=f"(default {' '.join(defaults.systems)})",
    )
    accuracy.add_argument(
        "--rate", type=float, help="the learning rate of every system (default: the quickstart's)"
    )
    accuracy.add_argument(
        "--budget", type=int, help=f"generated tokens (default {defaults.budget})"
    )
    accuracy.add_argument(
        "--held-out-size", type=int, help=f"evaluated problems (default {defaults.held_out_size})"
    )
    accuracy.add_argument("--minutes", type=float, help="begin no race that would end later")
    accuracy.add_argument(
        "--target", type=float, help=f"the accuracy to reach (default {defaults.target})"
    )
    accuracy.add_argument("--again", action="store_true", help="forget the curves that are kept")
    parser.add_argument(
        "--gsm8k",
        type=Path,
        metavar="FOLDER",
        help="with train.jsonl and test.jsonl, of the parts that are named so",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small and noisy: does everything run?"
    )
    parser.add_argument("--name", help="of the results file")
    arguments = parser.parse_args(words)
    if unknown := [name for name in arguments.names if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; the parts are {', '.join(PARTS)}")
    return arguments


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings that the arguments choose."""
    settings = QUICK if arguments.quick else Settings()
    if arguments.device == "cuda" and not arguments.quick:
        settings = replace(settings, **GPU_WORK)
    names = ("rounds", "dtype", "threads", "device", "model", "microbatch_tokens", "gsm8k")
    names += (
        "seeds",
        "first_seed",
        "minutes",
        "target",
        "again",
        "rate",
        "budget",
        "held_out_size",
    )
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    settings = replace(settings, **given)
    if arguments.systems is not None:
        settings = replace(settings, systems=tuple(arguments.systems))
    if arguments.trl_microbatch is not None:
        settings = replace(settings, trl_microbatches=(arguments.trl_microbatch,))
    return replace(settings, plots=RESULTS) if settings.quick else settings


def parts_without_files(settings: Settings) -> list[str]:
    """All parts, and those of GSM8K only where its files are given."""
    of_files = (UPDATE, EVALUATION) if settings.gsm8k is None else ()
    return [name for name in PARTS if name not in of_files]


def require_peers(
    settings: Settings,
    parts: Sequence[str],
    missing_of: Callable[[str], list[str]] = missing_packages,
) -> None:
    """Raise ValueError where a comparison on a GPU lacks vLLM, or TRL with vLLM in its environment.

    Without them the others would be slower than their users know them.
    """
    if settings.device != "cuda" or not {*COMPARED, VARIANT, "natural"} & set(parts):
        return
    missing = {name: found for name in ON_A_GPU if (found := missing_of(name))}
    if missing:
        lacking = "; ".join(
            f"{VENVS[name]} lacks {', '.join(found)}" for name, found in missing.items()
        )
        raise ValueError(
            f"on a GPU the others sample with vLLM, or a figure would not be theirs: {lacking};"
            f" `{install_command(settings)}` installs them"
        )


def plan_of(parts: Sequence[str]) -> list[tuple[Any, list[str]]]:
    """Which function measures which parts: those that share workers and rounds go together."""
    together = [name for name in COMPARED if name in parts]
    plan: list[tuple[Any, list[str]]] = (
        [(partial(measure_one_update, wanted=set(together)), together)] if together else []
    )
    if VARIANT in parts:
        plan.append((_variant, [VARIANT]))
    plan += [
        (measure, [name])
        for name, measure in (OURS_ALONE | WITH_OPPONENTS).items()
        if name in parts
    ]
    return plan


def default_name(settings: Settings) -> str:
    """The name of the results file, one per device and dtype: a later run replaces earlier
    figures.
    """
    name = f"{settings.device}-{settings.dtype}"
    return f"quick-{name}" if settings.quick else name


def require_same_machine(path: Path) -> None:
    """Raise ValueError where a results file holds figures of another processor: one table is of one
    machine.
    """
    if not path.is_file():
        return
    found = json.loads(path.read_text(encoding="utf-8"))["machine"]
    here = describe_machine()
    if (found["cpu"], found["cores"]) != (here["cpu"], here["cores"]):
        raise ValueError(
            f"{path.name} holds figures of another machine ({found['cpu']}, {found['cores']}"
            f" cores); this is {here['cpu']}, {here['cores']} cores: give another file with --name"
        )


def write_results(path: Path, found: dict[str, dict[str, Any]], settings: Settings) -> None:
    """Put the measured parts into the results file, in place of their earlier figures."""
    results: dict[str, Any] = {"parts": {}}
    if path.is_file():
        results = json.loads(path.read_text(encoding="utf-8"))
    stamp = {
        "date": today(),
        "commit": describe_commit(ROOT),
        "settings": settings_as_json(settings),
    }
    merged = {**results["parts"], **{name: part | stamp for name, part in found.items()}}
    ordered = {name: merged[name] for name in sorted(merged, key=_order)}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": describe_machine(), "parts": ordered}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def settings_as_json(settings: Settings) -> dict[str, Any]:
    """The settings as JSON values, without paths and limits."""
    return {
        key: value
        for key, value in vars(settings).items()
        if key not in ("plots", "results", "gsm8k", "timeout_s")
    }


def _order(name: str) -> int:
    return PARTS.index(name) if name in PARTS else len(PARTS)


def _variant(session: Session) -> dict[str, dict[str, Any]]:
    """The variant's parts under one name."""
    found = measure_four_updates(session, wanted={"update", "step", "memory"})
    return {
        VARIANT: (
            found["update"]
            | {"figures": [figure for part in found.values() for figure in part["figures"]]}
        )
    }


def signals_as_exceptions() -> None:
    """SIGTERM ends the process by an exception, so that every worker is ended on the way."""

    def end(signum: int, frame: object) -> NoReturn:
        raise SystemExit(f"ended by signal {signum}")

    signal.signal(signal.SIGTERM, end)


if __name__ == "__main__":
    sys.exit(main())
