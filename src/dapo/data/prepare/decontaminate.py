"""Training problems that give an evaluation problem away: shared runs of words."""

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from dapo.data.prepare.normalize import find_instruction_template, ngrams, words
from dapo.data.sources.rows import prompt_text
from dapo.types import Problem


@dataclass(frozen=True)
class Contaminated:
    """A training row, and the evaluation problem whose words it shares."""

    row: int
    """From 1, in the order of the source."""
    problem: Problem
    question: str
    """Without the instruction around it."""
    against: Problem
    against_question: str
    share: float
    """Of the evaluation problem's word runs."""
    passage: str
    """The longest that both have, as words."""

    def as_json(self) -> dict[str, Any]:
        """A line of the report."""
        return {
            "row": self.row,
            "id": self.problem.id,
            "share": round(self.share, 4),
            "matching_text": self.passage,
            "question": self.question,
            "answer": self.problem.answer,
            "against_source": self.against.source,
            "against_id": self.against.id,
            "against_question": self.against_question,
            "against_answer": self.against.answer,
        }


@dataclass(frozen=True)
class Match:
    """What a text has in common with the evaluation problem that it has most in common with."""

    index: int
    """Of the problem among those of the index."""
    share: float
    """Of that problem's word runs."""
    passage: str
    """The longest that both have."""


def decontaminate(
    train: Sequence[Problem], against: Sequence[Problem], *, ngram: int, min_overlap: float
) -> tuple[list[Problem], list[Contaminated]]:
    """Rows without much in common with an evaluation problem, and the others, each in the order of the source.

    A row is removed if it holds at least `min_overlap` of an evaluation problem's runs of `ngram` words (letters and
    digits in lower case). An evaluation problem of no more words than that is one run, which only an equal text holds.
    Instructions that most of the texts on either side share are no part of the evaluation problems.
    """
    texts = [prompt_text(problem.prompt) for problem in train]
    held_out = {prompt_text(problem.prompt): problem for problem in against}
    instruction_template = find_instruction_template(texts) | find_instruction_template(held_out, min_texts=2)
    references, originals = [instruction_template.strip_instruction(text) for text in held_out], list(held_out.values())
    index = OverlapIndex(references, ngram)
    # released files repeat a text up to a hundred times
    matches = {text: index.best(text, instruction_template.strip_instruction(text)) for text in dict.fromkeys(texts)}
    kept, removed = [], []
    for row, (problem, text) in enumerate(zip(train, texts, strict=True), start=1):
        match = matches[text]
        if match is None or match.share < min_overlap:
            kept.append(problem)
        else:
            question, reference = instruction_template.strip_instruction(text), references[match.index]
            removed.append(
                Contaminated(
                    row, problem, question, originals[match.index], reference, match.share, passage=match.passage
                )
            )
    return kept, removed


class OverlapIndex:
    """Texts, searchable for the one that gives most of its word runs to another."""

    def __init__(self, texts: Sequence[str], ngram: int) -> None:
        self._ngram = ngram
        self._shingles = [frozenset(ngrams(words(text), ngram)) for text in texts]
        self._flat_indices: dict[tuple[str, ...], list[int]] = {}
        for index, shingles in enumerate(self._shingles):
            for shingle in shingles:
                self._flat_indices.setdefault(shingle, []).append(index)

    def best(self, text: str, stripped: str) -> Match | None:
        """The indexed text of which this one holds the largest share, the first of equals; None: nothing is shared.

        Short texts must be equal, without the instruction. Runs are those of the whole text: the end of an instruction
        may be mistaken, and what it holds more than the problem is in no indexed text.
        """
        shingles = ngrams(words(text), self._ngram)
        short = tuple(words(stripped))
        shared = Counter(index for shingle in {*shingles, short} for index in self._flat_indices.get(shingle, ()))
        if not shared:
            return None
        index = min(shared, key=lambda index: (-shared[index] / len(self._shingles[index]), index))
        passage = longest_passage([*shingles, short], self._shingles[index])
        return Match(index, shared[index] / len(self._shingles[index]), passage)


def longest_passage(shingles: Sequence[tuple[str, ...]], reference: Set[tuple[str, ...]]) -> str:
    """The words of the longest series of neighbouring runs that are all in the reference."""
    longest: tuple[str, ...] = ()
    current: tuple[str, ...] = ()
    for shingle in shingles:
        current = () if shingle not in reference else (*current, shingle[-1]) if current else shingle
        longest = max(longest, current, key=len)
    return " ".join(longest)
