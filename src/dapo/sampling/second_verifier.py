"""The audit: a second verifier judges a keyed sample of the responses that train; its verdicts
never train.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.libs.sample_intervals import difference_interval
from dapo.processes.output import WorkerOutput
from dapo.rewards.combine import Judge
from dapo.types import Group, Verdict


@dataclass(frozen=True)
class Audit:
    """A judge, and the share of responses that it audits."""

    judge: Judge
    share: float  # the fraction of the trained responses that is audited
    seed: int  # the run's seed
    # the output of the judge; None where it goes to the console
    output: WorkerOutput | None = None

    def submit(self, groups: Sequence[Group], *, step: int) -> "Callable[[], AuditedStep]":
        """Judge responses of a step's trained groups in the background; the result waits.

        The responses are sampled like their tokens, keyed by seed, step and position.
        """
        pending = []
        for group in groups:
            uniforms = keyed_uniforms(keyed_seed(self.seed, "audit", step, group.id), group.size)
            if indices := [
                i
                for i, v in enumerate(group.verdicts)
                if v.error is None and uniforms[i] < self.share
            ]:
                texts = [group.texts[i] for i in indices]
                token_ids = [group.generations[i].token_ids for i in indices]
                pending.append((group, indices, self.judge.submit(group.problem, texts, token_ids)))
        return lambda: AuditedStep(
            [
                (group, i, verdict)
                for group, indices, future in pending
                for i, verdict in zip(indices, future.result(), strict=True)
            ]
        )


@dataclass(frozen=True)
class AuditedStep:
    """The audited responses of a step: group, index in the group, and the audit's verdict."""

    responses: Sequence[tuple[Group, int, Verdict]] = ()

    def verdicts(self) -> Mapping[tuple[int, int], Verdict]:
        return {(group.id, i): verdict for group, i, verdict in self.responses}

    def metrics(self) -> dict[str, float]:
        """Compute `audit/*`. Error verdicts of the audit are counted, and are in no mean.

        The gap is between accuracies where both verifiers decide right or wrong, else between
        scores. Gap and interval are over problems, because the responses to one problem are not
        independent.
        """
        judged = [
            (group, i, verdict) for group, i, verdict in self.responses if verdict.error is None
        ]
        responses = len(self.responses)
        metrics: dict[str, float] = {
            "audit/responses": responses,
            "audit/errors": responses - len(judged),
        }
        if not judged:
            return metrics
        decides = all(
            v.correct is not None and group.verdicts[i].correct is not None
            for group, i, v in judged
        )
        by_problem: dict[str, list[float]] = {}
        for group, i, verdict in judged:
            gap = _value(group.verdicts[i], decides) - _value(verdict, decides)
            by_problem.setdefault(group.problem.id, []).append(gap)
        gaps = [fmean(problem_gaps) for problem_gaps in by_problem.values()]
        metrics |= {
            "audit/problems": len(gaps),
            "audit/mean": fmean(_value(verdict, decides) for _, _, verdict in judged),
            "audit/gap": fmean(gaps),
        }
        if (interval := difference_interval(gaps, proportions=decides)) is not None:
            metrics["audit/gap_low"], metrics["audit/gap_high"] = interval
        return metrics


def _value(verdict: Verdict, decides: bool) -> float:
    return float(verdict.correct is True) if decides else verdict.score
