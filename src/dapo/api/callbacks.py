"""Calls a user's functions while a run trains: after each step, after evaluations and at the end."""

import inspect
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from dapo.api.notebook import NotebookDisplay, display_class
from dapo.api.plain_values import described
from dapo.api.python_errors import NoMetric
from dapo.api.python_words import in_python
from dapo.api.result_types import EvaluationResult
from dapo.api.run import Run, add_run
from dapo.core.errors import ConfigError
from dapo.core.loading import call_text, describe
from dapo.core.terminal import warn
from dapo.core.text import did_you_mean, quoted
from dapo.runs.console import notebook_display
from dapo.runs.directory import RunDirectory
from dapo.runs.rollout_table import newest_response
from dapo.runs.sinks import Display
from dapo.training.signals import INTERRUPT_MESSAGE, ListenerFailed, Stop

if TYPE_CHECKING:
    from dapo.start.run import RunCallbacks
    from dapo.training.state import Run as TrainingRun

OnStep: TypeAlias = Callable[[Run, dict[str, Any]], object]
OnEvaluation: TypeAlias = Callable[[Run, EvaluationResult], object]
OnEnd: TypeAlias = Callable[[Run], object]
HOW_TO_STOP = "end the run with `return dapo.STOP` or `raise dapo.Stop('why')`"


@runtime_checkable
class StepSink(Protocol):
    """A destination of metrics besides the run directory.

    An error of `write` is a warning, once for each sink, and the run goes on; with the attribute
    `required = True` it ends the run.
    """

    def write(self, step: int, metrics: Mapping[str, Any]) -> object: ...


Sinks: TypeAlias = StepSink | str | Sequence[StepSink | str]


def split_sinks(sinks: Sinks) -> tuple[list[str], list[StepSink]]:
    """Return the names of trackers and the objects of one sink or several.

    Raises ConfigError for a sink that is neither.
    """
    several = [sinks]
    if isinstance(sinks, Sequence) and not isinstance(sinks, str):
        several = list(sinks)
    names: list[str] = []
    objects: list[StepSink] = []
    for sink in several:
        if isinstance(sink, str):
            names.append(sink)
        elif hasattr(sink, "write"):
            objects.append(sink)
        else:
            raise ConfigError(
                f"sinks: expected names of trackers or objects with write(step, metrics), got"
                f" {described(sink)}"
            )
    return names, objects


@dataclass
class Callbacks:
    """The functions and sinks of one call of `dapo.train` or `dapo.resume`."""

    on_step: Sequence[OnStep] = ()
    on_evaluation: Sequence[OnEvaluation] = ()
    on_end: Sequence[OnEnd] = ()
    sinks: Sequence[StepSink] = ()
    _opened: "list[TrainingRun]" = field(default_factory=list)  # the last one trains
    _display: Display | None = None
    _failed_sinks: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        on_step: OnStep | Sequence[OnStep],
        on_evaluation: OnEvaluation | Sequence[OnEvaluation],
        on_end: OnEnd | Sequence[OnEnd],
        sinks: Sequence[StepSink],
    ) -> "Callbacks":
        """Collect functions, one or several of each. Raises ConfigError for anything else."""
        return cls(
            _functions("on_step", on_step),
            _functions("on_evaluation", on_evaluation),
            _functions("on_end", on_end),
            sinks,
        )

    def of_run(self, run: Run) -> "RunCallbacks":
        """Return what the training loop calls for `run`."""
        from dapo.start.run import RunCallbacks

        return RunCallbacks(
            warn=lambda text: warn(in_python(text)),
            open_display=self._open_display,
            on_step=[lambda step, metrics: self._after_step(run, step, metrics)],
            on_open=self._opened.append,
            on_second_interrupt=signal.default_int_handler,
            # a notebook shows the stop in its display
            interrupt_message="" if notebook_display() else INTERRUPT_MESSAGE,
            names_continuation=False,
        )

    def _open_display(self, num_steps: int, **options: Any) -> Display:
        self._display = display_class()(num_steps, **options)
        return self._display

    @contextmanager
    def calls_at_end(self, run: Run) -> Iterator[None]:
        """Call `on_end` after the block, however the run ends, unless Ctrl-C came twice.

        Raises ListenerFailed if a function raises; after an error of the run it is a warning.
        """
        try:
            yield
        except KeyboardInterrupt as interrupt:
            if getattr(interrupt, "is_saved", False):
                self._end_failed_run(run)
            raise
        except BaseException:
            self._end_failed_run(run)
            raise
        try:
            self._end(run)
        except Exception as error:
            add_run(error, run)
            raise ListenerFailed(f"on_end raised {describe(error)}") from error

    def _end(self, run: Run) -> None:
        if self._opened:  # the run has trained in this call
            for on_end in self.on_end:
                on_end(run)

    def _end_failed_run(self, run: Run) -> None:
        try:
            self._end(run)
        except Exception as error:
            warn(f"on_end raised {describe(error)}")

    def _after_step(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        """Call everything, and then raise the first Stop; an error comes at once."""
        stops: list[Stop] = []
        if isinstance(self._display, NotebookDisplay):
            row = newest_response(RunDirectory(run.path))
            if row is not None:
                self._display.sample(row)
        for sink in self.sinks:
            self._write(sink, step, metrics)
        with run._training(self._opened[-1]):
            if any(name.startswith("eval/") for name in metrics):
                for on_evaluation in self.on_evaluation:
                    evaluation = run.evaluation(step)
                    call("on_evaluation", stops, on_evaluation, run, evaluation)
            # no evaluation before or after all steps
            if step and any(not name.startswith("eval/") for name in metrics):
                for on_step in self.on_step:
                    call("on_step", stops, on_step, run, StepMetrics({"step": step, **metrics}))
        if stops:
            raise stops[0].with_traceback(None)

    def _write(self, sink: StepSink, step: int, metrics: Mapping[str, float]) -> None:
        try:
            sink.write(step, dict(metrics))
        except Exception as error:
            if getattr(sink, "required", False):
                raise
            if id(sink) not in self._failed_sinks:
                self._failed_sinks.add(id(sink))
                self._opened[-1].tracker.message(
                    f"warning: the sink {type(sink).__name__} has not taken step {step}"
                    f" ({describe(error)}); the run goes on, metrics.jsonl has all metrics, and"
                    " further errors of this sink are not shown"
                )


def _functions(name: str, value: Any) -> list[Any]:
    """Return one function, or several, as a list."""
    functions = [value] if callable(value) else value
    if isinstance(functions, str) or not isinstance(functions, Sequence):
        raise ConfigError(f"{name}: expected a function or a list of functions, got {value!r}")
    for function in functions:
        if not callable(function):
            raise ConfigError(
                f"{name}: expected a function or a list of functions, got a list with {function!r}"
            )
        _require_signature(name, function)
    return list(functions)


_ARGUMENTS = {
    "on_step": ("run", "metrics"),
    "on_evaluation": ("run", "evaluation"),
    "on_end": ("run",),
}


def _require_signature(name: str, function: Callable[..., object]) -> None:
    """Raise ConfigError for a function that cannot be called with the arguments of its event.

    It would end the run after a step otherwise.
    """
    label = label_of(function)
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        kind = "async" if inspect.iscoroutinefunction(function) else "a generator"
        raise ConfigError(f"{name}: {label} is {kind}; expected a plain function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a compiled function
        return
    arguments = _ARGUMENTS[name]
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ConfigError(
            f"{name}: {call_text(label, function)} is called as {label}({', '.join(arguments)})"
        ) from None


def label_of(function: Callable[..., object]) -> str:
    """Return the name of a function, or of the class of an object that can be called."""
    return getattr(function, "__name__", type(function).__name__)


class StepMetrics(dict[str, Any]):
    """The metrics of a step, which answer a wrong name with the nearest ones."""

    def __missing__(self, name: str) -> Any:
        answer = did_you_mean(name, list(self), otherwise="`list(metrics)` has all names")
        if str(name).startswith("eval/"):
            answer = "evaluations are not made after each step; on_evaluation=FUNCTION gets them"
        raise NoMetric(f"no metric {name!r} in step {self.get('step')}; {answer}")


def call(name: str, stops: list[Stop], function: Callable[..., object], *arguments: Any) -> None:
    """Call a user's function, and add to `stops` if it wants the run to end."""
    label = label_of(function)
    try:
        result = function(*arguments)
    except Stop as stop:
        result = stop
    except StopIteration as error:
        raise ConfigError(
            f"{name}: {label} raised {describe(error)}, which does not end a run: {HOW_TO_STOP}"
        ) from None
    if result is Stop:
        result = Stop()
    if isinstance(result, Stop):
        stops.append(result)
    elif inspect.iscoroutine(result):
        result.close()
        raise ConfigError(f"{name}: {label} is async; expected a plain function")
    elif result is not None:
        raise ConfigError(
            f"{name}: {label} returned {quoted(result)}, and `return {quoted(result)}` has no"
            f" effect: {HOW_TO_STOP}; return nothing to go on"
        )
