"""The program that `probe` runs in a sandbox: each probe attempts one forbidden action.

It prints the names of the probes that succeed, each with the weakness that it shows. No probe does
harm where nothing confines it: files belong to a temporary folder, limits and priorities keep their
values, and signal number 0 is no signal. Calls that Python's functions do not make are made by
number.
"""

import ctypes
import fcntl
import json
import os
import platform
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

_NUMBERS = """
fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, fchown 93 55, fchownat 260 54, utimensat 280 88, setxattr 188 5,
fsetxattr 190 7, removexattr 197 14, truncate 76 45, ftruncate 77 46, fallocate 285 47, openat 257 56,
openat2 437 437, name_to_handle_at 303 264, mkdirat 258 34, linkat 265 37, symlinkat 266 36, renameat2 316 276,
mknodat 259 33, flock 73 32, inotify_init1 294 26, fanotify_init 300 262, fsopen 430 430, open_tree 428 428,
unshare 272 97, mount 165 40, chroot 161 51, clone 56 220, kill 62 129, tkill 200 130, tgkill 234 131,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_open 434 434, pidfd_send_signal 424 424, prlimit64 302 261,
sched_getaffinity 204 123, sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setattr 314 274,
setpriority 141 140, ioprio_set 251 30, ioprio_get 252 31, ptrace 101 117, process_vm_readv 310 270,
process_vm_writev 311 271, kcmp 312 272, get_robust_list 274 100, socket 41 198, socketpair 53 199,
memfd_create 319 279, memfd_secret 447 447, shmget 29 194, msgget 68 186, semget 64 190, eventfd2 290 19,
timerfd_create 283 85, signalfd4 289 74, epoll_create1 291 20, userfaultfd 323 282, io_uring_setup 425 425,
io_setup 206 0, bpf 321 280, perf_event_open 298 241, add_key 248 217, keyctl 250 219, prctl 157 167, seccomp 317 277,
membarrier 324 283, personality 135 92, mlock 149 228, setsid 112 157, clone3 435 435, mq_open 240 180,
mq_unlink 241 181
"""
_AT_FDCWD = -100
_SIGNAL_NONE = 0
_THIS_PROCESS = 0
_O_WRONLY_CLOEXEC = os.O_WRONLY | getattr(os, "O_CLOEXEC", 0)
# of the kernel's headers
_TRACE_SEIZE = 0x4206
_FAN_REPORT_FID = 0x200
_CLONE_NEWUSER = 0x10000000
_MS_UNBINDABLE = 0x20000
_PR_SET_NAME = 15
_SECCOMP_GET_ACTION_AVAIL = 2
_SECCOMP_RET_ALLOW = 0x7FFF0000
_PERSONALITY_QUERY = 0xFFFFFFFF
_KCMP_VM = 1
_IOPRIO_WHO_PROCESS = 1
_UFFD_USER_MODE_ONLY = 1
_BPF_MAP_CREATE = 0
_BPF_MAP_TYPE_ARRAY = 2
_PERF_TYPE_SOFTWARE = 1
_KEYCTL_GET_KEYRING_ID = 0
_KEY_SPEC_THREAD_KEYRING = -1
_KEY_SPEC_SESSION_KEYRING = -3
_FIFO = 0o010600
_COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long

Probe = Callable[[], object]


def _call(name: str, *arguments: Any) -> int:
    """Make a system call by its number.

    Raises OSError if it fails, or this system has no such number.
    """
    if _COLUMN is None or sys.platform != "linux":
        raise OSError("no number is known here")
    numbers = dict(row.split(maxsplit=1) for row in _NUMBERS.replace("\n", " ").split(","))
    number = int(numbers[name].split()[_COLUMN])
    # an integer would be passed as 32 bits
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    result = int(_LIBC.syscall(ctypes.c_long(number), *words))
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _require(condition: bool) -> None:
    """Fail, as a refused action does, unless the condition holds."""
    if not condition:
        raise OSError


class _Targets:
    """The things to attack: a folder with a file and Unix sockets, an abstract name, a process and
    its memory.
    """

    def __init__(self, message: dict[str, Any]) -> None:
        self.folder: str = message["folder"]
        self.file = f"{self.folder}/file"
        self.memory_bytes: int = message["memory_bytes"]
        self.abstract: str = message["abstract"]
        self.address: int = message["address"]
        self.variable: str = message["variable"]
        self._process: int = message["process"]
        self._names = 0

    @property
    def process(self) -> int:
        """The id of another process of the same user; in a namespace it may belong to this process
        or to none.
        """
        if self._process in (os.getpid(), 0):
            raise ProcessLookupError
        return self._process

    @property
    def opened(self) -> int:
        """The file, open for reading; standard input if the sandbox refuses that."""
        try:
            return os.open(self.file, os.O_RDONLY)
        except OSError:
            return 0

    @property
    def path(self) -> bytes:
        """The file as an argument of a system call."""
        return os.fsencode(self.file)

    def new_path(self) -> str:
        """Return a path at which nothing is yet."""
        self._names += 1
        return f"{self.folder}/new-{self._names}"


def _files(targets: _Targets) -> dict[str, Probe]:
    """Return attempts to change files or lock them."""
    now = ctypes.create_string_buffer(bytes(32))
    how = struct.pack("=QQQ", _O_WRONLY_CLOEXEC, 0, 0)

    def lease() -> None:
        """Ask to be told when somebody opens the file, and give the lease back."""
        opened = targets.opened
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_UNLCK)  # or who opens the file waits

    return {
        "lease": lease,  # needs a file that nobody has opened to write
        # opening
        "open to write": lambda: os.open(targets.file, os.O_WRONLY),
        "open to read and write": lambda: os.open(targets.file, os.O_RDWR),
        "open to append": lambda: open(targets.file, "a"),
        "open and create": lambda: open(targets.new_path(), "x"),
        "open without a name": lambda: os.open(targets.folder, os.O_TMPFILE | os.O_RDWR),
        "openat to write": lambda: _call("openat", _AT_FDCWD, targets.path, _O_WRONLY_CLOEXEC, 0),
        "openat2 to write": lambda: _call("openat2", _AT_FDCWD, targets.path, how, len(how)),
        # mode and owner
        "chmod": lambda: os.chmod(targets.file, 0o600),
        "fchmod": lambda: os.fchmod(targets.opened, 0o600),
        "fchmodat": lambda: _call("fchmodat", _AT_FDCWD, targets.path, 0o600),
        "fchmodat2": lambda: _call("fchmodat2", _AT_FDCWD, targets.path, 0o600, 0),
        "chown": lambda: os.chown(targets.file, os.getuid(), os.getgid()),
        "lchown": lambda: os.lchown(targets.file, os.getuid(), os.getgid()),
        "fchown": lambda: _call("fchown", targets.opened, os.getuid(), os.getgid()),
        "fchownat": lambda: _call("fchownat", _AT_FDCWD, targets.path, os.getuid(), os.getgid(), 0),
        # times and attributes
        "utime": lambda: os.utime(targets.file, (1, 1)),
        "utimensat": lambda: _call("utimensat", _AT_FDCWD, targets.path, now, 0),
        "setxattr": lambda: os.setxattr(targets.file, "user.probe", b"1"),
        "fsetxattr": lambda: _call("fsetxattr", targets.opened, b"user.probe", b"1", 1, 0),
        "removexattr": lambda: os.removexattr(targets.file, "user.given"),
        # length
        "truncate": lambda: os.truncate(targets.file, 0),
        "truncate by number": lambda: _call("truncate", targets.path, 0),
        "open to truncate": lambda: os.open(targets.file, os.O_RDONLY | os.O_TRUNC),
        "ftruncate": lambda: os.ftruncate(0, 1),
        "fallocate": lambda: _call("fallocate", 0, 0, 0, 1 << 16),
        # names
        "mkdir": lambda: os.mkdir(targets.new_path()),
        "mkdirat": lambda: _call("mkdirat", _AT_FDCWD, os.fsencode(targets.new_path()), 0o700),
        "link": lambda: os.link(targets.file, targets.new_path()),
        "linkat": lambda: _call(
            "linkat", _AT_FDCWD, targets.path, _AT_FDCWD, os.fsencode(targets.new_path()), 0
        ),
        "symlink": lambda: os.symlink("target", targets.new_path()),
        "symlinkat": lambda: _call(
            "symlinkat", b"target", _AT_FDCWD, os.fsencode(targets.new_path())
        ),
        "mkfifo": lambda: os.mkfifo(targets.new_path()),
        "mknodat": lambda: _call("mknodat", _AT_FDCWD, os.fsencode(targets.new_path()), _FIFO, 0),
        "rename": lambda: os.rename(targets.file, targets.file),
        "renameat2": lambda: _call(
            "renameat2", _AT_FDCWD, targets.path, _AT_FDCWD, targets.path, 0
        ),
        "unlink": lambda: os.unlink(f"{targets.folder}/old"),
        "rmdir": lambda: os.rmdir(f"{targets.folder}/folder"),
        # locks
        "flock": lambda: fcntl.flock(targets.opened, fcntl.LOCK_SH),
        "flock by number": lambda: _call("flock", targets.opened, fcntl.LOCK_SH),
        "lock by fcntl": lambda: fcntl.lockf(targets.opened, fcntl.LOCK_SH),
        # copies into standard input
        "copy_file_range": lambda: os.copy_file_range(os.open(os.__file__, os.O_RDONLY), 0, 1),
        "sendfile": lambda: os.sendfile(0, os.open(os.__file__, os.O_RDONLY), 0, 1),
    }


def _reading(targets: _Targets) -> dict[str, Probe]:
    """Return attempts to read files and folders."""
    return {
        "open to read": lambda: open(targets.file),
        "openat to read": lambda: _call("openat", _AT_FDCWD, targets.path, os.O_RDONLY, 0),
        "list a folder": lambda: os.listdir(targets.folder),
        "read the list of users": lambda: open("/etc/passwd"),
    }


def _watching(targets: _Targets) -> dict[str, Probe]:
    """Return attempts to learn of changes to files."""
    handle = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0) + bytes(128))
    mount = ctypes.c_int()
    return {
        "inotify_init": lambda: _call("inotify_init1", 0),
        "fanotify_init": lambda: _call("fanotify_init", _FAN_REPORT_FID, 0),
        "name_to_handle_at": lambda: _call(
            "name_to_handle_at", _AT_FDCWD, targets.path, handle, ctypes.byref(mount), 0
        ),
        "F_NOTIFY": lambda: fcntl.fcntl(
            os.open(targets.folder, os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_MODIFY
        ),
    }


def _talking(targets: _Targets) -> dict[str, Probe]:
    """Return attempts to reach other processes and the network."""

    def connected(family: int, kind: int, address: Any) -> None:
        """Connect to an address."""
        with socket.socket(family, kind) as client:
            client.connect(address)

    def datagram(send: Callable[[socket.socket], object]) -> None:
        """Send something by one end of a pair."""
        sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with sender, receiver:
            send(sender)

    stream = socket.SOCK_STREAM
    unix = socket.AF_UNIX
    return {
        "socket": lambda: socket.socket(unix, stream).close(),
        "socket by number": lambda: _call("socket", int(unix), int(stream), 0),
        "socket of the internet": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
        "socket of the kernel": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close(),
        # pairs, which reach nobody, but pass files on
        "socketpair": socket.socketpair,
        "socketpair by number": lambda: _call(
            "socketpair", int(unix), int(stream), 0, (ctypes.c_int * 2)()
        ),
        # connections
        "connect to a Unix socket": lambda: connected(unix, stream, f"{targets.folder}/stream"),
        "connect to an abstract name": lambda: connected(unix, socket.SOCK_DGRAM, targets.abstract),
        "connect by UDP": lambda: connected(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 9)),
        "bind": lambda: socket.socket(unix, stream).bind(targets.new_path()),
        # messages
        "sendto a Unix socket": lambda: datagram(
            lambda sender: sender.sendto(b"1", f"{targets.folder}/datagram")
        ),
        "pass a file on": lambda: datagram(lambda sender: socket.send_fds(sender, [b"1"], [0])),
        "sendmsg to a Unix socket": lambda: datagram(
            lambda sender: sender.sendmsg([b"1"], [], 0, f"{targets.folder}/datagram")
        ),
    }


def _starting(targets: _Targets) -> dict[str, Probe]:
    """Return attempts to start processes and threads."""

    def fork(start: Callable[[], int]) -> None:
        """Start a process that ends at once."""
        child = start()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)

    def thread() -> None:
        """Start a thread that ends at once."""
        started = threading.Thread(target=int)
        started.start()
        started.join()

    return {
        "fork": lambda: fork(os.fork),
        "clone": lambda: fork(lambda: _call("clone", int(signal.SIGCHLD), 0, 0, 0, 0)),
        "clone3": lambda: fork(
            lambda: _call("clone3", struct.pack("=8Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0), 64)
        ),
        "thread": thread,
        "run a program": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    }


def _signals(targets: _Targets) -> dict[str, Probe]:
    """Return attempts to send signals."""
    details = ctypes.create_string_buffer(struct.pack("=iii", 0, 0, -1) + bytes(116))
    none = _SIGNAL_NONE
    return {
        "kill": lambda: os.kill(targets.process, none),
        "kill by number": lambda: _call("kill", targets.process, none),
        "kill a group": lambda: os.killpg(os.getpgid(targets.process), none),
        "kill all": lambda: _call("kill", -1, none),
        "tkill": lambda: _call("tkill", targets.process, none),
        "tgkill": lambda: _call("tgkill", targets.process, targets.process, none),
        "rt_sigqueueinfo": lambda: _call("rt_sigqueueinfo", targets.process, none, details),
        "rt_tgsigqueueinfo": lambda: _call(
            "rt_tgsigqueueinfo", targets.process, targets.process, none, details
        ),
        # signals by file descriptors
        "pidfd_open": lambda: os.pidfd_open(targets.process),
        "pidfd_send_signal": lambda: _call(
            "pidfd_send_signal", os.pidfd_open(targets.process), none, None, 0
        ),
        "F_SETOWN": lambda: fcntl.fcntl(0, fcntl.F_SETOWN, targets.process),
        "F_SETSIG": lambda: fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGTERM),
    }


def _scheduling(targets: _Targets) -> dict[str, Probe]:
    """Return attempts to change limits and priorities."""
    process = os.PRIO_PROCESS
    core = resource.RLIMIT_CORE

    def nice() -> int:
        """Return the priority of the other process."""
        return os.getpriority(process, targets.process)

    def prlimit() -> None:
        """Read a limit of the other process, and set it to the same value."""
        limits = (ctypes.c_uint64 * 2)()
        _call("prlimit64", targets.process, core, None, limits)
        _call("prlimit64", targets.process, core, limits, None)

    return {
        "prlimit of another": lambda: resource.prlimit(
            targets.process, core, resource.prlimit(targets.process, core)
        ),
        "prlimit64 of another": prlimit,
        "setrlimit": lambda: resource.setrlimit(core, resource.getrlimit(core)),
        "sched_setaffinity": lambda: os.sched_setaffinity(
            targets.process, os.sched_getaffinity(targets.process)
        ),
        "sched_setscheduler": lambda: os.sched_setscheduler(
            targets.process, os.SCHED_OTHER, os.sched_param(0)
        ),
        "sched_setattr": lambda: _call(
            "sched_setattr",
            targets.process,
            struct.pack("=IIQiIQQQ", 48, 0, 0, nice(), *[0] * 4),
            0,
        ),
        # priorities
        "setpriority": lambda: os.setpriority(process, targets.process, nice()),
        "setpriority by number": lambda: _call("setpriority", process, targets.process, nice()),
        "ioprio_set": lambda: _call(
            "ioprio_set", 1, targets.process, _call("ioprio_get", 1, targets.process)
        ),
    }


def _processes(targets: _Targets) -> dict[str, Probe]:
    """Return attempts to look into other processes."""
    buffer = ctypes.create_string_buffer(8)
    # struct iovec: an address and a length
    local = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 8)
    remote = (ctypes.c_uint64 * 2)(targets.address, 8)
    return {
        "list processes": lambda: os.listdir("/proc"),
        "inherit the environment": lambda: _require(targets.variable in os.environ),
        "read an environment": lambda: open(f"/proc/{targets.process}/environ", "rb").read(),
        "open the memory": lambda: open(f"/proc/{targets.process}/mem", "rb"),
        # memory
        "ptrace": lambda: _call("ptrace", _TRACE_SEIZE, targets.process, 0, 0),
        "process_vm_readv": lambda: _call(
            "process_vm_readv", targets.process, local, 1, remote, 1, 0
        ),
        "process_vm_writev": lambda: _call(
            "process_vm_writev", targets.process, local, 1, remote, 1, 0
        ),
        "kcmp": lambda: _call("kcmp", targets.process, os.getpid(), _KCMP_VM, 0, 0),
        "get_robust_list": lambda: _call(
            "get_robust_list", targets.process, (ctypes.c_long * 1)(), (ctypes.c_long * 1)()
        ),
        "sched_getaffinity": lambda: os.sched_getaffinity(targets.process),
    }


def _kernel(targets: _Targets) -> dict[str, Probe]:
    """Return attempts to use services of the kernel."""
    parameters = ctypes.create_string_buffer(bytes(256))

    def message_queue() -> None:
        """Create a queue, and remove it."""
        name = f"code-sandbox-probe-{os.getpid()}".encode()
        _call("mq_open", name, os.O_CREAT | os.O_RDWR, 0o600, None)
        _call("mq_unlink", name)

    return {
        # memory without a name
        "memfd_create": lambda: os.memfd_create("probe"),
        "memfd_secret": lambda: _call("memfd_secret", 0),
        # communication of System V and POSIX
        "shared memory": lambda: _LIBC.shmctl(_call("shmget", 0, 4096, 0o600), 0, None),
        "message queue": lambda: _LIBC.msgctl(_call("msgget", 0, 0o600), 0, None),
        "POSIX message queue": message_queue,
        "semaphores": lambda: _LIBC.semctl(_call("semget", 0, 1, 0o600), 0, 0),
        # events
        "pipe": os.pipe,
        "eventfd": lambda: os.eventfd(0),
        "timerfd_create": lambda: _call("timerfd_create", 1, 0),
        "signalfd": lambda: _call("signalfd4", -1, bytes(8), 8, 0),
        "epoll": lambda: select.epoll().close(),
        # wide interfaces, whose faults have opened kernels
        "userfaultfd": lambda: _call("userfaultfd", _UFFD_USER_MODE_ONLY),
        "io_uring_setup": lambda: _call("io_uring_setup", 1, parameters),
        "io_setup": lambda: _call("io_setup", 1, (ctypes.c_long * 1)()),
        "bpf": lambda: _call(
            "bpf", _BPF_MAP_CREATE, struct.pack("=IIII56x", _BPF_MAP_TYPE_ARRAY, 4, 4, 1), 72
        ),
        "perf_event_open": lambda: _call(
            "perf_event_open", struct.pack("=IIQ48x", _PERF_TYPE_SOFTWARE, 64, 0), 0, -1, -1, 0
        ),
        # keys
        "add_key": lambda: _call("add_key", b"user", b"probe", b"1", 1, _KEY_SPEC_THREAD_KEYRING),
        "keyctl": lambda: _call("keyctl", _KEYCTL_GET_KEYRING_ID, _KEY_SPEC_SESSION_KEYRING, 1),
        # the state of this process
        "prctl": lambda: _call("prctl", _PR_SET_NAME, b"probe", 0, 0, 0),
        "seccomp": lambda: _call(
            "seccomp", _SECCOMP_GET_ACTION_AVAIL, 0, struct.pack("=I", _SECCOMP_RET_ALLOW)
        ),
        "membarrier": lambda: _call("membarrier", 0, 0, 0),
        "personality": lambda: _call("personality", _PERSONALITY_QUERY),
        "mlock": lambda: _call("mlock", ctypes.addressof(parameters), 1),
        # sessions, users and folders
        "setsid": lambda: _call("setsid"),
        "setuid": lambda: os.setuid(os.getuid()),
        "chdir": lambda: os.chdir("/"),
        "umask": lambda: os.umask(0o077),
        # mounts and namespaces
        "fsopen": lambda: _call("fsopen", b"tmpfs", 0),
        "open_tree": lambda: _call("open_tree", _AT_FDCWD, b"/", 0),
        "mount": lambda: _call("mount", b"none", b"/", None, _MS_UNBINDABLE, None),
        "chroot": lambda: os.chroot("/"),
        "unshare": lambda: _call("unshare", _CLONE_NEWUSER),
    }


def _memory(targets: _Targets) -> dict[str, Probe]:
    """Return attempts to use more memory than the limit."""
    return {"allocate": lambda: bytearray(2 * targets.memory_bytes)}


KINDS: dict[str, Callable[[_Targets], dict[str, Probe]]] = {
    "read files": _reading,
    "use more memory than the limit": _memory,
    "open sockets": _talking,
    "send signals": _signals,
    "change limits or priorities of processes": _scheduling,
    "see other processes": _processes,
    "watch files": _watching,
    "start processes or threads": _starting,
    "change files": _files,
    "use services of the kernel": _kernel,
}


def _successes(targets: _Targets) -> Iterator[tuple[str, str]]:
    """Yield the probes that succeed, each with the weakness that it shows."""
    for kind, probes in KINDS.items():
        for name, probe in probes(targets).items():
            try:
                probe()
            except (
                OSError,
                ValueError,
                MemoryError,
                RuntimeError,
                AttributeError,
                subprocess.SubprocessError,
            ):
                continue  # refused, or not on this system
            yield name, kind


if __name__ == "__main__":
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # sent where a folder can be watched
    sys.stdout.write(json.dumps(dict(_successes(_Targets(json.load(sys.stdin))))))
