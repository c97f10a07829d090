"""The claims of the experiments: read from their files, measured in the stored results, and judged.

A claim is an entry of `claims` in an experiment's file. Its verdict follows from the entry and the
stored runs alone:

    not delivered       the metric of `delivered` misses its bound, or was not stored: it is not shown that the
                        technique acted, so nothing was tested
    confirmed           the value is on the expected side of the bound, p < 5 % by Holm's correction over the family
    refuted             it is on the other side, likewise; or it is not told from the bound and `otherwise` is refuted
    neither             it is on the other side, and `opposite` is neither
    no effect beyond X  it cannot be told from the bound, and its interval lies within X, `no_effect`, of 0
    open                none of these; `Effect.detectable` is the effect that these seeds would have shown
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import yaml

from dapo.analysis.ablate.results import Results
from evidence.measures import FOLDER, STORED, Effect, Measure, measure, parse_measure, stored

LEVEL = 0.05
_RISING = ("more", "grows", "above")


@dataclass(frozen=True)
class Criterion:
    """What is expected of a measure."""

    measure: Measure
    expected: str
    """more, less: than `than`; within X: of it, either way; grows, falls; above X, below X."""
    otherwise: Literal["open", "refuted"] = "open"
    """The verdict if the value cannot be told from the bound."""
    opposite: Literal["refuted", "neither"] = "refuted"
    """The verdict if the value is on the other side of the bound."""
    every_seed: bool = False
    """Whether confirmation also needs every seed's number on the expected side."""
    no_effect: float | None = None

    @property
    def kind(self) -> str:
        return self.expected.partition(" ")[0]

    @property
    def bound(self) -> float:
        """The bound of the measured number: 0 for a difference; with `within`, the largest distance
        from 0.
        """
        return float(self.expected.partition(" ")[2] or 0)


@dataclass(frozen=True)
class Delivery:
    """The bound that a metric has to meet for the technique to count as having acted."""

    measure: Measure
    above: float | None
    below: float | None

    def is_met(self, value: float) -> bool:
        return (self.above is None or value > self.above) and (
            self.below is None or value < self.below
        )


@dataclass(frozen=True)
class Claim:
    """An entry of `claims`."""

    text: str
    experiment: str
    made: str
    """`before` the experiment's runs, or `after` them, or after some of them."""
    criteria: tuple[Criterion, ...]
    """The claim holds if all of them do."""
    delivered: Delivery
    family: str
    """The claims that Holm's correction covers together: by default those of the experiment."""
    name: str = ""
    """The name by which a replication refers to this claim."""
    replicates: str = ""
    """The name of the claim that this one tests again, on other seeds."""


@dataclass(frozen=True)
class Judged:
    """A claim with its measurement and verdict."""

    claim: Claim
    effects: tuple[Effect, ...]
    acted: float | None
    """The value of the metric of `delivered`; None if it was not stored."""
    p: float | None
    holm: float | None
    """The p-value by Holm's correction."""

    @cached_property
    def verdict(self) -> str:
        if self.acted is None or not self.claim.delivered.is_met(self.acted):
            return "not delivered"
        significant = self.holm is not None and self.holm < LEVEL
        pairs = zip(self.claim.criteria, self.effects, strict=True)
        words = [decide(criterion, effect, significant) for criterion, effect in pairs]
        order = (
            "refuted",
            "neither",
            "open",
            *(word for word in words if word.startswith("no effect")),
            "confirmed",
        )
        return next(word for word in order if word in words)


def decide(criterion: Criterion, effect: Effect, significant: bool) -> str:
    """The verdict on one criterion; `significant` says whether the claim's p-value stands Holm's
    correction.
    """
    p = p_of(criterion, effect)
    bound = criterion.bound
    if p is None:
        return "open"
    if criterion.kind == "within":
        if not significant:
            return "open"
        return "confirmed" if abs(effect.mean) < bound else "refuted"
    if p >= LEVEL:
        limit, (low, high) = criterion.no_effect, (effect.low, effect.high)
        if (
            limit is not None
            and low is not None
            and high is not None
            and -limit <= low
            and high <= limit
        ):
            return f"no effect beyond {limit:g}"
        return criterion.otherwise
    if not significant:
        return "open"
    is_rising = criterion.kind in _RISING
    if (effect.mean > bound) != is_rising:
        return criterion.opposite
    holds = all((value > bound) == is_rising for value in effect.each)
    return "confirmed" if holds or not criterion.every_seed else "open"


def p_of(criterion: Criterion, effect: Effect) -> float | None:
    """The p-value of what the measurement suggests: a side of the bound; with `within`, inside or
    outside.
    """
    bound = criterion.bound
    if criterion.kind != "within":
        return effect.p_value(bound)
    # the nearest end of the range decides, from inside and from outside
    return effect.p_value(bound if effect.mean > 0 else -bound)


def adjust(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's correction: the p-values of a family, each valid over all of them."""
    found = {}
    largest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        found[name] = largest
    return found


# --- reading


@cache
def load_claims(folder: Path = FOLDER) -> tuple[Claim, ...]:
    """The claims of the experiments of a folder, in the order of the files' names."""
    found = []
    for path in sorted(folder.glob("*.yaml")):
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        found += [parse_claim(entry, path.stem) for entry in raw.get("claims", ())]
    return tuple(found)


def parse_claim(entry: Mapping[str, Any], experiment: str) -> Claim:
    """Read one entry of `claims`. Raises ValueError for an unknown key."""
    given = dict(entry)
    whole = {key: given.pop(key) for key in ("text", "made", "name", "replicates") if key in given}
    family = given.pop("family", experiment)
    acted = given.pop("delivered")
    parts = given.pop("all_of", [{}])
    criteria = tuple(_criterion({**given, **part}) for part in parts)
    first = criteria[0].measure
    shared = {"row": first.row, "condition": first.condition, "over": first.over, "steps": "all"}
    bounds = {key: acted[key] for key in ("above", "below") if key in acted}
    rest = {key: value for key, value in acted.items() if key not in bounds}
    delivery = Delivery(parse_measure({**shared, **rest}), bounds.get("above"), bounds.get("below"))
    return Claim(
        experiment=experiment, criteria=criteria, delivered=delivery, family=family, **whole
    )


def _criterion(given: dict[str, Any]) -> Criterion:
    own = {
        key: given.pop(key) for key in [field.name for field in fields(Criterion)] if key in given
    }
    found = Criterion(parse_measure(given), **own)
    return replace(found, measure=replace(found.measure, change=found.kind in ("grows", "falls")))


# --- judging


@cache
def judge_all() -> dict[Claim, Judged]:
    """Every claim about a stored experiment, judged."""
    claims = [claim for claim in load_claims() if (STORED / claim.experiment).is_dir()]
    return judge(claims, {claim.experiment: stored(claim.experiment) for claim in claims})


def judge(claims: Sequence[Claim], results: Mapping[str, Results]) -> dict[Claim, Judged]:
    """Measure claims in the results of their experiments, correct the p-values of each family, and
    judge.
    """
    measured: dict[Claim, tuple[tuple[Effect, ...], float | None, float | None]] = {}
    families: dict[str, dict[str, float]] = {}
    for number, claim in enumerate(claims):
        found = results[claim.experiment]
        effects = tuple(measure(criterion.measure, found) for criterion in claim.criteria)
        p_values = [
            p_of(criterion, effect)
            for criterion, effect in zip(claim.criteria, effects, strict=True)
        ]
        known = [p for p in p_values if p is not None]
        p = max(known) if len(known) == len(p_values) else None
        if p is not None:
            families.setdefault(claim.family, {})[str(number)] = p
        acted = claim.delivered.measure
        is_stored = any(
            acted.metric in run["curve"]
            for run in found.facts["runs"]
            if run["variant"] == acted.row
        )
        measured[claim] = (effects, measure(acted, found).mean if is_stored else None, p)
    holm = {name: p for family in families.values() for name, p in adjust(family).items()}
    return {
        claim: Judged(claim, *measured[claim], holm.get(str(number)))
        for number, claim in enumerate(claims)
    }
