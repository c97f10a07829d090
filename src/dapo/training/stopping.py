"""Conditions that end a run: searches without enough groups, skipped updates, a collapsed entropy.

A short batch trains. A step without any group changes no weight; small batches have such steps by
chance, so a run that has trained tolerates fewer than MAX_EMPTY_STEPS of them in a row. If every
response of the whole search was correct, the problems are solved, and the run is evaluated, saved
and finished. Before any step has trained that is an error: nothing can be learned, or the reward
accepts everything.
"""

import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from dapo.config import DataConfig, RewardConfig
from dapo.core.errors import NumericsError, ShortfallError
from dapo.runs.outcomes import Outcome, count_dropped
from dapo.sampling.dynamic_sampling import REWARD_TEST
from dapo.sampling.queue import Batch
from dapo.training.rules.sampling_rules import EASIER_PROBLEMS, TRUNCATED
from dapo.training.state import Run

# steps in a row without a group to train on that end a run; one ends a run that has not trained
MAX_EMPTY_STEPS = 3
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
    batch: Batch, *, step: int = 1, empty_steps: int = 0, reward_test: str = REWARD_TEST
) -> None:
    """Check that a step, from 1, can train on its batch, which may be short.

    `empty_steps` is the number of steps without a group directly before this one, and `reward_test`
    the command that tests the run's reward.

    Raises ProblemsSolved if every response was correct and the run has trained, and ShortfallError,
    with counts and advice, if the run must stop.
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
    outcome = outcomes.most_common(1)[0][0]
    advice = _ADVICE[outcome].replace("{reward_test}", reward_test)
    finishes = [generation.finish for group, _ in batch.decided for generation in group.generations]
    truncated = finishes.count("length") / max(1, len(finishes))
    if outcome in ("all_wrong", "zero_variance") and truncated > TRUNCATED:
        advice = (
            f"{truncated:.0%} of the responses end at the limit of tokens, before they have"
            " answered: raise rollout.max_response_tokens, or request shorter answers in"
            " data.instruction"
        )
    raise ShortfallError(f"{steps}step {step}: {describe_short_batch(batch)}\n{advice}")


def reward_test_command(
    reward: RewardConfig, data: DataConfig, environment: str | None, run: Path | None = None
) -> str:
    """Return the command that tests a run's reward on its data; an inline spec becomes DATA.

    If only the `environment` rewards, the command tests that.
    """
    if environment is not None and reward.verifier in ("auto", "environment"):
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
