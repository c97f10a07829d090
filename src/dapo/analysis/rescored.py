"""Groups that were scored again with changed options, and counts of the changes."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from dapo.analysis.stored_groups import StoredGroup
from dapo.runs.outcomes import Outcome, verdict_word
from dapo.types import Group, Verdict

EXAMPLES = 8  # number of changed verdicts, and of changed outcomes, listed with their texts; all are counted


@dataclass(frozen=True)
class RescoredGroup:
    """A stored group, and its verdicts, outcome and advantages under the changed options."""

    stored: StoredGroup
    group: Group
    outcome: Outcome
    advantages: tuple[float | None, ...]


def _verdict_key(verdict: Verdict) -> tuple[Any, ...]:
    return verdict.correct, verdict.score, verdict.error is None


def _transition(old: Verdict, new: Verdict) -> tuple[str, str]:
    """The names of both verdicts; if only the scores differ, the second is `higher score` or `lower score`."""
    before, after = (verdict_word(each.correct, each.error) for each in (old, new))
    if before == after and new.error is None and old.score != new.score:
        after = f"{after}, {'higher' if new.score > old.score else 'lower'} score"
    return before, after


@dataclass
class _ScoreTotals:
    """Totals of the stored or of the new scores, over a step or over all steps."""

    decided: int = 0
    kept: int = 0
    rewards: list[float] = field(default_factory=list)
    correct: list[bool | None] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, group: Group, outcome: Outcome) -> None:
        """Count a group; only the errors of an excess one, as in the metrics of a step."""
        self.errors.update(verdict.error for verdict in group.verdicts if verdict.error is not None)
        if outcome == "excess":
            return
        self.decided += 1
        self.kept += outcome == "trained"
        self.rewards += [reward for reward in group.rewards if reward is not None]
        self.correct += [v.correct for v in group.verdicts if v.error is None]

    def as_json(self) -> dict[str, Any]:
        return {
            "groups": self.decided,
            "kept": self.kept,
            "keep_rate": self.kept / self.decided if self.decided else None,
            "reward_mean": fmean(self.rewards) if self.rewards else None,
            "accuracy": None if set(self.correct) <= {None} else fmean(each is True for each in self.correct),
            "verifier_errors": sum(self.errors.values()),
        }


@dataclass
class _ChangeCounts:
    """The totals of both scores, and the numbers of changes."""

    old: _ScoreTotals = field(default_factory=_ScoreTotals)
    new: _ScoreTotals = field(default_factory=_ScoreTotals)
    responses: int = 0
    changed: Counter[str] = field(default_factory=Counter)
    shortfall: int = 0

    def add(self, each: RescoredGroup) -> None:
        stored, group = each.stored, each.group
        self.old.add(stored.group, stored.outcome)
        self.new.add(group, each.outcome)
        self.responses += group.size
        verdicts = zip(stored.group.verdicts, group.verdicts, strict=True)
        self.changed["outcomes"] += stored.outcome != each.outcome
        self.changed["verdicts"] += sum(_verdict_key(old) != _verdict_key(new) for old, new in verdicts)
        self.changed["rewards"] += _differing(stored.group.rewards, group.rewards)
        self.changed["advantages"] += _differing(stored.advantages, each.advantages)
        pairs = zip(stored.advantages, each.advantages, strict=True)
        self.changed["advantage_signs"] += sum((old or 0.0) * (new or 0.0) < 0 for old, new in pairs)

    def as_json(self) -> dict[str, Any]:
        names = ("outcomes", "verdicts", "rewards", "advantages", "advantage_signs")
        return {
            "responses": self.responses,
            "old": self.old.as_json(),
            "new": self.new.as_json(),
            "changed": {name: self.changed[name] for name in names},
            "shortfall_groups": self.shortfall,
        }


def _differing(old: Sequence[float | None], new: Sequence[float | None]) -> int:
    return sum(before != after for before, after in zip(old, new, strict=True))


class RescoredCounts:
    """Counts of the changes, by step and in all, with examples."""

    def __init__(self) -> None:
        self._total = _ChangeCounts()
        self._steps: list[dict[str, Any]] = []
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._verdicts: Counter[tuple[str, str]] = Counter()
        self._examples: dict[str, list[dict[str, Any]]] = {"verdicts": [], "outcomes": []}

    def add(self, step: int, groups: Iterable[RescoredGroup], *, wanted: int) -> None:
        """Count the groups of a step, whose batch is full with `wanted` groups that train."""
        counts = _ChangeCounts()
        for each in groups:
            counts.add(each)
            self._total.add(each)
            self._outcomes[each.stored.outcome, each.outcome] += 1
            if each.stored.outcome != each.outcome and "excess" not in (each.stored.outcome, each.outcome):
                self._keep("outcomes", _outcome_example(step, each))
            for i, (old, new) in enumerate(zip(each.stored.group.verdicts, each.group.verdicts, strict=True)):
                self._verdicts[_transition(old, new)] += 1
                if _verdict_key(old) != _verdict_key(new):
                    self._keep("verdicts", _verdict_example(step, each, i))
        counts.shortfall = max(0, wanted - counts.new.kept)
        self._total.shortfall += counts.shortfall
        self._steps.append({"step": step, **counts.as_json()})

    def as_json(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "total": self._total.as_json(),
            "outcomes": _table(self._outcomes, "groups"),
            "verdicts": _table(self._verdicts, "responses"),
            "errors": {
                name: [{"error": error, "responses": count} for error, count in side.errors.most_common(3)]
                for name, side in (("old", self._total.old), ("new", self._total.new))
            },
            "examples": self._examples,
        }

    def _keep(self, kind: str, example: dict[str, Any]) -> None:
        if len(self._examples[kind]) < EXAMPLES:
            self._examples[kind].append(example)


def _table(counts: Mapping[tuple[str, str], int], unit: str) -> list[dict[str, Any]]:
    """The transitions with their counts, the most frequent first."""
    rows = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [{"from": before, "to": after, unit: count} for (before, after), count in rows]


def _score(verdict: Verdict) -> float | None:
    return None if verdict.error is not None else verdict.score


def _example(step: int, each: RescoredGroup, before: str, after: str) -> dict[str, Any]:
    return {
        "step": step,
        "group": each.group.id,
        "prompt": each.stored.prompt,
        "answer": each.group.problem.answer,
        "from": before,
        "to": after,
    }


def _outcome_example(step: int, each: RescoredGroup) -> dict[str, Any]:
    return _example(step, each, each.stored.outcome, each.outcome) | {
        "old_scores": [_score(verdict) for verdict in each.stored.group.verdicts],
        "new_scores": [_score(verdict) for verdict in each.group.verdicts],
    }


def _verdict_example(step: int, each: RescoredGroup, i: int) -> dict[str, Any]:
    old, new = each.stored.group.verdicts[i], each.group.verdicts[i]
    return _example(step, each, *_transition(old, new)) | {
        "sample": i,
        "response": each.group.texts[i],
        "old_score": _score(old),
        "new_score": _score(new),
        "error": new.error,
        "old_reward": each.stored.group.rewards[i],
        "new_reward": each.group.rewards[i],
        "old_advantage": each.stored.advantages[i],
        "new_advantage": each.advantages[i],
    }
