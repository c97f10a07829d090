"""The tables and the picture of the accuracy part: `python -m benchmarks.accuracy_report --results
FILE`.

A figure is one number a race: the tokens, seconds and steps until a curve crosses the target
(`benchmarks.crossing`), and its accuracy where the budget ends. Systems are compared race by race,
so what a seed has in common cancels: ratios by their geometric mean, differences by their mean,
both with Student's 95 % interval over the seeds.
"""

import argparse
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.crossing import Array, Crossing, HeldOut, find_crossing, smoothed
from benchmarks.paired.sides import Ratio
from benchmarks.report import footnotes, format_spread, markdown_rows, replace_between_markers
from dapo.libs.sample_intervals import mean_interval, student_quantile

MARKER = "<!-- accuracy -->"
LABELS = {"ours": "ours", "all_groups": "ours without dynamic sampling", "trl": "TRL"}
COLOURS = {"ours": "#2563eb", "all_groups": "#16a34a", "trl": "#ea580c"}
OPPONENT = "trl"
BANDWIDTH = 4
"""Bandwidth of the smoothing, in distances between evaluations."""
INK = "#334155"
GRID = "#e2e8f0"


@dataclass(frozen=True)
class Curve:
    """A leg as the report reads it: what was measured, and where it crosses the target."""

    system: str
    seed: int
    tokens: Array
    """Tokens generated before each evaluation; the next two are per evaluation as well."""
    seconds: Array
    accuracy: Array
    intervals: list[tuple[float, float]]
    by_step: dict[str, Array]
    """Tokens and seconds after each step, from 0 on."""
    crossing: Crossing
    """In tokens."""
    bandwidth: float

    @classmethod
    def of(cls, leg: Mapping[str, Any], held_out: HeldOut, target: float, every: float) -> "Curve":
        """The curve of a leg of the results file."""
        evaluations = leg["evaluations"]
        bandwidth = BANDWIDTH * every
        rates = np.array([held_out.rates(found["right"]) for found in evaluations])
        means = [held_out.accuracy(row) for row in rates]
        tokens = np.array([float(found["tokens"]) for found in evaluations])
        cumulative = {
            name: np.concatenate([[0.0], np.cumsum([step[name] for step in leg["steps"]])])
            for name in ("tokens", "seconds")
        }
        return cls(
            system=leg["system"],
            seed=leg["seed"],
            tokens=tokens,
            seconds=np.array([float(found["seconds"]) for found in evaluations]),
            accuracy=np.array([mean for mean, _, _ in means]),
            intervals=[(low, high) for _, low, high in means],
            by_step=cumulative,
            crossing=find_crossing(tokens, rates, held_out, target=target, bandwidth=bandwidth),
            bandwidth=bandwidth,
        )

    def at_crossing(self, unit: str) -> float:
        """Tokens, seconds or steps until the target; until the end where it was not reached."""
        tokens = min(self.crossing.at, float(self.by_step["tokens"][-1]))
        if unit == "tokens":
            return tokens
        counted = (
            self.by_step["seconds"]
            if unit == "s"
            else np.arange(len(self.by_step["tokens"]), dtype=float)
        )
        return float(np.interp(tokens, self.by_step["tokens"], counted))

    def accuracy_after(self, tokens: float) -> float:
        """The smoothed accuracy at a number of generated tokens."""
        return float(smoothed(self.tokens, self.accuracy, np.array([tokens]), self.bandwidth)[0])

    def accuracy_after_seconds(self, seconds: float) -> float:
        """The smoothed accuracy after so long a training."""
        return self.accuracy_after(
            float(np.interp(seconds, self.by_step["seconds"], self.by_step["tokens"]))
        )

    def interval_in_steps(self) -> tuple[float, float]:
        """Between which steps the crossing lies (95 %); infinity where the upper end was not
        reached.
        """
        steps = np.arange(len(self.by_step["tokens"]), dtype=float)
        ends = [
            float(np.interp(end, self.by_step["tokens"], steps))
            for end in (self.crossing.low, self.crossing.high)
        ]
        return ends[0], ends[1] if math.isfinite(self.crossing.high) else math.inf


def curves_of(part: Mapping[str, Any]) -> list[Curve]:
    """The curves of the accuracy part, by seed, ours first."""
    held_out = HeldOut.from_json(part["held_out"])
    every = part["design"]["evaluate_every"]
    curves = [Curve.of(leg, held_out, part["target"], every) for leg in part["legs"]]
    return sorted(curves, key=lambda curve: (curve.seed, list(LABELS).index(curve.system)))


def figures(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokens and seconds to the target in each race in which ours and TRL's ran, for the table of
    `make bench`.
    """
    curves = curves_of(part)
    systems = [system for system in _systems(curves) if system in ("ours", OPPONENT)]
    seeds = [
        seed for seed in _seeds(curves) if all(_find(curves, seed, system) for system in systems)
    ]
    found = []
    for name, unit in (("training", "s"), ("generated", "tokens")):
        for system in systems:
            own = [curve for curve in curves if curve.system == system and curve.seed in seeds]
            if own:
                found.append(
                    {
                        "name": f"{name} until {part['target']:.0%} of held-out problems are right",
                        "system": system,
                        "unit": unit,
                        "better": "lower",
                        "values": [curve.at_crossing(unit) for curve in own],
                        "unfinished": any(not curve.crossing.reached for curve in own),
                    }
                )
    return found


def comparison_rows(part: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The header, then a row for each figure: each system's median and range, and how it compares
    with TRL's.
    """
    curves = curves_of(part)
    systems = _systems(curves)
    target = part["target"]
    budget = float(part["design"]["token_budget"])
    others = [system for system in systems if system != OPPONENT] if OPPONENT in systems else []
    header = ("measured", *(LABELS[name] for name in systems))
    rows = [
        (
            *header,
            *(f"{LABELS[name]} against {LABELS[OPPONENT]} (95 % interval)" for name in others),
        )
    ]
    for unit in ("tokens", "s", "steps"):
        cells = [_crossing_cell(curves, system, unit) for system in systems]
        compared = [_ratio_cell(curves, system, unit) for system in others]
        label = {"tokens": "generated tokens", "s": "seconds of training", "steps": "steps"}[unit]
        rows.append((f"{label} until {target:.0%}", *cells, *compared))
    # a time at which every system was training: the shortest budget of all
    seconds = min(float(curve.by_step["seconds"][-1]) for curve in curves)
    for label, at in (
        (
            f"accuracy after {budget:,.0f} generated tokens",
            lambda curve: curve.accuracy_after(budget),
        ),
        (
            f"accuracy after {seconds:.0f} s of training",
            lambda curve: curve.accuracy_after_seconds(seconds),
        ),
    ):
        cells = [
            _accuracy_cell([at(curve) for curve in curves if curve.system == system])
            for system in systems
        ]
        pairs = [_pairs(curves, system) for system in others]
        compared = [_difference_cell([at(a) - at(b) for a, b in found]) for found in pairs]
        rows.append((label, *cells, *compared))
    for label, per in (("seconds a step", "seconds"), ("generated tokens a step", "tokens")):
        means = {
            system: [
                curve.by_step[per][-1] / (len(curve.by_step[per]) - 1)
                for curve in curves
                if curve.system == system
            ]
            for system in systems
        }
        cells = [format_spread(means[system]) for system in systems]
        rows.append(
            (
                label,
                *cells,
                *(_format_ratio(_paired_means(curves, system, per)) for system in others),
            )
        )
    return rows


def race_rows(part: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The header, then a row a leg: the crossing with its 95 % interval, and the last
    evaluation.
    """
    rows = [
        (
            "seed",
            "system",
            f"tokens until {part['target']:.0%} (95 %)",
            "step (95 %)",
            "s",
            "last evaluation (95 %)",
        )
    ]
    for curve in curves_of(part):
        (low, high), (first, last) = curve.interval_in_steps(), curve.intervals[-1]
        tokens = [curve.crossing.low, curve.crossing.high]
        beyond = f"beyond {curve.by_step['tokens'][-1]:,.0f}"
        reached = curve.crossing.reached
        rows.append(
            (
                str(curve.seed),
                LABELS[curve.system],
                (f"{curve.crossing.at:,.0f}" if reached else beyond)
                + f" ({_range(tokens, ',.0f')})",
                (f"{curve.at_crossing('steps'):.1f}" if reached else "")
                + f" ({_range([low, high], '.1f')})",
                (
                    f"{curve.at_crossing('s'):.0f}"
                    if reached
                    else f"beyond {curve.by_step['seconds'][-1]:.0f}"
                ),
                f"{curve.accuracy[-1]:.3f} ({first:.3f} to {last:.3f})",
            )
        )
    return rows


def notes(part: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    """Notes below the numbers: problems, duration of evaluations, machine and versions."""
    held_out = HeldOut.from_json(part["held_out"])
    asked = [
        f"{count} of {task} x {held_out.samples[task]}" for task, count in held_out.problems.items()
    ]
    shares = [f"{task} {share:.2f}" for task, share in held_out.shares.items()]
    # the base model is evaluated once a race
    evaluations = [found for leg in part["legs"] for found in leg["evaluations"] if found["step"]]
    cost = [found["evaluation_s"] for found in evaluations]
    widths = [high - low for curve in curves_of(part) for low, high in [curve.interval_in_steps()]]
    within = sum(width <= 2.0 for width in widths)
    return [
        (
            f"{sum(held_out.problems.values())} held-out problems ({', '.join(asked)} responses),"
            f" weighted as in the quickstart's own evaluation ({', '.join(shares)});"
            f" {len(evaluations)} evaluations of trained weights by `transformers.generate`,"
            f" {_number_of(evaluations)} responses and {format_spread(cost)} s each, not in the"
            " seconds."
        ),
        (
            f"Crossings: local quadratic regression over {BANDWIDTH} distances of evaluations to"
            f" each side, their intervals those of other problems; {within} of {len(widths)} are at"
            " most a step to each side."
        ),
        *footnotes(
            {"machine": results["machine"], "parts": {"accuracy": results["parts"]["accuracy"]}}
        ),
    ]


def document(results: Mapping[str, Any]) -> str:
    """Both tables and the notes as Markdown."""
    part = results["parts"]["accuracy"]
    head, *rows = comparison_rows(part)
    races_head, *races = race_rows(part)
    tables = [*markdown_rows(head, rows), "", *markdown_rows(races_head, races)]
    return "\n".join([*tables, "", *notes(part, results)])


def plot(path: Path, part: Mapping[str, Any]) -> Path:
    """Write the picture: accuracy against tokens and against seconds, a thin line a seed, the mean
    of a system bold.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = curves_of(part)
    figure = Figure(figsize=(11, 4.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, unit in zip(panels, ("tokens", "seconds"), strict=True):
        for system in _systems(curves):
            _draw(axes, [curve for curve in curves if curve.system == system], unit)
        axes.axhline(100 * part["target"], color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.grid(True, color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelcolor=INK, labelsize=9)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panels[0].set_xlabel("generated tokens, discarded ones included", color=INK)
    panels[1].set_xlabel("seconds of training", color=INK)
    panels[0].set_ylabel("held-out problems right (%)", color=INK)
    panels[0].set_ylim(0, 100)
    panels[1].legend(frameon=False, loc="lower right", fontsize=9)
    seeds = len(_seeds(curves))
    figure.suptitle(
        f"The quickstart, {seeds} {'seed' if seeds == 1 else 'seeds'}: bold the mean, shaded its 95"
        " % interval",
        x=0.01,
        ha="left",
        fontsize=11,
        fontweight="bold",
        color=INK,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _draw(axes: Any, curves: Sequence[Curve], unit: str) -> None:
    """A system's curves; their mean goes as far as the shortest of them."""
    colour = COLOURS[curves[0].system]
    label = LABELS[curves[0].system]
    sizes = [curve.tokens if unit == "tokens" else curve.seconds for curve in curves]
    for x, curve in zip(sizes, curves, strict=True):
        axes.plot(x, 100 * curve.accuracy, color=colour, linewidth=0.8, alpha=0.45)
    at = np.linspace(0.0, min(float(x[-1]) for x in sizes), 200)
    values = 100 * np.array(
        [np.interp(at, x, curve.accuracy) for x, curve in zip(sizes, curves, strict=True)]
    )
    mean = values.mean(axis=0)
    axes.plot(at, mean, color=colour, linewidth=2.4, label=label)
    if len(curves) > 1:
        half = (
            student_quantile(len(curves) - 1) * values.std(axis=0, ddof=1) / math.sqrt(len(curves))
        )
        axes.fill_between(at, mean - half, mean + half, color=colour, alpha=0.13, linewidth=0)


def _systems(curves: Sequence[Curve]) -> list[str]:
    return [system for system in LABELS if any(curve.system == system for curve in curves)]


def _seeds(curves: Sequence[Curve]) -> list[int]:
    return sorted({curve.seed for curve in curves})


def _find(curves: Sequence[Curve], seed: int, system: str) -> Curve | None:
    return next((curve for curve in curves if (curve.seed, curve.system) == (seed, system)), None)


def _pairs(curves: Sequence[Curve], system: str) -> list[tuple[Curve, Curve]]:
    """A system's curve and TRL's of each seed that has both."""
    both = [(_find(curves, seed, system), _find(curves, seed, OPPONENT)) for seed in _seeds(curves)]
    return [(ours, theirs) for ours, theirs in both if ours is not None and theirs is not None]


def _crossing_cell(curves: Sequence[Curve], system: str, unit: str) -> str:
    own = [curve for curve in curves if curve.system == system]
    missed = sum(not curve.crossing.reached for curve in own)
    reached = f"; {missed} of {len(own)} not reached" if missed else ""
    return (
        ("at least " if missed else "")
        + format_spread([curve.at_crossing(unit) for curve in own])
        + reached
    )


def _ratio_cell(curves: Sequence[Curve], system: str, unit: str) -> str:
    return _bounded_ratio(_pairs(curves, system), unit)


def _bounded_ratio(pairs: Sequence[tuple[Curve, Curve]], unit: str) -> str:
    """The ratio; a bound where one of the two systems missed the target in a race, and nothing
    where both did.
    """
    ours_missed = any(not ours.crossing.reached for ours, _ in pairs)
    theirs_missed = any(not theirs.crossing.reached for _, theirs in pairs)
    if not pairs or (ours_missed and theirs_missed):
        return ""
    if ours_missed:
        bound = "at least "
    elif theirs_missed:
        bound = "at most "
    else:
        bound = ""
    ratio = Ratio.of(
        [a.at_crossing(unit) for a, _ in pairs], [b.at_crossing(unit) for _, b in pairs]
    )
    return bound + _format_ratio(ratio)


def _paired_means(curves: Sequence[Curve], system: str, per: str) -> Ratio | None:
    pairs = _pairs(curves, system)
    means = [
        [curve.by_step[per][-1] / (len(curve.by_step[per]) - 1) for curve in side]
        for side in zip(*pairs, strict=True)
    ]
    return Ratio.of(means[0], means[1]) if pairs else None


def _format_ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio.mean:.2f} x" + (
        f" ({ratio.interval[0]:.2f} to {ratio.interval[1]:.2f})" if ratio.interval else ""
    )


def _accuracy_cell(values: Sequence[float]) -> str:
    spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
    return f"{float(np.median(values)):.3f}{spread}"


def _difference_cell(differences: Sequence[float]) -> str:
    if not differences:
        return ""
    interval = mean_interval(differences, proportions=False) if len(differences) > 1 else None
    spread = f" ({interval[0]:+.3f} to {interval[1]:+.3f})" if interval is not None else ""
    return f"{sum(differences) / len(differences):+.3f}{spread}"


def _range(ends: Sequence[float], format_spec: str) -> str:
    low, high = (format(end, format_spec) if math.isfinite(end) else "beyond" for end in ends)
    return f"{low} to {high}"


def _number_of(evaluations: Sequence[Mapping[str, Any]]) -> str:
    return " or ".join(str(count) for count in sorted({found["answers"] for found in evaluations}))


PILOT_SEEDS = 100
"""Seeds from here on chose the learning rates, and are in no comparison."""


def rates_table(parts: Sequence[Mapping[str, Any]]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """A header, and a row for each learning rate and system: the tokens until the target, in pilots
    and in races.
    """
    rows: list[Sequence[str]] = []
    for (rate, system), curves in sorted(
        _by_rate(parts).items(), key=lambda item: (item[0][1], float(item[0][0]))
    ):
        pilots = [curve for curve in curves if curve.seed >= PILOT_SEEDS]
        races = [curve for curve in curves if curve.seed < PILOT_SEEDS]
        cells = [_crossing_cell(own, system, "tokens") if own else "" for own in (pilots, races)]
        rows.append((rate, LABELS[system], *cells))
    return ("learning rate", "system", "tokens, pilots", "tokens, races"), rows


def rates_ratios(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each pair of rows with common races: how many times the tokens of the second the
    first takes.
    """
    found = {
        key: {c.seed: c for c in curves if c.seed < PILOT_SEEDS}
        for key, curves in _by_rate(parts).items()
    }
    lines = []
    for first, second in itertools.permutations(sorted(key for key in found if found[key]), 2):
        seeds = sorted(set(found[first]) & set(found[second]))
        if first[1] == "ours" != second[1] and len(seeds) > 1:
            ratio = _bounded_ratio(
                [(found[first][seed], found[second][seed]) for seed in seeds], "tokens"
            )
            names = [f"{LABELS[system]} at {rate}" for rate, system in (first, second)]
            lines.append(
                f"{names[0]} / {names[1]}: {ratio or 'neither is reached'}, {len(seeds)} races"
            )
    return lines


def _by_rate(parts: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Curve]]:
    """The curves by learning rate and system."""
    found: dict[tuple[str, str], list[Curve]] = {}
    for part in parts:
        # after the warm-up
        rates = {(leg["system"], leg["seed"]): leg["steps"][-1]["lr"] for leg in part["legs"]}
        for curve in curves_of(part):
            found.setdefault((f"{rates[curve.system, curve.seed]:g}", curve.system), []).append(
                curve
            )
    return found


def main() -> None:
    """Print the tables, or put them between the markers of a document; and write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "document", nargs="?", type=Path, help="a Markdown file to rewrite; none: print"
    )
    parser.add_argument(
        "--results",
        type=Path,
        nargs="+",
        required=True,
        help="what `make bench` wrote; several: races at other rates",
    )
    parser.add_argument("--picture", type=Path, help="a PNG file; none: no picture")
    arguments = parser.parse_args()
    every = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.results]
    for path, results in zip(arguments.results, every, strict=True):
        if "accuracy" not in results["parts"]:
            parser.error(f"{path} holds no accuracy part: make bench ARGS=accuracy")
    if len(every) > 1:
        parts = [results["parts"]["accuracy"] for results in every]
        print("\n".join([*markdown_rows(*rates_table(parts)), "", *rates_ratios(parts)]))
        return
    (results,) = every
    text = document(results)
    if arguments.document is not None:
        before = arguments.document.read_text(encoding="utf-8")
        arguments.document.write_text(
            replace_between_markers(before, text, marker=MARKER), encoding="utf-8"
        )
    else:
        print(text)
    if arguments.picture is not None:
        print(f"picture: {plot(arguments.picture, results['parts']['accuracy'])}")


if __name__ == "__main__":
    main()
