"""What is published: a wheel that works without the repository, a source archive that it is built
from, one version.

Nothing is downloaded: the wheel goes into an empty environment that sees the other packages of this
one.
"""

import ast
import email.parser
import importlib.metadata
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

import dapo
from dapo.config import find_config
from dapo.config.load import shipped
from dapo.core.errors import ConfigError
from helpers.commands import run
from helpers.paths import CONFIGS, ROOT

SOURCES = (
    "src",
    "configs",
    "docs",
    "CHANGELOG.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "pyproject.toml",
    "setup.py",
)
JUNK = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.tmp", "*.so")


@dataclass(frozen=True)
class Distributions:
    """What `python -m build` made, and the files of each by name below the top folder."""

    wheel: Path
    in_wheel: dict[str, bytes]
    in_sdist: dict[str, bytes]

    @property
    def metadata(self) -> Message:
        (text,) = (
            content
            for name, content in self.in_wheel.items()
            if name.endswith(".dist-info/METADATA")
        )
        return email.parser.Parser().parsestr(text.decode())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The wheel, built from the source archive, which is built from a copy of the repository."""
    top = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, top / name, ignore=JUNK)
        else:
            shutil.copy(ROOT / name, top / name)
    call(sys.executable, "-m", "build", "--no-isolation", str(top), folder=top)
    (wheel,), (sdist,) = (top / "dist").glob("*.whl"), (top / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(sdist) as tar:
        files = {
            member.name: tar.extractfile(member) for member in tar.getmembers() if member.isfile()
        }
        in_sdist = {
            name.partition("/")[2]: file.read() for name, file in files.items() if file is not None
        }
    return Distributions(wheel, in_wheel, in_sdist)


@pytest.fixture(scope="module")
def python(built: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel installed, and the other packages of
    this environment.
    """
    environment = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", "--without-pip", str(environment), folder=environment)
    interpreter = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = ("-m", "pip", "--disable-pip-version-check", "--python", str(interpreter))
    call(
        sys.executable,
        *pip,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        str(built.wheel),
        folder=environment,
    )
    return interpreter


def call(*command: str | Path, folder: Path, expected_code: int = 0) -> str:
    """Standard output of a process that knows nothing of the repository."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "DAPO", "PIP"))
    }
    done = subprocess.run(
        command, cwd=folder, env=own, text=True, capture_output=True, timeout=250, check=False
    )
    assert done.returncode == expected_code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def files_below(folder: Path) -> dict[str, bytes]:
    paths = [
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    kept = (path for path in paths if path.suffix not in {".tmp", ".so"})
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in kept}


def test_the_wheel_holds_the_package_the_configs_the_pages_and_the_license_and_nothing_else(
    built: Distributions,
):
    expected = {
        name: content
        for name, content in files_below(ROOT / "src").items()
        if ".egg-info/" not in name
    }
    expected |= {f"dapo/configs/{name}": content for name, content in files_below(CONFIGS).items()}
    expected |= {
        f"dapo/docs/{path.name}": path.read_bytes() for path in (ROOT / "docs").glob("*.md")
    }
    about = f"dapo_rl-{dapo.__version__}.dist-info"
    own = {name: content for name, content in built.in_wheel.items() if not name.startswith(about)}
    compiled = [own.pop(name) for name in sorted(own) if name.endswith(".so")]
    # one for each instruction set
    assert len(compiled) == (2 if platform.machine() == "x86_64" else 1)
    assert built.wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    assert sorted(own) == sorted(expected)
    assert own == expected
    assert built.in_wheel[f"{about}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert {
        "dapo/py.typed",
        "dapo/distributed/slurm/job.sh",
        "dapo/configs/tiny.yaml",
    } <= own.keys()


def test_the_source_archive_holds_what_the_wheel_is_built_from_and_the_pages(built: Distributions):
    made = {
        name
        for name in built.in_sdist
        if name == "PKG-INFO" or name == "setup.cfg" or ".egg-info/" in name
    }
    expected = {
        f"src/{name}": text
        for name, text in files_below(ROOT / "src").items()
        if ".egg-info/" not in name
    }
    for name in SOURCES[1:]:
        path = ROOT / name
        own = files_below(path) if path.is_dir() else {"": path.read_bytes()}
        expected |= {f"{name}/{file}".rstrip("/"): content for file, content in own.items()}
    assert {
        name: content for name, content in built.in_sdist.items() if name not in made
    } == expected


def test_the_metadata_gives_the_version_of_the_package_and_the_readme_without_dead_links(
    built: Distributions,
):
    import markdown

    metadata = built.metadata
    assert (metadata["Name"], metadata["Version"]) == ("dapo-rl", dapo.__version__)
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert metadata["Description-Content-Type"] == "text/markdown"
    description = metadata.get_payload()
    page = markdown.markdown(description, extensions=["fenced_code", "tables"])
    assert page.startswith("<h1>dapo</h1>")
    assert page.count("<table>") == 1
    assert [
        link
        for link in re.findall(r'(?:href|src)="([^"]*)"', page)
        if not link.startswith("https://")
    ] == []
    assert page.count("https://arxiv.org/abs/2503.14476") == 1
    assert "performance against TRL and vLLM" in description  # the text of dead links is there


def test_the_version_stands_in_one_file(built: Distributions):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project
    assert "version" in project["dynamic"]
    assert importlib.metadata.version("dapo-rl") == dapo.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(dapo.__version__)}\b", changelog, flags=re.MULTILINE)


IN_ONE_PROCESS = """
import contextlib, importlib.metadata, io, json, sys
from pathlib import Path
import dapo
from dapo.cli.main import main

def command(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main(words)
        except SystemExit as end:
            return end.code, out.getvalue()

found = {"file": dapo.__file__, "version": importlib.metadata.version("dapo-rl"), "path": sys.path}
found["check"] = command("check", "quickstart")
found["pages"] = {page: command("show", "docs", page) for page in sys.argv[1:]}
found["train"] = command("train", "configs/tiny.yaml", "train.num_steps=1", "train.threads=1", "--run-dir", "run")
found["modules"] = sorted({str(Path(m.__file__).parent) for n, m in list(sys.modules.items())
                           if n.split(".")[0] == "dapo" and getattr(m, "__file__", None)})
print(json.dumps(found))
"""


def pages_named_in_messages() -> list[str]:
    """The pages that texts of the package name."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "src/dapo").rglob("*.py")]
    return sorted(
        {name for text in texts for name in re.findall(r"dapo show docs ([a-z_]+)", text)}
    )


def test_no_message_and_no_public_docstring_names_a_file_that_a_wheel_lacks():
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "src/dapo").rglob("*.py"))
    ]
    docstrings = {
        id(node.value) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }
    texts = [
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]
    public = [getattr(dapo, name) for name in dapo.__all__]
    methods = [
        member for each in public if isinstance(each, type) for member in vars(each).values()
    ]
    texts += [inspect.getdoc(each) or "" for each in [*public, *methods]]
    assert len(texts) > 1000
    repository = re.compile(
        r"(docs/[\w{}]+\.md|(examples|benchmarks|evidence)/\w|README(?!\.md)|`make \w)"
    )  # an export has a README.md
    assert [text for text in texts if repository.search(text)] == []
    assert len(pages_named_in_messages()) > 5


def test_show_docs_lists_the_pages_and_answers_a_wrong_name(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "show", "docs")
    rows = dict(line.split(maxsplit=1) for line in out.split("\n\n")[0].splitlines())
    assert (code, rows["losses"]) == (0, "Methods: losses, advantages, dynamic sampling, schedules")
    assert sorted(rows) == sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
    assert all(rows.values())
    assert (
        run(capsys, "show", "docs", "docs/losses.md")[1] == run(capsys, "show", "docs", "losses")[1]
    )
    code, _, err = run(capsys, "show", "docs", "nothing")
    assert (code, "no page nothing; expected one of agents, coming_from" in err) == (2, True)


def test_an_installed_wheel_checks_the_quickstart_and_trains_without_the_repository(
    python: Path, tmp_path: Path
):
    assert (
        call(python.parent / "dapo", "--version", folder=tmp_path) == f"dapo {dapo.__version__}\n"
    )
    named = pages_named_in_messages()
    found: dict[str, Any] = json.loads(
        call(python, "-c", IN_ONE_PROCESS, *named, folder=tmp_path).splitlines()[-1]
    )
    pages = {name: (0, (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")) for name in named}
    assert {name: tuple(answer) for name, answer in found["pages"].items()} == pages
    installed = Path(found["file"]).parents[1]
    assert installed.is_relative_to(python.parents[1])
    assert found["version"] == dapo.__version__
    assert all(Path(folder).is_relative_to(installed) for folder in found["modules"])
    assert not any(Path(folder).is_relative_to(ROOT / "src") for folder in found["path"] if folder)
    code, text = found["check"]
    assert (code, "smollm2-135m-instruct" in text) == (0, True), text
    code, text = found["train"]
    assert code == 0, text
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 1


def test_a_config_is_found_by_its_name_where_no_such_file_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert shipped() == {path.stem: path for path in CONFIGS.glob("*.yaml")}
    for name in ("tiny", "tiny.yaml", "configs/tiny.yaml", "configs/tiny", "./tiny"):
        assert find_config(name) == CONFIGS / "tiny.yaml"
    assert find_config("gsm8k_0.5b") == CONFIGS / "gsm8k_0.5b.yaml"
    (tmp_path / "tiny.yaml").write_text("model: tiny-random\n")
    (tmp_path / "quickstart").mkdir()
    assert find_config("tiny.yaml") == Path("tiny.yaml")
    assert find_config("quickstart") == CONFIGS / "quickstart.yaml"  # a folder is no configuration
    names = "calculator, dapo_32b, dapo_7b, four_digits, gsm8k_0.5b, gsm8k_laptop, quickstart, tiny"
    for name in ("other/tiny.yaml", "quikstart", "mine.yaml"):
        with pytest.raises(ConfigError) as raised:
            find_config(name)
        assert (
            str(raised.value)
            == f"no config file {name}; expected a YAML file, or the name of a shipped one: {names}"
        )


def test_show_configs_lists_the_shipped_configs_and_prints_one(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "show", "configs")
    assert code == 0
    assert [line.split()[0] for line in out.split("\n\n")[0].splitlines()] == sorted(shipped())
    assert run(capsys, "show", "configs", "tiny")[:2] == (
        0,
        (CONFIGS / "tiny.yaml").read_text(encoding="utf-8"),
    )
    code, out, _ = run(capsys, "show", "configs", "--json")
    assert {name: each["path"] for name, each in json.loads(out).items()} == {
        name: str(path) for name, path in shipped().items()
    }
    assert run(capsys, "show", "configs", "tinny")[0] == 2
