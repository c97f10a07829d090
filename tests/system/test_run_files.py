"""Laws of a run on disk: only `runs/` names the files of a run and reads its tables; only
`evaluation` pairs; no test writes a file of a run by hand.
"""

import ast
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import pytest

from helpers.paths import ROOT, TESTS

SOURCE = ROOT / "src" / "dapo"
RUN_FILES = {
    *(
        "lock",
        "config.yaml",
        "manifest.json",
        "metrics.jsonl",
        "summary.json",
        "curves.png",
        "problems.parquet",
    ),
    *("rollouts", "eval", "checkpoints"),
    *("console.log", "verifier.log"),
}
TABLE_READERS = {"ParquetFile", "read_table", "read_schema", "read_parquet"}
OTHER_FILES = {
    "distributed/weight_files.py": "the lock of a folder of weights",
    "cli/submit.py": "the configuration that a job is submitted with",
    "data/sources/readers.py": "the user's data",
    "sampling/saved_groups.py": "a part of a checkpoint, which its writer reads",
}
"""Files that name or read something of the same name that is no file of a run."""


def run_files_in(source: str) -> Iterator[str]:
    """Each place that joins a path with the name of a run's file, searches its steps, or reads a
    table.
    """
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
    is_search = (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and "glob" in node.func.attr
    )
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
    return {
        str(path): (SOURCE / path).read_text(encoding="utf-8")
        for path in paths
        if path.parts[0] != outside
    }


def test_only_runs_names_files_of_a_run_and_reads_its_tables():
    found = {name: list(run_files_in(text)) for name, text in sources(outside="runs").items()}
    assert {name: lines for name, lines in found.items() if lines and name not in OTHER_FILES} == {}
    # an exception that nothing needs goes
    assert {name for name in OTHER_FILES if not found[name]} == set()


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
    users = {
        name
        for name, text in sources(outside="evaluation").items()
        if "MUST_MATCH" in text and "MUST_MATCH" in names_of(text)
    }
    assert users == set()
    settings = {"temperature", "top_p", "max_response_tokens", "binary"}
    copies = [
        name
        for name, text in sources(outside="evaluation").items()
        if all(setting in text for setting in settings)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Tuple | ast.List | ast.Set)
        and settings <= {each.value for each in node.elts if isinstance(each, ast.Constant)}
    ]
    assert copies == []


# --- tests take what a run writes from a run, or from the functions that write it

WRITTEN = {
    "lock",
    "config.yaml",
    "manifest.json",
    "metrics.jsonl",
    "summary.json",
    "problems.parquet",
}
PATHS = {"metrics", "summary", "manifest", "problem_stats", "eval", "rollouts"}
WRITING_METHODS = {"write_text", "write_bytes", "touch"}
WRITING_FUNCTIONS = {
    "atomic_write_json": 0,
    "atomic_write_text": 0,
    "copy": 1,
    "copyfile": 1,
    "open": 0,
}
"""Functions that write a file, with the position of its path among their arguments."""
DAMAGE = {
    "analysis/test_damaged_runs.py:line": "a damaged last line of the metrics",
    "config/test_config.py:"
    "test_the_form_that_the_advice_on_a_reference_names_is_taken_and_replaces_a_stored_one": (
        "options that a user edits"
    ),
    "core/test_files.py:test_a_file_replaces_a_link_and_is_not_written_through_it": (
        "a file in the place of a link"
    ),
    "helpers/run_files.py:edit_options": "options that a user edits",
    "start/test_model_card.py:with_options": "options that a user edits",
    "start/test_model_card.py:"
    "test_a_graded_run_has_a_mean_score_and_a_run_without_evaluation_says_so": (
        "the evaluations of a run whose reward is graded"
    ),
    "start/test_model_card.py:"
    "test_changed_options_and_the_parent_of_a_fork_are_told_up_to_the_exported_step": (
        "the manifest of a fork of a run that is gone"
    ),
    "system/test_template_date.py:"
    "test_a_reward_models_template_has_the_date_of_the_run_too_also_after_a_resume": (
        "a run that started on another day"
    ),
    "runs/test_stored_files.py:test_a_folder_with_nul_in_the_manifest_is_no_folder": (
        "a hostile manifest"
    ),
    "runs/test_foreign_run.py:test_no_file_of_a_run_runs_that_its_config_does_not_name": (
        "a hostile manifest"
    ),
    "runs/test_directory.py:TestCheckpoints": "a damaged manifest of a checkpoint",
    "runs/test_directory.py:test_a_damaged_evaluation_is_named_and_left_out": (
        "a damaged evaluation"
    ),
    "runs/test_directory.py:test_only_the_first_and_the_last_readable_evaluation_are_read": (
        "a damaged evaluation"
    ),
    "system/test_durability.py:TestMessagesOnResuming": "metrics without their last lines",
    "system/test_durability.py:TestStartsThatAreKilled": "empty files of a start that was killed",
    "system/test_template_date.py:run": "a run that was started on another day",
    "system/test_template_date.py:test_a_run_from_before_the_entry_has_the_date_of_its_start": (
        "an older run"
    ),
}
"""Functions that write such a file by hand because the point of the test is a damaged, edited or
hostile one.
"""


def written_by_hand(source: str) -> Iterator[tuple[str, str]]:
    """Each write of a run's file that is not made by the package: the function or class, and the
    call.
    """
    for scope in ast.parse(source).body:
        name = getattr(scope, "name", "")
        names = _run_paths(scope)
        for node in ast.walk(scope):
            target = _written_path(node)
            if target is not None and (
                _is_run_path(target, names) or (isinstance(target, ast.Name) and target.id in names)
            ):
                yield name, f"{node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]


def _written_path(node: ast.AST) -> ast.expr | None:
    """The path that a call writes; None for any other node."""
    if not isinstance(node, ast.Call):
        return None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name in WRITING_METHODS and isinstance(node.func, ast.Attribute):
        return node.func.value
    if name == "open" and not set("wax") & set("".join(_texts(node.args))):
        return None
    if name == "open" and isinstance(node.func, ast.Attribute):
        return node.func.value
    position = WRITING_FUNCTIONS.get(name)
    return node.args[position] if position is not None and len(node.args) > position else None


def _is_run_path(node: ast.AST, names: Collection[str] = ()) -> bool:
    """Whether an expression is the path of a run's file: `run / "lock"`, `directory.metrics`,
    `run.eval(5)`.
    """
    if isinstance(node, ast.BinOp):
        is_named = isinstance(node.right, ast.Name) and node.right.id in names
        return is_named or bool({*_texts([node.right])} & WRITTEN)
    called = node.func if isinstance(node, ast.Call) else node
    return isinstance(called, ast.Attribute) and called.attr in PATHS


def _run_paths(scope: ast.AST) -> set[str]:
    """The variables of a function that are paths of a run's files, or names of them in a loop."""
    found = set()
    for node in ast.walk(scope):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and _is_run_path(node.value)
        ):
            found.add(node.targets[0].id)
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            parts = node.iter.elts if isinstance(node.iter, ast.Tuple | ast.List) else []
            if {*_texts(parts)} & WRITTEN or any(map(_is_run_path, parts)):
                found.add(node.target.id)
    return found


def _texts(nodes: Iterable[ast.AST]) -> list[str]:
    return [
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def test_no_test_writes_a_file_of_a_run_by_hand():
    found = {
        f"{path.relative_to(TESTS)}:{name}": call
        for path in sorted(TESTS.rglob("*.py"))
        for name, call in written_by_hand(path.read_text(encoding="utf-8"))
    }
    assert {where: call for where, call in found.items() if where not in DAMAGE} == {}
    assert sorted(DAMAGE.keys() - found.keys()) == []  # an exception that nothing needs goes


@pytest.mark.parametrize(
    "planted",
    [
        '(path / "lock").write_text(f"{os.getpid()}")',
        'atomic_write_json(path / "manifest.json", {})',
        "run.metrics.write_text(lines)",
        'config = path / "config.yaml"\n    config.touch()',
        'for name in ("config.yaml", "manifest.json"):\n        (path / name).touch()',
        'shutil.copy(TINY, made / "config.yaml")',
        'with open(run.path / "metrics.jsonl", "a") as lines:\n        pass',
        "atomic_write_json(run.eval(5), values)",
    ],
)
def test_a_file_of_a_run_that_a_test_writes_by_hand_is_found(planted: str):
    assert [name for name, _ in written_by_hand(f"def test_x(path):\n    {planted}\n")] == [
        "test_x"
    ]


def test_a_test_may_read_what_a_run_wrote():
    assert (
        list(written_by_hand('rows = (run / "metrics.jsonl").read_text()\nopen(run.metrics)')) == []
    )


def test_the_whole_package_is_read():
    assert len(sources(outside="runs")) > 150
    assert Path(SOURCE / "runs" / "directory.py").is_file()
