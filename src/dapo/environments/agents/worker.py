"""The process that loads an agent's code and forks a process for each episode. Imports no torch."""

import asyncio
import gc
import importlib
import inspect
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from types import ModuleType
from typing import IO, Any

from dapo.core.errors import ConfigError
from dapo.core.loading import (
    AGENT_PREFIX,
    Failure,
    call_text,
    load_callable,
    own_name,
    try_call,
)
from dapo.processes.supervisor import exit_with_supervisor, supervise
from dapo.processes.worker import Answer, run
from dapo.rewards.verdicts import problem_of_frame
from dapo.types import Problem, content_text

_MAX_PROCESSES = 65536
"""Of all agents; each agent's own supervisor bounds its processes."""
_MAX_REASON_CHARS = 1000
_MAX_NAMES_BYTES = 2**17
_OUTPUT_S = 2.0
"""The longest wait for the rest of what a command has printed."""
_MAX_TAKEN = 8
"""The episodes whose imports are repeated: later ones import little that is new."""


def _starting(spec: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Load an agent, and return a function that starts it. Raises ConfigError."""
    play: Callable[[Problem, str, str], Any]
    if spec["command"]:
        play = _command(spec["command"])
    else:
        play = _function(spec["name"].removeprefix(AGENT_PREFIX), spec["options"])

    # the kernel takes the ends of these processes, on which nothing here waits
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    imports = _LateImports()
    # the collector of a child would write to every object, and so copy its page
    gc.freeze()

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        imports.repeat()
        pid = os.fork()
        if pid:
            return {"pid": pid}
        try:
            _monitor(spec, message, play, imports)
        finally:
            os._exit(1)

    return {"tools": []}, answer


_LIBRARIES = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")
)


class _LateImports:
    """What libraries import at their first call, which each episode's process would do again.

    A client of OpenAI imports for 150 ms of processor time when it is made and first asked.
    """

    def __init__(self) -> None:
        # messages of processes that end at once stay apart, as they would not in a pipe
        self._receiver, self._sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._num_left = _MAX_TAKEN

    def repeat(self) -> None:
        """Import, in the process that loads the code, what episodes have imported since."""
        while self._num_left:
            try:
                sent = self._receiver.recv(_MAX_NAMES_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._num_left -= 1
            # an agent may write here anything
            with suppress(ValueError, TypeError):
                for name in json.loads(sent):
                    with suppress(Exception):
                        importlib.import_module(name)
            gc.freeze()

    def send(self, known: frozenset[str], message: Mapping[str, Any]) -> None:
        """Send the names of installed modules that an episode has imported, if none keeps its key.

        Args:
            known: The names that were imported before it.
            message: The start of the episode.
        """
        modules = [
            module
            for name, module in list(sys.modules.items())
            if name not in known and _is_installed(module)
        ]
        own = {message["key"], message["url"]}
        for module in modules:
            # isinstance would load what a module makes at its first use
            texts = {value for value in vars(module).values() if type(value) is str}
            if texts & own:  # it has read the environment, which is that of one episode
                return
        names = json.dumps([module.__name__ for module in modules]).encode()
        if modules and len(names) < _MAX_NAMES_BYTES:
            with suppress(OSError):  # enough has been sent
                self._sender.send(names, socket.MSG_DONTWAIT)


def _is_installed(module: Any) -> bool:
    """Return True for a module of Python or of an installed library, which is no user's code."""
    file = getattr(module, "__file__", None)
    if not isinstance(module, ModuleType) or not isinstance(file, str):
        return False
    return file.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in file


def _monitor(
    spec: dict[str, Any],
    message: dict[str, Any],
    play: Callable[[Problem, str, str], Any],
    imports: _LateImports,
) -> None:
    """Run the process above an agent's: it ends with the agent, or when the episode ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.close(int(sys.argv[1]))  # the connection to the pool
    control = socket.create_connection(("127.0.0.1", spec["control_port"]))
    hello = {"session": message["session"], "key": message["key"], "pid": os.getpid()}
    control.sendall(json.dumps(hello).encode() + b"\n")
    output, write_end = os.pipe()
    monitor = os.getpid()
    memory_bytes = round(spec["memory_gib"] * 2**30)
    agent = os.fork()
    if agent:
        os.close(write_end)
        supervise(
            agent,
            keepalive_pipe=control.fileno(),
            output=output,
            report=control.fileno(),
            memory_bytes=memory_bytes,
        )
    exit_with_supervisor(monitor)
    os.setsid()
    os.close(output)
    os.dup2(write_end, 1)
    os.dup2(write_end, 2)
    os.close(write_end)
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    known = frozenset(sys.modules)
    report = _report(message, play)
    # a thread of the agent may still import, and a module may raise where it is read
    with suppress(Exception):
        imports.send(known, message)
    sys.stdout.flush()
    sys.stderr.flush()
    control.sendall(json.dumps(report).encode() + b"\n")
    os._exit(0)


def _report(message: dict[str, Any], play: Callable[[Problem, str, str], Any]) -> dict[str, Any]:
    """Return an agent's result, or the reason why it has none, as JSON values."""
    import numpy as np

    problem = problem_of_frame(message["problem"])
    seed = message["seed"]
    random.seed(seed)
    np.random.seed(seed % 2**32)
    os.environ["OPENAI_BASE_URL"] = message["url"]
    os.environ["OPENAI_API_KEY"] = message["key"]
    # the SDK of Anthropic adds /v1 itself
    os.environ["ANTHROPIC_BASE_URL"] = message["url"].removesuffix("/v1")
    os.environ["ANTHROPIC_API_KEY"] = message["key"]
    result: Any = try_call(lambda: play(problem, message["url"], message["key"]))
    if isinstance(result, Failure):
        return {"error": result.reason[:_MAX_REASON_CHARS]}
    is_json = try_call(lambda: json.dumps(_plain(result)))
    if isinstance(is_json, Failure):
        return {"error": f"the agent returned {type(result).__name__}, expected a number"}
    return {"result": _plain(result)}


def _plain(result: Any) -> Any:
    """Return a result with the numbers of numpy and torch as those of Python."""
    if isinstance(result, Mapping):
        return {str(name): _plain(value) for name, value in result.items()}
    if isinstance(result, str | int | float) or result is None:
        return result
    return result.item() if hasattr(result, "item") else result


def _function(name: str, options: Mapping[str, Any]) -> Callable[[Problem, str, str], Any]:
    """Return a function that plays with the user's function, or its class's method `run`.

    Raises ConfigError if it cannot be made, or called with what an agent gets.
    """
    function: Any = load_callable(name, error=ConfigError, option="")
    label = own_name(name).rpartition(":")[2]
    if inspect.isclass(function):
        function = _method_run(function, label, options)
        label = f"{label}.run"
        options = {}
    elif not inspect.isroutine(function) and hasattr(function, "run"):
        function = function.run
    signature = inspect.signature(function)
    parameters = signature.parameters
    takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
    first = next(iter(parameters), None)
    if first is None or parameters[first].kind in (
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    ):
        raise ConfigError(
            "expected a function of the problem, such as"
            f" solve(problem, *, base_url, api_key), got {label}{signature}"
        )
    unknown = [item for item in options if item not in parameters]
    if unknown and not takes_all:
        raise ConfigError(
            f"{call_text(label, function)} has no parameter {' and '.join(unknown)}, which"
            " environment.options sets; leave it out, or add it"
        )

    def play(problem: Problem, url: str, key: str) -> Any:
        offered = {**options, "base_url": url, "api_key": key, "model": "policy"}
        keywords = {
            item: value for item, value in offered.items() if takes_all or item in parameters
        }
        task: Any = problem if first == "problem" else row_of(problem)
        result = function(task, **keywords)
        return _result_of(_awaited(result)) if inspect.isawaitable(result) else result

    return play


def _method_run(kind: type[Any], label: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the method `run` of a new object of a class. Raises ConfigError."""
    agent: Any = try_call(lambda: kind(**options))
    if isinstance(agent, Failure):
        arguments = ", ".join(options) or "no options"
        raise ConfigError(f"making {label} with {arguments} {agent.reason}")
    run_method: Callable[..., Any] | None = getattr(agent, "run", None)
    if run_method is None:
        raise ConfigError(f"{label} has no method run(self, data, *, base_url, api_key)")
    return run_method


def _result_of(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine.

    `asyncio.run` would then wait for the threads of the agent, one of which may be blocked; here
    they end with the process.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    return loop.run_until_complete(coroutine)


async def _awaited(result: Any) -> Any:
    return await result


def row_of(problem: Problem) -> dict[str, Any]:
    """Return a problem as a row of its data: what agents of other systems take.

    `prompt` and `messages` are the prompt; columns of the data named `id`, `question` and `answer`
    keep their values.
    """
    messages = [{"role": "user", "content": problem.prompt}]
    if not isinstance(problem.prompt, str):
        messages = [dict(message) for message in problem.prompt]
    return {
        "id": problem.id,
        "question": content_text(messages[-1]),
        "answer": problem.answer,
        **problem.fields,
        "prompt": problem.prompt if isinstance(problem.prompt, str) else messages,
        "messages": messages,
    }


def _command(command: list[str]) -> Callable[[Problem, str, str], Any]:
    """Return a function that plays with a command, whose last line is the reward.

    Raises ConfigError if there is no such program.
    """
    if shutil.which(command[0]) is None:
        raise ConfigError(f"there is no program {command[0]!r} here or on the PATH")

    def play(problem: Problem, url: str, key: str) -> Any:
        row = json.dumps(row_of(problem), ensure_ascii=False, default=str)
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=os.environ,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        output = _Output(process.stdout)
        # the command need not read its problem
        with suppress(BrokenPipeError), process.stdin as problem_file:
            problem_file.write(row)
        code = process.wait()
        if code:
            return Failure(f"the command ended with exit code {code}")
        last = output.last_line()
        if last is None:
            return None
        try:
            return json.loads(last)
        except ValueError:
            return Failure(f"the last line of the command is {last[:80]!r}, expected the reward")

    return play


class _Output:
    """Reads what a command prints, and keeps the last line that is not blank."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._last: str | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._stream as lines:
            for line in lines:
                if line.strip():
                    self._last = line.rstrip("\n")

    def last_line(self) -> str | None:
        """Return the last line of a command that has ended.

        A process that it has left behind keeps the pipe open: what it prints later is not waited
        for.
        """
        self._thread.join(_OUTPUT_S)
        return self._last


if __name__ == "__main__":
    run(_starting, max_processes=_MAX_PROCESSES)
