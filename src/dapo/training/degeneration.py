"""Signs of degenerate text: responses that end in a loop, or that mark several answers."""

import re
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dapo.runs.rollout_table import storable
from dapo.types import Group

ANSWER_MARK = r"(?im)\banswer\s*:|\\boxed\s*\{|####\s*-?[\d.,/]+\s*$"
"""The marks of an answer that the verifiers here read: `Answer:`, `\\boxed{`, or `####` and a number."""
MANY_ANSWERS = 3
"""Marked answers in one response that are too many: a check of an answer may well repeat it once."""
REPEATS = 4
"""Repetitions of the same tokens at the end of a response that are a loop."""
MIN_LOOP_TOKENS, MAX_PERIOD = 24, 64
"""The fewest tokens of a loop, and the most tokens of its repeated unit."""
_TEXTS_PER_SEARCH = 256


def response_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """Compute `rollout/looping_fraction` and `rollout/many_answers_fraction`; zeros are left out."""
    judged = list(groups)
    texts = [text for group in judged for text in group.texts]
    generations = [generation for group in judged for generation in group.generations]
    counts = {
        "rollout/looping_fraction": int(
            looping([generation.token_ids for generation in generations], [g.finish for g in generations]).sum()
        ),
        "rollout/many_answers_fraction": sum(
            _count_many(texts[start : start + _TEXTS_PER_SEARCH]) for start in range(0, len(texts), _TEXTS_PER_SEARCH)
        ),
    }
    return {name: count / len(generations) for name, count in counts.items() if count}


def looping(responses: Sequence[Sequence[int]], finishes: Sequence[str]) -> np.ndarray:
    """Find responses that end in REPEATS times the same tokens, the end token aside. Returns `[n]` booleans.

    Only the last REPEATS * MAX_PERIOD tokens are read, so the work does not grow with the length of responses.
    """
    width = REPEATS * MAX_PERIOD
    tails = np.full((len(responses), width), -1, dtype=np.int64)  # [n, width]
    lengths = np.zeros(len(responses), dtype=np.int64)
    for row, (response, finish) in enumerate(zip(responses, finishes, strict=True)):
        end = len(response) - (finish == "stop")
        tail = np.asarray(response[max(0, end - width) : end])
        lengths[row] = len(tail)
        if len(tail):
            tails[row, width - len(tail) :] = tail
    found = np.zeros(len(responses), dtype=bool)
    for period in range(1, MAX_PERIOD + 1):
        span = max(REPEATS * period, MIN_LOOP_TOKENS)
        rows = np.flatnonzero(~found & (lengths >= span) & (tails[:, -1] == tails[:, -1 - period]))
        if len(rows):
            tail = tails[rows, width - span :]
            found[rows] = (tail[:, period:] == tail[:, :-period]).all(axis=1)
    return found


def has_many_answers(text: str) -> bool:
    """Whether a response marks MANY_ANSWERS or more answers."""
    return len(re.findall(ANSWER_MARK, text)) >= MANY_ANSWERS


def _count_many(texts: Sequence[str]) -> int:
    marks = pc.count_substring_regex(pa.array(map(storable, texts), pa.large_string()), ANSWER_MARK)
    return int(pc.sum(pc.greater_equal(marks, MANY_ANSWERS)).as_py() or 0)
