"""Data frames of a run that show a short view of themselves; their data are whole."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from dapo.analysis.doctor import DiagnosedFinding, Diagnosis
from dapo.api.python_words import in_python
from dapo.api.shown_tables import Card, Shown, ShownCards, ShownTable, ends_of
from dapo.core.text import did_you_mean, with_interval
from dapo.runs.console import columns_of
from dapo.runs.directory import RunDirectory
from dapo.runs.outcomes import verdict_word
from dapo.runs.panels import BLUE, ORANGE, RED

if TYPE_CHECKING:
    import pandas as pd

SEVERITY_COLOURS = {"error": RED, "warning": ORANGE, "note": BLUE}
ROLLOUT_COLUMNS = ("step", "question", "response", "correct", "score", "advantage", "outcome")
_TABLES_READ = 50  # of rollouts, for the questions of problems


class NoColumn(KeyError):
    """A table has no column of this name."""

    def __str__(self) -> str:
        # that of KeyError has quotes around the sentence
        return str(self.args[0])


@cache
def _frame_class() -> "type[pd.DataFrame]":
    """Return the class of frames with a view; pandas is imported on first use."""
    import pandas as pd

    class ShownFrame(pd.DataFrame):
        """A DataFrame that shows itself by `view`.

        Selected rows do, too. A frame with other columns, added or left out, shows itself as pandas
        does.
        """

        _metadata: ClassVar[list[str]] = ["view", "viewed_columns"]
        view: "Callable[[pd.DataFrame], Shown] | None"
        viewed_columns: list[str]

        @property
        def _constructor(self) -> "type[ShownFrame]":
            return ShownFrame

        def __getitem__(self, key: Any) -> Any:
            """Select columns or rows. Raises KeyError with the nearest names of columns."""
            try:
                return super().__getitem__(key)
            except KeyError:
                names = list(map(str, self.columns))
                if not isinstance(key, str) or not names:
                    raise
                near = did_you_mean(key, names, otherwise="`.columns` has all names", count=3)
            raise NoColumn(f"there is no column {key!r}; {near}")

        def __reduce__(self) -> Any:
            # another process needs the data only
            return pd.DataFrame(self).__reduce__()

        def __repr__(self) -> str:
            shown = self._shown()
            return super().__repr__() if shown is None else shown.text()

        def _repr_html_(self) -> str | None:
            shown = self._shown()
            if shown is not None:
                return shown.html()
            # the stubs of pandas do not have it
            html: str | None = pd.DataFrame(self)._repr_html_()  # type: ignore[operator]
            return html

        def _shown(self) -> Shown | None:
            view: Callable[[pd.DataFrame], Shown] | None = getattr(self, "view", None)
            if view is None or list(self.columns) != self.viewed_columns:
                return None
            return view(pd.DataFrame(self))

    return ShownFrame


def shown_frame(frame: "pd.DataFrame", view: "Callable[[pd.DataFrame], Shown]") -> "pd.DataFrame":
    """Return the frame with a view, a function of the frame or of some of its rows."""
    result: Any = _frame_class()(frame)
    result.view = view
    result.viewed_columns = list(frame.columns)
    return cast("pd.DataFrame", result)


def _is_missing(value: Any) -> bool:
    """Return True for None and for NaN."""
    return value is None or (isinstance(value, float) and isnan(value))


def rollouts_view(frame: "pd.DataFrame") -> Shown:
    """Show the responses with question, verdict, advantage and outcome."""
    if not len(frame):
        return ShownTable("no responses are stored yet")
    steps = frame["step"]
    groups = len(frame[["step", "group_id"]].drop_duplicates())
    first = steps.min()
    last = steps.max()
    span = f"step {first}" if first == last else f"steps {first} to {last}"
    headline = f"{_counted(len(frame), 'response')} of {_counted(groups, 'group')}, {span}"
    shown, dropped = ends_of(frame)
    rows = []
    for index, row in shown.iterrows():
        cells: dict[str, Any] = {"": index}
        cells |= {name: row[name] for name in ROLLOUT_COLUMNS if name in row}
        correct = row["correct"]
        error = row["error"]
        # a missing value is None or NaN
        cells["correct"] = None if _is_missing(correct) else verdict_word(bool(correct), None)
        if not _is_missing(error):
            cells["correct"] = verdict_word(None, str(error))
        rows.append(cells)
    others = [name for name in frame.columns if name not in ROLLOUT_COLUMNS]
    remark = f"{len(others)} other columns, as in run.rollouts[{others[0]!r}]: {', '.join(others)}"
    return ShownTable(headline, rows, remark, dropped)


def evaluations_view(frame: "pd.DataFrame") -> Shown:
    """Show accuracy or mean score with its interval, of each evaluation."""
    if not len(frame):
        return ShownTable("no evaluation yet: eval_data sets held-out problems")
    shown, dropped = ends_of(frame)
    rows = []
    for step, row in shown.iterrows():
        name = "score" if _is_missing(row.get("accuracy")) and "score" in row else "accuracy"
        value = None if _is_missing(row[name]) else row[name]
        style = ".1%" if name == "accuracy" else ".3f"
        interval = None if _is_missing(row["low"]) else (row["low"], row["high"])
        rows.append(
            {
                "step": step,
                "data": row["name"],
                f"{name} (95 % interval)": with_interval(value, interval, style),
                "problems": row["problems"],
                "samples": row["samples_per_problem"],
                "tokens": f"{row['response_tokens_mean']:.1f}",
                "truncated": f"{row['truncated_fraction']:.1%}",
            }
        )
    headline = f"{_counted(len(frame), 'evaluation')}; run.evaluation(STEP) has every response"
    return ShownTable(headline, rows, _all_columns("run.evaluations", frame), dropped)


def metrics_view(frame: "pd.DataFrame") -> Shown:
    """Show the metrics of the console, and those of evaluations, under their whole names."""
    if not len(frame):
        return ShownTable("no step has been logged yet")
    logged = {name: 0.0 for name in frame.columns if frame[name].notna().any()}
    names = [column.metric for column in columns_of(logged) if column.label]
    for name in logged:
        data = name.removesuffix("/accuracy")
        if name.startswith("eval/") and data != name:
            score = f"{data}/score_mean"
            names.append(score if score in logged else name)
    names = [name for name in names if name in logged]
    shown, dropped = ends_of(frame)
    rows = [{"step": step} | {name: row[name] for name in names} for step, row in shown.iterrows()]
    steps = len(frame.index[frame.index > 0])
    headline = f"{_counted(steps, 'step')}, {len(logged)} metrics"
    remark = "the others are in run.metrics.columns; `dapo show metrics` explains them"
    return ShownTable(headline, rows, remark, dropped)


@dataclass(frozen=True)
class ProblemsView:
    """Shows how many problems are always or never answered correctly, the hardest first."""

    path: Path

    def __call__(self, frame: "pd.DataFrame") -> Shown:
        if not len(frame):
            return ShownTable("no checkpoint has statistics of problems yet")
        is_decided = bool(frame["decided"].sum())
        total = frame["decided"] if is_decided else frame["responses"]
        sums = frame["correct"] if is_decided else frame["score_sum"]
        mean = (sums / total).where(total > 0)
        headline = f"{_counted(len(frame), 'problem')} sampled"
        if is_decided:
            always = int((mean == 1).sum())
            never = int((mean == 0).sum())
            between = len(frame) - always - never
            headline += f": {never} never answered correctly, {between} sometimes, {always} always"
        means = mean.to_dict()
        order = mean.sort_values(kind="stable").index
        shown, dropped = ends_of(frame.loc[order])
        questions = self._questions(set(shown["problem"]))
        rows: list[dict[str, Any]] = []
        for index, row in shown.iterrows():
            value = means[index]
            cells: dict[str, Any] = {
                "": index,
                "question": questions.get(row["problem"]),
                "correct" if is_decided else "mean score": None,
                "responses": row["responses"],
                "visits": row["visits"],
                "last step": row["last_step"],
                "problem": row["problem"],
            }
            if not _is_missing(value):
                style = ".0%" if is_decided else ".3f"
                cells["correct" if is_decided else "mean score"] = f"{value:{style}}"
            rows.append(cells)
        remark = f"the hardest first; {_all_columns('run.problems', frame)}"
        return ShownTable(headline, rows, remark, dropped)

    def _questions(self, problems: set[str]) -> dict[str, str]:
        """Return the questions of problems, as far as the newest stored responses have them."""
        from dapo.runs.rollout_table import all_columns, read_rollouts

        questions: dict[str, str] = {}
        tables = RunDirectory(self.path).rollout_tables()
        for step in sorted(tables, reverse=True)[:_TABLES_READ]:
            column = "question" if "question" in all_columns(tables[step]) else "prompt"
            frame = read_rollouts([tables[step]], ["problem_id", column]).to_pandas()
            known = frame.drop_duplicates("problem_id").set_index("problem_id")[column]
            found = {name: known[name] for name in problems - questions.keys() if name in known}
            questions |= found
            if len(questions) == len(problems):
                break
        return questions


@dataclass(frozen=True)
class FindingsView:
    """Shows the verdict on a run, and each finding as a card."""

    diagnosis: Diagnosis

    def __call__(self, frame: "pd.DataFrame") -> Shown:
        cases = [self.diagnosis.cases[index] for index in frame.index]
        return ShownCards(self.diagnosis.verdict, [_card(case) for case in cases])


def _card(case: DiagnosedFinding) -> Card:
    """Return a finding with its cause, what to change, and an example."""
    finding = case.finding
    lines = [("", in_python(finding.cause))]
    if finding.change:
        changes = [f"dapo.resume(run, {in_python(change)})" for change in finding.change]
        lines.append(("try", " or ".join(changes)))
    if finding.advice:
        lines.append(("" if finding.change else "try", in_python(finding.advice)))
    evidence = ", ".join(f"{name} {value:.4g}" for name, value in finding.evidence.items())
    lines.append(("evidence", evidence))
    if case.error:
        lines.append(("error", case.error))
    if case.example:
        lines.append(("example", repr(case.example)))
    heading = f"{finding.severity}: {finding.name}, {case.span}"
    return Card(heading, lines, SEVERITY_COLOURS[finding.severity])


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _all_columns(name: str, frame: "pd.DataFrame") -> str:
    return f"all columns of {name}: {', '.join(map(str, frame.columns))}"
