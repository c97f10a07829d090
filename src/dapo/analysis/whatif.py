"""Scores the stored responses of a run again, with changed options that act after sampling: what if?"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dapo.analysis.gradients import GradientComparison
from dapo.analysis.rescored import RescoredCounts, RescoredGroup
from dapo.analysis.stored_groups import (
    RunProblems,
    StoredGroup,
    local_encoder,
    no_responses,
    read_groups,
    with_exact_texts,
    with_prompt_ids,
)
from dapo.config import PRESETS, Config
from dapo.config.load import resolve_auto_verifier
from dapo.config.option_entries import option_differences
from dapo.config.option_fields import options_of
from dapo.core.errors import ConfigError
from dapo.data.prompts import PromptEncoder
from dapo.rewards.combine import Judge
from dapo.rewards.workers.output import VerifierOutput
from dapo.rewards.workers.pool import VerifierPool
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import metrics_by_step
from dapo.runs.outcomes import Outcome
from dapo.runs.stored_config import load_run_config, with_start_folder
from dapo.training.assemble.build import dynamic_sampler
from dapo.training.dynamic_sampling import DynamicSampler
from dapo.training.preflight import NO_COLUMNS
from dapo.training.samples import shaped_reward, with_advantages
from dapo.types import Group

AFTER_SAMPLING = ("reward.", "overlong.", "advantage.", "dynamic_sampling.enabled", "dynamic_sampling.filter", "preset")
"""Options, and prefixes of options, that act after sampling."""
ON_GRADIENTS = "loss."
_EFFECTIVE = {"reward", "overlong", "advantage", "dynamic_sampling", "loss"}
"""The sections whose options can be changed."""


@dataclass
class _Scorer:
    """The judge, problems and tokenizer that score groups again."""

    judge: Judge | None  # the judge of the responses; None: the stored verdicts stay
    problems: RunProblems | None  # the problems with all columns; None: the stored columns are enough
    encoder: PromptEncoder | None  # None: the model's tokenizer is not on this machine
    not_found: set[str] = field(default_factory=set)  # the ids of problems that are no longer in the run's data


def what_if(
    run_dir: str | Path,
    overrides: Sequence[str],
    *,
    steps: str = ":",
    gradient: bool = False,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Compute the verdicts, outcomes, rewards and advantages of a run's stored responses under changed options.

    The run's own code judges, shapes, filters and compares. Responses are judged again, in worker processes as in
    training, if an option of the reward is named or no option at all; otherwise their stored verdicts stand. A step's
    batch closes at the same number of groups. Nothing is written. The responses were sampled under the original
    options: after the first step, a run with the changed ones would have sampled different ones.

    `overrides` are `key=value` of `reward`, `overlong`, `advantage`, `dynamic_sampling.enabled`,
    `dynamic_sampling.filter`, `preset`; with `gradient`, which also compares the policy gradients (`gradients.py`),
    also of `loss`. `steps` are `A:B`, `A:`, `:B` or `A`, both ends included. `log` takes a line about the progress.

    Returns JSON values, described in docs/view.md. Raises ConfigError if an option does not act after sampling, `steps`
    is malformed, or advantages depend on a critic or on rewards that no file holds; DataError for steps without stored
    responses, or data without a column that the reward reads; RewardError for a reward that cannot be used.
    """
    directory = RunDirectory.open(run_dir)
    old, new = _changed_config(directory, overrides, gradient=gradient)
    _require_stored_advantages(old, new, gradient=gradient)
    chosen, missing = _chosen_steps(directory, steps)
    sampler = dynamic_sampler(new, max_error_rate=1.0)  # errors are counted and never end the analysis
    # without options, a difference means that the verifier is not deterministic, or that its code has changed
    judges = not overrides or any(item.startswith("reward.") for item in overrides)
    filters = isinstance(new.dynamic_sampling.filter, str)
    comparison = GradientComparison(directory, old, new, chosen, log=log) if gradient else None
    counts = RescoredCounts()
    with ExitStack() as stack:
        stack.enter_context(with_start_folder(directory))
        pool = stack.enter_context(VerifierPool(new.reward, output=VerifierOutput())) if judges else None
        needed = NO_COLUMNS if pool is None else pool.needed_columns
        scorer = _Scorer(pool, RunProblems(new, needed) if judges or filters else None, local_encoder(new))
        for step in chosen:
            log(f"step {step}")
            groups = _rescore(read_groups(directory, step), new, sampler, scorer)
            counts.add(step, groups, wanted=new.rollout.prompts_per_step)
            if comparison is not None:
                comparison.add(step, groups)
    return {
        "run": str(directory.path),
        "options": [{"name": name, "old": a, "new": b} for name, (a, b) in option_differences(old, new).items()],
        "judged_again": judges,
        "missing_steps": missing,
        **counts.as_json(),
        "gradients": None if comparison is None else comparison.results,
        "notes": _notes(old, new, scorer, missing),
    }


def _changed_config(directory: RunDirectory, overrides: Sequence[str], *, gradient: bool) -> tuple[Config, Config]:
    """The options of a run, and the same with changed ones.

    `preset=NAME` sets every option that a preset can set and that is not named itself. A named `reward.verifier` drops
    the options of the run's own verifier. Raises ConfigError for an option that is unknown, invalid, or acts before or
    during sampling.
    """
    named = [item.partition("=")[0] for item in overrides]
    for name in named:
        _require_after_sampling(name, gradient=gradient)
    own = resolve_auto_verifier(load_run_config(directory))
    preset = next((item.partition("=")[2] for item in reversed(overrides) if item.startswith("preset=")), None)
    more = [] if preset is None else [f"{name}={json.dumps(value)}" for name, value in _preset_values(preset)]
    return own, resolve_auto_verifier(load_run_config(directory, [*more, *overrides]))


def _require_after_sampling(name: str, *, gradient: bool) -> None:
    if name.startswith(AFTER_SAMPLING) or (gradient and name.startswith(ON_GRADIENTS)):
        return
    if name.startswith(ON_GRADIENTS):
        raise ConfigError(f"{name} changes no outcome, reward or advantage, only gradients: add --gradient")
    raise ConfigError(
        f"{name} does not act between sampling and the update, so the stored responses cannot show its effect; "
        "options that can be changed are those of reward, overlong and advantage, dynamic_sampling.enabled and "
        "dynamic_sampling.filter, preset, and with --gradient those of loss"
    )


_OF_REWARDS = {"dynamic_sampling", "overlong", "advantage", "loss"}
"""The sections of presets that train on rewards."""


def _preset_values(preset: str) -> Iterator[tuple[str, Any]]:
    """The values, under one preset, of the options that any preset sets."""
    defaults = {name: info.default for name, info in options_of()}
    chosen = PRESETS.get(preset, {})  # an unknown name is refused with the configuration
    if other := sorted(chosen.keys() - _OF_REWARDS):
        raise ConfigError(
            f"preset={preset} sets {', '.join(other)}: it trains on another signal than the stored rewards"
        )
    sections = (item for values in PRESETS.values() if values.keys() <= _OF_REWARDS for item in values.items())
    for section, options in sections:
        for option in options:
            yield f"{section}.{option}", chosen.get(section, {}).get(option, defaults[f"{section}.{option}"])


def _require_stored_advantages(old: Config, new: Config, *, gradient: bool) -> None:
    """Raise ConfigError if the advantages depend on numbers that no file holds."""
    if new.has_critic or (gradient and old.has_critic):
        raise ConfigError(
            "advantage.estimator=gae compares responses with the values of a critic, which are stored nowhere: set "
            "advantage.estimator=group, and leave --gradient out for a run of PPO"
        )
    if old.loss.has_kl_reward or new.loss.has_kl_reward:
        raise ConfigError(
            "loss.kl_in=reward subtracts the divergence to the reference from the rewards before advantages are "
            "computed, and no file holds it; name the options of a preset one by one, without loss.kl_in=reward"
        )


def _notes(old: Config, new: Config, scorer: _Scorer, missing: Sequence[int]) -> list[str]:
    notes = []
    if missing:
        notes.append(
            f"the responses of {len(missing)} steps are gone ({missing[0]} the first, {missing[-1]} the last): "
            f"log.rollouts={old.log.rollouts}; all keeps those of every step"
        )
    if scorer.problems is not None and scorer.problems.missing is not None:
        notes.append(
            "the run's data is gone, so each problem has only the columns that the table of responses keeps (rendered "
            f"prompt, answer, source, short columns): {scorer.problems.missing}"
        )
    elif scorer.not_found:
        notes.append(
            f"{len(scorer.not_found)} problems are no longer in data.train; they have only the columns that the table "
            "of responses keeps"
        )
    if old.predicts_signal:
        notes.append(
            f"dynamic_sampling.predict={old.dynamic_sampling.predict} chose the problems by the original verdicts"
        )
    if old.dynamic_sampling.weights != "none":
        notes.append(
            "in gradients all groups weigh the same, because dynamic_sampling.weights is known of trained ones only"
        )
    if old.model_dump(include=_EFFECTIVE) != new.model_dump(include=_EFFECTIVE):
        notes.append(
            "the responses were sampled under the original options: from its second step on, a run with the changed "
            "ones would have sampled different responses"
        )
    return notes


def _chosen_steps(directory: RunDirectory, text: str) -> tuple[list[int], list[int]]:
    """The stored steps in a range, and the finished steps in it whose responses are gone."""
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else 1
        high = int(last) if last else (None if colon else low)
    except ValueError:
        raise ConfigError(f"--steps {text}: expected A:B, A:, :B or A with step numbers, such as 10:20") from None
    stored = list(directory.rollout_tables())
    end = max(stored, default=0) if high is None else high
    logged = metrics_by_step(directory.metrics)
    chosen = [step for step in stored if low <= step <= end]
    if not chosen:
        raise no_responses(directory, "any step" if text == ":" else f"steps {text}")
    return chosen, [step for step in sorted(logged) if max(low, 1) <= step <= end and step not in stored]


def _rescore(
    groups: Sequence[StoredGroup], config: Config, sampler: DynamicSampler, scorer: _Scorer
) -> list[RescoredGroup]:
    """Score the groups of a step in order; those after a full batch are excess."""
    prepared, judge = [_prepared(stored, config, scorer) for stored in groups], scorer.judge
    pending = [
        None
        if judge is None
        else judge.submit(group.problem, group.texts, [each.token_ids for each in group.generations])
        for group in prepared
    ]
    accepted = 0
    rescored: list[tuple[Group, Outcome]] = []
    for group, verdicts in zip(prepared, pending, strict=True):
        judged = group.verdicts if verdicts is None else verdicts.result()
        rewards = tuple(shaped_reward(g, v, config) for g, v in zip(group.generations, judged, strict=True))
        group = replace(group, verdicts=judged, rewards=rewards)
        outcome: Outcome = "excess" if accepted == sampler.prompts_per_step else sampler.outcome(group)
        accepted += outcome == "trained"
        rescored.append((group, outcome))
    samples = with_advantages([group for group, outcome in rescored if outcome == "trained"], config)
    advantages = {(sample.group_id, sample.index): sample.advantage for sample in samples}
    return [
        RescoredGroup(stored, group, outcome, tuple(advantages.get((group.id, i)) for i in range(group.size)))
        for stored, (group, outcome) in zip(groups, rescored, strict=True)
    ]


def _prepared(stored: StoredGroup, config: Config, scorer: _Scorer) -> Group:
    """The group as its verifier and filter saw it in training."""
    if scorer.problems is None:
        return stored.group
    if scorer.encoder is not None:
        stored = with_exact_texts(stored, scorer.encoder)
    if scorer.problems.find(stored) is None:
        scorer.not_found.add(stored.group.problem.id)
    stored = scorer.problems.complete(stored)
    if isinstance(config.dynamic_sampling.filter, str) and scorer.encoder is not None:
        stored = with_prompt_ids(stored, scorer.encoder)
    return stored.group
