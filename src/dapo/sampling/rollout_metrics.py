"""Computes the metrics of a step from its groups and updates, which `dapo.runs.metric_table`
describes.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import fsum
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dapo.policy.prefixes import sorted_prefixes, token_array
from dapo.runs.metric_table import metric_of
from dapo.runs.rollout_table import storable
from dapo.sampling.selection import Prediction
from dapo.types import Episode, Generation, Group

REFLECTION = (
    r"\b(wait|hold on|let me (re-?)?check|let's (re-?)?check|re-?check|double-?check|on second"
    r" thought|"
    r"re-?think|re-?consider|i made a mistake)\b"
)
"""The phrases that count as reflection (the paper's Table 2), upper or lower case."""


def rollout_metrics(
    decided: Sequence[tuple[Group, str]],
    group_counts: Mapping[Any, int],
    token_counts: Mapping[Any, int],
    *,
    shortfall: int,
) -> dict[str, float]:
    """Return the metrics of one step's generation: `reward/*` and most of `rollout/*`.

    Args:
        decided: The judged groups without the excess, with their outcomes: no metric may depend on
            the number of groups in flight when the batch closed.
        group_counts: All generated groups by outcome.
        token_counts: All generated response tokens by outcome.
        shortfall: The number of groups that a full batch would have in addition.
    """
    groups = [group for group, _ in decided]
    generations = [generation for group in groups for generation in group.generations]
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    valid = [verdict for verdict in verdicts if verdict.error is None]
    lengths = [generation.num_sampled for generation in generations]
    num_tokens = sum(  # with observations
        len(part.token_ids) for generation in generations for part in generation.conversations
    )
    shared = sum(
        shared_tokens([generation.token_ids for generation in group.generations])
        for group in groups
    )
    outcomes = [outcome for _, outcome in decided]
    shaped = [reward for group in groups for reward in group.rewards if reward is not None]
    trained = [
        r
        for group, outcome in decided
        if outcome == "trained"
        for r in group.rewards
        if r is not None
    ]
    metrics: dict[str, float] = {
        "reward/mean": _mean(shaped),
        "reward/trained_mean": _mean(trained),
        "reward/score_mean": _mean([verdict.score for verdict in valid]),
        "rollout/keep_rate": _fraction(outcomes, "trained"),
        "rollout/all_correct_fraction": _fraction(map(common_verdict, groups), True),
        "rollout/all_wrong_fraction": _fraction(map(common_verdict, groups), False),
        "rollout/response_tokens_mean": _mean(lengths),
        "rollout/response_tokens_max": max(lengths, default=0),
        "rollout/truncated_fraction": _fraction([g.finish for g in generations], "length"),
        "rollout/shared_token_fraction": shared / max(1, num_tokens),
        "rollout/entropy_estimate": -fsum(map(_logprob, generations)) / max(1, sum(lengths)),
        "rollout/verifier_errors": len(verdicts) - len(valid),
        "rollout/shortfall_groups": shortfall,
    }
    episodes = [generation.episode for generation in generations if generation.episode is not None]
    if episodes:
        metrics |= episode_metrics(episodes)
        metrics["rollout/observation_tokens"] = num_tokens - sum(lengths)
    if any(episode.counts for episode in episodes):
        metrics["rollout/branch_prompt_tokens"] = sum(map(_branch_prompt_tokens, groups))
    if any(verdict.correct is not None for verdict in valid):
        metrics["reward/accuracy"] = _mean([verdict.correct is True for verdict in valid])
    if pass_rates := list(
        signal_pass_rates(group for group, outcome in decided if outcome == "trained")
    ):
        metrics["rollout/trained_pass_rate_mean"] = _mean(pass_rates)
    for name in dict.fromkeys(name for verdict in valid for name in verdict.components):
        scores = [verdict.components[name] for verdict in valid if name in verdict.components]
        # trackers do not take a colon
        metrics[f"reward/component/{name.replace(':', '.')}"] = _mean(scores)
    for kind, counts in (("groups", group_counts), ("tokens", token_counts)):
        metrics[f"rollout/{kind}_generated"] = sum(counts.values())
        metrics.update({f"rollout/{kind}_{outcome}": count for outcome, count in counts.items()})
    return metrics


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Compute the mean number of turns, and count tool calls, failures, cut episodes and errors."""
    metrics = {
        "rollout/turns_mean": _mean([episode.num_turns for episode in episodes]),
        "rollout/episodes_cut_fraction": _mean([episode.is_cut for episode in episodes]),
        "rollout/environment_errors": sum(episode.error is not None for episode in episodes),
        "rollout/tool_calls": sum(episode.tool_calls for episode in episodes),
        "rollout/tool_errors": sum(episode.tool_errors for episode in episodes),
    }
    of_agents = [episode.counts for episode in episodes if episode.counts]
    if of_agents:
        totals = {name: sum(counts.get(name, 0) for counts in of_agents) for name in _AGENT_COUNTS}
        metrics["rollout/branches_mean"] = totals.pop("branches") / len(of_agents)
        metrics |= {f"rollout/{_AGENT_COUNTS[name]}": total for name, total in totals.items()}
    return metrics


def _branch_prompt_tokens(group: Group) -> int:
    """Return the number of tokens behind which the branches of a group's episodes begin."""
    branches = [branch for generation in group.generations for branch in generation.branches]
    own_prompts = [branch.prompt_ids for branch in branches if branch.prompt_ids is not None]
    num_plain = len(branches) - len(own_prompts)
    return sum(map(len, own_prompts)) + num_plain * len(group.prompt_ids)


_AGENT_COUNTS = {
    "branches": "branches_mean",
    "rewritten": "rewritten_histories",
    "retries": "retried_requests",
    "refused": "refused_requests",
    "overridden": "overridden_requests",
    "unanswered": "empty_answers",
    "masked_tokens": "masked_tokens",
    "tokens_behind_stop": "tokens_behind_stop",
}
"""The metrics of what is counted of an agent's episodes (`Episode.counts`)."""


def common_verdict(group: Group) -> bool | None:
    """Return True if all responses with a verdict are correct, False if all are wrong, else None.

    It depends on the verdicts, not on the outcome: without dynamic sampling such groups train, with
    advantages of 0.
    """
    correct = [verdict.correct for verdict in group.verdicts if verdict.error is None]
    return correct[0] if len(correct) > 1 and len(set(correct)) == 1 else None


def signal_pass_rates(groups: Iterable[Group]) -> Iterator[float]:
    """Yield the fraction of correct responses of each group that has both kinds (Eq. 11).

    Without dynamic sampling the batch also has groups without a signal, whose advantages are 0:
    leaving them out makes the rates comparable with a run that drops them.
    """
    for group in groups:
        correct = [verdict.correct for verdict in group.verdicts if verdict.error is None]
        if None not in correct and 0 < sum(map(bool, correct)) < len(correct):
            yield sum(map(bool, correct)) / len(correct)


def shared_tokens(responses: Sequence[Sequence[int]]) -> int:
    """Count the tokens in prefixes that responses share: all tokens less the distinct prefixes."""
    return sum(sorted_prefixes([token_array(tokens) for tokens in responses]).shared)


CHANCE_BINS = 5  # the number of equal bins for predicted chances


def chance_bin(chance: float) -> str:
    """Name the bin of a chance by its bounds in per cent: `60_80`, the lower bound included."""
    width = 100 // CHANCE_BINS
    low = min(int(chance * CHANCE_BINS), CHANCE_BINS - 1) * width
    return f"{low}_{low + width}"


def prediction_metrics(prediction: Prediction) -> dict[str, float]:
    """Compute the metrics of a step's selection: skipped problems, accuracy of predictions."""
    metrics = {
        "rollout/problems_skipped": prediction.skipped,
        "rollout/skipped_chance": prediction.skipped_chance,
    }
    bins: dict[str, list[tuple[float, bool]]] = {}
    for chance, had_signal in sorted(prediction.calibration):
        bins.setdefault(chance_bin(chance), []).append((chance, had_signal))
    for name, bin_entries in bins.items():
        chances, signals = zip(*bin_entries, strict=True)
        metrics[f"rollout/calibration_groups_{name}"] = len(bin_entries)
        metrics[f"rollout/calibration_chance_{name}"] = fsum(chances)
        metrics[f"rollout/calibration_signals_{name}"] = sum(signals)
    return metrics


def reflection_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """Compute the fraction of responses with a phrase of reflection."""
    texts = [text for group in groups for text in group.texts]
    num_matches = sum(
        pc.sum(pc.match_substring_regex(part, REFLECTION, ignore_case=True)).as_py()
        for part in _parts(texts)
    )
    return {"rollout/reflection_fraction": num_matches / len(texts) if texts else 0.0}


def _parts(texts: Sequence[str]) -> Iterator[pa.Array]:
    """Yield texts in parts for native search, so that other threads run between them."""
    for start in range(0, len(texts), _TEXTS_PER_SEARCH):
        yield pa.array(map(storable, texts[start : start + _TEXTS_PER_SEARCH]), pa.large_string())


def staleness_metrics(groups: Sequence[Group], *, version: int) -> dict[str, float]:
    """Compute mean, minimum and maximum age, in steps, of the weights that sampled each token."""
    tokens: Counter[int] = Counter()
    for group in groups:
        for generation in group.generations:
            for sampler, count in generation.tokens_by_version.items():
                tokens[version - sampler] += count
    if not tokens:
        return {}
    return {
        "rollout/staleness_mean": (
            sum(age * count for age, count in tokens.items()) / tokens.total()
        ),
        "rollout/staleness_min": min(tokens),
        "rollout/staleness_max": max(tokens),
    }


def mean_of_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of a step's updates by mean, sum or maximum (see the table of metrics).

    A mean over tokens is over all tokens of the step: updates with more tokens weigh more.
    """
    values: dict[str, list[float]] = {}
    weights: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            values.setdefault(name, []).append(value)
            weights.setdefault(name, []).append(_weight(metric_of(name).over_updates, update))
    means = {
        name: _combine(metric_of(name).over_updates, numbers, weights[name])
        for name, numbers in values.items()
    }
    # half the mean square of the log ratios, where they are small
    if updates and "loss/approx_kl" in updates[-1]:
        means["loss/movement"] = math.sqrt(2 * max(updates[-1]["loss/approx_kl"], 0.0))
    return means


def _weight(over_updates: str, update: Mapping[str, float]) -> float:
    """Return the number of tokens in an update's mean over tokens; 1 for other metrics."""
    if not over_updates.startswith("mean over tokens"):
        return 1.0
    at_upper_clip = over_updates.endswith("at the upper clip")
    return update["optim/update_tokens"] * (
        update["loss/clip_high_fraction"] if at_upper_clip else 1.0
    )


def _combine(over_updates: str, values: Sequence[float], weights: Sequence[float]) -> float:
    if over_updates in ("sum", "max"):
        return fsum(values) if over_updates == "sum" else max(values)
    return fmean(values, weights)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0


def _fraction(values: Iterable[object], target: object) -> float:
    return _mean([value == target for value in values])


def _logprob(generation: Generation) -> float:
    """Return the log-probability of all tokens that were sampled, in nats."""
    parts = generation.conversations
    return fsum(float(np.asarray(part.logprobs, np.float64).sum()) for part in parts)


ANSWER_MARK = r"(?im)\banswer\s*:|\\boxed\s*\{|####\s*-?[\d.,/]+\s*$"
"""The marks of an answer that dapo's verifiers read: `Answer:`, `\\boxed{`, or `####` and a number.
"""
MANY_ANSWERS = 3
"""Marked answers in a response from which they are too many: a response may repeat its answer once
to check it.
"""
REPEATS = 4  # repetitions of the same tokens at the end of a response from which it is a loop
MIN_LOOP_TOKENS = 24
MAX_PERIOD = 64  # the smallest number of tokens in a loop, and the largest in its repeated unit
_TEXTS_PER_SEARCH = 256


def response_metrics(groups: Iterable[Group]) -> dict[str, float]:
    """Compute `rollout/looping_fraction` and `rollout/many_answers_fraction`, without zeros."""
    judged = list(groups)
    texts = [text for group in judged for text in group.texts]
    generations = [generation for group in judged for generation in group.generations]
    counts = {
        "rollout/looping_fraction": int(
            looping(
                [last_turn(g.token_ids, g.sampled) for g in generations],
                [g.finish for g in generations],
            ).sum()
        ),
        "rollout/many_answers_fraction": sum(
            pc.sum(
                pc.greater_equal(pc.count_substring_regex(part, ANSWER_MARK), MANY_ANSWERS)
            ).as_py()
            for part in _parts(texts)
        ),
    }
    return {name: count / len(generations) for name, count in counts.items() if count}


def last_turn(token_ids: Sequence[int], sampled: Sequence[Sequence[int]] | None) -> Sequence[int]:
    """Return the last run of tokens that the policy sampled in a response with these ranges."""
    if sampled is None:
        return token_ids
    start, end = sampled[-1] if sampled else (0, 0)
    return token_ids[start:end]


def looping(responses: Sequence[Sequence[int]], finishes: Sequence[str]) -> np.ndarray:
    """Find responses that end in REPEATS repetitions of the same tokens before the end token.

    Returns `[n]` booleans.

    Only the last REPEATS * MAX_PERIOD tokens are read, so the work does not grow with the length of
    responses.
    """
    width = REPEATS * MAX_PERIOD
    tails = np.full((len(responses), width), -1, dtype=np.int64)  # [n, width]
    lengths = np.zeros(len(responses), dtype=np.int64)
    for row, (response, finish) in enumerate(zip(responses, finishes, strict=True)):
        end = len(response) - (finish == "stop")
        tail = np.asarray(response[max(0, end - width) : end])
        lengths[row] = len(tail)
        if len(tail):
            tails[row, width - len(tail) :] = tail
    is_looping = np.zeros(len(responses), dtype=bool)
    for period in range(1, MAX_PERIOD + 1):
        span = max(REPEATS * period, MIN_LOOP_TOKENS)
        rows = np.flatnonzero(
            ~is_looping & (lengths >= span) & (tails[:, -1] == tails[:, -1 - period])
        )
        if len(rows):
            tail = tails[rows, width - span :]
            is_looping[rows] = (tail[:, period:] == tail[:, :-period]).all(axis=1)
    return is_looping


def has_many_answers(text: str) -> bool:
    """Return True if a response marks MANY_ANSWERS or more answers."""
    return len(re.findall(ANSWER_MARK, text)) >= MANY_ANSWERS
