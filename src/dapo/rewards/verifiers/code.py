"""`code`: a Python program or function that must pass the row's unit tests, run in a sandbox."""

import math
import time
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, Literal

from dapo.core.errors import RewardError
from dapo.core.verifier_limits import CODE_TIME_S
from dapo.rewards.sandbox import sandbox
from dapo.rewards.sandbox.sandbox import Sandbox, SandboxError
from dapo.rewards.verdicts import binary_verdict, error_verdict
from dapo.rewards.verifiers.code_tests import COLUMNS, Pairs, Statements, read_tests
from dapo.types import Problem, Verdict
from strict_math.text import fences, final_part

Isolation = Literal["require", "best_effort"]

_LANGUAGES = ("", "python", "py", "python3")


class CodeVerifier:
    """Right if the response's last Python fence (without a fence: all of it) passes every test.

    Tests are in the row's column `tests` (option `field`), else in the reference, as values or as JSON text:

    - `[{"input": "1 2", "output": "3"}, ...]` or `{"inputs": [...], "outputs": [...]}`: the program reads standard
      input, and what it prints must equal the output, apart from white space at the ends of lines and of the whole;
    - `["assert add(1, 2) == 3", ...]`, or one string of Python: statements, functions of pytest, cases of unittest, or
      `def check(candidate)`, which is called with the column `entry_point`.

    Tests of the second kind are passed only if assertions on values of the program were executed and held; tests that
    execute none are an error. docs/verifiers.md says what is run and counted, and which names are the program's.

    The program never sees the tests: it gets inputs and arguments, and answers with text or plain values (see
    `sandbox.rpc`), which are compared in another process. So a test cannot pass it a function or compare its objects.

    Python's standard library only, one thread, no files (`sandbox.sandbox` says what holds on which system). Too
    much time, memory or output is wrong, as a failed test is; tests that cannot run are an error.
    """

    def __init__(
        self,
        field: str = COLUMNS[0],
        time_s: float = CODE_TIME_S,
        memory_mib: int = 1024,
        isolation: Isolation = "require",
    ) -> None:
        """Probe the sandbox.

        Args:
            field: the column with the tests.
            time_s: time limit of all tests of one response; below reward.timeout_s, which would make it an error.
            memory_mib: address space of a program.
            isolation: `best_effort` runs programs even on a machine that cannot confine them.

        Raises:
            RewardError: an option cannot be used, or the machine cannot confine a program.
        """
        if not isinstance(field, str) or not field:
            raise RewardError(f"code: field must be the name of a column, got {field!r}")
        for name, value in (("time_s", time_s), ("memory_mib", memory_mib)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise RewardError(f"code: {name} must be a positive number, got {value!r}")
        self._field, self._time_s = field, time_s
        _cache_bytecode()
        self._sandbox = Sandbox(round(memory_mib * 2**20), require_confinement=isolation == "require")
        try:
            gaps = self._sandbox.gaps()
        except SandboxError as error:
            raise RewardError(f"code: {error}; memory_mib={memory_mib} may be too little") from None
        if gaps and isolation == "require":
            raise RewardError(
                f"code: on this machine a response's program could {', '.join(gaps)}. Linux on x86_64 or "
                "aarch64, with Landlock (since 5.13) or the right to make namespaces, confines it; "
                "reward.options.isolation=best_effort runs it anyway"
            )

    @staticmethod
    def check_problem(problem: Problem, options: Mapping[str, Any]) -> str | None:
        """Why no program can be judged by the tests of this row."""
        field = options.get("field", COLUMNS[0])
        if not isinstance(field, str):
            return None  # the constructor refuses it
        try:
            read_tests(problem, field)
        except ValueError as error:
            return str(error)
        return None

    def __call__(self, problem: Problem, response: str) -> Verdict:
        try:
            tests = read_tests(problem, self._field)
        except ValueError as error:
            return error_verdict(f"code: problem {problem.id!r}: {error}")
        source = program_in(response)
        if not source.strip():
            return binary_verdict(False)
        deadline = time.monotonic() + self._time_s
        try:
            return self._passes(source, tests, deadline)
        except SandboxError as error:
            return binary_verdict(False) if time.monotonic() >= deadline else error_verdict(f"code: {error}")

    def _passes(self, source: str, tests: Pairs | Statements, deadline: float) -> Verdict:
        if isinstance(tests, Pairs):
            return binary_verdict(all(self._prints(source, *pair, deadline) for pair in tests.pairs))
        result = self._sandbox.run_tests(source, tests.message, deadline=deadline)
        if result == "unchecked":
            return error_verdict("code: these tests run no assertion on a value of the program")
        if result.startswith("broken: "):
            return error_verdict(f"code: the tests cannot run: {result.removeprefix('broken: ')}")
        return binary_verdict(result == "passed")

    def _prints(self, source: str, stdin: str, expected: str, deadline: float) -> bool:
        result = self._sandbox.run(source, stdin, deadline=deadline, max_output_bytes=max(4 * len(expected), 1 << 16))
        return result.exit_code == 0 and _lines(result.output.decode(errors="replace")) == _lines(expected)


def program_in(response: str) -> str:
    """The last fence of Python (or of no language), even if not closed; without any fence, the whole response."""
    text = final_part(response)
    found = fences(text)
    programs = [content for language, content in found if language in _LANGUAGES]
    if programs:
        return programs[-1]
    return "" if found else text


def _cache_bytecode() -> None:
    """Compile the modules of the sandbox's processes, which read them before they are confined and write nothing."""
    for name in ("rpc", "test_runner", "pytest_subset"):
        SourceFileLoader(name, str(Path(sandbox.__file__).with_name(f"{name}.py"))).get_code(name)


def _lines(output: str) -> list[str]:
    return [line.rstrip() for line in output.rstrip().splitlines()]
