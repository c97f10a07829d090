"""Tables, pictures and verdicts of stored experiments in documents: `python -m evidence.report
docs/lab/evidence.md`.

A document has pairs of equal marker lines, and the text between them is generated:

    <!-- claims: NAME ... -->     the claims of these experiments with measurement, p-value and verdict
    <!-- claims: replicated -->   the claims that were tested again on other seeds, with both measurements
    <!-- table: NAME -->          the table of an experiment, one for each condition
    <!-- grid: NAME -->           the conditions and rows of an experiment in one table
    <!-- picture: NAME -->        its curves (`differences NAME`: its differences to the baseline; `summary`)

A number in the text is followed by its source: `86.4<!-- = {experiment: ladder, row: + token-level
loss} -->` is a measure of evidence.measures, `{config: base.yaml, option: optim.lr}` an option,
`{verdict: refuted}` a count of claims. Nothing is run: everything is made from the stored files.
Pictures go to the folder `evidence` next to the document.
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dapo.analysis.ablate.experiment import ACCURACY, load_experiment
from dapo.analysis.ablate.figures import differences_figure, mean_curve, results_figure
from dapo.analysis.ablate.results import Results
from dapo.analysis.ablate.table import make_table
from dapo.config import load_config
from dapo.config.option_entries import flat_options
from dapo.runs.curves import frame, new_figure, save_figure
from dapo.runs.metric_table import metric_of
from dapo.runs.panels import BLUE, INK, ORANGE
from evidence import claims
from evidence.claims import Criterion, Judged
from evidence.measures import FOLDER, Effect, Measure, measure, parse_measure, stored

_MARKERS = re.compile(
    r"^<!-- (claims|table|grid|picture): (.+?) -->$\n(.*?)^<!-- \1: \2 -->$",
    re.MULTILINE | re.DOTALL,
)
_SOURCED = re.compile(r"(?<!\S)([(\[]*)(\S+?)<!-- = (\{.+?\}) -->")
_MARKS = {"after": "†", "after ten of the 66 runs": "‡", "after the runs of the first seed": "§"}
"""Marks of claims by when they were made."""
_PERCENT = 100
_WINDOW = (6, 20)
"""The window of the summary's first panel: that of the claims on the token-level loss."""


# --- claims


def claims_table(names: Sequence[str]) -> str:
    """The claims of some experiments with measurements and verdicts."""
    lines = ["| claim | measured | p (Holm) | verdict |", "|---|---|---|---|"]
    for claim, judged in claims.judge_all().items():
        if claim.experiment in names:
            lines.append(
                f"| {claim.text}{_made(judged)} | {_measured(judged)} | {_p_values(judged)} |"
                f" {_verdict(judged)} |"
            )
    return "\n".join(lines)


def _made(judged: Judged) -> str:
    """A mark for a claim that was not made before the runs; the document explains the marks."""
    made = judged.claim.made
    if made == "before":
        return ""
    return f" {_MARKS[made]}" if made in _MARKS else f" (*made {made}*)"


def replicated_table() -> str:
    """The claims that were tested again on other seeds: the first measurement, the second, and its
    verdict. Metrics, windows and p-values stand in the tables of the experiments.
    """
    found = claims.judge_all()
    first_of = {claim.name: judged for claim, judged in found.items() if claim.name}
    lines = ["| claim | first seeds | fresh seeds | verdict |", "|---|---|---|---|"]
    for claim, judged in found.items():
        if claim.replicates:
            first = first_of[claim.replicates]
            measured = [f"{_measured(each, named=False)}{_made(each)}" for each in (first, judged)]
            lines.append(f"| {claim.text} | {' | '.join(measured)} | {_verdict(judged)} |")
    return "\n".join(lines)


def _p_values(judged: Judged) -> str:
    if judged.p is None or judged.holm is None:
        return "none"
    return f"{_p_value(judged.p)} ({_p_value(judged.holm)})"


def _p_value(p: float) -> str:
    return "<.001" if p < 0.001 else f"{min(p, 1.0):.3f}".removeprefix("0")


def _verdict(judged: Judged) -> str:
    """The verdict, with the missed bound of delivery, or the effect that the seeds of an open claim
    could show.
    """
    claim = judged.claim
    word = judged.verdict
    if word == "not delivered":
        metric = claim.delivered.measure.metric
        if judged.acted is None:
            return f"**not delivered**: `{metric}` was not stored"
        side, bound = (
            ("above", claim.delivered.above)
            if claim.delivered.above is not None
            else ("below", None)
        )
        bound = claim.delivered.below if bound is None else bound
        scale = metric_of(metric).scale
        unit = " %" if scale == _PERCENT else ""
        return (
            f"**not delivered**: `{metric}` {scale * judged.acted:.2g}{unit}, not {side}"
            f" {scale * bound:g}{unit}"
        )
    if word.startswith("no effect beyond"):
        return f"**no effect beyond {_unit_of(claim.criteria[0], float(word.rpartition(' ')[2]))}**"
    if word != "open":
        return f"**{word}**" if word != "neither" else "**neither** confirmed nor refuted"
    size = judged.effects[0].detectable
    if size is None:
        return "open: equal in all runs"
    return f"open: {_unit_of(claim.criteria[0], size)} could be seen"


def _unit_of(criterion: Criterion, size: float) -> str:
    """The size of a difference in its unit."""
    measure = criterion.measure
    if measure.until is not None:
        return f"{size:,.0f} tokens" if measure.until.at == "tokens" else f"{size:.1f} steps"
    scale = _scale(measure)
    return f"{scale * size:.1f} points" if scale == _PERCENT else f"{size:.2g}"


def _scale(measure: Measure) -> float:
    return _PERCENT if measure.metric == ACCURACY else metric_of(measure.metric).scale


def _measured(judged: Judged, *, named: bool = True) -> str:
    """The effects of a claim, with or without the names of what is measured."""
    pairs = zip(judged.claim.criteria, judged.effects, strict=True)
    return "; ".join(_describe(criterion, effect, named=named) for criterion, effect in pairs)


def _describe(criterion: Criterion, effect: Effect, *, named: bool) -> str:
    """`accuracy +3.1 points (1.2 to 5.0), 5 seeds`; a number that is not a difference has no sign."""
    measure = criterion.measure
    is_difference = criterion.kind not in ("above", "below") or measure.than_metric is not None
    seeds = f"{effect.seeds} seed{'s' * (effect.seeds != 1)}"
    if measure.until is not None:
        bound = measure.until.above if measure.until.above is not None else measure.until.below
        name, style = ("steps", "+.1f") if measure.until.at == "step" else ("tokens", "+,.0f")
        start = f"{name} to {bound:.0%}: " if named else ""
        return f"{start}{_range(effect, style)}{'' if named else f' {name}'}, {seeds}"
    scale = _scale(measure)
    digits = 1 if scale == _PERCENT or abs(effect.mean) >= 1 else 3
    unit = ""
    if scale == _PERCENT:
        unit = " points" if is_difference else " %"
    shown = _range(effect, f"{'+' * is_difference}.{digits}f", scale, unit)
    name = "accuracy" if measure.metric == ACCURACY else f"`{measure.metric}`"
    name += f" less `{measure.than_metric}`" if measure.than_metric else ""
    first, last = measure.steps if isinstance(measure.steps, tuple) else (None, None)
    if first is None:
        window = ""
    elif first == last:
        window = f", step {first}"
    else:
        window = f", steps {first} to {last}"
    conditions = f" on {effect.conditions} base models" if measure.over else ""
    start = f"{name}{window} " if named else ""
    return f"{start}{shown}, {seeds}{conditions}"


def _range(effect: Effect, style: str, scale: float = 1.0, unit: str = "") -> str:
    mean = f"{scale * effect.mean:{style}}{unit}"
    if effect.low is None or effect.high is None:
        return mean
    return f"{mean} ({scale * effect.low:{style}} to {scale * effect.high:{style}})"


# --- tables of results


def experiment_tables(name: str) -> str:
    """For each condition, the table of a stored experiment."""
    parts = []
    for condition in make_table(stored(name)):
        title = condition["condition"]
        parts += [f"**{title}**", ""] if title else []
        parts += [*_markdown(condition, stored(name).facts["experiment"]["baseline"]), ""]
        parts += [
            line for note in condition["notes"] for line in (f"{note[0].upper()}{note[1:]}.", "")
        ]
    return "\n".join([*parts, _made_by(name)]).rstrip()


def _made_by(name: str) -> str:
    """The command that made the results, with the seeds if the file lists different ones, and its
    processor.
    """
    made_with = stored(name).facts["made_with"]
    seeds = stored(name).facts["experiment"]["seeds"]
    listed = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))["seeds"]
    chosen = "" if seeds == listed else f" --seeds {','.join(map(str, seeds))}"
    return f"`dapo ablate evidence/{name}.yaml{chosen}`; {made_with['processor']}."


def grid_tables(name: str) -> str:
    """A line for each condition of a stored experiment: accuracies and differences, then final
    metrics of the rows.
    """
    tables = make_table(stored(name))
    baseline = stored(name).facts["experiment"]["baseline"]
    variants = [row["variant"] for row in tables[0]["rows"]]
    others = [variant for variant in variants if variant != baseline]
    titles = ["", f"{baseline}, %", *(f"{variant} vs {baseline}" for variant in others)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for table in tables:
        rows = {row["variant"]: row for row in table["rows"]}
        cells = [_percent(rows[baseline]["accuracy"], signed=False)]
        cells += [_percent(rows[variant]["to_baseline"], signed=True) for variant in others]
        lines.append(f"| {table['condition']} | {' | '.join(cells)} |")
    costs = ("entropy", "length", "truncated", "steps", "seconds")
    titles = [
        f"{' / '.join(variants)}",
        *(f"{cost}, %" if cost == "truncated" else cost for cost in costs),
    ]
    lines += ["", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for table in tables:
        cells = [
            " / ".join(_cost(cost, row[cost]["mean"]) for row in table["rows"]) for cost in costs
        ]
        lines.append(f"| {table['condition']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _made_by(name)])


def _markdown(condition: Mapping[str, Any], baseline: str) -> Iterator[str]:
    """Rows with accuracies, paired differences in % and the costs of the runs.

    A difference to a row other than the baseline names that row.
    """
    rows = condition["rows"]
    shows_previous = any(row["previous"] not in (None, baseline) for row in rows)
    columns = ["", "accuracy, %", *(["difference to the row named"] if shows_previous else [])]
    columns += [f"vs {baseline}"] if len(rows) > 1 else []
    costs = ("tokens", "steps", "seconds", "length", "truncated", "entropy")
    columns += [*costs[:4], "truncated, %", costs[5]]
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    before = condition["accuracy_before"]
    if before is not None:
        yield f"| before training | {100 * before['mean']:.1f} |" + " |" * (len(columns) - 2)
    for row in rows:
        cells = [row["variant"], _percent(row["accuracy"], signed=False)]
        if shows_previous:
            difference = _percent(row["to_previous"], signed=True)
            cells += [
                (
                    f"{difference} to {row['previous']}"
                    if difference and row["previous"] != baseline
                    else ""
                )
            ]
        cells += [_percent(row["to_baseline"], signed=True)] if len(rows) > 1 else []
        means = {cost: row[cost]["mean"] for cost in costs}
        cells += [_cost(cost, mean) for cost, mean in means.items()]
        yield f"| {' | '.join(cells)} |"


def _percent(found: Mapping[str, Any] | None, *, signed: bool) -> str:
    if found is None:
        return ""
    sign = "+" if signed else ""
    if found["low"] is None:
        return f"{100 * found['mean']:{sign}.1f}"
    star = " *" if signed and not found["low"] <= 0 <= found["high"] else ""
    return (
        f"{100 * found['mean']:{sign}.1f} ({100 * found['low']:{sign}.1f} to"
        f" {100 * found['high']:{sign}.1f}){star}"
    )


def _cost(name: str, mean: float | None) -> str:
    if mean is None:
        return ""
    if name == "entropy":
        return f"{mean:.3f}"
    if name in ("truncated", "length"):
        return f"{100 * mean:.1f}" if name == "truncated" else f"{mean:.1f}"
    return f"{mean:,.0f}"


# --- pictures


def picture(name: str, folder: Path, *, writes: bool) -> str:
    """The link to a picture of an experiment, which is drawn into a folder on demand."""
    kind, _, of = name.rpartition(" ")
    file = f"{of}-differences.png" if kind else f"{of}.png"
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        figure = summary_figure() if of == "summary" else _figure(of, differences=bool(kind))
        save_figure(figure, folder / file)
    return f"![{name}]({folder.name}/{file})"


def _figure(name: str, *, differences: bool) -> Any:
    """The curves of a stored experiment, with the panels that its file lists now, or its
    differences.
    """
    facts = stored(name).facts
    plots = [asdict(panel) for panel in load_experiment(FOLDER / f"{name}.yaml").panels]
    results = Results({**facts, "experiment": {**facts["experiment"], "plots": plots}})
    return (
        differences_figure(results)
        if differences
        else results_figure(results, results.conditions[0])
    )


def summary_figure() -> Any:
    """The picture at the top: the token-level loss acts early; dynamic sampling leads per step and
    not per token.
    """
    figure = new_figure(15.0, 4.4, "", layout="constrained")
    panels = figure.subplots(1, 3)
    early = (
        "ladder",
        "rollout/truncated_fraction",
        {"loss per sequence": "+ soft overlong punishment", "loss per token": "+ token-level loss"},
    )
    whole = ("replication", ACCURACY, {"naive GRPO": "naive GRPO", "DAPO": "DAPO"})
    titles = (
        "Token-level loss: cut off, % of responses",
        "DAPO leads at equal steps ...",
        "... no lead is seen at equal tokens",
    )
    for axes, title, at, (name, metric, rows) in zip(
        panels, titles, ("step", "step", "tokens"), (early, whole, whole), strict=True
    ):
        frame(axes, title=title, unit="%" if name == "ladder" else "correct (%)")
        for (label, row), colour in zip(rows.items(), (BLUE, ORANGE), strict=True):
            curves = [_points(run["curve"], at, metric) for run in stored(name).runs("", row)]
            if name == "ladder":
                curves = [(x[x <= 40], y[x <= 40]) for x, y in curves]
            grid, mean, low, high = mean_curve(curves, is_by_step=at == "step")
            axes.fill_between(
                grid,
                _PERCENT * np.clip(low, 0, 1),
                _PERCENT * np.clip(high, 0, 1),
                color=colour,
                alpha=0.15,
            )
            axes.plot(grid, _PERCENT * mean, color=colour, linewidth=1.8, label=label)
        axes.set_xlabel("training step" if at == "step" else "generated tokens", color=INK)
        axes.legend(frameon=False)
    panels[0].axvspan(_WINDOW[0] - 0.5, _WINDOW[1] + 0.5, color=INK, alpha=0.08, linewidth=0)
    panels[1].axvline(60, color=INK, alpha=0.4, linewidth=1)
    return figure


def _points(curve: Mapping[str, Sequence[Any]], at: str, metric: str) -> Any:
    points = [(x, y) for x, y in zip(curve[at], curve[metric], strict=True) if y is not None]
    return np.array([x for x, _ in points], float), np.array([y for _, y in points], float)


# --- documents


def number(source: Mapping[str, Any]) -> str:
    """The number that a source describes."""
    given = dict(source)
    style = given.pop("show", None)
    if "verdict" in given:
        return str(
            sum(judged.verdict == given["verdict"] for judged in claims.judge_all().values())
        )
    if "config" in given:
        value = flat_options(load_config(FOLDER / given["config"]))[given["option"]]
        return format(value, style or "")
    name = given.pop("experiment")
    if "table" in given:
        rows = {row["variant"]: row for row in make_table(stored(name))[0]["rows"]}
        return _cost(given["table"], rows[given["row"]][given["table"]]["mean"])
    wanted = parse_measure(given)
    value = _scale(wanted) * measure(wanted, stored(name)).mean
    return format(value, style or (".1f" if _scale(wanted) == _PERCENT else ".3g"))


def fill(text: str, pictures: Path, *, with_pictures: bool = True) -> str:
    """A document with new blocks between its markers and new numbers; pictures are written into a
    folder.
    """

    def block(match: re.Match[str]) -> str:
        kind = match[1]
        names = match[2]
        if kind == "picture":
            body = picture(names, pictures, writes=with_pictures)
        elif kind == "claims":
            body = replicated_table() if names == "replicated" else claims_table(names.split())
        else:
            body = (grid_tables if kind == "grid" else experiment_tables)(names)
        marker = f"<!-- {kind}: {names} -->"
        return f"{marker}\n{body}\n{marker}"

    def sourced(match: re.Match[str]) -> str:
        return f"{match[1]}{number(yaml.safe_load(match[3]))}<!-- = {match[3]} -->"

    return _SOURCED.sub(sourced, _MARKERS.sub(block, text))


def main() -> None:
    """Fill in the documents that the command names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("documents", nargs="+", type=Path)
    for document in parser.parse_args().documents:
        before = document.read_text(encoding="utf-8")
        document.write_text(fill(before, document.parent / "evidence"), encoding="utf-8")
        print(
            f"{document}: {len(_MARKERS.findall(before))} blocks, {len(_SOURCED.findall(before))}"
            " numbers"
        )


if __name__ == "__main__":
    main()
