"""Laws of a run on disk: only `runs/` names the files of a run and reads its tables; only `evaluation` pairs."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.paths import ROOT

SOURCE = ROOT / "src" / "dapo"
RUN_FILES = {
    *("lock", "config.yaml", "manifest.json", "metrics.jsonl", "summary.json", "curves.png", "problems.parquet"),
    *("rollouts", "eval", "checkpoints"),
}
TABLE_READERS = {"ParquetFile", "read_table", "read_schema", "read_parquet"}
OTHER_FILES = {
    "distributed/weight_files.py": "the lock of a folder of weights",
    "cli/submit.py": "the configuration that a job is submitted with",
    "data/sources/readers.py": "the user's data",
    "training/problem_stats.py": "a part of a checkpoint, which its writer reads",
    "training/prefetched_batch.py": "a part of a checkpoint, which its writer reads",
}
"""Files that name or read something of the same name that is no file of a run."""


def run_files_in(source: str) -> Iterator[str]:
    """Each place that joins a path with the name of a run's file, searches its steps, or reads a table."""
    for node in ast.walk(ast.parse(source)):
        if _joins_a_run_file(node) or _searches_steps(node):
            yield f"{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]
        elif isinstance(node, ast.Attribute) and node.attr in TABLE_READERS:
            yield f"{node.lineno}: {ast.unparse(node)}"


def _joins_a_run_file(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
        return False
    text = ast.unparse(node.right)
    is_named = isinstance(node.right, ast.Constant) and node.right.value in RUN_FILES
    return is_named or ("step_{" in text and ".json.gz" not in text)  # not a trace of the profiler


def _searches_steps(node: ast.AST) -> bool:
    is_search = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and "glob" in node.func.attr
    return is_search and any("step_" in ast.unparse(each) for each in node.args[:1])  # type: ignore[attr-defined]


def names_of(source: str) -> set[str]:
    """Every name and attribute in a source."""
    tree = ast.parse(source)
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)
    }


def sources(*, outside: str) -> dict[str, str]:
    """The text of each module of the package that is not in a folder, by its path."""
    paths = (path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py")))
    return {str(path): (SOURCE / path).read_text(encoding="utf-8") for path in paths if path.parts[0] != outside}


def test_only_runs_names_files_of_a_run_and_reads_its_tables():
    found = {name: list(run_files_in(text)) for name, text in sources(outside="runs").items()}
    assert {name: lines for name, lines in found.items() if lines and name not in OTHER_FILES} == {}
    assert {name for name in OTHER_FILES if not found[name]} == set()  # an exception that nothing needs goes


@pytest.mark.parametrize(
    "planted",
    [
        'held = (path / "lock").read_text()',
        'rows = open(run.path / "metrics.jsonl")',
        'tables = sorted(path.glob("rollouts/step_*.parquet"))',
        'table = folder / f"step_{step:06d}.parquet"',
        "rows = pq.read_table(table)",
        "frame = pd.read_parquet(table)",
    ],
)
def test_a_reader_outside_of_runs_is_found(planted: str):
    assert len(list(run_files_in(planted))) == 1


def test_only_evaluation_decides_what_may_be_paired():
    users = {name for name, text in sources(outside="evaluation").items() if "MUST_MATCH" in names_of(text)}
    assert users == set()
    settings = {"temperature", "top_p", "max_response_tokens", "binary"}
    copies = [
        name
        for name, text in sources(outside="evaluation").items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and settings <= {each.value for each in node.elts if isinstance(each, ast.Constant)}
    ]
    assert copies == []


def test_the_whole_package_is_read():
    assert len(sources(outside="runs")) > 150
    assert Path(SOURCE / "runs" / "directory.py").is_file()
