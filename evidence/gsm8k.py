"""The figures of a page on GSM8K, from runs and their evaluations on the whole test set.

    python -m evidence.gsm8k runs/gsm8k            # reads runs and evaluations: evidence/gsm8k.json
    python -m evidence.gsm8k --page PAGE.md        # the page's table and picture, from that file
    python -m evidence.gsm8k --calculations removed.json      # the wrong ones in the responses of an evaluation
    python -m evidence.gsm8k --answers evals/warm.json evals/dapo-0.json     # one gained, one kept, one never solved

The folder holds `evals/NAME.json`, written by `dapo eval --output`, for `untrained`, `warm` and
each run, and the run directories `METHOD-SEED`, of which TRL's hold `training.json`. An evaluation
`METHOD-SEED_NOTE.json` is one more of the same run, such as one before its end or with another
top-p. Each is compared with the warm start's evaluation at its own temperature and top-p. The curve
of a run is the accuracy on its training problems.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dapo.evaluation.pairing import paired_difference
from examples.gsm8k_calculator import NO_VALUE, value

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "evidence/gsm8k.json"
PICTURE = ROOT / "docs/gsm8k.png"
WARM = "warm"
LABELS = {
    "untrained": "untrained",
    WARM: "after the worked solutions",
    "dapo": "DAPO",
    "cool": "DAPO, sampled at .7",
    "credit": "DAPO with partial credit, sampled at .7",
    "grpo": "GRPO",
    "every-group": "DAPO without dynamic sampling",
    "trl": "TRL's GRPOTrainer",
}
COLOURS = {
    "dapo": "C0",
    "cool": "C5",
    "credit": "C4",
    "grpo": "C1",
    "every-group": "C2",
    "trl": "C3",
}
MARKER = "<!-- gsm8k -->"
NEVER = 0.0
MOSTLY = 0.75
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_CALCULATION = re.compile(rf"((?:{_NUMBER}\s*[-+*/x]\s*)+{_NUMBER})\s*=\s*\$?({_NUMBER})")
_ROUNDING = 0.01
_TABLE = re.compile(rf"{MARKER}\n.*?{MARKER}\n", re.DOTALL)


def summarize(folder: Path) -> dict[str, Any]:
    """Return the results by name: accuracies with intervals, and what each run has cost.

    An evaluation's interval is the 95 % interval of `dapo eval`; `difference` is paired by problem
    with the warm start, sampled in the same way.
    """
    evaluations = {
        path.stem: json.loads(path.read_text("utf-8"))
        for path in sorted((folder / "evals").glob("*.json"))
    }
    starts = {
        sampling_of(evaluation): evaluation
        for name, evaluation in evaluations.items()
        if run_of(name) == WARM
    }
    kept = (
        "accuracy", "low", "high", "pass@4", "problems", "samples_per_problem", "temperature",
        "top_p",
    )  # fmt: skip
    results: dict[str, Any] = {}
    for name, evaluation in evaluations.items():
        results[name] = {key: evaluation[key] for key in kept}
        results[name]["response_tokens"] = evaluation["response_tokens_mean"]
        start = starts.get(sampling_of(evaluation))
        if start is not None and run_of(name) not in ("untrained", WARM):
            difference = paired_difference(start, evaluation)
            results[name] |= {
                "difference": difference["difference"],
                "difference_low": difference["low"],
                "difference_high": difference["high"],
            }
        run = folder / run_of(name)
        if run.is_dir():
            results[name] |= cost_of(run, evaluation.get("step"))
    return results


def run_of(name: str) -> str:
    """Return the run of an evaluation: `dapo-0` for `dapo-0_30`."""
    return name.partition("_")[0]


def sampling_of(evaluation: Mapping[str, Any]) -> tuple[float, float]:
    """Return the temperature and the top-p of an evaluation."""
    return evaluation["temperature"], evaluation["top_p"]


def cost_of(run: Path, last_step: int | None) -> dict[str, Any]:
    """Return steps, seconds, tokens and peak memory of a run, with its curve by step.

    Counts up to the evaluated step, or all of them if `last_step` is None.
    """
    training = run / "training.json"
    if training.exists():
        facts = json.loads(training.read_text("utf-8"))
        return {"steps": facts["steps"], "seconds": facts["seconds"]}
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["step"] > 0]
    if last_step is not None:
        rows = [row for row in rows if row["step"] <= last_step]

    def total(metric: str) -> float:
        return sum(row.get(metric) or 0.0 for row in rows)

    return {
        "steps": len(rows),
        "seconds": total("time/step_s"),
        # medians: a machine that stands still in a step changes a mean
        "step_s": median(row["time/step_s"] for row in rows),
        "sampled_tokens_per_s": _rate(rows, "rollout/tokens_generated", "time/generate_s"),
        "updated_tokens_per_s": _rate(rows, "rollout/tokens_in_minibatches", "time/update_s"),
        "generated_tokens": int(total("rollout/tokens_generated")),
        "peak_memory_gib": max(row["time/peak_memory_gib"] for row in rows),
        # none for supervised steps
        "curve": [round(row["reward/accuracy"], 4) for row in rows if "reward/accuracy" in row],
    }


def _rate(rows: Sequence[Mapping[str, Any]], tokens: str, seconds: str) -> float | None:
    """Return the median of the steps' tokens per second; None for a phase that no step has."""
    rates = [row[tokens] / row[seconds] for row in rows if row.get(tokens) and row.get(seconds)]
    return median(rates) if rates else None


def by_sampling(
    results: Mapping[str, Mapping[str, Any]],
) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Return the results by the words for their sampling, the freest first."""
    groups: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name in sorted(results, key=lambda name: sampling_of(results[name]), reverse=True):
        row = results[name]
        words = f"temperature {row['temperature']:g}"
        if row["top_p"] < 1:
            words += f", top-p {row['top_p']:g}"
        groups.setdefault(words, {})[name] = row
    return groups


def tables(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table for each way of sampling, under a line that names it."""
    for words, group in by_sampling(results).items():
        yield f"Sampled at {words}:"
        yield ""
        yield from table(group)
        yield ""


def table(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table: a row per evaluation, in the order of LABELS."""
    yield (
        "| | avg@4, % | less the warm start, points | pass@4, % | steps | minutes | generated tokens |"
    )
    yield "|---|---|---|--:|--:|--:|--:|"
    for name in _in_order(results):
        row = results[name]
        method, _, seed = run_of(name).rpartition("-")
        label = LABELS[method or run_of(name)] + (f", seed {seed}" if method else "")
        difference = ""
        if "difference" in row:
            difference = _interval(row, "difference", "difference_low", "difference_high", "+.1f")
        cells = [label, _interval(row, "accuracy", "low", "high", ".1f"), difference]
        cells.append(f"{100 * row['pass@4']:.1f}")
        cells.append(f"{row['steps']}" if "steps" in row else "")
        cells.append(f"{row['seconds'] / 60:.0f}" if "seconds" in row else "")
        cells.append(f"{row['generated_tokens']:,}" if row.get("generated_tokens") else "")
        yield f"| {' | '.join(cells)} |"


def cost_table(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of costs: a row per method, of its first run to its end."""
    yield "| | a step, s | sampling, tokens/s | update, tokens/s | peak memory, GiB |"
    yield "|---|--:|--:|--:|--:|"
    runs: dict[str, str] = {}
    rows: dict[str, Mapping[str, Any]] = {}
    for name in _in_order(results):
        run = run_of(name)
        label = LABELS[run.rpartition("-")[0] or run]
        # of several evaluations of a run the last one counts all its steps
        if "step_s" in results[name] and runs.setdefault(label, run) == run:
            rows[label] = results[name]
    for label, row in rows.items():
        cells = [label, f"{row['step_s']:.1f}"]
        for key in ("sampled_tokens_per_s", "updated_tokens_per_s"):
            rate = row[key]
            cells.append("" if rate is None else f"{rate:,.0f}")
        cells.append(f"{row['peak_memory_gib']:.1f}")
        yield f"| {' | '.join(cells)} |"


def _in_order(results: Mapping[str, Any]) -> Sequence[str]:
    methods = list(LABELS)

    def place(name: str) -> tuple[int, str, float]:
        run = run_of(name)
        method = run.rpartition("-")[0] or run
        return methods.index(method), run, results[name].get("seconds", 0.0)

    return sorted(results, key=place)


def _interval(row: Mapping[str, Any], value: str, low: str, high: str, form: str) -> str:
    middle, start, end = (format(100 * row[key], form) for key in (value, low, high))
    return f"{middle} ({start} to {end})"


def draw(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the points gained over the warm start, paired by problem, over minutes of rewards.

    A panel for each way of sampling the answers, with one scale.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = by_sampling(results)
    figure = Figure(figsize=(9, 3.8), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, (words, group) in zip(panels, groups.items(), strict=True):
        _draw_gains(axes, group)
        axes.set_title(words)
    panels[0].set_ylabel("points over the warm start")
    figure.savefig(path)


def _draw_gains(axes: Any, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw a line from the warm start through the evaluations of each run."""
    runs: dict[str, list[Mapping[str, Any]]] = {}
    for name in _in_order(results):
        if run_of(name).rpartition("-")[0] in COLOURS:
            runs.setdefault(run_of(name), []).append(results[name])
    labelled = set()
    for run, rows in runs.items():
        method = run.rpartition("-")[0]
        colour = COLOURS[method]
        minutes = [row["seconds"] / 60 for row in rows]
        gains = [100 * row["difference"] for row in rows]
        errors = [
            [100 * (row["difference"] - row["difference_low"]) for row in rows],
            [100 * (row["difference_high"] - row["difference"]) for row in rows],
        ]
        label = None
        if method not in labelled:
            label = LABELS[method]
            labelled.add(method)
        axes.plot([0, *minutes], [0, *gains], color=colour, label=label)
        axes.errorbar(minutes, gains, errors, color=colour, capsize=3, fmt="o", markersize=3)
    axes.axhline(0, color="grey", linestyle="--", linewidth=1)
    axes.set_xlabel("minutes of rewards")
    axes.legend(frameon=False)


def count_calculations(texts: Sequence[str]) -> tuple[int, int, int]:
    """Return the calculations that texts write out, the wrong ones, and the texts with a wrong one.

    A calculation is `20 x 2.5 = 50`: numbers, `+ - * / x` and a result, right to .01.
    """
    num_calculations = 0
    num_wrong = 0
    num_texts = 0
    for text in texts:
        num_wrong_before = num_wrong
        for expression, result in _CALCULATION.findall(text):
            right = value(expression.replace(",", "").replace("x", "*"))
            if right == NO_VALUE:
                continue
            num_calculations += 1
            num_wrong += abs(float(right) - float(result.replace(",", ""))) > _ROUNDING
        num_texts += num_wrong > num_wrong_before
    return num_calculations, num_wrong, num_texts


def answers(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield a title, the question, an answer from before, one from after and the reference.

    The problems are the first of the test set that the second model has gained, that both solve,
    and that neither solves. To gain or solve one, three quarters of the answers must be right;
    before a gain, and where it is not solved, none is.
    """
    pairs = list(zip(before["table"], after["table"], strict=True))
    kinds = (("gained", NEVER, MOSTLY), ("solved by both", MOSTLY, MOSTLY))
    for title, share_before, share_after in (*kinds, ("solved by neither", NEVER, NEVER)):
        for old, new in pairs:
            if _is_solved(old, share_before) and _is_solved(new, share_after):
                texts = (_typical_text(old), _typical_text(new))
                yield title, new["question"], *texts, new["answer"]
                break


def _is_solved(row: Mapping[str, Any], share: float) -> bool:
    if share == NEVER:
        return bool(row["accuracy"] == 0)
    return bool(row["accuracy"] >= share)


def _typical_text(row: Mapping[str, Any]) -> str:
    """The first response whose verdict is that of most."""
    is_right = row["accuracy"] >= MOSTLY
    texts = [each["text"] for each in row["responses"] if each["correct"] == is_right]
    return str(texts[0])


def write_page(page: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the tables between the page's markers."""
    text = page.read_text("utf-8")
    lines = "\n".join([*tables(results), *cost_table(results)])
    replaced, count = _TABLE.subn(f"{MARKER}\n{lines}\n{MARKER}\n", text)
    if count != 1:
        raise SystemExit(f"{page}: expected two markers {MARKER}, each on a line of its own")
    page.write_text(replaced, "utf-8")


def main() -> None:
    """Read the runs, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--calculations", type=Path, metavar="EVALUATION")
    parser.add_argument("--answers", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    arguments = parser.parse_args()
    if arguments.folder is not None:
        text = json.dumps(summarize(arguments.folder), indent=1)
        RESULTS.write_text(f"{text}\n", "utf-8")
    if arguments.calculations is not None:
        rows = json.loads(arguments.calculations.read_text("utf-8"))["table"]
        texts = [response["text"] for row in rows for response in row["responses"]]
        number, wrong, num_texts = count_calculations(texts)
        print(f"{wrong:,} of {number:,} calculations are wrong, in {num_texts:,} of {len(texts):,}")
    if arguments.answers is not None:
        before, after = (json.loads(path.read_text("utf-8")) for path in arguments.answers)
        for title, question, old, new, reference in answers(before, after):
            print(f"{title}\n> {question}\n\nbefore:\n{old}\n\nafter:\n{new}\n")
            print(f"reference: {reference}\n")
    if arguments.page is not None:
        results = json.loads(RESULTS.read_text("utf-8"))
        write_page(arguments.page, results)
        draw(results, PICTURE)


if __name__ == "__main__":
    main()
