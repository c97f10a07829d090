"""Tables, pictures and verdicts of stored experiments in documents: `python -m evidence.report docs/lab/evidence.md`.

A document has pairs of equal marker lines. Between two lines `<!-- evidence: NAME -->` comes the table of the
experiment `evidence/results/NAME`, one for each condition; between two lines `<!-- grid: NAME -->` come its conditions
and rows in one table; between two lines `<!-- claims: NAME ... -->` come the claims of `claims.yaml` that these
experiments test, with the measurement and the verdict. Pictures go to the folder `evidence` next to the document.
Nothing is run: everything is made from the stored files.
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import sqrt
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from dapo.analysis.ablate.experiment import ACCURACY, file_name
from dapo.analysis.ablate.figures import plot_results
from dapo.analysis.ablate.results import Results, read_results, steps_at_the_end
from dapo.analysis.ablate.table import make_table
from dapo.evaluation.intervals import student_quantile
from dapo.evaluation.two_way import mean_over_seeds
from dapo.runs.metric_table import metric_of

FOLDER = Path(__file__).parent
STORED = FOLDER / "results"
CLAIMS = FOLDER / "claims.yaml"
_MARKERS = re.compile(r"^<!-- (evidence|grid|claims): (.+?) -->$\n(.*?)^<!-- \1: \2 -->$", re.MULTILINE | re.DOTALL)
_PERCENT = 100
_ROWS_OF_A_PICTURE = 5
"""The number of rows, over all conditions, from which the differences between rows have a picture."""


@dataclass(frozen=True)
class Claim:
    """One row of `claims.yaml`, below the name of its experiment: the expected value of a number."""

    text: str
    experiment: str
    row: str
    expected: str
    """more, less: than the row `than`; within X: of that row, either way; grows, falls: from the first to the last
    tenth of the steps or, for an accuracy, from the first evaluation to the last; above X, below X."""
    than: str | None = None
    metric: str = ACCURACY
    condition: str = ""
    headline: bool = False
    """Whether a document's `<!-- claims: headlines -->` includes it."""
    during: str = "last"
    """The steps of a metric's mean: `last` is the last tenth, `all` all steps."""
    tokens_to: float | None = None
    """An accuracy: the claim is then about the number of generated tokens at which it is first reached, interpolated
    linearly between two evaluations."""
    at_step: int | None = None
    """The step whose evaluation counts instead of the last one; every run was evaluated after it."""

    @property
    def kind(self) -> str:
        """The first word of `expected`."""
        return self.expected.partition(" ")[0]

    @property
    def bound(self) -> float:
        """The bound of the measured number: 0 for a difference; with `within`, the largest distance from 0."""
        return float(self.expected.partition(" ")[2] or 0)


@dataclass(frozen=True)
class Finding:
    """The measurement for a claim."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    def verdict(self, claim: Claim) -> str:
        """Confirmed, refuted, or open if the interval contains the bound."""
        if claim.kind == "within" and self.low is not None and self.high is not None:
            if -claim.bound <= self.low and self.high <= claim.bound:
                return "confirmed"
            return "refuted" if self.low > claim.bound or self.high < -claim.bound else "open"
        if self.low is None or self.high is None or self.low <= claim.bound <= self.high:
            return "open"
        return "confirmed" if (self.mean > claim.bound) == (claim.kind in ("more", "grows", "above")) else "refuted"

    def seeds_needed(self, claim: Claim) -> int | None:
        """Estimate the seeds whose interval would exclude the bound, at equal mean and spread; None beyond 1,000.

        It attributes all of the spread to seeds, so it is too low if more problems are needed as well.
        """
        if self.low is None or self.high is None or self.seeds < 2:
            return None
        of_one = (self.high - self.low) / 2 / student_quantile(self.seeds - 1) * sqrt(self.seeds)
        distance = abs((abs(self.mean) if claim.kind == "within" else self.mean) - claim.bound)
        return next((n for n in range(2, 1001) if student_quantile(n - 1) * of_one / sqrt(n) < distance), None)


def load_claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims of a file, in order."""
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Claim(experiment=name, **row) for name, rows in found.items() for row in rows]


@cache
def stored(name: str) -> Results:
    """The stored results of an experiment."""
    return read_results(STORED / name)


def find(claim: Claim, results: Results) -> Finding:
    """Measure a claim in the results of an experiment.

    Raises:
        ValueError: No table has a name in the claim.
    """
    is_final = claim.tokens_to is None and claim.at_step is None
    if claim.metric == ACCURACY and claim.kind not in ("grows", "falls") and is_final:
        return _accuracy(claim, results)
    values = _by_seed(claim, claim.row, results)
    if claim.kind in ("more", "less", "within"):
        assert claim.than is not None
        other = _by_seed(claim, claim.than, results)
        numbers = [values[seed] - other[seed] for seed in sorted(values.keys() & other.keys())]
    else:
        numbers = list(values.values())
    if not numbers:
        raise ValueError(f"{claim.experiment}: no seed of the row {claim.row} has {claim.metric}")
    found = mean_over_seeds(numbers)
    mean, low, high = found["mean"], found["low"], found["high"]
    assert mean is not None
    return Finding(mean, low, high, len(numbers))


def _accuracy(claim: Claim, results: Results) -> Finding:
    """An accuracy or a difference of two from the table, with intervals over seeds and problems."""
    rows = {
        row["variant"]: row
        for table in make_table(results)
        if table["condition"] == claim.condition
        for row in table["rows"]
    }
    if claim.row not in rows:
        raise ValueError(f"{claim.experiment} has no row {claim.row} in the condition {claim.condition!r}")
    row = rows[claim.row]
    if claim.than is None:
        found = row["accuracy"]
        return Finding(found["mean"], found["low"], found["high"], found["seeds"])
    columns = {row["previous"]: "to_previous", results.facts["experiment"]["baseline"]: "to_baseline"}
    if claim.than not in columns:
        raise ValueError(
            f"{claim.experiment}: {claim.row} is compared with {' and '.join(map(str, columns))}, not with {claim.than}"
        )
    found = row[columns[claim.than]]
    return Finding(found["mean"], found["low"], found["high"], found["seeds"])


def _by_seed(claim: Claim, variant: str, results: Results) -> dict[int, float]:
    """For each seed, the metric at the end or its mean; for `grows` and `falls`, the end minus the beginning.

    With `tokens_to`, the tokens at which the accuracy reaches it; with `at_step`, the accuracy after this step.
    """
    at = "step" if claim.tokens_to is None else "tokens"
    curves = {
        run["seed"]: [
            (position, value)
            for position, value in zip(run["curve"][at], run["curve"][claim.metric], strict=True)
            if value is not None
        ]
        for run in results.runs(claim.condition, variant)
        if claim.metric in run["curve"]
    }
    if claim.tokens_to is not None:
        return {seed: _crossing(sorted(points), claim.tokens_to) for seed, points in curves.items()}
    if claim.at_step is not None:
        evaluations = {seed: dict(points) for seed, points in curves.items()}
        if any(claim.at_step not in found for found in evaluations.values()):
            raise ValueError(f"{claim.experiment}: a run of {variant} was not evaluated after step {claim.at_step}")
        return {seed: found[claim.at_step] for seed, found in evaluations.items()}
    is_evaluated = claim.metric == ACCURACY or claim.metric.startswith("eval/")
    found = {}
    for seed, points in curves.items():
        values = [value for _, value in sorted(points)]
        count = 1 if is_evaluated else steps_at_the_end(len(values))
        value = float(np.mean(values if claim.during == "all" else values[-count:]))
        changes = claim.kind in ("grows", "falls")
        found[seed] = value - float(np.mean(values[:count])) if changes else value
    return found


def _crossing(points: Sequence[tuple[int, float]], target: float) -> float:
    """The first position at which a line through points reaches the target. Raises ValueError if it never does."""
    for (start, low), (end, high) in pairwise(points):
        if low < target <= high:
            return start + (end - start) * (target - low) / (high - low)
    raise ValueError(f"a curve that ends at {points[-1][1]:g} has no position where it reaches {target:g}")


def claims_table(names: Sequence[str]) -> str:
    """The claims about some experiments, or the `headlines`, with measurements and verdicts."""
    lines = ["| claim | measured | verdict |", "|---|---|---|"]
    for claim in load_claims():
        if claim.experiment in names or (
            "headlines" in names and claim.headline and (STORED / claim.experiment).is_dir()
        ):
            found = find(claim, stored(claim.experiment))
            lines.append(f"| {claim.text} | {_describe(claim, found)} | {_verdict(claim, found)} |")
    return "\n".join(lines)


def _verdict(claim: Claim, found: Finding) -> str:
    verdict = found.verdict(claim)
    if verdict != "open":
        return f"**{verdict}**"
    needed = found.seeds_needed(claim)
    return f"open: {'more than 1,000' if needed is None else f'about {needed}'} seeds to tell"


def _describe(claim: Claim, found: Finding) -> str:
    """`+3.1 points (1.2 to 5.0), 5 seeds`; numbers that are no differences without a sign."""
    is_difference = claim.kind not in ("above", "below")
    if claim.tokens_to is not None:
        numbers = [f"{value:+,.0f}" for value in (found.mean, found.low, found.high) if value is not None]
        between = f" ({' to '.join(numbers[1:])})" if numbers[1:] else ""
        return f"tokens to {claim.tokens_to:.0%}: {numbers[0]}{between}, {found.seeds} seeds"
    scale = _PERCENT if claim.metric == ACCURACY else metric_of(claim.metric).scale
    unit = (" points" if is_difference else " %") if scale == _PERCENT else ""

    def shown(value: float) -> str:
        return _number(scale * value, is_difference, scale == _PERCENT)

    between = ""
    if found.low is not None and found.high is not None:
        between = f" ({shown(found.low)} to {shown(found.high)})"
    mean = shown(found.mean)
    name = "accuracy" if claim.metric == ACCURACY else f"`{claim.metric}`"
    seeds = f"{found.seeds} seed{'s' * (found.seeds != 1)}"
    return f"{name} {mean}{unit}{between}, {seeds}"


def _number(value: float, signed: bool, is_percent: bool) -> str:
    digits = 1 if is_percent or abs(value) >= 1 else 3
    return f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"


def experiment_tables(name: str, pictures: Path) -> str:
    """For each condition, the table of a stored experiment below its picture."""
    experiment = stored(name).facts["experiment"]
    tables = make_table(stored(name))
    parts = []
    if sum(len(table["rows"]) for table in tables) >= _ROWS_OF_A_PICTURE:
        parts += [f"![{name}: differences]({pictures.name}/{name}-differences.png)", ""]
    for condition in tables:
        title = condition["condition"]
        picture = f"{name}{f'-{file_name(title)}' if title else ''}.png"
        parts += [f"**{title}**", ""] if title else []
        parts += [f"![{name}{': ' if title else ''}{title}]({pictures.name}/{picture})", ""]
        parts += [*_markdown(condition, experiment["baseline"]), ""]
        parts += [line for note in condition["notes"] for line in (f"{note[0].upper()}{note[1:]}.", "")]
    return "\n".join([*parts, _made_by(name)]).rstrip()


def _made_by(name: str) -> str:
    """The command that made the results, with the seeds if the file lists different ones, and its processor."""
    made_with, seeds = stored(name).facts["made_with"], stored(name).facts["experiment"]["seeds"]
    listed = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))["seeds"]
    chosen = "" if seeds == listed else f" --seeds {','.join(map(str, seeds))}"
    return f"`dapo ablate evidence/{name}.yaml{chosen}`; {made_with['processor']}."


def grid_tables(name: str, pictures: Path) -> str:
    """A line for each condition of a stored experiment: accuracies and differences, then final metrics of the rows."""
    tables, baseline = make_table(stored(name)), stored(name).facts["experiment"]["baseline"]
    variants = [row["variant"] for row in tables[0]["rows"]]
    others = [variant for variant in variants if variant != baseline]
    titles = ["", f"{baseline}, %", *(f"{variant} vs {baseline}" for variant in others)]
    lines = [f"![{name}: differences]({pictures.name}/{name}-differences.png)", ""]
    lines += [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for table in tables:
        rows = {row["variant"]: row for row in table["rows"]}
        cells = [_percent(rows[baseline]["accuracy"], signed=False)]
        cells += [_percent(rows[variant]["to_baseline"], signed=True) for variant in others]
        lines.append(f"| {table['condition']} | {' | '.join(cells)} |")
    costs = ("entropy", "length", "truncated", "steps", "seconds")
    titles = [f"{' / '.join(variants)}", *(f"{cost}, %" if cost == "truncated" else cost for cost in costs)]
    lines += ["", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for table in tables:
        cells = [" / ".join(_cost(cost, row[cost]["mean"]) for row in table["rows"]) for cost in costs]
        lines.append(f"| {table['condition']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _made_by(name)])


def write_pictures(name: str, folder: Path, shown: str) -> None:
    """Draw the pictures of a stored experiment that a text shows.

    They are `NAME.png`, or `NAME-CONDITION.png` for each condition, and `NAME-differences.png`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as temporary:
        for path in plot_results(stored(name), Path(temporary)):
            own = path.name.replace("curves", name, 1).replace("differences", f"{name}-differences", 1)
            if own in shown:
                path.replace(folder / own)


def _markdown(condition: Mapping[str, Any], baseline: str) -> Iterator[str]:
    """Rows with accuracies and paired differences in %, and the cost of the runs."""
    rows = condition["rows"]
    shows_previous = any(row["previous"] not in (None, baseline) for row in rows)
    columns = ["", "accuracy, %", *(["vs row before"] if shows_previous else [])]
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
        cells += [_percent(row["to_previous"], signed=True)] if shows_previous else []
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
    return f"{100 * found['mean']:{sign}.1f} ({100 * found['low']:{sign}.1f} to {100 * found['high']:{sign}.1f}){star}"


def _cost(name: str, mean: float | None) -> str:
    if mean is None:
        return ""
    if name == "entropy":
        return f"{mean:.3f}"
    if name in ("truncated", "length"):
        return f"{100 * mean:.1f}" if name == "truncated" else f"{mean:.1f}"
    return f"{mean:,.0f}"


def fill(text: str, pictures: Path, *, with_pictures: bool = True) -> str:
    """A document with new blocks between its markers; pictures are written into a folder."""

    def made(match: re.Match[str]) -> str:
        kind, names = match[1], match[2]
        if kind == "claims":
            body = claims_table(names.split())
        else:
            body = (grid_tables if kind == "grid" else experiment_tables)(names, pictures)
            if with_pictures:
                write_pictures(names, pictures, body)
        marker = f"<!-- {kind}: {names} -->"
        return f"{marker}\n{body}\n{marker}"

    return _MARKERS.sub(made, text)


def main() -> None:
    """Fill in the documents that the command names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("documents", nargs="+", type=Path)
    for document in parser.parse_args().documents:
        before = document.read_text(encoding="utf-8")
        document.write_text(fill(before, document.parent / "evidence"), encoding="utf-8")
        print(f"{document}: {len(_MARKERS.findall(before))} tables")


if __name__ == "__main__":
    main()
