"""House rules of language for the README and the guide, the bounds of both, and a rule for docstrings."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.paths import ROOT

RULES = {
    "of which": (r"\bof which\b", "36 GB, of which 3 are weights"),
    "that of": (r"\b(?:is|are|than|with|from|to|by|as) (?:that|those) of\b", "the accuracy is that of the last step"),
    "so many": (r"\bso many\b", "so many times the problems"),
    "as it is": (r"\bas (?:it|they) (?:is|are|stands?)(?= now\b|[.,;:|)]|$)", "the policy stays as it is."),
    "it is there": (r"\b(?:it|they) (?:is|are) there\b", "if it is there"),
    "others for different": (r"\b(?:are|be) others\b", "the numbers are others"),
    "anew": (r"\banew\b", "judged anew"),
    "beside": (r"\bbeside\b", "a critic beside the policy"),
    "of equals": (r"\bof equals\b", "of equals the shortest"),
    "as X has it": (r"\bas \w+ (?:has|have) it\b", "as Ray has it"),
    "account of tokens": (r"\baccount of tokens\b", "the account of tokens"),
    "is said": (r"\b(?:is|are) said\b|\bsays? so\b", "the page says so"),
    "one's own": (r"\bone's own\b", "a loss of one's own"),
    "problems are asked": (r"\bproblems? (?:that )?(?:is|are) asked\b", "problems that are asked"),
    "what ... is": (
        r"(?:^|[.:;|] )What (?!is (?:it|the)\b)[^.|?\n]{3,60} (?:is|are|has|was)\b(?![^.|\n]*\?)",
        "What is tested is vLLM.",
    ),
}
"""A pattern for each turn of phrase to avoid, and a text in which it is found."""
DOCSTRING = re.compile(r"(?:What|Of|As|So)\b")


def navigation() -> dict[str, list[str]]:
    """The pages of each group of the site, in its order."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    groups: list[dict[str, Any]] = yaml.safe_load(text[text.index("nav:\n") :])["nav"]
    return {
        name: [page for each in pages for page in each.values()] for group in groups for name, pages in group.items()
    }


def guide() -> list[Path]:
    """The pages that people read in the order of their work."""
    pages = navigation()
    return [ROOT / "docs" / page for name in pages if name not in ("Reference", "Laboratory") for page in pages[name]]


def prose(page: str) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "`code`", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE))


def found(page: str) -> list[str]:
    """Each broken rule with its surroundings."""
    hits = ((name, match) for name, (rule, _) in RULES.items() for match in re.finditer(rule, page, re.MULTILINE))
    return [f"{name}: ...{page[max(match.start() - 40, 0) : match.end() + 20]!r}" for name, match in hits]


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "AGENTS.md", *guide()], ids=lambda path: path.stem)
def test_a_page_keeps_the_rules_of_language(page: Path):
    assert found(prose(page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("name", RULES)
def test_each_rule_finds_what_it_forbids(name: str):
    rule, example = RULES[name]
    assert re.search(rule, example)


def test_the_guide_has_at_most_20_pages_and_the_readme_140_lines():
    assert len(guide()) <= 20
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 140
    assert list(navigation())[-1] == "Laboratory"
    assert all(page.startswith("lab/") for page in navigation()["Laboratory"])


def test_people_and_tools_begin_with_the_same_command():
    for name in ("README.md", "AGENTS.md", "docs/index.md"):
        commands = re.search(r"^```\w*\n(\S.*)$", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert commands is not None
        assert commands[1].split("#")[0].strip() == "make quickstart", name


def docstrings(root: Path = ROOT / "src") -> Iterator[tuple[str, str]]:
    """The file, line and text of every docstring, also below attributes."""
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield f"{path.relative_to(root)}:{node.lineno}", node.value.value


def test_no_docstring_opens_with_a_relative_clause():
    assert [line for line, text in docstrings() if DOCSTRING.match(text)] == []


def test_the_rule_of_docstrings_sees_those_of_attributes(tmp_path: Path):
    (tmp_path / "a.py").write_text('"""A module."""\nx = 1\n"""What x is."""\ndef f():\n    """As g does."""\n')
    found = [text for _, text in docstrings(tmp_path) if DOCSTRING.match(text)]
    assert found == ["What x is.", "As g does."]
