"""Results of a run in Python: a figure, an evaluation, a comparison of two models."""

import base64
import io
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.api.shown_tables import ShownTable, ends_of
from dapo.core.terminal import printable
from dapo.core.text import with_interval

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure as MatplotlibFigure

PAGE_HEIGHT = 720
"""Height of the page in a cell, in pixels."""


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


class PageAddress(str):
    """The address of the page of a run, which a notebook displays as the page itself.

    The page in the cell is a snapshot in one file: the server answers no other site's frames, and its
    address is that of the kernel's machine, which a browser may not reach.
    """

    path: Path
    """The run directory."""

    def __new__(cls, address: str, path: Path) -> "PageAddress":
        page = super().__new__(cls, address)
        page.path = path
        return page

    def _repr_html_(self) -> str:
        from dapo.analysis.view.report import report_html

        link = f"<a href='{escape(self)}' target='_blank'>{escape(self)}</a>"
        note = "the run as it is now; on the machine of this kernel, and up to date:"
        page = base64.b64encode(report_html(self.path).encode()).decode()
        # not srcdoc, whose links lead to the notebook's own address
        source = f"data:text/html;charset=utf-8;base64,{page}"
        style = f"width:100%;height:{PAGE_HEIGHT}px;border:1px solid #cbd5e1"
        frame = (
            f'<iframe src="{source}" sandbox="allow-scripts" style="{style}" title="the page of the run">'
            "</iframe>"
        )
        return f"<p><small>{note} {link}</small></p>{frame}"


@dataclass(frozen=True)
class EvaluationResult:
    """The evaluation of a model on held-out problems: avg@k with a 95 % interval."""

    summary: Mapping[str, Any]
    """All numbers, by their names in the output of `dapo eval --json`."""
    table: "pd.DataFrame"
    """A row per problem: id, source, question, answer, accuracy or score, responses."""

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> "EvaluationResult":
        """Convert an evaluation with its table, in the form of `dapo eval --output`."""
        summary = {name: value for name, value in result.items() if name != "table"}
        rows = result["table"]
        if not result["binary"]:
            rows = [_renamed(row) for row in rows]
        return cls(summary, table_of(rows))

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
        return printable(f"<{self._sentence()}>")

    def _repr_html_(self) -> str:
        shown, dropped = ends_of(self.table)
        rows = []
        for row in shown.to_dict("records"):
            texts = [response["text"] for response in row.pop("responses")]
            cells = {"question": row["question"], "answer": row["answer"]}
            cells["first response"] = texts[0] if texts else None
            rows.append(cells | {name: row[name] for name in ("accuracy", "score") if name in row})
        return ShownTable(self._sentence(), rows, dropped=dropped).html()

    def _sentence(self) -> str:
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
        return f"{summary['name']}: {'; '.join(parts)}"


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


def with_score(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the summary of an evaluation with `score` in place of `accuracy`, if it is one."""
    return summary if summary.get("binary", True) else _renamed(summary)


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"score" if name == "accuracy" else name: value for name, value in values.items()}


def table_of(rows: Collection[Mapping[str, Any]], *columns: str) -> "pd.DataFrame":
    """Return a table of the rows; without any, it has these columns."""
    import pandas as pd

    return pd.DataFrame(list(rows), columns=None if rows else columns)


def _interval(numbers: Mapping[str, Any]) -> tuple[float, float] | None:
    return None if numbers["low"] is None else (numbers["low"], numbers["high"])
