"""Find duplicates: the same text up to formatting, then similar texts with the same numbers and
answer.
"""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from dapo.core.loading import require_package
from dapo.data.prepare.normalize import (
    answer_key,
    find_instruction_template,
    ngrams,
    normalize_text,
    numbers,
    words,
)
from dapo.data.sources.rows import prompt_text
from dapo.types import Problem

SHINGLE_WORDS = 3
PERMUTATIONS = 128
# false negatives weigh more: a missed pair is lost, a wrong candidate only costs a comparison
_WEIGHTS = (0.2, 0.8)


Rule: TypeAlias = Literal[
    "exact duplicate", "near duplicate", "minority answer", "conflicting answers"
]
RULES: tuple[Rule, ...] = get_args(Rule)


@dataclass(frozen=True)
class Removed:
    """A removed row, and the rule that removed it."""

    row: int  # the row number in the source, from 1
    problem: Problem
    rule: Rule
    # the row that it is a copy of; None if the answers of the copies conflict and none is kept
    kept_row: int | None
    kept: Problem | None
    similarity: float = 1.0

    def as_json(self) -> dict[str, Any]:
        """Return a line of the report, without the text if it equals that of the kept row."""
        line: dict[str, Any] = {
            "row": self.row,
            "id": self.problem.id,
            "rule": self.rule,
            "copy_of_row": self.kept_row,
            "copy_of_id": self.kept.id if self.kept else None,
            "answer": self.problem.answer,
            "source": self.problem.source,
        }
        if self.rule == "exact duplicate":
            return line
        line |= {"question": prompt_text(self.problem.prompt)}
        if self.kept:
            line |= {
                "kept_answer": self.kept.answer,
                "kept_question": prompt_text(self.kept.prompt),
            }
        return line | (
            {"similarity": round(self.similarity, 4)} if self.rule == "near duplicate" else {}
        )


@dataclass(frozen=True)
class Deduplicated:
    """The rows that are kept and the rows that are removed, both in the order of the source."""

    kept: tuple[Problem, ...]
    removed: tuple[Removed, ...]
    conflicts: int  # number of texts whose copies have different answers
    near_duplicates_kept: int
    """Number of problems kept despite similarity to an earlier one, because numbers or answer
    differ.
    """

    @property
    def by_rule(self) -> dict[Rule, int]:
        """The number of rows that each rule removed."""
        counts = Counter(removed.rule for removed in self.removed)
        return {rule: counts[rule] for rule in RULES}


def deduplicate(
    problems: Sequence[Problem],
    *,
    threshold: float | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Deduplicated:
    """Keep the first row of each problem.

    Exact duplicates have the same text except for case, whitespace, punctuation at the ends and the
    instruction around it. If their answers differ, the answer of more than half of the rows is
    kept; without a majority no row is, because the correct answer is unknown. Near duplicates have
    word 3-grams of at least `threshold` Jaccard similarity (None: not searched for), the same
    numbers and the same answer: texts that differ in those are different problems. `on_progress` is
    called with the numbers of texts compared and of texts to compare.
    """
    # by identity: readers return equal rows as one object
    objects = {id(problem): problem for problem in problems}
    texts = {key: prompt_text(problem.prompt) for key, problem in objects.items()}
    template = find_instruction_template(texts.values())
    stripped = {key: template.strip_instruction(text) for key, text in texts.items()}
    normalized = {key: normalize_text(text) for key, text in stripped.items()}
    clusters: dict[str, list[int]] = {}
    for index, problem in enumerate(problems):
        clusters.setdefault(normalized[id(problem)], []).append(index)
    removed: list[Removed] = []
    survivors: list[int] = []
    conflicts = 0
    for rows in clusters.values():
        survivor, dropped, conflicting = _resolve_duplicates(problems, rows)
        removed += dropped
        survivors += [] if survivor is None else [survivor]
        conflicts += conflicting
    survivors.sort()
    near_duplicates_kept = 0
    if threshold is not None:
        survivors, near, near_duplicates_kept = _without_near_duplicates(
            problems,
            survivors,
            [stripped[id(problems[row])] for row in survivors],
            threshold,
            on_progress,
        )
        removed += near
    removed.sort(key=lambda dropped: dropped.row)
    return Deduplicated(
        tuple(problems[index] for index in survivors),
        tuple(removed),
        conflicts,
        near_duplicates_kept,
    )


def _resolve_duplicates(
    problems: Sequence[Problem], rows: Sequence[int]
) -> tuple[int | None, list[Removed], bool]:
    """Return which row of equal texts to keep, the rows to remove, and if their answers differ."""
    if len(rows) == 1:
        return rows[0], [], False
    keys = [answer_key(problems[row].answer) for row in rows]
    answer, count = Counter(keys).most_common(1)[0]
    if 2 * count <= len(rows):
        return (
            None,
            [Removed(row + 1, problems[row], "conflicting answers", None, None) for row in rows],
            True,
        )
    kept_row = rows[keys.index(answer)]
    dropped: list[Removed] = []
    for row, key in zip(rows, keys, strict=True):
        rule: Rule = "exact duplicate" if key == answer else "minority answer"
        if row != kept_row:
            dropped += [Removed(row + 1, problems[row], rule, kept_row + 1, problems[kept_row])]
    return kept_row, dropped, count < len(rows)


def _without_near_duplicates(
    problems: Sequence[Problem],
    rows: Sequence[int],
    texts: Sequence[str],
    threshold: float,
    on_progress: Callable[[int, int], None],
) -> tuple[list[int], list[Removed], int]:
    """Return the rows to keep, their near duplicates, and the number of similar rows that are kept.

    MinHash finds candidates among the rows kept so far, whose similarity is then computed exactly.
    """
    require_package("datasketch", purpose="finding near duplicates")
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS, weights=_WEIGHTS)
    empty = MinHash(num_perm=PERMUTATIONS)
    shingles: dict[int, frozenset[tuple[str, ...]]] = {}
    contents: dict[int, tuple[list[str], str]] = {}  # numbers and answer of the rows that are kept
    removed: list[Removed] = []
    near_duplicates_kept = 0
    for done, (row, text) in enumerate(zip(rows, texts, strict=True), start=1):
        row_shingles = frozenset(ngrams(words(text), SHINGLE_WORDS))
        sketch = empty.copy()
        sketch.update_batch([" ".join(shingle).encode() for shingle in row_shingles])
        compared = [
            (jaccard(row_shingles, shingles[candidate]), candidate)
            for candidate in (index.query(sketch) if row_shingles else ())
        ]
        similar = sorted(
            (pair for pair in compared if pair[0] >= threshold),
            key=lambda pair: (-pair[0], pair[1]),
        )
        content = numbers(text), answer_key(problems[row].answer)
        same = next(
            (
                (similarity, candidate)
                for similarity, candidate in similar
                if contents[candidate] == content
            ),
            None,
        )
        if same is not None:
            removed.append(
                Removed(
                    row + 1,
                    problems[row],
                    "near duplicate",
                    same[1] + 1,
                    problems[same[1]],
                    same[0],
                )
            )
        else:
            near_duplicates_kept += bool(similar)
            shingles[row] = row_shingles
            contents[row] = content
            if row_shingles:
                index.insert(row, sketch)
        on_progress(done, len(rows))
    return list(contents), removed, near_duplicates_kept


def jaccard(left: Set[object], right: Set[object]) -> float:
    """Size of the intersection over size of the union; 1 for two empty sets."""
    return len(left & right) / len(left | right) if left or right else 1.0
