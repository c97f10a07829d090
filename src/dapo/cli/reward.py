"""`dapo reward test`: audits a reward and prints the result as a table. Imports no torch."""

from collections.abc import Sequence
from itertools import islice

from rich.console import Console
from rich.table import Table

from dapo.config import DataSpec, build_config
from dapo.config.load import resolve_auto_verifier
from dapo.core.errors import ConfigError
from dapo.data.problems import load_problems
from dapo.rewards.audit import EXAMPLES, SUM, Audit, CheckResult, audit_reward
from dapo.rewards.workers.pool import VerifierPool
from dapo.types import Problem, Verdict

PROBLEMS = 3
_SHOWN_CHARS = 60


def report_on_reward(
    verifier: str, *, data: DataSpec | None, answer: str | None, right: str | None, overrides: Sequence[str]
) -> bool:
    """Print the audit of a reward.

    Args:
        verifier: a name or module:function.
        data: where problems come from; None: an example.
        answer: the reference of the example.
        right: a response to it that is known to be right.
        overrides: `reward.NAME=VALUE`.

    Returns:
        Whether there is no issue.

    Raises:
        ConfigError, DataError, RewardError: an argument cannot be used.
    """
    raw = {"model": "none", "data": {"train": data or "builtin:sums"}, "reward": {"verifier": verifier}}
    config = resolve_auto_verifier(build_config(raw, overrides, where="dapo reward test"))
    if not all(item.startswith("reward.") for item in overrides):
        raise ConfigError("dapo reward test takes options of reward only, for example reward.options.extract=final")
    if data is not None and (answer is not None or right is not None):
        raise ConfigError("--answer and --right belong to the example problem; with --data the problems have their own")
    problems: list[tuple[Problem, str | None]]
    if data is not None:
        problems = [(problem, None) for problem in islice(load_problems(data), PROBLEMS)]
    else:
        known, known_right = EXAMPLES.get(verifier, (SUM, None))
        problem = known if answer is None else Problem("example", SUM.prompt, answer)
        problems = [(problem, right or (known_right if answer is None else None))]
    with VerifierPool(config.reward) as pool:
        audits = [audit_reward(pool, problem, known_right) for problem, known_right in problems]
    console = Console()
    for audit in audits:
        console.print(table_of(audit))
        for line in audit_summary(audit):
            console.print(line, highlight=False, soft_wrap=True)
    return not any(audit.suspicious for audit in audits)


def table_of(audit: Audit) -> Table:
    """One row per response; on broken references only those with an issue."""
    table = Table(title=f"Reference {audit.problem.answer[:_SHOWN_CHARS]!r}", title_justify="left", title_style="bold")
    for column in ("response", "verdict", "score", "ms", ""):
        table.add_column(column, justify="right" if column in ("score", "ms") else "left")
    if audit.right is not None:
        table.add_row(*_cells(audit.right), "")
    for check in audit.checks:
        if check.reference is None or check.issues:
            table.add_row(*_cells(check), ", ".join(check.issues))
    return table


def audit_summary(audit: Audit) -> list[str]:
    """Lines below the table: times, counts of issues."""
    lines = [f"{1000 * audit.median_s:.1f} ms per verdict (median), each judged twice, in two orders"]
    slowest = max(audit.checks, key=lambda check: check.seconds)
    lines.append(f"slowest: {slowest.name}, {1000 * slowest.seconds:.1f} ms")
    broken = [check for check in audit.checks if check.reference is not None]
    refused = sum(check.verdict.error is not None for check in broken)
    if broken:
        lines.append(f"broken references: {refused} of {len(broken)} verdicts are errors (best: all)")
    if audit.right is None:
        lines.append("no usual form of the right answer is accepted: give one with --right, or problems with --data")
    false_positives = sum("false positive" in check.issues for check in audit.checks)
    errors = sum("verifier error" in check.issues for check in audit.checks)
    non_deterministic = sum("non-deterministic" in check.issues for check in audit.checks)
    if not audit.suspicious:
        lines.append("nothing suspicious")
    if false_positives:
        lines.append(f"{false_positives} false positives: wrong responses that it accepts")
    if errors:
        example = next(check for check in audit.checks if "verifier error" in check.issues)
        lines.append(f"{errors} verifier errors, for example ({example.name}): {example.verdict.error}")
    if non_deterministic:
        lines.append(f"{non_deterministic} non-deterministic verdicts: different the second time")
    return lines


def _cells(check: CheckResult) -> tuple[str, str, str, str]:
    name = check.name if check.reference is None else f"{check.name}, reference {check.reference!r}"
    return name, _verdict_label(check.verdict), _score(check.verdict), f"{1000 * check.seconds:.1f}"


def _verdict_label(verdict: Verdict) -> str:
    if verdict.error is not None:
        return "error"
    return {True: "right", False: "wrong", None: "score"}[verdict.correct]


def _score(verdict: Verdict) -> str:
    return "" if verdict.error is not None else f"{verdict.score:.4g}"
