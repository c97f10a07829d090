"""`code`: a Python program or function that must pass the row's unit tests, run in a sandbox."""

import json
import math
import textwrap
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from dapo.core.errors import RewardError
from dapo.core.verifier_limits import CODE_MEMORY_MIB, CODE_TIME_S, TEST_COLUMNS
from dapo.libs.code_sandbox import (
    LocalSandbox,
    SandboxError,
    Tests,
    UnusableTests,
    probe,
    read_tests,
)
from dapo.libs.strict_math.text import fences, final_part
from dapo.rewards.verdicts import binary_verdict, error_verdict
from dapo.types import Problem, Verdict, content_text

Isolation = Literal["require", "best_effort"]

_SETUP_COLUMNS = ("test_imports", "test_setup_code")
_PYTHON = ("python", "py", "python3")
_NO_LANGUAGE = ("",)


class CodeVerifier:
    """Right if the response's last Python fence passes every test.

    Without a fence of Python, the last fence of no language counts; without any fence, all of the
    response.

    The tests stand in the row's column `tests` (option `field`), or else in the reference, as
    values or as JSON text:

    - `[{"input": "1 2", "output": "3"}, ...]` or `{"inputs": [...], "outputs": [...]}`: the program
      reads standard input and must print the output; white space at the ends of lines, and blank
      lines before and after the whole, are ignored;
    - `["assert add(1, 2) == 3", ...]`, or one string of Python: statements, functions of pytest,
      cases of unittest, or `def check(candidate)`, which is called with the column `entry_point`.

    A program passes tests of the second kind only if assertions on its values were executed and
    held; tests that execute none are an error. `dapo show docs verifiers` lists what is run and
    counted, and the names that belong to the program.

    The program never sees the tests: it receives inputs and arguments, and answers with text or
    plain values, which a different process compares. A test therefore cannot pass it a function or
    compare its objects.

    Programs have Python's standard library, one thread and no files (`code_sandbox` describes the
    layers per system). Too much time, memory or output is wrong, like a failed test; tests that
    cannot run are an error.
    """

    def __init__(
        self,
        field: str = TEST_COLUMNS[0],
        time_s: float = CODE_TIME_S,
        memory_mib: int = CODE_MEMORY_MIB,
        isolation: Isolation = "require",
    ) -> None:
        """Probe the sandbox.

        Args:
            field: the column with the tests.
            time_s: time limit of all tests of one response, while its programs may run; below
                reward.timeout_s, which would make it an error.
            memory_mib: address space of a program; below reward.memory_gib, beyond which the
                verdict is an error.
            isolation: `best_effort` runs programs even on a machine that cannot confine them.

        Raises:
            RewardError: an option has no valid value, or the machine cannot confine a program.
        """
        if not isinstance(field, str) or not field:
            raise RewardError(f"code: field must be the name of a column, got {field!r}")
        for name, value in (("time_s", time_s), ("memory_mib", memory_mib)):
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 < value < math.inf
            ):
                raise RewardError(f"code: {name} must be a positive number, got {value!r}")
        self._field = field
        self._time_s = time_s
        sandbox = LocalSandbox(round(memory_mib * 2**20))
        self._sandbox = replace(sandbox, require_confinement=isolation == "require")
        try:
            weaknesses = dict.fromkeys(probe(sandbox).values())
        except SandboxError as error:
            raise RewardError(f"code: {error}; memory_mib={memory_mib} may be too little") from None
        if weaknesses and isolation == "require":
            raise RewardError(
                f"code: on this machine a response's program could {', '.join(weaknesses)}. Linux"
                " on x86_64 or aarch64, with Landlock (since 5.13) or the right to make"
                " namespaces, confines it; reward.options.isolation=best_effort runs it anyway"
            )

    @staticmethod
    def check_problem(problem: Problem, options: Mapping[str, Any]) -> str | None:
        """Return why this row's tests cannot judge any program; None if they can."""
        field = options.get("field", TEST_COLUMNS[0])
        if not isinstance(field, str):
            return None  # the constructor rejects it
        try:
            _tests_of(problem, field)
        except UnusableTests as error:
            return str(error)
        return None

    def __call__(self, problem: Problem, response: str) -> Verdict:
        try:
            tests = _tests_of(problem, self._field)
        except UnusableTests as error:
            return error_verdict(f"code: problem {problem.id!r}: {error}")
        source = program_in(response)
        if not source.strip():
            return binary_verdict(False)
        try:
            return binary_verdict(
                tests.passed_by(source, self._sandbox, deadline=time.monotonic() + self._time_s)
            )
        except (SandboxError, UnusableTests) as error:
            return error_verdict(f"code: {error}")


def program_in(response: str) -> str:
    """Return the last fence of Python, else the last of no language; without a fence, all of it."""
    text = final_part(response)
    blocks = fences(text)
    if not blocks:
        return text
    # a fence of no language behind a program shows what the program prints
    for languages in (_PYTHON, _NO_LANGUAGE):
        programs = [content for language, content in blocks if language in languages]
        if programs:
            return _at_left_margin(programs[-1])
    return ""


def _at_left_margin(program: str) -> str:
    """Return a program without the indent of all its lines, which a fence in a list has."""
    # only where the program could not run: dedent changes blank lines in strings, too
    return textwrap.dedent(program) if program.lstrip("\n")[:1] in (" ", "\t") else program


def _tests_of(problem: Problem, field: str) -> Tests:
    """Read the tests of a row from its column `field` or its reference. Raises UnusableTests."""
    names = TEST_COLUMNS if field == TEST_COLUMNS[0] else (field,)
    columns = [problem.fields[name] for name in names if problem.fields.get(name) is not None]
    tests = columns[0] if columns else problem.answer
    if tests in ("", [], {}):
        raise UnusableTests(
            f"no tests in field {field!r} or in the reference; expected pairs [{{'input': ...,"
            " 'output': ...}], or statements such as 'assert add(1, 2) == 3'"
        )
    setup = [problem.fields[name] for name in _SETUP_COLUMNS if problem.fields.get(name)]
    if isinstance(problem.prompt, str):
        prompt = problem.prompt
    else:
        prompt = "\n".join(content_text(m) for m in problem.prompt)
    return read_tests(
        tests,
        setup=[text for part in setup for text in ([part] if isinstance(part, str) else part)],
        entry_point=problem.fields.get("entry_point") or None,
        function=_named_function(problem),
        prompt=prompt,
    )


def _named_function(problem: Problem) -> str | None:
    """Return the function that LiveCodeBench's column `metadata` names: `{"func_name": "add"}`."""
    metadata = problem.fields.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except (ValueError, RecursionError):
            return None
    if not isinstance(metadata, Mapping):
        return None
    name = metadata.get("func_name")
    return name if isinstance(name, str) and name else None
