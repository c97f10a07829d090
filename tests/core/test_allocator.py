"""A process that trains keeps the memory that it frees; whoever has set the allocator has set
it.
"""

import os
import platform
import subprocess
import sys

import pytest

from dapo.core.memory import VARIABLES

PROGRAM = """
import resource
from dapo.core.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        bytearray(b"x") * 2**25
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(), keep_freed_memory(), faults(), faults())
"""


HOLES = """
from dapo.core.memory import FreedMemory, keep_freed_memory, resident_bytes

keep_freed_memory()
freed = FreedMemory()
MIB = 2**20
freed.trim_if_grown()
blocks = [bytearray(b"x") * MIB for _ in range(200)]
del blocks[::2]  # between two blocks that stay is room for no longer one
grown = resident_bytes()
print(freed.trim_if_grown(), (grown - resident_bytes()) // MIB, freed.trim_if_grown())
blocks += [bytearray(b"x") * 3 * MIB for _ in range(3)]
print(freed.trim_if_grown())
"""


def measure(program: str = PROGRAM, **variables: str) -> list[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(VARIABLES)
    }
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_memory_that_was_freed_is_taken_again_without_the_system_clearing_it():
    before, keeps, _, after = measure()
    assert keeps == "True"
    assert int(before) > 1000  # pages of up to 64 KiB
    assert int(after) < int(before) / 100


def test_an_allocator_that_the_user_has_set_stays_as_it_is():
    before, keeps, _, after = measure(MALLOC_TRIM_THRESHOLD_="131072")
    assert keeps == "False"
    assert int(after) > int(before) / 2


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_blocks_between_others_are_returned_once_the_process_has_grown():
    trims, mib, again, later = measure(HOLES)
    assert (trims, again, later) == ("True", "False", "False")
    assert 90 <= int(mib) <= 110
