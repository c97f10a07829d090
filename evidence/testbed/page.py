"""Writes the tables and picture of the testbed into its page: `python -m evidence.testbed.page
docs/lab/when.md`.
"""

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from dapo.runs.curves import frame, new_figure, save_figure
from dapo.runs.panels import BLUE, INK, ORANGE
from evidence.testbed.analysis import Arm, condition_of, report, stored_arms
from evidence.testbed.plan import load

MARKED = re.compile(r"(<!-- testbed -->\n).*?(<!-- testbed -->)", re.DOTALL)
PICTURE = "testbed.png"


def update(text: str, arms: Sequence[Arm]) -> str:
    """The page with the tables of the arms between its markers.

    Raises ValueError without markers.
    """
    if not MARKED.search(text):
        raise ValueError("expected a pair of lines <!-- testbed --> in the page")
    return MARKED.sub(lambda found: f"{found[1]}{report(arms)}\n{found[2]}", text)


def figure(arms: Sequence[Arm]) -> Any:
    """For each primary arm the effect at each level with its interval and the prediction; below,
    the delivery check.

    Dotted lines mark where other settings lie by that check.
    """
    shown = [arm for arm in arms if arm.facts.get("primary")]
    canvas = new_figure(4.2 * len(shown), 5.0, "", layout="constrained")
    rows = canvas.subplots(2, len(shown), height_ratios=[3, 1], squeeze=False)
    for arm, above, below in zip(shown, *rows, strict=True):
        positions = list(range(len(arm.effects)))
        scaled = math.exp if arm.is_ratio else float
        means, lows, highs = (
            [scaled(getattr(each, end)) for each in arm.effects.values()]
            for end in ("mean", "low", "high")
        )
        unit = "\n".join(wrap(arm.facts["effect"], 45))
        frame(above, title=load(arm.experiment)["title"].partition(":")[0], unit=unit)
        above.axhline(1.0 if arm.is_ratio else 0.0, color=INK, linewidth=0.8, alpha=0.4)
        above.plot(
            positions, arm.facts["predicted"], color=ORANGE, linewidth=1.6, label="predicted"
        )
        errors = [
            [mean - low for mean, low in zip(means, lows, strict=True)],
            [high - mean for mean, high in zip(means, highs, strict=True)],
        ]
        above.errorbar(
            positions, means, yerr=errors, fmt="o", color=BLUE, capsize=3, label="measured"
        )
        above.legend(frameon=False)
        frame(below, title="", unit="")
        below.bar(positions, list(arm.delivery.values()), color=INK, alpha=0.4, width=0.5)
        checked = arm.facts["delivered"]
        below.set_title(
            f"delivery: {checked.get('text', checked['curve'])}", fontsize=8, loc="left"
        )
        marks = arm.facts.get("marks", {})
        top = below.get_ylim()[1]
        for (name, value), above_last in zip(
            sorted(marks.items(), key=lambda each: each[1]), _apart(marks, top), strict=True
        ):
            below.axhline(value, color=ORANGE, linewidth=1.0, linestyle=":")
            at = (len(positions) - 0.4, above_last)
            below.annotate(
                name,
                (at[0], value),
                at,
                color=ORANGE,
                fontsize=7,
                va="center",
                annotation_clip=False,
            )
        below.set_xlim(-0.5, len(positions) - 0.5)
        for axes in (above, below):
            axes.set_xticks(positions, [condition_of(arm.facts, level) for level in arm.effects])
        below.set_xlabel(arm.facts["condition"], color=INK)
    return canvas


def _apart(marks: Mapping[str, float], top: float) -> list[float]:
    """The heights of the labels of marks, the lowest first: their values, but far enough apart to
    be read.
    """
    heights: list[float] = []
    for value in sorted(marks.values()):
        heights.append(
            max(value, heights[-1] + 0.16 * max(top, *marks.values())) if heights else value
        )
    return heights


def main() -> None:
    """Write the page and its picture from the stored runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    arms = stored_arms()
    page.write_text(update(page.read_text(encoding="utf-8"), arms), encoding="utf-8")
    if any(arm.facts.get("primary") for arm in arms):
        save_figure(figure(arms), page.parent / PICTURE)


if __name__ == "__main__":
    main()
