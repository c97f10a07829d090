"""Whether a reward of GSM8K's problems favours short responses, from the responses of a run.

    python -m evidence.reward_and_length RUN --steps 7

For each of three rewards, over the groups that it lets train: the mean product of a response's
advantage (Eq. 9) and its length, relative to the mean of its group, and the same for the number of
calculations that it writes out. Below 0, the first steps teach short responses. `pm` is one
standard error.
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

COLUMNS = ["group_id", "question", "answer", "fields", "response", "response_tokens"]
MANY = 4  # calculations from which a problem is a long one
Rule = Callable[[Sequence[Verdict]], bool]


@dataclass(frozen=True)
class JudgedGroup:
    """A problem's calculations, and of each response the verdict, tokens and calculations."""

    num_references: int
    verdicts: Sequence[Verdict]
    num_tokens: Sequence[int]
    num_results: Sequence[int]


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
            )


def right_or_wrong(verdicts: Sequence[Verdict]) -> list[float]:
    """Return the scores of Eq. 7."""
    return [1.0 if verdict.correct else -1.0 for verdict in verdicts]


def with_credit(verdicts: Sequence[Verdict]) -> list[float]:
    """Return the scores with partial credit."""
    return [verdict.score for verdict in verdicts]


def at_least_twice(verdicts: Sequence[Verdict]) -> bool:
    """Whether Eq. 11 keeps a group with two right responses or more."""
    return is_informative(verdicts) and sum(verdict.correct is True for verdict in verdicts) >= 2


def by_score(verdicts: Sequence[Verdict]) -> bool:
    """Whether `dynamic_sampling: {metric: score, min_spread: 0.25}` keeps a group."""
    rule = SignalRule("score", min_spread=0.25)
    return is_informative(verdicts, rule.metric) and rule.is_met_by(verdicts)


REWARDS: dict[str, tuple[Rule, Callable[[Sequence[Verdict]], list[float]]]] = {
    "right or wrong": (is_informative, right_or_wrong),
    "right at least twice": (at_least_twice, right_or_wrong),
    "partial credit": (by_score, with_credit),
}


def tendency(
    groups: Sequence[JudgedGroup], keeps: Rule, scores: Callable[[Sequence[Verdict]], list[float]]
) -> dict[str, float]:
    """Return the share of groups that train, of long problems in it, and the two mean products."""
    lengths: list[float] = []
    calculations: list[float] = []
    kept = [group for group in groups if keeps(group.verdicts)]
    for group in kept:
        rewards = torch.tensor(scores(group.verdicts), dtype=torch.float64)
        mean_tokens = fmean(group.num_tokens)
        mean_results = fmean(group.num_results)
        for advantage, tokens, results in zip(
            group_advantages(rewards).tolist(), group.num_tokens, group.num_results, strict=True
        ):
            lengths.append(advantage * (tokens / mean_tokens - 1))
            calculations.append(advantage * (results - mean_results))
    num_long = sum(group.num_references >= MANY for group in kept)
    return {
        "kept": round(len(kept) / len(groups), 2),
        "long": round(num_long / len(kept), 2),
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
    for name, (keeps, scores) in REWARDS.items():
        print(json.dumps({"reward": name, **tendency(groups, keeps, scores)}))


if __name__ == "__main__":
    main()
