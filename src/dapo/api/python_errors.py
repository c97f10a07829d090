"""Errors of the Python interface: one sentence in its terms, without the package's frames."""

import functools
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from types import FunctionType, TracebackType, UnionType
from typing import Any, TypeVar, cast, get_origin

from dapo.api.cell_variables import keep_run
from dapo.config.option_fields import names_by_keyword
from dapo.core.errors import ConfigError, DapoError
from dapo.core.secrets import mask_text
from dapo.core.terminal import print_text
from dapo.core.waiting import Interrupted
from dapo.training.signals import ListenerFailed

T = TypeVar("T")
_PACKAGE = str(Path(__file__).parents[1])
_IN_PYTHON = [
    line.partition("\t")[::2]
    for line in Path(__file__).with_name("python_words.tsv").read_text("utf-8").splitlines()
]
"""Patterns of phrases about the command line, with the words for a Python caller."""
_UNKNOWN = re.compile(
    r"unknown option (\S+); (did you mean ([\w.]+)(?: or [\w.]+)*\?|`dapo show options` lists all"
    r" options)(?! Write)"
)


class WrongCall(ConfigError, TypeError):
    """A call lacks an argument, or has one that the function does not take."""


class CallInterrupted(KeyboardInterrupt):
    """Ctrl-C stopped a call; the message says how to continue."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


def in_python(text: str, arguments: Iterable[str] = ()) -> str:
    """Translate a message for the command line to Python; `arguments` may be misspelt.

    >>> in_python("saved; continue with: dapo resume 'runs/my run'")
    "saved; continue with: dapo.resume('runs/my run')"
    """
    for typed, call in _IN_PYTHON:
        text = re.sub(typed, call, text)
    return _UNKNOWN.sub(
        lambda match: _with_keyword(match[1], match[2], match[3], arguments) or match[0], text
    )


def _with_keyword(
    typed: str, suggestion: str, name: str | None, arguments: Iterable[str]
) -> str | None:
    """Answer an unknown option with the keyword that is nearest to it."""
    by_keyword = names_by_keyword()
    last = typed.rpartition(".")[2]
    advice = None
    if name is None:
        advice = next(
            (
                f"did you mean {near}?"
                for near in get_close_matches(typed, arguments, n=1, cutoff=0.75)
            ),
            None,
        )
    elif near := get_close_matches(
        last, [key for key, names in by_keyword.items() if names == [name]], n=1, cutoff=0
    ):
        advice = suggestion.replace(name, f"{near[0]} ({name})" if near[0] != name else name, 1)
    elif "." in name:
        advice = f'{suggestion} Write the whole name: **{{"{name}": ...}}'
    return advice and f"unknown option {typed}; {advice}"


def python_interface(target: T) -> T:
    """Decorate a public function, or a class for its public methods and properties.

    Errors for users and Ctrl-C leave it as in `_for_python`; any other error, a defect, keeps its
    whole traceback.
    """
    if not isinstance(target, type):
        return cast(T, _guarded(cast(Callable[..., Any], target)))
    for name, member in list(vars(target).items()):
        if isinstance(member, property) and member.fget is not None:
            setattr(target, name, property(_guarded(member.fget), doc=member.__doc__))
        elif isinstance(member, FunctionType) and not name.startswith("_"):
            setattr(target, name, _guarded(member))
    return target


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # read by IPython
        replacement: BaseException
        try:
            return function(*args, **kwargs)
        except (DapoError, KeyboardInterrupt) as error:
            replacement = _for_python(error, signature.parameters)
        except (TypeError, AttributeError, ValueError):
            if (fault := _fault_of_call(signature, args, kwargs)) is None:
                raise
            replacement = _for_python(WrongCall(f"dapo.{function.__qualname__}: {fault}"))
        keep_run(sys._getframe(1), replacement)
        # outside of the handler: there it would become the context of a user's exception
        raise replacement

    return call


def _fault_of_call(signature: inspect.Signature, args: Any, kwargs: Any) -> str | None:
    """Name the missing, unknown or mistyped argument of a failed call."""
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        return str(error)
    for name, value in arguments.items():
        hint = signature.parameters[name].annotation
        if hint is not inspect.Parameter.empty and not _fits(value, hint):
            return (
                f"{name}: expected"
                f" {inspect.formatannotation(hint).replace('collections.abc.', '')}, got {value!r}"
            )
    return None


def _fits(value: Any, hint: Any) -> bool:
    if isinstance(hint, UnionType):
        return any(_fits(value, member) for member in hint.__args__)
    kind = get_origin(hint) or hint
    return (
        kind is Any
        or not isinstance(kind, type)
        or isinstance(value, (float, int) if kind is float else kind)
    )


def _for_python(
    error: DapoError | KeyboardInterrupt, arguments: Iterable[str] = ()
) -> BaseException:
    """Return the error with its message translated and the package's frames removed."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_error
    # the user's own, with the user's frames
    if isinstance(error, ListenerFailed) and error.__cause__ is not None:
        trace = error.__cause__.__traceback__
        while trace and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            trace = trace.tb_next
        return error.__cause__.with_traceback(trace)
    if isinstance(error, DapoError):
        error.args = (in_python(mask_text(str(error)), arguments),)
    if isinstance(error, Interrupted) and error.exit_code == 130:
        error = CallInterrupted(str(error))
    elif not isinstance(error, DapoError | CallInterrupted):
        error = CallInterrupted(str(error) or "stopped by Ctrl-C")
    error.__cause__ = None
    error.__suppress_context__ = True
    return error.with_traceback(None)


def _print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught error of a script with the caller's frames; exit after a signal."""
    if not isinstance(error, DapoError | CallInterrupted):
        if _is_of_callback(trace):
            trace = _without_package(trace)
        sys.__excepthook__(kind, error.with_traceback(trace), trace)
        return
    frames = [
        frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_PACKAGE)
    ]
    code = 130 if isinstance(error, CallInterrupted) else error.exit_code
    head = ""
    if code <= 128:
        head = "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames)])
    print_text(f"{head}{kind.__name__}: {error}", file=sys.stderr)
    if code > 128 and not hasattr(sys, "ps1") and not sys.flags.interactive:
        sys.exit(code)


def _is_of_callback(trace: TracebackType | None) -> bool:
    """Return True if this file's are the only frames of the package: it raised a user's error."""
    files = {frame.filename for frame in traceback.extract_tb(trace)}
    return {file for file in files if file.startswith(_PACKAGE)} == {__file__}


def _without_package(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of the package."""
    if trace is None:
        return None
    rest = _without_package(trace.tb_next)
    if trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
