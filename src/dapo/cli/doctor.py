"""`dapo doctor`: reports the problems of a run, with evidence and the option to change."""

from pathlib import Path

from dapo.analysis.doctor import DiagnosedFinding, Diagnosis
from dapo.cli.formatting import say
from dapo.core.text import plural
from dapo.runs.console import SafeConsole

_LABEL = 10
_INDENT = 2


def print_diagnosis(path: Path, diagnosis: Diagnosis) -> None:
    """Print the verdict, then the problems by severity, those that are over, and the notes."""
    console = SafeConsole()
    present = diagnosis.present
    past = diagnosis.past
    notes = [case for case in diagnosis.cases if case not in diagnosis.issues]
    say(console, diagnosis.verdict, style="bold")
    say(
        console,
        f"{path}: {plural(diagnosis.steps, 'step')}, {plural(diagnosis.evaluations, 'evaluation')},"
        f" {plural(diagnosis.rollout_tables, 'table')} of responses",
    )
    for heading, cases in (("", present), ("over:", past), ("may be of interest:", notes)):
        if heading and cases:
            say(console, f"\n{heading}", style="bold")
        for case in cases:
            console.print()
            _print_case(console, case)


def _print_case(console: SafeConsole, case: DiagnosedFinding) -> None:
    """Print a finding with its cause, its evidence and the option to change."""
    finding = case.finding
    say(console, f"{finding.severity}: {finding.name}, {case.span}", style="bold")
    first, last = finding.steps
    at = f"step {last}" if first == last else f"steps {first} to {last}"
    evidence = ", ".join(f"{name} {value:.4g}" for name, value in finding.evidence.items())
    rows = [("cause", finding.cause), ("evidence", f"{evidence} ({at})")]
    if case.problems:
        problems = ", ".join(f"{name} ({count})" for name, count in case.problems)
        count = plural(case.responses, "response")
        if case.has_unread:
            count = f"at least {count}"
        rows.append(("problems", f"{problems}; {count} of these steps show it"))
    if case.error:
        rows.append(("reason", case.error))
    if case.example:
        rows.append(("example", repr(case.example)))
    if finding.change:
        rows.append(("try", "  or  ".join(finding.change)))
    if finding.advice:
        rows.append(("" if finding.change else "try", finding.advice))
    for label, text in rows:
        say(console, text, label=f"{'':{_INDENT}}{label}", indent=_INDENT + _LABEL)
