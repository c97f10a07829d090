"""Functions that have the same last bit everywhere: they agree with the C library's, and their bits
are recorded.
"""

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
    "exp": {
        1.0: "0x1.5bf0a8b14576ap+1",
        -0.3: "0x1.7b4c869c37c05p-1",
        -10.5: "0x1.cdfc263f6a0bap-16",
    },
    "log": {
        3.0: "0x1.193ea7aad030bp+0",
        0.6: "-0x1.058aefa811452p-1",
        1e-5: "-0x1.7069e2aa2aa5bp+3",
    },
    "log_gamma": {
        0.3: "0x1.188637a6c4198p+0",
        7.25: "0x1.c35701a50ff05p+2",
        120.5: "0x1.c76ae7dce35f4p+8",
    },
    "cos": {
        0.7: "0x1.87996529f9d93p-1",
        1.9: "-0x1.4b0c6b93445acp-2",
        3.0: "-0x1.fae04be85e5d3p-1",
    },
}


@pytest.mark.parametrize("name", RANGES)
@given(data=st.data())
def test_each_function_agrees_with_the_c_library_to_a_few_units_in_the_last_place(
    name: str, data: st.DataObject
):
    function, expected, low, high = RANGES[name]
    x = data.draw(st.floats(low, high))
    assert function(x) == pytest.approx(expected(x), rel=2e-15, abs=2e-14)


@pytest.mark.parametrize("name", BITS)
def test_each_function_has_its_recorded_bits_on_every_machine(name: str):
    function = RANGES[name][0]
    assert {x: function(x).hex() for x in BITS[name]} == BITS[name]


def test_exp_is_zero_below_the_smallest_float_and_log_refuses_what_has_none():
    assert portable_math.exp(-1e6) == 0.0
    for x in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="log needs a positive finite number"):
            portable_math.log(x)
