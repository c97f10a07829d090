"""A run's stored responses judged, shaped and filtered anew, with options that act after sampling changed."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dapo.analysis.changed_options import changed_config, differences, judges_anew
from dapo.analysis.changes import Changes, Rejudged
from dapo.analysis.gradients import GradientComparison
from dapo.analysis.stored_groups import (
    RunProblems,
    StoredGroup,
    local_encoder,
    read_groups,
    stored_steps,
    with_exact_texts,
    with_problem,
    with_prompt_ids,
)
from dapo.config import Config
from dapo.core.errors import ConfigError, DataError
from dapo.data.prompts import PromptEncoder
from dapo.rewards.judge import Judge
from dapo.rewards.workers.output import VerifierOutput
from dapo.rewards.workers.pool import VerifierPool
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import read_metrics
from dapo.runs.stored_config import with_start_folder
from dapo.training.assemble.build import dynamic_sampler
from dapo.training.dynamic_sampling import DynamicSampler, Outcome
from dapo.training.rows import NO_COLUMNS
from dapo.training.samples import shaped_reward, with_advantages
from dapo.types import Group, Verdict

_EFFECTIVE = {"reward", "overlong", "advantage", "dynamic_sampling", "loss"}
"""The sections whose options can be changed."""


@dataclass
class _Judging:
    """How groups are judged anew."""

    judge: Judge | None
    """None: their verdicts stay as they are."""
    problems: RunProblems | None
    """None: nothing reads more of a problem than the table has."""
    encoder: PromptEncoder | None
    """None: the model's tokenizer is not on this machine."""
    not_found: set[str] = field(default_factory=set)
    """The ids of problems that the run's data does not have any more."""


def what_if(
    run_dir: str | Path,
    overrides: Sequence[str],
    *,
    steps: str = ":",
    gradient: bool = False,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """What other options would have made of a run's stored responses: verdicts, outcomes, rewards, advantages.

    The run's own code judges, shapes, filters and compares. Responses are judged again, in worker processes as in
    training, where an option of the reward is named or no option at all; else their stored verdicts stand. The batch of
    a step closes at the same number of groups. Nothing is written. The responses are those that the original options
    led to: after the first step, a run with the changed ones would have sampled others.

    Args:
        run_dir: A run directory.
        overrides: `key=value` of `reward`, `overlong`, `advantage`, `dynamic_sampling.enabled`,
            `dynamic_sampling.filter`, `preset`; with `gradient` also of `loss`.
        steps: `A:B`, `A:`, `:B` or `A`, both ends included.
        gradient: Compare also the policy gradients, see `gradients.py`.
        log: Takes a line about what is being done.

    Returns:
        JSON values; docs/view.md describes them.

    Raises:
        ConfigError: An option cannot be changed afterwards, `steps` is malformed, or advantages come from a critic
            or of rewards that no file holds.
        DataError: No responses are stored for these steps, or the data lacks what the reward reads.
        RewardError: The reward cannot be used.
    """
    directory = RunDirectory.open(run_dir)
    old, new = changed_config(directory, overrides, gradient=gradient)
    if new.has_critic or (gradient and old.has_critic):
        raise ConfigError(
            "advantage.estimator=gae compares responses with the values of a critic, which are stored nowhere: set "
            "advantage.estimator=group, and leave --gradient out for a run of PPO"
        )
    if old.loss.has_kl_reward or new.loss.has_kl_reward:
        raise ConfigError(
            "loss.kl_in=reward makes advantages of rewards from which the divergence to the reference was subtracted, "
            "and no file holds that; a run without it can be asked about other options, a preset's one by one"
        )
    chosen, missing = _chosen_steps(directory, steps)
    sampler = dynamic_sampler(new, max_error_rate=1.0)  # errors are counted, and end nothing
    judges, filters = judges_anew(overrides), isinstance(new.dynamic_sampling.filter, str)
    comparison = GradientComparison(directory, old, new, chosen, log=log) if gradient else None
    changes = Changes()
    with ExitStack() as stack:
        stack.enter_context(with_start_folder(directory))
        pool = stack.enter_context(VerifierPool(new.reward, output=VerifierOutput())) if judges else None
        needed = NO_COLUMNS if pool is None else pool.needed_columns
        judging = _Judging(pool, RunProblems(new, needed) if judges or filters else None, local_encoder(new))
        for step in chosen:
            log(f"step {step}")
            groups = rejudge(read_groups(directory, step), new, sampler, judging)
            changes.add(step, groups, wanted=new.rollout.prompts_per_step)
            if comparison is not None:
                comparison.add(step, groups)
    return {
        "run": str(directory.path),
        "options": differences(old, new),
        "judged_again": judges,
        "missing_steps": missing,
        **changes.as_json(),
        "gradients": None if comparison is None else comparison.results,
        "notes": _notes(old, new, judging, missing),
    }


def _notes(old: Config, new: Config, judging: _Judging, missing: Sequence[int]) -> list[str]:
    """What a reader should know of these numbers."""
    notes = []
    if missing:
        notes.append(
            f"the responses of {len(missing)} steps are gone ({missing[0]} the first, {missing[-1]} the last): "
            f"log.rollouts={old.log.rollouts}; all keeps those of every step"
        )
    if judging.problems is not None and judging.problems.missing is not None:
        notes.append(
            "the run's data is gone, so each problem has only the columns that the table of responses keeps (prompt as "
            f"the model read it, answer, source, short columns): {judging.problems.missing}"
        )
    elif judging.not_found:
        notes.append(
            f"{len(judging.not_found)} problems are not in data.train any more; they have only the columns that the "
            "table of responses keeps"
        )
    if old.predicts_signal:
        notes.append(
            f"dynamic_sampling.predict={old.dynamic_sampling.predict} chose the problems by the original verdicts"
        )
    if old.dynamic_sampling.weights != "none":
        notes.append("in gradients all groups weigh the same: dynamic_sampling.weights=inverse is stored nowhere")
    if old.model_dump(include=_EFFECTIVE) != new.model_dump(include=_EFFECTIVE):
        notes.append(
            "the responses are those that the original options led to: a run with the changed ones would have sampled "
            "others from its second step on"
        )
    return notes


def _chosen_steps(directory: RunDirectory, text: str) -> tuple[list[int], list[int]]:
    """The stored steps in a range, and those of the range that are finished and whose responses are gone."""
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else 1
        high = int(last) if last else (None if colon else low)
    except ValueError:
        raise ConfigError(f"--steps {text}: expected A:B, A:, :B or A with numbers of steps, such as 10:20") from None
    stored = stored_steps(directory)
    end = max(stored, default=0) if high is None else high
    logged = read_metrics(directory.metrics) if directory.metrics.exists() else []
    finished = max([*stored, *(entry["step"] for entry in logged)], default=0)
    chosen = [step for step in stored if low <= step <= end]
    if not chosen:
        there = f"steps {stored[0]} to {stored[-1]}" if stored else "none"
        raise DataError(
            f"{directory.path} has no judged responses of steps {text}; there are: {there}. A run keeps those that "
            "log.rollouts names: all, no-logprobs, last:N or none"
        )
    return chosen, [step for step in range(max(low, 1), min(end, finished) + 1) if step not in stored]


def rejudge(
    groups: Sequence[StoredGroup], config: Config, sampler: DynamicSampler, judging: _Judging
) -> list[Rejudged]:
    """The groups of a step with what becomes of them: in order, until the batch is full; the others are excess."""
    prepared = [_prepared(stored, config, judging) for stored in groups]
    pending = [_submitted(group, judging.judge) for group in prepared]
    accepted = 0
    judged_anew: list[tuple[Group, Outcome]] = []
    for group, verdicts in zip(prepared, pending, strict=True):
        judged = group.verdicts if verdicts is None else verdicts.result()
        rewards = tuple(shaped_reward(g, v, config) for g, v in zip(group.generations, judged, strict=True))
        group = replace(group, verdicts=judged, rewards=rewards)
        outcome: Outcome = "excess" if accepted == sampler.prompts_per_step else sampler.outcome(group)
        accepted += outcome == "trained"
        judged_anew.append((group, outcome))
    samples = with_advantages([group for group, outcome in judged_anew if outcome == "trained"], config)
    advantages = {(sample.group_id, sample.index): sample.advantage for sample in samples}
    return [
        Rejudged(stored, group, outcome, tuple(advantages.get((group.id, i)) for i in range(group.size)))
        for stored, (group, outcome) in zip(groups, judged_anew, strict=True)
    ]


def _submitted(group: Group, judge: Judge | None) -> "Future[tuple[Verdict, ...]] | None":
    if judge is None:
        return None
    return judge.submit(group.problem, group.texts, [each.token_ids for each in group.generations])


def _prepared(stored: StoredGroup, config: Config, judging: _Judging) -> Group:
    """The group as its verifier and filter saw it in training."""
    if judging.problems is None:
        return stored.group
    if judging.encoder is not None:
        stored = with_exact_texts(stored, judging.encoder)
    problem = judging.problems.find(stored)
    if problem is None:
        judging.not_found.add(stored.group.problem.id)
    else:
        stored = with_problem(stored, problem)
    if isinstance(config.dynamic_sampling.filter, str) and judging.encoder is not None:
        stored = with_prompt_ids(stored, judging.encoder)
    return stored.group
