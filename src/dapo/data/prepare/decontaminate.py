"""Find training problems that contain an evaluation problem, by shared word n-grams."""

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from dapo.data.prepare.normalize import find_instruction_template, ngrams, words
from dapo.data.sources.rows import prompt_text
from dapo.types import Problem


@dataclass(frozen=True)
class Contaminated:
    """A removed training row, and the evaluation problem that it contains."""

    row: int  # the row number in the source, from 1
    problem: Problem
    question: str  # the text without the instruction around it
    against: Problem
    against_question: str
    overlap: float  # the fraction of the evaluation problem's n-grams that the row contains
    passage: str  # the longest passage that both contain, as normalized words

    def as_json(self) -> dict[str, Any]:
        """Return a line of the report."""
        return {
            "row": self.row,
            "id": self.problem.id,
            "overlap": round(self.overlap, 4),
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
    """The indexed text that overlaps most with another text."""

    index: int  # the position of the text in the index
    overlap: float  # the fraction of the indexed text's n-grams that the other text contains
    passage: str  # the longest passage that both contain


def find_contaminated(
    train: Sequence[Problem], against: Sequence[Problem], *, ngram: int, min_overlap: float
) -> tuple[list[Problem], list[Contaminated]]:
    """Split rows, in their order, into those to keep and those that contain an evaluation problem.

    An evaluation problem of at most `ngram` words only matches an equal text. The instructions that
    most texts on either side share are not part of the evaluation problems.

    Args:
        train: the rows.
        against: the evaluation problems.
        ngram: the number of words (letters and digits in lower case) of an n-gram.
        min_overlap: the fraction of an evaluation problem's n-grams from which a row is removed.
    """
    texts = [prompt_text(problem.prompt) for problem in train]
    held_out = {prompt_text(problem.prompt): problem for problem in against}
    template = find_instruction_template(texts) | find_instruction_template(held_out, min_texts=2)
    references = [template.strip_instruction(text) for text in held_out]
    originals = list(held_out.values())
    index = OverlapIndex(references, ngram)
    # the released DAPO file repeats each text a hundred times
    matches = {}
    for text in dict.fromkeys(texts):
        matches[text] = index.best(text, template.strip_instruction(text))
    clean = []
    removed = []
    for row, (problem, text) in enumerate(zip(train, texts, strict=True), start=1):
        match = matches[text]
        if match is None or match.overlap < min_overlap:
            clean.append(problem)
        else:
            removed.append(
                Contaminated(
                    row,
                    problem,
                    question=template.strip_instruction(text),
                    against=originals[match.index],
                    against_question=references[match.index],
                    overlap=match.overlap,
                    passage=match.passage,
                )
            )
    return clean, removed


class OverlapIndex:
    """An index of texts by word n-grams."""

    def __init__(self, texts: Sequence[str], ngram: int) -> None:
        self._ngram = ngram
        self._shingles = [frozenset(ngrams(words(text), ngram)) for text in texts]
        self._texts_of: dict[tuple[str, ...], list[int]] = {}
        for index, shingles in enumerate(self._shingles):
            for shingle in shingles:
                self._texts_of.setdefault(shingle, []).append(index)

    def best(self, text: str, stripped: str) -> Match | None:
        """Return the first indexed text that `text` overlaps most; None without an overlap.

        Indexed texts of at most `ngram` words must equal `stripped`, the text without its
        instruction. Longer ones are compared with the whole text: the instruction may be found
        inexactly, and adds no n-gram of an indexed text.
        """
        shingles = ngrams(words(text), self._ngram)
        short = tuple(words(stripped))
        num_shared: Counter[int] = Counter()
        for shingle in {*shingles, short}:
            num_shared.update(self._texts_of.get(shingle, ()))
        if not num_shared:
            return None
        overlaps = {
            index: count / len(self._shingles[index]) for index, count in num_shared.items()
        }
        # the first of equal ones: a set has no order
        index = min(overlaps, key=lambda index: (-overlaps[index], index))
        passage = longest_passage([*shingles, short], self._shingles[index])
        return Match(index, overlaps[index], passage)


def longest_passage(shingles: Sequence[tuple[str, ...]], reference: Set[tuple[str, ...]]) -> str:
    """Return the longest passage whose n-grams, in a text's order, are all in `reference`."""
    longest: tuple[str, ...] = ()
    current: tuple[str, ...] = ()
    for shingle in shingles:
        if shingle not in reference:
            current = ()
        elif current:
            current = (*current, shingle[-1])
        else:
            current = shingle
        longest = max(longest, current, key=len)
    return " ".join(longest)
