"""A response can be wrong, and cannot choose an error instead: deep, huge, broken and misleading
texts per verifier.
"""

import time

import pytest

from dapo.libs.code_sandbox import LocalSandbox, probe
from dapo.rewards import get_verifier
from dapo.types import Problem

MAX_CPU_S = 5.0
DEEP = 30_000
LONG = 100_000
TEXTS = {
    "empty": "",
    "surrogate": "Answer: \ud83d",
    "NUL": "Answer: \0",
    "NULs": "\0" * LONG,
    "not a character": "\uffff",
    "deep braces": "Answer: " + "{" * DEEP + "}" * DEEP,
    "deep parentheses": "Answer: " + "(" * DEEP + "8" + ")" * DEEP,
    "deep brackets": "[" * DEEP + "]" * DEEP,
    "deep objects": '{"a":' * DEEP + "1" + "}" * DEEP,
    "deep boxes": "\\boxed{" * DEEP + "8" + "}" * DEEP,
    "deep fractions": "Answer: " + "\\frac{1}{" * 400 + "2" + "}" * 400,
    "deep roots": "Answer: " + "\\sqrt{" * 100 + "8" + "}" * 100,
    "deep powers": "Answer: 2" + "^{2" * 100 + "}" * 100,
    "tower": "Answer: 9^{9^{9^{9}}}",
    "exponent": "Answer: 1e999999999999",
    "exponents": "Answer: 10^{10^{10}}",
    "negative exponent": "Answer: 1e-99999999999",
    "factorials": "Answer: 99999999!",
    "double factorial": "Answer: ((9!)!)!",
    "binomial": "Answer: \\binom{10^9}{10^8}",
    "digits": "Answer: " + "9" * LONG,
    "decimals": "Answer: 0." + "1" * LONG,
    "fullwidth digits": "Answer: " + "９" * LONG,
    "raised": "Answer: 2" + "²" * LONG,
    "signs": "Answer: " + "-" * LONG + "8",
    "division by zero": "Answer: 1/0",
    "zero to zero": "Answer: 0^0",
    "logarithm": "Answer: \\log 0",
    "huge sine": "Answer: \\sin(10^{99})",
    "infinity": "Answer: \\infty",
    "NaN": "NaN",
    "cancel": "Answer: \\pi - \\pi",
    "mod 0": "Answer: 8 \\bmod 0",
    "unclosed": "Answer: \\frac{8",
    "environment": "Answer: \\begin{pmatrix} 8 \\end{matrix}",
    "cells": "Answer: \\begin{pmatrix}" + "&" * LONG + "\\end{pmatrix}",
    "overs": "Answer: " + "{1 \\over " * 500 + "2" + "}" * 500,
    "spaces": "Answer: 8" + " " * LONG + "9",
    "lines": "Answer:\n" * 20_000,
    "commas": "Answer: " + "8," * LONG,
    "lists": "Answer: " + "8 or " * 20_000 + "8",
    "right-to-left": "Answer: \u202e8\u202c!",
    "combining": "Answer: 8" + "\u0301" * LONG,
    "tags": "<answer>" * DEEP,
    "fences": "```\n" * DEEP,
    "think": "</think>" * DEEP,
    "marks": "####" * DEEP,
    "huge number": '{"n": 1e400}',
    "huge integer": '{"n": ' + "9" * LONG + "}",
    "repeated keys": '{"n": 1, "n": 1}',
    "many items": "[" + "{}," * 20_000 + "{}]",
    "escape": '{"n": "\\ud800"}',
    "half an escape": '{"n": "\\u12',
    "code": "__import__('sys').exit()",
    "intervals": "Answer: (1, " * 100,
    "sets": "Answer: x \\in \\{" * 200,
    "units": "Answer: 8" + " cm" * 20_000,
    "equations": "Answer: 1 = " * 2000,
    "names": "Answer: " + "x_{" * 2000,
}
TREE = {
    "$id": "tree",
    "type": "object",
    "properties": {"c": {"type": "array", "items": {"$ref": "#"}, "uniqueItems": True}},
    "required": ["leaf"],
    "additionalProperties": {"multipleOf": 0.01},
}
VERIFIERS = {
    "math": ("math", {}, Problem("1", "How many?", "7")),
    "math with a set": (
        "math",
        {},
        Problem("1", "Solve for x.", "x \\in (1, 2) \\cup (3, \\infty)"),
    ),
    "math with an expression": ("math", {}, Problem("1", "Simplify.", "x^2 + \\sqrt{3}")),
    "gsm8k": ("gsm8k", {}, Problem("1", "Q", "#### 7")),
    "gsm8k, flexible": ("gsm8k", {"flexible": True}, Problem("1", "Q", "#### 7")),
    "gsm8k, partial credit": (
        "gsm8k",
        {"partial_credit": True},
        Problem("1", "Q", "3 + 4 = 7 #### 7"),
    ),
    "exact": ("exact", {}, Problem("1", "Q", "7")),
    "exact, final": ("exact", {"extract": "final"}, Problem("1", "Q", "7")),
    "exact, last number": ("exact", {"extract": "last_number"}, Problem("1", "Q", "7")),
    "choice": ("choice", {}, Problem("1", "A) 1 B) 2", "B")),
    "math_dapo": ("math_dapo", {}, Problem("1", "Q", "7")),
    "regex": ("regex", {"pattern": "n=(7)"}, Problem("1", "Q", "7")),
    "json_schema": ("json_schema", {"schema": TREE}, Problem("1", "Q", "")),
}


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("text", TEXTS)
def test_no_text_is_an_error_or_takes_long(name, text):
    verifier, options, problem = VERIFIERS[name]
    judge = get_verifier(verifier, **options)
    began = time.process_time()
    verdict = judge(problem, TEXTS[text])
    assert time.process_time() - began < MAX_CPU_S
    assert (verdict.correct, verdict.error) == (False, None)


def test_json_as_deep_as_python_can_read_is_wrong_for_a_recursive_schema():
    pytest.importorskip("jsonschema")
    judge = get_verifier("json_schema", schema=TREE)
    problem = Problem("1", "Q", "")
    for depth in (10, 100, 200, 300, 400, 480, 600, 900):
        assert judge(problem, '{"leaf": 1, "c": [' * depth + "8" + "]}" * depth).correct is False
    assert judge(problem, '{"leaf": 1, "c": [{"leaf": 2}, {"leaf": 2.0}]}').correct is False
    assert judge(problem, '{"leaf": 1, "c": [{"leaf": 2}, {"leaf": 3}]}').correct is True


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"properties": {"a": {"$ref": "#/no"}}}, {"items": {"pattern": "("}}]
)
def test_a_schema_that_cannot_be_used_is_an_error_for_every_response(schema):
    pytest.importorskip("jsonschema")
    judge = get_verifier("json_schema")
    problem = Problem("1", "Q", "", fields={"schema": schema})
    assert all(judge(problem, text).error for text in ("{}", '{"a": 1}', '["x"]', "no JSON", "1"))


SANDBOXED = pytest.mark.skipif(
    bool(probe(LocalSandbox(2**30))), reason="no program can be confined here"
)
OBJECT = (
    "class O:\n    def __getattr__(s, n): return O()\n    def __call__(s, *a, **k): return O()\n"
)
OBJECT += "".join(
    f"    def __{n}__(s, *a): return O()\n"
    for n in ("sub", "rsub", "add", "abs", "mul", "getitem", "iter")
)
OBJECT += (
    "    def __len__(s): return 1\n    def __eq__(s, o): return True\n    def __next__(s): raise"
    " StopIteration\n"
)
CLOSE = ["assert abs(f(2) - 1.5) < 1e-9"]
CHECK = "def check(candidate):\n    assert candidate(2) == 4"
LOOP = ["for got, want in zip(f(3), [1, 2, 3]):\n    assert got == want"]
EVALUATED = ["assert eval(f(3)) == 9"]
SETUP = (
    "import unittest\nclass T(unittest.TestCase):\n    def setUp(self):\n        self.r = f(3)"
    " + 1\n"
)
SETUP += "    def test_r(self):\n        self.assertEqual(self.r, 9)"
FIXTURE = (
    "import pytest\n@pytest.fixture\ndef r():\n    return f(3)['x']\ndef test_r(r):\n    assert r"
    " == 9"
)
PROGRAMS = [
    (CHECK, "def square(x): return 5\ndef other(x): return 5"),
    (CHECK, "def square(x): return 5\nclass Other: pass"),
    (CHECK, "x = 5"),
    (CHECK, ""),
    (CHECK, "from math import *"),
    (CHECK, "import math"),
    (["assert f(1) == 1", "assert g(2) == 2"], "def f(x): return 1"),
    (["assert f(1) == 1", "assert g(2) == 2"], "def g(x): return 2"),
    (["assert f(1) == 1", "assert g(2) == 2"], "def h(x): return 2"),
    (CLOSE, OBJECT + "def f(x): return O()"),
    (CLOSE, OBJECT + "f = O()"),
    (CLOSE, OBJECT + "f = O"),
    (CLOSE, "def f(x): return f"),
    (["assert f(1) == f(2)"], OBJECT + "def f(x): return O()"),
    (["assert f(1) + 1 == 2"], OBJECT + "def f(x): return O()"),
    (["assert 1 + f(1) == 2"], OBJECT + "def f(x): return O()"),
    (["assert sorted(f(1), key=lambda x: x) == [1]"], OBJECT + "def f(x): return O()"),
    (
        ["got = f(1)\ngot.sort(key=lambda x: -x)\nassert got == [2, 1]"],
        OBJECT + "def f(x): return O()",
    ),
    (["assert f(1)[0] == 1"], OBJECT + "def f(x): return O()"),
    (["assert len(f(1)) - f(1) == 1"], OBJECT + "def f(x): return O()"),
    (["assert round(f(1), 2) == 1.5"], OBJECT + "def f(x): return O()"),
    (["assert math.isclose(f(1), 1.5)"], OBJECT + "def f(x): return O()"),
    (["assert f(1) < 3"], OBJECT + "def f(x): return O()"),
    (["assert f(1) in (1, 2)"], OBJECT + "def f(x): return O()"),
    (["assert {1: 2}[f(1)] == 2"], OBJECT + "def f(x): return O()"),
    (["x = f(1)\nx += 1\nassert x == 2"], OBJECT + "def f(x): return O()"),
    (["s = S()\nassert abs(s.size() - 1) < 1e-9"], OBJECT + "class S:\n    def size(s): return s"),
    (["s = S()\nassert s.size() - 1 == 0"], OBJECT + "class S:\n    def size(s): return O()"),
    (["s = S()\nassert s.items - 1 == 0"], OBJECT + "class S:\n    items = O()"),
    (["v = V()\nassert norm(v) - 1 == 0"], "class V: pass\ndef norm(v): return v"),
    (LOOP, "def f(n): return []"),
    (LOOP, "def f(n): return iter(())"),
    (LOOP, "def f(n):\n    if n < 0: yield 1"),
    (["r = f(3)\nif r is not None:\n    assert r == 9"], "def f(n): return None"),
    (["while f(3) > 9:\n    assert f(3) == 10"], "def f(n): return 9"),
    (
        ["try:\n    r = f(3)\nexcept Exception:\n    pass\nelse:\n    assert r == 9"],
        "def f(n): raise ValueError",
    ),
    (["try:\n    assert f(3) == 9\nexcept ValueError:\n    pass"], "def f(n): raise ValueError"),
    (
        ["def test_f():\n    if f(3) != 9:\n        return\n    assert f(3) == 9"],
        "def f(n): return 1",
    ),
    (
        [
            "import pytest\ndef test_f():\n    if f(3) != 9:\n        pytest.skip()\n    assert"
            " f(3) == 9"
        ],
        "def f(n): return 1",
    ),
    (["import sys\nif f(3) != 9:\n    sys.exit(0)\nassert f(3) == 9"], "def f(n): return 1"),
    (EVALUATED, "def f(n): return 'nothing'"),
    (EVALUATED, "def f(n): return '('"),
    (EVALUATED, "def f(n): return \"open('/none')\""),
    (EVALUATED, "def f(n): return \"__import__('numpy')\""),
    (["import ast\nassert ast.literal_eval(f(3)) == 9"], "def f(n): return '('"),
    (["import math\nassert getattr(math, f(3))(4) == 2"], "def f(n): return 'nothing'"),
    (["assert open(f(3)).read() == 'x'"], "def f(n): return '/none'"),
    ([SETUP], "def f(n): return None"),
    ([FIXTURE], "def f(n): return {}"),
    (["assert LIMIT < 3"], OBJECT + "LIMIT = O()"),
    (["assert LIMIT == 3"], OBJECT + "LIMIT = O()"),
    (["assert isinstance(LIMIT, int)"], OBJECT + "LIMIT = O()"),
    (["assert f(3) == 9"], "import sys\nsys.exit()"),
    (["assert f(3) == 9"], "import os\nos._exit(0)"),
    (["assert f(3) == 9"], "raise SystemExit"),
    (["assert f(3) == 9"], "def f(n):\n    raise SystemExit"),
    (["assert f(3) == 9"], "def f(n):\n    raise KeyboardInterrupt"),
    (["assert f(3) == 9"], "def f(n):\n    return f(n)"),
    (["assert f(3) == 9"], "def f(n):\n    return '9' * 10**8"),
    (["assert f(3) == 9"], "def f(n):\n    print('9' * 10**8)"),
    (["assert f(3) == 9"], "def f(n):\n    return [0] * 10**9"),
    (["assert f(3) == 9"], "x = []\nfor _ in range(10**5): x = [x]\ndef f(n): return x"),
    (["assert f(3) == 9"], "x = []\nx.append(x)\ndef f(n): return x"),
    (["assert f(3) == 9"], "def f(n): return 10**10**6"),
    (["assert f(3) == 9"], "import numpy\ndef f(n): return 9"),
    (["assert f(3) == 9"], "def f(n): return '\\ud800'"),
    (["assert f(3) == 9"], "(" * 50_000),
    (["assert f(3) == 9"], "\0"),
    (["assert f(3) == 9"], "\ud800"),
    (["assert f(3) == 9"], "# -*- coding: nonsense -*-"),
    (["assert f(3) == 9"], "x = 1\n" * 50_000),
    (["assert f(3) == 9"], "def f(n): raise ImportError('numpy')"),
    (["assert f(3) == 9"], "def f(n): raise NameError('f')"),
    (["assert f(3) == 9"], "def f(n): raise OSError('none')"),
    (["assert f(3) == 9"], "def f(n): raise AssertionError"),
    (
        ["assert f(3) == 9"],
        "class E(Exception):\n    def __str__(s): raise ValueError\ndef f(n): raise E",
    ),
    (["assert f(3) == 9"], "class f:\n    def __new__(c, n): raise StopIteration"),
    ([{"input": "3", "output": "9"}], "print('\\ud800')"),
    ([{"input": "3", "output": "9"}], "print('9' * 10**9)"),
    ([{"input": "3", "output": "9"}], "import sys; sys.stdout = None"),
    ([{"input": "3", "output": "9"}], "import os; os.close(1)"),
    ([{"input": "3", "output": "9"}], "raise MemoryError"),
]


@SANDBOXED
@pytest.mark.parametrize(("tests", "program"), PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_wrong_program_cannot_choose_an_error(tests, program):
    if "LIMIT" in str(tests):
        prompt = "Set LIMIT to 3."
    elif "norm" in str(tests):
        prompt = "Write V and norm."
    else:
        prompt = "Q"
    judge = get_verifier("code", time_s=4.0, memory_mib=512)
    verdict = judge(Problem("1", prompt, "", fields={"tests": tests}), f"```python\n{program}\n```")
    assert (verdict.correct, verdict.error) == (False, None)


NEEDS_OBJECTS = [
    ["v = Vector(1, 2)\nassert (v * 2).x == 2"],
    ["assert Vector(1, 2) == Vector(1, 2)"],
    ["v = Vector(1, 2)\nassert v.mapped(lambda x: x) is not None"],
    ["assert f(lambda x: x) == 1"],
]


@SANDBOXED
@pytest.mark.parametrize("tests", NEEDS_OBJECTS)
def test_tests_that_need_an_object_of_every_program_are_an_error(tests):
    program = (
        "class Vector:\n    def __init__(s, x=0, y=0): s.x = x\n    def __mul__(s, n): return"
        " Vector(s.x * n)\n"
    )
    program += "    def mapped(s, f): return f(s)\ndef f(g): return g(1)"
    verdict = get_verifier("code", time_s=4.0)(
        Problem("1", "Q", "", fields={"tests": tests}), f"```python\n{program}\n```"
    )
    assert verdict.error is not None
