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
        line["question"] = prompt_text(self.problem.prompt)
        if self.kept:
            line["kept_answer"] = self.kept.answer
            line["kept_question"] = prompt_text(self.kept.prompt)
        if self.rule == "near duplicate":
            line["similarity"] = round(self.similarity, 4)
        return line


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
    similar word 3-grams, the same numbers and the same answer: texts that differ in those are
    different problems.

    Args:
        problems: the rows of a data set.
        threshold: the Jaccard similarity from which texts are near duplicates; None: they are not
            searched for.
        on_progress: called with the numbers of texts compared and of texts to compare.
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
        survivor, copies, conflicting = _resolve_duplicates(problems, rows)
        removed += copies
        conflicts += conflicting
        if survivor is not None:
            survivors.append(survivor)
    survivors.sort()
    near_duplicates_kept = 0
    if threshold is not None:
        remaining_texts = [stripped[id(problems[row])] for row in survivors]
        survivors, near_duplicates, near_duplicates_kept = _without_near_duplicates(
            problems, survivors, remaining_texts, threshold, on_progress
        )
        removed += near_duplicates
    removed.sort(key=lambda entry: entry.row)
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
    removed: list[Removed] = []
    if 2 * count <= len(rows):
        rule: Rule = "conflicting answers"
        removed += [Removed(row + 1, problems[row], rule, None, None) for row in rows]
        return None, removed, True
    survivor = rows[keys.index(answer)]
    for row, key in zip(rows, keys, strict=True):
        rule = "exact duplicate" if key == answer else "minority answer"
        if row != survivor:
            removed.append(Removed(row + 1, problems[row], rule, survivor + 1, problems[survivor]))
    return survivor, removed, count < len(rows)


def _without_near_duplicates(
    problems: Sequence[Problem],
    rows: Sequence[int],
    texts: Sequence[str],
    threshold: float,
    on_progress: Callable[[int, int], None],
) -> tuple[list[int], list[Removed], int]:
    """Return the rows to keep, the near duplicates removed for each, and how many similar ones stay.

    MinHash proposes candidates among the earlier rows; similarity is then computed exactly.

    Args:
        problems: all rows of the data set.
        rows: the indices of those that are compared.
        texts: their texts without instruction.
        threshold: the similarity of near duplicates.
        on_progress: called with the numbers of texts compared and of texts to compare.
    """
    require_package("datasketch", purpose="finding near duplicates")
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS, weights=_WEIGHTS)
    empty = MinHash(num_perm=PERMUTATIONS)
    shingles: dict[int, frozenset[tuple[str, ...]]] = {}
    contents: dict[int, tuple[list[str], str]] = {}  # numbers and answer of the remaining rows
    removed: list[Removed] = []
    near_duplicates_kept = 0
    for num_compared, (row, text) in enumerate(zip(rows, texts, strict=True), start=1):
        row_shingles = frozenset(ngrams(words(text), SHINGLE_WORDS))
        sketch = empty.copy()
        sketch.update_batch([" ".join(shingle).encode() for shingle in row_shingles])
        similar = []
        # a text without words has no sketch to compare
        for candidate in index.query(sketch) if row_shingles else ():
            similarity = jaccard(row_shingles, shingles[candidate])
            if similarity >= threshold:
                similar.append((similarity, candidate))
        # the most similar first, of equally similar ones the earliest
        similar.sort(key=lambda pair: (-pair[0], pair[1]))
        content = numbers(text), answer_key(problems[row].answer)
        equal = [pair for pair in similar if contents[pair[1]] == content]
        if equal:
            similarity, original = equal[0]
            copy = Removed(
                row + 1,
                problems[row],
                "near duplicate",
                original + 1,
                problems[original],
                similarity,
            )
            removed.append(copy)
        else:
            near_duplicates_kept += bool(similar)
            shingles[row] = row_shingles
            contents[row] = content
            if row_shingles:
                index.insert(row, sketch)
        on_progress(num_compared, len(rows))
    return list(contents), removed, near_duplicates_kept


def jaccard(left: Set[object], right: Set[object]) -> float:
    """Return the size of the intersection over that of the union; 1 for two empty sets."""
    if not left and not right:
        return 1.0
    return len(left & right) / len(left | right)
