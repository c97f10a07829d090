"""All rules, and the findings of a run. docs/doctor.md explains each rule, its threshold and the
threshold's source.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from dapo.config import Config
from dapo.runs.rollout_table import ranges_of
from dapo.sampling.rollout_metrics import has_many_answers, last_turn, looping
from dapo.training.rules import agent_rules, outcome_rules, sampling_rules, update_rules
from dapo.training.rules.finding import SEVERITIES, Finding, Rule
from dapo.training.rules.history import MetricHistory
from dapo.training.rules.sampling_rules import starvation

Row = Mapping[str, Any]


def _is_audit_gap(row: Row) -> bool:
    """Return True if the reward accepts a response that the audit refuses or scores lower."""
    score = row["score"]
    audit_score = row.get("audit_score")
    if score is None or audit_score is None:
        return False
    if row["correct"] is not None and row["audit_correct"] is not None:
        return bool(row["correct"]) and not row["audit_correct"]
    return bool(score > audit_score)


def _has_many_answers(row: Row) -> bool:
    return has_many_answers(row["response"])


def _lacks_verdict(row: Row) -> bool:
    return (row["error"] or row.get("audit_error")) is not None


def _is_all_wrong(row: Row) -> bool:
    """Return True if a response's group is all wrong; its advantage is 0 if every group trains."""
    return row["outcome"] == "all_wrong" or (row["correct"] is False and row["advantage"] == 0)


def _is_looping(row: Row) -> bool:
    return bool(looping([last_turn(row["response_ids"], ranges_of(row))], [row["finish"]])[0])


def _episode(row: Row) -> Row:
    episode = json.loads(row.get("episode") or "{}")
    return episode if isinstance(episode, dict) else {}


def _count(row: Row, name: str) -> int:
    """Return a count of an agent's episode."""
    counts = _episode(row).get("counts")
    return int(counts.get(name, 0)) if isinstance(counts, dict) else 0


_FEW_SIGNALS: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("too_easy", lambda row: row["outcome"] == "all_correct"),
    ("equal_rewards", lambda row: not row["advantage"]),
    ("filtered", lambda row: row["outcome"] == "filtered"),
)
RULES = (
    Rule("audit_gap", "error", outcome_rules.audit_gap, _is_audit_gap),
    Rule("overfit", "error", outcome_rules.overfit),
    Rule("verifier_errors", "error", sampling_rules.verifier_errors, _lacks_verdict),
    Rule(
        "environment_errors",
        "error",
        outcome_rules.environment_errors,
        lambda row: bool(_episode(row).get("error")),
    ),
    Rule("skipped_updates", "error", update_rules.skipped_updates),
    Rule("sampler_gap", "error", update_rules.sampler_gap),
    Rule("lr_too_high", "error", update_rules.lr_too_high),
    Rule("entropy_collapse", "error", update_rules.entropy_collapse, needs_rewards=True),
    Rule("entropy_explosion", "error", update_rules.entropy_explosion),
    Rule(
        "many_answers", "error", sampling_rules.many_answers, _has_many_answers, needs_rewards=True
    ),
    Rule("too_hard", "warning", sampling_rules.too_hard, _is_all_wrong, needs_rewards=True),
    *(
        Rule(name, "warning", partial(starvation, name=name), shows, needs_rewards=True)
        for name, shows in _FEW_SIGNALS
    ),
    Rule(
        "one_problem",
        "warning",
        sampling_rules.one_problem,
        lambda row: row["outcome"] == "trained",
    ),
    Rule("truncation", "warning", sampling_rules.truncation, lambda row: row["finish"] == "length"),
    Rule(
        "episodes_cut",
        "warning",
        outcome_rules.episodes_cut,
        lambda row: bool(_episode(row).get("is_cut")),
    ),
    Rule(
        "no_tool_calls",
        "warning",
        outcome_rules.no_tool_calls,
        lambda row: _episode(row).get("tool_calls") == 0,
    ),
    Rule(
        "tool_errors",
        "warning",
        outcome_rules.tool_errors,
        lambda row: bool(_episode(row).get("tool_errors")),
    ),
    Rule(
        "empty_answers",
        "warning",
        agent_rules.empty_answers,
        lambda row: bool(_count(row, "unanswered")),
    ),
    Rule(
        "refused_requests",
        "warning",
        agent_rules.refused_requests,
        lambda row: bool(_count(row, "refused")),
    ),
    Rule(
        "masked_tokens",
        "warning",
        agent_rules.masked_tokens,
        lambda row: bool(_count(row, "masked_tokens")),
    ),
    Rule(
        "rewritten_history",
        "warning",
        agent_rules.rewritten_history,
        lambda row: bool(_count(row, "rewritten")),
        lambda row: agent_rules.first_rewritten(_episode(row).get("calls")),
    ),
    Rule("slow_agent", "warning", agent_rules.slow_agent),
    Rule("overridden_requests", "note", agent_rules.overridden_requests),
    Rule(
        "length_explosion",
        "warning",
        sampling_rules.length_explosion,
        lambda row: row["finish"] != "aborted",
    ),
    Rule("length_collapse", "warning", sampling_rules.length_collapse),
    Rule("repeated_text", "warning", sampling_rules.repeated_text, _is_looping),
    Rule("gradient_spike", "warning", update_rules.gradient_spike),
    Rule("slow_verifier", "warning", outcome_rules.slow_verifier),
    Rule("too_stale", "warning", outcome_rules.too_stale),
    Rule("stale_work", "warning", outcome_rules.stale_work),
    Rule("idle_engine", "note", outcome_rules.idle_engine),
    Rule("idle_trainer", "note", outcome_rules.idle_trainer),
    Rule("lr_too_low", "warning", update_rules.lr_too_low),
    Rule("idle_techniques", "note", update_rules.idle_techniques, needs_rewards=True),
)


def active_findings(history: MetricHistory, config: Config) -> list[Finding]:
    """Return the findings at the history's last step, the most severe first."""
    findings = [finding for rule in RULES if (finding := rule.check(history, config)) is not None]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


class LiveRules:
    """The rules over the last steps of a run that trains.

    Checkpoints hold none of its state: a resumed run reads its logged metrics, and so reports no
    finding twice.
    """

    def __init__(self, config: Config, logged: Iterable[Mapping[str, Any]] = ()) -> None:
        """`logged` are the lines of `metrics.jsonl` of the steps before."""
        self._config = config
        self._history = MetricHistory()
        self._reported: set[str] = set()
        for record in logged:
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> tuple[list[Finding], int]:
        """Add a step's metrics; return new findings and the number of active ones without notes."""
        self._history.add(record)
        findings = [
            finding
            for finding in active_findings(self._history, self._config)
            if finding.severity != "note"
        ]
        new = [finding for finding in findings if finding.name not in self._reported]
        self._reported |= {finding.name for finding in new}
        return new, len(findings)
