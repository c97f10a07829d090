"""What a verifier can do to the process it runs in; named in tests as
`helpers.hostile_functions:does`.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

from dapo.types import Verdict

LEFT_BEHIND: list[object] = []


def does(problem, response):
    """What the response says, in the form `action` or `deed argument`; then the length of the
    response.
    """
    action, _, argument = response.partition(" ")
    if action in ACTIONS:
        ACTIONS[action](argument)
    return float(len(response))


def does_slowly(problem, response):
    """The same with a verdict that takes 20 ms."""
    time.sleep(0.02)
    return does(problem, response)


def loop(_):
    while True:
        pass


def sleep_through_signals(_):
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            continue


def null_pointer(_):
    ctypes.string_at(0)


def memory(_):
    while True:
        LEFT_BEHIND.append(bytearray(1 << 26))


def memory_in_children(_):
    for _ in range(8):
        subprocess.Popen(
            [sys.executable, "-c", "import time; kept = bytearray(100 << 20); time.sleep(60)"]
        )
    time.sleep(60)


def shared_memory(_):
    import mmap

    for _ in range(2):
        subprocess.Popen(["sleep", "60"])
    while True:
        LEFT_BEHIND.append(mmap.mmap(-1, 1 << 26))
        LEFT_BEHIND[-1].write(b"x" * (1 << 26))


def daemon(note):
    """A process with a session of its own whose parent is gone."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            with open(note, "w") as file:
                file.write(str(os.getpid()))
            os.closerange(0, 256)
            os.execvp("sleep", ["sleep", "60"])
        os._exit(0)
    os.wait()
    while not Path(note).exists() or not Path(note).read_text():
        time.sleep(0.01)


def daemon_and_exit(note):
    daemon(note)
    os._exit(9)


def daemon_and_hang(note):
    daemon(note)
    time.sleep(60)


def processes(_):
    for _ in range(400):
        subprocess.Popen(["sleep", "60"])
    time.sleep(60)


def fork_and_return(_):
    os.fork()


def megabyte(_):
    print("x" * 79 + "\n" + "y" * (1 << 20), flush=True)
    os.write(2, b"z" * (1 << 20))


def escape_codes(_):
    print("\x1b]0;owned\x07\x1b[2J and\ta word", flush=True)


def chdir(directory):
    os.chdir(directory or "/")


def remove_directory(directory):
    os.mkdir(directory)
    os.chdir(directory)
    os.rmdir(directory)


def close_output(_):
    os.close(1)
    os.close(2)


def close_everything(_):
    os.closerange(0, 256)


def close_everything_and_hang(_):
    os.closerange(0, 256)
    time.sleep(60)


def replace_descriptors(directory):
    """What is opened afterwards gets the numbers of what was closed."""
    os.closerange(0, 256)
    for number in range(64):
        os.open(Path(directory) / str(number), os.O_RDWR | os.O_CREAT)


def forge(_):
    """Answers in the worker's place: a verdict of its own, and then nonsense."""
    for number in range(3, 64):
        try:
            os.write(
                number,
                b"\x00\x00\x00\x00\x00\x00\x00\x1f" + b'{"verdicts": [[[true, 9, null]]]'[:31],
            )
        except OSError:
            continue
    time.sleep(60)


def endless_message(_):
    for number in range(3, 64):
        try:
            os.write(number, b"\xff" * 8)
        except OSError:
            continue
    time.sleep(60)


def alarm_later(_):
    signal.setitimer(signal.ITIMER_REAL, 0.3)


def sleep(_):
    time.sleep(60)


def nap(_):
    time.sleep(0.5)


def thread(_):
    threading.Thread(target=loop, args=("",), daemon=True).start()


class ErrorWithoutText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def unspeakable(_):
    raise ErrorWithoutText


def leave(_):
    raise KeyboardInterrupt


def exit_thread(_):
    ctypes.CDLL(None).pthread_exit(None)


def stop_itself(_):
    os.kill(os.getpid(), signal.SIGSTOP)


def exits(_):
    os._exit(3)


def kills_its_group(_):
    os.killpg(os.getpgrp(), signal.SIGKILL)


def recursion(_):
    def deeper(n):
        return deeper(n + 1)

    deeper(0)


def long_error(_):
    raise ValueError("x" * 10_000_000)


ACTIONS = {
    action.__name__: action
    for action in (
        loop,
        sleep_through_signals,
        null_pointer,
        memory,
        memory_in_children,
        shared_memory,
        daemon,
        daemon_and_exit,
        daemon_and_hang,
        processes,
        fork_and_return,
        megabyte,
        escape_codes,
        chdir,
        remove_directory,
        close_output,
        close_everything,
        close_everything_and_hang,
        replace_descriptors,
        forge,
        endless_message,
        alarm_later,
        nap,
        sleep,
        thread,
        unspeakable,
        leave,
        exit_thread,
        stop_itself,
        exits,
        kills_its_group,
        recursion,
        long_error,
    )
}


ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[red]x[/red]\ud800"


def drives_the_terminal(problem, response):
    """Verdicts, every fourth time an error, whose text holds escape sequences, half a surrogate
    pair and a secret.
    """
    number = zlib.crc32(response.encode(errors="replace"))
    if number % 4 == 0:
        raise ValueError(f"{ATTACK} at http://user:zqK7vX31@host/?api_key=zqK7vX31")
    return Verdict(
        number % 4 == 1, 1.0 if number % 4 == 1 else -1.0, answer=f"{ATTACK}{number % 4}"
    )
