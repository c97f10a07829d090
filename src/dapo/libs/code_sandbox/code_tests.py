"""Reads unit tests, rejects tests that cannot judge a program, and compiles the rest for the test
runner.
"""

import ast
import base64
import json
import marshal
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .function_tests import calls_of, function_of, statements_of
from .instrument import DataFlow, Instrument
from .required_names import NameRequirements, UnusableTests
from .sandbox import Sandbox
from .steering import steerable_parts

_UNSEEN = {"assertWarns", "assertWarnsRegex", "assertLogs", "assertNoLogs"}
_MIN_OUTPUT_BYTES = 1 << 16
_SOLUTION = re.compile(r"^class\s+Solution\b", re.MULTILINE)


class Tests(ABC):
    """Tests of a program, made by `read_tests`; they may judge any number of programs."""

    @abstractmethod
    def passed_by(self, source: str, sandbox: Sandbox, *, deadline: float) -> bool:
        """Run a program and test it.

        Args:
            source: Python source of the program.
            sandbox: runs the program.
            deadline: the time at which a program that still runs has failed, on the clock of
                `time.monotonic()`; the start of each of its processes puts it off.

        Returns:
            Whether the program passes every test. Too much time, memory or output fails.

        Raises:
            UnusableTests: the tests cannot run, or execute no assertion on a value of the program.
            SandboxError: the sandbox cannot run the program.
        """


@dataclass(frozen=True)
class InputOutputTests(Tests):
    """Pairs of a standard input and the output that a program must print for it."""

    pairs: Sequence[tuple[str, str]]

    def passed_by(self, source: str, sandbox: Sandbox, *, deadline: float) -> bool:
        for stdin, expected in self.pairs:
            limit = max(4 * len(expected), _MIN_OUTPUT_BYTES)
            result = sandbox.run(source, stdin, deadline=deadline, max_output_bytes=limit)
            deadline += result.start_s
            if result.exit_code != 0 or _lines(result.output.decode(errors="replace")) != _lines(
                expected
            ):
                return False
        return True


@dataclass(frozen=True)
class AssertionTests(Tests):
    """Python tests of a module, compiled so that the assertions on its values are counted."""

    message: Mapping[str, Any]
    """The arguments of `confined.test_runner.run`, as JSON values."""

    def passed_by(self, source: str, sandbox: Sandbox, *, deadline: float) -> bool:
        result = sandbox.run_tests(source, self.message, deadline=deadline)
        if result == "unchecked":
            raise UnusableTests("these tests run no assertion on a value of the program")
        if result.startswith("broken: "):
            raise UnusableTests(f"the tests cannot run: {result.removeprefix('broken: ')}")
        return result == "passed"


@dataclass(frozen=True)
class FunctionTests(Tests):
    """Calls of a function, which a program defines alone or as a method of its class `Solution`."""

    of_function: AssertionTests
    of_method: AssertionTests

    def passed_by(self, source: str, sandbox: Sandbox, *, deadline: float) -> bool:
        tests = self.of_method if _SOLUTION.search(source) else self.of_function
        return tests.passed_by(source, sandbox, deadline=deadline)


def read_tests(
    tests: Any,
    *,
    setup: Sequence[str] = (),
    entry_point: str | None = None,
    function: str | None = None,
    prompt: str = "",
) -> Tests:
    """Read the tests of a program.

    Example:
        >>> read_tests([{"input": "1 2", "output": "3"}])
        InputOutputTests(pairs=[('1 2', '3')])
        >>> pytest_style = read_tests(["assert add(1, 2) == 3", "assert add(2, 2) == 4"])
        >>> humaneval_style = read_tests("def check(candidate): assert candidate(1, 2) == 3", entry_point="add")

    Args:
        tests: pairs `[{"input": ..., "output": ...}, ...]` or `{"inputs": [...], "outputs":
            [...]}`, also with the names in the singular, as CodeContests has them; one string of
            Python, a list of such strings, or the JSON text of any of these.
            Pairs with `fn_name`, or of the type `functional` or `function_call`, hold the arguments
            and the result of a function, which may be a method of a class `Solution`.
        setup: Python that runs before the tests.
        entry_point: the expression that stands for the program in `def check(candidate)`, such as
            `Solution().add`.
        function: the function of pairs of arguments and result, where neither they nor
            `entry_point` name it.
        prompt: the question; names that it mentions belong to the program.

    Raises:
        UnusableTests: the tests cannot judge a program; the text says why.
    """
    value = _value_of(tests)
    if isinstance(value, str) and value.strip():
        value = [value]
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        _require_text(entry_point)
        return _compiled((*map(str, setup), *value), entry_point, prompt)
    if any(_calls_function(part) for part in (value, *_items(value))):
        _require_text(entry_point)
        return _read_calls(value, entry_point or function, prompt, setup)
    lists = _lists_of_pairs(value)
    if lists is not None:
        inputs, outputs = lists
        if len(inputs) != len(outputs):
            counts = f"{len(inputs)} inputs and {len(outputs)} outputs"
            raise UnusableTests(f"its tests have {counts}; expected an output for each input")
        value = [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
    items = _items(value)
    if items and all(
        isinstance(item, Mapping) and {"input", "output"} <= item.keys() for item in items
    ):
        pairs = [(_text(item["input"]), _text(item["output"])) for item in items]
        if any(output.strip() for _, output in pairs):
            return InputOutputTests(pairs)
        raise UnusableTests("its tests expect no output at all")
    raise UnusableTests(
        "its tests are neither pairs [{'input': ..., 'output': ...}] nor statements such as 'assert"
        " add(1, 2) == 3'"
    )


def _lists_of_pairs(value: Any) -> tuple[list[Any], list[Any]] | None:
    """Return the inputs and the outputs of a mapping with a list of each; None without them."""
    if not isinstance(value, Mapping):
        return None
    for names in (("inputs", "outputs"), ("input", "output")):
        inputs, outputs = (value.get(name) for name in names)
        if isinstance(inputs, list) and isinstance(outputs, list):
            return inputs, outputs
    return None


def _require_text(entry_point: Any) -> None:
    """Raise UnusableTests for an entry point that is no text; pairs of texts need none."""
    if entry_point is not None and not isinstance(entry_point, str):
        raise UnusableTests(
            f"its entry_point must be the name of a function, got {entry_point!r:.80}"
        )


def _read_calls(value: Any, entry_point: str | None, prompt: str, setup: Sequence[str]) -> Tests:
    """Read pairs of the arguments and the result of a function."""
    function = function_of(value, entry_point)
    if function is None:
        raise UnusableTests(
            "its tests call a function that they do not name; expected its name as fn_name, or in"
            " the column entry_point"
        )
    texts = (*map(str, setup), statements_of(calls_of(value)))
    if not function.isidentifier():
        return _compiled(texts, function, prompt)
    return FunctionTests(
        _compiled(texts, function, prompt), _compiled(texts, f"Solution().{function}", prompt)
    )


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _calls_function(test: Any) -> bool:
    """Return True for tests whose input is the arguments of a function, not standard input.

    APPS and SYNTHETIC-1 name the function (`fn_name`, which may be null), LiveCodeBench marks such
    tests as `functional`.
    """
    if not isinstance(test, Mapping):
        return False
    kinds = (test.get("type"), test.get("testtype"))
    return bool(test.get("fn_name")) or "function_call" in kinds or "functional" in kinds


def _value_of(tests: Any) -> Any:
    if not isinstance(tests, str) or not tests.lstrip().startswith(("[", "{")):
        return tests
    try:
        return json.loads(tests)
    except (ValueError, RecursionError) as error:
        raise UnusableTests(f"its tests are no JSON ({error})") from None


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(output: str) -> list[str]:
    """Return lines without white space at their ends, and none that is blank at either end."""
    lines = [line.rstrip() for line in output.rstrip().splitlines()]
    # outputs of contests that were copied from a page often begin with a line break
    first = next((index for index, line in enumerate(lines) if line), 0)
    return lines[first:]


@lru_cache(256)
def _compiled(texts: Sequence[str], entry_point: str | None, prompt: str) -> AssertionTests:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as: "assertion is always true"
            return _compile(texts, entry_point, prompt)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise UnusableTests(f"its tests cannot run: {type(error).__name__}: {error}") from None


def _compile(texts: Sequence[str], entry_point: str | None, prompt: str) -> AssertionTests:
    trees = [ast.parse(text) for text in texts]
    required = NameRequirements(trees, texts, entry_point, prompt)
    program_names = DataFlow(trees).reached_from(
        {*required.names, *required.aliases, *required.check_parameters}
    )
    steerable = steerable_parts(trees, program_names)
    codes = []
    num_counted = 0
    for tree in trees:
        instrument = Instrument(program_names, required.defined)
        instrumented = ast.fix_missing_locations(instrument.visit(tree))
        codes.append(compile(instrumented, "tests", "exec", dont_inherit=True))
        num_counted += instrument.num_counted
    if not num_counted:
        raise UnusableTests("its tests run no assertion on a value of the program")
    nodes = [node for tree in trees for node in ast.walk(tree)]
    if unseen := sorted(filter(None, map(_unseen, nodes))):
        raise UnusableTests(
            f"its tests use {unseen[0]}, which does not reach into the program's process"
        )
    message = {
        "code": [base64.b64encode(marshal.dumps(code)).decode() for code in codes],
        "names": sorted(required.names),
        "classes": sorted(
            {*re.findall(r"\bclass\s+(\w+)", prompt), *re.findall(r"\b[A-Z]\w*", "\n".join(texts))}
        ),
        "constants": sorted(required.constants),
        "steerable": steerable,
        "standard_modules": sorted(required.standard_modules),
        "program_modules": sorted(required.modules_imported),
        "check": required.check,
        "mentioned": sorted(set(re.findall(r"\w+", prompt))) if required.check == "" else [],
        "collect": any(
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            for node in nodes
        ),
        "asynchronous": any("async" in text for text in texts),
        "pytest": any("pytest" in text for text in texts),
        "unittest": any("unittest" in text for text in texts),
    }
    return AssertionTests(message)


def _unseen(node: ast.AST) -> str | None:
    """Return the name of a tool that would have to act in the process of the program, if this node
    uses one.
    """
    match node:
        case ast.Attribute(attr=name) if name in _UNSEEN:
            return name
        case ast.Attribute(attr="patch", value=ast.Name(id="mock")) | ast.arg(arg="monkeypatch"):
            return "patch"
        case ast.ImportFrom(module="unittest.mock", names=names) if any(
            alias.name == "patch" for alias in names
        ):
            return "patch"
        case ast.Attribute(attr="stdin", ctx=ast.Store()):
            return "sys.stdin"
    return None
