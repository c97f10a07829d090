"""Rows of equal values share memory, and are what an array of them would be."""

from array import array

import numpy as np
import pytest

from dapo.core.constant_rows import MIN_LENGTH, constant_row
from helpers.tables import for_each_row


@for_each_row("length", [0, 1, 7, MIN_LENGTH, MIN_LENGTH + 1, 5 * MIN_LENGTH])
@for_each_row("value", [False, True])
def test_a_row_equals_an_array_of_so_many_values(value: bool, length: int) -> None:
    row = constant_row(value, length)
    assert row == array("b", [value]) * length
    assert (np.asarray(row).dtype, np.count_nonzero(row)) == (np.int8, value * length)


def test_rows_of_different_lengths_share_memory_that_nobody_can_write_to() -> None:
    rows = [np.asarray(constant_row(True, length)) for length in (3, 20_480)]
    assert len({row.ctypes.data for row in rows}) == 1
    assert not rows[0].flags.writeable


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0 values, got -1"):
        constant_row(True, -1)
