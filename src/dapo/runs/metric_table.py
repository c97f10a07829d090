"""The table of all metrics that a run logs: unit, meaning, place in the paper, and how a step's
updates are combined.

The rows are in metrics.tsv; the console, the curves, `mean_of_updates` and docs/metrics.md read
them.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from dapo.runs.outcomes import OUTCOMES

SECTIONS = {
    "reward": "Rewards of the step's judged responses.",
    "audit": (
        "Verdicts of a second verifier (`audit.verifier`), which never trains, on a share of"
        " trained responses."
    ),
    "rollout": (
        "Responses that a step generated. `groups_*` and `tokens_*` count all of them; the other"
        " metrics, and those of `reward/`, leave out groups with outcome `excess`: none depends on"
        " the number of groups in flight."
    ),
    "loss": "The loss, and means over the tokens that train.",
    "critic": "The value function of PPO (`advantage.estimator: gae`, `dapo show docs losses`).",
    "optim": "The optimizer.",
    "time": (
        "Seconds, speed, memory and warnings, which depend on the moment. All other metrics are the"
        " same in every repetition of a run on CPUs of one kind, but with `rollout.clock: load`."
    ),
    "eval": (
        "Evaluations: before the first step, then every `train.eval_every` steps. `{data}` is the"
        " data set's name."
    ),
}


@dataclass(frozen=True)
class Phase:
    """A part of a step, which the console shows and `time/NAME_s` times."""

    meaning: str
    counts: str = ""  # the unit of its progress
    when: str = ""  # the condition under which a step has the phase; empty if every step has it
    is_logged: bool = True


# fmt: off
PHASES = {
    "load_weights": Phase("giving the policy's weights to the engine"),
    "generate": Phase("sampling and judging the batch; with `schedule: async`, of the batch that was sampled in "
                      "the background", "groups"),
    "judge_wait": Phase("waiting for verdicts with nothing left to generate, which is a part of `time/generate_s`"),
    "write_rollouts": Phase("waiting for the table of responses, which is written in the background"),
    "reference_kl": Phase("scoring the responses by the reference, for the rewards or by a server",
                          when="with `loss.kl_in: reward`"),
    "values": Phase("computing the critic's values of the batch and from them its advantages",
                    when="with `advantage.estimator: gae`"),
    "old_logprobs": Phase("computing the log-probabilities of the policy before the step's first update",
                          when="with more than one update per step, unless `loss.old_logprobs: engine`"),
    "update": Phase("the optimizer updates", "minibatches"),
    "trainer_idle": Phase("waiting for the next batch after the updates", "groups",
    when="with `schedule: async`"),
    "engine_idle": Phase("with no batch to sample, from the close of the last one on, without the evaluation",
                         when="with `schedule: async`"),
    "evaluate": Phase("evaluation", "problems", when="in steps with an evaluation"),
    "save": Phase("starting a checkpoint", is_logged=False),
}
# fmt: on


@dataclass(frozen=True)
class Metric:
    """One metric, or a family of them whose name holds {placeholders}."""

    name: str
    unit: str
    meaning: str  # A full sentence
    paper: str = ""  # the figure, table or equation of the paper that it belongs to
    over_updates: Literal[
        "", "mean", "mean over tokens", "mean over tokens at the upper clip", "sum", "max"
    ] = ""
    """How a step's optimizer updates are combined into one value; empty for a metric of the whole
    step.
    """
    when: str = ""  # the condition under which it is logged; empty if every run logs it

    @property
    def scale(self) -> float:
        """The factor of the displayed value: fractions are shown in per cent."""
        return 100.0 if self.unit == "fraction" else 1.0


def _read_table() -> Iterator[Metric]:
    lines = Path(__file__).with_name("metrics.tsv").read_text(encoding="utf-8").splitlines()
    for row in csv.DictReader(lines, delimiter="\t", restval="", quoting=csv.QUOTE_NONE):
        if row["name"] == "time/verifier_call_s":  # after the seconds of each phase
            for name, phase in PHASES.items():
                doing = f"{'on ' * (name in ('update', 'evaluate'))}{phase.meaning}"
                if phase.is_logged:
                    yield Metric(
                        f"time/{name}_s", "s", f"The seconds spent {doing}.", when=phase.when
                    )
        over_updates: Any = row["updates"]
        yield Metric(
            row["name"], row["unit"], row["meaning"], row["paper"], over_updates, row["when"]
        )


METRICS = tuple(_read_table())


@cache
def metric_of(name: str) -> Metric:
    """Return the row that describes a logged name. Raises KeyError if there is none."""
    for metric in METRICS:
        outcomes = metric.name.replace("{outcome}", f"({'|'.join(OUTCOMES)})")
        if re.fullmatch(re.sub(r"\{\w+\}", "(.+)", outcomes), name):
            return metric
    raise KeyError(f"{name} is not in the table of metrics (runs/metrics.tsv)")


def is_mean_score(metrics: Mapping[str, Any], data: str) -> bool:
    """Return True if `eval/{data}/accuracy` in a step's metrics is a mean score, not a fraction.

    Runs of older versions did not log `score_mean`; there, values outside of 0 to 1 show it.
    """
    if metrics.get(f"eval/{data}/score_mean") is not None:
        return True
    values = [metrics.get(f"eval/{data}/{name}") for name in ("accuracy", "low", "high")]
    return any(value is not None and not 0 <= value <= 1 for value in values)


def accuracy_text(value: float, *, is_score: bool) -> str:
    """Format the accuracy of an evaluation, or its mean score."""
    return f"mean score {value:.3f}" if is_score else f"{value:.1%}"
