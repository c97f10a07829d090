"""The runs of `evidence/results/` as `dapo doctor` would read them: options, and a record of
metrics per step.

`results.json` keeps some curves of a run. `loss/entropy` is not among them:
`rollout/entropy_estimate`, which is equal in expectation where every group trains, takes its place.
The numbers of groups follow from the keep rate.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from benchmarks.worker_session import ROOT
from dapo.analysis.ablate.experiment import load_experiment
from dapo.config import Config
from dapo.training.rules.all_rules import active_findings
from dapo.training.rules.finding import Finding
from dapo.training.rules.history import MetricHistory

EVIDENCE = ROOT / "evidence"
LEARNED = 0.02
"""The gain in held-out accuracy from which a run has learned."""


@dataclass(frozen=True)
class StoredRun:
    """A run of an experiment."""

    name: str
    config: Config
    records: list[dict[str, Any]]
    accuracies: list[tuple[int, float]]
    """Held-out accuracy by step."""

    @property
    def is_healthy(self) -> bool:
        """Whether it has learned, and its last evaluation is no worse than the best by more than
        four in a hundred.
        """
        values = [accuracy for _, accuracy in self.accuracies]
        return values[-1] >= values[0] + LEARNED and values[-1] >= max(values) - 2 * LEARNED

    def errors(self) -> dict[str, list[int]]:
        """The steps at which each error holds, by the rule's name."""
        found: dict[str, list[int]] = {}
        for each in self.findings():
            if each.severity == "error":
                found.setdefault(each.name, []).append(each.steps[1])
        return found

    def findings(self) -> Iterator[Finding]:
        """Yield the findings of every step."""
        history = MetricHistory()
        for record in self.records:
            history.add(record)
            yield from active_findings(history, self.config)


def stored_runs(experiment: str = "*") -> Iterator[StoredRun]:
    """Yield every stored run of an experiment, or of all, that has made a step."""
    for path in sorted(EVIDENCE.glob(f"results/{experiment}/results.json")):
        stored = json.loads(path.read_text(encoding="utf-8"))
        planned_runs = load_experiment(EVIDENCE / f"{path.parent.name}.yaml")
        variants = {each.name: each for each in planned_runs.variants}
        conditions = {each.name: each for each in planned_runs.conditions}
        for run in stored["runs"]:
            if len(run["curve"]["step"]) > 1:
                planned = planned_runs.run(
                    run["seed"], conditions[run["condition"]], variants[run["variant"]]
                )
                records = list(_records(run, planned.config))
                accuracies = zip(run["curve"]["step"], run["curve"]["accuracy"], strict=True)
                known = [(step, value) for step, value in accuracies if value is not None]
                yield StoredRun(
                    f"{path.parent.name}: {planned.describe()}", planned.config, records, known
                )


def _records(run: Mapping[str, Any], config: Config) -> Iterator[dict[str, Any]]:
    curve = run["curve"]
    metrics = [name for name in curve if "/" in name]
    for at, step in enumerate(curve["step"]):
        record = {"step": step} | {
            name: curve[name][at] for name in metrics if curve[name][at] is not None
        }
        if (keep_rate := record.get("rollout/keep_rate")) is not None:
            trained = config.rollout.prompts_per_step if keep_rate else 0
            record |= {
                "rollout/groups_trained": trained,
                "rollout/groups_generated": trained / (keep_rate or 1),
            }
            accuracy = record.get("reward/accuracy", 0.5)
            record.setdefault("rollout/all_correct_fraction", (1 - keep_rate) * accuracy)
            record.setdefault("rollout/all_wrong_fraction", (1 - keep_rate) * (1 - accuracy))
        if (entropy := record.get("rollout/entropy_estimate")) is not None:
            record["loss/entropy"] = entropy
        accuracy = curve["accuracy"][at]
        if accuracy is not None:
            low, high = _wilson(accuracy, len(run["accuracies"]))
            ends = {"accuracy": accuracy, "low": low, "high": high, "truncated_fraction": 0.0}
            record |= {f"eval/held_out/{name}": value for name, value in ends.items()}
        yield record


def _wilson(fraction: float, n: int, z: float = 1.96) -> tuple[float, float]:
    middle = fraction + z**2 / (2 * n)
    scale = 1 + z**2 / n
    half = z * sqrt(fraction * (1 - fraction) / n + z**2 / (4 * n**2))
    return (middle - half) / scale, (middle + half) / scale
