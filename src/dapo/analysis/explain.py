"""Explains a group of a finished step by its stored verdicts, rewards and advantages.

`explain_group` makes the value that `dapo explain` prints and the page of a group shows. Nothing is
computed again that a model or a verifier has to be loaded for. Imports no torch.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev, stdev
from typing import Any

from dapo.algo.estimator_table import ESTIMATORS, STD_EPS
from dapo.analysis.agent_calls import calls_of, conversations_of
from dapo.analysis.stored_groups import no_responses, require_consistent, rows_with_tokens
from dapo.config.load import read_options
from dapo.config.option_entries import flatten
from dapo.core.errors import DataError
from dapo.core.files import damage_of
from dapo.core.ranges import Ranges
from dapo.environments.starts import environment_seed
from dapo.runs.directory import RunDirectory
from dapo.runs.rollout_table import episode_of, ranges_of, read_rollouts
from dapo.types import Episode, Problem

_GROUP_COLUMNS = (
    "step",
    "group_id",
    "problem_id",
    "source",
    "question",
    "prompt",
    "prompt_tokens",
    "answer",
    "outcome",
)
"""The columns of the table that are equal for all responses of a group."""

MAX_STEPS = 20
"""The number of steps in which `instructive_step` looks for a group that trained."""

_NOT_DECIDED = {
    "excess": "the batch was full before this group; its problem went back to the stream",
    "aborted": "the batch was full before all of its responses had ended",
    "stale": (
        "its first token was older than max_staleness when the batch closed; it began again in its"
        " place"
    ),
}
"""The reasons for outcomes that do not depend on verdicts."""

Row = Mapping[str, Any]


def explain_group(run_dir: str | Path, step: int, group: int | None = None) -> dict[str, Any]:
    """Explain by stored values why a group trained or not, and its advantages.

    `step` is a finished one, from 1, whose responses are stored; `group` is the group's id,
    `group_id` in the table of responses (None: of the groups that trained, one with right and wrong
    responses, of these the one with the largest standard deviation of rewards, then the shortest).
    Nothing is written.

    Returns JSON values, described in docs/view.md. Raises CheckpointError without such a run, and
    DataError without such a group or for damaged files.
    """
    directory = RunDirectory.open(run_dir)
    path = directory.rollouts(step)
    if not os.path.lexists(path):
        raise no_responses(directory, f"step {step}")
    options = dict(flatten(read_options(directory.config_of(step))))
    groups = _rewards_by_group(path)
    if group is None:
        chosen, reason = _select_group(groups)
    elif group in groups:
        chosen = group
        reason = None
    else:
        ids = ", ".join(map(str, groups))
        raise DataError(f"step {step} of {directory.path} has no group {group}; its groups: {ids}")
    ids_in_order = list(groups)
    position = ids_in_order.index(chosen)
    with damage_of(path):
        rows = rows_with_tokens(path, groups=[chosen])
        require_consistent(rows)
        rows.sort(key=lambda row: row["sample"])
        explained = _describe(rows, groups, options)
    return {
        "run": str(directory.path),
        "chosen_because": reason,
        "previous": ids_in_order[position - 1] if position > 0 else None,
        "next": ids_in_order[position + 1] if position + 1 < len(ids_in_order) else None,
        **explained,
    }


def instructive_step(run_dir: str | Path) -> int:
    """Return the newest step with stored responses of which a group trained.

    The newest step with stored responses if none of the last MAX_STEPS trained a group; 1 without
    stored responses.
    """
    tables = RunDirectory.open(run_dir).rollout_tables()
    newest_first = sorted(tables, reverse=True)
    for step in newest_first[:MAX_STEPS]:
        with damage_of(tables[step]):
            outcomes = read_rollouts([tables[step]], ["outcome"])["outcome"].to_pylist()
        if "trained" in outcomes:
            return step
    return max(tables, default=1)


def _rewards_by_group(path: Path) -> dict[int, list[Row]]:
    """Return outcome, verdict, reward and length of each response of a step, by group."""
    groups: dict[int, list[Row]] = {}
    for row in read_rollouts(
        [path], ["group_id", "outcome", "correct", "reward", "response_tokens"]
    ).to_pylist():
        groups.setdefault(row["group_id"], []).append(row)
    if not groups:
        raise DataError(f"{path} holds no responses")
    return groups


def _select_group(groups: Mapping[int, Sequence[Row]]) -> tuple[int, str]:
    """Return the id of the group to explain by default, and a sentence with the reason."""
    trained = [group for group, rows in groups.items() if rows[0]["outcome"] == "trained"]
    if not trained:
        return next(iter(groups)), "the first group, because no group of the step trained"

    def is_mixed(group: int) -> bool:
        verdicts = {row["correct"] for row in groups[group]}
        return {True, False} <= verdicts

    def rank(group: int) -> tuple[bool, float, int, int]:
        num_tokens = sum(row["response_tokens"] for row in groups[group])
        return is_mixed(group), pstdev(_rewards(groups[group])), -num_tokens, -group

    chosen = max(trained, key=rank)
    reason = f"of {len(trained)} groups that trained, the one with the largest spread of rewards"
    if is_mixed(chosen):
        reason += " among right and wrong responses"
    return chosen, reason


def _rewards(rows: Sequence[Row]) -> list[float]:
    """Return the rewards of the responses that have a verdict; [0] without any."""
    return [row["reward"] for row in rows if row["reward"] is not None] or [0.0]


def _describe(
    rows: Sequence[Row], groups: Mapping[int, Sequence[Row]], options: Mapping[str, Any]
) -> dict[str, Any]:
    first = rows[0]
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    responses = [_response(row, options) for row in rows]
    eq9 = None
    notes = []
    if first["outcome"] == "trained":
        reason = _why_no_formula(options)
        if reason is None:
            eq9 = _eq9(first["group_id"], groups, options)
        else:
            notes.append(reason)
    return {
        **{name: first.get(name) for name in _GROUP_COLUMNS},
        "environment_seed": _environment_seed(first, options),
        "fields": None if first["fields"] is None else json.loads(first["fields"]),
        "reward_mean": fmean(rewards) if rewards else None,
        "reward_std": stdev(rewards) if len(rewards) > 1 else None,
        "eq11": _eq11(rows, options),
        "eq13": _eq13(options),
        "eq9": eq9,
        "responses": responses,
        "notes": notes,
    }


def _environment_seed(row: Row, options: Mapping[str, Any]) -> int | None:
    """Return the seed of the environment or agent of a group's episodes; None without one."""
    seed = options.get("train.seed")
    if row.get("episode") is None or type(seed) is not int:
        return None
    return environment_seed(seed, Problem(row["problem_id"], prompt="", answer=""))


def _why_no_formula(options: Mapping[str, Any]) -> str | None:
    """Return why Eq. 9 does not give the stored advantages; None if it does."""
    estimator = options.get("advantage.estimator")
    if estimator not in ESTIMATORS:
        return f"advantage.estimator={estimator} is not an estimator of this version of dapo"
    if estimator == "gae":
        return (
            "advantages compare each token with the value of a critic, which is not stored"
            " (advantage.estimator=gae): each response has the mean over its tokens"
        )
    if options.get("loss.kl_in") == "reward" and options.get("loss.kl_coef"):
        return (
            "advantages are of rewards from which the divergence to the reference was subtracted"
            " (loss.kl_in=reward); the subtracted amounts are not stored"
        )
    return None


def _eq9(
    group: int, groups: Mapping[int, Sequence[Row]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the numbers that turn a group's rewards into advantages."""
    name = options["advantage.estimator"]
    estimator = ESTIMATORS[name]
    rewards_by_group = {}
    for group_id, rows in groups.items():
        if rows[0]["outcome"] == "trained":
            rewards_by_group[group_id] = [
                row["reward"] for row in rows if row["reward"] is not None
            ]
    compared = rewards_by_group[group]
    if estimator.mean_over == "batch":
        compared = [reward for rewards in rewards_by_group.values() for reward in rewards]
    differences = compared
    if estimator.std_over == "batch" and estimator.mean_over == "group":
        differences = []
        for rewards in rewards_by_group.values():
            mean = fmean(rewards)
            differences += [reward - mean for reward in rewards]
    scale: Any = "std" if estimator.std_over else "none"
    if name == "group":
        scale = options.get("advantage.scale")
    players = ("environment.name", "environment.tools", "environment.command")
    plays_episodes = any(options.get(name) for name in players)
    return {
        "estimator": name,
        "mean": fmean(compared),
        "rewards": len(compared),
        "std": stdev(differences) if len(differences) > 1 else 0.0,
        "differences": len(differences),
        "scale": scale,
        "eps": STD_EPS,
        "coef": options.get("reward.coef", 1.0),
        "credit": options.get("environment.credit") if plays_episodes else None,
    }


def _eq11(rows: Sequence[Row], options: Mapping[str, Any]) -> dict[str, Any]:
    outcome = rows[0]["outcome"]
    scores = [row["score"] for row in rows if row["error"] is None]
    return {
        "kept": outcome == "trained",
        "why": _why(rows, options),
        "group_size": len(rows),
        "valid": len(scores),
        "correct": sum(row["correct"] is True for row in rows),
        "errors": len(rows) - len(scores),
        "lowest_score": min(scores, default=None),
        "highest_score": max(scores, default=None),
    }


def _why(rows: Sequence[Row], options: Mapping[str, Any]) -> str:
    """Return the reason for a group's outcome, as a sentence with its numbers."""
    valid = [row for row in rows if row["error"] is None]
    scores = [row["score"] for row in valid]
    num_correct = sum(row["correct"] is True for row in valid)
    num_valid = len(valid)
    outcome = rows[0]["outcome"]
    if outcome == "invalid":
        verb = "has" if num_valid == 1 else "have"
        return (
            f"{num_valid} of its {len(rows)} responses {verb} a verdict: there is nothing to"
            " compare"
        )
    if outcome in _NOT_DECIDED:
        return _NOT_DECIDED[outcome]
    if outcome == "all_correct":
        return f"all {num_valid} responses are right: no response is better than another"
    if outcome == "all_wrong":
        return f"all {num_valid} responses are wrong: no response is better than another"
    if outcome == "zero_variance":
        score = scores[0] if scores else 0
        return f"all {num_valid} scores are {score:g}: no response is better than another"
    has_scores_only = any(row["correct"] is None for row in valid)
    compares_scores = has_scores_only or options.get("dynamic_sampling.metric") == "score"
    if compares_scores:
        signal = f"its scores range from {min(scores):g} to {max(scores):g}"
    else:
        verb = "is" if num_correct == 1 else "are"
        signal = f"{num_correct} of its {num_valid} responses {verb} right"
    if outcome == "filtered":
        # an older run had thresholds under this name
        name = _filter_of(options) or "dynamic_sampling.filter"
        return f"{signal}, and {name} refuses the group"
    if options.get("dynamic_sampling.enabled") is False:
        return f"{signal}; dynamic_sampling.enabled=false trains on every group"
    condition = "they differ" if compares_scores else f"0 < {num_correct} < {num_valid}"
    reason = f"{signal}: {condition}, so the group carries a signal"
    if _filter_of(options):
        reason += f", and {_filter_of(options)} keeps it"
    return reason


def _filter_of(options: Mapping[str, Any]) -> str:
    """Return the options that filter groups besides Eq. 11; empty without any."""
    names = []
    if options.get("dynamic_sampling.filter") is not None:
        names.append("dynamic_sampling.filter")
    if options.get("dynamic_sampling.min_spread"):
        names.append("dynamic_sampling.min_spread")
    if any(bound is not None for bound in options.get("dynamic_sampling.mean_between") or ()):
        names.append("dynamic_sampling.mean_between")
    return " and ".join(names)


def _eq13(options: Mapping[str, Any]) -> dict[str, Any]:
    is_soft = options.get("overlong.mode") == "soft"
    return {
        "mode": options.get("overlong.mode"),
        "max_length": options.get("rollout.max_response_tokens"),
        "buffer": options.get("overlong.buffer_tokens") if is_soft else None,
        "penalty": options.get("overlong.penalty") if is_soft else None,
    }


def _response(row: Row, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored columns of a response, its penalty (Eq. 13), and its turns."""
    ranges = ranges_of(row)
    episode = episode_of(row)
    num_tokens = len(row["response_ids"])
    num_stored = sum(len(part["token_ids"]) for part in conversations_of(row))
    is_masked = options.get("overlong.mode") == "filter" and row["finish"] == "length"
    response = {
        name: value
        for name, value in row.items()
        if name not in (*_GROUP_COLUMNS, "fields", "episode", "branches")
    }
    response["components"] = None if row["components"] is None else json.loads(row["components"])
    response["response_ids"] = list(row["response_ids"])
    response["engine_logprobs"] = list(row["engine_logprobs"]) or None
    response["sampled"] = ranges
    response["observed_tokens"] = num_stored - row["response_tokens"]
    response["penalty"] = None if row["error"] is not None else row["reward"] - row["score"]
    response["trains"] = row["advantage"] is not None and not is_masked
    response["turns"] = None
    response["calls"] = None
    response["episode"] = None
    if episode is not None:
        if episode.calls:
            response["calls"] = calls_of(row, episode)
        else:
            response["turns"] = _turns(episode, ranges or ((0, num_tokens),))
        response["episode"] = {
            "turns": episode.num_turns,
            "is_cut": episode.is_cut,
            "tool_calls": episode.tool_calls,
            "tool_errors": episode.tool_errors,
            "correct": episode.correct,
            "ending": episode.ending,
            "counts": dict(episode.counts),
        }
    return response


def _turns(episode: Episode, ranges: Ranges) -> list[dict[str, Any]]:
    """Return the messages of an episode: turns with rewards, and observations.

    A turn of an episode that ended with an error has no reward. Tokens are None for observations,
    and for all messages if the sampled ranges are not one for each turn.
    """
    has_range_per_turn = len(ranges) == episode.num_turns
    turns = []
    number = 0
    for message in episode.messages:
        turn: dict[str, Any] = {
            "role": message["role"],
            "text": message["content"],
            "tokens": None,
            "reward": None,
        }
        if message["role"] == "assistant":
            if has_range_per_turn:
                turn["tokens"] = ranges[number]
            if number < len(episode.rewards):
                turn["reward"] = episode.rewards[number]
            number += 1
        turns.append(turn)
    return turns
