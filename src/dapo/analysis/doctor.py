"""Applies the rules to a whole run; a finding has its first step, problems and responses."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dapo.analysis.stored_groups import read_groups
from dapo.config import load_config
from dapo.core.errors import DataError
from dapo.core.text import one_line, shorten
from dapo.evaluation.pairing import require_pairable
from dapo.runs.directory import RunDirectory
from dapo.runs.evaluations import first_and_last_evaluation
from dapo.runs.metrics_file import read_metrics
from dapo.runs.rollout_table import iterate_rows
from dapo.sampling.rollout_metrics import rollout_metrics
from dapo.training.rules.all_rules import RULES, active_findings
from dapo.training.rules.finding import SEVERITIES, Finding, Rule
from dapo.training.rules.history import WINDOW, MetricHistory

MAX_PROBLEMS = 3
# maximum number of responses read for examples, from the newest tables of a finding's steps
MAX_ROWS = 20_000
_SHOWN_CHARS = 160


@dataclass(frozen=True)
class DiagnosedFinding:
    """One finding of a whole run."""

    finding: Finding  # as of the last step in which it held
    since: int  # the first step in which it held, without a break up to the last one
    holds: bool  # whether it holds at the end
    # the problems that show it most often, with the number of responses
    problems: Sequence[tuple[str, int]] = ()
    responses: int = 0  # the number of read responses that show it
    has_unread: bool = False  # whether more responses of its steps are stored than were read
    example: str = ""  # the end of one of these responses
    error: str = ""  # the most frequent error, or other reason, among them

    @property
    def span(self) -> str:
        """The steps in which it holds: `since step 3`."""
        if self.holds:
            return f"since step {self.since}"
        return f"from step {self.since} to {self.finding.steps[1]}, no longer"

    def to_json(self) -> dict[str, Any]:
        """Return the finding with its evidence as JSON values."""
        fields = {name: value for name, value in asdict(self).items() if name != "finding"}
        problems = [{"id": name, "responses": count} for name, count in self.problems]
        return asdict(self.finding) | fields | {"problems": problems}


@dataclass(frozen=True)
class Diagnosis:
    """The findings in a run."""

    cases: Sequence[DiagnosedFinding]
    steps: int  # number of training steps with metrics
    evaluations: int
    rollout_tables: int  # the number of stored tables of responses
    # accuracies or mean scores of the first and the last evaluation; None without two of equal kind
    accuracies: tuple[float, float] | None = None
    is_binary: bool = True  # whether the verifier decides right or wrong; else they are scores

    @property
    def issues(self) -> list[DiagnosedFinding]:
        """The cases that are worse than a note, past ones included."""
        return [case for case in self.cases if case.finding.severity != "note"]

    @property
    def present(self) -> list[DiagnosedFinding]:
        """The issues that hold at the end."""
        return [case for case in self.issues if case.holds]

    @property
    def past(self) -> list[DiagnosedFinding]:
        """The issues that are over."""
        return [case for case in self.issues if not case.holds]

    @property
    def verdict(self) -> str:
        """Whether the run is healthy, in a sentence with the accuracies at its ends."""
        if not self.steps and not self.cases:
            return "nothing to diagnose: no step has been logged yet"
        change = self._change()
        if self.present:
            return "; ".join(filter(None, [*_counted(self.present), change]))
        facts = [change, f"{len(RULES)} rules looked", "nothing wrong"]
        verdict = f"healthy: {', '.join(filter(None, facts))}"
        if self.past:
            verdict += f" at the end; over: {', '.join(case.finding.name for case in self.past)}"
        return verdict

    def _change(self) -> str:
        """Return the accuracy before and after training; empty without two evaluations."""
        if self.accuracies is None:
            return ""
        first, last = self.accuracies
        if self.is_binary:
            return f"accuracy {100 * first:.1f} -> {100 * last:.1f} %"
        return f"mean score {first:.3f} -> {last:.3f}"

    def to_json(self) -> dict[str, Any]:
        """Return the findings and what they rest on as JSON values."""
        return {
            "steps": self.steps,
            "evaluations": self.evaluations,
            "rollout_tables": self.rollout_tables,
            "rules": [rule.name for rule in RULES],
            "findings": [case.to_json() for case in self.cases],
        }


def _counted(cases: Sequence[DiagnosedFinding]) -> list[str]:
    """Count and name the findings of each severity, such as `1 warning: truncation`."""
    parts = []
    for severity in SEVERITIES:
        names = [case.finding.name for case in cases if case.finding.severity == severity]
        if names:
            noun = severity if len(names) == 1 else f"{severity}s"
            parts.append(f"{len(names)} {noun}: {', '.join(names)}")
    return parts


def diagnose(path: Path) -> Diagnosis:
    """Run all rules over a run; notes come last, of the others first those that hold at the end.

    The options of a window's last step judge it.

    Raises CheckpointError if there is no run, and DataError for damaged metrics.
    """
    run = RunDirectory.open(path)
    configs = {run.config: load_config(run.config)}
    tables = run.rollout_tables()
    metrics = read_metrics(run.metrics) if run.metrics.exists() else []
    history = MetricHistory()
    since: dict[str, int] = {}
    latest: dict[str, Finding] = {}
    now: set[str] = set()
    for record in [*metrics, *_unfinished_step(run, metrics)]:
        history.add(record)
        # a resume may have changed the options that the rules count with, such as the group size
        file = run.config_of(history.step)
        if file not in configs:
            configs[file] = load_config(file)
        findings = active_findings(history, configs[file])
        before = now
        now = {finding.name for finding in findings}
        latest |= {finding.name: finding for finding in findings}
        since |= dict.fromkeys(now - before, history.step)
    rules = {rule.name: rule for rule in RULES}
    cases = [
        _with_responses(DiagnosedFinding(finding, since[name], name in now), rules[name], tables)
        for name, finding in latest.items()
    ]
    order = list(rules)

    def rank(case: DiagnosedFinding) -> tuple[bool, bool, int, int]:
        is_note = case.finding.severity == "note"
        severity = SEVERITIES.index(case.finding.severity)
        return is_note, not case.holds, severity, order.index(case.finding.name)

    cases.sort(key=rank)
    evaluations = first_and_last_evaluation(run)
    return Diagnosis(
        cases,
        history.steps,
        history.evaluations,
        len(tables),
        accuracies=_accuracies(evaluations),
        is_binary=all(evaluation.get("binary", True) for evaluation in evaluations),
    )


def _accuracies(evaluations: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return the accuracies of two evaluations; None if one has none, or they must not be paired."""
    values = [evaluation["accuracy"] for evaluation in evaluations]
    if len(values) < 2 or None in values:
        return None
    try:
        require_pairable(*evaluations)
    except DataError:
        # a fork or a resume has changed what is evaluated, or how
        return None
    first, last = values
    return first, last


def _unfinished_step(
    run: RunDirectory, metrics: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, float]]:
    """Yield metrics from the stored responses of a step that ended before it was logged."""
    step = max((record["step"] for record in metrics), default=0) + 1
    if not run.rollouts(step).is_file():
        return
    groups_on_disk = read_groups(run, step)
    decided = [
        (entry.group, entry.outcome) for entry in groups_on_disk if entry.outcome != "excess"
    ]
    groups = Counter(entry.outcome for entry in groups_on_disk)
    tokens: Counter[str] = Counter()
    for entry in groups_on_disk:
        tokens[entry.outcome] += entry.group.num_tokens
    if decided:
        yield {"step": step, **rollout_metrics(decided, groups, tokens, shortfall=0)}


def _with_responses(
    case: DiagnosedFinding, rule: Rule, tables: Mapping[int, Path]
) -> DiagnosedFinding:
    """Add the problems and a response that show a finding, if tables are stored."""
    if rule.response is None:
        return case
    first, last = case.finding.steps
    problems: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    example = ""
    num_rows = 0
    newest_first = [step for step in sorted(tables, reverse=True) if first <= step <= last]
    unread = newest_first[:WINDOW]
    for step in newest_first[:WINDOW]:
        unread.remove(step)
        if not tables[step].is_file():
            continue  # a run that trains keeps the last ones (log.rollouts=last:N)
        for row in iterate_rows(tables[step]):
            num_rows += 1
            if rule.response(row):
                problems[row["problem_id"]] += 1
                errors.update(filter(None, [rule.reason(row)]))
                example = example or shorten(one_line(row["response"]), _SHOWN_CHARS, keep="end")
        if num_rows >= MAX_ROWS:
            break
    error = errors.most_common(1)[0][0] if errors else ""
    return replace(
        case,
        problems=tuple(problems.most_common(MAX_PROBLEMS)),
        responses=problems.total(),
        has_unread=bool(unread),
        example=example,
        error=error,
    )
