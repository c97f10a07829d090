"""Results of a run in Python: a figure, an evaluation, a comparison of two models."""

import io
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dapo.core.terminal import printable
from dapo.core.text import with_interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as MatplotlibFigure


@dataclass(frozen=True)
class Curves:
    """A figure that a notebook displays with any backend of matplotlib."""

    figure: "MatplotlibFigure"

    def _repr_png_(self) -> bytes:
        image = io.BytesIO()
        self.figure.savefig(image, format="png")
        return image.getvalue()

    def __repr__(self) -> str:
        names = [axes.get_title(loc="left") for axes in self.figure.axes]
        return f"<Curves: {', '.join(filter(None, names))}; .figure is matplotlib's>"


@dataclass(frozen=True)
class EvaluationResult:
    """The evaluation of a model on held-out problems: avg@k with a 95 % interval."""

    summary: Mapping[str, Any]
    """All numbers, by their names in the output of `dapo eval --json`."""
    table: "pd.DataFrame"
    """A row per problem: id, source, question, answer, accuracy, responses."""

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> "EvaluationResult":
        """Convert an evaluation with its table, in the form of `dapo eval --output`."""
        return cls(
            {name: value for name, value in result.items() if name != "table"},
            table_of(result["table"]),
        )

    @property
    def accuracy(self) -> float | None:
        """The mean accuracy, or score, over problems; None without any verdict."""
        value: float | None = self.summary["accuracy"]
        return value

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the accuracy; None for one problem or equal scores on all."""
        return _interval(self.summary)

    def __repr__(self) -> str:
        summary = self.summary
        style = ".1%" if self.summary["binary"] else ".3f"
        label = (
            f"{'avg' if summary['binary'] else 'mean score, avg'}@{summary['samples_per_problem']}"
        )
        parts = [
            f"{label} {with_interval(self.accuracy, self.interval, style)} on {summary['problems']}"
            " problems"
        ]
        if summary["truncated_fraction"]:
            parts.append(f"{summary['truncated_fraction']:.1%} truncated")
        if summary["verifier_errors"]:
            parts.append(
                f"{summary['verifier_errors']} responses without a verdict:"
                f" {summary['most_frequent_error']}"
            )
        return printable(f"<{summary['name']}: {'; '.join(parts)}>")


@dataclass(frozen=True)
class Comparison:
    """The paired comparison of two models on the same problems: the first minus the second."""

    first: EvaluationResult
    second: EvaluationResult
    difference: float | None
    """The mean difference in accuracy; None if no problem has a verdict in both."""
    interval: tuple[float, float] | None
    better: int
    worse: int
    equal: int

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> "Comparison":
        """Convert a result of `compare_models`: its second model is this run."""
        first = EvaluationResult.of(result["second"])
        second = EvaluationResult.of(result["first"])
        numbers = {
            name: result["comparison"][name] for name in ("difference", "better", "worse", "equal")
        }
        return cls(first, second, interval=_interval(result["comparison"]), **numbers)

    def __repr__(self) -> str:
        style = "+.1%" if self.first.summary["binary"] else "+.3f"
        if self.difference is None:
            return "<no problem has a verdict in both>"
        counts = f"better on {self.better} problems, worse on {self.worse}, equal on {self.equal}"
        return printable(
            f"<{self.first.summary['model']} minus {self.second.summary['model']}: "
            f"{with_interval(self.difference, self.interval, style)}; {counts}>"
        )


def table_of(rows: Collection[Mapping[str, Any]], *columns: str) -> "pd.DataFrame":
    """Return a table of the rows; without any, it has these columns."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=None if rows else columns)


def _interval(numbers: Mapping[str, Any]) -> tuple[float, float] | None:
    return None if numbers["low"] is None else (numbers["low"], numbers["high"])
