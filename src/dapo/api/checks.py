"""Looks at a call, a reward or runs before time is spent on them: check, check_reward, compare."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dapo.api.in_memory_data import Data, Reward, row_errors, stored_arguments, stored_data
from dapo.api.keywords import build_scaled, load_base, read_keywords
from dapo.api.plain_values import model_name
from dapo.api.python_errors import python_interface
from dapo.api.python_words import in_python
from dapo.api.result_types import table_of
from dapo.api.shown_tables import ShownTable, cell_text
from dapo.core.errors import CheckpointError, ConfigError
from dapo.core.loading import add_code_folder
from dapo.core.terminal import printable
from dapo.core.text import one_line, plural, shorten
from dapo.runs.stored_config import CODE_FOLDER
from dapo.start.check import check as check_start

if TYPE_CHECKING:
    import pandas as pd

    from dapo.analysis.compare import Comparison

NOT_CHECKED = ("run_dir", "name", "on_step", "on_evaluation", "on_end", "sinks")
"""Arguments of `dapo.train` that a check accepts and leaves alone."""
PROBLEMS = 3
"""Problems on which a reward is audited, as by `dapo test`."""
SHOWN = 12
"""Suspicious responses that the display of an audit shows."""


@dataclass(frozen=True)
class _Shown:
    """A result that shows a sentence, and a table below it."""

    verdict: str
    """The result in one sentence."""
    frame: "pd.DataFrame"
    """The details, a row for each."""

    def _rows(self) -> "pd.DataFrame":
        """Return the rows that the display shows."""
        return self.frame

    def __repr__(self) -> str:
        rows = self._rows()
        cells = [[cell_text(cell) for cell in row] for row in rows.itertuples(index=False)]
        if cells and len(rows.columns) > 2:
            cells.insert(0, list(rows.columns))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [self.verdict]
        for row in cells:
            words = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append(f"  {'  '.join(words)}".rstrip())
        return printable("\n".join(lines))

    def _repr_html_(self) -> str:
        return ShownTable(self.verdict, self._rows().to_dict("records")).html()


@dataclass(frozen=True, repr=False)
class ConfigCheck(_Shown):
    """What a call of `dapo.train` would run, whether it fits, and what is wrong with it."""

    details: Mapping[str, Any]
    """All facts, in the form of `dapo check --json`."""

    @property
    def ok(self) -> bool:
        """Whether nothing speaks against the run."""
        return not self.details["problems"]


@python_interface
def check(
    model: str | os.PathLike[str] | None = None,
    *,
    data: Data = None,
    reward: Reward = None,
    eval_data: Data = None,
    config: str | Path | Mapping[str, Any] | None = None,
    **options: Any,
) -> ConfigCheck:
    """Check a call of `dapo.train` without running it, as `dapo check` does; same arguments.

    The result shows whether the model fits this machine, with what it needs, the data, and the
    options without effect; `ok` is False if it cannot run, `frame` has a row for each fact. Nothing
    is written. Raises the errors with which `dapo.train` would refuse the call.

    Example:
        >>> rows = [{"prompt": f"{a} + 1 =", "answer": str(a + 1)} for a in range(8)]
        >>> dapo.check("tiny-random", data=rows, prompts_per_step=2, group_size=4, max_response_tokens=8).ok
        True
    """
    from dapo.analysis.check.facts import CheckedFacts, check_as_json

    base, _, _ = load_base(config)
    options = {name: value for name, value in options.items() if name not in NOT_CHECKED}
    with TemporaryDirectory(prefix="dapo-check-") as folder:
        stored, options = stored_arguments(Path(folder), data, eval_data, options, base)
        settings = {option: each.source for option, each in stored.items() if each.source}
        name = model_name(model)
        if name is not None:
            settings["model.name"] = name
        values, modules, _ = read_keywords(settings, reward, options)
        built, _ = build_scaled(base, values, where="dapo.check")
        for each in stored.values():
            each.write()
        for module in modules:
            module.write(Path(folder) / CODE_FOLDER)
        add_code_folder(Path(folder) / CODE_FOLDER)
        labels = {label: path for each in stored.values() for label, path in each.labels.items()}
        with (
            row_errors(labels),
            check_start(built, elsewhere=built.uses_ray, starts=False) as checked,
        ):
            facts = CheckedFacts.of(checked)
            details = check_as_json(facts)
    return ConfigCheck(in_python(facts.verdict()), _facts(details), details)


def _facts(details: Mapping[str, Any]) -> "pd.DataFrame":
    """Return a row for each fact of a check: problems first."""
    rows = [("problem", in_python(str(text))) for text in details["problems"]]
    for role in ("train", "eval"):
        facts = details["data"].get(role)
        if facts is not None:
            count = "problems elsewhere"
            if facts["problems"] is not None:
                count = f"{facts['problems']:,} problems, {facts['distinct']:,} distinct"
            rows.append((f"{role} data", f"{count}, of {facts['source']}"))
            rows += [("warning", in_python(str(text))) for text in facts["warnings"]]
    step = details["step"]
    contents = f"{step['prompts']} prompts, {step['responses']} responses"
    if details["config"]["schedule"] == "supervised":
        contents = f"{step['prompts']} demonstrations"
    rows.append(("step", f"{contents}, {plural(step['updates'], 'update')}"))
    rows += [("no effect", f"{each['option']}: {each['why']}") for each in details["ignored"]]
    return table_of([{"about": about, "fact": fact} for about, fact in rows], "about", "fact")


@dataclass(frozen=True, repr=False)
class RewardCheck(_Shown):
    """The audit of a reward: its verdicts on responses that are wrong or hostile."""

    def _rows(self) -> "pd.DataFrame":
        rows = self.frame[self.frame["issues"] != ""]
        rows = rows[["response", "verdict", "score", "issues"]]
        return rows.drop_duplicates().head(SHOWN)  # equal for several references

    @property
    def ok(self) -> bool:
        """Whether nothing is suspicious."""
        return bool((self.frame["issues"] == "").all())


@python_interface
def check_reward(reward: Reward, data: Data = None, *, right: str | None = None) -> RewardCheck:
    """Audit a reward before a run, as `dapo test` does: does it pay for nonsense?

    It judges responses that are wrong for every problem, each twice, and references that are
    broken. `frame` has every verdict.

    Args:
        reward: one as for `dapo.train`, a function or a verifier's name.
        data: rows or a data source, of which the first problems are used; None: an example.
        right: a right response to the example.

    Raises RewardError and DataError as `dapo.train` does.

    Example:
        >>> def digits(completions, **columns):
        ...     return [any(c.isdigit() for c in completion) for completion in completions]
        >>> check = dapo.check_reward(digits, [{"prompt": "1 + 1 =", "answer": "2"}])
        >>> check.ok
        False
    """
    from dapo.rewards.audit import EXAMPLES, SUM, audit_reward, verdict_on
    from dapo.rewards.verifiers.function import require_columns

    problems, known_right = [SUM], None
    if data is None and isinstance(reward, str) and reward in EXAMPLES:
        example, known_right = EXAMPLES[reward]
        problems = [example]
    with _opened_reward(reward, data) as (pool, own_problems):
        problems = own_problems or problems
        require_columns(problems, pool.needed_columns, where="data" if own_problems else "example")
        audits = [audit_reward(pool, problem, right or known_right) for problem in problems]
    rows = [
        {
            "response": each.name,
            "reference": shorten(
                one_line(audit.problem.answer if each.reference is None else each.reference), 24
            ),
            "verdict": _verdict_word(each.verdict),
            "score": None if each.verdict.error is not None else each.verdict.score,
            "issues": ", ".join(each.issues),
            "error": each.verdict.error,
        }
        for audit in audits
        for each in audit.checks
    ]
    frame = table_of(rows)
    return RewardCheck(in_python(verdict_on(audits)), frame)


@contextmanager
def _opened_reward(reward: Reward, data: Data) -> "Iterator[tuple[Any, list[Any]]]":
    """Yield the verifiers of a reward in processes of their own, and the first problems of data."""
    from dapo.config.load import resolve_auto_verifier
    from dapo.data.problems import load_problems
    from dapo.rewards.combine import RewardSpec
    from dapo.rewards.pool import VerifierPool

    with TemporaryDirectory(prefix="dapo-check-") as folder:
        stored = stored_data(data, Path(folder) / "rows.jsonl", argument="data")
        settings = {"model.name": "none", "data.train": stored.source or "builtin:sums"}
        values, modules, _ = read_keywords(settings, reward, {})
        config, _ = build_scaled({}, values, where="dapo.check_reward")
        for module in modules:
            module.write(Path(folder) / CODE_FOLDER)
        add_code_folder(Path(folder) / CODE_FOLDER)
        with row_errors(stored.labels):
            stored.write()
            config = resolve_auto_verifier(config)
            spec = RewardSpec.of(config.reward.verifier, options=config.reward.options)
            problems = []
            if data is not None:
                source = config.data.train_source
                problems = load_problems(source, require_answer=spec.reads_answer)[:PROBLEMS]
        with VerifierPool(config.reward) as pool:
            yield pool, problems


def _verdict_word(verdict: Any) -> str:
    from dapo.runs.outcomes import verdict_word

    return verdict_word(verdict.correct, verdict.error)


@dataclass(frozen=True, repr=False)
class RunComparison(_Shown):
    """How runs differ in training: each against the first, paired by problem."""

    details: "Sequence[Comparison]"
    """The comparison of each further run, in the form of `dapo compare --json`."""


@python_interface
def compare(*runs: "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]") -> RunComparison:
    """Compare runs, as `dapo compare` does: the first one with each other, paired by problem.

    `frame` has a row for each run: its steps and seed, the accuracy (or mean score) on common
    held-out problems after the last step, the difference to the first run with its 95 % interval,
    and the difference of rewards in training. Raises CheckpointError for no run, ConfigError for
    fewer than two.
    """
    from dapo.analysis.compare import best_of, compare_runs, verdict

    several = runs
    if len(runs) == 1 and isinstance(runs[0], Sequence) and not isinstance(runs[0], str):
        several = tuple(runs[0])
    paths = [model_name(run, "run") for run in several]
    if len(paths) < 2:
        raise ConfigError("compare: expected two runs or more, as in dapo.compare(run, other)")
    for path in paths:
        if not Path(str(path)).exists():
            raise CheckpointError(
                f"compare: there is no run {str(path)!r}; with a model it is"
                f" run.compare({str(path)!r})"
            )
    comparisons = [compare_runs(str(paths[0]), str(path)) for path in paths[1:]]
    rows = [_row_of(paths[0], comparisons[0], is_first=True)]
    rows += [_row_of(path, each) for path, each in zip(paths[1:], comparisons, strict=True)]
    sentence = best_of(comparisons)
    if len(comparisons) == 1:
        sentence = f"{verdict(comparisons[0])}; a is {paths[0]}, b is {paths[1]}"
    return RunComparison(sentence, table_of(rows), comparisons)


def _row_of(path: Any, comparison: "Comparison", *, is_first: bool = False) -> dict[str, Any]:
    """Return the row of a run in the table of a comparison."""
    final = comparison.held_out.get("final")
    facts = comparison.a if is_first else comparison.b
    row = {"run": str(path), "steps": facts.steps, "seed": facts.seed}
    row["accuracy" if final is None or final.is_binary else "mean_score"] = None
    if final is not None:
        name = "accuracy" if final.is_binary else "mean_score"
        row[name] = final.accuracy_a if is_first else final.accuracy_b
    paired = None if final is None or is_first else final.difference
    for name in ("difference", "low", "high", "pairs"):
        row[name] = None if paired is None else paired[name]
    reward = comparison.curves.get("reward")
    has_reward = reward is not None and not is_first
    row["reward_difference"] = reward.mean["difference"] if has_reward and reward else None
    return row
