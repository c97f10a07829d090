"""Text cut to a length."""

import pytest

from dapo.core.text import one_line, shorten

TEXT = "0123456789" * 3


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("start", "012345678901234567..."),
        ("end", "... 34567890123456789"),
        ("ends", "0123456 [...] 3456789"),
    ],
)
def test_a_long_text_is_cut_to_the_length_and_shows_what_is_kept(keep, expected):
    assert shorten(TEXT, 21, keep=keep) == expected
    assert len(expected) == 21


@pytest.mark.parametrize("keep", ["start", "end", "ends"])
def test_a_text_of_the_length_is_not_cut(keep):
    assert shorten(TEXT, len(TEXT), keep=keep) == TEXT


def test_a_text_on_one_line_has_single_spaces():
    assert one_line(" a\n\n b\tc ") == "a b c"
