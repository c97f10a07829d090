"""Runs a check in a process of its own: an error, a crash or too long a time is the failure of that
check alone.
"""

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from benchmarks.acceptance.check import Check, Measure, Measurement, Setting, Skipped
from benchmarks.acceptance.report import Result, without_names

LOG_LINES = 15
"""Number of printed lines that the report shows of each process of a failed check."""
IMPORTED_ONCE = tuple(
    f"{__package__}.{name}"
    for name in ("correctness", "engines", "processes", "speed", "training", "vllm_cycles")
)
"""By the server; torch and transformers among what these import."""
END_S = 10.0
"""For a process to end by itself once its result is there."""


def run_check(
    check: Check,
    device: Literal["cuda", "cpu"],
    vllm_python: str | None,
    *,
    limit_s: float,
    references: Path | None = None,
    on_number: Callable[[Measurement], None] = lambda measurement: None,
) -> Result:
    """Run a check for at most `limit_s` seconds.

    `on_number` gets each number when it is known; those that came before a failure are in the
    result.
    """
    started = time.monotonic()
    result = partial(Result, check.name, check.about)
    found: list[Measurement] = []

    def keep(measurement: Measurement) -> None:
        found.append(measurement)
        on_number(measurement)

    with tempfile.TemporaryDirectory(prefix="dapo-acceptance-") as folder:
        setting = Setting(device, Path(folder) / "work", vllm_python, references)
        setting.folder.mkdir()
        log = Path(folder) / "log"
        compute = partial(_numbers, check.measure, setting)
        kind, value = in_own_process(compute, limit_s=limit_s, log=log, on_number=keep)
        seconds = time.monotonic() - started
        # workers' logs, too
        logs = (each for each in (log, *sorted(setting.folder.rglob("*.log"))) if each.exists())
        lines = (each.read_text(encoding="utf-8", errors="replace").splitlines() for each in logs)
        tail = [line for of_log in lines for line in of_log[-LOG_LINES:]]
    if kind == "skipped":
        return result("skipped", seconds, found, reason=value)
    if kind == "error":
        return result(
            "fail",
            seconds,
            found,
            reason=without_names(value),
            log_tail=[without_names(line) for line in tail],
        )
    return result("pass" if all(m.ok for m in found) else "fail", seconds, found)


def _numbers(measure: Measure, setting: Setting) -> Iterator[Measurement]:
    yield from measure(setting)


def in_own_process(
    compute: Callable[[], Any],
    *,
    limit_s: float,
    log: Path | None = None,
    on_number: Callable[[Measurement], None] = lambda measurement: None,
) -> tuple[str, Any]:
    """(`ok`, the result), (`skipped`, why) or (`error`, what happened), of a function in a new
    process.

    `on_number` gets what an iterator gives, one by one; its result is None. The process is forked
    off a server that has imported everything and never touched a GPU.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED_ONCE))
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_compute, args=(compute, sender, log))
    deadline = time.monotonic() + limit_s
    process.start()
    sender.close()
    patience_s = 0.0
    try:
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            kind, value = receiver.recv()
            if kind != "number":
                patience_s = END_S
                return kind, value
            on_number(value)
    except EOFError:
        process.join(END_S)
        return "error", f"the process ended with exit code {process.exitcode} and without a result"
    else:
        return "error", f"no result within {limit_s:.0f} s"
    finally:
        process.join(patience_s)
        if process.is_alive():
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()


def _compute(compute: Callable[[], Any], sender: "Connection[Any, Any]", log: Path | None) -> None:
    """In the process: it leads a group of its own, so that what it starts can be ended with it."""
    os.setpgrp()
    if log is not None:
        with open(log, "w", encoding="utf-8") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
    try:
        found = compute()
        if isinstance(found, Iterator):
            for number in found:
                sender.send(("number", number))
            found = None
        sender.send(("ok", found))
    except Skipped as reason:
        sender.send(("skipped", str(reason)))
    except Exception:
        sender.send(("error", traceback.format_exc()))
