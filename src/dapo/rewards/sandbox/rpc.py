"""The roles of a sandboxed process: program, submission whose functions are called, test runner that calls them.

The submission's process holds the model's code, the test runner's the tests. Only plain values cross: each is rebuilt
as exactly bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset or None. So nothing that a model
defines (an `__eq__` that is always true) can be compared, and no expected value ever reaches its process. Anything else
is a `Remote` to the test runner. Standard library only.
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
    from collections.abc import Callable, Iterator
    from typing import Any, BinaryIO

_MAX_LINE = 1 << 24
_SMALL = 1 << 62
_CALL = "()"
_PLAIN: tuple[type, ...] = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)


def program(channel_fd: int, source: str) -> None:
    """Run the source as a script."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = ["solution.py"]
    exec(compile(source, "solution.py", "exec", dont_inherit=True), main.__dict__)


def submission(channel_fd: int, source: str) -> None:
    """Run the source as a module, send its public names, then answer calls until the connection ends."""
    lines, channel = _open_channel(channel_fd)
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def send(answer: Any) -> None:
        _send(channel, answer)

    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(source, "solution.py", "exec", dont_inherit=True), module.__dict__)
    names = {n: v for n, v in vars(module).items() if not n.startswith("_") and not isinstance(v, types.ModuleType)}
    send([[name, encode(value, keep)] for name, value in names.items()])
    for line in lines:
        action, target, args, kwargs = json.loads(line)
        try:
            thing = objects[target]
            if action == _CALL:
                given = [decode(arg, objects.__getitem__) for arg in args]
                named = {name: decode(arg, objects.__getitem__) for name, arg in kwargs.items()}
                result = thing(*given, **named)
            else:
                result = getattr(thing, action)
            send(["ok", encode(result, keep)])
        except Exception as error:
            send(["raised", type(error).__name__, str(error)[:1000]])


def test_runner(channel_fd: int, tests: list[str], entry_point: str | None) -> None:
    """Run the tests, one after the other, until one fails. Writes `passed`, `failed` or `broken: why`."""
    sys.stdout = io.StringIO()  # what the tests print is no result
    os.write(1, _run_tests(channel_fd, tests, entry_point).encode(errors="replace"))
    os._exit(0)


def _open_channel(fd: int) -> tuple[BinaryIO, BinaryIO]:
    """The channel as a file to read and one to write: a sandboxed process may make no system call of sockets."""
    return open(fd, "rb", closefd=False), open(fd, "wb", closefd=False)


def _send(channel: BinaryIO, message: Any) -> None:
    channel.write(json.dumps(message).encode() + b"\n")
    channel.flush()


def _run_tests(channel_fd: int, tests: list[str], entry_point: str | None) -> str:
    import ast
    import importlib

    try:
        trees = [ast.parse(test) for test in tests]
        compiled = [compile(tree, "tests", "exec", dont_inherit=True) for tree in trees]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"broken: {type(error).__name__}: {error}"
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names: dict[str, Any] = {"__name__": "tests"}
    try:
        connection = Connection(channel_fd)
        wanted = used if entry_point is None else {entry_point}
        names.update((name, value) for name, value in connection.public_names() if name in wanted)
        # a model's own `abs`, `sorted` or `math` is not what a test means
        for name in (used & {*dir(builtins), *sys.stdlib_module_names}) - {entry_point}:
            names.pop(name, None)
            if name in sys.stdlib_module_names and not hasattr(builtins, name):
                names[name] = importlib.import_module(name)
        for code in compiled:
            exec(code, names)
    except Unsendable as error:
        return f"broken: {error}"
    except BaseException:  # a failed assertion, an error of the submission, or its exit
        return "failed"
    return "passed"


class Unsendable(Exception):
    """A test passes the submission a value that cannot cross, such as a function."""


class Connection:
    """The test runner's end of the channel."""

    def __init__(self, channel_fd: int) -> None:
        self._lines, self._channel = _open_channel(channel_fd)
        self._remote: Callable[[int], Remote] = lambda handle: Remote(self, handle)

    def public_names(self) -> Iterator[tuple[str, Any]]:
        """The submission's public names and their values."""
        for name, value in self._next():
            if isinstance(name, str) and name.isidentifier() and not name.startswith("_"):
                yield name, decode(value, self._remote)

    def call(self, action: str, target: int, args: Any = (), kwargs: Any = None) -> Any:
        """The value of an attribute or a call; raises what the submission raised, if that is a built-in Exception."""
        given = [encode(arg, _handle) for arg in args]
        named = {name: encode(arg, _handle) for name, arg in (kwargs or {}).items()}
        _send(self._channel, [action, target, given, named])
        kind, *content = self._next()
        if kind == "ok":
            return decode(content[0], self._remote)
        raise _exception(*content)

    def _next(self) -> Any:
        line = self._lines.readline(_MAX_LINE)
        if not line.endswith(b"\n"):
            raise EOFError("the submission has exited, or its answer is too long")
        return json.loads(line)


class Remote:
    """A value of the submission that is not plain: it can be called, iterated and its attributes read, not compared."""

    def __init__(self, connection: Connection, handle: int) -> None:
        self._connection, self._handle = connection, handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._connection.call(_CALL, self._handle, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._connection.call(name, self._handle)

    def __iter__(self) -> Iterator[Any]:
        step = self._connection.call("__iter__", self._handle)().__getattr__("__next__")
        while True:
            try:
                value = step()
            except StopIteration:
                return
            yield value

    def __len__(self) -> int:
        try:
            return int(self.__getattr__("__len__")())
        except AttributeError:
            raise TypeError("it has no length") from None

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)

    def __bool__(self) -> bool:
        raise TypeError("only plain values are true or false here")

    def __eq__(self, other: object) -> bool:
        raise TypeError("only plain values can be compared here")

    __hash__ = None  # type: ignore[assignment]


def _handle(value: Any) -> int:
    if isinstance(value, Remote):
        return value._handle
    raise Unsendable(f"a test passes the solution a {type(value).__name__}; only plain values can be passed")


def _exception(name: str, text: str) -> Exception:
    kind = getattr(builtins, str(name), None)
    try:
        return kind(str(text)) if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError(str(name))
    except TypeError:  # some want more arguments
        return RuntimeError(str(name))


def encode(value: Any, keep: Callable[[Any], int]) -> Any:
    """A value as JSON: other than plain values are kept and sent as a number, subclasses as their plain base."""
    kind = next((plain for plain in _PLAIN if isinstance(value, plain)), None)
    if value is None or kind is bool or kind is str:
        return str(value) if kind is str else value
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
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # NumPy's
        return encode(value.tolist(), keep)
    return ["kept", keep(value)]


def decode(value: Any, kept: Callable[[int], Any]) -> Any:
    """The value that `encode` was given, of exactly the plain types. Raises ValueError for anything else."""
    if not isinstance(value, list):
        if value is None or isinstance(value, bool | int | str):
            return value
        raise ValueError(f"a {type(value).__name__}")
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
        case ["kept", int() as handle]:
            return kept(handle)
    raise ValueError(f"not a value: {value!r:.80}")
