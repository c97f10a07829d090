"""`code`: what passes, what fails, and actions by which a program might be called correct without solving the problem.

A hostile program prints (or returns) the right answer if and only if its probe succeeds.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dapo.config.options import RewardConfig
from dapo.core.errors import RewardError
from dapo.rewards import VerifierPool, get_verifier
from dapo.rewards.sandbox import rpc
from dapo.rewards.sandbox.sandbox import Sandbox
from dapo.rewards.verifiers.code import program_in
from dapo.types import Problem
from helpers.verifier_pools import open_pool

GAPS = Sandbox(2**30).gaps()
pytestmark = pytest.mark.skipif(bool(GAPS), reason=f"this machine cannot confine a program: it could {GAPS}")

RIGHT = 918273


@pytest.fixture(scope="module")
def verifier():
    return get_verifier("code", time_s=8)


def judged(verifier, source, tests, answer="", **fields):
    """True, False, or the error."""
    verdict = verifier(Problem("1", "Q", answer, fields={"tests": tests, **fields}), f"```python\n{source}\n```")
    return verdict.error or verdict.correct


PAIRS = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 -4", "output": "6"}]
ADD = "a, b = map(int, input().split())\nprint(a + b)"


@pytest.mark.parametrize(
    ("source", "tests", "expected"),
    [
        (ADD, PAIRS, True),
        (ADD, json.dumps(PAIRS), True),
        (ADD, {"inputs": ["1 2", ["10", "-4"]], "outputs": ["3", ["6"]]}, False),
        (ADD, {"inputs": ["1 2", "10 -4"], "outputs": ["3", ["6"]]}, True),
        (f"{ADD}\nprint()\nprint()", PAIRS, True),
        (f"{ADD}\nprint(1)", PAIRS, False),
        (f"{ADD}\nraise SystemExit(3)", PAIRS, False),
        (f"{ADD}\nraise SystemExit", PAIRS, True),
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
        ("def f(:", ["assert f() == 1"], False),
    ],
)  # fmt: skip
def test_functions_must_make_the_statements_true(verifier, source, tests, expected):
    assert judged(verifier, source, tests) is expected


def test_a_failed_assertion_of_the_program_is_none_of_the_tests(verifier):
    source = "def half(n):\n    assert n % 2 == 0\n    return n // 2"
    tests = "try:\n    ok = half(3) == 1\nexcept {}:\n    ok = True\nassert ok"
    assert judged(verifier, source, [tests.format("AssertionError")]) is False
    assert judged(verifier, source, [tests.format("Exception")]) is True
    assert judged(verifier, source.replace("assert n % 2 == 0", "int('x')"), [tests.format("ValueError")]) is True


def test_a_variable_that_says_whether_the_program_has_raised_is_a_value_of_it(verifier):
    tests = "def test_raises():\n    raised = False\n    try:\n        root(-1)\n    except ValueError:\n"
    tests += "        raised = True\n    assert raised"
    assert judged(verifier, "def root(x):\n    raise ValueError", tests) is True
    assert judged(verifier, "def root(x):\n    return x", tests) is False


def test_a_check_function_is_given_the_entry_point(verifier):
    check = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(3) == 9\n"
    assert judged(verifier, "def square(x):\n    return x * x", check, entry_point="square") is True
    assert judged(verifier, "def square(x):\n    return x + x", check, entry_point="square") is False


ESCAPES = {
    "the answer itself, to see that this table can fail": "SELF = True\ndef probe():\n    return True",
    "network": "import socket\ndef probe():\n    return socket.create_connection(('127.0.0.1', {port}), 2).recv(9)",
    "datagram": "import socket\ndef probe():\n    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    "    return s.sendto(b'x', ('127.0.0.1', {port}))",
    "fork": "import os\ndef probe():\n    if os.fork() == 0:\n        os._exit(0)\n    return True",
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        break\n"
    "def probe():\n    return os.fork()",
    "thread": "import threading\ndef probe():\n    t = threading.Thread(target=print)\n    t.start()\n    return True",
    "start a program": "import subprocess\ndef probe():\n    return subprocess.run(['/bin/true']).returncode == 0",
    "exec": "import os\ndef probe():\n    return os.execv('/bin/true', ['true'])",
    "write a file": "def probe():\n    return open({folder!r} + '/written', 'w').write('x')",
    "write to /dev/shm": "def probe():\n    return open('/dev/shm/dapo-written', 'w').write('x')",
    "remove a file": "import os\ndef probe():\n    os.remove({folder!r} + '/tests.json')\n    return True",
    "read the tests' file": "def probe():\n    return '{right}' in open({folder!r} + '/tests.json').read()",
    "read the environment": "import os\ndef probe():\n    return 'SECRET_OF_THE_HOST' in os.environ",
    "read a parent's environment": "import os, glob\ndef probe():\n"
    "    return any(b'SECRET_OF_THE_HOST' in open(p, 'rb').read() for p in glob.glob('/proc/*/environ'))",
    "read any user's files": "def probe():\n    return open('/etc/passwd').read()",
    "kill the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef probe():\n    return False",
    "kill all": "import os, signal\ntry:\n    os.kill(-1, signal.SIGKILL)\nexcept OSError:\n    pass\n"
    "def probe():\n    return os.kill({pid}, 0) is None",
    "memory": "def probe():\n    return len(bytearray(3 * 2**30))",
    "memory in small pieces": "x = []\ndef probe():\n"
    "    while len(x) < 3072:\n        x.append(bytearray(2**20))\n    return 1",
    "exit before the tests": "import sys\nsys.exit(0)",
    "hard exit before the tests": "import os\nos._exit(0)",
    "exit within the tests": "import os\ndef answer():\n    os._exit(0)",
    "raise SystemExit within the tests": "def answer():\n    raise SystemExit(0)",
    "abort": "import os\nos.abort()",
    "crash": "import ctypes\nctypes.string_at(0)",
    "equal to everything": "class Any:\n    def __eq__(self, other):\n        return True\n"
    "    def __ne__(self, other):\n        return False\n    __hash__ = None\ndef answer():\n    return Any()",
    "a number equal to everything": "class Any(int):\n    def __eq__(self, other):\n        return True\n"
    "    def __ne__(self, other):\n        return False\n    __hash__ = None\ndef answer():\n    return Any(1)",
    "patched built-ins": "import builtins\nclass E(Exception):\n    pass\nbuiltins.AssertionError = E\n"
    "builtins.int = builtins.type = builtins.isinstance = builtins.abs = lambda *x: 0\ndef answer():\n    return 0",
    "names of built-ins": "def abs(x):\n    return 0\ndef int(x):\n    return {right}\ndef answer():\n    return 0",
    "stack frames": "import sys, gc\ndef probe():\n    frame = sys._getframe()\n    while frame:\n"
    "        if '{right_halves}'.replace(' ', '') in repr(list(frame.f_locals.values())).replace('frame', ''):\n"
    "            return True\n        frame = frame.f_back\n    return False",
    "objects in memory": "import gc\nWANTED = int('{right_halves}'.replace(' ', ''))\ndef probe():\n"
    "    return any(WANTED in o for o in gc.get_objects() if type(o) in (list, tuple))",
    "say that the tests have passed": "import os\nfor fd in range(64):\n    try:\n        os.write(fd, b'passed')\n"
    "    except OSError:\n        pass\ndef answer():\n    return 0",
    "answer before being asked": "import os, json\nfor fd in range(3, 64):\n    try:\n"
    "        os.write(fd, b'[[\"answer\", true]]\\n[\"ok\", true]\\n' * 9)\n    except OSError:\n        pass\n"
    "def answer():\n    return 0",
    "a stop iteration": "def answer():\n    raise StopIteration",
    "brackets without end": "import os\nfor fd in range(3, 64):\n    try:\n"
    "        os.write(fd, b'[' * 999999 + b'\\n')\n"
    "    except OSError:\n        pass\ndef answer():\n    return 0",
}  # fmt: skip


@pytest.fixture(scope="module")
def escape_targets(tmp_path_factory):
    """A server, a folder and an environment to reach."""
    folder = tmp_path_factory.mktemp("open")
    for path in (folder, *folder.parents):
        if path.name.startswith("pytest") or path == folder:
            path.chmod(0o777)
    (folder / "tests.json").write_text(f"answer() == {RIGHT}")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"hello")

        threading.Thread(target=serve, daemon=True).start()
        os.environ["SECRET_OF_THE_HOST"] = "1"
        yield {
            "port": server.getsockname()[1],
            "folder": str(folder),
            "pid": os.getpid(),
            "right": RIGHT,
            "right_halves": f"{str(RIGHT)[:3]} {str(RIGHT)[3:]}",
        }
        del os.environ["SECRET_OF_THE_HOST"]
        server.shutdown(socket.SHUT_RDWR)
    assert sorted(path.name for path in folder.iterdir()) == ["tests.json"]
    assert not os.path.exists("/dev/shm/dapo-written")


# where the program itself compares, nothing is hidden from it
COMPARING = ("equal to everything", "a number equal to everything", "names of built-ins")


@pytest.mark.parametrize(
    ("name", "form"),
    [(n, f) for n in ESCAPES for f in ("statements", "pairs") if f == "statements" or n not in COMPARING],
)
def test_no_probe_makes_a_program_correct(verifier, escape_targets, name, form):
    source = ESCAPES[name]
    for key, value in escape_targets.items():
        source = source.replace(f"{{{key}!r}}", repr(value)).replace(f"{{{key}}}", str(value))
    if "def probe" in source:
        # the number does not stand in the program, where it would find it
        source += (
            f"\ndef answer():\n    return int('{escape_targets['right_halves']}'.replace(' ', '')) if probe() else 0"
        )
    if form == "pairs":
        source += "\nprint(answer())" if "def answer" in source else ""
        tests = [{"input": "", "output": str(RIGHT)}]
    else:
        tests = [f"assert answer() == {RIGHT}", f"assert abs(answer() - {RIGHT}) < 1 and int(answer()) == {RIGHT}"]
    assert judged(verifier, source, tests) is (name == "the answer itself, to see that this table can fail")


def sandbox_processes_left():
    """Children of this process, and orphans, that run this checkout's sandbox."""
    sandbox_script = str(Path(rpc.__file__).with_name("process.py"))
    rows = subprocess.run(["ps", "-e", "-o", "ppid=,args="], capture_output=True, text=True).stdout.splitlines()
    return [row for row in rows if sandbox_script in row and int(row.split()[0]) in (1, os.getpid())]


@pytest.mark.parametrize(
    "source",
    [
        "while True:\n    pass",
        "import time\ntime.sleep(60)",
        "input()\nimport os\nos.read(0, 1)\nwhile True:\n    pass",
        "import signal\nfor s in range(1, 30):\n    try:\n        signal.signal(s, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass",
        "while True:\n    print('x' * 1000)",
        f"print({RIGHT})\nwhile True:\n    print('x' * 1000, flush=True)",
        f"print({RIGHT}, flush=True)\nwhile True:\n    pass",
    ],
)
@pytest.mark.parametrize("tests", [[{"input": "", "output": str(RIGHT)}], [f"assert answer() == {RIGHT}"]])
def test_a_program_without_end_is_wrong_and_leaves_nothing_running(source, tests):
    verifier = get_verifier("code", time_s=0.6)
    began = time.monotonic()
    assert judged(verifier, source, tests) is False
    assert time.monotonic() - began < 3
    assert sandbox_processes_left() == []


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
    with VerifierPool(reward.model_copy(update={"timeout_s": 1.0})) as pool:  # a section itself refuses this
        (verdict,) = pool.submit(problem, ["while True: pass"], [()]).result(30)
    assert verdict.error == "code: timed out after 1 s"
    assert sandbox_processes_left() == []


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "code: problem '1': no tests in field 'tests' or in the reference; expected pairs"),
        ([], "no tests in field 'tests'"),
        ([1], "no tests in field 'tests'"),
        ("[{", "its tests are no JSON"),
        ("42", "its tests run no assertion on a value of the program"),
        ([{"input": "1", "output": " "}], "its tests expect no output at all"),
        ({"inputs": ["1"], "outputs": []}, "zip() argument 2 is shorter"),
        (["assert f( == 1"], "its tests cannot run: SyntaxError"),
        (["assert f(lambda x: x) == 1"], "a test passes the solution a function; only plain values"),
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


@pytest.mark.parametrize(
    ("missing", "gap"),
    [
        (
            {"    if abi < 1:": "    if True:", "    pivot_root = ": "    raise OSError\n    pivot_root = "},
            "read files",
        ),
        ({"    if not program:": "    if True:"}, "open sockets"),
    ],
)
def test_a_sandbox_without_one_of_its_walls_is_found_out(tmp_path, missing, gap):
    copy = shutil.copytree(Path(rpc.__file__).parents[2], tmp_path / "dapo")
    sandbox_script = copy / "rewards" / "sandbox" / "process.py"
    for text, instead in missing.items():
        assert text in sandbox_script.read_text()
        sandbox_script.write_text(sandbox_script.read_text().replace(text, instead))
    script = "from dapo.rewards import get_verifier; get_verifier('code')"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env={}, capture_output=True, text=True)
    assert "RewardError: code: on this machine a response's program could " in done.stderr
    assert gap in done.stderr


def test_the_sandbox_loads_nothing_of_the_package():
    script = f"import runpy, sys; runpy.run_path({rpc.__file__!r}); print([m for m in sys.modules if 'dapo' in m])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
