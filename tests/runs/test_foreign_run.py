"""A run directory from someone else executes the one module that its config.yaml names, and nothing
else of its own.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dapo
from dapo.core.loading import CODE_FOLDERS
from helpers.cells import run_cells
from helpers.commands import run as run_command

RECORDER = """
import os, sys
class Recorder:
    def find_spec(self, name, path=None, target=None):
        if path is None:
            with open(os.environ["DAPO_TEST_MISSED"], "a") as file:
                file.write(name + "\\n")
sys.meta_path.append(Recorder())
"""
COMMANDS = """
import sys
from dapo.cli.main import main
for command in (
    "status .", "doctor .", "report . --output {out}/page.html", "explain . --step 1", "compare . .",
    "data stats .", "export . {out}/model", "eval . --samples-per-problem 1", "eval --compare . .",
    "fork . --step 1 --run-dir {out}/fork", "submit . --dry-run", "resume . train.num_steps=3",
):
    try:
        main(command.format(out=sys.argv[1]).split())
    except SystemExit as stopped:
        print(command, stopped.code)
from dapo.analysis.view.queries import Runs
from pathlib import Path
Runs([Path(".")])
"""
ROWS = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
SMALL: dict[str, Any] = {
    "prompts_per_step": 2,
    "group_size": 4,
    "max_response_tokens": 6,
    "threads": 1,
    "workers": 1,
}


TYPED = run_cells(
    "def reward(completions, **_):\n    print('judging')\n    return [len(set(text)) / 9 for text"
    " in completions]\n"
)["reward"]


def start(folder: Path, reward: Any = TYPED) -> dapo.Run:
    return dapo.train(
        "tiny-random",
        data=ROWS,
        eval_data=ROWS[:2],
        reward=reward,
        steps=2,
        save_every=1,
        run_dir=folder,
        **SMALL,
    )


def run_commands(run: Path, out: Path, **environment: str) -> str:
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMANDS, str(out)],
        cwd=run, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was started where the files of a user are readable for everybody."""
    path = tmp_path_factory.mktemp("started") / "run"
    old = os.umask(0)
    try:
        start(path)
    finally:
        os.umask(old)
    return path


def test_no_file_of_a_run_runs_that_its_config_does_not_name(started: Path, tmp_path: Path):
    """Every name that an import misses is planted into the run, its code, and the folders that its
    manifest names.
    """
    run = shutil.copytree(started, tmp_path / "run")
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(RECORDER)
    missed = tmp_path / "missed"
    path = f"{tmp_path / 'hook'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    first = shutil.copytree(run, tmp_path / "first")
    shown = run_commands(first, tmp_path / "out", PYTHONPATH=path, DAPO_TEST_MISSED=str(missed))
    names = {name.partition(".")[0] for name in missed.read_text().split()}
    assert {"gmpy2"} <= names
    mark = tmp_path / "mark"
    manifest = run / "manifest.json"
    planted = [run, run / "code", tmp_path / "elsewhere"]
    found = json.loads(manifest.read_text()) | {
        "folder": str(planted[2]),
        "module_folders": list(map(str, planted)),
    }
    manifest.write_text(json.dumps(found))
    for folder in planted:
        folder.mkdir(exist_ok=True)
        for name in names - {"sitecustomize", "usercustomize"}:
            (folder / f"{name}.py").write_text(
                f"open({str(mark)!r}, 'a').write({str(folder / name)!r} + '\\n')\n"
            )
    assert run_commands(run, tmp_path / "again").count(" 0\n") == shown.count(" 0\n") >= 9
    assert not mark.exists(), mark.read_text()


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose reward imports a module of the folder where it was started, in another folder and
    process.
    """
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.syspath_prepend(str(home))
    (home / "helper_of_mine.py").write_text("def count(text):\n    return float(len(set(text)))\n")
    cells = (
        "import helper_of_mine\n",
        "def reward(completions, **_): return [helper_of_mine.count(t) for t in completions]",
    )
    run = start(home / "run", run_cells(*cells)["reward"])
    sys.path.remove(str(home))
    for name in {run.config.reward.verifier.partition(":")[0], "helper_of_mine"}:  # type: ignore[union-attr]
        sys.modules.pop(name, None)
    CODE_FOLDERS.clear()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    return Path(shutil.move(home / "run", tmp_path / "other" / "run"))


def test_modules_of_other_folders_are_imported_with_trust_alone_and_a_message_says_so(
    moved: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    home = str(tmp_path / "home")
    code, _, err = run_command(capsys, "resume", "run", "train.num_steps=3")
    assert code == 2
    assert "No module named 'helper_of_mine'" in err
    assert f"its modules are searched here, with --trust also in {home}" in err
    monkeypatch.chdir(home)  # one's own run goes on without a word where its modules are
    assert run_command(capsys, "resume", str(moved), "train.num_steps=3")[0] == 0
    monkeypatch.chdir(moved.parent)
    code, out, _ = run_command(capsys, "resume", "run", "train.num_steps=4", "--trust")
    assert (code, f"run is trusted: modules are imported also from {home}" in out) == (0, True)


def test_a_module_of_a_run_is_the_text_with_the_checksum_of_its_name(
    moved: Path, capsys: pytest.CaptureFixture[str]
):
    (file,) = (moved / "code").glob("*.py")
    (moved / "helper_of_mine.py").write_text("raise SystemExit('a file of the run was imported')")
    file.write_text(file.read_text() + "# changed\n")
    code, _, err = run_command(capsys, "eval", "run")
    assert code == 2
    assert f"{file.name} was changed after the run wrote it" in err


def test_a_module_of_a_run_is_compiled_from_its_text_and_not_from_bytecode(
    started: Path, tmp_path: Path
):
    import importlib.util
    import py_compile

    CODE_FOLDERS.clear()  # that of the run which is copied
    run = dapo.load(shutil.copytree(started, tmp_path / "run"))
    (file,) = (run.path / "code").glob("*.py")
    text = file.read_text()
    times = file.stat()
    file.write_text("raise SystemExit('bytecode')".ljust(len(text)))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    py_compile.compile(str(file), importlib.util.cache_from_source(str(file)))
    file.write_text(text)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert run.evaluate(ROWS[:1]).summary["verifier_errors"] == 0


def test_code_data_and_logs_of_a_run_are_for_its_user_alone(started: Path):
    for folder in ("code", "data", "logs"):
        assert stat.S_IMODE((started / folder).stat().st_mode) == 0o700
        modes = {stat.S_IMODE(file.stat().st_mode) for file in (started / folder).glob("*.*")}
        assert modes == {0o600}
