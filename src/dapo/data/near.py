"""Near copies: word runs compared by Jaccard similarity, found with MinHash and locality-sensitive hashing."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from dapo.data.extras import require_package
from dapo.data.wording import ngrams, words

SHINGLE_WORDS = 3
PERMUTATIONS = 128
# a missed pair is lost, a wrong candidate only costs a comparison
_WEIGHTS = (0.2, 0.8)


@dataclass(frozen=True)
class Sketched:
    """A text as the index sees it."""

    runs: frozenset[tuple[str, ...]]
    """Its runs of three words."""
    sketch: Any
    """Their MinHash."""


class NearIndex:
    """Texts that were added, searchable for those that are similar to another."""

    def __init__(self, threshold: float) -> None:
        """Raises DataError without the package `datasketch`."""
        require_package("datasketch", extra="data", purpose="finding near copies")
        from datasketch import MinHash, MinHashLSH

        self._threshold = threshold
        self._empty = MinHash(num_perm=PERMUTATIONS)
        self._index = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS, weights=_WEIGHTS)
        self._added: dict[int, frozenset[tuple[str, ...]]] = {}

    def read(self, text: str) -> Sketched:
        """The text, ready to be looked up and added."""
        runs = frozenset(ngrams(words(text), SHINGLE_WORDS))
        sketch = self._empty.copy()
        sketch.update_batch([" ".join(run).encode() for run in runs])
        return Sketched(runs, sketch)

    def add(self, key: int, text: Sketched) -> None:
        """A text without words is never found."""
        if text.runs:
            self._index.insert(key, text.sketch)
            self._added[key] = text.runs

    def similar(self, text: Sketched) -> list[tuple[int, float]]:
        """Keys of texts of at least the threshold's similarity, compared exactly, the most similar first."""
        candidates = self._index.query(text.sketch) if text.runs else []
        compared = [(key, jaccard(text.runs, self._added[key])) for key in candidates]
        found = [(key, similarity) for key, similarity in compared if similarity >= self._threshold]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))


def jaccard(left: Set[object], right: Set[object]) -> float:
    """What two sets share, over all that they hold; two empty ones are equal."""
    return len(left & right) / len(left | right) if left or right else 1.0
