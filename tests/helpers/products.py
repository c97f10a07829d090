"""Products of parameters: `make test` meets each pair of values, `make nightly` every combination."""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def params_of_product(*factors: Sequence[Any]) -> list[Any]:
    """Every combination as a parameter, marked `nightly` where its pairs are met by others."""
    sample = covering_pairs(*map(len, factors))
    return [
        pytest.param(
            *(values[i] for values, i in zip(factors, numbers, strict=True)),
            marks=[] if numbers in sample else [pytest.mark.nightly],
        )
        for numbers in product(*(range(len(values)) for values in factors))
    ]


def covering_pairs(*sizes: int) -> set[tuple[int, ...]]:
    """Combinations of numbers below these sizes such that any two values of two factors are in one
    of them.
    """
    combinations_left = list(product(*map(range, sizes)))
    missing = {pair for numbers in combinations_left for pair in pairs_of(numbers)}
    chosen = set()
    while missing:
        best = max(combinations_left, key=lambda numbers: len(missing & set(pairs_of(numbers))))
        chosen.add(best)
        missing -= set(pairs_of(best))
    return chosen


def pairs_of(numbers: Sequence[int]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Each two factors with their values."""
    return combinations(enumerate(numbers), 2)
