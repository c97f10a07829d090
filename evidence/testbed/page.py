"""Writes the tables and picture of the testbed into its page: `python -m evidence.testbed.page docs/lab/when.md`."""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from dapo.runs.curves import BLUE, INK, ORANGE, frame, new_figure, save_figure
from evidence.testbed.analysis import Arm, report, stored_arms
from evidence.testbed.plan import load, of_level

MARKED = re.compile(r"(<!-- testbed -->\n).*?(<!-- testbed -->)", re.DOTALL)
PICTURE = "testbed.png"


def update(text: str, arms: Sequence[Arm]) -> str:
    """The page with the tables of the arms between its markers. Raises ValueError without markers."""
    if not MARKED.search(text):
        raise ValueError("expected a pair of lines <!-- testbed --> in the page")
    return MARKED.sub(lambda found: f"{found[1]}{report(arms)}\n{found[2]}", text)


def figure(arms: Sequence[Arm]) -> Any:
    """For each primary arm the effect at each level with its interval and the prediction; below, the delivery check.

    Dotted lines mark where other settings lie by that check.
    """
    shown = [arm for arm in arms if arm.facts.get("primary")]
    canvas = new_figure(4.2 * len(shown), 5.0, "", layout="constrained")
    rows = canvas.subplots(2, len(shown), height_ratios=[3, 1], squeeze=False)
    for arm, above, below in zip(shown, *rows, strict=True):
        positions = list(range(len(arm.effects)))
        scaled = math.exp if arm.is_ratio else float
        means, lows, highs = (
            [scaled(getattr(each, end)) for each in arm.effects.values()] for end in ("mean", "low", "high")
        )
        unit = "\n".join(wrap(arm.facts["effect"], 45))
        frame(above, title=load(arm.experiment)["title"].partition(":")[0], unit=unit)
        above.axhline(1.0 if arm.is_ratio else 0.0, color=INK, linewidth=0.8, alpha=0.4)
        above.plot(positions, arm.facts["predicted"], color=ORANGE, linewidth=1.6, label="predicted")
        errors = [
            [mean - low for mean, low in zip(means, lows, strict=True)],
            [high - mean for mean, high in zip(means, highs, strict=True)],
        ]
        above.errorbar(positions, means, yerr=errors, fmt="o", color=BLUE, capsize=3, label="measured")
        above.legend(frameon=False)
        frame(below, title="", unit="")
        below.bar(positions, list(arm.delivery.values()), color=INK, alpha=0.4, width=0.5)
        below.set_title(arm.facts["delivered"].get("text", arm.facts["delivered"]["curve"]), fontsize=8)
        for name, value in arm.facts.get("marks", {}).items():
            below.axhline(value, color=ORANGE, linewidth=1.0, linestyle=":")
            at, side = (-0.55, "left") if name == "quickstart" else (len(positions) - 0.45, "right")
            below.text(at, value, name, color=ORANGE, fontsize=7, va="bottom", ha=side)
        for axes in (above, below):
            axes.set_xticks(positions, [f"{of_level(arm.facts, level)['at']:g}" for level in arm.effects])
        below.set_xlabel(arm.facts["condition"], color=INK)
    return canvas


def main() -> None:
    """Write the page and its picture from the stored runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    page, arms = parser.parse_args().page, stored_arms()
    page.write_text(update(page.read_text(encoding="utf-8"), arms), encoding="utf-8")
    if any(arm.facts.get("primary") for arm in arms):
        save_figure(figure(arms), page.parent / PICTURE)


if __name__ == "__main__":
    main()
