"""Functions that were only typed become a module: another process imports it and computes the
same.
"""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dapo.api.code_writer import CodeWriter
from dapo.core import loading
from dapo.core.errors import RewardError
from helpers.cells import run_cells
from helpers.tables import for_each_row


def unknown_source(text: str) -> dict[str, Any]:
    """The namespace after a text has run whose lines nobody keeps, as at the prompt of Python."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(text, namespace)
    return namespace


def written(function: Any) -> dict[str, Any]:
    """The namespace of the module that is written for a function."""
    writer = CodeWriter("reward")
    path = writer.add(function)
    assert path.startswith(":"), path
    module = writer.module()
    namespace: dict[str, Any] = {"__name__": module.name}
    exec(compile(module.text, module.name, "exec"), namespace)
    return {**namespace, "it": namespace[path[1:]], "text": module.text}


HELPER = "import re\nfrom math import floor as down\nNUMBER = re.compile(r'-?\\d+', re.I)\n"
WRITABLE = {
    "helpers, imports and constants of other cells": (
        [HELPER, "LIMIT = 3\ndef count(text):\n    return min(LIMIT, len(NUMBER.findall(text)))\n"],
        "def reward(text): return down(count(text) + .5)",
    ),
    "functions that call each other": (
        ["def odd(n): return n > 0 and even(n - 1)\ndef even(n): return n == 0 or odd(n - 1)"],
        "def reward(text): return even(len(text))",
    ),
    "a decorator with its arguments": (
        [
            "import functools\nFACTOR = 2\n",
            (
                "def scaled(by):\n    def wrap(f):\n        @functools.wraps(f)\n        def"
                " inner(*a, **k): return by * f(*a, **k)\n        return inner\n    return wrap\n"
            ),
        ],
        "@scaled(by=FACTOR)\ndef reward(text): return len(text)",
    ),
    "a decorator without functools.wraps": (
        ["def twice(f):\n    def inner(text): return f(text) + f(text)\n    return inner\n"],
        "@twice\ndef reward(text): return len(text)",
    ),
    "default arguments and annotations": (
        ["from typing import Any\nWEIGHTS = {'a': 1.5, 'b': [1, (2,), {3}]}\n"],
        (
            "def reward(text: Any, weights=WEIGHTS, *, n: int = len('ab')) -> float: return"
            " weights['a'] * n + len(text)"
        ),
    ),
    "a closure over constants": (
        [
            "def make(word, times):\n    def reward(text):\n        return text.count(word) *"
            " times\n    return reward\n"
        ],
        "reward = make('1', 3)",
    ),
    "submodules by their full path": (
        ["import xml.etree.ElementTree\nimport os.path as p\n"],
        (
            "def reward(text): return xml.etree.ElementTree.fromstring('<a>1</a>').text +"
            " p.basename('x/' + text)"
        ),
    ),
    "an object that is called": (
        [
            "class Scorer:\n    WORD = '1'\n    def __init__(self, n): self.n = n\n"
            "    def __call__(self, text): return self.n * text.count(self.WORD)\n"
        ],
        "reward = Scorer(4)",
    ),
    "a dataclass and the method of an object": (
        [
            (
                "import dataclasses as d\n@d.dataclass(frozen=True)\nclass Rule:\n    word: str\n  "
                "  bonus: float = .5\n"
            ),
            (
                "class Judge:\n    def __init__(self, rule): self.rule = rule\n"
                "    def score(self, text): return text.count(self.rule.word) + self.rule.bonus\n"
            ),
        ],
        "reward = Judge(Rule('1')).score",
    ),
    "a partial function": (
        ["import functools\ndef general(text, word, bonus): return text.count(word) + bonus\n"],
        "reward = functools.partial(general, word='1', bonus=.25)",
    ),
    "an enumeration, a path, numbers that are not finite": (
        [
            (
                "import enum, pathlib, decimal, fractions\nclass Kind(enum.Enum):\n    GOOD = 1\n  "
                "  BAD = 2\n"
            ),
            (
                "WANT = Kind.GOOD\nHERE = pathlib.Path('/a/b')\nLOW = float('-inf')\nD ="
                " decimal.Decimal('1.5')\nF = fractions.Fraction(1, 3)\n"
            ),
        ],
        "def reward(text): return [WANT.value, HERE.name, LOW < len(text), float(D), float(F)]",
    ),
    "flags that are combined, and none": (
        ["import re\nFLAGS = re.IGNORECASE | re.MULTILINE\nNONE = re.RegexFlag(0)\n"],
        (
            "def reward(text): return [len(re.findall('^A|B', text, FLAGS)), len(re.findall('A',"
            " text, NONE))]"
        ),
    ),
    "a name of its own within and a global one of another kind": (
        ["import io\nhandle = io.StringIO()\n"],
        "def reward(text):\n    handle = text.upper()\n    return [handle for handle in handle]",
    ),
    "a class that extends an earlier one of its own name, twice": (
        [
            "class Judge:\n    def score(self, text): return len(text)\n"
            "    def __call__(self, text): return self.score(text) + 1\n",
            "class Judge(Judge):\n    def score(self, text): return 2 * super().score(text)\n",
            "class Judge(Judge):\n    def score(self, text): return 3 + super().score(text)\n",
        ],
        "reward = Judge()",
    ),
    "annotations that name nothing": (
        [],
        (
            "from __future__ import annotations\ndef reward(text: Unknown) -> Nothing: return"
            " len(text)"
        ),
    ),
}


@for_each_row("name", WRITABLE)
def test_what_is_written_computes_what_was_typed(name: str):
    before, last = WRITABLE[name]
    own = run_cells(*before, last)["reward"]
    found = written(own)["it"]
    for text in ("", "1", "a 1 b 11", "-7 and 1"):
        assert found(text) == own(text)


def test_another_process_imports_it_from_its_folder_and_nothing_else(tmp_path: Path):
    function = run_cells(
        *WRITABLE["helpers, imports and constants of other cells"][0],
        "def reward(t): return count(t)",
    )
    writer = CodeWriter("reward")
    name = writer.add(function["reward"])[1:]
    module = writer.module()
    module.write(tmp_path)
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r}); from {module.name} import {name};"
        f" print({name}('1 22 3 4'))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("3\n", "")


def test_the_name_of_a_module_changes_with_its_text_only():
    first, same, other = (
        run_cells(f"N = {n}\n", "def reward(text): return N")["reward"] for n in (1, 1, 2)
    )
    names = []
    for function in (first, same, other):
        writer = CodeWriter("reward")
        writer.add(function)
        names.append(writer.module().name)
    assert names[0] == names[1] != names[2]
    assert re.fullmatch(r"reward_[0-9a-f]{8}", names[0])


def test_what_can_be_imported_is_named_and_not_copied():
    writer = CodeWriter("reward")
    assert writer.add(functools.partial) == "functools:partial"
    assert writer.add(json.JSONDecoder.decode) == "json.decoder:JSONDecoder.decode"
    assert writer.is_empty


REFUSED = {
    "an open file": (
        run_cells("import io\nlog = io.StringIO()\n", "def reward(text): return log.write(text)")[
            "reward"
        ],
        (
            "reward 'reward' uses 'log', of type StringIO, which is not a constant and cannot be"
            " written into the run: "
        ),
    ),
    "an object that a helper closes over": (
        run_cells(
            "def make(model):\n    def score(text): return model(text)\n    return score\nscore ="
            " make(object())\n",
            "def reward(text): return score(text)",
        )["reward"],
        "reward 'reward' uses 'model', of type object, which is not a constant",
    ),
    "an attribute of an object": (
        run_cells(
            "import io\nclass S:\n    def __init__(self): self.file = io.StringIO()\n"
            "    def __call__(self, t): return 1\n"
        )["S"](),
        "reward 's' uses 's.file', of type StringIO",
    ),
    "an object that extends a list": (
        run_cells(
            "class Words(list):\n    pass\nWORDS = Words(['a'])\n",
            "def reward(text): return text in WORDS",
        )["reward"],
        "reward 'reward' uses 'WORDS', of type Words, which is not a constant",
    ),
    "a lambda": (
        run_cells("reward = lambda text: 1")["reward"],
        "reward: the source of a lambda cannot be copied",
    ),
    "a lambda that is used": (
        run_cells("key = lambda text: 1\n", "def reward(text): return key(text)")["reward"],
        "reward 'reward' uses 'key', a lambda, which has no source of its own",
    ),
    "a function without a source": (
        unknown_source("def f(text): return 1")["f"],
        "reward 'f': the source of 'f' cannot be found",
    ),
    "a name that nothing has": (
        run_cells("def reward(text): return missing(text)")["reward"],
        "reward 'reward' uses 'missing', which is not defined",
    ),
    "a class that extends one of its own name without a source": (
        run_cells(
            "class Judge(Judge):\n    def __call__(self, text): return 1\n",
            namespace=unknown_source("class Judge:\n    pass\n"),
        )["Judge"](),
        "'Judge' extends an earlier class of its own name, whose source cannot be found",
    ),
    "two things of one name": (
        run_cells(
            "def make(n):\n    def part(text): return n\n    return part\n",
            "a, b = make(1), make(2)\ndef reward(text): return a(text) + b(text)",
        )["reward"],
        "it uses two different things called",
    ),
    "a module of this process": (
        run_cells(
            "import types\nmine = types.ModuleType('mine')\n", "def reward(text): return mine.x"
        )["reward"],
        "reward 'reward' uses 'mine', a module that exists only in this process,",
    ),
}


@for_each_row("name", REFUSED)
def test_what_cannot_be_written_is_refused_with_its_name(name: str):
    function, message = REFUSED[name]
    with pytest.raises(RewardError) as refused:
        CodeWriter("reward").add(function)
    assert message in str(refused.value)


def test_rewards_of_one_name_from_two_cells_are_written_into_modules_of_their_own():
    from dapo.api.keywords import read_keywords

    helper = "def judge(text): return len(text)\n"
    first = run_cells(helper, "def reward(completions): return [judge(c) for c in completions]")
    other = run_cells(helper.replace("len(text)", "0"), "def reward(completions): return [1.0]")
    third = run_cells("def other(completions): return [2.0]")
    functions = {first["reward"]: 1.0, other["reward"]: 0.5, third["other"]: 2.0}
    values, modules, _ = read_keywords({}, functions, {})
    names = list(values["reward.verifier"])
    assert [name.partition(":")[2] for name in names] == ["reward", "reward", "other"]
    assert list(values["reward.verifier"].values()) == [1.0, 0.5, 2.0]
    assert len(modules) == 2
    # what could not be added leaves nothing behind
    writer = CodeWriter("reward")
    writer.add(first["reward"])
    text = writer.module().text
    with pytest.raises(RewardError):
        writer.add(run_cells(helper.replace("len(text)", "0"), "def r(c): return judge(c)")["r"])
    assert writer.module().text == text


def test_equal_rewards_are_refused_and_none_is_dropped():
    from dapo.api.keywords import read_keywords

    cells = run_cells("def reward(completions, word): return [word in c for c in completions]")
    several = [functools.partial(cells["reward"], word=word) for word in "aba"]
    assert len(read_keywords({}, several[:2], {})[0]["reward.verifier"]) == 2
    with pytest.raises(RewardError, match="reward: partial is listed twice; list it once, with a"):
        read_keywords({}, several, {})


K = "zqK7vX31"
SECRETS = {
    "a constant": [
        "import os\nAPI_KEY = os.environ['SETTING']\n",
        "def reward(text): return len(text) > len(API_KEY)",
    ],
    "a constant of a harmless name": [f"A = '{K}'\n", "def reward(text): return A in text"],
    "a dict": [f"H = {{'X-Api-Key': 'a{K}'}}\n", "def reward(text): return len(H)"],
    "an attribute": [
        "class J:\n    def __init__(self, k): self.token = k\n    def __call__(self, t):"
        f" pass\nreward = J('b{K}')\n"
    ],
    "a closure": [
        f"def make(k):\n    def judge(t): return k in t\n    return judge\nreward = make('c{K}')\n"
    ],
    "a default": [f"def reward(text, *, api_key='d{K}'): return 1"],
    "a default that is computed": [
        "import os\nK = os.environ['SETTING']\n",
        "def reward(text, k=K): return 1",
    ],
    "an argument": [
        "import functools\ndef j(t, api_key): return 1\nreward = functools.partial(j,"
        f" api_key='e{K}')\n"
    ],
    "text in the function": [f"def reward(text):\n    api_key = 'f{K}'\n    return 1"],
}


@for_each_row("name", SECRETS)
def test_a_secret_is_refused_before_it_is_written_and_not_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SETTING", K)
    monkeypatch.setenv("OTHER", f"c{K}")
    with pytest.raises(
        RewardError, match="would be written into the run: read it inside the function"
    ) as refused:
        CodeWriter("reward").add(run_cells(*SECRETS[name])["reward"])
    assert K not in str(refused.value)


def test_a_function_that_reads_its_key_is_written():
    function = run_cells(
        "import os", "def reward(text):\n    api_key = os.environ['JUDGE_KEY']\n    return 1"
    )["reward"]
    assert "os.environ['JUDGE_KEY']" in written(function)["text"]


PLACED = """import functools
@functools.cache
def shares(text):
    return len(text) / 0
"""


def failure_of(writer: CodeWriter, function: Any, folder: Path) -> loading.Failure:
    """The failure of the function that is read back from the written module."""
    path = writer.qualified(writer.add(function))
    writer.module().write(folder)
    loading.CODE_FOLDERS[:] = [folder]
    copy = loading.load_callable(path, error=RewardError)
    failure = loading.try_call(lambda: copy("a"))
    assert isinstance(failure, loading.Failure)
    return failure


def test_an_error_in_a_copied_function_names_the_line_that_the_user_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loading, "CODE_FOLDERS", [])
    script = tmp_path / "script.py"
    script.write_text(PLACED)
    of_script: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(PLACED, str(script), "exec"), of_script)
    of_cell = run_cells(PLACED)
    places = {
        "(shares, line 4 of the cell)": of_cell["shares"],
        "(script.py, line 4)": of_script["shares"],
    }
    for number, (place, function) in enumerate(places.items()):
        failure = failure_of(CodeWriter(f"reward{number}"), function, tmp_path / "code")
        assert failure.reason == f"raised ZeroDivisionError: division by zero {place}"


def test_a_function_that_moves_in_its_cell_keeps_its_module():
    names = set()
    for space in ("", "\n\n"):
        writer = CodeWriter("reward")
        moved = run_cells(f"{space}{PLACED}")["shares"]
        names.add(writer.qualified(writer.add(moved)))
    assert len(names) == 1
