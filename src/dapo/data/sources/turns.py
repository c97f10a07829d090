"""Several tasks that take turns: how many items each gives, and in which order they stand."""

from collections.abc import Iterator, Sequence

from dapo.types import Problem


def shares(size: int, num_tasks: int) -> list[int]:
    """How many of `size` items fall to each task if item i is of task i mod n."""
    return [len(range(turn, size, num_tasks)) for turn in range(num_tasks)]


def take_turns(lists: Sequence[Sequence[Problem]]) -> Iterator[Problem]:
    """One of each list after another, until all are empty."""
    for turn in range(max(map(len, lists), default=0)):
        for problems in lists:
            yield from problems[turn : turn + 1]
