"""Errors of the Python interface: one sentence in its terms, without the package's frames."""

import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType, FunctionType, TracebackType, UnionType
from typing import Any, TypeVar, cast, get_origin

from dapo.api.call_site import call_site
from dapo.api.cell_variables import keep_run
from dapo.api.foreign_calls import CALLS, Function, foreign_answer, may_be_foreign
from dapo.api.python_words import in_python
from dapo.core.errors import ConfigError, DapoError
from dapo.core.secrets import mask_text
from dapo.core.terminal import print_text
from dapo.core.waiting import Interrupted
from dapo.training.signals import ListenerFailed

T = TypeVar("T")
_PACKAGE = str(Path(__file__).parents[1])
_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


class WrongCall(ConfigError, TypeError):
    """A call lacks an argument, or has one that the function does not take."""


class NoMetric(KeyError):
    """A step has no metric of this name."""

    def __str__(self) -> str:
        # that of KeyError has quotes around the sentence
        return str(self.args[0])


class CallInterrupted(KeyboardInterrupt):
    """Ctrl-C stopped a call; the message says how to continue."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


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
        wrong = _foreign_names(function, signature, args, kwargs, sys._getframe(1))
        if wrong is not None:
            raise _for_python(wrong)
        try:
            return function(*args, **kwargs)
        except (DapoError, KeyboardInterrupt) as error:
            replacement = _for_python(error, signature.parameters)
        except (TypeError, AttributeError, ValueError):
            fault = _fault_of_call(signature, args, kwargs)
            if fault is None:
                raise
            replacement = _for_python(WrongCall(f"{_label(function)}: {fault}"))
        keep_run(sys._getframe(1), replacement)
        # outside of the handler: there it would become the context of a user's exception
        raise replacement

    return call


def _foreign_names(
    function: Callable[..., Any],
    signature: inspect.Signature,
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    frame: FrameType,
) -> WrongCall | None:
    """Return the error for names of other libraries, with the call that means the same here.

    Args:
        function: the function that is called.
        signature: its signature.
        args: the arguments by position; the first one of a method is its object.
        keywords: the arguments by name.
        frame: the caller's.
    """
    name = function.__name__
    if name not in CALLS:
        return None
    kinds = {parameter.name: parameter.kind for parameter in signature.parameters.values()}
    positional = [parameter for parameter, kind in kinds.items() if kind is _POSITIONAL]
    keyword_only = [parameter for parameter, kind in kinds.items() if kind is _KEYWORD_ONLY]
    if positional[:1] == ["self"]:
        positional = positional[1:]
        args = args[1:]
    parameters = [*positional, *keyword_only]
    # the parameters that the arguments by position stand for, in the order of the signature
    by_position = parameters[: len(args)]
    values = {**dict(zip(by_position, args, strict=False)), **keywords}
    if name == "resume" and isinstance(values.get("reward"), int) and "reward" in by_position:
        # a number behind the path is that of the steps
        by_position[by_position.index("reward")] = "steps"
        values["steps"] = values.pop("reward")
    extra = [
        parameter for parameter in by_position if parameter in keyword_only or parameter == "steps"
    ]
    takes_options = inspect.Parameter.VAR_KEYWORD in kinds.values()
    called = Function(name, parameters, takes_options)
    if not extra and not may_be_foreign(called, values):
        return None
    site = call_site(frame)
    texts = dict(zip(by_position, site.positional, strict=False))
    site = replace(site, keywords={**texts, **site.keywords})
    answer = foreign_answer(called, values, site, extra)
    if answer is None:
        return None
    return WrongCall(f"{_label(function)}: {answer}")


def _label(function: Callable[..., Any]) -> str:
    """Return the name of a function as it is called: `dapo.train`, `run.evaluate`."""
    owner, _, name = function.__qualname__.rpartition(".")
    if owner == "Chat":
        return "run.chat" if name == "__call__" else f"run.chat.{name}"
    return f"{owner.lower() or 'dapo'}.{name}"


def _fault_of_call(signature: inspect.Signature, args: Any, kwargs: Any) -> str | None:
    """Name the missing, unknown or mistyped argument of a failed call."""
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        return str(error)
    for name, value in arguments.items():
        hint = signature.parameters[name].annotation
        if hint is not inspect.Parameter.empty and not _fits(value, hint):
            kind = inspect.formatannotation(hint).replace("collections.abc.", "")
            return f"{name}: expected {kind}, got {value!r}"
    return None


def _fits(value: Any, hint: Any) -> bool:
    """Return False if a value is not of the type of an annotation; what cannot be checked fits."""
    if isinstance(hint, UnionType):
        return any(_fits(value, member) for member in hint.__args__)
    kind = get_origin(hint) or hint
    if kind is Any or not isinstance(kind, type):
        return True
    if kind is float:
        return isinstance(value, float | int)
    return isinstance(value, kind)


def _for_python(
    error: DapoError | KeyboardInterrupt, arguments: Iterable[str] = ()
) -> BaseException:
    """Return the error with its message translated and the package's frames removed."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_error
    if isinstance(error, ListenerFailed) and error.__cause__ is not None:
        return _error_of_user(error.__cause__)
    if isinstance(error, DapoError):
        error.args = (in_python(mask_text(str(error)), arguments),)
    if isinstance(error, Interrupted) and error.exit_code == 130:
        error = CallInterrupted(str(error))
    elif not isinstance(error, DapoError | CallInterrupted):
        error = CallInterrupted(str(error) or "stopped by Ctrl-C")
    error.__cause__ = None
    error.__suppress_context__ = True
    return error.with_traceback(None)


def _error_of_user(error: BaseException) -> BaseException:
    """Return the error of a user's function, with the frames from the function on."""
    trace = error.__traceback__
    while trace and _is_of_package(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if isinstance(error, NoMetric):
        # the package raised it, for the user's line
        trace = _without_package(trace)
    return error.with_traceback(trace)


def _is_of_package(filename: str) -> bool:
    """Return True for a file of this package."""
    return filename.startswith(_PACKAGE)


def _print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught error of a script with the caller's frames; exit after a signal."""
    if not isinstance(error, DapoError | CallInterrupted):
        if _is_of_callback(trace):
            trace = _without_package(trace)
        sys.__excepthook__(kind, error.with_traceback(trace), trace)
        return
    code = 130 if isinstance(error, CallInterrupted) else error.exit_code
    is_signal = code > 128
    head = ""
    if not is_signal:
        frames = traceback.extract_tb(trace)
        frames_of_caller = [frame for frame in frames if not _is_of_package(frame.filename)]
        lines = traceback.format_list(frames_of_caller)
        head = "".join(["Traceback (most recent call last):\n", *lines])
    print_text(f"{head}{kind.__name__}: {error}", file=sys.stderr)
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    if is_signal and not is_interactive:
        sys.exit(code)


def _is_of_callback(trace: TracebackType | None) -> bool:
    """Return True if this file's are the only frames of the package: it raised a user's error."""
    files = {frame.filename for frame in traceback.extract_tb(trace)}
    return set(filter(_is_of_package, files)) == {__file__}


def _without_package(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of the package."""
    if trace is None:
        return None
    rest = _without_package(trace.tb_next)
    if _is_of_package(trace.tb_frame.f_code.co_filename):
        return rest
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
