"""`dapo test REWARD`: audits a reward and prints the result as a table. Imports no torch."""

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from dapo.cli.formatting import right, titled_table
from dapo.config import build_config, parse_data_argument
from dapo.config.load import override, resolve_auto_verifier
from dapo.core.errors import ConfigError, DataError
from dapo.data.problems import load_problems
from dapo.rewards.audit import EXAMPLES, SUM, Audit, CheckResult, audit_reward
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
        problems = [Problem("example", SUM.prompt, answer)]
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


def print_report(report: RewardReport, *, show_all: bool) -> None:
    """Print the audits; verdicts without an issue appear only with `show_all`."""
    console = SafeConsole()
    for audit in report.audits:
        console.print(_table_of(audit, show_all=show_all))
        for line in _audit_summary(audit):
            console.print(line, soft_wrap=True)
    console.print(
        f"a group of {report.group_size} responses: {report.group_seconds:.2g} s with"
        f" {report.workers} workers"
    )


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


def _table_of(audit: Audit, *, show_all: bool) -> Table:
    """Make a row for the right response and for each with an issue, or all (`show_all`)."""
    title = f"Reference {audit.problem.answer[:_SHOWN_CHARS]!r}"
    table = titled_table(title, "response", "verdict", *right("score", "ms"), "")
    if audit.right is not None:
        table.add_row(*_cells(audit.right), "")
    for check in audit.checks:
        if check.issues or (show_all and check.reference is None):
            table.add_row(*_cells(check), ", ".join(check.issues))
    return table


def _audit_summary(audit: Audit) -> list[str]:
    """List the lines below the table: times, and counts of issues."""
    slowest = max(audit.checks, key=lambda check: check.seconds)
    median_s = statistics.median(check.seconds for check in audit.checks)
    lines = [
        f"{1000 * median_s:.1f} ms per verdict (median), each judged twice, in two orders",
        f"slowest: {slowest.name}, {1000 * slowest.seconds:.1f} ms",
    ]
    broken = [check for check in audit.checks if check.reference is not None]
    if broken:
        refused = sum(check.verdict.error is not None for check in broken)
        lines.append(
            f"broken references: {refused} of {len(broken)} verdicts are errors (best: all)"
        )
    if audit.right is None:
        lines.append(
            "no usual form of the right answer is accepted: give one with --right, or problems with"
            " --data"
        )
    counts = Counter(issue for check in audit.checks for issue in check.issues)
    if not counts:
        lines.append(
            f"nothing suspicious in {len(audit.checks)} responses (--all shows each of them)"
        )
    if count := counts["false positive"]:
        lines.append(f"{count} false positives: wrong responses that the reward accepts")
    if count := counts["verifier error"]:
        example = next(check for check in audit.checks if "verifier error" in check.issues)
        lines.append(
            f"{count} verifier errors, for example ({example.name}): {example.verdict.error}"
        )
    if count := counts["non-deterministic"]:
        lines.append(f"{count} non-deterministic verdicts: the second verdict differs")
    return lines


def _cells(check: CheckResult) -> tuple[str, str, str, str]:
    name = check.name if check.reference is None else f"{check.name}, reference {check.reference!r}"
    verdict = check.verdict
    score = f"{verdict.score:.4g}" if verdict.error is None else ""
    return name, verdict_word(verdict.correct, verdict.error), score, f"{1000 * check.seconds:.1f}"
