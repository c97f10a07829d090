"""What a set of problems is made of: copies, lengths, kinds of answers, sources."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dapo.data.prepare.normalize import ANSWER_TYPES, answer_type, find_instruction_template
from dapo.data.problems import unique_problems
from dapo.data.sources.rows import prompt_text
from dapo.types import Problem


def describe_problems(problems: Sequence[Problem], *, tokens: Callable[[Problem], int] | None = None) -> dict[str, Any]:
    """Counts as JSON values; lengths are of distinct problems, answers and sources of all rows.

    `tokens` tells a prompt's length as a model sees it.
    """
    unique = unique_problems(problems)
    texts = [prompt_text(problem.prompt) for problem, _ in unique]
    instruction_template = find_instruction_template(texts)
    types: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    for problem, copies in unique:
        types[answer_type(problem.answer)] += copies
    for problem in problems:
        sources[problem.source] += 1
    return {
        "rows": len(problems),
        "distinct": len(unique),
        "copies": len(problems) - len(unique),
        "max_copies": max(copies for _, copies in unique),
        "prompt_characters": summarize([len(text) for text in texts]),
        "prompt_tokens": None if tokens is None else summarize([tokens(problem) for problem, _ in unique]),
        "instruction_before": " ".join(instruction_template.prefixes[0]) if instruction_template.prefixes else None,
        "instruction_after": " ".join(instruction_template.suffixes[0]) if instruction_template.suffixes else None,
        "answer_types": {kind: types[kind] for kind in ANSWER_TYPES},
        "sources": dict(sources.most_common()),
    }


def summarize(values: Sequence[int]) -> dict[str, float]:
    """Least, median, ninth decile, most, mean."""
    array = np.asarray(values, dtype=np.float64)
    quantiles = np.quantile(array, [0.0, 0.5, 0.9, 1.0])
    return {**dict(zip(("min", "median", "p90", "max"), quantiles.tolist(), strict=True)), "mean": float(array.mean())}
