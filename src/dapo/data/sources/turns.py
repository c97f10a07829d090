"""Several tasks that take turns: how many items each gives, and in which order they stand."""

from collections.abc import Iterator, Sequence

from dapo.types import Problem


def items_per_task(size: int, num_tasks: int) -> list[int]:
    """How many of `size` items fall to each task if item i is of task i mod n."""
    return [len(range(index, size, num_tasks)) for index in range(num_tasks)]


def round_robin(lists: Sequence[Sequence[Problem]]) -> Iterator[Problem]:
    """One of each list after another, until all are empty."""
    for index in range(max(map(len, lists), default=0)):
        for problems in lists:
            yield from problems[index : index + 1]
