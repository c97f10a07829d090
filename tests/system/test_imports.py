"""Laws of the layout: imports point up the list of layers, heavy packages stay where they belong,
docs name real code.

Imports are read with `ast`: no code runs, so an uninstalled optional package hides nothing.
"""

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from helpers import paths as where

PACKAGE = "dapo"
ROOT = where.ROOT / "src" / PACKAGE

LAYERS = [
    {"libs"},
    {"core"},
    {"algo", "processes"},
    {"config", "types"},
    {"data", "rewards", "engines", "policy"},
    {"distributed", "environments"},
    {"evaluation"},
    {"runs"},
    {"sampling"},
    {"training"},
    {"start"},
    {"analysis"},
    {"api", "cli"},
    {"__main__"},
]

# where an optional package may be imported: inside functions of one file of each folder named here
OPTIONAL_HOMES = {
    "ray": {"distributed"},
    "vllm": {"engines"},
    "peft": {"policy"},
    "datasets": {"data"},
    "jsonschema": {"rewards"},
    "datasketch": {"data"},
    "reasoning_gym": {"data", "rewards"},
    "tensorboard": {"runs"},
    "trackio": {"runs"},
    "mlflow": {"runs"},
    "wandb": {"runs"},
}
SEVERAL_FILES = {"ray"}  # a whole folder stands for it

# modules that must load in a fraction of a second: the command line, config errors, verifier
# processes
LIGHT = (
    "core",
    "config",
    "types",
    "data",
    "processes",
    "rewards",
    "cli/main",
    "cli/model_commands",
    "cli/prompts",
    "cli/data",
    "cli/reward",
    "cli/submit",
    "cli/train",
    "runs/status",
    "runs/stored_config",
    "start/check",
    "start/model_choice",
)
HEAVY = {"torch", "transformers", "math_verify", "reasoning_gym", "datasets", "pyarrow"}
# packages with which one looks at a run, or reads a model's first file: no start waits for them
ON_USE = {"gguf", "matplotlib", "pandas", "starlette", "uvicorn"}


@dataclass(frozen=True)
class Import:
    """One imported name, wherever in a file it stands."""

    file: Path
    line: int
    target: str
    """Absolute: `dapo.rewards.verifiers.math`, `torch.nn`."""
    deferred: bool
    """Inside a function: not run when the module is imported."""
    typing_only: bool
    """Under `if TYPE_CHECKING:`: never run."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


@cache
def imports_of(root: Path) -> list[Import]:
    """Every import of every module below the package folder `root`, read once."""
    return [found for path in sorted(root.rglob("*.py")) for found in _imports_in(path, root)]


def _imports_in(path: Path, root: Path) -> Iterator[Import]:
    package = (root.name, *path.relative_to(root).parent.parts)
    text = path.read_text(encoding="utf-8")
    has_calls = "__import__" in text or "import_module" in text  # in expressions

    def visit(node: ast.AST, deferred: bool, typing_only: bool) -> Iterator[Import]:
        for target in _targets(node, package):
            yield Import(path.relative_to(root), node.lineno, target, deferred, typing_only)
        inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.If) and ast.unparse(node.test) in (
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        ):
            for child in node.body:
                yield from visit(child, inside, True)
            for child in node.orelse:
                yield from visit(child, inside, typing_only)
        else:
            for child in ast.iter_child_nodes(node):
                if has_calls or not isinstance(child, ast.expr):
                    yield from visit(child, inside, typing_only)

    yield from visit(ast.parse(text), False, False)


def _targets(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package[: len(package) - node.level + 1] if node.level else ()
        source = ".".join([*above, *filter(None, [node.module])])
        return [f"{source}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "importlib.import_module",
        "import_module",
        "__import__",
    ):
        return [
            arg.value
            for arg in node.args[:1]
            if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
        ]
    return []


def _layer(part: str) -> int | None:
    return next((level for level, names in enumerate(LAYERS) if part in names), None)


def _part(file: Path) -> str:
    """The room of a file: `rewards/math.py` -> rewards, `train.py` -> train."""
    return file.parts[0].removesuffix(".py")


def downward_imports(root: Path) -> list[str]:
    """What breaks the list of layers, one line each."""
    faults = []
    for found in imports_of(root):
        names = found.target.split(".")
        if names[0] != root.name:
            continue
        own = _part(found.file)
        other = (
            _part(Path(*names[1:3])) if len(names) > 1 and _exists(root, names[1]) else "__init__"
        )
        if other in (own, "__init__") or (own == "__init__" and found.typing_only):
            # the public names are imported when they are used: only a type checker reads where they
            # are
            continue
        level = -1 if own == "__init__" else _layer(own)
        other_level = _layer(other)
        if level is None or other_level is None:
            continue  # unlisted_parts() names them once
        if other_level > level:
            faults.append(f"{found}: layer {level} must not import layer {other_level}")
        elif other_level == level and (root / own).is_dir() and (root / other).is_dir():
            faults.append(f"{found}: folders on one level never import each other")
    return faults


def _exists(root: Path, part: str) -> bool:
    return (root / part).is_dir() or (root / f"{part}.py").is_file()


def unlisted_parts(root: Path) -> list[str]:
    parts = {_part(path.relative_to(root)) for path in root.rglob("*.py")} - {"__init__"}
    return sorted(part for part in parts if _layer(part) is None)


def misplaced_optional_imports(root: Path) -> list[str]:
    """Optional packages imported outside their home, at module level, or in two files of one
    folder.
    """
    faults = []
    files: dict[tuple[str, str], set[Path]] = {}
    for found in imports_of(root):
        package = _optional_package(found.target)
        if package is None:
            continue
        home = _part(found.file)
        if home not in OPTIONAL_HOMES[package]:
            faults.append(
                f"{found}: {package} belongs in {' and '.join(sorted(OPTIONAL_HOMES[package]))}"
            )
        elif not (found.deferred or found.typing_only):
            faults.append(f"{found}: {package} is optional, import it inside a function")
        files.setdefault((package, home), set()).add(found.file)
    for (package, home), paths in files.items():
        if len(paths) > 1 and package not in SEVERAL_FILES:
            faults.append(
                f"{package} is imported in {len(paths)} files of {home}: {sorted(map(str, paths))}"
            )
    return faults


def _optional_package(target: str) -> str | None:
    if target.startswith("torch.utils.tensorboard"):
        return "tensorboard"
    first = target.split(".")[0]
    return first if first in OPTIONAL_HOMES else None


def heavy_imports(root: Path, light: tuple[str, ...] = LIGHT, heavy: Set[str] = HEAVY) -> list[str]:
    """Chains of module-level imports that lead from a light module to a heavy package."""
    by_file: dict[Path, list[Import]] = {}
    for found in imports_of(root):
        if not (found.deferred or found.typing_only):
            by_file.setdefault(found.file, []).append(found)
    faults = []
    for start in sorted(path.relative_to(root) for path in root.rglob("*.py")):
        if not {_part(start), str(start.with_suffix(""))} & set(light):
            continue
        seen: set[Path] = set()
        trail = [(start, str(start))]
        while trail:
            file, route = trail.pop()
            if file in seen:
                continue
            seen.add(file)
            # importing a module runs the __init__ of every package above it
            trail += [
                (parent / "__init__.py", f"{route} ({parent}/__init__.py)")
                for parent in file.parents
            ]
            for found in by_file.get(file, []):
                if found.target.split(".")[0] in heavy:
                    faults.append(f"{route} -> {found.target}")
                trail += [
                    (module, f"{route} -> {module}") for module in _modules(found.target, root)
                ]
    return faults


@cache
def _modules(target: str, root: Path) -> list[Path]:
    """The file behind an import of the package itself: `dapo.a.b` is a module `a/b.py`, or a name
    in `a.py`.
    """
    names = target.split(".")
    if names[0] != root.name:
        return []
    for end in (len(names), len(names) - 1):
        inner = Path(*names[1:end])
        candidates = [inner / "__init__.py", *([inner.with_suffix(".py")] if inner.parts else [])]
        files = [path for path in candidates if (root / path).is_file()]
        if files:
            return files
    return []


def circle(root: Path) -> list[str]:
    """A circle of files that import each other, the first again at its end; empty if there is none.

    Imports in functions and under `if TYPE_CHECKING:` count. The package's own `__init__.py` does
    not: it only says where the public names are.
    """
    surface = Path("__init__.py")
    graph: dict[Path, set[Path]] = {}
    for found in imports_of(root):
        if found.file != surface:
            targets = set(_modules(found.target, root)) - {found.file, surface}
            graph.setdefault(found.file, set()).update(targets)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(file) for file in error.args[1]]
    return []


# --- the package


def test_every_module_is_in_the_list_of_layers():
    assert unlisted_parts(ROOT) == []


def test_imports_point_up_the_list_of_layers_only():
    assert downward_imports(ROOT) == []


def test_no_files_import_each_other_in_a_circle():
    assert circle(ROOT) == []


@pytest.mark.parametrize(
    "name",
    [
        "__init__",
        "types",
        "algo/__init__",
        "config/__init__",
        "evaluation/__init__",
        "rewards/__init__",
    ],
)
def test_a_public_folder_lists_its_public_names_which_exist(name: str):
    module = importlib.import_module(
        f"{PACKAGE}/{name}".removesuffix("/__init__").replace("/", ".")
    )
    namespace: dict[str, object] = {}
    exec(f"from {module.__name__} import *", namespace)
    assert set(module.__all__) - {"__version__"} <= namespace.keys()


def test_optional_packages_are_imported_inside_functions_of_their_own_file():
    assert misplaced_optional_imports(ROOT) == []


def test_light_modules_load_without_torch_and_other_heavy_packages():
    assert heavy_imports(ROOT) == []


def test_packages_for_looking_at_a_run_are_imported_on_use():
    assert (
        heavy_imports(ROOT, ("cli", "api", "training", "sampling", "runs", "policy"), ON_USE) == []
    )


def test_every_required_package_is_imported():
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    required = {re.split(r"[<>=]", requirement)[0] for requirement in project["dependencies"]}
    imported = {
        found.target.split(".")[0] for root in (ROOT, *LIBRARIES) for found in imports_of(root)
    }
    assert required - imported == set()


def test_the_paper_knows_no_configuration():
    wrong = [
        str(i)
        for i in imports_of(ROOT)
        if _part(i.file) == "algo" and i.target.startswith("dapo.config")
    ]
    assert wrong == []


def test_the_walker_sees_the_package_at_all():
    targets = {(str(found.file), found.target) for found in imports_of(ROOT)}
    assert ("types.py", "dapo.algo.sampling.is_informative") in targets
    assert ("algo/loss.py", "torch") in targets


# --- the libraries

LIBRARIES = sorted(path.parent for path in ROOT.glob("libs/*/__init__.py"))


ALLOWED = {
    "strict_math": {"mpmath"},
    "code_sandbox": {"remote", "rpc", "test_runner", "pytest_subset"},
    "cpu_kernels": {"torch"},
    "foreign_options": {"yaml"},
    "gated_store": {"torch"},
    "sample_intervals": {"numpy"},
    "vllm_weights": {"torch"},
}
"""Other packages that a library imports; those of `code_sandbox` are scripts beside the one that a
process runs.
"""


def foreign_imports(root: Path, allowed: Set[str]) -> list[str]:
    """Imports of anything but the standard library, the package itself and these packages."""
    known = sys.stdlib_module_names | {root.name, ""} | allowed
    return [str(found) for found in imports_of(root) if found.target.split(".")[0] not in known]


@pytest.mark.parametrize("root", LIBRARIES, ids=lambda path: path.name)
def test_a_library_imports_nothing_of_dapo_and_says_what_it_offers(root: Path):
    assert foreign_imports(root, ALLOWED.get(root.name, set())) == []
    init = ast.parse((root / "__init__.py").read_text(encoding="utf-8"))
    assert any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for node in init.body
    )
    assert (root / "README.md").is_file()
    assert (root / "py.typed").is_file()


def test_there_is_a_library_and_an_import_of_dapo_in_one_is_found(tmp_path: Path):
    assert LIBRARIES
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "a.py").write_text(
        "import ast\nfrom library.b import c\ndef f():\n    from dapo import types"
    )
    assert foreign_imports(tmp_path / "library", set()) == ["a.py:4 imports dapo.types"]


# --- the page that maps the paper to the code


def missing_names(page: str, source: Path, tests: Path) -> list[str]:
    """Names written as `file.py:name` or `test_file.py::test` on the page that do not exist."""
    written = re.findall(r"`([\w/]+\.py)(::?)(\w+)`", page)
    homes = {":": source, "::": tests}
    return [
        f"{file}{colon}{name}"
        for file, colon, name in written
        if name not in _top_names(homes[colon] / file)
    ]


def _top_names(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return names


def test_the_paper_page_names_only_functions_and_tests_that_exist():
    page = (ROOT.parents[1] / "docs" / "paper.md").read_text(encoding="utf-8")
    assert page.count("::test_") > 20
    assert missing_names(page, ROOT, where.TESTS) == []


def test_a_name_on_the_paper_page_that_does_not_exist_is_found(tmp_path):
    (tmp_path / "a.py").write_text("def f(): ...\nclass C: ...\nX: int = 1\nY = 2\n")
    page = "`a.py:f` `a.py:C` `a.py:X` `a.py:Y` `a.py::f` `a.py:g` `a.py::test_g` `b.py:f` `a.py`"
    assert missing_names(page, tmp_path, tmp_path) == ["a.py:g", "a.py::test_g", "b.py:f"]


# --- the walker itself, on a small tree


def tree(folder: Path, files: dict[str, str]) -> Path:
    """A package `dapo` of these files, path -> text; folders get an empty `__init__.py`."""
    root = folder / "dapo"
    for name, text in {"__init__": "", **files}.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("importer", "text"),
    [
        ("config", "from dapo.rewards.verifiers.math import verify"),
        ("config", "import dapo.rewards"),
        ("config", "import dapo.rewards.verifiers.math as m"),
        ("config", "from dapo import rewards"),
        ("config", "from . import rewards"),
        ("config", "from .rewards import math"),
        ("algo/loss", "from ..rewards.math import verify"),
        ("algo/loss", "from .. import rewards"),
        ("config", "def late():\n    from dapo.rewards import math"),
        (
            "config",
            "class Late:\n    async def f(self):\n        import dapo.rewards.verifiers.math",
        ),
        (
            "config",
            (
                "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dapo.rewards import"
                " math"
            ),
        ),
        ("config", "try:\n    from dapo import rewards\nexcept ImportError:\n    pass"),
        (
            "config",
            "import importlib\nmodule = importlib.import_module('dapo.rewards.verifiers.math')",
        ),
        ("data/stream", "from dapo.rewards.verifiers.math import verify"),
        ("data/stream", "def late():\n    import dapo.rewards"),
        ("__init__", "from dapo.rewards import math"),
        ("start/build", "from dapo.analysis import probe"),
        ("training/loop", "from dapo.start import build"),
    ],
)
def test_walker_finds_each_way_to_write_an_import_that_points_down_or_sideways(
    tmp_path, importer, text
):
    files = dict.fromkeys(["rewards/math", "start/build", "analysis/probe"], "")
    root = tree(tmp_path, {**files, importer: text})
    assert len(downward_imports(root)) == 1


@pytest.mark.parametrize(
    ("importer", "text"),
    [
        (
            "rewards/pool",
            (
                "from dapo.rewards.verifiers.math import verify\nfrom .math import other\nfrom ."
                " import math"
            ),
        ),
        ("rollout", "from dapo.rewards import math\nfrom dapo import __version__\nimport dapo"),
        ("types", "from dapo.config import Config"),
        ("train", "from dapo.sampling.batch import collect"),
        ("cli", "from dapo import assemble, rollout, rewards"),
        ("config", "import dapodil\nfrom dapodil.rewards import math\nimport os.path"),
        ("config", "TEXT = 'import dapo.rewards'"),
        ("__init__", "__version__ = '1'"),
    ],
)
def test_walker_lets_imports_up_the_list_pass(tmp_path, importer, text):
    files = dict.fromkeys(["rewards/math", "rollout", "config", "assemble"], "")
    assert downward_imports(tree(tmp_path, {**files, importer: text})) == []


@pytest.mark.parametrize(
    "text",
    [
        "from dapo.core.a import A",
        "def late():\n    from dapo.core import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dapo.core.a import A",
    ],
)
def test_walker_finds_a_circle_of_files_by_each_kind_of_import(tmp_path: Path, text: str):
    files = {
        "core/a": "from dapo.core.b import B",
        "core/b": "from dapo.core.c import C",
        "core/c": "",
    }
    assert circle(tree(tmp_path / "tree", {**files, "__init__": "from dapo.core.a import A"})) == []
    found = circle(tree(tmp_path / "circle", {**files, "core/c": text}))
    assert found[0] == found[-1]
    assert sorted(found[1:]) == ["core/a.py", "core/b.py", "core/c.py"]


def test_walker_names_file_line_and_layers(tmp_path):
    root = tree(
        tmp_path,
        {
            "rewards/math": "",
            "config": "import os\n\nfrom dapo.rewards.verifiers.math import verify\n",
        },
    )
    assert downward_imports(root) == [
        "config.py:3 imports dapo.rewards.verifiers.math.verify: layer 3 must not import layer 4"
    ]


def test_walker_reports_a_module_that_is_in_no_layer(tmp_path):
    assert unlisted_parts(tree(tmp_path, {"types": "", "novel/thing": "", "oddity": ""})) == [
        "novel",
        "oddity",
    ]


@pytest.mark.parametrize(
    ("files", "faults"),
    [
        ({"runs/sinks": "def f():\n    import wandb"}, 0),
        ({"runs/sinks": "def f():\n    from torch.utils.tensorboard import SummaryWriter"}, 0),
        (
            {"runs/sinks": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import wandb"},
            0,
        ),
        (
            {
                "distributed/actors": "def f():\n    import ray",
                "distributed/pools": "def f():\n    import ray",
            },
            0,
        ),
        (
            {
                "data/gym": "def f():\n    import reasoning_gym",
                "rewards/gym": "def f():\n    import reasoning_gym",
            },
            0,
        ),
        ({"runs/sinks": "import wandb"}, 1),
        ({"runs/sinks": "from torch.utils.tensorboard import SummaryWriter"}, 1),
        ({"runs/sinks": "class Sink:\n    import trackio"}, 1),
        ({"runs/sinks": "try:\n    import wandb\nexcept ImportError:\n    wandb = None"}, 1),
        ({"train": "def f():\n    import wandb"}, 1),
        ({"rollout": "def f():\n    from vllm.sampling_params import SamplingParams"}, 1),
        ({"runs/a": "def f():\n    import wandb", "runs/b": "def f():\n    import wandb"}, 1),
        (
            {
                "policy/model": (
                    "def f():\n    import importlib\n    return importlib.import_module('peft')"
                )
            },
            0,
        ),
        ({"cli": "def f():\n    return __import__('ray')"}, 1),
    ],
)
def test_walker_finds_optional_packages_imported_elsewhere(tmp_path, files, faults):
    assert len(misplaced_optional_imports(tree(tmp_path, files))) == faults


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"config": "import torch.nn"}, "config.py -> torch.nn"),
        (
            {"config": "from dapo.types import A", "types": "from torch import Tensor"},
            "config.py -> types.py -> torch.Tensor",
        ),
        ({"rewards/math": "", "rewards/__init__": "import torch"}, "rewards/__init__.py -> torch"),
        (
            {"cli/main": "from dapo import assemble", "assemble": "import transformers"},
            "cli/main.py -> assemble.py -> transformers",
        ),
        (
            {"config": "from dapo.algo.loss import f", "algo/loss": "import torch"},
            "config.py -> algo/loss.py -> torch",
        ),
    ],
)
def test_walker_finds_the_chain_from_a_light_module_to_a_heavy_package(tmp_path, files, fault):
    assert fault in heavy_imports(tree(tmp_path, files))


def test_walker_lets_light_modules_import_heavy_ones_late_or_for_types(tmp_path):
    files = {
        "cli/main": "def train():\n    from dapo import assemble",
        "assemble": "import torch",
        "config": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch",
        "policy/model": "import torch",
    }
    assert heavy_imports(tree(tmp_path, files)) == []


TEST_FOLDERS = ("tests", "benchmarks/tests", "evidence/tests")


def _imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


MAY_IMPORT_A_TEST = re.compile(r"^\s*(from|import)\s[^#\n]*\btest_", re.MULTILINE)
"""Found in few files, of which alone the syntax is read."""


def test_no_test_file_imports_from_another():
    imports = [
        f"{path.relative_to(where.ROOT)}: {module}"
        for folder in TEST_FOLDERS
        for path in sorted((where.ROOT / folder).rglob("*.py"))
        if MAY_IMPORT_A_TEST.search(text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        for module in _imported_modules(node)
        if module.rpartition(".")[2].startswith("test_")
    ]
    assert imports == []
