"""Effect of a noisy judge on dynamic sampling and advantages: `python -m benchmarks.reward_noise`.

Groups of graded responses with a known quality, judged by quality plus seeded Gaussian noise. Half
of the groups have no signal: their responses are equally good. Decisions and advantages come from
dapo's own functions.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dapo.algo.advantages import Scale, group_advantages
from dapo.algo.sampling import SignalRule, is_informative
from dapo.core.rng import keyed_seed
from dapo.types import Verdict

THRESHOLDS = (0.0, 1.0, 2.0, 4.0, 6.0)
"""`min_spread`, in standard deviations of the judge."""
SIGNAL_SPREAD = 1.0
"""Standard deviation of quality within a group that has a signal."""


@dataclass(frozen=True)
class Judged:
    """A group's responses: how good they are, and what the judge says."""

    quality: Sequence[float]
    scores: Sequence[float]

    @property
    def has_signal(self) -> bool:
        """Do the responses differ in quality?"""
        return max(self.quality) > min(self.quality)

    @property
    def verdicts(self) -> list[Verdict]:
        """Grades: no right or wrong."""
        return [Verdict(None, score) for score in self.scores]


def groups(count: int, size: int, noise: float, seed: int) -> list[Judged]:
    """`count` groups of `size`, every second one without a signal; `noise`: the judge's standard
    deviation.
    """
    made = []
    for index in range(count):
        generator = np.random.Generator(np.random.Philox(key=keyed_seed(seed, "noise", index)))
        quality = (
            generator.normal(0.0, SIGNAL_SPREAD, size)
            if index % 2
            else np.full(size, generator.normal())
        )
        made.append(
            Judged(quality.tolist(), (quality + generator.normal(0.0, noise, size)).tolist())
        )
    return made


def kept(judged: Sequence[Judged], min_spread: float) -> list[Judged]:
    """Those that dynamic sampling trains on."""
    rule = SignalRule(min_spread=min_spread)
    return [
        group
        for group in judged
        if is_informative(group.verdicts) and rule.is_met_by(group.verdicts)
    ]


def push(judged: Sequence[Judged], scale: Scale) -> tuple[float, float]:
    """Mean |advantage| in groups without and with a signal: how hard each kind pushes the
    policy.
    """
    sizes: dict[bool, list[float]] = {False: [], True: []}
    for group in judged:
        advantages = group_advantages(torch.tensor(group.scores, dtype=torch.float64), scale=scale)
        sizes[group.has_signal].append(float(advantages.abs().mean()))
    return tuple(
        float(np.mean(sizes[kind])) if sizes[kind] else float("nan") for kind in (False, True)
    )  # type: ignore[return-value]


def agreement(judged: Sequence[Judged], scale: Scale) -> float:
    """Correlation of the advantages that train with the true ones (quality minus the group's
    mean).
    """
    found = []
    true = []
    for group in judged:
        found += group_advantages(
            torch.tensor(group.scores, dtype=torch.float64), scale=scale
        ).tolist()
        true += (np.array(group.quality) - np.mean(group.quality)).tolist()
    return float(np.corrcoef(found, true)[0, 1])


def main() -> None:
    """Print both tables as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reward_noise", description=__doc__)
    parser.add_argument("--groups", type=int, default=4000)
    parser.add_argument("--size", type=int, default=16, help="G")
    parser.add_argument("--noise", type=float, default=0.25, help="of the judge; quality has 1.0")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    judged = groups(given.groups, given.size, given.noise, given.seed)
    halves = (
        [group for group in judged if not group.has_signal],
        [group for group in judged if group.has_signal],
    )
    print(
        "| min_spread, judge's std | kept without signal | kept with signal | push without : with,"
        " std | ... none |"
    )
    print("|---|---|---|---|---|")
    for threshold in THRESHOLDS:
        trained = kept(judged, threshold * given.noise)
        shares = [len(kept(half, threshold * given.noise)) / len(half) for half in halves]
        pushes = [
            " : ".join(f"{size:.2f}" for size in push(trained, scale)) for scale in ("std", "none")
        ]
        print(f"| {threshold:g} | {shares[0]:.1%} | {shares[1]:.1%} | {pushes[0]} | {pushes[1]} |")
    print()
    print("| agreement of trained advantages with true ones | scale: std | scale: none |")
    print("|---|---|---|")
    for threshold in THRESHOLDS:
        trained = kept(judged, threshold * given.noise)
        print(
            f"| min_spread {threshold:g} | {agreement(trained, 'std'):.3f} |"
            f" {agreement(trained, 'none'):.3f} |"
        )


if __name__ == "__main__":
    main()
