"""Tables in a terminal: numbers and words are whole, and texts share the width that is left."""

import pytest

from dapo.api.shown_tables import ShownTable
from helpers.tables import for_each_row

QUESTION = "What is the sum of twelve and thirteen, and why?"
RESPONSE = "Let us think step by step: the sum is the number that comes after. " * 3


@for_each_row(
    ("width", "question_chars", "response_chars"), [(60, 13, 13), (80, 23, 23), (160, 48, 78)]
)
def test_no_column_is_lost_beside_long_texts(
    width: int, question_chars: int, response_chars: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", str(width))
    row = {"step": 10, "question": QUESTION, "response": RESPONSE, "advantage": -0.3815}
    row["outcome"] = "zero_variance"
    text = ShownTable("rows", [row, row | {"outcome": "trained"}]).text()
    head, *lines = text.splitlines()[1:]
    assert head.split() == list(row)
    assert all(len(line) <= width for line in lines)
    assert len(lines) == 2
    for line, outcome in zip(lines, ("zero_variance", "trained"), strict=True):
        assert [line.split()[0], *line.split()[-2:]] == ["10", "-0.3815", outcome]
    positions = [head.index(name) for name in ("question", "response", "advantage")]
    assert positions[1] - positions[0] - 2 == question_chars
    assert positions[2] - positions[1] - 2 == response_chars
