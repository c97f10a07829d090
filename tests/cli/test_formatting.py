"""Numbers, counts and values of options as the commands print them."""

from typing import Any

import pytest
from rich.table import Column

from dapo.cli.formatting import number, print_ruled, ruled_table
from dapo.config import LoraConfig
from dapo.config.option_fields import option_text
from dapo.core.text import plural, size, weighted, with_interval
from dapo.runs.console import SafeConsole
from helpers.tables import for_each_row


@for_each_row(
    ("value", "text"),
    [
        (None, "none"),
        (True, "true"),
        (3, "3"),
        (2e-5, "2e-05"),
        ("clip", "clip"),
        ("", ""),
        ([0.2, 0.8], "[0.2, 0.8]"),
        ({"easy": 1}, '{"easy": 1}'),
        (LoraConfig(rank=2), "rank=2 alpha=32.0"),
    ],
)
def test_the_value_of_an_option_is_printed_whatever_its_type(value: Any, text: str):
    assert option_text(value) == text


def test_an_interval_stands_behind_its_number_where_there_is_one():
    assert with_interval(0.625, (0.453, 0.771)) == "62.5% (45.3% to 77.1%)"
    assert with_interval(0.5, (None, None), ".4f", none=" (no interval)") == "0.5000 (no interval)"
    assert with_interval(0.5, None) == "50.0%"


def test_missing_numbers_counts_and_weights():
    assert (number(None, ".1%"), number(None, ".1%", "-"), number(0.5, ".1%")) == ("", "-", "50.0%")
    assert [plural(count, "run") for count in (0, 1, 1200)] == ["0 runs", "1 run", "1,200 runs"]
    assert [size(count) for count in (0, 999, 1000, 12_345_678, 3e15)] == [
        "0 B",
        "999 B",
        "1 kB",
        "12.3 MB",
        "3e+03 TB",
    ]
    assert weighted("math") == "math"
    assert weighted({"math": 0.8, "format": 0.2}) == "0.8 x math + 0.2 x format"


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_a_table_without_room_for_its_numbers_is_printed_in_parts(
    capsys: pytest.CaptureFixture[str], width: int
):
    names = ["a", "b", "b - a", "95 % interval", "pairs", "skipped"]
    table = ruled_table(Column("name", min_width=8), *names, title="a title")
    numbers = ["100.0", "12,345.6", "-0.133", "-0.357 to +0.091", "97", "12.5%"]
    table.add_row("length, tokens", *numbers)
    print_ruled(SafeConsole(width=width), table)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    for text in (*names[2:], *numbers):
        assert shown.count(f" {text}") == 1, text
    assert shown.count("a title") == 1
    parts = sum("\u2500" in line for line in shown.splitlines())
    assert parts == {30: 4, 60: 2, 80: 1, 120: 1}[width]
    assert shown.count("length,") == parts
