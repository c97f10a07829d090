"""Errors are safe to print, whoever prints them."""

import pickle
import traceback

from dapo.core import errors
from dapo.core.errors import DapoError, RewardError

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b1m\u202egnp\r"


def test_every_error_escapes_what_would_control_a_terminal():
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, DapoError)
    ]
    assert len(kinds) > 10
    for kind in kinds:
        shown = "".join(
            traceback.format_exception(kind(f"a reward raised {HOSTILE}\non two lines"))
        )
        assert r"a reward raised \x1b]0;owned\x07\x1b[2J\x9b1m\u202egnp\r" in shown
        assert not set(HOSTILE) - set("]0;owned[2J1mgnp") & set(shown)
        assert "\non two lines" in shown


def test_an_error_from_another_process_is_the_same_error():
    error = RewardError(HOSTILE)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_long_value_is_not_echoed_whole():
    for value in ("x" * 5_000, "x " * 5_000, "\n".join(map(str, range(5_000))), list(range(5_000))):
        shown = str(DapoError(f"option optim.lr: expected a number, got {value!r}"))
        assert shown.startswith("option optim.lr: expected a number, got ")
        assert len(shown) < 2_000
    several = str(
        DapoError("first line\n" + "\n".join(f"problem {number}" for number in range(5_000)))
    )
    assert several.startswith("first line\nproblem 0\n")
    assert "lines left out" in several
    assert several.endswith("\nproblem 4999")
