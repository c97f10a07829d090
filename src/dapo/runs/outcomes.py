"""The outcomes of groups and the verdicts of responses: their names in metrics and tables, and
their words in messages.

Imports no torch.
"""

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

Outcome: TypeAlias = Literal[
    "trained",
    "all_correct",
    "all_wrong",
    "zero_variance",
    "filtered",
    "invalid",
    "excess",
    "aborted",
    "stale",
]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
COUNTED = OUTCOMES[:-1]
"""The outcomes that every step counts; `stale` is counted where groups are kept."""
OUTCOME_MEANINGS: Mapping[Outcome, str] = {
    "trained": "it carries a signal and trains",
    "all_correct": "all its responses are correct (Eq. 11 drops it)",
    "all_wrong": "all its responses are wrong (Eq. 11 drops it)",
    "zero_variance": (
        "all its responses have the same score, from a verifier that does not decide correct or"
        " wrong"
    ),
    "filtered": "`dynamic_sampling.filter`, `min_spread` or `mean_between` rejected it",
    "invalid": "fewer than two of its responses have a verdict",
    "excess": (
        "it was complete after the batch had closed; its problem comes again in the next step"
    ),
    "aborted": (
        "it was still being generated when the batch closed; its problem comes again in the next"
        " step"
    ),
    "stale": (
        "its first token was older than `max_staleness` when the batch closed; it began again in"
        " its place"
    ),
}
"""The outcomes of a group, as in the names `rollout/groups_OUTCOME` and in the column `outcome` of
rollouts/.
"""

DROPPED: Mapping[Outcome, str] = {
    "all_wrong": "all wrong",
    "all_correct": "all correct",
    "zero_variance": "with equal scores",
    "filtered": "refused by a filter",
    "invalid": "with fewer than two verdicts",
}
"""The outcomes of decided groups that do not train, as in messages: `3 all wrong`."""

VerdictName: TypeAlias = Literal["correct", "wrong", "score", "error"]
VERDICT_WORDS: Mapping[VerdictName, str] = {
    "correct": "correct",
    "wrong": "wrong",
    "score": "score",
    "error": "no verdict",
}
"""The verdicts on a response, as tables show them; `score` where the verifier does not decide
correct or wrong.
"""


def count_dropped(counts: Mapping[Outcome, int]) -> str:
    """Format the counts of groups that do not train, as in `3 all wrong, 1 all correct`."""
    return ", ".join(
        f"{counts[outcome]} {words}" for outcome, words in DROPPED.items() if counts.get(outcome)
    )


def verdict_name(correct: bool | None, error: str | None) -> VerdictName:
    """Return the name of a verdict."""
    if error is not None:
        return "error"
    if correct is None:
        return "score"
    if correct:
        return "correct"
    return "wrong"


def verdict_word(correct: bool | None, error: str | None) -> str:
    """Return the word that a table shows for a verdict."""
    return VERDICT_WORDS[verdict_name(correct, error)]
