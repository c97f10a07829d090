"""Rules over the episodes of a run: failures of the environment, episodes that are cut, and tool calls."""

import json
from collections.abc import Mapping
from typing import Any

from dapo.config import Config
from dapo.training.rules.finding import Symptom
from dapo.training.rules.history import LONG, MIN_STEPS, MetricHistory

ENVIRONMENT_ERRORS = 0.05  # the fraction of episodes without an answer of their environment above which a run warns
CUT = 0.9  # the fraction of episodes that are cut above which a run warns
TOOL_ERRORS = 0.9  # the fraction of tool calls that fail above which a run warns


def environment_errors(history: MetricHistory, config: Config) -> Symptom | None:
    """The environment fails in many episodes."""
    errors, episodes = history.total("rollout/environment_errors"), _episodes(history, config)
    if history.steps < MIN_STEPS or errors <= ENVIRONMENT_ERRORS * episodes:
        return None
    return Symptom(
        f"{errors / max(1, episodes):.0%} of the episodes have no verdict, and train nothing: the environment fails in "
        "them",
        history.means("rollout/environment_errors"),
        advice="correct the environment: the reason is below; if calls exceed their time, raise environment.timeout_s",
    )


def episodes_cut(history: MetricHistory, config: Config) -> Symptom | None:
    """The environment ends hardly any episode, and few reach the limit of tokens."""
    cut, truncated = history.rate("rollout/episodes_cut_fraction"), history.mean("rollout/truncated_fraction") or 0.0
    if cut <= CUT or truncated > cut / 2:  # `truncation` reports a limit of tokens
        return None
    limit = config.environment.max_turns
    return Symptom(
        f"{cut:.0%} of the episodes are cut, most of them after {limit} turns, the limit: they are rewarded before "
        "they have ended",
        history.means("rollout/episodes_cut_fraction", "rollout/turns_mean", "rollout/truncated_fraction"),
        (f"environment.max_turns={min(2 * limit, 1000)}",),
        advice="or let the environment end an episode that cannot be solved any more (done=True)",
    )


def no_tool_calls(history: MetricHistory, config: Config) -> Symptom | None:
    """There are tools, and no episode calls one."""
    if history.steps < MIN_STEPS or history.mean("rollout/tool_calls") is None or history.total("rollout/tool_calls"):
        return None
    called_before = any(history.values("rollout/tool_calls", LONG))
    if not called_before and not config.environment.tools:
        return None  # an environment need not have tools
    result = "any more: the policy has learned to do without" if called_before else "so they change nothing"
    return Symptom(
        f"no episode calls a tool{' ' if called_before else ', '}{result}",
        history.means("rollout/tool_calls", "rollout/turns_mean"),
        advice="describe in data.instruction when to call one, with an example of a call; a form that the model never "
        "samples cannot be learned from rewards alone",
    )


def tool_errors(history: MetricHistory, config: Config) -> Symptom | None:
    """Nearly all tool calls fail."""
    calls, errors = history.total("rollout/tool_calls"), history.total("rollout/tool_errors")
    if history.steps < MIN_STEPS or errors <= TOOL_ERRORS * calls:
        return None
    return Symptom(
        f"{errors / calls:.0%} of the tool calls fail, and the policy reads only their errors",
        history.means("rollout/tool_calls", "rollout/tool_errors"),
        advice="read the errors in the responses below: a tool that raises, or calls whose arguments do not fit; "
        "an example of a call in data.instruction shows the form",
    )


def is_cut(row: Mapping[str, Any]) -> bool:
    """Whether the environment did not end the episode in a row of the rollout table."""
    return bool(_episode(row).get("is_cut"))


def has_environment_error(row: Mapping[str, Any]) -> bool:
    """Whether the environment failed in the episode in a row."""
    return _episode(row).get("error") is not None


def has_tool_error(row: Mapping[str, Any]) -> bool:
    """Whether a tool call of the episode in a row failed."""
    return bool(_episode(row).get("tool_errors"))


def calls_no_tool(row: Mapping[str, Any]) -> bool:
    """Whether the episode in a row calls no tool."""
    return _episode(row).get("tool_calls") == 0


def _episode(row: Mapping[str, Any]) -> dict[str, Any]:
    found = json.loads(row.get("episode") or "{}")
    return found if isinstance(found, dict) else {}


def _episodes(history: MetricHistory, config: Config) -> float:
    undecided = history.total("rollout/groups_excess", "rollout/groups_aborted")
    return (history.total("rollout/groups_generated") - undecided) * config.rollout.group_size
