"""Numbers, counts and values of options as the commands print them."""

from typing import Any

from dapo.cli.formatting import number
from dapo.config import LoraConfig
from dapo.config.option_fields import option_text
from dapo.core.text import plural, size, weighted, with_interval
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
