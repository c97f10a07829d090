"""The roles of a confined process: a program, a submission whose functions are called, a test
runner that calls them.

Here is what crosses between the two, and the submission's end; the test runner's end is `remote`.

The submission runs in one process and the tests in another. Only plain values cross: each is
rebuilt as exactly bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, None or
a type of `_VALUES`. No object of the submission (with an `__eq__` that is always true) is ever
compared, and no expected value reaches its process. Every other value is a `RemoteObject` to the
test runner.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import sys
import types

TYPE_CHECKING = False  # as in typing, whose import every response would wait for
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, BinaryIO

_SMALL = 1 << 62
_MAX_PRINTED = 1 << 20
_MAX_PARTS = 1 << 14  # of a value that is sent with the names; a table of primes may have millions
# Other types that cross, with the arguments that rebuild a value, by `fromisoformat` if the type
# has it
_VALUES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.bytearray": lambda value: (bytes(value),),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "decimal.Decimal": lambda value: (str(value),),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "datetime.datetime": lambda value: (value.isoformat(),),
    "datetime.date": lambda value: (value.isoformat(),),
    "datetime.time": lambda value: (value.isoformat(),),
}

# The imports that LiveCodeBench's harness puts before every program, in its order: the names of
# each module, and after all of them the modules themselves
_COMMON_MODULES = (
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
    "typing",
)

CALL_MUTATING = "()="  # a call whose arguments come back with the changes of the program
CALL = "()"
SET = "="
NEXT = ">"
AWAIT = "~"
BOOL = "?"
VALUE = "!"  # the value of a name, which was too large to be sent with the names
IS_INSTANCE = "is a"  # any other action is the name of an attribute
_PLAIN: tuple[type, ...] = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    list,
    tuple,
    dict,
    set,
    frozenset,
)


def load(role: str, sources: list[Any]) -> None:
    """Import the modules of the role from this folder, which a confined process cannot read."""
    _define_exit()
    if role == "test_runner":
        import test_runner  # noqa: F401

        if sources[0]["collect"] or sources[0]["pytest"]:
            import pytest_subset  # noqa: F401


def _define_exit() -> None:
    """Define `exit` and `quit`, which scripts call; the module `site` would, but it is not run."""
    import _sitebuiltins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "end of file"))


def _provide_common_names(source: str) -> None:
    """Define the names of `_COMMON_MODULES` that a program uses and defines nowhere, as `List`.

    They become built-in names of this process, so that they are no public names of the program:
    what tests call must be its own.
    """
    undefined = _undefined_names(source) - set(dir(builtins))
    if not undefined:
        return
    modules = {name: __import__(name) for name in _COMMON_MODULES}
    names: dict[str, Any] = {}
    for module in modules.values():
        public = [name for name in dir(module) if not name.startswith("_")]
        names |= {name: getattr(module, name) for name in getattr(module, "__all__", public)}
    names |= modules
    for name in undefined & names.keys():
        value = names[name]
        # a chain of exception classes ends at the first built-in one
        if not (isinstance(value, type) and issubclass(value, BaseException)):
            setattr(builtins, name, value)


def _undefined_names(source: str) -> set[str]:
    """Return the global names that a module uses and does not define."""
    import symtable

    defined: set[str] = set()
    used: set[str] = set()
    top = symtable.symtable(source, "solution.py", "exec")
    tables = [top]
    while tables:
        table = tables.pop()
        for symbol in table.get_symbols():
            if table is not top and not symbol.is_global():
                continue
            if symbol.is_assigned() or symbol.is_imported():
                defined.add(symbol.get_name())
            if symbol.is_referenced():
                used.add(symbol.get_name())
        tables += table.get_children()
    return used - defined


def program(channel_fd: int, source: str) -> None:
    """Run the source as a script."""
    if "asyncio" in source:
        use_event_loop_without_sockets()
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    main.__file__ = "solution.py"  # as a script has
    sys.argv = ["solution.py"]
    code = compile(source, "solution.py", "exec", dont_inherit=True)
    _provide_common_names(source)
    exec(code, main.__dict__)


def test_runner(channel_fd: int, message: dict[str, Any]) -> None:
    """Run the tests of an `AssertionTests` message.

    Writes `passed`, `failed`, `unchecked` or `broken: reason`.
    """
    import remote  # `load` has read both
    import test_runner as runner

    sys.stdout = io.StringIO()  # output of the tests is no result
    result = runner.run(remote.Connection(channel_fd), message)
    os.write(1, result.encode(errors="replace"))
    os._exit(0)


def submission(channel_fd: int, source: str) -> None:
    """Run the source as a module, send its public names, then answer calls until the connection
    ends.
    """
    if "async " in source:
        use_event_loop_without_sockets()
    Submission(*open_channel(channel_fd)).serve(source)


class Submission:
    """The end of the channel in the submission.

    The program controls it: every message is the claim of the program.
    """

    def __init__(self, lines: BinaryIO, channel: BinaryIO) -> None:
        self._lines = lines
        self._channel = channel
        self._objects: list[Any] = []
        self._handles: dict[int, int] = {}
        self._loop: Any = None

    def serve(self, source: str) -> None:
        """Answer requests until the connection ends."""
        module = types.ModuleType("solution")
        sys.modules["solution"] = module
        code = compile(source, "solution.py", "exec", dont_inherit=True)
        _provide_common_names(source)
        exec(code, module.__dict__)
        is_module = types.ModuleType
        names = {
            n: v
            for n, v in vars(module).items()
            if not n.startswith("_") and not isinstance(v, is_module)
        }
        send(self._channel, [[name, self._announced(value)] for name, value in names.items()])
        output = _Output()
        sys.stdout = io.TextIOWrapper(
            output, "utf-8", errors="backslashreplace", write_through=True
        )
        # programs that have replaced the one return to the other
        vars(sys)["__stdout__"] = sys.stdout
        for line in self._lines:
            action, target, args, kwargs = json.loads(line)
            try:
                positional = [decode(arg, self._kept) for arg in args]
                keywords = {name: decode(arg, self._kept) for name, arg in kwargs.items()}
                answer = self._answer(action, self._objects[target], positional, keywords)
            except Exception as error:
                answer = ["raised", self._chain(type(error)), *self._description(error)]
            send(self._channel, [output.take(), *answer])

    def _announced(self, value: Any) -> Any:
        """Encode the value of a name; a large one, which few tests use, is kept until asked for."""
        return encode(value, self._keep) if _is_small(value) else ["large", self._keep(value)[1]]

    def _answer(
        self, action: str, thing: Any, positional: list[Any], keywords: dict[str, Any]
    ) -> list[Any]:
        try:
            if action in (CALL, CALL_MUTATING):
                result = thing(*positional, **keywords)
            elif action == SET:
                setattr(thing, *positional)
                result = None
            elif action == NEXT:
                result = next(thing)
            elif action == AWAIT:
                result = self._finish(thing)
            elif action == BOOL:
                result = bool(thing)
            elif action == VALUE:
                result = thing
            elif action == IS_INSTANCE:
                result = isinstance(positional[0], thing)
            else:
                result = getattr(thing, action)
        except (StopIteration, StopAsyncIteration):
            if action in (NEXT, AWAIT):
                return ["stop"]
            raise
        arguments = (
            [encode(arg, self._keep) for arg in positional] if action == CALL_MUTATING else None
        )
        return ["ok", encode(result, self._keep), arguments]

    def _finish(self, awaitable: Any) -> Any:
        import asyncio

        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(coroutine(awaitable))

    def _keep(self, value: Any) -> list[Any]:
        if id(value) not in self._handles:
            self._handles[id(value)] = len(self._objects)
            self._objects.append(value)
        if isinstance(value, type) and issubclass(value, Exception):
            return ["kept", self._chain(value)]
        return ["kept", self._handles[id(value)]]

    def _kept(self, handle: int) -> Any:
        return self._objects[handle]

    def _chain(self, kind: type) -> list[Any]:
        """Describe an exception class and its bases up to the first built-in one: handle, module,
        name.
        """
        chain: list[Any] = []
        for base in kind.__mro__:
            if id(base) not in self._handles:
                self._handles[id(base)] = len(self._objects)
                self._objects.append(base)
            chain.append([self._handles[id(base)], str(base.__module__), str(base.__name__)])
            if getattr(builtins, base.__name__, None) is base:
                break
        return chain

    def _description(self, error: Exception) -> list[Any]:
        attributes = {
            name: encode(value, self._keep)
            for name, value in vars(error).items()
            if name.isidentifier()
        }
        return [str(error)[:1000], encode(error.args, self._keep), attributes]


class _Output(io.BytesIO):
    """Collects the output of the program, up to a limit; the test runner receives it with each
    answer.
    """

    def write(self, data: Any) -> int:
        """Append the bytes up to the limit."""
        free = _MAX_PRINTED - self.getbuffer().nbytes
        super().write(data[:free])
        return len(data)

    def close(self) -> None:
        """Stay open: a program may close or replace `sys.stdout`, and the answers go on."""

    def take(self) -> str:
        """Return the text since the last call."""
        text = self.getvalue().decode(errors="replace")
        self.seek(0)
        self.truncate()
        return text


def use_event_loop_without_sockets(remote: type | tuple[()] = ()) -> None:
    """Give asyncio a loop that only waits for time; its own loops open sockets when they start.

    A task of the loop may await an object of class `remote`, too.
    """
    import asyncio
    import time

    class Selector:
        def select(self, timeout: float | None) -> list[Any]:
            time.sleep(max(timeout, 0) if timeout is not None else 3600)
            return []

        def get_map(self) -> dict[int, Any]:
            return {}

    class Loop(asyncio.BaseEventLoop):
        def __init__(self) -> None:
            super().__init__()
            self._selector = Selector()

        def _process_events(self, events: Any) -> None:
            pass

        def _write_to_self(self) -> None:
            pass

        def create_task(self, coro: Any, **options: Any) -> Any:
            return super().create_task(
                coroutine(coro) if isinstance(coro, remote) else coro, **options
            )

    class Policy(asyncio.DefaultEventLoopPolicy):
        _loop_factory = Loop

    asyncio.set_event_loop_policy(Policy())


async def coroutine(awaitable: Any) -> Any:
    """Await an awaitable, as a coroutine."""
    return await awaitable


def open_channel(fd: int) -> tuple[BinaryIO, BinaryIO]:
    """Open the channel as a file to read and one to write, because a confined process makes no
    calls on sockets.
    """
    return open(fd, "rb", closefd=False), open(fd, "wb", closefd=False)


def send(channel: BinaryIO, message: Any) -> None:
    """Write a message on one line."""
    channel.write(json.dumps(message).encode() + b"\n")
    channel.flush()


def _is_small(value: Any) -> bool:
    """Return True unless a value has more than `_MAX_PARTS` parts, or itself among them."""
    num_parts = 0
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str | bytes | list | tuple | set | frozenset | dict):
            num_parts += 1 + len(part)
            if num_parts > _MAX_PARTS:
                return False
        if isinstance(part, list | tuple | set | frozenset):
            left.extend(part)
        elif isinstance(part, dict):
            left.extend(part.keys())
            left.extend(part.values())
    return True


def encode(value: Any, keep: Callable[[Any], list[Any]]) -> Any:
    """Convert a value to JSON: objects are kept and sent as a number, instances of subclasses as
    their plain base.
    """
    kind = next((plain for plain in _PLAIN if isinstance(value, plain)), None)
    if value is None or kind is bool:
        return value
    if kind is str:
        return str.__str__(value)  # the characters; str() gives the name of a member of an enum
    if kind is int:
        return int(value) if abs(value) < _SMALL else ["int", hex(value)]
    if kind is float:
        return ["float", float.hex(value)]
    if kind is complex:
        return ["complex", float.hex(value.real), float.hex(value.imag)]
    if kind is bytes:
        return ["bytes", value.hex()]
    if kind is dict:
        return ["dict", [[encode(key, keep), encode(item, keep)] for key, item in value.items()]]
    if kind is not None:
        return [kind.__name__, [encode(item, keep) for item in value]]
    return _encode_other(value, keep)


def _encode_other(value: Any, keep: Callable[[Any], list[Any]]) -> list[Any]:
    for name, arguments_of in _VALUES.items():
        module, _, attribute = name.partition(".")
        kind = getattr(sys.modules.get(module), attribute, None)
        if kind is not None and isinstance(value, kind):
            return ["value", name, [encode(argument, keep) for argument in arguments_of(value)]]
    return ["value", "not implemented", []] if value is NotImplemented else keep(value)


def decode(value: Any, kept: Callable[[Any], Any]) -> Any:
    """Rebuild an encoded value from exactly the plain types.

    Raises ValueError for anything else.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    match value:
        case ["int", str() as digits]:
            return int(digits, 16)
        case ["float", str() as digits]:
            return float.fromhex(digits)
        case ["complex", str() as real, str() as imaginary]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case ["bytes", str() as digits]:
            return bytes.fromhex(digits)
        case ["dict", list() as pairs]:
            return {decode(key, kept): decode(item, kept) for key, item in pairs}
        case ["list" | "tuple" | "set" | "frozenset" as name, list() as items]:
            return getattr(builtins, name)(decode(item, kept) for item in items)
        case ["kept", (int() | list()) as handle]:
            return kept(handle)
        case ["value", str() as name, list() as items]:
            return _decode_other(name, [decode(item, kept) for item in items])
    raise ValueError(f"not a value: {value!r:.80}")


def _decode_other(name: str, arguments: list[Any]) -> Any:
    if name == "not implemented":
        return NotImplemented
    if name not in _VALUES:
        raise ValueError(f"not a value: {name:.80}")
    module, _, attribute = name.partition(".")
    kind = getattr(__import__(module), attribute)
    return getattr(kind, "fromisoformat", kind)(*arguments)
