"""Collections are paused where asked, and go on as before."""

import gc

import pytest

from dapo.core.memory import collections_paused


@collections_paused()
def is_enabled_inside() -> bool:
    return gc.isenabled()


def test_collections_are_paused_inside_and_go_on_afterwards_also_after_an_error() -> None:
    assert gc.isenabled()
    with collections_paused(), collections_paused():
        assert not gc.isenabled()
    assert (is_enabled_inside(), gc.isenabled()) == (False, True)
    with pytest.raises(ValueError, match="inside"), collections_paused():
        raise ValueError("inside")
    assert gc.isenabled()


def test_collections_that_were_off_stay_off() -> None:
    gc.disable()
    try:
        with collections_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
