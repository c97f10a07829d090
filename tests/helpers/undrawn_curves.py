"""Runs whose `curves.png` is one pixel: to draw it takes half of the seconds of a run of one step."""

import base64
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dapo.runs.curves import plot_curves
from dapo.runs.metrics_file import metrics_by_step

PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)


@contextmanager
def undrawn_curves() -> Iterator[None]:
    """Let the runs of this process not draw their curves, if it has imported what makes runs."""
    if "dapo.start.run" not in sys.modules:
        yield
        return
    with patch("dapo.start.run.plot_curves", _write_a_pixel):
        yield


@contextmanager
def drawn_curves() -> Iterator[None]:
    """Let them draw, as they do without the tests."""
    with patch("dapo.start.run.plot_curves", plot_curves):
        yield


def _write_a_pixel(metrics: Path, picture: Path, **options: Any) -> None:
    if metrics_by_step(metrics):
        picture.write_bytes(PIXEL)
    else:
        plot_curves(metrics, picture, **options)  # which refuses to draw nothing
