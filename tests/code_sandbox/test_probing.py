"""The self-check: the local sandbox passes it, and one that confines nothing fails it probe by
probe.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dapo.libs import code_sandbox
from dapo.libs.code_sandbox import LocalSandbox, ProcessResult, SandboxError, probe, self_check

MEMORY_BYTES = 2**27
LOCAL = LocalSandbox(MEMORY_BYTES)
CONFINED = probe(LOCAL) == {}
needs_confinement = pytest.mark.skipif(not CONFINED, reason="no program can be confined here")


class PlainProcess:
    """A sandbox as in many reward functions: a process of the same user, judged by its exit
    code.
    """

    memory_bytes = MEMORY_BYTES

    def run(
        self, source: str, stdin: str, *, deadline: float, max_output_bytes: int = 1 << 16
    ) -> ProcessResult:
        done = subprocess.run(
            [sys.executable, "-c", source],
            input=stdin.encode(),
            stdout=subprocess.PIPE,
            check=False,
        )
        return ProcessResult(done.stdout, done.returncode)

    def run_tests(self, source: str, tests: Mapping[str, Any], *, deadline: float) -> str:
        return "passed" if self.run(source, "", deadline=deadline).exit_code == 0 else "failed"


@needs_confinement
def test_the_local_sandbox_passes_the_self_check():
    assert self_check(LOCAL) == {}
    assert self_check(replace(LOCAL, require_confinement=True)) == {}


def test_a_plain_process_fails_the_self_check_by_name():
    environment = dict(os.environ)
    found = self_check(PlainProcess())
    assert set(found.values()) >= {
        "read files",
        "use more memory than the limit",
        "open sockets",
        "send signals",
        "change limits or priorities of processes",
        "see other processes",
        "start processes or threads",
        "change files",
        "use services of the kernel",
        "run longer than its deadline",
        "print more than the limit",
        "pass tests without solving them",
    }
    assert {
        *(
            "read the list of users",
            "open and create",
            "connect by UDP",
            "fork",
            "thread",
            "kill",
            "allocate",
        ),
        *("inherit the environment", "compute without end", "ignore signals", "print without end"),
        *("answer wrong", "exit before the tests", "equal everything", "report the result"),
    } <= found.keys()
    assert "solve the tests" not in found
    assert dict(os.environ) == environment


@dataclass(frozen=True)
class Weakened:
    """The local sandbox with one fault."""

    fault: str
    memory_bytes: int = MEMORY_BYTES

    def run(
        self, source: str, stdin: str, *, deadline: float, max_output_bytes: int = 1 << 16
    ) -> ProcessResult:
        late = 60 if self.fault == "late" else 0
        length = 1 << 20 if self.fault == "long" else max_output_bytes
        return LOCAL.run(source, stdin, deadline=deadline + late, max_output_bytes=length)

    def run_tests(self, source: str, tests: Mapping[str, Any], *, deadline: float) -> str:
        result = LOCAL.run_tests(source, tests, deadline=deadline)
        if self.fault == "strict":
            return "failed"
        if self.fault == "lenient":
            return "passed"
        return result


@needs_confinement
@pytest.mark.parametrize(
    ("fault", "weakness"),
    [
        ("late", "run longer than its deadline"),
        ("long", "print more than the limit"),
        ("strict", "fail tests that it solves"),
        ("lenient", "pass tests without solving them"),
    ],
)
def test_the_self_check_names_the_one_thing_that_does_not_hold(fault: str, weakness: str):
    assert set(self_check(Weakened(fault)).values()) == {weakness}


def test_a_sandbox_that_ends_the_probes_is_an_error_and_not_a_pass():
    class Silent(PlainProcess):
        def run(
            self, source: str, stdin: str, *, deadline: float, max_output_bytes: int = 1 << 16
        ) -> ProcessResult:
            return ProcessResult(b"", None)

    with pytest.raises(SandboxError, match="the program that probes the sandbox did not finish"):
        self_check(Silent())


@needs_confinement
def test_the_example_of_the_package_gives_what_it_shows():
    examples = (code_sandbox.__doc__ or "").split(">>> ")[1:]
    names: dict[str, Any] = {"time": time}
    for example in examples:
        statement, *shown = example.split("\n\n")[0].splitlines()
        if shown and shown[0].strip():
            assert repr(eval(statement, names)) == shown[0].strip()
        else:
            exec(statement, names)
    assert len(examples) == 6
