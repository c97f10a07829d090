"""The infinite stream of training problems, reshuffled in each epoch; its only state is a
position. The first epoch may have the order of a column.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dapo.core.errors import CheckpointError, DataError
from dapo.core.rng import keyed_permutation
from dapo.types import Problem


class ProblemStream:
    """Training problems in an order that is a function of (seed, epoch, number of problems).

    The order of the first epoch may be that of a column (`data.order`), with equal ones shuffled.

    A position counts from 0 over all epochs. `rewind` returns to an earlier position, so that
    problems that were taken but not used are taken again: no problem is lost or repeated, also
    across the end of an epoch.
    """

    def __init__(self, problems: Sequence[Problem], *, seed: int, order: str | None = None) -> None:
        if not problems:
            raise DataError(
                "there is no problem to train on: the data source is empty or all problems were"
                " removed"
            )
        self._problems = tuple(problems)
        self._seed = seed
        self._sizes = None if order is None else sizes_by(self._problems, order)
        self._position = 0
        self._order_of: tuple[int, NDArray[np.int64]] | None = None

    def __len__(self) -> int:
        """Return the number of problems per epoch."""
        return len(self._problems)

    @property
    def position(self) -> int:
        """The position of the next problem in the stream."""
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch of the next problem, from 0."""
        return self._position // len(self)

    def take(self) -> tuple[int, Problem]:
        """Advance the stream; return the position and the problem."""
        position = self._position
        self._position += 1
        return position, self.problem_at(position)

    def problem_at(self, position: int) -> Problem:
        """Return the problem at any position, without moving the stream."""
        epoch, offset = divmod(position, len(self))
        if self._order_of is None or self._order_of[0] != epoch:
            order = keyed_permutation(len(self), self._seed, "epoch", epoch)
            if epoch == 0 and self._sizes is not None:
                order = order[np.argsort(self._sizes[order], kind="stable")]
            self._order_of = (epoch, order)
        return self._problems[self._order_of[1][offset]]

    def rewind(self, position: int) -> None:
        """Return to an earlier position. Raises ValueError for one that has not been reached."""
        if not 0 <= position <= self._position:
            raise ValueError(f"cannot rewind to {position}: the stream is at {self._position}")
        self._position = position

    def seek(self, position: int) -> None:
        """Move to any position from 0, also a later one."""
        self._position = position

    def state_dict(self) -> dict[str, int]:
        """Return epoch, offset and the number of problems, by which changed data is detected."""
        epoch, offset = divmod(self._position, len(self))
        return {"epoch": epoch, "offset": offset, "size": len(self)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a position. Raises CheckpointError if the state does not belong to this data."""
        size = state.get("size", len(self))
        if size != len(self):
            raise CheckpointError(
                f"the checkpoint was made with {size} training problems, the data source now gives"
                f" {len(self)}; resume with the data the run began with"
            )
        if state.get("epoch", -1) < 0 or not 0 <= state.get("offset", -1) < len(self):
            raise CheckpointError(
                f"stream state {dict(state)}: expected epoch >= 0 and 0 <= offset < {len(self)}"
                " problems; the checkpoint is damaged or belongs to other data"
            )
        self._position = state["epoch"] * len(self) + state["offset"]


def sizes_by(problems: Sequence[Problem], order: str) -> NDArray[np.float64]:
    """Return the number by which each problem is sorted `[problems]`, the smallest first.

    Raises DataError for a problem without a number or text in the column.
    """
    column = order.removeprefix("-")
    sizes = np.array([_size(problem, column) for problem in problems], dtype=np.float64)
    unknown = int(np.isnan(sizes).sum())
    if unknown:
        names = ", ".join(sorted(problems[0].fields)) or "(none)"
        raise DataError(
            f"data.order={order}: {unknown:,} of {len(problems):,} problems have neither a number nor"
            f" a text in the column {column}; columns of the first: {names}"
        )
    return sizes if column == order else -sizes


def _size(problem: Problem, column: str) -> float:
    """Return a number, or the length of a text; NaN for other values."""
    value = problem.fields.get(column)
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return math.nan
