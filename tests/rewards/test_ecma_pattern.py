"""Patterns of JSON Schema mean what ECMA 262 says, not what Python says."""

import re

import pytest

from dapo.rewards import get_verifier
from dapo.rewards.ecma_pattern import python_pattern
from dapo.types import Problem
from helpers.tables import for_each_row


@for_each_row(
    ("pattern", "matching", "other"),
    [
        ("^x+$", "xx", "xx\n"), (r"^\d$", "3", "٣"), (r"^\w$", "e", "é"), (r"^\s$", "\ufeff", "\x1c"),
        (r"^[\s]$", "\u00a0", "a"), (r"^[\S]$", "a", " "), ("^.$", "a", "\r"), (r"^\Z$", "Z", ""),
        (r"(?<y>a)\k<y>", "aa", "ab"), ("^[^]$", "\n", ""), ("^x{,3}$", "x{,3}", "xx"), (r"^\u{1F600}$", "😀", "a"),
        (r"^\ud83d\ude00$", "😀", "a"), (r"^\p{Lu}+$", "ÀB", "Ab"), (r"^\cJ$", "\n", "J"), ("^[a$]$", "$", "b"),
    ],
)  # fmt: skip
def test_a_pattern_matches_as_in_ecma(pattern, matching, other):
    assert re.search(python_pattern(pattern), matching)
    assert not re.search(python_pattern(pattern), other)


@pytest.mark.parametrize("pattern", ["a++", "(?P<n>a)", "(?i)a", "(?>a)", r"\p{Foo}"])
def test_syntax_that_ecma_does_not_have_is_refused(pattern):
    with pytest.raises(ValueError, match=r"ECMA|is not read"):
        python_pattern(pattern)


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": "string", "pattern": "^x+$"}',
        '{"patternProperties": {"^x+$": {}}, "additionalProperties": false, "type": "object"}',
        '{"properties": {"pattern": {"pattern": "^x$"}}, "type": "object"}',
    ],
)
def test_a_line_feed_at_the_end_does_not_pass(schema):
    verifier = get_verifier("json_schema")
    for end, expected in (("", True), ("\\n", False)):
        text = f'"x{end}"' if '"string"' in schema else f'{{"x{end}": 1}}'
        text = (
            f'{{"pattern": "x{end}"}}'
            if "properties" in schema and "patternP" not in schema
            else text
        )
        assert verifier(Problem("1", "Q", schema), text).correct is expected
