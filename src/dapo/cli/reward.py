"""`dapo test REWARD`: audits a reward and prints the result as a table. Imports no torch."""

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Column, Table

from dapo.cli.formatting import say
from dapo.config import build_config, parse_data_argument
from dapo.config.load import override, resolve_auto_verifier
from dapo.core.errors import ConfigError, DataError
from dapo.core.text import excerpt, one_line, plural, shorten
from dapo.data.problems import load_problems
from dapo.rewards.audit import EXAMPLE, EXAMPLES, SUM, Audit, CheckResult, audit_reward, verdict_on
from dapo.rewards.combine import RewardSpec
from dapo.rewards.pool import VerifierPool
from dapo.rewards.verifiers.function import missing_columns, require_columns
from dapo.runs.console import SafeConsole
from dapo.runs.directory import RunDirectory
from dapo.runs.outcomes import verdict_word
from dapo.runs.stored_config import load_run_config
from dapo.types import Problem

PROBLEMS = 3
_SHOWN_CHARS = 60
_RESPONSE_CHARS = 240
_NAME_WIDTH = 16
_REFERENCE_WIDTH = 14
_VERDICT_WIDTH = 11


@dataclass(frozen=True)
class RewardReport:
    """The audits of a reward."""

    verifier: str
    audits: Sequence[Audit]
    group_size: int
    group_seconds: float  # seconds to judge a group of `group_size` responses
    workers: int

    @property
    def suspicious(self) -> bool:
        return any(audit.suspicious for audit in self.audits)

    def as_json(self) -> dict[str, Any]:
        """Return the audits as JSON values: every response with its verdict and its issues."""
        costs = {name: getattr(self, name) for name in ("group_size", "group_seconds", "workers")}
        problems = [_audit_json(audit) for audit in self.audits]
        return {
            "verifier": self.verifier,
            "suspicious": self.suspicious,
            "problems": problems,
            **costs,
        }


def examine_reward(
    verifier: str,
    *,
    data: str | None,
    answer: str | None,
    right: str | None,
    overrides: Sequence[str],
) -> RewardReport:
    """Audit a reward on problems of a data source, or on an example.

    Args:
        verifier: a verifier's name, `module:function`, or a run, which has its own problems.
        data: a data source, of which the first problems are used; None: the example.
        answer: the reference answer of the example; None: the verifier's own example.
        right: a correct response to the example.
        overrides: options of reward, `key=value`.

    Raises ConfigError, DataError or RewardError for an argument that cannot be used.
    """
    if RunDirectory.is_run(verifier):
        run = RunDirectory.open(verifier)
        added = [] if data is None else [override("data.train", parse_data_argument(data))]
        config = resolve_auto_verifier(load_run_config(run, [*added, *overrides]))
        data = data or "that of the run"
    else:
        source = "builtin:sums" if data is None else parse_data_argument(data)
        raw = {"model": "none", "data": {"train": source}, "reward": {"verifier": verifier}}
        config = resolve_auto_verifier(build_config(raw, overrides, where="dapo test"))
    if not all(item.startswith("reward.") for item in overrides):
        raise ConfigError(
            "dapo test of a reward takes options of reward only, for example"
            " reward.options.extract=final"
        )
    if data is not None and (answer is not None or right is not None):
        raise ConfigError(
            "--answer and --right belong to the example problem; with --data the problems have"
            " their own"
        )
    reward = RewardSpec.of(config.reward.verifier, options=config.reward.options)
    if data is not None:
        problems = load_problems(config.data.train_source, require_answer=reward.reads_answer)[
            :PROBLEMS
        ]
    elif answer is not None:
        problems = [Problem(EXAMPLE, SUM.prompt, answer)]
    else:
        problem, known_right = EXAMPLES.get(verifier, (SUM, None))
        problems = [problem]
        right = right or known_right
    with VerifierPool(config.reward) as pool:
        _require_columns(pool, problems, data)
        audits = [audit_reward(pool, problem, right or None) for problem in problems]
        size = config.rollout.group_size
        seconds = _group_seconds(pool, problems[0], size)
    return RewardReport(verifier, audits, size, seconds, config.reward.workers)


def print_report(report: RewardReport, *, verbose: bool) -> None:
    """Print the verdict, then the suspicious responses; with `verbose` all, and their times."""
    console = SafeConsole()
    checks = [check for audit in report.audits for check in audit.checks]
    say(console, verdict_on(report.audits), style="bold")
    rows = _merged(report.audits, verbose=verbose)
    if rows:
        console.print(_table_of(rows))
    if verbose:
        for line in _times(report, checks):
            say(console, line)


@dataclass
class _Row:
    """A response to one or more references, with one verdict."""

    check: CheckResult
    references: list[str]


def _merged(audits: Sequence[Audit], *, verbose: bool) -> list[_Row]:
    """Return the responses to show, those of equal name and verdict as one row."""
    rows: dict[tuple[str, str, tuple[str, ...]], _Row] = {}
    for audit in audits:
        shown = [check for check in audit.checks if check.issues]
        if verbose:
            shown = [check for check in audit.checks if check.issues or check.reference is None]
            shown = [audit.right, *shown] if audit.right is not None else shown
        for check in shown:
            reference = audit.problem.answer if check.reference is None else check.reference
            key = (check.name, _verdict(check), check.issues)
            row = rows.setdefault(key, _Row(check, []))
            if reference not in row.references:
                row.references.append(reference)
    return list(rows.values())


def _audit_json(audit: Audit) -> dict[str, Any]:
    return {
        "reference": audit.problem.answer,
        "right": None if audit.right is None else _check_json(audit.right),
        "checks": [_check_json(check) for check in audit.checks],
        "issues": dict(Counter(issue for check in audit.checks for issue in check.issues)),
    }


def _check_json(check: CheckResult) -> dict[str, Any]:
    verdict = check.verdict
    return {
        "response": check.name,
        "reference": check.reference,
        "correct": verdict.correct,
        "score": None if verdict.error is not None else verdict.score,
        "error": verdict.error,
        "seconds": check.seconds,
        "issues": list(check.issues),
    }


def _group_seconds(pool: VerifierPool, problem: Problem, size: int) -> float:
    """Return the seconds to judge a group of ordinary responses, as in training."""
    responses = [f"I think it is this.\nAnswer: {number}" for number in range(size)]
    began = time.perf_counter()
    pool.submit(problem, responses, [()] * size).result()
    return time.perf_counter() - began


def _require_columns(pool: VerifierPool, problems: Sequence[Problem], data: str | None) -> None:
    """Raise DataError if a column that a function needs is missing."""
    if data is not None:
        require_columns(problems, pool.needed_columns, where="--data")
        return
    for name, columns in pool.needed_columns.items():
        if absent := missing_columns(columns, problems[0]):
            advice = "audit it on problems of your data that have it: --data train.jsonl"
            raise DataError(
                f"{name} needs {absent}, which the example problem does not have; {advice}"
            )


def _table_of(rows: Sequence[_Row]) -> Table:
    """Make a row for each response, with its text, the references and the verdict."""
    table = Table(
        Column("kind", max_width=_NAME_WIDTH),
        Column("response", overflow="fold", ratio=1),
        Column("reference", overflow="fold", max_width=_REFERENCE_WIDTH),
        Column("judged", max_width=_VERDICT_WIDTH),
        show_lines=True,
    )
    for row in rows:
        references = ", ".join(reference.strip() or "(empty)" for reference in row.references)
        # only the shape of 100 kB matters
        response = shorten(excerpt(row.check.response), _RESPONSE_CHARS, keep="ends")
        table.add_row(
            row.check.name,
            response if response.strip() else repr(response),
            shorten(one_line(references), _SHOWN_CHARS),
            _verdict(row.check),
        )
    return table


def _verdict(check: CheckResult) -> str:
    """Return the verdict on a response in a few words."""
    verdict = check.verdict
    word = verdict_word(verdict.correct, verdict.error)
    if verdict.error is None and verdict.correct is None:
        word = f"score {verdict.score:.4g}"
    if "non-deterministic" in check.issues:
        word += ", then otherwise"
    return word


def _times(report: RewardReport, checks: Sequence[CheckResult]) -> list[str]:
    """Return lines about times, and about references that are no answers."""
    slowest = max(checks, key=lambda check: check.seconds)
    median_s = statistics.median(check.seconds for check in checks)
    lines = [
        f"{1000 * median_s:.1f} ms per verdict (median), each judged twice, in two orders",
        f"slowest: {slowest.name}, {1000 * slowest.seconds:.1f} ms",
        f"a group of {report.group_size} responses: {report.group_seconds:.2g} s with"
        f" {plural(report.workers, 'worker')}",
    ]
    broken = [check for check in checks if check.reference is not None]
    if broken:
        refused = sum(check.verdict.error is not None for check in broken)
        lines.append(
            f"references that are no answer, such as an empty one: {refused} of {len(broken)}"
            " verdicts are errors, as all should be"
        )
    return lines
