"""Checks for the acceptance's runner: one of each way to end."""

import os
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.acceptance.check import Check, Measurement, Setting, Skipped


def within(setting: Setting) -> list[Measurement]:
    """A number within its bounds, and one without."""
    return [Measurement("gap", 0.5, "nats", at_most=0.5), Measurement("speed", 1e6, "tokens/s")]


def beyond(setting: Setting) -> list[Measurement]:
    """One of two numbers is below its bound."""
    return [
        Measurement("gap", 0.5, at_most=1.0),
        Measurement("rise", 0.09, at_least=0.1, detail="of 3 steps"),
    ]


def not_finite(setting: Setting) -> list[Measurement]:
    """A NaN, for which no comparison is true."""
    return [Measurement("gap", float("nan"), at_most=1.0)]


def raises(setting: Setting) -> list[Measurement]:
    """An error whose text has a folder and a secret in it."""
    print("what a library prints")
    raise ValueError(
        f"no file {os.path.expanduser('~')}/models/x.safetensors, asked with"
        " token=hf_abcdefghij0123456789"
    )


def dies(setting: Setting) -> list[Measurement]:
    """Exits like a process that is killed for its memory."""
    os._exit(7)


def hangs(setting: Setting) -> list[Measurement]:
    """Longer than any limit."""
    time.sleep(600)
    return []


def skips(setting: Setting) -> list[Measurement]:
    """For a reason."""
    raise Skipped("there is one GPU")


def counts(setting: Setting) -> Iterator[Measurement]:
    """Two numbers, and then it hangs."""
    yield Measurement("first", 1.0)
    yield Measurement("second", 2.0)
    time.sleep(600)


class Loaded:
    """An engine's process that takes all weights."""

    def load_published(self, handle: Any) -> int:
        """Load a version."""
        return 1

    def receive_weights(self, update: Any, layout: Any, version: Any) -> None:
        """Receive a chunk."""


def begins(setting: Setting) -> list[Measurement]:
    """One number: its process is the first."""
    return [Measurement("zero", 0.0)]


STAGES = (
    Check("begins", "begins", begins, 60.0),
    Check("counts", "counts", counts, 2.0),
    Check("within", "within", within, 60.0),
)
ALL = tuple(
    Check(compute.__name__, str(compute.__doc__), compute, 0.1 if compute is hangs else 10.0)
    for compute in (raises, dies, hangs, skips, not_finite, beyond, within)
)
