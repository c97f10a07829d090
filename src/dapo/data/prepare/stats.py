"""Statistics of a set of problems: copies, lengths, answer types, pass rates and the expected keep
rate.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from dapo.algo.chance import measured_chances
from dapo.data.prepare.normalize import (
    ANSWER_TYPES,
    answer_key,
    answer_type,
    find_instruction_template,
)
from dapo.data.problems import unique_problems
from dapo.data.sources.rows import prompt_text
from dapo.types import Problem


@dataclass(frozen=True)
class PassRate:
    """How often the responses to one problem were correct."""

    id: str
    responses: int  # responses judged correct or wrong; errors and plain scores are not counted
    correct: int
    visits: int = 1  # number of groups sampled for the problem
    last_seen: int | None = None  # training step of the newest group

    @property
    def rate(self) -> float:
        """The fraction of `responses` that is correct."""
        return self.correct / self.responses

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "pass_rate": self.rate}


def describe_problems(
    problems: Sequence[Problem], *, tokens: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Summarize a data set as JSON values.

    Lengths are of distinct problems, answer types and sources of all rows (the type of no answer is
    `none`). `tokens` maps problem ids to prompt lengths in tokens; without it `prompt_tokens` is
    None.
    """
    unique = unique_problems(problems)
    texts = [prompt_text(problem.prompt) for problem, _ in unique]
    template = find_instruction_template(texts)
    types: Counter[str] = Counter()
    for problem, copies in unique:
        kind = "none"
        if problem.answer:
            kind = answer_type(problem.answer)
        types[kind] += copies
    prompt_tokens = None
    if tokens is not None:
        prompt_tokens = summarize([tokens[problem.id] for problem, _ in unique])
    return {
        "rows": len(problems),
        "distinct": len(unique),
        "copies": len(problems) - len(unique),
        "max_copies": max(copies for _, copies in unique),
        "conflicting_answers": len(conflicting_answers(problems)),
        "prompt_characters": summarize([len(text) for text in texts]),
        "prompt_tokens": prompt_tokens,
        "instruction_before": " ".join(template.prefixes[0]) if template.prefixes else None,
        "instruction_after": " ".join(template.suffixes[0]) if template.suffixes else None,
        "answer_types": {kind: types[kind] for kind in (*ANSWER_TYPES, "none")},
        "sources": dict(Counter(problem.source for problem in problems).most_common()),
    }


def conflicting_answers(problems: Sequence[Problem]) -> dict[str, list[str]]:
    """Find the texts whose copies have different answers; equivalent answers do not conflict.

    >>> conflicting_answers([Problem("a", "1+1", "2"), Problem("b", "1+1", "3")])
    {'1+1': ['2', '3']}
    """
    answers: dict[str, dict[str, None]] = {}
    for problem, _ in unique_problems(problems):
        answers.setdefault(prompt_text(problem.prompt), {})[problem.answer] = None
    conflicts = {}
    for text, references in answers.items():
        # one text needs no key, which takes long to compute
        if len(references) == 1:
            continue
        first_by_key: dict[str, str] = {}
        for reference in references:
            first_by_key.setdefault(answer_key(reference), reference)
        if len(first_by_key) > 1:
            conflicts[text] = list(first_by_key.values())
    return conflicts


def summarize(values: Sequence[int]) -> dict[str, float]:
    """Return minimum, median, 90th percentile, maximum and mean."""
    array = np.asarray(values, dtype=np.float64)
    minimum, median, p90, maximum = np.quantile(array, [0.0, 0.5, 0.9, 1.0]).tolist()
    return {
        "min": minimum,
        "median": median,
        "p90": p90,
        "max": maximum,
        "mean": float(array.mean()),
    }


def describe_difficulty(
    data: Sequence[Problem], rates: Mapping[str, PassRate], group_size: int
) -> dict[str, Any]:
    """Return pass rates as JSON values: histogram, extremes, expected keep rate."""
    distinct = unique_problems(data)
    measured = [rates[problem.id] for problem, _ in distinct if problem.id in rates]
    num_correct = [rate.correct for rate in measured]
    num_wrong = [rate.responses - rate.correct for rate in measured]
    chances = measured_chances(num_correct, num_wrong, group_size)
    histogram = [0] * 10
    for rate in measured:
        # integer arithmetic: 3 / 10 may round to less than 0.3
        histogram[min(9, 10 * rate.correct // rate.responses)] += 1
    return {
        "problems": len(measured),
        "responses": sum(rate.responses for rate in measured),
        "mean_pass_rate": fmean(rate.rate for rate in measured) if measured else None,
        "never_correct": num_correct.count(0),
        "always_correct": num_wrong.count(0),
        "histogram": histogram,
        "group_size": group_size,
        "expected_keep_rate": fmean(chances) if chances else None,
        "unseen": len(distinct) - len(measured),
        "not_in_data": len(rates) - len(measured),
    }
