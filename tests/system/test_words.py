"""Names: words that CONTRIBUTING.md retires do not come back in identifiers, and a test's name is a name."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from helpers.paths import ROOT

FOLDERS = ("src", "tests", "benchmarks", "evidence", "examples")
TEST_FOLDERS = ("tests", "benchmarks/tests", "evidence/tests")
MAX_TEST_NAME = 89


def retired_words(page: str) -> dict[str, str]:
    """Each word in the left column of the table `not | but`, with what stands in the right one."""
    _, _, table = page.partition("| not | but |\n")
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table.partition("\n\n")[0], flags=re.MULTILINE)
    return {word: instead for words, instead in rows for word in re.findall(r"`(\w+)`", words)}


def words_of(identifier: str) -> str:
    """`_snake_case` and `CamelCase` as `snake case` and `camel case`."""
    return " ".join(re.findall(r"[a-z0-9]+|[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", identifier)).lower()


def identifiers(source: str) -> list[tuple[str, int]]:
    """Every name in a Python source, with its line; keywords are names as well."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [(token.string, token.start[0]) for token in tokens if token.type == tokenize.NAME]


def retired_in(source: str, retired: dict[str, str]) -> list[str]:
    """`line: identifier` of each identifier that contains a retired word, with the word to use instead."""
    phrases = {f" {words_of(word)} ": instead for word, instead in retired.items()}
    pattern = re.compile("|".join(sorted(phrases, key=len, reverse=True)))
    found = []
    for name, line in identifiers(source):
        if match := pattern.search(f" {words_of(name)} "):
            found.append(f"{line}: {name} (CONTRIBUTING.md: {phrases[match[0]]})")
    return found


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_no_identifier_contains_a_retired_word():
    retired = retired_words((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(retired) > 50
    found = [
        f"{path.relative_to(ROOT)}:{each}"
        for path in python_files(*FOLDERS)
        for each in retired_in(path.read_text(encoding="utf-8"), retired)
    ]
    assert found == []


def test_names_of_tests_are_under_90_characters():
    long = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in python_files(*TEST_FOLDERS)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > MAX_TEST_NAME
    ]
    assert long == []


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def test_no_test_file_imports_from_another():
    imports = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in python_files(*TEST_FOLDERS)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for module in _modules(node)
        if module.rpartition(".")[2].startswith("test_")
    ]
    assert imports == []


@pytest.mark.parametrize("name", ["Seat", "_free_seat", "SEAT_COUNT", "EngineSeat", "no_spread", "NoSpread"])
def test_a_retired_word_is_found_in_each_kind_of_name(name: str):
    assert len(retired_in(f"{name}\n", {"seat": "EngineHandle", "no_spread": "zero_variance"})) == 1


@pytest.mark.parametrize("source", ["'seat'", "# seat", "seating", "spread", "no_word_spread", "seatbelt"])
def test_other_words_strings_and_comments_are_left_alone(source: str):
    assert retired_in(f"{source}\n", {"seat": "EngineHandle", "no_spread": "zero_variance"}) == []
