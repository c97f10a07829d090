"""Conditions that end a run: searches without enough groups, skipped updates, a collapsed entropy.

A short batch trains. A step without any group changes no weight; small batches have such steps by
chance, so a run that has trained tolerates fewer than MAX_EMPTY_STEPS of them in a row. If every
response of the whole search was correct, the problems are solved, and the run is evaluated, saved
and finished. Before any step has trained that is an error: nothing can be learned, or the reward
accepts everything.
"""

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dapo.config import Config, DataConfig, RewardConfig
from dapo.config.lengths import limit_of_response
from dapo.core.errors import NumericsError, ShortfallError
from dapo.core.loading import AGENT_PREFIX, own_name
from dapo.runs.outcomes import DROPPED, Outcome, count_dropped
from dapo.sampling.dynamic_sampling import (
    MAX_ERROR_RATE,
    REWARD_TEST,
    errors_of,
    failure_of,
)
from dapo.sampling.queue import Batch
from dapo.training.rules.sampling_rules import EASIER_PROBLEMS, TRUNCATED
from dapo.training.state import Run
from dapo.types import Verdict

# steps in a row without a group to train on that end a run; one ends a run that has not trained
MAX_EMPTY_STEPS = 3
BY_SCORE = "dynamic_sampling.metric=score"
"""The option by which scores, not right and wrong, decide whether a group trains."""
_ADVICE = {
    "all_wrong": (
        "Read the responses in rollouts/: truncated answers and unexpected formats count as wrong. "
        f"If the problems are too hard, {EASIER_PROBLEMS}; or raise rollout.group_size or "
        "dynamic_sampling.max_groups_per_step"
    ),
    "all_correct": (
        "Choose harder problems; if these are hard, the reward accepts too much: {reward_test}"
        " shows what it accepts"
    ),
    "zero_variance": (
        "Nothing can be learned where all responses of a group have the same score: {reward_test}"
        " shows scores"
    ),
    "filtered": "Loosen dynamic_sampling.filter, min_spread or mean_between",
    "invalid": "Test the verifier: {reward_test}",
}


class ProblemsSolved(ShortfallError):
    """Every response of a step's search was correct, so a trained run can learn nothing more."""


def require_groups(
    batch: Batch,
    *,
    step: int = 1,
    empty_steps: int = 0,
    reward_test: str = REWARD_TEST,
    config: Config | None = None,
) -> None:
    """Check that a step can train on its batch, which may be short.

    Args:
        batch: the groups of the step.
        step: the step, from 1.
        empty_steps: the number of steps without a group directly before this one.
        reward_test: the command that tests the run's reward.
        config: the options, by which advice names what to change; None: advice is general.

    Raises:
        ProblemsSolved: every response was correct, and the run has trained.
        VerifierFailed: most responses have no verdict, so the groups say nothing.
        ShortfallError: the run must stop for another reason; with counts and advice.
    """
    has_trained = empty_steps < step - 1
    outcomes: Counter[Outcome] = Counter(
        outcome for _, outcome in batch.decided if outcome != "trained"
    )
    if not batch.shortfall or batch.groups:
        return
    if has_trained:
        if outcomes.keys() == {"all_correct"}:
            raise ProblemsSolved(
                f"all {outcomes['all_correct']} groups of step {step} are all correct: nothing is"
                f" left to learn from them, and the run ends after step {step - 1}"
            )
        if empty_steps + 1 < MAX_EMPTY_STEPS:
            return
    steps = f"{empty_steps + 1} steps in a row, the last of them " if empty_steps > 0 else ""
    _require_verdicts(batch, f"{steps}step {step}", reward_test)
    outcome = outcomes.most_common(1)[0][0]
    advice = _ADVICE[outcome].replace("{reward_test}", reward_test)
    finishes = [generation.finish for group, _ in batch.decided for generation in group.generations]
    truncated = finishes.count("length") / max(1, len(finishes))
    about_scores = _advice_on_scores(batch, outcome, config)
    if about_scores is not None:
        advice = about_scores
    elif outcome in ("all_wrong", "zero_variance") and truncated > TRUNCATED:
        advice = _advice_on_lengths(truncated, config)
    raise ShortfallError(f"{steps}step {step}: {describe_short_batch(batch)}\n{advice}")


def _require_verdicts(batch: Batch, where: str, reward_test: str) -> None:
    """Raise VerifierFailed if most responses have no verdict.

    An episode that is cut in its first turn has one although its environment was never asked, so
    that such episodes do not count.
    """
    errors = [entry for group, _ in batch.decided for entry in errors_of(group)]
    answered = 0
    for group, _ in batch.decided:
        for generation, verdict in zip(group.generations, group.verdicts, strict=True):
            is_cut = generation.episode is not None and generation.finish == "length"
            answered += verdict.error is not None or not is_cut
    if len(errors) > MAX_ERROR_RATE * answered:
        summary = f"{where}: {len(errors)} of the {answered} responses judged have no verdict"
        raise failure_of(errors, summary, reward_test)


def _advice_on_scores(batch: Batch, outcome: Outcome, config: Config | None) -> str | None:
    """Say why groups are dropped although their scores differ; None if they do not differ."""
    if outcome not in ("all_wrong", "all_correct"):
        return None
    dropped = [group for group, decided in batch.decided if decided == outcome]
    unequal = [group for group in dropped if _have_unequal_scores(group.verdicts)]
    if not unequal:
        return None
    deciders = deciders_of(verdict for group in unequal for verdict in group.verdicts)
    return (
        f"In {len(unequal)} of the {len(dropped)} groups {DROPPED[outcome]} the scores differ, but"
        f" {who_decides(deciders, config)}, and only that decides whether a group trains (Eq. 11)."
        f" To learn from the scores, set {BY_SCORE}"
    )


def _advice_on_lengths(truncated: float, config: Config | None) -> str:
    """Say what to change where most responses are cut at a limit of tokens."""
    if config is None or not config.plays_episodes:
        return (
            f"{truncated:.0%} of the responses end at the limit of tokens, before they have"
            " answered: raise rollout.max_response_tokens, or request shorter answers in"
            " data.instruction"
        )
    option, limit = limit_of_response(config)
    if config.runs_agent:
        return (
            f"{truncated:.0%} of the episodes are cut at {option}={limit}, and an agent gets an"
            " empty answer after a turn that is cut: raise it, or let the agent ask for shorter"
            " answers"
        )
    return (
        f"{truncated:.0%} of the episodes are cut at {option}={limit}, and their environment does"
        " not answer a turn that is cut: raise it, or request shorter turns in the prompt of reset"
    )


def _have_unequal_scores(verdicts: Sequence[Verdict]) -> bool:
    return len({verdict.score for verdict in verdicts if verdict.error is None}) > 1


def deciders_of(verdicts: Iterable[Verdict]) -> tuple[str, ...]:
    """Return the verifiers, of several, that say right or wrong in any of the verdicts."""
    names = (name for verdict in verdicts for name in verdict.deciders)
    return tuple(dict.fromkeys(names))


def who_decides(deciders: Sequence[str], config: Config | None) -> str:
    """Say what decides between right and wrong.

    `deciders` are verifiers of several; empty for a single one, or for `reward.threshold`.
    """
    names = list(deciders)
    if not names and config is not None:
        if config.reward.threshold is not None:
            return f"reward.threshold={config.reward.threshold:g} says right or wrong"
        verifier = config.reward.verifier
        names = [verifier] if isinstance(verifier, str) else []
    if names == ["environment"]:
        environment = None if config is None else config.environment.title
        name = "the environment" if environment is None else f"`{own_name(environment)}`"
        return f"{name} says `correct`"
    shown = " and ".join(f"`{own_name(name)}`" for name in names) or "the reward"
    verb = "say" if len(names) > 1 else "says"
    return f"{shown} {verb} right or wrong"


def reward_test_command(
    reward: RewardConfig, data: DataConfig, environment: str | None, run: Path | None = None
) -> str:
    """Return the command that tests a run's reward on its data; an inline spec becomes DATA.

    If only the `environment` rewards, the command tests that; of an agent, which cannot be played
    without a policy, it shows the episodes.
    """
    is_judge = reward.verifier in ("auto", "environment")
    if environment is not None and environment.startswith(AGENT_PREFIX) and is_judge:
        return f"dapo view {'RUN' if run is None else shlex.quote(str(run))}"
    if environment is not None and is_judge:
        return f"dapo test {shlex.quote(environment if run is None else str(run))}"
    if run is not None:
        flag = "" if environment is None else " --reward"
        return f"dapo test {shlex.quote(str(run))}{flag}"
    verifier = reward.verifier
    train = data.train
    name = verifier if isinstance(verifier, str) else next(iter(verifier))
    source = train if isinstance(train, str) else "DATA"
    return f"dapo test {shlex.quote(name)} --data {shlex.quote(source)}"


def describe_short_batch(batch: Batch) -> str:
    """Describe the number of groups of a short batch, and the outcomes of its dropped groups."""
    batch_size = len(batch.groups) + batch.shortfall
    learn = f"{len(batch.groups)} of the {batch_size} groups wanted" if batch.groups else "nothing"
    errors = Counter(
        v.error for group, _ in batch.decided for v in group.verdicts if v.error is not None
    )
    cause = ""
    if errors:
        cause = f" ({errors.total()} verifier errors, most often: {errors.most_common(1)[0][0]})"
    dropped = count_dropped(Counter(outcome for _, outcome in batch.decided))
    return f"{learn} to learn from, in {len(batch.decided)} groups: {dropped}{cause}"


MAX_SKIPPED_UPDATES = 10
"""Updates skipped in a row (loss or gradient not finite, or loss.max_approx_kl exceeded) that end a
run.
"""
MIN_ENTROPY = 1.0e-4
"""Nats per token, the mean of -logprob over a step's responses, below which the policy is nearly
deterministic.
"""
# steps in a row below MIN_ENTROPY that end a run: one may be a batch of easy problems
ENTROPY_COLLAPSE_STEPS = 5


def entropy_collapse_steps(metrics: Mapping[str, float], before: int) -> int:
    """Count the latest steps in a row in which the policy was nearly deterministic.

    The entropy is `rollout/entropy_estimate`: unlike loss/entropy it includes groups without a
    signal, which a collapsing policy mostly has. A step without a sampled token does not change the
    count.
    """
    if not metrics["rollout/response_tokens_max"]:
        return before
    return before + 1 if metrics["rollout/entropy_estimate"] < MIN_ENTROPY else 0


def check_divergence(run: Run) -> None:
    """Raise NumericsError where further training is useless; the finished step is still saved."""
    skipped = run.policy.skipped_in_a_row
    if skipped >= MAX_SKIPPED_UPDATES:
        raise NumericsError(
            f"{skipped} updates in a row were skipped (at most {MAX_SKIPPED_UPDATES - 1} may be):"
            " the loss or the gradient was not finite, or the policy had moved too far from"
            " the one that sampled"
            f" (loss.max_approx_kl={run.config.loss.max_approx_kl}); lower optim.lr, or check"
            " loss/* and optim/grad_norm of earlier steps"
        )
    if run.state.entropy_collapse_steps >= ENTROPY_COLLAPSE_STEPS:
        raise NumericsError(
            f"the policy has collapsed: its entropy was below {MIN_ENTROPY:g} nats per token in"
            f" {run.state.entropy_collapse_steps} steps in a row, so all responses to a prompt are"
            " alike; start again with a lower optim.lr or a higher loss.clip_high"
        )
