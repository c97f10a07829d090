"""`dapo doctor`: reports the problems of a run, with evidence and the option to change."""

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from dapo.analysis.doctor import DiagnosedFinding, Diagnosis
from dapo.cli.formatting import plural
from dapo.training.rules.all_rules import RULES

_WIDTH = 110
_LABEL = 10


def diagnosis_lines(path: Path, diagnosis: Diagnosis) -> Iterator[str]:
    """Yield what was examined, then each finding with its evidence and the option to change."""
    extent = (
        f"{plural(diagnosis.steps, 'step')}, {plural(diagnosis.evaluations, 'evaluation')}, "
        f"{plural(diagnosis.rollout_tables, 'table')} of responses, by {len(RULES)} rules"
    )
    if not diagnosis.steps and not diagnosis.cases:
        yield f"{path}: no step has been logged yet"
        return
    if not diagnosis.issues:
        yield f"{path}: nothing wrong found in {extent}"
    else:
        now = sum(case.holds for case in diagnosis.issues)
        past = len(diagnosis.issues) - now
        first = plural(now, "finding") if now else "nothing wrong at the end"
        over = f", {plural(past, 'past finding')}" if past else ""
        yield f"{path}: {first}{over} in {extent}"
    for case in diagnosis.cases:
        yield ""
        yield from _case_lines(case)


def _case_lines(case: DiagnosedFinding) -> Iterator[str]:
    finding = case.finding
    until = f"since step {case.since}"
    if not case.holds:
        until = f"from step {case.since} to {finding.steps[1]}, no longer"
    yield f"{finding.severity}: {finding.name}, {until}"
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
        rows.append(("error", case.error))
    if case.example:
        rows.append(("example", repr(case.example)))
    if finding.change:
        rows.append(("try", "  or  ".join(finding.change)))
    if finding.advice:
        rows.append(("" if finding.change else "try", finding.advice))
    for label, text in rows:
        lines = wrap(text, _WIDTH - _LABEL - 2, break_long_words=False, break_on_hyphens=False) or [
            ""
        ]
        yield f"  {label:{_LABEL}}{lines[0]}"
        yield from (f"  {'':{_LABEL}}{line}" for line in lines[1:])
