"""`dapo doctor`: reports the problems of a run, with evidence and the option to change."""

from collections.abc import Sequence
from pathlib import Path

from dapo.analysis.doctor import DiagnosedFinding, Diagnosis
from dapo.cli.formatting import plural, say
from dapo.runs.console import SafeConsole
from dapo.training.rules.all_rules import RULES
from dapo.training.rules.finding import SEVERITIES

_LABEL = 10
_INDENT = 2


def print_diagnosis(path: Path, diagnosis: Diagnosis) -> None:
    """Print the verdict, then the problems by severity, those that are over, and the notes."""
    console = SafeConsole()
    present = [case for case in diagnosis.issues if case.holds]
    past = [case for case in diagnosis.issues if not case.holds]
    notes = [case for case in diagnosis.cases if case not in diagnosis.issues]
    say(console, _verdict(diagnosis, present, past), style="bold")
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


def _verdict(
    diagnosis: Diagnosis, present: Sequence[DiagnosedFinding], past: Sequence[DiagnosedFinding]
) -> str:
    """Say whether the run is healthy, with the accuracies at its ends."""
    if not diagnosis.steps and not diagnosis.cases:
        return "nothing to diagnose: no step has been logged yet"
    change = _change(diagnosis)
    if present:
        return "; ".join(filter(None, [*_counted(present), change]))
    facts = [change, f"{len(RULES)} rules looked", "nothing wrong"]
    verdict = f"healthy: {', '.join(filter(None, facts))}"
    if past:
        verdict += f" at the end; over: {', '.join(case.finding.name for case in past)}"
    return verdict


def _counted(cases: Sequence[DiagnosedFinding]) -> list[str]:
    """Count and name the findings of each severity, such as `1 warning: truncation`."""
    parts = []
    for severity in SEVERITIES:
        names = [case.finding.name for case in cases if case.finding.severity == severity]
        if names:
            parts.append(f"{plural(len(names), severity)}: {', '.join(names)}")
    return parts


def _change(diagnosis: Diagnosis) -> str:
    """Return the accuracy before and after training; empty without two evaluations."""
    if diagnosis.accuracies is None:
        return ""
    first, last = diagnosis.accuracies
    if diagnosis.is_binary:
        return f"accuracy {100 * first:.1f} -> {100 * last:.1f} %"
    return f"mean score {first:.3f} -> {last:.3f}"


def _print_case(console: SafeConsole, case: DiagnosedFinding) -> None:
    """Print a finding with its cause, its evidence and the option to change."""
    finding = case.finding
    until = f"since step {case.since}"
    if not case.holds:
        until = f"from step {case.since} to {finding.steps[1]}, no longer"
    say(console, f"{finding.severity}: {finding.name}, {until}", style="bold")
    first, last = finding.steps
    at = f"step {last}" if first == last else f"steps {first} to {last}"
    evidence = ", ".join(f"{name} {value:.4g}" for name, value in finding.evidence.items())
    rows = [("cause", finding.cause), ("evidence", f"{evidence} ({at})")]
    if case.problems:
        problems = ", ".join(f"{name} ({count})" for name, count in case.problems)
        rows.append(
            ("problems", f"{problems}; {plural(case.responses, 'response')} of these steps show it")
        )
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
