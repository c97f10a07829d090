"""Every form in which tests are written, with a right and a wrong program; tests that assert
nothing; cheats.

The cases are in `tests/data/code_*.txt`: `=== NAME {columns of the row}`, then parts such as `---
tests`.
"""

import json
import re
import time
from pathlib import Path

import pytest

from dapo.libs.code_sandbox import LocalSandbox, ProcessResult, UnusableTests, probe, read_tests

SANDBOX = LocalSandbox(2**30)
WEAKNESSES = set(probe(SANDBOX).values())
pytestmark = pytest.mark.skipif(
    bool(WEAKNESSES), reason=f"no program can be confined here: it could {WEAKNESSES}"
)

DATA = Path(__file__).parents[1] / "data"
ADD = "def add(a, b):\n    return a + b"
WRONG = "def add(a, b):\n    return 12345"
HELPERS = """
EPS = 1e9
def assertEqual(a, b): pass
def is_close_enough(a, b): return True
def approx(x): return x
def other(x): return 3
class np:
    allclose = staticmethod(lambda *a: True)
"""


def cases(name):
    """Name, columns of the row and parts of each case of a file; equal parts follow each other in a
    list.
    """
    found = []
    for case in re.split(r"^=== ", (DATA / name).read_text(), flags=re.MULTILINE)[1:]:
        head, *parts = re.split(r"^--- (\w+)\n", case, flags=re.MULTILINE)
        title, brace, columns = head.strip().partition(" {")
        by_name = {}
        for kind, text in zip(parts[::2], parts[1::2], strict=True):
            by_name.setdefault(kind, []).append(text.strip("\n"))
        found.append(pytest.param(json.loads(brace + columns or "{}"), by_name, id=title))
    return found


def judged(source, tests, prompt="Q", entry_point=None, **setup):
    """True, False, or the error."""
    texts = [
        text for part in setup.values() for text in ([part] if isinstance(part, str) else part)
    ]
    try:
        read = read_tests(tests, setup=texts, entry_point=entry_point, prompt=prompt)
        return read.passed_by(source, SANDBOX, deadline=time.monotonic() + 60)
    except UnusableTests as error:
        return str(error)


@pytest.mark.parametrize(
    ("tests", "entry_point"),
    [
        ({"fn_name": "add", "inputs": [[1, 2], [[4], [5]]], "outputs": [[3], [[4, 5]]]}, None),
        ({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}, None),
        ([{"input": "1\n2", "output": "3", "testtype": "functional"}], "add"),
        ([{"input": "[4]\n[5]", "output": "[4, 5]", "testtype": "functional"}], "add"),
        ([{"input": "1\n2", "output": "3", "testtype": "functional"}], "Solution().add"),
        ([{"input": [1, 2], "output": 3, "type": "function_call", "fn_name": "add"}], None),
    ],
)
def test_calls_of_a_function_judge_it_and_the_method_of_a_solution(tests, entry_point):
    method = "class Solution:\n    def add(self, a, b):\n        return {}\n"
    assert judged(method.format("a + b"), tests, entry_point=entry_point) is True
    assert judged(method.format("b"), tests, entry_point=entry_point) is False
    if entry_point != "Solution().add":
        assert judged(ADD, tests, entry_point=entry_point) is True
        assert judged(WRONG, tests, entry_point=entry_point) is False
        assert judged("def sub(a, b):\n    return a - b", tests, entry_point=entry_point) is False
        # a program that reads standard input defines no function
        assert judged("print(3)", tests, entry_point=entry_point) is False


def test_tuples_and_lists_of_a_result_are_equal():
    tests = {"fn_name": "pair", "inputs": [[1, 2]], "outputs": [[[1, [2]]]]}
    assert judged("def pair(a, b):\n    return a, (b,)", tests) is True
    assert judged("def pair(a, b):\n    return b, (a,)", tests) is False


@pytest.mark.parametrize(("columns", "parts"), cases("code_forms.txt"))
def test_in_every_form_a_right_program_passes_and_a_wrong_one_does_not(columns, parts):
    (right,), (wrong,) = parts.get("right", [ADD]), parts.get("wrong", [WRONG])
    assert judged(right, parts["tests"], **columns) is True
    assert judged(wrong, parts["tests"], **columns) is False


@pytest.mark.parametrize(("columns", "parts"), cases("code_unusable.txt"))
def test_tests_that_assert_nothing_or_cannot_run_are_an_error_for_every_program(columns, parts):
    for source in (ADD, WRONG, ADD + HELPERS, WRONG + HELPERS):
        assert isinstance(judged(source, parts["tests"], **columns), str)


class Scripted:
    """A sandbox whose programs print 3, after a start of 5 s; it records the deadlines."""

    memory_bytes = 2**30

    def __init__(self):
        self.deadlines = []

    def run(self, source, stdin, *, deadline, max_output_bytes=1 << 16):
        self.deadlines.append(deadline)
        return ProcessResult(b"3", 0, start_s=5.0)


def test_the_starts_of_the_processes_of_pairs_put_off_their_common_deadline():
    sandbox = Scripted()
    pairs = [{"input": "1 2", "output": "3"}] * 3
    assert read_tests(pairs).passed_by("print(3)", sandbox, deadline=10.0) is True
    assert sandbox.deadlines == [10.0, 15.0, 20.0]


RIGHT = "def f(): return 918273"
TESTS_OF_CHEATS = [
    ["assert f() == 918273"],
    ["assert f() - 918273 == 0"],
    (
        "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n       "
        " self.assertEqual(f(), 918273)"
    ),
    (
        "import pytest\n@pytest.mark.parametrize('x', [918273])\ndef test_f(x):\n    assert f() =="
        " pytest.approx(x)"
    ),
    ["for got, want in zip(map(lambda x: f(), [1, 2]), [918273, 918273]):\n    assert got == want"],
    ["assert all(f() == want for want in (918273, 918273))"],
    ["assert f() in [918273]", "assert f() in {918273}"],
    ["passed = 0\ntry:\n    assert f() == 918273\n    passed = 1\nexcept Exception:\n    pass"],
]


@pytest.mark.parametrize("tests", TESTS_OF_CHEATS)
def test_the_right_program_passes_the_tests_of_the_cheats(tests):
    assert judged(RIGHT, tests) is True


@pytest.mark.parametrize(
    ("index", "case"), list(enumerate(cases("code_cheats.txt"))), ids=lambda v: getattr(v, "id", "")
)
def test_no_cheat_passes(index, case):
    (program,) = case.values[1]["program"]
    for tests in (TESTS_OF_CHEATS[0], TESTS_OF_CHEATS[1 + index % (len(TESTS_OF_CHEATS) - 1)]):
        assert judged(program, tests) is not True


@pytest.mark.parametrize(
    ("tests", "columns", "message"),
    [
        (
            "def helper():\n    assert add(1, 2) == 3",
            {},
            "these tests run no assertion on a value of the program",
        ),
        (
            "assert (add(1, 2) == 3, 'no')",
            {},
            "its tests run no assertion on a value of the program",
        ),
        (
            "import numpy\nassert add(1, 2) == 3",
            {},
            "its tests import 'numpy', which is not in Python's standard",
        ),
        (
            "assert close(add(1, 2), 3)",
            {},
            "its tests use add, close, which neither they nor Python define",
        ),
        (
            "assert add(1, 2) < LIMIT",
            {"entry_point": "add"},
            "its tests use LIMIT, which neither they nor Python",
        ),
        (
            "def test_a(db):\n    assert add(1, 2) == 3",
            {},
            "the tests cannot run: UnusableTest: there is no fixture 'db'",
        ),
        (["x = {}['a']", "assert add(1, 2) == 3"], {}, "the tests cannot run: KeyError: 'a'"),
        (
            "assert V(1) == V(2)",
            {},
            "the tests cannot run: they compare two objects of the program",
        ),
        (
            "assert sorted([V(2), V(1)])[0] is not None",
            {},
            "the tests cannot run: they order objects of the program",
        ),
        (
            [{"input": "1\n2", "output": "3", "testtype": "functional"}],
            {},
            "its tests call a function that they do not name; expected its name as fn_name",
        ),
        (
            [{"input": "1 2", "output": "3", "testtype": "functional"}],
            {"entry_point": "add"},
            "its tests call a function; expected JSON values, got '1 2'",
        ),
        (
            {"fn_name": "add", "inputs": [[1, 2], [2, 2]], "outputs": [3]},
            {},
            "its tests have 2 inputs and 1 outputs; expected an output for each input",
        ),
        (
            {"fn_name": "add", "inputs": [3], "outputs": [3]},
            {},
            "its tests call a function; expected its arguments as a list, got 3",
        ),
        (
            "assert add(1, 2) == 3",
            {"entry_point": "add("},
            "its entry_point must be the name of a function",
        ),
    ],
)
def test_the_error_says_what_is_wrong_with_the_tests(tests, columns, message):
    program = f"{ADD}\nclass V:\n    def __init__(self, x):\n        pass"
    assert message in judged(program, tests, **columns)


@pytest.mark.parametrize(
    ("source", "tests", "prompt", "expected"),
    [
        ("def f(x): return 1", ["assert close(f(1), 1)"], "Write f and close.", False),
        ("def f(x): return 1\ndef close(a, b): return a == b", ["assert close(f(1), 1)"], "Write f and close.", True),
        ("def f(x): return 1", ["assert f(1) == 1", "assert g(2) == 2"], "Write f and g.", False),
        ("def f(x): return 1", ["assert f(1) == 1", "assert g(2) == 2"], "Q", False),
        ("def h(x): return 1", ["assert f(1) == 1", "assert g(2) == 2"], "Q", False),
        ("LIMIT = 3", ["assert LIMIT == 3"], "Set LIMIT to 3.", True),
        ("LIMIT = 4", ["assert LIMIT == 3"], "Set LIMIT to 3.", False),
        ("def helper(): pass\ndef f(x): return 1", "def check(candidate):\n    assert candidate(2) == 1",
         "def f(x):\n    '''Return 1.'''", True),
        ("def helper(): pass\ndef g(x): return 1", "def check(candidate):\n    assert candidate(2) == 1",
         "def f(x):\n    '''Return 1.'''", False),
        ("def helper(): pass\ndef g(x): return 1", "def check(candidate):\n    assert candidate(2) == 1",
         "Q", True),
        ("def g(x): return 1\ndef helper(): pass", "def check(candidate):\n    assert candidate(2) == 1", "Q", False),
        ("x = 1", "def check(candidate):\n    assert candidate(2) == 1", "Q", False),
    ],
)  # fmt: skip
def test_the_names_that_the_question_asks_for_are_the_programs(source, tests, prompt, expected):
    assert judged(source, tests, prompt) is expected
