"""`code`: programs that pass and fail, columns, options, and verdicts of the pool;
tests/code_sandbox has the rest.
"""

import json

import pytest

from dapo.config.options import RewardConfig
from dapo.core.errors import RewardError
from dapo.libs.code_sandbox import LocalSandbox, probe
from dapo.rewards import VerifierPool, get_verifier
from dapo.rewards.verifiers.code import program_in
from dapo.types import Problem
from helpers.sandbox_processes import sandbox_processes_left
from helpers.verifier_pools import open_pool

WEAKNESSES = set(probe(LocalSandbox(2**30)).values())
pytestmark = pytest.mark.skipif(
    bool(WEAKNESSES), reason=f"no program can be confined here: it could {WEAKNESSES}"
)


@pytest.fixture(scope="module")
def verifier():
    return get_verifier("code", time_s=8)


def judged(verifier, source, tests, answer="", **fields):
    """True, False, or the error."""
    verdict = verifier(
        Problem("1", "Q", answer, fields={"tests": tests, **fields}), f"```python\n{source}\n```"
    )
    return verdict.error or verdict.correct


PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 -4", "output": "6"}]
ADD = "a, b = map(int, input().split())\nprint(a + b)"


def test_the_column_metadata_names_the_function_of_livecodebench(verifier):
    tests = json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}])
    source = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a {} b"
    for metadata in ('{"func_name": "add"}', {"func_name": "add"}):
        assert judged(verifier, source.format("+"), tests, metadata=metadata) is True
        assert judged(verifier, source.format("-"), tests, metadata=metadata) is False
    for metadata in ("{}", "add", None, {"func_name": ""}):
        assert "they do not name" in judged(verifier, source.format("+"), tests, metadata=metadata)
    # statements name what they call themselves
    statement = "assert Solution().add(1, 2) == 3"
    named = {"func_name": "add"}
    assert judged(verifier, source.format("+"), statement, metadata=named) is True
    assert "entry_point must be" in judged(verifier, source.format("+"), tests, entry_point=3)


@pytest.mark.parametrize(
    ("source", "tests", "expected"),
    [
        (ADD, PAIRS, True),
        (ADD, json.dumps(PAIRS), True),
        (ADD, {"inputs": ["1 2", ["10", "-4"]], "outputs": ["3", ["6"]]}, False),
        (ADD, {"inputs": ["1 2", "10 -4"], "outputs": ["3", ["6"]]}, True),
        (ADD, {"input": ["1 2", "10 -4"], "output": ["3", "7"]}, False),
        (ADD, {"input": ["1 2", "10 -4"], "output": ["3", "6"]}, True),
        (ADD, {"fn_name": None, "inputs": ["1 2"], "outputs": ["3"]}, True),
        (ADD, [{"fn_name": None, "type": "stdin_stdout", "testtype": "stdin", **pair} for pair in PAIRS], True),
        (f"{ADD}\nprint()\nprint()", PAIRS, True),
        (ADD, [{"input": "1 2", "output": "\n3\n"}], True),
        (f"print()\n{ADD}", PAIRS, True),
        ("print(' x')\nprint('xx')", [{"input": "", "output": " x\nxx"}], True),
        ("print('x')\nprint('xx')", [{"input": "", "output": " x\nxx"}], False),
        ("print('x')\nprint()\nprint('xx')", [{"input": "", "output": "x\nxx"}], False),
        (f"{ADD}\nprint(1)", PAIRS, False),
        (f"{ADD}\nraise SystemExit(3)", PAIRS, False),
        (f"{ADD}\nraise SystemExit", PAIRS, True),
        (f"{ADD}\nexit()", PAIRS, True),
        (f"{ADD}\nquit(0)", PAIRS, True),
        (f"{ADD}\nexit(1)", PAIRS, False),
        (f"import os\nif not os.path.exists(os.path.dirname(__file__) + '/input.txt'):\n"
         f"    {ADD.replace(chr(10), chr(10) + '    ')}", PAIRS, True),
        (f"if __name__ == '__main__':\n    {ADD.replace(chr(10), chr(10) + '    ')}", PAIRS, True),
        ("print(3)", PAIRS, False),
        ("I would add them.", PAIRS, False),
        ("import sys, fractions\nprint(sum(map(fractions.Fraction, sys.stdin.read().split())))", PAIRS, True),
    ],
)  # fmt: skip
def test_a_program_must_print_what_each_pair_says(verifier, source, tests, expected):
    assert judged(verifier, source, tests) is expected


@pytest.mark.parametrize(
    ("source", "tests", "expected"),
    [
        ("def add(a, b):\n    return a + b", ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"], True),
        ("def add(a, b):\n    print('adding')\n    return a + b", "assert add(1, 2) == 3", True),
        ("def add(a, b):\n    return a + b + (a > 5)", ["assert add(1, 2) == 3", "assert add(6, 1) == 7"], False),
        ("def plus(a, b):\n    return a + b", ["assert add(1, 2) == 3"], False),
        ("def f():\n    return {1: (2, [3.5]), 'x': {4}}", ["assert f() == {1: (2, [3.5]), 'x': {4}}"], True),
        ("def f():\n    return 2**20000", ["assert f() == 2**20000"], True),
        ("def f():\n    return [1, 2]", ["assert f() == (1, 2)"], False),
        ("def f():\n    return True", ["assert f() is True and type(f()) is bool"], True),
        ("def f(n):\n    yield from range(n)", ["assert list(f(3)) == [0, 1, 2]"], True),
        ("def f(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x",
         ["try:\n    f(-1)\nexcept ValueError as e:\n    assert 'neg' in str(e)\nelse:\n    assert False"], True),
        ("class Stack:\n    items = []\n    def push(self, x):\n        self.items.append(x)\n        return self",
         ["s = Stack()\ns.push(1).push(2)", "assert s.items == [1, 2]"], True),
        ("import collections as c\ndef f(x):\n    return c.Counter(x)", ["assert f('aab') == {'a': 2, 'b': 1}"], True),
        ("def root(x):\n    return x ** 0.5", ["assert math.isclose(root(2), 1.41421356, rel_tol=1e-6)"], True),
        ("def f(x):\n    x.append(1)\n    return x", ["given = []\nassert f(given) == [1] and given == []"], True),
        ("import io, sys\ndef f():\n    sys.stdout = io.StringIO()\n    print(1)\n"
         "    text = sys.stdout.getvalue()\n    sys.stdout = sys.__stdout__\n    return text",
         ["assert f() == '1\\n'", "assert f() == '1\\n'"], True),
        ("import sys\ndef f():\n    sys.stdout.close()\n    return 1", ["assert f() == 1"], True),
        ("def f():\n    print('x' * 2**25)\n    return 1", ["assert f() == 1"], True),
        ("def f(:", ["assert f() == 1"], False),
    ],
)  # fmt: skip
def test_functions_must_make_the_statements_true(verifier, source, tests, expected):
    assert judged(verifier, source, tests) is expected


COMMON_NAMES = """
class Solution:
    def f(self, xs: List[int], k: Optional[int] = None) -> Dict[int, int]:
        counts = defaultdict(int)
        for x in deque(xs):
            counts[x] += math.gcd(x, 0) // x
        heapq.heapify(xs)
        heappush(xs, inf)
        return dict(counts) if cache(lambda: floor(1.5))() and datetime.date else None
"""


def test_a_program_need_not_import_what_published_harnesses_import_for_it(verifier):
    tests = ["assert Solution().f([2, 2, 3]) == {2: 2, 3: 1}"]
    assert judged(verifier, COMMON_NAMES, tests) is True
    assert judged(verifier, COMMON_NAMES.replace("+= math", "-= math"), tests) is False
    script = "print(sqrt(Counter(input())['1'] + 3))"
    assert judged(verifier, script, [{"input": "1", "output": "2.0"}]) is True
    misspelt = "def f() -> Lisst[int]:\n    return [1]"
    assert judged(verifier, misspelt, ["assert f() == [1]"]) is False


@pytest.mark.parametrize(
    "source",
    [
        "known = gcd",
        "def solve(a, b):\n    return gcd(a, b)",
        "def solve(a, b):\n    global gcd\n    return gcd(a, b)",
        "List[int]",
    ],
)
def test_a_name_that_is_imported_for_a_program_is_not_its_answer(verifier, source):
    tests = ["assert gcd(12, 18) == 6"]
    assert judged(verifier, source, tests) is False
    assert judged(verifier, source, ["import solution\nassert solution.gcd(12, 18) == 6"]) is False
    check = "def check(candidate):\n    assert candidate(12, 18) == 6"
    assert judged(verifier, source, check, entry_point="gcd") is False
    assert judged(verifier, "from math import gcd", tests) is True


def test_an_exception_of_a_program_that_uses_common_names_keeps_its_classes(verifier):
    source = "def f(x: List[str]):\n    import json\n    return json.loads(x[0])"
    tests = "try:\n    f(['{'])\nexcept ValueError as error:\n    assert 'Expecting' in str(error)"
    assert judged(verifier, source, tests + "\nelse:\n    assert False") is True


def test_a_failed_assertion_of_the_program_is_none_of_the_tests(verifier):
    source = "def half(n):\n    assert n % 2 == 0\n    return n // 2"
    tests = "try:\n    ok = half(3) == 1\nexcept {}:\n    ok = True\nassert ok"
    assert judged(verifier, source, [tests.format("AssertionError")]) is False
    assert judged(verifier, source, [tests.format("Exception")]) is True
    assert (
        judged(
            verifier, source.replace("assert n % 2 == 0", "int('x')"), [tests.format("ValueError")]
        )
        is True
    )


def test_a_variable_that_says_whether_the_program_has_raised_is_a_value_of_it(verifier):
    tests = (
        "def test_raises():\n    raised = False\n    try:\n        root(-1)\n    except"
        " ValueError:\n"
    )
    tests += "        raised = True\n    assert raised"
    assert judged(verifier, "def root(x):\n    raise ValueError", tests) is True
    assert judged(verifier, "def root(x):\n    return x", tests) is False


def test_a_check_function_is_given_the_entry_point(verifier):
    check = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n"
    assert judged(verifier, "def square(x):\n    return x * x", check, entry_point="square") is True
    assert (
        judged(verifier, "def square(x):\n    return x + x", check, entry_point="square") is False
    )


def test_a_solution_without_end_is_wrong_in_the_pool_too_not_an_error():
    problem = Problem("1", "Q", "", fields={"tests": ["assert f() == 1"]})
    responses = ["def f():\n    while True: pass", "def f():\n    return 1"]
    with open_pool("code", options={"time_s": 1.0}, workers=2) as pool:
        slow, right = pool.submit(problem, responses, [(), ()]).result(30)
    assert (slow.correct, slow.error) == (False, None)
    assert (right.correct, right.error) == (True, None)


def test_a_pool_that_times_out_first_leaves_nothing_running_either():
    problem = Problem("1", "Q", "", fields={"tests": ["assert f() == 1"]})
    reward = RewardConfig(verifier="code", options={"time_s": 60}, timeout_s=61, workers=1)
    # a section itself refuses this
    with VerifierPool(reward.model_copy(update={"timeout_s": 1.0})) as pool:
        (verdict,) = pool.submit(problem, ["while True: pass"], [()]).result(30)
    assert verdict.error == "code: timed out after 1 s"
    assert sandbox_processes_left() == []


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "code: problem '1': no tests in field 'tests' or in the reference; expected pairs"),
        ([], "no tests in field 'tests'"),
        ([1], "its tests are neither pairs [{'input': ..., 'output': ...}] nor statements such as"),
        ("[{", "its tests are no JSON"),
        ("42", "its tests run no assertion on a value of the program"),
        ([{"input": "1", "output": " "}], "its tests expect no output at all"),
        (
            {"inputs": ["1"], "outputs": []},
            "its tests have 1 inputs and 0 outputs; expected an output for each input",
        ),
        (["assert f( == 1"], "its tests cannot run: SyntaxError"),
        (
            ["assert f(lambda x: x) == 1"],
            "a test passes the solution a function; only plain values",
        ),
    ],
)
def test_a_row_without_usable_tests_is_an_error(verifier, tests, message):
    assert message in judged(verifier, "def f(x=0):\n    return 1", tests)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("x = 1", "x = 1"),
        ("First\n```python\nx = 1\n```\nthen\n```py\nx = 2\n```\nend", "x = 2\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nruns as\n```bash\npython x.py\n```", "x = 1\n"),
        ("```python\nx = 1\n```\nprints\n```\n3\n```", "x = 1\n"),
        ("```\nx = 1\n```\nor\n```\nx = 2\n```", "x = 2\n"),
        ("1. Do:\n   ```python\n   if 1:\n       x = 1\n   ```\n2. Run.", "if 1:\n    x = 1\n"),
        ('```python\nx = """\n  \n"""\n```', 'x = """\n  \n"""\n'),
        ("```python\nx = 1", "x = 1"),
        ("```bash\nls\n```", ""),
        ("<think>```python\nx = 0\n```</think>```python\nx = 1\n```", "x = 1\n"),
    ],
)
def test_the_program_is_the_last_fence_of_python(response, program):
    assert program_in(response) == program


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_s": 0}, "code: time_s must be a positive number, got 0"),
        ({"memory_mib": "1G"}, "code: memory_mib must be a positive number, got '1G'"),
        ({"isolation": "none"}, "code: isolation must be one of require, best_effort, got 'none'"),
        ({"field": ""}, "code: field must be the name of a column, got ''"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(RewardError) as caught:
        get_verifier("code", **options)
    assert str(caught.value) == message


@pytest.mark.parametrize("column", ["tests", "test_list", "test"])
def test_the_tests_are_found_in_the_columns_of_known_data_sets(verifier, column):
    problem = Problem("1", "Q", "see tests", fields={column: ["assert add(1, 2) == 3"]})
    assert verifier(problem, "def add(a, b):\n    return a + b").correct is True
    assert verifier(problem, "def add(a, b):\n    return 12345").correct is False


def test_the_setup_columns_run_before_the_tests_and_messages_are_a_prompt(verifier):
    columns = {
        "test_imports": ["import math", "X = 2"],
        "test_setup_code": "Y = X + math.floor(1.5)",
    }
    fields = {"tests": ["assert three() == Y and close(three(), 3)"], **columns}
    messages = (
        {"role": "user", "content": "Write three"},
        {"role": "user", "content": "and close."},
    )
    source = "def three():\n    return 3\ndef close(a, b):\n    return a == b"
    assert verifier(Problem("1", messages, "", fields=fields), source).correct is True
    assert (
        "neither they nor Python define"
        in verifier(Problem("1", "Q", "", fields=fields), source).error
    )
