"""Waiting for what other processes do, asking whether they still run, and doing to verifiers what
an outsider may.
"""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether this process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(
    condition: Callable[[], bool], *, timeout_s: float = 60.0, what: str = "the condition"
) -> None:
    """Poll until the condition holds; a failed assertion that names `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} is not true after {timeout_s:g} s"
        time.sleep(0.02)


def wait_until_ended(*pids: int, timeout_s: float = 60.0) -> None:
    """Wait until none of these processes runs any more."""
    wait_until(
        lambda: not any(is_alive(pid) for pid in pids),
        timeout_s=timeout_s,
        what=f"end of processes {pids}",
    )


def kill_worker(worker: int, supervisor: int) -> None:
    os.kill(worker, signal.SIGKILL)


def terminate_worker(worker: int, supervisor: int) -> None:
    os.kill(worker, signal.SIGTERM)


def kill_supervisor(worker: int, supervisor: int) -> None:
    os.kill(supervisor, signal.SIGKILL)


def kill_both(worker: int, supervisor: int) -> None:
    for pid in (supervisor, worker):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stop_worker(worker: int, supervisor: int) -> None:
    os.kill(worker, signal.SIGSTOP)


def stop_both(worker: int, supervisor: int) -> None:
    for pid in (worker, supervisor):
        os.kill(pid, signal.SIGSTOP)


def stop_and_continue_both(worker: int, supervisor: int) -> None:
    for signum in (signal.SIGSTOP, signal.SIGCONT):
        for pid in (worker, supervisor):
            os.kill(pid, signum)
        time.sleep(0.05)


Disturbance = Callable[[int, int], None]
"""Takes the process ids of a worker and its supervisor."""


def go_on(worker: int, supervisor: int) -> None:
    """No disturbance."""


@contextmanager
def disturbed_verifiers(folder: Path, disturbances: Sequence[Disturbance]) -> Iterator[list[str]]:
    """Inside, each call of `reward_functions.waits_for_a_signal` that waits meets one of these, one
    after another.

    Yields their names as they happen.
    """
    done: list[str] = []
    seen: set[Path] = set()
    is_over = threading.Event()
    in_rotation = itertools.cycle(disturbances)

    def disturb() -> None:
        while not is_over.wait(0.01):
            for note in set(folder.glob("*.pids")) - seen:
                seen.add(note)
                disturbance = next(in_rotation)
                disturbance(*map(int, note.read_text().split()))
                done.append(disturbance.__name__)
                if disturbance in (stop_and_continue_both, go_on):
                    note.with_suffix(".go").touch()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield done
    finally:
        is_over.set()
        thread.join()
