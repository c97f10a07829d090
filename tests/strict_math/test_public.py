"""The public surface: its names, its examples, and the page that describes it."""

import ast
import doctest
import re
from pathlib import Path

import pytest

from dapo.libs import strict_math
from dapo.libs.strict_math import Reference, extract_answer, is_equal, stated_number, text

README = Path(strict_math.__file__).with_name("README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("module", [strict_math, strict_math.comparison, strict_math.extraction])
def test_the_examples_of_docstrings_give_what_they_show(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_example_of_the_page_runs_and_its_comments_are_true():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    shown = re.findall(r"^(\S.*?)\s+# (True|False)\b", code, re.MULTILINE)
    assert len(shown) == 5
    for expression, value in shown:
        assert str(eval(expression, names)) == value, expression
    assert "https" not in code


def test_every_public_name_has_a_docstring_with_an_example():
    assert sorted(strict_math.__all__) == ["Reference", "extract_answer", "is_equal"]
    assert all(">>>" in (getattr(strict_math, name).__doc__ or "") for name in strict_math.__all__)


def test_the_figures_of_the_page_are_those_of_the_page_of_verifiers():
    verifiers = (Path(__file__).parents[2] / "docs" / "verifiers.md").read_text(encoding="utf-8")
    for name, row in re.findall(
        r"^\| (\S.*?) \|((?: \d+ / \d+ / \d+ \|){3})$", README, re.MULTILINE
    ):
        assert row in verifiers, name


def test_an_unreadable_reference_is_none_and_is_equal_says_what_it_expected():
    assert Reference.read(r"\frac{1}{") is None
    with pytest.raises(
        ValueError, match=r"expected a reference in LaTeX or plain notation, got '\\\\frac\{1\}\{'"
    ):
        is_equal(r"\frac{1}{", "1")


def test_a_sentence_matches_by_its_value_and_a_hedge_matches_nothing():
    reference = Reference.read("13")
    assert reference is not None
    assert reference.matches("The number of ways is 13.")
    assert not reference.matches("The number of ways is not 13.")
    assert extract_answer("Answer: 12\nNo.\nAnswer: 13") == "13"


def test_dapo_uses_the_public_names_only():
    library = strict_math.__name__
    public = {f"{library}.{name}" for name in strict_math.__all__}
    for module in (text, stated_number):
        public |= {f"{module.__name__}.{name}" for name in module.__all__}
    package = Path(strict_math.__file__).parents[2]
    found = [
        f"{node.module}.{alias.name}"
        for path in package.rglob("*.py")
        if "libs" not in path.relative_to(package).parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(library)
        for alias in node.names
    ]
    assert found
    assert set(found) <= public


def test_an_answer_that_has_no_value_is_wrong_and_votes_as_written():
    reference = Reference.read("13")
    assert reference is not None
    for answer, vote in (
        ("1 0/0", "1\\frac{0}{0}"),
        ("The number of each is 13.", "thenumberofeachis13."),
        (r"S = \{1, 2\} \approx 3", r"s=\{1,2\}\approx3"),
    ):
        assert not reference.matches(answer)
        assert reference.vote(answer, correct=False) == vote


def test_a_condition_after_several_inequalities_is_left_out():
    reference = Reference.read(r"1 < x, x < 3, n \in \mathbb{Z}")
    assert reference is not None
    assert reference.matches("1 < x < 3")
    assert not reference.matches("1 < x")
