"""Starts worker processes, and says how they ended."""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any


def start_module(
    module: str,
    descriptors: Sequence[int],
    *numbers: int,
    environment: Mapping[str, str],
    output: int | IO[Any],
    python: str = sys.executable,
) -> "subprocess.Popen[bytes]":
    """Start `python -m MODULE DESCRIPTORS NUMBERS`, without standard input. May raise OSError.

    Its session is its own, so that Ctrl-C reaches this process alone.

    Args:
        module: What the process runs.
        descriptors: The only ones that it inherits besides the standard ones.
        numbers: Further arguments.
        environment: All of its variables.
        output: Where its standard output and error go.
        python: The interpreter.
    """
    return subprocess.Popen(
        # -P: a random.py in the current directory must not shadow the standard library
        [python, "-P", "-m", module, *map(str, (*descriptors, *numbers))],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=descriptors,
        start_new_session=True,
        env=environment,
    )


def exit_reason(code: int, *, by_signal: str) -> str:
    """Return `exited with code 3`, or `by_signal` and the name of the signal, by Popen's code."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # one of the real-time signals, which have no names
        name = f"signal {-code}"
    return f"{by_signal} {name}"
