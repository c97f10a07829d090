"""A batch of `dapo.session`, to inspect and to change: groups, outcomes, rewards and advantages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING

from dapo.api.result_types import table_of
from dapo.api.rollout_frames import expanded
from dapo.core.errors import DataError
from dapo.core.loading import Failure, try_call
from dapo.core.terminal import printable
from dapo.core.text import one_line, shorten
from dapo.core.verifier_limits import MAX_SCORE
from dapo.sampling.queue import Batch
from dapo.sampling.rollout_metrics import reflection_metrics
from dapo.training.step_metrics import batch_metrics, rollout_rows
from dapo.types import Group, Sample

if TYPE_CHECKING:
    import pandas as pd

Advantages = Callable[[list[float]], Sequence[float]]
"""Maps the shaped rewards of a group's judged responses to their advantages."""

SHOWN_ROWS = 10


@dataclass(frozen=True)
class CollectedBatch:
    """The training batch that `Session.collect` returns, with everything that was generated for it.

    Example:
        >>> import dapo
        >>> s = dapo.session("tiny-random", prompts_per_step=2, group_size=4, max_response_tokens=8)
        >>> batch = s.collect("builtin:sums", "dapo.rewards.examples:has_digit")
        >>> len(batch.groups), len(batch.rewards[0]), len(batch.advantages[0])
        (2, 4, 4)
        >>> batch.outcomes["trained"]
        2
        >>> s.close()
    """

    step: int
    """The step of the batch: the number of finished steps plus one."""
    batch: Batch
    samples: tuple[Sample, ...]
    """Advantage, reward, tokens and mask of each response that trains; the samples of a group are
    adjacent.
    """
    decode_prompt: Callable[[Sequence[int]], str]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups that train: problem, responses (`texts`), verdicts and rewards."""
        return self.batch.groups

    @property
    def judged(self) -> tuple[tuple[Group, str], ...]:
        """Every judged group with its outcome, such as `trained` or `all_correct`."""
        return self.batch.judged

    @property
    def outcomes(self) -> dict[str, int]:
        return {outcome: count for outcome, count in self.batch.group_counts.items() if count}

    @property
    def rewards(self) -> list[list[float]]:
        """The shaped rewards of the groups that train, except responses without a verdict."""
        return [[sample.reward for sample in samples] for samples in self._by_group()]

    @property
    def advantages(self) -> list[list[float]]:
        """The advantages of the groups that train, in the order of `rewards`."""
        return [[sample.advantage for sample in samples] for samples in self._by_group()]

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics `reward/*` and `rollout/*` that are available before the update."""
        decided = (group for group, _ in self.batch.decided)
        return batch_metrics(self.batch, self.samples) | reflection_metrics(decided)

    @property
    def rollouts(self) -> "pd.DataFrame":
        """A row per judged response, with the columns of `Run.rollouts` and the tokens."""
        rows = rollout_rows(self.batch, self.samples, self.decode_prompt, step=self.step)
        return expanded(table_of(list(rows)))

    def with_advantages(self, function: Advantages) -> "CollectedBatch":
        """Replace the advantages of Eq. 9 by `function(rewards)` for each group's shaped rewards.

        Raises DataError if the function raises, or returns a wrong count of numbers or an
        impossible one.

        Example:
            >>> def to_the_best(rewards):
            ...     return [reward - max(rewards) for reward in rewards]
            >>> batch = batch.with_advantages(to_the_best)  # doctest: +SKIP
        """
        changed: list[Sample] = []
        for samples in self._by_group():
            rewards = [sample.reward for sample in samples]
            # the lambda is called at once
            advantages = try_call(lambda: [float(value) for value in function(list(rewards))])  # noqa: B023
            if isinstance(advantages, Failure):
                raise DataError(
                    f"advantages: the function {advantages.reason} for the rewards {rewards}"
                )
            if len(advantages) != len(rewards) or not all(
                abs(value) <= MAX_SCORE for value in advantages
            ):
                raise DataError(
                    f"advantages: expected {len(rewards)} finite numbers, at most {MAX_SCORE:g} in"
                    f" size, for the rewards {rewards}, got {advantages}"
                )
            changed += [
                replace(sample, advantage=value, token_advantages=None)
                for sample, value in zip(samples, advantages, strict=True)
            ]
        return replace(self, samples=tuple(changed))

    def _by_group(self) -> list[list[Sample]]:
        return [
            list(samples)
            for _, samples in groupby(self.samples, key=lambda sample: sample.group_id)
        ]

    def _title(self) -> str:
        counts = ", ".join(
            f"{count} {name.replace('_', ' ')}" for name, count in self.outcomes.items()
        )
        responses = [verdict for group, _ in self.judged for verdict in group.verdicts]
        decided = [verdict.correct for verdict in responses if verdict.correct is not None]
        right = ""
        if decided:
            right = f", {sum(decided) / len(decided):.0%} of {len(decided)} responses correct"
        return (
            f"batch of step {self.step}: {counts}{right}, {self.batch.num_generated_tokens:,}"
            " tokens generated"
        )

    def __repr__(self) -> str:
        rows = self.groups[:SHOWN_ROWS]
        lines = [
            self._title(),
            *(f"  {_question(group, 48):50} {_rewards(group)}" for group in rows),
        ]
        if len(self.groups) > SHOWN_ROWS:
            lines.append(
                f"  and {len(self.groups) - SHOWN_ROWS} more groups; batch.rollouts has all"
                " responses"
            )
        return printable("\n".join(lines))

    def _repr_html_(self) -> str:
        """Show the batch in a notebook: counts, and a row per group, trained groups first."""
        groups = sorted(self.judged, key=lambda pair: pair[1] != "trained")
        rows = [
            _html_row("th", ("question", "outcome", "rewards", "best response", "worst response"))
        ]
        rows += [_html_row("td", _shown(group, outcome)) for group, outcome in groups[:SHOWN_ROWS]]
        remark = (
            f"<p>{len(groups) - SHOWN_ROWS} more groups; " if len(groups) > SHOWN_ROWS else "<p>"
        )
        table = f"<table>{''.join(rows)}</table>" if groups else ""
        return (
            f"<p>{escape(self._title())}</p>{table}{remark}<code>batch.rollouts</code> has every"
            " response</p>"
        )


def _shown(group: Group, outcome: str) -> tuple[str, ...]:
    judged = [
        (reward, text)
        for reward, text in zip(group.rewards, group.texts, strict=True)
        if reward is not None
    ]
    ends = ["", ""]
    if judged:
        ends = [shorten(one_line(text), 80) for _, text in (max(judged), min(judged))]
    return _question(group, 80), outcome.replace("_", " "), _rewards(group), *ends


def _rewards(group: Group) -> str:
    return " ".join("error" if reward is None else f"{reward:+.2f}" for reward in group.rewards)


def _html_row(tag: str, cells: Sequence[str]) -> str:
    style = ' style="text-align: left; vertical-align: top"'
    return f"<tr>{''.join(f'<{tag}{style}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _question(group: Group, chars: int) -> str:
    return shorten(one_line(group.problem.question), chars)
