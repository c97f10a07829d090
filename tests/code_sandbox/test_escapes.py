"""Programs that attack the sandbox: none is called correct, none outlives its time, and missing
layers are found out.

A hostile program prints (or returns) the right answer if and only if its probe succeeds.
"""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dapo.libs.code_sandbox import LocalSandbox, UnusableTests, probe, read_tests
from dapo.libs.code_sandbox.confined import rpc
from helpers.sandbox_processes import sandbox_processes_left

SANDBOX = LocalSandbox(2**30)
WEAKNESSES = set(probe(SANDBOX).values())
pytestmark = pytest.mark.skipif(
    bool(WEAKNESSES), reason=f"no program can be confined here: it could {WEAKNESSES}"
)

RIGHT = 918273


def judged(source, tests, time_s=8):
    """True, False, or the error."""
    try:
        return read_tests(tests).passed_by(source, SANDBOX, deadline=time.monotonic() + time_s)
    except UnusableTests as error:
        return str(error)


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
    "write to /dev/shm": "def probe():\n    return open('/dev/shm/sandbox-written', 'w').write('x')",
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
    assert not os.path.exists("/dev/shm/sandbox-written")


# where the program itself compares, nothing is hidden from it
COMPARING = ("equal to everything", "a number equal to everything", "names of built-ins")


@pytest.mark.parametrize(
    ("name", "form"),
    [
        (n, f)
        for n in ESCAPES
        for f in ("statements", "pairs")
        if f == "statements" or n not in COMPARING
    ],
)
def test_no_probe_makes_a_program_correct(escape_targets, name, form):
    source = ESCAPES[name]
    for key, value in escape_targets.items():
        source = source.replace(f"{{{key}!r}}", repr(value)).replace(f"{{{key}}}", str(value))
    if "def probe" in source:
        # the number does not stand in the program, where it would find it
        source += (
            f"\ndef answer():\n    return int('{escape_targets['right_halves']}'.replace(' ', ''))"
            " if probe() else 0"
        )
    if form == "pairs":
        source += "\nprint(answer())" if "def answer" in source else ""
        tests = [{"input": "", "output": str(RIGHT)}]
    else:
        tests = [
            f"assert answer() == {RIGHT}",
            f"assert abs(answer() - {RIGHT}) < 1 and int(answer()) == {RIGHT}",
        ]
    assert judged(source, tests) is (name == "the answer itself, to see that this table can fail")


@pytest.mark.parametrize(
    "source",
    [
        "while True:\n    pass",
        "import time\ntime.sleep(60)",
        "input()\nimport os\nos.read(0, 1)\nwhile True:\n    pass",
        (
            "import signal\nfor s in range(1, 30):\n    try:\n        signal.signal(s,"
            " signal.SIG_IGN)\n    except (OSError, ValueError):\n        pass\nwhile True:\n   "
            " pass"
        ),
        "while True:\n    print('x' * 1000)",
        f"print({RIGHT})\nwhile True:\n    print('x' * 1000, flush=True)",
        f"print({RIGHT}, flush=True)\nwhile True:\n    pass",
    ],
)
@pytest.mark.parametrize(
    "tests", [[{"input": "", "output": str(RIGHT)}], [f"assert answer() == {RIGHT}"]]
)
def test_a_program_without_end_is_wrong_and_leaves_nothing_running(source, tests):
    began = time.monotonic()
    assert judged(source, tests, time_s=0.6) is False
    assert time.monotonic() - began < 30  # less than the minute of the sleep
    assert sandbox_processes_left() == []


@pytest.mark.parametrize(
    ("missing", "weakness"),
    [
        (
            {
                "    if abi < 1:": "    if True:",
                "    pivot_root = ": "    raise OSError\n    pivot_root = ",
            },
            "read files",
        ),
        ({"    if not program:": "    if True:"}, "open sockets"),
    ],
)
def test_a_sandbox_without_one_of_its_layers_is_found_out(tmp_path, missing, weakness):
    copy = shutil.copytree(Path(rpc.__file__).parents[1], tmp_path / "code_sandbox")
    sandbox_script = copy / "confined" / "process.py"
    for text, instead in missing.items():
        assert text in sandbox_script.read_text()
        sandbox_script.write_text(sandbox_script.read_text().replace(text, instead))
    script = (
        "from code_sandbox import LocalSandbox, probe;"
        " print(set(probe(LocalSandbox(2**30)).values()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={}, capture_output=True, text=True
    )
    assert weakness in done.stdout, done.stderr


def test_a_confined_process_loads_nothing_of_the_package():
    script = f"import runpy, sys; runpy.run_path({rpc.__file__!r})\n"
    script += "print([m for m in sys.modules if 'dapo' in m or 'sandbox' in m])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
