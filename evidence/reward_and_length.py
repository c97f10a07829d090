"""Whether a reward of GSM8K's problems favours short responses, from the responses of a run.

    python -m evidence.reward_and_length RUN --steps 7

For each of three rewards, over the groups that it lets train: the mean product of a response's
advantage (Eq. 9) and its length, relative to the mean of its group, and the same for the number of
calculations that it writes out. Below 0, the first steps teach short responses. `pm` is one
standard error. The last row has the advantages with which the run trained, any penalty on length
among them.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean

import torch
from pyarrow.parquet import read_table

from dapo.algo.advantages import group_advantages
from dapo.algo.sampling import SignalRule, is_informative
from dapo.rewards.verifiers.gsm8k import Gsm8kVerifier, results_of
from dapo.types import Problem, Verdict

COLUMNS = [
    "group_id", "question", "answer", "fields", "response", "response_tokens", "outcome",
    "advantage",
]  # fmt: skip
MANY = 4  # calculations from which a problem is a long one
Advantages = Sequence[float] | None
"""Those of a group's responses; None where it does not train."""


@dataclass(frozen=True)
class JudgedGroup:
    """A problem's calculations, and of each response the verdict, tokens and calculations, and the
    advantage with which the run trained.
    """

    num_references: int
    verdicts: Sequence[Verdict]
    num_tokens: Sequence[int]
    num_results: Sequence[int]
    trained: Advantages = None


def judged_groups(run: Path, steps: int) -> Iterator[JudgedGroup]:
    """Judge the stored responses of a run's first steps again, with partial credit."""
    verifier = Gsm8kVerifier(partial_credit=True)
    for step in range(1, steps + 1):
        path = run / "rollouts" / f"step_{step:06}.parquet"
        groups = defaultdict(list)
        for row in read_table(path, columns=COLUMNS).to_pylist():
            groups[row["group_id"]].append(row)
        for rows in groups.values():
            fields = json.loads(rows[0]["fields"])
            problem = Problem("", rows[0]["question"], rows[0]["answer"], fields=fields)
            yield JudgedGroup(
                len(results_of(fields["answer"].rpartition("####")[0])),
                [verifier(problem, row["response"]) for row in rows],
                [row["response_tokens"] for row in rows],
                [len(results_of(row["response"])) for row in rows],
                [row["advantage"] for row in rows] if rows[0]["outcome"] == "trained" else None,
            )


def right_or_wrong(group: JudgedGroup) -> Advantages:
    """Return the advantages from the scores of Eq. 7."""
    if not is_informative(group.verdicts):
        return None
    return _advantages([1.0 if verdict.correct else -1.0 for verdict in group.verdicts])


def right_at_least_twice(group: JudgedGroup) -> Advantages:
    """Return the advantages of a group with two right responses or more."""
    num_right = sum(verdict.correct is True for verdict in group.verdicts)
    return right_or_wrong(group) if num_right >= 2 else None


def partial_credit(group: JudgedGroup) -> Advantages:
    """Return the advantages with `dynamic_sampling: {metric: score, min_spread: 0.25}`."""
    rule = SignalRule("score", min_spread=0.25)
    if not is_informative(group.verdicts, rule.metric) or not rule.is_met_by(group.verdicts):
        return None
    return _advantages([verdict.score for verdict in group.verdicts])


def as_trained(group: JudgedGroup) -> Advantages:
    """Return the run's own advantages."""
    return group.trained


def _advantages(scores: Sequence[float]) -> list[float]:
    advantages: list[float] = group_advantages(torch.tensor(scores, dtype=torch.float64)).tolist()
    return advantages


REWARDS: Sequence[Callable[[JudgedGroup], Advantages]] = (
    right_or_wrong,
    right_at_least_twice,
    partial_credit,
    as_trained,
)


def tendency(
    groups: Sequence[JudgedGroup], advantages_of: Callable[[JudgedGroup], Advantages]
) -> dict[str, float]:
    """Return the share of groups that train, of long problems in it, and the two mean products."""
    lengths: list[float] = []
    calculations: list[float] = []
    num_kept = 0
    num_long = 0
    for group in groups:
        advantages = advantages_of(group)
        if advantages is None:
            continue
        num_kept += 1
        num_long += group.num_references >= MANY
        mean_tokens = fmean(group.num_tokens)
        mean_results = fmean(group.num_results)
        for advantage, tokens, results in zip(
            advantages, group.num_tokens, group.num_results, strict=True
        ):
            lengths.append(advantage * (tokens / mean_tokens - 1))
            calculations.append(advantage * (results - mean_results))
    return {
        "kept": round(num_kept / len(groups), 2),
        "long": round(num_long / num_kept, 2),
        "length": round(fmean(lengths), 4),
        "length_pm": round(_standard_error(lengths), 4),
        "calculations": round(fmean(calculations), 3),
        "calculations_pm": round(_standard_error(calculations), 3),
    }


def _standard_error(products: Sequence[float]) -> float:
    return sqrt(sum(product**2 for product in products)) / len(products)


def main() -> None:
    """Print a row for each reward."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    groups = list(judged_groups(arguments.run, arguments.steps))
    print(json.dumps({"groups": len(groups)}))
    for advantages_of in REWARDS:
        name = advantages_of.__name__.replace("_", " ")
        print(json.dumps({"reward": name, **tendency(groups, advantages_of)}))


if __name__ == "__main__":
    main()
