"""The test runner's end of the channel: objects of the submission, as the tests see them."""

from __future__ import annotations

import builtins
import json
import sys

from rpc import (  # from this script's own folder
    AWAIT,
    BOOL,
    CALL,
    CALL_MUTATING,
    IS_INSTANCE,
    NEXT,
    SET,
    VALUE,
    decode,
    encode,
    open_channel,
    send,
)

TYPE_CHECKING = False  # as in typing, whose import every response would wait for
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

_MAX_LINE = 1 << 24


class Unsendable(BaseException):
    """The tests need a value that cannot cross: they pass a function, or compare two objects of the
    program.
    """


class NotPlain(TypeError):
    """The program has given an object where the tests need a plain value."""


class UnusableTest(Exception):
    """The tests use a feature that the test runner does not have."""


class SubmissionLost(BaseException):
    """The submission has exited, or sent an invalid answer."""


class Connection:
    """The end of the channel in the test runner."""

    def __init__(self, channel_fd: int) -> None:
        self._lines, self._channel = open_channel(channel_fd)
        self._remotes: dict[int, RemoteObject] = {}
        self._classes: dict[int, type] = {}
        self.values = 0
        """Number of values that calls, iterations and attributes of the submission have given."""
        self.raised: list[Exception] = []
        """Exceptions that the submission has raised, to be recognized by identity."""
        self.lost = False
        self.rejection: str | None = None
        """The reason why the tests cannot be run on any program."""
        self.refused = False
        """Whether the program has given an object where the tests need a plain value."""
        # handles of the names that the tests use as classes
        self._classes_of_tests: set[int] = set()
        # handles of what the tests themselves name: functions, classes, methods
        self._callables: set[int] = set()
        self._instances: set[int] = set()  # handles of the objects that the tests make
        self._large: dict[str, int] = {}  # handles of the values that were not sent with the names

    def public_names(self, classes: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Return the public names of the submission with their values, but those of `large_values`;
        the tests use `classes` as classes.
        """
        names: dict[str, Any] = {}
        with _Answer(self):
            for name, value in self._next():
                if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
                    continue
                match value:
                    case ["large", int() as handle]:
                        self._large[name] = handle
                    case _:
                        names[name] = decode(value, self._kept)
        handles = {
            name: handle_of(value)
            for name, value in names.items()
            if isinstance(value, RemoteObject)
        }
        self._callables = set(handles.values())
        self._classes_of_tests = {handle for name, handle in handles.items() if name in classes}
        return names

    def large_values(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the values of those of these names that `public_names` has left out."""
        wanted = sorted(self._large.keys() & set(names))
        return {name: self.call(VALUE, self._large[name]) for name in wanted}

    def call(self, action: str, target: int, args: Any = (), kwargs: Any = None) -> Any:
        """Perform an action on an object of the submission and return its value, or raise its
        exception.
        """
        by_tests = target in self._callables or target in self._instances
        makes = action in (CALL, CALL_MUTATING) and target in self._classes_of_tests
        is_method = target in self._instances or target in self._classes_of_tests
        positional = [encode(arg, lambda value: self._handle(value, by_tests)) for arg in args]
        keywords = {
            name: encode(arg, lambda value: self._handle(value, by_tests))
            for name, arg in (kwargs or {}).items()
        }
        with _Answer(self):
            send(self._channel, [action, target, positional, keywords])
            printed, kind, *content = self._next()
            if not isinstance(printed, str):
                raise ValueError("its output is no text")
            if kind == "ok":
                value = decode(content[0], self._kept)
                if action == CALL_MUTATING:
                    for arg, changed in zip(
                        args, [decode(changes, self._kept) for changes in content[1]], strict=True
                    ):
                        _update(arg, changed)
            elif kind == "raised":
                error = self._exception(*content)
            elif kind != "stop" or action not in (NEXT, AWAIT):
                raise ValueError(f"not an answer: {kind!r:.80}")
        if (
            kind == "ok"
            and isinstance(value, RemoteObject)
            and (makes or (is_method and action.isidentifier()))
        ):
            (self._instances if makes else self._callables).add(handle_of(value))
        if printed:
            sys.stdout.write(printed)
        if kind == "stop":
            raise StopIteration if action == NEXT else StopAsyncIteration
        if kind == "raised":
            self.raised.append(error)
            raise error
        # such as: assert f; f.__name__
        asks_for_name = action in (BOOL, IS_INSTANCE, VALUE) or action.startswith("__")
        self.values += action in (CALL, CALL_MUTATING, NEXT, AWAIT) or not (
            asks_for_name or isinstance(value, RemoteObject)
        )
        return value

    def _next(self) -> Any:
        line = self._lines.readline(_MAX_LINE)
        if not line.endswith(b"\n"):
            raise EOFError("the submission has exited, or its answer is too long")
        return json.loads(line)

    def _kept(self, handle: Any) -> Any:
        if isinstance(handle, list):
            return self.class_of(handle)
        for named_by_tests in (self._callables, self._instances, self._classes_of_tests):
            named_by_tests.discard(handle)  # from here on it is the program's choice
        if handle not in self._remotes:
            self._remotes[handle] = RemoteObject(self, handle)
        return self._remotes[handle]

    def makes(self, *objects: Any) -> bool:
        """Return True if the tests have made one of these objects by calling a class, whatever the
        program is.
        """
        return any(
            isinstance(thing, RemoteObject) and handle_of(thing) in self._instances
            for thing in objects
        )

    def reject(self, reason: str, by_tests: bool) -> Unsendable:
        """Return the exception for a value that cannot cross, and record it, because tests may
        catch the exception.

        Only tests that need it of every program (`by_tests`) cannot run; else the program has
        chosen the object.
        """
        if by_tests:
            self.rejection = self.rejection or reason
        self.refused |= not by_tests
        return Unsendable(reason)

    def _handle(self, value: Any, by_tests: bool) -> list[Any]:
        if isinstance(value, RemoteObject):
            return ["kept", handle_of(value)]
        if isinstance(value, type) and "_remote_handle" in vars(value):
            return ["kept", vars(value)["_remote_handle"]]
        reason = (
            f"a test passes the solution a {type(value).__name__}; only plain values can be passed"
        )
        raise self.reject(reason, by_tests)

    def class_of(self, chain: Any) -> type[Exception]:
        """Return the exception class for a chain of classes of the submission.

        A built-in class, or one of a standard module that the tests have imported, is itself.
        Classes that would control the tests (AssertionError, StopIteration, SkipTest) are replaced.
        """
        (handle, module, name), *bases = chain
        if handle in self._classes:
            return self._classes[handle]
        builtin_class = None
        if module == "builtins" or not bases:
            builtin_class = getattr(builtins, str(name), None)
        elif (
            module in sys.modules
            and module.partition(".")[0] in sys.stdlib_module_names - _CONTROL_MODULES
        ):
            builtin_class = getattr(sys.modules[module], str(name), None)
        if isinstance(builtin_class, type) and issubclass(builtin_class, Exception):
            if issubclass(builtin_class, StopIteration | StopAsyncIteration):
                return RuntimeError
            return ProgramError if issubclass(builtin_class, AssertionError) else builtin_class
        base = self.class_of(bases) if bases else RuntimeError
        created = type(str(name), (base,), {"__str__": _text_of, "_remote_handle": int(handle)})
        self._classes[handle] = created
        return created

    def _exception(self, chain: Any, text: Any, args: Any, attributes: Any) -> Exception:
        kind = self.class_of(chain)
        arguments = decode(args, self._kept)
        try:
            error = kind(*arguments)
        except Exception:  # some want other arguments
            error = kind.__new__(kind)
            error.args = arguments
        error.__dict__.update(
            {name: decode(value, self._kept) for name, value in attributes.items()}
        )
        error.__dict__["_remote_text"] = str(text)
        return error


_CONTROL_MODULES = frozenset({"unittest", "asyncio"})


class ProgramError(RuntimeError):
    """An AssertionError of the program, which is not a failed assertion of the tests."""


def _text_of(error: Exception) -> str:
    return str(error.__dict__.get("_remote_text", Exception.__str__(error)))


class _Answer:
    """Turns every error in reading an answer into the loss of the submission."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        if self._connection.lost:
            raise SubmissionLost

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            self._connection.lost = True
            raise SubmissionLost from error


def _update(value: Any, changed: Any) -> None:
    """Copy the changes of the program into a list, dictionary or set of the tests."""
    if type(value) is not type(changed):
        return
    if isinstance(value, list):
        value[:] = changed
    elif isinstance(value, dict | set):
        value.clear()
        value.update(changed)


def _forwarded(name: str, *, calculates: bool = False) -> Any:
    """Create a method that calls the submission; one that `calculates` rejects plain values, which
    may be expected.
    """

    def method(self: RemoteObject, *args: Any) -> Any:
        try:
            bound = self._connection.call(name, self._handle)
        except AttributeError:
            raise TypeError(f"it has no {name}") from None
        if calculates and not all(isinstance(arg, RemoteObject) for arg in args):
            reason = "they calculate with an object of the program and a plain value"
            raise self._connection.reject(reason, self._connection.makes(self))
        return bound(*args)

    return method


class RemoteObject:
    """A value of the submission that is not plain.

    Tests can use it, but not compare it with an expected value.
    """

    def __init__(self, connection: Connection, handle: int) -> None:
        self.__dict__.update(_connection=connection, _handle=handle)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._connection.call(CALL, self._handle, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._connection.call(name, self._handle)

    def __setattr__(self, name: str, value: Any) -> None:
        self._connection.call(SET, self._handle, (name, value))

    def __iter__(self) -> Iterator[Any]:
        return _iterated(_forwarded("__iter__")(self))

    def __next__(self) -> Any:
        return self._connection.call(NEXT, self._handle)

    def __await__(self) -> Iterator[Any]:
        return self._connection.call(AWAIT, self._handle)
        yield

    def __aiter__(self) -> Any:
        return _forwarded("__aiter__")(self)

    async def __anext__(self) -> Any:
        return self._connection.call(AWAIT, self.__getattr__("__anext__")()._handle)

    def __len__(self) -> int:
        return int(_forwarded("__len__")(self))

    def __bool__(self) -> bool:
        return bool(self._connection.call(BOOL, self._handle))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, RemoteObject) and bool(
            self._connection.call(IS_INSTANCE, self._handle, (instance,))
        )

    def __enter__(self) -> Any:
        return _forwarded("__enter__")(self)

    def __exit__(self, *exc_info: object) -> None:
        _forwarded("__exit__")(self, None, None, None)

    def __eq__(self, value: object) -> bool:
        if self is value or value is None:
            return self is value
        if isinstance(value, RemoteObject):
            reason = "they compare two objects of the program, which only the program could do"
            raise self._connection.reject(reason, self._connection.makes(self, value))
        raise NotPlain("only plain values can be compared here")

    def __hash__(self) -> int:
        return int(_forwarded("__hash__")(self))

    def __contains__(self, item: object) -> bool:
        # another object would be told what is expected of it
        if self._connection.makes(self):
            try:
                contains = self._connection.call("__contains__", self._handle)
            except AttributeError:
                pass  # as in Python, its items decide
            else:
                return bool(contains(item))
        return any(value is item or value == item for value in self)


def _not_ordered(self: RemoteObject, value: object) -> Any:
    reason = "they order objects of the program, which only the program could do"
    raise self._connection.reject(reason, self._connection.makes(self, value))


for _name in ("lt", "le", "gt", "ge"):
    setattr(RemoteObject, f"__{_name}__", _not_ordered)
for _name in ("str", "repr", "format", "int", "float", "neg", "abs"):
    setattr(RemoteObject, f"__{_name}__", _forwarded(f"__{_name}__"))
for _name in ("getitem", "setitem", "delitem"):
    setattr(RemoteObject, f"__{_name}__", _forwarded(f"__{_name}__"))
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "floordiv", "mod", "pow"):
    setattr(RemoteObject, f"__{_name}__", _forwarded(f"__{_name}__", calculates=True))


def handle_of(remote: RemoteObject) -> int:
    """Return the number of the object in the process of the program."""
    return int(object.__getattribute__(remote, "_handle"))


def _iterated(remote: Any) -> Iterator[Any]:
    while True:
        try:
            value = next(remote)
        except StopIteration:
            return
        yield value
