"""Which test functions catch which mistakes?

`python -m benchmarks.mutant_matrix FOLDER --into FILE`.

The mistakes are those of `mutants.toml` in this folder of the package, and up to `--by-rule` that
`mutation.py` makes in each of its files. Against each run all tests of the folder that call the
changed function in their own process, to their end. FILE gets a line of JSON for each mistake; a
command that was stopped continues where it was. `--report` prints which functions no mistake needs:
without any one of them, every mistake is still caught.

Not judged are test functions that take more than `--slow` seconds, and those that call nothing of
the folder in their own process.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from benchmarks.mutants import copy_of_repository, read_mutants
from benchmarks.mutation import function_at, mutations

TEST_FOLDERS = {"algo": ("tests/algo", "tests/conformance")}
"""Folders with tests of a folder of the package, where its mirror is not the only one."""
LIBRARIES = (
    "hypothesis",
    "numpy",
    "omegaconf",
    "pandas",
    "pyarrow",
    "pydantic",
    "scipy",
    "sympy",
    "torch",
    "transformers",
)
"""Imported once, for all forks: what takes longest to import."""
TIMEOUT_S = 240.0


class Recorder:
    """A plugin of pytest: seconds, failures, and the functions of the folder that each test
    function calls.
    """

    def __init__(self, folder: Path, only: set[str] | None = None, *, record: bool = False) -> None:
        self.seconds: Counter[str] = Counter()
        self.failed: set[str] = set()
        self.calls: defaultdict[str, set[str]] = defaultdict(set)
        self._folder = f"{folder}{os.sep}"
        self._only = only
        self._record = record

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the chosen functions."""
        items[:] = [
            item for item in items if self._only is None or _function(item.nodeid) in self._only
        ]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Time a test, and note what it calls."""
        began = time.perf_counter()
        calls = self.calls[_function(item.nodeid)]

        def profile(frame: FrameType, event: str, arg: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(self._folder):
                file = frame.f_code.co_filename[len(self._folder) :]
                calls.add(f"{file}:{frame.f_code.co_qualname.split('.<locals>')[0]}")

        if self._record:
            threading.setprofile(profile)
            sys.setprofile(profile)
        yield
        sys.setprofile(None)
        self.seconds[_function(item.nodeid)] += time.perf_counter() - began

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure."""
        if report.failed:
            self.failed.add(_function(report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self.failed.add(report.nodeid)


def _function(nodeid: str) -> str:
    return nodeid.split("[", maxsplit=1)[0]


def in_child(work: Callable[[], Any], timeout_s: float) -> Any:
    """The result of `work` in a forked process; None if it times out or dies."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(read)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        try:
            with os.fdopen(write, "w") as pipe:
                pipe.write(json.dumps(work()))
        finally:
            os._exit(0)
    os.close(write)
    killer = threading.Timer(timeout_s, os.killpg, (pid, signal.SIGKILL))
    killer.start()
    with os.fdopen(read) as pipe:
        text = pipe.read()
    killer.cancel()
    os.waitpid(pid, 0)
    return json.loads(text) if text else None


def run_tests(
    root: Path, folder: str, only: set[str] | None, *, record: bool = False
) -> dict[str, Any]:
    """Run the tests of a folder in the copy at `root`, in this process."""
    os.chdir(root)
    sys.path[:0] = [str(root / "src"), str(root / "tests"), str(root)]
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("benchmarks", "dapo", "helpers")
    ]:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = f"{root / 'src'}{os.pathsep}{root / 'tests'}{os.pathsep}{root}"
    recorder = Recorder(root / "src" / "dapo" / folder, only, record=record)
    where = sorted(
        {name.split("::")[0] for name in only}
        if only
        else TEST_FOLDERS.get(folder, (f"tests/{folder}",))
    )
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "--assert=plain",
        "--timeout=60",
        "-Wignore::pytest.PytestAssertRewriteWarning",
    ]
    pytest.main([*options, *where], plugins=[recorder])
    calls = {name: sorted(found) for name, found in recorder.calls.items()}
    libraries = sorted(name for name in sys.modules if name.split(".")[0] in LIBRARIES)
    return {
        "failed": sorted(recorder.failed),
        "seconds": recorder.seconds,
        "calls": calls,
        "libraries": libraries,
    }


def mistakes(folder: str, root: Path, by_rule: int) -> Iterator[tuple[str, Path, str, str]]:
    """Name, file, changed source and the function that it is in."""
    package = root / "src" / "dapo" / folder
    for mutant in read_mutants():
        path = mutant.path(root)
        if path.is_relative_to(package):
            text = path.read_text(encoding="utf-8")
            line = text[: text.index(mutant.old)].count("\n") + 1
            yield mutant.name, path, text.replace(mutant.old, mutant.new), function_at(text, line)
    for path in sorted(package.rglob("*.py")):
        found = list(mutations(path.read_text(encoding="utf-8")))
        chosen = random.Random(path.name).sample(range(len(found)), min(by_rule, len(found)))
        for each in (found[index] for index in sorted(chosen)):
            yield (
                f"{path.relative_to(package)}:{each.line}: {each.change}",
                path,
                each.source,
                each.function,
            )


def fill(folder: str, into: Path, *, by_rule: int, minutes: float, slow_s: float) -> None:
    """Append a line for each mistake that FILE does not have, until the time is over."""
    warnings.simplefilter("ignore")
    end = time.monotonic() + 60 * minutes
    with copy_of_repository() as root:
        # by their hash: mistakes of equal length follow one another within the resolution of a
        # file's time
        command = [
            sys.executable,
            "-m",
            "compileall",
            "-q",
            "--invalidation-mode=checked-hash",
            "src",
            "tests",
        ]
        subprocess.run(command, cwd=root, check=True)
        done = [json.loads(line) for line in into.read_text().splitlines()] if into.exists() else []
        if not done:
            done = [in_child(lambda: run_tests(root, folder, None, record=True), 3 * TIMEOUT_S)]
            _append(into, done[0])
        first = done[0]
        names = {each["mistake"] for each in done[1:]}
        for library in first["libraries"]:
            with suppress(Exception):  # a module that some other one makes
                import_module(library)
        usable = {name for name, seconds in first["seconds"].items() if seconds < slow_s} - set(
            first["failed"]
        )
        for name, path, source, function in mistakes(folder, root, by_rule):
            if name in names or time.monotonic() > end:
                continue
            where = f"{path.relative_to(root / 'src' / 'dapo' / folder)}:{function}"
            only = {test for test in usable if not function or where in first["calls"][test]}
            began = time.perf_counter()
            failed = _caught(path, source, root, folder, only) if only else []
            _append(
                into,
                {
                    "mistake": name,
                    "ran": len(only),
                    "failed": failed,
                    "s": time.perf_counter() - began,
                },
            )


def _caught(path: Path, source: str, root: Path, folder: str, only: set[str]) -> list[str]:
    text = path.read_text(encoding="utf-8")
    path.write_text(source, encoding="utf-8")
    try:
        answer = in_child(lambda: run_tests(root, folder, only), TIMEOUT_S)
    finally:
        path.write_text(text, encoding="utf-8")
    return ["no end"] if answer is None else answer["failed"]


def _append(into: Path, entry: dict[str, Any]) -> None:
    with into.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def judge(lines: list[dict[str, Any]], slow_s: float) -> SimpleNamespace:
    """The functions that some mistake needs, those that never are alone, those that catch none, and
    a smallest set.
    """
    first = lines[0]
    rest = lines[1:]
    functions = {
        name
        for name in first["seconds"]
        if first["calls"][name] and first["seconds"][name] < slow_s
    }
    # a file that cannot be imported, or a child that died, distinguishes no functions
    sets = [
        found
        for each in rest
        if (found := functions & set(each["failed"])) == set(each["failed"]) and found
    ]
    needed = {name for found in sets if len(found) == 1 for name in found}
    catching = set().union(*sets)
    cover = set(needed)
    left = [found for found in sets if not found & needed]
    while left:
        best = max(sorted(catching), key=lambda name: sum(name in found for found in left))
        cover.add(best)
        left = [found for found in left if best not in found]
    return SimpleNamespace(
        mistakes=len(rest),
        caught=len(sets),
        survive=[each["mistake"] for each in rest if not each["failed"]],
        judged=functions,
        needed=needed,
        shared=catching - needed,
        none=functions - catching,
        cover=cover,
    )


def report(into: Path, slow_s: float) -> None:
    """Print the counts, and the functions that no mistake needs."""
    found = judge(
        [json.loads(line) for line in into.read_text(encoding="utf-8").splitlines()], slow_s
    )
    print(
        f"{found.mistakes} mistakes, {found.caught} caught; {len(found.judged)} test functions"
        " judged"
    )
    print(
        f"{len(found.needed)} are alone with a mistake; a set of {len(found.cover)} catches all"
        " that is caught"
    )
    for title, names in (("never alone", found.shared - found.cover), ("catches none", found.none)):
        print(f"\n{title}: {len(names)}")
        print("\n".join(f"  {name}" for name in sorted(names)))


def main() -> None:
    """Fill the matrix, or report on it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="a folder of src/dapo, such as algo")
    parser.add_argument(
        "--into", type=Path, required=True, metavar="FILE", help="gets a line of JSON per mistake"
    )
    parser.add_argument(
        "--by-rule", type=int, default=0, metavar="N", help="mistakes made by rule in each file"
    )
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="after these no other mistake is begun"
    )
    parser.add_argument(
        "--slow", type=float, default=5.0, metavar="S", help="leave out slower test functions"
    )
    parser.add_argument("--report", action="store_true", help="print what FILE says")
    arguments = parser.parse_args()
    if arguments.report:
        report(arguments.into, arguments.slow)
    else:
        limits = {
            "by_rule": arguments.by_rule,
            "minutes": arguments.minutes,
            "slow_s": arguments.slow,
        }
        fill(arguments.folder, arguments.into, **limits)


if __name__ == "__main__":
    main()
