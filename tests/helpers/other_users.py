"""Runs a script as another user where the tests themselves run as root."""

import os
import subprocess
import sys
from pathlib import Path

import dapo

ORDINARY_USER = 4242

_NEEDED = (sys.base_prefix, sys.prefix, str(Path(dapo.__file__).parents[1]))

# A folder on the way to Python that only root may enter is covered, in a mount namespace of this
# process alone, by an empty one in which nothing but the needed folder stands.
_BECOME_USER = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def mount(source, target, kind, flags, data=None):
    if libc.mount(source.encode(), target.encode(), kind, flags, data) != 0:
        raise OSError(ctypes.get_errno(), "mount")
assert libc.unshare(0x20000) == 0
mount("none", "/", None, 0x4000 | 0x40000)
opened, closed = {{}}, []
for needed in map(os.path.realpath, {needed}):
    parts = needed.split("/")
    above = ["/".join(parts[:n]) for n in range(2, len(parts))]
    closed += [folder for folder in above if not os.stat(folder).st_mode & 1][:1]
    opened[needed] = os.open(needed, os.O_PATH)
for folder in dict.fromkeys(closed):
    mount("none", folder, b"tmpfs", 0, b"mode=755")
for needed, descriptor in opened.items():
    if any(needed.startswith(folder + "/") for folder in closed):
        os.makedirs(needed, exist_ok=True)
        mount(f"/proc/self/fd/{{descriptor}}", needed, None, 0x1000 | 0x4000)
    os.close(descriptor)
os.setgroups([])
os.setresgid({user}, {user}, {user})
os.setresuid({user}, {user}, {user})
libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: other processes of the user may trace this one, as is usual
os.environ["HOME"] = "/"
"""


def run_as(script: str, user: int = ORDINARY_USER) -> str:
    """What the script prints where every user can read Python; as this user if this is not root.

    Raises:
        PermissionError: a container that does not let its root mount.
    """
    become_user = _BECOME_USER.format(needed=_NEEDED, user=user) if os.getuid() == 0 else ""
    done = subprocess.run(
        [sys.executable, "-c", become_user + script], cwd="/", capture_output=True, text=True
    )
    if "OSError: [Errno 1] mount" in done.stderr or "assert libc.unshare" in done.stderr:
        raise PermissionError(done.stderr)
    assert done.returncode == 0, done.stderr
    return done.stdout
