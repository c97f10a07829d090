"""What an environment can do to the process that plays it: `Hostile` does what its action names."""

import contextlib
import ctypes
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import numpy

from dapo.environments.environment import StepResult
from dapo.types import Problem
from helpers.environments import Digits


class Hostile:
    """Does what its action names, or, at the beginning, what the problem's answer names."""

    played: ClassVar[list[str]] = []

    def __init__(self) -> None:
        self.action = ""

    def reset(self, problem: Problem, seed: int) -> Any:
        return ACTIONS[problem.answer]() if problem.answer in ACTIONS else None

    def step(self, action: str) -> Any:
        self.action = action
        return ACTIONS[action]() if action in ACTIONS else StepResult(f"read {action}", reward=1.0)

    def close(self) -> None:
        if self.action == "exit in close":
            os._exit(5)
        if self.action == "loop in close":
            time.sleep(1000)
        raise RuntimeError("does not close")


class Startup:
    """Fails in its constructor as `how` names; with `after`, only in constructors behind this
    number of them.
    """

    made = 0

    def __init__(self, how: str, after: int = 0) -> None:
        Startup.made += 1
        if Startup.made > after:
            ACTIONS[how]()

    def reset(self, problem: Problem, seed: int) -> None:
        pass

    def step(self, action: str) -> StepResult:
        return StepResult(f"read {action}")


class Sharing:
    """Counts the steps of all episodes of its process."""

    count = 0

    def reset(self, problem: Problem, seed: int) -> None:
        pass

    def step(self, action: str) -> StepResult:
        if action == "exit":
            os._exit(3)
        Sharing.count += 1
        return StepResult(str(Sharing.count))


class SeldomHostile(Digits):
    """Digits that does what `fault_of` names when it is called first."""

    def reset(self, problem: Problem, seed: int) -> None:
        super().reset(problem, seed)
        self.seed = seed

    def step(self, action: str) -> Any:
        fault = None if self.count else fault_of(self.seed, "step")
        return super().step(action) if fault is None else ACTIONS[fault]()

    def end(self) -> Any:
        fault = None if self.count else fault_of(self.seed, "end")
        return super().end() if fault is None else ACTIONS[fault]()


FAULTS = (
    "raise",
    "exit",
    "chdir",
    "no result",
    "correct in words",
    "reward as a text",
    "half an error",
    "long error",
)


def fault_of(seed: int, call: str) -> str | None:
    """What a SeldomHostile with this seed does in its first call: a fault for a third of the seeds,
    or of the steps.
    """
    return None if seed % 3 > (call == "step") else FAULTS[seed % len(FAULTS)]


class Text(str):
    """A text that gives another one when it is formatted."""

    def __str__(self) -> str:
        return "something else"


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Slow:
    def __float__(self) -> float:
        time.sleep(1000)
        return 0.0

    def __del__(self) -> None:
        raise ValueError("not even this works")


class Endless(Sequence[Any]):
    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield {"role": "user", "content": "more"}

    def __getitem__(self, index: Any) -> Any:
        return {"role": "user", "content": "more"}


def _raise(error: BaseException) -> Any:
    raise error


def _allocate() -> list[bytes]:
    return [bytearray(2**28) for _ in range(64)]


def _memory_of_children() -> None:
    code = "import time; kept = bytearray(150 << 20); time.sleep(60)"
    for _ in range(3):
        subprocess.Popen([sys.executable, "-c", code])
    time.sleep(60)


def _after(function: Callable[[], Any], observation: str) -> StepResult:
    function()
    return StepResult(observation)


def _deaf() -> None:
    """Sleeps, and ignores every signal that a process can ignore."""
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(60)


def _deeper(depth: int = 0) -> int:
    return _deeper(depth + 1) + 1


def _writer() -> None:
    """A thread that stays, and writes."""

    def write() -> None:
        while True:
            print("still here")
            time.sleep(0.05)

    threading.Thread(target=write, daemon=True).start()


def _alarm() -> None:
    signal.signal(signal.SIGALRM, lambda *_: _raise(TimeoutError("an alarm of an earlier call")))
    signal.setitimer(signal.ITIMER_REAL, 0.02)


def _forge(body: bytes) -> None:
    """Answers in the place of the worker: writes to every open descriptor but the standard ones."""
    for descriptor in range(3, 40):
        with contextlib.suppress(OSError):
            os.write(descriptor, len(body).to_bytes(8, "big") + body)
    time.sleep(60)


def _forge_answer(**fields: Any) -> None:
    frame = sys._getframe()
    while frame.f_back is not None and "own_pid" not in frame.f_locals:
        frame = frame.f_back
    answer = {"number": frame.f_locals["number"], "damage": "", "needs_restart": False, **fields}
    _forge(json.dumps(answer).encode())


def _patch(module: str, name: str) -> None:
    setattr(sys.modules[module], name, lambda *_, **__: _raise(ZeroDivisionError("patched")))


def _messages(**message: Any) -> StepResult:
    return StepResult([message])


def _result(**fields: Any) -> StepResult:
    return StepResult(**cast(Mapping[str, Any], fields))


ACTIONS: dict[str, Callable[[], Any]] = {
    # exceptions
    "raise": lambda: _raise(ValueError("it broke")),
    "raise nothing": lambda: _raise(AssertionError()),
    "no text": lambda: _raise(NoText()),
    "long error": lambda: _raise(ValueError("x" * 10**7)),
    "half an error": lambda: _raise(ValueError("\ud800\0")),
    "sys.exit": lambda: sys.exit(4),
    "generator exit": lambda: _raise(GeneratorExit()),
    "stop iteration": lambda: next(iter(())),
    "keyboard interrupt": lambda: _raise(KeyboardInterrupt()),
    "recursion": _deeper,
    "warning": lambda: [warnings.simplefilter("error"), warnings.warn("odd", stacklevel=1)],
    "read the input": input,
    # the process
    "exit": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "kill itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill its supervisor": lambda: [os.kill(os.getppid(), signal.SIGKILL), time.sleep(60)],
    "memory": _allocate,
    "memory of children": _memory_of_children,
    "chdir": lambda: _after(lambda: os.chdir("/"), "elsewhere"),
    "close the input": lambda: _after(lambda: os.close(0), "closed"),
    "close the output": lambda: _after(lambda: os.close(1), "closed"),
    "close everything": lambda: os.closerange(0, 50),
    "no json": lambda: _after(lambda: _patch("json", "dumps"), "patched"),
    "forged number": lambda: _forge(b'{"number": 99, "damage": ""}'),
    "forged answer": lambda: _forge_answer(),
    "forged reward": lambda: _forge_answer(**{**vars(StepResult()), "reward": "much"}),
    "forged nonsense": lambda: _forge(b"[" * 10**5),
    # hanging
    "loop": lambda: time.sleep(1000),
    "deaf": _deaf,
    "slow number": lambda: _result(reward=Slow()),
    "endless messages": lambda: StepResult(Endless()),
    "busy": lambda: next(number for number in iter(int, 1) if number),
    # results
    "no result": lambda: None,
    "a text": lambda: "a text",
    "generator": lambda: (StepResult() for _ in range(1)),
    "class": lambda: StepResult,
    "number": lambda: _result(observation=5),
    "bytes": lambda: _result(observation=b"text"),
    "messages of numbers": lambda: _messages(role="user", content=5),
    "messages of pictures": lambda: _messages(role="user", content=[{"type": "image_url"}]),
    "no role": lambda: _messages(content="x"),
    "nan": lambda: StepResult(reward=float("nan")),
    "infinite": lambda: StepResult(reward=float("inf")),
    "huge": lambda: StepResult(reward=10**400),
    "large reward": lambda: StepResult(reward=1e30),
    "reward in words": lambda: _result(reward="much"),
    "reward as a text": lambda: _result(reward="1"),
    "rewards": lambda: _result(reward=numpy.array([0.5, 1.0])),
    "complex": lambda: _result(reward=1j),
    "done in words": lambda: _result(done="no"),
    "done unknown": lambda: _result(done=None),
    "correct in words": lambda: _result(done=True, correct="no"),
    "half correct": lambda: _result(done=True, correct=0.5),
    "half a call": lambda: _result(tool_calls=0.5),
    "calls": lambda: StepResult(tool_calls=10**5000),
    "calls below zero": lambda: StepResult(tool_errors=-1),
    "too large": lambda: StepResult("z" * (2**26 + 1)),
    # harmless
    "fork": lambda: _after(os.fork, "forked"),
    "subprocess": lambda: _after(lambda: subprocess.Popen(["sleep", "60"]), "left behind"),
    "print": lambda: _after(lambda: print("x" * 10**6), "printed"),
    "thread": lambda: _after(_writer, "a thread stays"),
    "alarm": lambda: _after(_alarm, "an alarm comes"),
    "variables": lambda: _after(lambda: os.environ.clear(), "cleared"),
    "no garbage collection": lambda: _after(gc.disable, "kept"),
    "no output": lambda: _after(lambda: setattr(sys, "stdout", None), "no output"),
    "seed": lambda: _after(lambda: random.seed(0), "seeded"),
    "large": lambda: StepResult("y" * 10**7),
    "half a character": lambda: StepResult("\ud800"),
    "null": lambda: StepResult("a\0b"),
    "text of a class": lambda: StepResult(Text("as it is")),
    "number of numpy": lambda: _result(
        observation="half", reward=numpy.float32(0.5), done=numpy.bool_(False)
    ),
    "true": lambda: StepResult("true", reward=True),
}
