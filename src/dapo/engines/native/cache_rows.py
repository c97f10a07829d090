"""Rows of the cache as nodes of a tree: sequences share a row until their tokens differ.

If sequences split and no row is free, the later branches pause; their old row keeps their keys and
values. A paused branch resumes in a free row, or in its old row once the earlier branches there
have finished. Nothing is computed twice, and no memory besides the rows is needed. This module uses
no tensors.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypeAlias

from dapo.engines.native.scheduler import RunningSequence

BranchGroup: TypeAlias = list[RunningSequence]
"""Sequences with the same prompt, settings and tokens so far, in the order of their start."""


class RowCopies(NamedTuple):
    """Copies of the first `length` positions of rows `sources` to rows `targets`."""

    sources: list[int]
    targets: list[int]
    length: int


@dataclass(eq=False)
class Row:
    """The branch that a row advances, and the paused branches that have split from it."""

    active: BranchGroup
    paused: list[BranchGroup] = field(default_factory=list)
    """The paused branches, the longest last.

    The row holds the tokens of all, and advancing the last one overwrites no other's.
    """

    @property
    def length(self) -> int:
        """Return the number of tokens of the active branch that the row holds."""
        return self.active[0].row_length

    @property
    def branches(self) -> list[BranchGroup]:
        return [self.active, *self.paused]

    def split(self) -> None:
        """Drop finished sequences and split the active branch by last tokens.

        The first part stays active.
        """
        if len(self.active) == 1 and self.active[0].finish is None:
            return
        parts: dict[int, BranchGroup] = {}
        for seq in self.active:
            if seq.finish is None:
                parts.setdefault(seq.token_ids[-1], []).append(seq)
        # reversed, because the last paused branch resumes first
        self.paused.extend(reversed(parts.values()))
        self._resume()

    def remove(self, names: Collection[str]) -> None:
        """Drop the sequences of these requests."""
        self.active = _without(self.active, names)
        branches = [_without(branch, names) for branch in self.paused]
        self.paused = [branch for branch in branches if branch]
        if not self.active:
            self._resume()

    def _resume(self) -> None:
        """Continue the last paused branch: it is the longest, and overwrites no other's tokens."""
        self.active = self.paused.pop() if self.paused else []


class Rows:
    """The rows 0 .. n-1 of the cache, none of which is empty between two polls."""

    def __init__(self) -> None:
        self._rows: list[Row | None] = []  # None: free

    def __len__(self) -> int:
        """Return the number of rows in use, and of free rows before the last of them."""
        return len(self._rows)

    @property
    def in_use(self) -> list[Row]:
        return [row for row in self._rows if row is not None]

    @property
    def sequences(self) -> list[RunningSequence]:
        """Return all sequences in the order of their start."""
        sequences: list[RunningSequence] = []
        for row in self.in_use:
            for branch in row.branches:
                sequences += branch
        sequences.sort(key=lambda seq: seq.order)
        return sequences

    @property
    def num_branches(self) -> int:
        return sum(1 + len(row.paused) for row in self.in_use)

    @property
    def has_paused(self) -> bool:
        return any(row.paused for row in self.in_use)

    def split(self) -> None:
        """Split every row (`Row.split`), and free the finished rows."""
        for row in self.in_use:
            row.split()
        self._free_finished()

    def remove(self, names: Collection[str]) -> None:
        """Drop the sequences of these requests, and free empty rows."""
        for row in self.in_use:
            row.remove(names)
        self._free_finished()

    def clear(self) -> None:
        self._rows = []

    def assign(self, row: Row) -> int:
        """Assign the first free index of the cache, and return it."""
        if None not in self._rows:
            self._rows.append(None)
        index = self._rows.index(None)
        self._rows[index] = row
        return index

    def assign_rows(self, limit: int) -> RowCopies:
        """Give paused branches rows while fewer than `limit` are in use, the oldest first."""
        free = limit - len(self.in_use)
        if free <= 0 or not self.has_paused:
            return RowCopies([], [], 0)
        paused = []
        for index, row in enumerate(self._rows):
            if row is not None:
                paused += [(branch, index, row) for branch in row.paused]
        # in the order of their start, so that the result does not depend on the rows' indices
        paused.sort(key=lambda entry: entry[0][0].order)
        sources = []
        targets = []
        length = 0
        for branch, index, row in paused[:free]:
            row.paused.remove(branch)
            sources.append(index)
            targets.append(self.assign(Row(branch)))
            length = max(length, branch[0].row_length)
        return RowCopies(sources, targets, length)

    def compact(self, *, spare: int = 0) -> RowCopies:
        """Leave at most `spare` free rows by moving the last rows in use into free ones."""
        free = [index for index, row in enumerate(self._rows) if row is None]
        size = len(self._rows) - max(0, len(free) - spare)
        sources: list[int] = []
        targets: list[int] = []
        length = 0
        for index in range(size, len(self._rows)):
            row = self._rows[index]
            if row is None:
                continue
            # as many rows are free before `size` as are in use behind it
            target = free[len(targets)]
            self._rows[target] = row
            sources.append(index)
            targets.append(target)
            length = max(length, row.length)
        del self._rows[size:]
        return RowCopies(sources, targets, length)

    def _free_finished(self) -> None:
        for index, row in enumerate(self._rows):
            if row is not None and not row.active:
                self._rows[index] = None


def _without(branch: BranchGroup, names: Collection[str]) -> BranchGroup:
    return [seq for seq in branch if seq.request.id not in names]


def flat(branches: Sequence[BranchGroup]) -> BranchGroup:
    """Return the sequences of all branches."""
    return list(chain.from_iterable(branches))
