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
from dapo.types import Episode, Generation, Group, Verdict

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
    outcomes = [outcome for _, outcome in decided]
    trained_groups = [group for group, outcome in decided if outcome == "trained"]
    generations = [generation for group in groups for generation in group.generations]
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    valid = [verdict for verdict in verdicts if verdict.error is None]
    lengths = [generation.num_sampled for generation in generations]
    # with observations
    parts = [part for generation in generations for part in generation.conversations]
    num_tokens = sum(len(part.token_ids) for part in parts)
    shared = 0
    for group in groups:
        shared += shared_tokens([generation.token_ids for generation in group.generations])
    metrics: dict[str, float] = {
        "reward/mean": _mean(_rewards(groups)),
        "reward/trained_mean": _mean(_rewards(trained_groups)),
        "reward/score_mean": _mean([verdict.score for verdict in valid]),
        "rollout/keep_rate": _fraction(outcomes, "trained"),
        "rollout/all_correct_fraction": _fraction(map(common_verdict, groups), True),
        "rollout/all_wrong_fraction": _fraction(map(common_verdict, groups), False),
        "rollout/response_tokens_mean": _mean(lengths),
        "rollout/response_tokens_max": max(lengths, default=0),
        "rollout/truncated_fraction": _fraction(
            [generation.finish for generation in generations], "length"
        ),
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
    pass_rates = list(signal_pass_rates(trained_groups))
    if pass_rates:
        metrics["rollout/trained_pass_rate_mean"] = _mean(pass_rates)
    metrics |= _component_metrics(valid)
    for kind, counts in (("groups", group_counts), ("tokens", token_counts)):
        metrics[f"rollout/{kind}_generated"] = sum(counts.values())
        for outcome, count in counts.items():
            metrics[f"rollout/{kind}_{outcome}"] = count
    return metrics


def _rewards(groups: Iterable[Group]) -> list[float]:
    """Return the shaped rewards of the responses that have one."""
    return [reward for group in groups for reward in group.rewards if reward is not None]


def _component_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Compute the mean of each part of a combined reward, over the responses that have it."""
    scores: dict[str, list[float]] = {}
    for verdict in verdicts:
        for name, score in verdict.components.items():
            scores.setdefault(name, []).append(score)
    # trackers do not take a colon
    return {
        f"reward/component/{name.replace(':', '.')}": _mean(values)
        for name, values in scores.items()
    }


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Compute the mean number of turns, and count tool calls, failures, cut episodes and errors."""
    metrics = {
        "rollout/turns_mean": _mean([episode.num_turns for episode in episodes]),
        "rollout/episodes_cut_fraction": _mean([episode.is_cut for episode in episodes]),
        "rollout/environment_errors": sum(episode.error is not None for episode in episodes),
        "rollout/tool_calls": sum(episode.tool_calls for episode in episodes),
        "rollout/tool_errors": sum(episode.tool_errors for episode in episodes),
    }
    agent_counts = [episode.counts for episode in episodes if episode.counts]
    if agent_counts:
        for name, metric in _AGENT_COUNTS.items():
            metrics[f"rollout/{metric}"] = sum(counts.get(name, 0) for counts in agent_counts)
        # the only mean of these
        metrics["rollout/branches_mean"] /= len(agent_counts)
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
    if len(correct) > 1 and len(set(correct)) == 1:
        return correct[0]
    return None


def signal_pass_rates(groups: Iterable[Group]) -> Iterator[float]:
    """Yield the fraction of correct responses of each group that has both kinds (Eq. 11).

    Without dynamic sampling the batch also has groups without a signal, whose advantages are 0:
    leaving them out makes the rates comparable with a run that drops them.
    """
    for group in groups:
        correct = [verdict.correct for verdict in group.verdicts if verdict.error is None]
        num_correct = sum(map(bool, correct))
        if None not in correct and 0 < num_correct < len(correct):
            yield num_correct / len(correct)


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
    if not texts:
        return {"rollout/reflection_fraction": 0.0}
    num_matches = 0
    for part in _parts(texts):
        matches = pc.match_substring_regex(part, REFLECTION, ignore_case=True)
        num_matches += pc.sum(matches).as_py()
    return {"rollout/reflection_fraction": num_matches / len(texts)}


def _parts(texts: Sequence[str]) -> Iterator[pa.Array]:
    """Yield texts in parts for native search, so that other threads run between them."""
    for start in range(0, len(texts), _TEXTS_PER_SEARCH):
        part = texts[start : start + _TEXTS_PER_SEARCH]
        yield pa.array(map(storable, part), pa.large_string())


def staleness_metrics(groups: Sequence[Group], *, version: int) -> dict[str, float]:
    """Compute mean, minimum and maximum age, in steps, of the weights that sampled each token."""
    tokens: Counter[int] = Counter()  # by the age of their weights
    for group in groups:
        for generation in group.generations:
            for sampler, count in generation.tokens_by_version.items():
                tokens[version - sampler] += count
    if not tokens:
        return {}
    total_age = sum(age * count for age, count in tokens.items())
    return {
        "rollout/staleness_mean": total_age / tokens.total(),
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
    means = {}
    for name, numbers in values.items():
        means[name] = _combine(metric_of(name).over_updates, numbers, weights[name])
    # half the mean square of the log ratios, where they are small
    if updates and "loss/approx_kl" in updates[-1]:
        means["loss/movement"] = math.sqrt(2 * max(updates[-1]["loss/approx_kl"], 0.0))
    return means


def _weight(over_updates: str, update: Mapping[str, float]) -> float:
    """Return the number of tokens in an update's mean over tokens; 1 for other metrics."""
    if not over_updates.startswith("mean over tokens"):
        return 1.0
    num_tokens = update["optim/update_tokens"]
    if over_updates.endswith("at the upper clip"):
        return num_tokens * update["loss/clip_high_fraction"]
    return num_tokens


def _combine(over_updates: str, values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the metric of a step from those of its updates, and their weights in a mean."""
    if over_updates == "sum":
        return fsum(values)
    if over_updates == "max":
        return max(values)
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
    texts: list[str] = []
    generations: list[Generation] = []
    for group in groups:
        texts += group.texts
        generations += group.generations
    turns = [last_turn(generation.token_ids, generation.sampled) for generation in generations]
    is_looping = looping(turns, [generation.finish for generation in generations])
    num_many_answers = 0
    for part in _parts(texts):
        num_answers = pc.count_substring_regex(part, ANSWER_MARK)
        num_many_answers += pc.sum(pc.greater_equal(num_answers, MANY_ANSWERS)).as_py()
    counts = {
        "rollout/looping_fraction": int(is_looping.sum()),
        "rollout/many_answers_fraction": num_many_answers,
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
        end = len(response)
        if finish == "stop":
            end -= 1  # without the end token
        tail = np.asarray(response[max(0, end - width) : end])
        lengths[row] = len(tail)
        if len(tail):
            tails[row, width - len(tail) :] = tail
    is_looping = np.zeros(len(responses), dtype=bool)
    for period in range(1, MAX_PERIOD + 1):
        span = max(REPEATS * period, MIN_LOOP_TOKENS)
        # the last token alone tells most responses apart
        may_loop = (lengths >= span) & (tails[:, -1] == tails[:, -1 - period])
        rows = np.flatnonzero(~is_looping & may_loop)
        if len(rows):
            tail = tails[rows, width - span :]  # [number of rows, span]
            is_looping[rows] = (tail[:, period:] == tail[:, :-period]).all(axis=1)
    return is_looping


def has_many_answers(text: str) -> bool:
    """Return True if a response marks MANY_ANSWERS or more answers."""
    return len(re.findall(ANSWER_MARK, text)) >= MANY_ANSWERS
