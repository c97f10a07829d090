"""The local sandbox: each of its layers alone, as root and as an ordinary user."""

import errno
import json
import os
import platform
import struct
import sys
import time
from pathlib import Path

import pytest

from dapo.libs.code_sandbox import LocalSandbox, SandboxError, probe, read_tests
from dapo.libs.code_sandbox.confined.probes import KINDS
from dapo.libs.code_sandbox.local import Layer, get_args, shared_libraries
from dapo.libs.code_sandbox.system_calls import allowed_numbers, filter_program
from helpers.other_users import run_as

MEMORY_BYTES = 2**27
ALL = get_args(Layer)
MACHINE = platform.machine()

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the layers are Linux's"
)
needs_landlock = pytest.mark.skipif(
    sys.platform == "linux"
    and "read files" in probe(LocalSandbox(MEMORY_BYTES, layers=["landlock"])).values(),
    reason="no Landlock here",
)
needs_filter = pytest.mark.skipif(
    filter_program(MACHINE) is None, reason=f"no filter is written for {MACHINE}"
)

READING = {"open to read", "openat to read", "list a folder", "read the list of users"}
READING_OF_PROCESSES = {"list processes", "read an environment", "open the memory"}
DEPENDS_ON_THE_SYSTEM = {
    *(
        "lease",
        "setxattr",
        "fsetxattr",
        "removexattr",
        "fchmodat2",
        "openat2 to write",
        "open without a name",
    ),
    *(
        "copy_file_range",
        "fallocate",
        "bpf",
        "perf_event_open",
        "fsopen",
        "open_tree",
        "mount",
        "chroot",
        "unshare",
    ),
    *(
        "userfaultfd",
        "io_uring_setup",
        "io_setup",
        "memfd_secret",
        "add_key",
        "keyctl",
        "membarrier",
        "fanotify_init",
    ),
    *(
        "ptrace",
        "process_vm_readv",
        "process_vm_writev",
        "kcmp",
        "get_robust_list",
        "name_to_handle_at",
        "F_NOTIFY",
    ),
    *(
        "read an environment",
        "open the memory",
        "allocate",
        "shared memory",
        "message queue",
        "semaphores",
        "mlock",
    ),
    *(
        "tkill",
        "tgkill",
        "clone3",
        "POSIX message queue",
        "rt_tgsigqueueinfo",
        "socket of the kernel",
    ),
}
"""Probes that a container, a kernel's configuration or a file system may refuse by itself."""

CONFIGURATIONS = {
    "all": (ALL, 99),
    "no namespaces": ([layer for layer in ALL if layer != "namespaces"], 99),
    "Landlock of Linux 5.13": (ALL, 1),
    "Landlock of Linux 5.19": (ALL, 2),
    "Landlock of Linux 5.13, no namespaces": ([layer for layer in ALL if layer != "namespaces"], 1),
    "neither change of user nor limits": (["system_calls", "landlock"], 1),
    "none": ([], 99),
    **{layer: ([layer], 99) for layer in ALL},
    "landlock of Linux 5.13 alone": (["landlock"], 1),
}


def all_probes():
    class Anything:
        def __getattr__(self, name):
            return 0

    return {name for probes in KINDS.values() for name in probes(Anything())}


def successes_by_configuration():
    return {
        name: list(probe(LocalSandbox(MEMORY_BYTES, False, layers, landlock_abi)))
        for name, (layers, landlock_abi) in CONFIGURATIONS.items()
    }


@pytest.fixture(scope="module", params=["root", "ordinary user"])
def successes(request):
    """The probes that succeed, for each configuration."""
    if request.param == "root":
        if os.getuid() != 0:
            pytest.skip("the tests do not run as root")
        return {name: set(found) for name, found in successes_by_configuration().items()}
    script = (
        "import json\nfrom dapo.libs.code_sandbox import LocalSandbox, probe\n"
        f"print(json.dumps({{name: list(probe(LocalSandbox({MEMORY_BYTES}, False, *layers)))\n"
        f"    for name, layers in {CONFIGURATIONS!r}.items()}}))"
    )
    try:
        return {name: set(found) for name, found in json.loads(run_as(script)).items()}
    except PermissionError:
        pytest.skip("this root may not mount, so Python cannot be made readable for another user")


def test_each_probe_succeeds_where_nothing_confines_it_so_that_the_others_can_fail(successes):
    assert len(all_probes()) > 120
    # not a layer: test_probing.py shows this probe to succeed elsewhere
    always_held = {"inherit the environment"}
    assert all_probes() - successes["none"] <= DEPENDS_ON_THE_SYSTEM | always_held


@needs_filter
@needs_landlock
@pytest.mark.parametrize("configuration", list(CONFIGURATIONS)[:5])
def test_no_probe_succeeds_where_filter_and_any_landlock_are_in_force(successes, configuration):
    assert successes[configuration] == set()


@needs_filter
@needs_landlock
def test_filter_and_landlock_need_neither_limits_nor_another_user_for_anything_but_memory(
    successes,
):
    assert successes["neither change of user nor limits"] == {"allocate"}


@pytest.mark.skipif(os.getuid() != 0, reason="the tests do not run as root")
def test_as_root_a_program_becomes_nobody_and_dies_with_the_process_that_waits_for_it():
    script = """
import contextlib, os, signal, threading, time
from pathlib import Path
from dapo.libs.code_sandbox import LocalSandbox
def child_of(process):
    text = ""
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it has ended
            text = status.read_text()
        if f"PPid:\\t{process}\\n" in text:
            return int(status.parent.name), text
    return 0, ""
def kill_what_waits():
    text = ""
    while "Seccomp:\\t2" not in text:  # what confines it last
        time.sleep(0.01)
        waiting, _ = child_of(os.getpid())
        _, text = child_of(waiting) if waiting else (0, "")
    print([line for line in text.splitlines() if line.startswith("Uid")])
    os.kill(waiting, signal.SIGKILL)
threading.Thread(target=kill_what_waits, daemon=True).start()
print(LocalSandbox(2**30).run("import time; time.sleep(60)", "", deadline=time.monotonic() + 30))
"""
    try:
        printed = run_as(script, user=0)
        assert "65534" in printed
        assert "ProcessResult(output=b'', exit_code=-9)" in printed
    except PermissionError:
        pytest.skip("this root may not mount, so Python cannot be made readable for another user")


class SlowToStart(LocalSandbox):
    """A sandbox of a machine on which processes take two seconds to start."""

    def _await_confined(self, ready: int, end: float) -> None:
        time.sleep(2)
        super()._await_confined(ready, end)


def test_the_start_of_a_process_does_not_count_against_the_deadline_of_its_program():
    sandbox = SlowToStart(2**30)
    source = "import time\ntime.sleep(1.5)\nprint(3)"
    result = sandbox.run(source, "", deadline=time.monotonic() + 1)
    assert (result.output, result.exit_code) == (b"3\n", 0)
    assert result.start_s > 2
    endless = "while True: pass"
    assert sandbox.run(endless, "", deadline=time.monotonic() + 1).exit_code != 0


def test_a_start_that_hangs_is_an_error_and_no_wrong_program():
    sandbox = LocalSandbox(2**30, start_timeout_s=0.001)
    for tests in (["assert add(1, 2) == 3"], [{"input": "", "output": "3"}]):
        with pytest.raises(SandboxError, match=r"did not start within 0\.001 s"):
            read_tests(tests).passed_by("print(4)", sandbox, deadline=time.monotonic())


@needs_filter
def test_the_filter_alone_lets_a_program_read_and_nothing_else(successes):
    assert successes["system_calls"] <= READING | READING_OF_PROCESSES | {"allocate"}
    assert successes["system_calls"] >= READING


@needs_landlock
def test_landlock_alone_refuses_files_and_programs_but_no_change_of_mode_and_no_socket(successes):
    writing = {
        "open to write",
        "open to append",
        "open and create",
        "open to truncate",
        "mkdir",
        "unlink",
        "rename",
    }
    refused = (
        READING | writing | {"run a program", "bind", "list processes", "ptrace", "link", "mkfifo"}
    )
    for configuration in ("landlock", "landlock of Linux 5.13 alone"):
        assert successes[configuration] & refused == set()
        assert successes[configuration] >= {
            "chmod",
            "utime",
            "socket",
            "socketpair",
            "fork",
            "inotify_init",
        }
    assert {"truncate", "prlimit of another"} <= successes["landlock of Linux 5.13 alone"]


def test_namespaces_alone_hide_files_other_processes_and_the_network_or_are_not_to_be_had(
    successes,
):
    if "kill" in successes["namespaces"]:
        pytest.skip("no namespaces here")
    hidden = {
        "kill",
        "rt_sigqueueinfo",
        "prlimit of another",
        "setpriority",
        "sched_setaffinity",
        "F_SETOWN",
    }
    hidden |= {
        "connect by UDP",
        "connect to an abstract name",
        "connect to a Unix socket",
        "list processes",
    }
    assert (
        successes["namespaces"] & {*hidden, *READING, "open to write", "chmod", "truncate", "mkdir"}
        == set()
    )
    assert successes["namespaces"] >= {"socket", "socketpair", "fork", "pipe", "inotify_init"}


def test_another_user_alone_takes_the_rights_of_root(successes):
    assert successes["user"] & {"mount", "chroot", "fsopen"} == set()
    assert successes["user"] >= {"socket", "fork", "open to read", "kill"}


def test_limits_alone_bound_memory_and_the_bytes_of_files(successes):
    assert successes["limits"] & {"allocate", "sendfile", "copy_file_range", "fallocate"} == set()


def test_a_missing_layer_is_a_weakness_and_ends_processes_where_confinement_is_required():
    for missing, weaknesses in (
        ({"system_calls"}, {"open sockets", "use services of the kernel"}),
        ({"landlock", "namespaces"}, {"read files"}),
    ):
        layers = [layer for layer in ALL if layer not in missing]
        assert weaknesses <= set(probe(LocalSandbox(MEMORY_BYTES, layers=layers)).values())
        sandbox = LocalSandbox(MEMORY_BYTES, require_confinement=True, layers=layers)
        with pytest.raises(SandboxError, match="could not be confined"):
            sandbox.run("print(1)", "", deadline=time.monotonic() + 60)
        assert run("print(1)", layers).exit_code == 0


@needs_filter
@needs_landlock
def test_what_a_program_may_read_is_confined_by_landlock_or_by_namespaces():
    assert (
        probe(LocalSandbox(MEMORY_BYTES, layers=[layer for layer in ALL if layer != "namespaces"]))
        == {}
    )
    if "read files" in probe(LocalSandbox(MEMORY_BYTES, layers=["namespaces"])).values():
        pytest.skip("no namespaces here")
    assert (
        probe(LocalSandbox(MEMORY_BYTES, layers=[layer for layer in ALL if layer != "landlock"]))
        == {}
    )
    source = (
        "import os; print([p for p in ('/etc', '/etc/passwd', '/proc', '/sys', '/var') if"
        " os.path.exists(p)])"
    )
    assert run(source, ["namespaces", "system_calls"]).output == b"['/etc']\n"


def run(source, layers=ALL, stdin=""):
    return LocalSandbox(2**30, layers=layers).run(source, stdin, deadline=time.monotonic() + 60)


CALLS = """
import ctypes, errno, json
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def error_of(number, *arguments):
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return ctypes.get_errno()
assert libc.prctl(21, 0, 0, 0, 0) == -1, "no filter: the calls below would be made"
"""


@needs_landlock
def test_packages_that_are_installed_among_the_libraries_cannot_be_read():
    source = """
import os, sysconfig
library, opened = sysconfig.get_path("stdlib"), 0
for folder in (f"{library}/site-packages", f"{library}/dist-packages", "/usr/lib/python3/dist-packages"):
    for parent, _, files in os.walk(folder):
        for name in files[:20]:
            try:
                opened += bool(open(f"{parent}/{name}"))
            except OSError:
                pass
print(opened)
"""
    if run(source, []).output == b"0\n":
        pytest.skip("nothing is installed there")
    assert run(source).output == b"0\n"


def test_shared_libraries_of_python_are_found_under_each_of_their_names(tmp_path):
    maps = Path("/proc/self/maps").read_text().splitlines()
    in_use = next(line.split()[-1] for line in maps if "/libc.so" in line)
    installed = tmp_path / "lib"
    installed.mkdir()
    (installed / "libunused.so").write_bytes(b"")
    assert shared_libraries(str(tmp_path)) == []
    for name in ("libfound.so", "libfound.so.1"):
        (installed / name).symlink_to(in_use)
    shared_libraries.cache_clear()
    assert sorted(shared_libraries(str(tmp_path))) == [
        f"{installed}/libfound.so",
        f"{installed}/libfound.so.1",
    ]
    assert shared_libraries(str(tmp_path / "none")) == ()


@needs_filter
def test_every_number_that_is_not_on_the_list_is_refused_those_of_x32_too():
    allowed = sorted(allowed_numbers(MACHINE).values())
    # uretprobe and uprobe: newer kernels pass these by every filter, and answer all but a probe of
    # theirs with SIGILL
    exempt = [335, 336] if MACHINE == "x86_64" else []
    source = f"""{CALLS}
numbers = [number for number in range(1024) if number not in {allowed + exempt}]
numbers += [0x40000000 | number for number in range(1024)] + [-1, 2**31 - 1]
print([number for number in numbers if error_of(number, *[-1] * 6) != errno.EPERM])
"""
    assert run(source, ["system_calls"]).output == b"[]\n"


@needs_filter
def test_reading_of_what_a_program_needs_is_allowed_with_no_other_flag_of_open():
    openat = allowed_numbers(MACHINE)["openat"]
    source = f"""{CALLS}
path = ctypes.create_string_buffer(b"/dev/null")
address = ctypes.addressof(path)
flags = [bit for bit in range(32) if error_of({openat}, -100, address, 1 << bit, 0) != errno.EPERM]
print(flags, error_of({openat}, -100, address, 1 << 40, 0))
"""
    directory, no_follow, large = (16, 17, 15) if MACHINE == "x86_64" else (14, 15, 17)
    o_noctty = 8
    o_nonblock = 11
    o_cloexec = 19
    expected = sorted([directory, no_follow, large, o_noctty, o_nonblock, o_cloexec])
    assert run(source, ["system_calls"]).output.decode() == f"{expected} 0\n"


@needs_filter
def test_only_harmless_commands_of_fcntl_and_ioctl_pass():
    numbers = allowed_numbers(MACHINE)
    source = f"""{CALLS}
print([command for command in range(2048) if error_of({numbers["fcntl"]}, 0, command, 0) != errno.EPERM])
print([hex(command) for command in range(0x10000) if error_of({numbers["ioctl"]}, 0, command, 0) != errno.EPERM])
"""
    lines = run(source, ["system_calls"]).output.decode().splitlines()
    assert lines == ["[0, 1, 2, 3, 1030]", "['0x5401', '0x5413', '0x541b', '0x5450', '0x5451']"]


@pytest.mark.skipif(MACHINE != "x86_64", reason="int 0x80 is an instruction of x86")
def test_a_call_by_the_32_bit_convention_kills_the_program():
    machine_code = r"b'\xb8\x14\x00\x00\x00\xcd\x80\xc3'"  # mov eax, 20 (getpid); int 0x80; ret
    source = f"""
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write({machine_code})
print("before", flush=True)
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
print("after", flush=True)
"""
    confined = run(source, ["system_calls"])
    assert (confined.output, confined.exit_code) in (
        (b"before\n", 128 + 31),
        (b"before\n", 128 + 11),
    )


def test_a_program_that_becomes_another_program_is_refused_that_by_the_filter_and_by_landlock():
    source = "import os, sys\nos.execv('/bin/echo', ['echo', 'another'])"
    assert run(source, []).output == b"another\n"
    for layers in (["system_calls"], ["landlock"], ALL):
        assert run(source, layers).output == b""


def verdict(machine, number, *arguments, arch=None):
    """The value that the filter returns for a call, by an interpreter of its few instructions."""
    own_arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=iIQ6Q", number, own_arch if arch is None else arch, 0, *padded)
    program = list(struct.iter_unpack("=HBBI", filter_program(machine)))
    position = word = 0
    while True:
        code, if_true, if_false, value = program[position]
        position += 1
        if code == 0x20:
            (word,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            word &= value
        elif code == 0x15:
            position += if_true if word == value else if_false
        else:
            assert code == 0x06
            return {0x80000000: "kill", 0x00050000 | errno.EPERM: "refuse", 0x7FFF0000: "allow"}[
                value
            ]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_either_machine_decides_by_convention_number_and_arguments(machine):
    numbers = allowed_numbers(machine)
    openat, prlimit, futex, madvise = (
        numbers[name] for name in ("openat", "prlimit64", "futex", "madvise")
    )
    refused = [
        *[(openat, 0, 0, flags) for flags in (1, 2, 3, 0o1000, 0o100, 0o2000, 0x200000, 0x400000)],
        (prlimit, 1, 4, 0, 1),
        (prlimit, 0, 4, 1, 0),
        (prlimit, 0, 4, 1 << 32, 0),
        (prlimit, 1 << 31, 0),
        *[(futex, 0, command) for command in (2, 6, 7, 8, 11, 12, 13)],
        *[(madvise, 0, 0, advice) for advice in (9, 12, 100)],
        *[(number,) for number in range(1024) if number not in numbers.values()],
    ]
    allowed = [
        *[(openat, 0, 0, flags) for flags in (0, 0x80000, 0x80000 | 0o4000)],
        (prlimit, 0, 4, 0, 1),
        (numbers["ioctl"], 0, 0x5401),
        (futex, 0, 128 | 9),
        (futex, 0, 256 | 128 | 9),
        (madvise, 0, 0, 4),
        *[(number,) for name, number in numbers.items() if name != "ioctl"],
    ]
    assert {verdict(machine, *call) for call in refused} == {"refuse"}
    assert {verdict(machine, *call) for call in allowed} == {"allow"}
    assert {
        verdict(machine, *call, arch=arch) for call in allowed for arch in (0x40000003, 0x40000028)
    } == {"kill"}
    assert filter_program("riscv64") is None


def test_the_standard_library_is_as_complete_in_the_sandbox_as_outside():
    source = """
import sys
missing = []
for name in sorted(sys.stdlib_module_names - {"antigravity", "this", "idlelib", "turtledemo"}):
    try:
        __import__(name)
    except Exception as error:
        missing.append(name)
print(missing)
"""
    outside = run(source, []).output
    assert outside.startswith(b"[")
    assert run(source).output == outside


def test_programs_that_only_compute_find_everything_they_use():
    source = """
import bisect, collections, copy, csv, dataclasses, datetime, decimal, enum, fractions, functools, hashlib, heapq, io
import itertools, json, math, operator, os, pickle, pprint, random, re, signal, sqlite3, statistics, string, struct
import sys, textwrap, time, traceback, typing, uuid, zlib, array, base64, difflib, graphlib, inspect, secrets, locale
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001)
time.sleep(0.01)
assert sqlite3.connect(":memory:").execute("select 6 * 7").fetchone() == (42,)
assert pickle.loads(pickle.dumps({1: {2}})) == {1: {2}} and zlib.decompress(zlib.compress(b"x" * 9999)) == b"x" * 9999
assert hashlib.sha256(b"").hexdigest().startswith("e3b0c442") and 0 <= random.SystemRandom().random() < 1
assert os.path.exists(os.__file__) and "def join" in inspect.getsource(os.path) and os.cpu_count() >= 1
assert len(secrets.token_hex(8)) == 16 and uuid.uuid4() != uuid.uuid1() and datetime.datetime.now() and time.ctime()
sys.setrecursionlimit(50_000)
print(sum(map(int, sys.stdin.read().split())), max(range(10**6)), len(bytearray(10**8)), math.comb(200, 100) % 97)
"""
    done = run(source, stdin="1 2 3\n")
    assert (done.exit_code, done.output.split()[:3]) == (0, [b"6", b"999999", b"100000000"])


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="newer versions of Python bound the calls from C by number"
)
def test_a_cached_function_may_call_itself_as_deeply_as_in_a_contest():
    source = """
import functools, sys
sys.setrecursionlimit(10**6)
@functools.cache
def count(n):
    return n and 1 + count(n - 1)
print(count(100_000))
"""
    done = run(source)
    assert (done.exit_code, done.output) == (0, b"100000\n")


def test_what_needs_more_than_computing_raises_an_exception_and_does_not_hang():
    source = """
import concurrent.futures, multiprocessing, os, socket, subprocess, tempfile, threading, warnings
warnings.simplefilter("ignore")
for use in (
    lambda: threading.Thread(target=print).start(),
    lambda: concurrent.futures.ThreadPoolExecutor().submit(print).result(),
    lambda: multiprocessing.Process(target=print).start(),
    lambda: multiprocessing.Pool(2),
    lambda: subprocess.run("true"),
    lambda: os.system("true") == 0 or 1 / 0,
    lambda: tempfile.TemporaryFile(),
    lambda: socket.create_connection(("localhost", 1)),
    lambda: os.kill(os.getpid(), 0),
):
    try:
        use()
        print("nothing")
    except Exception as error:
        print(type(error).__name__)
"""
    done = run(source)
    assert len(done.output.split()) == 9
    assert b"nothing" not in done.output.split()


def test_the_channel_of_a_submission_is_no_way_out():
    source = """
import ctypes, fcntl, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
def attempts():
    found = []
    for fd in range(32):
        for name, arguments in {
            "sendto": (fd, b"1", 1, 0, struct.pack("=H6s", 1, b"/x"), 8), "send": (fd, b"1", 1, 0),
            "recv": (fd, bytes(8), 8, 0x42), "connect": (fd, struct.pack("=H6s", 1, b"/x"), 8), "shutdown": (fd, 2),
            "getpeername": (fd, bytes(128), struct.pack("=I", 128)), "listen": (fd, 1), "fchmod": (fd, 0o777),
            "setsockopt": (fd, 1, 7, struct.pack("=i", 1 << 20), 4), "ftruncate": (fd, 0), "flock": (fd, 1),
        }.items():
            ctypes.set_errno(0)
            if getattr(libc, name)(*arguments) != -1 or ctypes.get_errno() != 1:
                found.append((name, fd, ctypes.get_errno()))
    return found
"""
    layers = ["system_calls", "landlock"]
    tests = read_tests(["assert attempts() == [], attempts()"])
    assert tests.passed_by(
        source, LocalSandbox(2**30, layers=layers), deadline=time.monotonic() + 60
    )
    assert not tests.passed_by(
        source, LocalSandbox(2**30, layers=[]), deadline=time.monotonic() + 60
    )
