"""Runs and judges untrusted Python programs in processes that give up their rights before they
execute a line.

Example:
    >>> import time
    >>> from dapo.libs.code_sandbox import LocalSandbox, probe, read_tests
    >>> sandbox = LocalSandbox(memory_bytes=2**30)
    >>> probe(sandbox)  # no attack on this machine succeeds
    {}
    >>> tests = read_tests(["assert add(1, 2) == 3"])
    >>> tests.passed_by("def add(a, b): return a + b", sandbox, deadline=time.monotonic() + 10)
    True

`Sandbox` is the interface. `LocalSandbox` implements it with processes on this machine.
`self_check` runs every probe of the library in any implementation and names those that succeed.

`LocalSandbox` covers, by independent layers, each as far as the system has it:

- A filter of system calls (Linux on x86_64 and aarch64, every kernel since 3.19, no library) allows
  a list of calls and checks their arguments (`system_calls`): no sockets, processes, threads or
  signals, no limits or priorities of other processes, no watches. Files open for reading only;
  modes, owners, times, attributes and locks do not change.
- Landlock (Linux 5.13 and newer): only Python's own libraries can be read, without the packages
  installed among them; nothing is written, no program is started. From 6.2 on nothing is truncated,
  from 6.7 on there is no TCP, from 6.12 on there are no signals to other processes.
- Namespaces (Linux as root, or where users may create them): no files except Python's libraries,
  not even their names; no network, no abstract sockets; other processes are invisible.
- Another user: a process of root becomes user 65534, if that user can read Python's library, and
  keeps no capability.
- Limits (any Unix): CPU time, the stack, open files, processes and threads (not for root), no bytes
  to any file, no core dumps. Memory where the system enforces RLIMIT_AS.
- Tests run in a different process than the program, and only plain values pass between the two
  (`confined`).

A program is confined if the filter is in force and Landlock or namespaces restrict which files it
reads. The other layers are a second line. Time and memory are bounded by limits only.

Not covered:

- Without namespaces, names, sizes and times of files: `stat` and `readlink` work on every path that
  the user may reach, because imports need them.
- Linux with neither Landlock nor namespaces, and macOS: files can be read. macOS and Linux on other
  processors have no filter, and macOS does not enforce RLIMIT_AS either.
- Faults of the kernel or the interpreter, and side channels (time, caches): there is no virtual
  machine.
"""

from .code_tests import Tests, read_tests
from .local import LocalSandbox
from .probing import probe, self_check
from .required_names import UnusableTests
from .sandbox import ProcessResult, Sandbox, SandboxError

__all__ = [
    "LocalSandbox",
    "ProcessResult",
    "Sandbox",
    "SandboxError",
    "Tests",
    "UnusableTests",
    "probe",
    "read_tests",
    "self_check",
]
