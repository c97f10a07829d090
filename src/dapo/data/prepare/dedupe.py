"""Copies of a problem: the same text in another dress, then nearly the same text with the same numbers and answer."""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from dapo.core.optional import require_package
from dapo.data.prepare.normalize import answer_key, find_instruction_template, ngrams, normalize_text, numbers, words
from dapo.data.sources.rows import prompt_text
from dapo.types import Problem

SHINGLE_WORDS = 3
PERMUTATIONS = 128
# a missed pair is lost, a wrong candidate only costs a comparison
_WEIGHTS = (0.2, 0.8)


@dataclass(frozen=True)
class ShingledText:
    """A text as the index sees it."""

    shingles: frozenset[tuple[str, ...]]
    """Its runs of three words."""
    sketch: Any
    """Their MinHash."""


class NearDuplicateIndex:
    """Texts that were added, searchable for those that are similar to another."""

    def __init__(self, threshold: float) -> None:
        """Raises DataError without the package `datasketch`."""
        require_package("datasketch", extra="data", purpose="finding near copies")
        from datasketch import MinHash, MinHashLSH

        self._threshold = threshold
        self._empty = MinHash(num_perm=PERMUTATIONS)
        self._index = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS, weights=_WEIGHTS)
        self._added: dict[int, frozenset[tuple[str, ...]]] = {}

    def read(self, text: str) -> ShingledText:
        """The text, ready to be looked up and added."""
        shingles = frozenset(ngrams(words(text), SHINGLE_WORDS))
        sketch = self._empty.copy()
        sketch.update_batch([" ".join(shingle).encode() for shingle in shingles])
        return ShingledText(shingles, sketch)

    def add(self, key: int, text: ShingledText) -> None:
        """A text without words is never found."""
        if text.shingles:
            self._index.insert(key, text.sketch)
            self._added[key] = text.shingles

    def similar(self, text: ShingledText) -> list[tuple[int, float]]:
        """Keys of texts of at least the threshold's similarity, compared exactly, the most similar first."""
        candidates = self._index.query(text.sketch) if text.shingles else []
        compared = [(key, jaccard(text.shingles, self._added[key])) for key in candidates]
        found = [(key, similarity) for key, similarity in compared if similarity >= self._threshold]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))


def jaccard(left: Set[object], right: Set[object]) -> float:
    """What two sets share, over all that they hold; two empty ones are equal."""
    return len(left & right) / len(left | right) if left or right else 1.0


Rule: TypeAlias = Literal["exact duplicate", "near duplicate", "minority answer", "conflicting answers"]
RULES: tuple[Rule, ...] = ("exact duplicate", "near duplicate", "minority answer", "conflicting answers")


@dataclass(frozen=True)
class Removed:
    """A row that is left out, and why."""

    row: int
    """From 1, in the order of the source."""
    problem: Problem
    rule: Rule
    kept_row: int | None
    """The row that it is a copy of; None: its copies contradict each other, and none is kept."""
    kept: Problem | None
    similarity: float = 1.0

    def as_json(self) -> dict[str, Any]:
        """A line of the report; the text only where it is not that of the row that is kept."""
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
            line |= {"kept_answer": self.kept.answer, "kept_question": prompt_text(self.kept.prompt)}
        return line | ({"similarity": round(self.similarity, 4)} if self.rule == "near duplicate" else {})


@dataclass(frozen=True)
class Deduplicated:
    """What is left, in the order of the source, and what is not."""

    kept: tuple[Problem, ...]
    removed: tuple[Removed, ...]
    conflicts: int
    """Texts whose copies had different answers."""
    near_duplicates_kept: int
    """Problems that are kept although nearly the same as an earlier one: their numbers or answers differ."""

    @property
    def by_rule(self) -> dict[Rule, int]:
        """How many rows fell to which rule."""
        counts = Counter(removed.rule for removed in self.removed)
        return {rule: counts[rule] for rule in RULES}


def deduplicate(
    problems: Sequence[Problem], *, threshold: float | None, on_progress: Callable[[int], None] = lambda done: None
) -> Deduplicated:
    """Keep the first row of each problem.

    Exact copies have the same text but for case, whitespace, punctuation at the ends and the instruction around it.
    If their answers differ, the answer that most of the rows have is kept; without a majority no row is, because
    nothing says which one is right. Near copies have word runs of at least `threshold` Jaccard similarity (None: they
    are not looked for), the same numbers and the same answer: texts that differ in those are different problems.
    """
    instruction_template = find_instruction_template(prompt_text(problem.prompt) for problem in _distinct(problems))
    stripped = {
        id(problem): instruction_template.strip_instruction(prompt_text(problem.prompt))
        for problem in _distinct(problems)
    }
    clusters: dict[str, list[int]] = {}
    normalized = {key: normalize_text(text) for key, text in stripped.items()}
    for index, problem in enumerate(problems):
        clusters.setdefault(normalized[id(problem)], []).append(index)
    removed: list[Removed] = []
    survivors: list[int] = []
    conflicts = 0
    for rows in clusters.values():
        kept, dropped, conflicting = _resolve_duplicates(problems, rows)
        removed += dropped
        survivors += [] if kept is None else [kept]
        conflicts += conflicting
    survivors.sort()
    near_duplicates_kept = 0
    if threshold is not None:
        texts = [stripped[id(problems[index])] for index in survivors]
        survivors, near, near_duplicates_kept = _without_near_duplicates(
            problems, survivors, texts, threshold, on_progress
        )
        removed += near
    removed.sort(key=lambda dropped: dropped.row)
    return Deduplicated(tuple(problems[index] for index in survivors), tuple(removed), conflicts, near_duplicates_kept)


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    """Each object once: a reader gives equal rows as one object."""
    return list({id(problem): problem for problem in problems}.values())


def _resolve_duplicates(problems: Sequence[Problem], rows: Sequence[int]) -> tuple[int | None, list[Removed], bool]:
    """Of rows with one text: the one to keep, the others, and whether their answers contradict each other."""
    if len(rows) == 1:
        return rows[0], [], False
    keys = [answer_key(problems[row].answer) for row in rows]
    votes = Counter(keys).most_common()
    if 2 * votes[0][1] <= len(rows):
        return None, [Removed(row + 1, problems[row], "conflicting answers", None, None) for row in rows], True
    kept = rows[keys.index(votes[0][0])]
    dropped = [
        Removed(
            row + 1,
            problems[row],
            "exact duplicate" if key == votes[0][0] else "minority answer",
            kept + 1,
            problems[kept],
        )
        for row, key in zip(rows, keys, strict=True)
        if row != kept
    ]
    return kept, dropped, len(votes) > 1


def _without_near_duplicates(
    problems: Sequence[Problem],
    rows: Sequence[int],
    texts: Sequence[str],
    threshold: float,
    on_progress: Callable[[int], None],
) -> tuple[list[int], list[Removed], int]:
    """Rows to keep, near copies of these, and how many are kept although they look alike."""
    index = NearDuplicateIndex(threshold)
    kept: dict[int, tuple[list[str], str]] = {}
    removed: list[Removed] = []
    near_duplicates_kept = 0
    for done, (row, text) in enumerate(zip(rows, texts, strict=True), start=1):
        shingled, meaning = index.read(text), (numbers(text), answer_key(problems[row].answer))
        similar = index.similar(shingled)
        first = next(((other, similarity) for other, similarity in similar if kept[other] == meaning), None)
        if first is not None:
            other, similarity = first
            removed.append(Removed(row + 1, problems[row], "near duplicate", other + 1, problems[other], similarity))
        else:
            near_duplicates_kept += bool(similar)
            kept[row] = meaning
            index.add(row, shingled)
        on_progress(done)
    return list(kept), removed, near_duplicates_kept
