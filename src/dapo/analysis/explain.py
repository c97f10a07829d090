"""Explains one group of a finished step: the paper's Eq. 11, 13, 9 and 8 with the numbers of the
group.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from dapo.algo.advantages import STD_EPS
from dapo.algo.estimator_table import ESTIMATORS
from dapo.algo.overlong import trains
from dapo.analysis.stored_groups import StoredGroup, local_encoder, read_groups
from dapo.analysis.update_terms import CLIP_NAMES, GroupUpdate, TokenTerms, find_update
from dapo.config import AdvantageConfig, Config, LossConfig
from dapo.core.errors import ConfigError, DataError
from dapo.data.prompts import PromptEncoder
from dapo.runs.directory import RunDirectory
from dapo.runs.stored_config import load_run_config, with_start_folder
from dapo.training.assemble.resolve import resolve_auto
from dapo.training.samples import length_penalty, shaped_reward
from dapo.types import Generation, Sample


def explain_group(
    run_dir: str | Path,
    step: int,
    group: int | None = None,
    *,
    recompute: bool = True,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Explain one group: kept or not, its rewards and advantages, its tokens' ratios, clips and
    gradient.

    Every number is the run's own, or computed by the code that trains. Ratios need the policy's
    log-probabilities, which no run stores: unless they are 1 by construction, the step is trained
    again in memory, from the newest checkpoint before it and the stored responses. Nothing is
    written.

    `step` is a finished one, from 1, whose responses are stored; `group` is the group's id,
    `group_id` in the table of responses (None: most clipped tokens in the step's last update; ties:
    largest standard deviation of rewards, then shortest). Without `recompute` the numbers that need
    the step to be trained again are left out; `log` takes a line about each step that is.

    Returns JSON values, described in docs/view.md. Raises CheckpointError without such a run,
    DataError without such a group, and ConfigError if advantages depend on a critic, or on rewards
    that no file holds.
    """
    directory = RunDirectory.open(run_dir)
    config = resolve_auto(load_run_config(directory, step=step))
    if config.has_critic:
        raise ConfigError(
            "advantage.estimator=gae compares each token with the value of a critic, which is"
            " stored nowhere, and dapo explain follows Eq. 9; `dapo view` shows the responses, with"
            " the mean advantage of each"
        )
    if config.loss.has_kl_reward:
        raise ConfigError(
            f"{directory.path} cannot be explained: its advantages are of rewards from which the"
            " divergence to the reference was subtracted (loss.kl_in=reward), and no file holds it"
        )
    without_tokens = read_groups(directory, step, tokens_of=())
    if group is not None and group not in {each.group.id for each in without_tokens}:
        ids = ", ".join(str(each.group.id) for each in without_tokens)
        raise DataError(f"step {step} of {directory.path} has no group {group}; its groups: {ids}")
    with with_start_folder(directory):
        update = find_update(
            directory, config, without_tokens, step, group, recompute=recompute, log=log
        )
    chosen = group if group is not None else _select_group(without_tokens, update)
    (stored,) = (
        each for each in read_groups(directory, step, tokens_of=[chosen]) if each.group.id == chosen
    )
    explained = _describe(config, stored, update if stored.outcome == "trained" else None)
    reason = None if group is not None else _why_chosen(update)
    return {
        "run": str(directory.path),
        "step": step,
        "group": chosen,
        "chosen_because": reason,
        **explained,
    }


def _select_group(groups: Sequence[StoredGroup], update: GroupUpdate | None) -> int:
    """The id of the group that `explain_group` explains by default."""
    if update is None:
        return groups[0].group.id
    clipped: dict[int, int] = {}
    rewards: dict[int, list[float]] = {}
    for i, sample in enumerate(update.samples):
        number = 0 if update.terms is None else update.terms[i].num_clipped
        clipped[sample.group_id] = clipped.get(sample.group_id, 0) + number
        rewards.setdefault(sample.group_id, []).append(sample.reward)
    tokens = {each.group.id: each.group.num_tokens for each in groups}
    return max(
        clipped, key=lambda group: (clipped[group], stdev(rewards[group]), -tokens[group], -group)
    )


def _why_chosen(update: GroupUpdate | None) -> str:
    """The reason for the choice of `_select_group`, as a sentence."""
    if update is None:
        return "the first group of the step, in which none trains"
    if update.terms is None:
        return (
            "largest reward spread in the last update, then shortest (clipped tokens are not known)"
        )
    return "most clipped tokens in the last update (ties: largest reward spread, then shortest)"


def _describe(config: Config, stored: StoredGroup, update: GroupUpdate | None) -> dict[str, Any]:
    group = stored.group
    overlong = config.overlong
    encoder = local_encoder(config)
    responses = [_response(config, stored, i) for i in range(group.size)]
    result: dict[str, Any] = {
        "problem": {
            "id": group.problem.id,
            "source": group.problem.source,
            "prompt": stored.prompt,
            "answer": group.problem.answer,
            "fields": dict(group.problem.fields),
        },
        "eq11": _eq11(config, stored),
        "eq13": {
            "mode": overlong.mode,
            "max_length": config.rollout.max_response_tokens,
            "buffer": overlong.buffer_tokens if overlong.mode == "soft" else None,
            "penalty": overlong.penalty if overlong.mode == "soft" else None,
        },
        "eq9": None,
        "eq8": None,
        "responses": responses,
        "clipped_tokens": [],
        "notes": _notes(config, stored),
    }
    if update is None:
        return result
    credit = config.environment.credit if config.plays_episodes else None
    result["eq9"] = _eq9(config.advantage, update.rewards, group.id) | {"credit": credit}
    result["eq8"] = _eq8(config, group.id, update)
    for i, sample in enumerate(update.samples):
        if sample.group_id == group.id:
            for turn in responses[sample.index]["turns"] or ():
                span = turn["tokens"]
                if span is not None and span[0] < span[1]:
                    turn["advantage"] = _advantage_at(sample, span[0])
            own = _sample(config, stored, update, i, encoder)
            result["clipped_tokens"] += own.pop("clipped_tokens")
            responses[sample.index] |= own
    return result


def _eq9(
    advantage: AdvantageConfig, rewards: Mapping[int, Sequence[float]], group_id: int
) -> dict[str, Any]:
    """The numbers that turn a group's rewards into advantages; `rewards` are those of all groups of
    the step.
    """
    estimator = ESTIMATORS[advantage.estimator]
    batch = [reward for of_group in rewards.values() for reward in of_group]
    compared = batch if estimator.mean_over == "batch" else rewards[group_id]
    differences = compared
    if estimator.std_over == "batch" and estimator.mean_over == "group":
        differences = [
            reward - fmean(of_group) for of_group in rewards.values() for reward in of_group
        ]
    scale = "std" if estimator.std_over else "none"
    if advantage.estimator == "group":
        scale = advantage.scale
    return {
        "estimator": advantage.estimator,
        "mean": fmean(compared),
        "rewards": len(compared),
        "std": stdev(differences),
        "differences": len(differences),
        "scale": scale,
        "eps": STD_EPS,
    }


def _eq11(config: Config, stored: StoredGroup) -> dict[str, Any]:
    valid = [verdict for verdict in stored.group.verdicts if verdict.error is None]
    scores = [verdict.score for verdict in valid]
    return {
        "kept": stored.outcome == "trained",
        "outcome": stored.outcome,
        "why": _why(config, stored),
        "group_size": stored.group.size,
        "valid": len(valid),
        "correct": stored.group.num_correct,
        "errors": stored.group.num_errors,
        "lowest_score": min(scores, default=None),
        "highest_score": max(scores, default=None),
    }


def _why(config: Config, stored: StoredGroup) -> str:
    """The reason for a group's outcome, as a sentence with its numbers."""
    group = stored.group
    sampling = config.dynamic_sampling
    valid = [verdict for verdict in group.verdicts if verdict.error is None]
    scores = [verdict.score for verdict in valid]
    k = group.num_correct
    n = len(valid)
    if any(verdict.correct is None for verdict in valid):
        signal = f"its scores range from {min(scores):g} to {max(scores):g}"
    else:
        signal = f"{k} of its {n} responses {'is' if k == 1 else 'are'} right"
    filtered = "dynamic_sampling.filter"
    if stored.outcome == "trained" and not sampling.enabled:
        return f"{signal}; dynamic_sampling.enabled=false trains on every group"
    return {
        "trained": (
            f"{signal}:"
            f" {'0 < ' + str(k) + ' < ' + str(n) + ', so' if 'right' in signal else 'they differ, so'}"
            " the group carries a signal"
            + (f", and {filtered} keeps it" if sampling.filter is not None else "")
        ),
        "all_correct": f"all {n} responses are right: no response is better than another",
        "all_wrong": f"all {n} responses are wrong: no response is better than another",
        "zero_variance": (
            f"all {n} scores are {scores[0] if scores else 0:g}: no response is better than another"
        ),
        "filtered": f"{signal}, and {filtered} refuses the group",
        "invalid": (
            f"{n} of its {group.size} responses {'has' if n == 1 else 'have'} a verdict: there is"
            " nothing to compare"
        ),
        "excess": "the batch was full before this group; its problem went back to the stream",
        "aborted": "the batch was full before all of its responses had ended",
    }[stored.outcome]


def _response(config: Config, stored: StoredGroup, i: int) -> dict[str, Any]:
    """The facts of a response before the update: its verdict, Eq. 13 and its reward."""
    group = stored.group
    generation = group.generations[i]
    verdict = group.verdicts[i]
    return {
        "sample": i,
        "text": group.texts[i],
        "tokens": generation.num_sampled,
        "turns": None if generation.episode is None else _turns(generation),
        "finish": generation.finish,
        "version": generation.version,
        "correct": verdict.correct,
        "score": None if verdict.error is not None else verdict.score,
        "components": dict(verdict.components),
        "error": verdict.error,
        "overlong_penalty": length_penalty(generation, config),
        "reward": group.rewards[i],
        "advantage": stored.advantages[i],
        "trains": (
            stored.advantages[i] is not None
            and trains(generation.finish, mode=config.overlong.mode)
        ),
    }


def _turns(generation: Generation) -> list[dict[str, Any]]:
    """The messages of an episode: turns with their sampled tokens and reward, and observations,
    which never train.
    """
    assert generation.episode is not None
    ranges = generation.sampled or ((0, len(generation.token_ids)),)
    # a turn of an episode with an error has none
    rewards = [*generation.episode.rewards, *[None] * len(ranges)]
    number = 0
    found = []
    for message in generation.episode.messages:
        turn: dict[str, Any] = {"role": message["role"], "text": message["content"]}
        turn |= {"tokens": None, "reward": None, "advantage": None}
        if message["role"] == "assistant":
            turn |= {"tokens": list(ranges[number]), "reward": rewards[number]}
            number += 1
        found.append(turn)
    return found


def _advantage_at(sample: Sample, token: int) -> float:
    return sample.advantage if sample.token_advantages is None else sample.token_advantages[token]


def _eq8(config: Config, group: int, update: GroupUpdate) -> dict[str, Any]:
    loss = config.loss
    lengths = [sample.num_trained_tokens for sample in update.samples]
    terms = update.terms
    found: dict[str, Any] = dict.fromkeys(
        ("loss", "loss_of_group", "gradient_share_of_group", "clipped_tokens")
    )
    if terms is not None:
        own = [
            each
            for sample, each in zip(update.samples, terms, strict=True)
            if sample.group_id == group
        ]
        found = {
            "loss": sum(_loss(each, config) for each in terms),
            "loss_of_group": sum(_loss(each, config) for each in own),
            "gradient_share_of_group": (
                sum(each.gradient_size for each in own) / update.gradient_sum
            ),
            "clipped_tokens": sum(each.num_clipped for each in terms),
        }
    return {
        "update": update.number + 1,
        "updates": update.num_updates,
        "groups": list(dict.fromkeys(sample.group_id for sample in update.samples)),
        "responses": len(update.samples),
        "trained_tokens": sum(lengths),
        "aggregate": loss.aggregate,
        "clip": _clip_bounds(loss),
        "kl_coef": loss.kl_coef,
        "entropy_coef": loss.entropy_coef,
        "engine_correction": loss.engine_correction,
        "ratios": dict(update.ratios),
        **found,
    }


def _clip_bounds(loss: LossConfig) -> dict[str, float | None]:
    return {"low": 1 - loss.clip_low, "high": 1 + loss.clip_high, "dual": loss.dual_clip}


def _loss(terms: TokenTerms, config: Config) -> float:
    return terms.loss + config.loss.kl_coef * terms.kl  # 0 where the loss has no such term


def _sample(
    config: Config, stored: StoredGroup, update: GroupUpdate, i: int, encoder: PromptEncoder | None
) -> dict[str, Any]:
    """The loss and gradient of one response in an update, and its clipped tokens."""
    sample = update.samples[i]
    replayed = update.replayed
    generation = stored.group.generations[sample.index]
    texts = (
        None
        if encoder is None
        else [encoder.decode_prompt([token]) for token in generation.token_ids]
    )
    tokens: dict[str, Any] = {
        "ids": list(generation.token_ids),
        "texts": texts,
        "engine_logprobs": list(generation.logprobs) or None,
        "old_logprobs": None if replayed is None else list(sample.old_logprobs or ()),
        "logprobs": None if replayed is None else list(replayed.logprobs[i]),
        "reference_logprobs": (
            None if replayed is None or replayed.reference is None else list(replayed.reference[i])
        ),
    }
    found: dict[str, Any] = {
        "weight": update.weights[i],
        "token_values": tokens,
        "clipped_tokens": [],
    }
    if update.terms is None:
        return found | {"loss": None, "gradient_share": None, "clipped": None}
    terms = update.terms[i]
    whole = update.gradient_sum
    tokens |= {
        "ratios": terms.ratio.tolist(),
        "weights": terms.weight.tolist(),
        "gradients": terms.gradient.tolist(),
        "gradient_shares": (terms.gradient.abs() / whole).tolist(),
        "clipped": [CLIP_NAMES[kind] for kind in terms.clipped.tolist()],
    }
    for position in terms.clipped.nonzero().flatten().tolist():
        found["clipped_tokens"].append(_clipped_token(config, update, i, position, tokens))
    return found | {
        "loss": _loss(terms, config),
        "policy_loss": terms.loss,
        "kl": terms.kl if config.loss.has_kl_term else None,
        "gradient_share": terms.gradient_size / whole,
        "clipped": len(found["clipped_tokens"]),
    }


def _clipped_token(
    config: Config, update: GroupUpdate, i: int, position: int, tokens: Mapping[str, Any]
) -> dict[str, Any]:
    assert update.terms is not None
    terms = update.terms[i]
    kind = CLIP_NAMES[int(terms.clipped[position])]
    unclipped = float(terms.unclipped_gradient[position])
    return {
        "sample": update.samples[i].index,
        "position": position,
        "id": tokens["ids"][position],
        "text": None if tokens["texts"] is None else tokens["texts"][position],
        "ratio": float(terms.ratio[position]),
        "bound": _clip_bounds(config.loss)[kind],
        "side": kind,
        "gradient": float(terms.gradient[position]),
        "gradient_share": tokens["gradient_shares"][position],
        "gradient_without_clip": unclipped,
        "gradient_share_without_clip": abs(unclipped) / update.unclipped_gradient_sum,
    }


def _notes(config: Config, stored: StoredGroup) -> list[str]:
    notes = []
    group = stored.group
    shaped = [
        shaped_reward(g, v, config) for g, v in zip(group.generations, group.verdicts, strict=True)
    ]
    if shaped != list(group.rewards):
        notes.append(
            "the stored rewards differ from those of the run's config.yaml: this step ran with"
            " options given to `dapo resume`, and numbers here that depend on options may differ"
        )
    if config.loss.entropy_coef > 0 or config.loss.entropy_target is not None:
        name = "entropy_coef" if config.loss.entropy_target is None else "entropy_target"
        notes.append(f"losses and gradients here leave out the entropy term (loss.{name})")
    if config.loss.has_full_kl:
        notes.append(
            "losses and gradients here leave out the divergence over the whole vocabulary"
            " (loss.kl_estimator=full)"
        )
    if config.uses_trainer_group:
        notes.append(
            "the run trained in separate processes: one process gives the same numbers up to"
            " rounding"
        )
    return notes
