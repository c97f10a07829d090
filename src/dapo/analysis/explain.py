"""One group of a finished step, walked through the paper's Eq. 11, 13, 9 and 8 with its own numbers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from dapo.algo.advantages import STD_EPS
from dapo.algo.overlong import overlong_penalty, trains
from dapo.analysis.replay import CannotReplay, Replay, ReplayedUpdate, ReplayPlan, initial_or_saved, plan_replay
from dapo.analysis.stored_groups import StoredGroup, local_encoder, read_groups
from dapo.analysis.token_terms import CLIP_NAMES, TokenTerms, token_terms
from dapo.config import Config
from dapo.core.errors import ConfigError, DataError
from dapo.data.prompts import PromptEncoder
from dapo.policy.policy import loss_weights
from dapo.runs.directory import RunDirectory
from dapo.runs.stored_config import load_run_config
from dapo.training.assemble.resolve import resolve_auto
from dapo.training.samples import minibatches, shaped_reward, with_advantages
from dapo.types import Sample

KL_NOT_STORED = (
    "its advantages are of rewards from which the divergence to the reference was subtracted (loss.kl_in=reward), and "
    "no file holds that"
)


@dataclass(frozen=True)
class _Update:
    """The optimizer update that a group takes part in."""

    number: int
    """From 0."""
    of: int
    samples: Sequence[Sample]
    weights: Sequence[float]
    terms: Sequence[TokenTerms] | None
    """None: the log-probabilities that the loss needs are not known."""
    replayed: ReplayedUpdate | None
    ratios: Mapping[str, Any]
    """How the ratios are known, as JSON."""
    compared: Mapping[int, Sequence[float]]
    """By group, the rewards that make its advantages what they are."""

    @property
    def gradient_sum(self) -> float:
        """The sum over all tokens of the size of the loss's derivative by their log-probabilities; 1 for none."""
        return sum(float(each.gradient.abs().sum()) for each in self.terms or ()) or 1.0

    @property
    def unclipped_gradient_sum(self) -> float:
        """The same, if nothing were clipped."""
        return sum(float(each.unclipped_gradient.abs().sum()) for each in self.terms or ()) or 1.0


def explain_group(
    run_dir: str | Path,
    step: int,
    group: int | None = None,
    *,
    recompute: bool = True,
    log: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """What became of one group: kept or not, its rewards and advantages, its tokens' ratios, clips and gradient.

    Every number is one that the run computed, or comes from the code that did. Ratios need the policy's
    log-probabilities, which no run stores: where they are not 1 by construction, the step is trained again in memory,
    from the newest checkpoint before it and the stored responses. Nothing is written.

    Args:
        run_dir: A run directory.
        step: A finished step, from 1, whose responses are stored.
        group: The group's id, `group_id` in the table of responses; None: the one with the most clipped tokens of the
            step's last update, of equals the one with the largest standard deviation of rewards, then the shortest.
        recompute: Train the step again where that is needed; False: leave out what only that can show.
        log: Takes a line about each step that is trained again.

    Returns:
        JSON values; docs/view.md describes them.

    Raises:
        CheckpointError: There is no such run.
        DataError: The responses of the step are gone, or it has no such group.
        ConfigError: The run's advantages come from a critic, or of rewards that no file holds.
    """
    directory = RunDirectory.open(run_dir)
    config = resolve_auto(load_run_config(directory))
    if config.has_critic:
        raise ConfigError(
            "advantage.estimator=gae compares each token with the value of a critic, which is stored nowhere, and this "
            "walk is through Eq. 9; `dapo view` shows the responses, with the mean advantage of each"
        )
    if config.loss.has_kl_reward:
        raise ConfigError(f"{directory.path} cannot be explained: {KL_NOT_STORED}")
    light = read_groups(directory, step, tokens_of=())
    if group is not None and group not in {each.group.id for each in light}:
        ids = ", ".join(str(each.group.id) for each in light)
        raise DataError(f"step {step} of {directory.path} has no group {group}; its groups: {ids}")
    update = _update_of(directory, config, light, step, group, recompute=recompute, log=log)
    chosen = group if group is not None else _most_instructive(light, update)
    (stored,) = (each for each in read_groups(directory, step, tokens_of=[chosen]) if each.group.id == chosen)
    explained = _describe(config, stored, update if stored.outcome == "trained" else None)
    reason = None if group is not None else _why_chosen(update)
    return {"run": str(directory.path), "step": step, "group": chosen, "chosen_because": reason, **explained}


def _update_of(
    directory: RunDirectory,
    config: Config,
    light: Sequence[StoredGroup],
    step: int,
    group: int | None,
    *,
    recompute: bool,
    log: Callable[[str], None],
) -> _Update | None:
    """The update of a group, or the step's last one; None where it trains in none."""
    samples = with_advantages([each.group for each in light if each.outcome == "trained"], config)
    updates = minibatches(samples, config, step=step)
    members = [{sample.group_id for sample in update} for update in updates]
    taking_part = [i for i, ids in enumerate(members) if group is None or group in ids]
    if not taking_part:
        return None
    number = taking_part[-1]
    own, weights = updates[number], loss_weights(updates[number], config).tolist()
    needs = _why_log_probabilities(config, number)
    update = _Update(number, len(updates), own, weights, None, None, {}, _compared_rewards(samples, config))
    if config.loss.function is not None:
        why = f"the loss is {config.loss.function}, not Eq. 8: what it takes from each token only it can say"
        return replace(update, ratios={"known": False, "source": "own_loss", "why": why})
    if needs is None:
        ratios = {
            "known": True,
            "source": "first_update",
            "why": "in the first update of a step the policy still is the one that the step began with: every ratio "
            "is 1 by construction, and nothing is clipped",
        }
        return replace(update, terms=token_terms(own, weights, config.loss), ratios=ratios)
    if not recompute:
        return replace(update, ratios={"known": False, "source": "missing", "why": f"{needs}, which was not asked for"})
    try:
        plan = plan_replay(directory, config, step)
        replay = Replay(directory, config, plan, log=log)
        found = replay.update(number)
    except CannotReplay as error:
        return replace(update, ratios={"known": False, "source": "missing", "why": f"{needs}: {error}"})
    terms = token_terms(found.samples, weights, config.loss, found.logprobs, found.reference)
    ratios = {"known": True, "source": "replayed", "why": _how_replayed(plan), "replay": _evidence(plan, replay)}
    return replace(update, samples=found.samples, terms=terms, replayed=found, ratios=ratios)


def _compared_rewards(samples: Sequence[Sample], config: Config) -> dict[int, list[float]]:
    """The rewards that each group's are compared with: its own, or those of the whole step."""
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.group_id, []).append(sample.reward)
    if config.advantage.estimator != "reinforce_pp":
        return rewards
    whole = [sample.reward for sample in samples]
    return dict.fromkeys(rewards, whole)


def _why_log_probabilities(config: Config, number: int) -> str | None:
    """What the log-probabilities of the policy are needed for in an update, None where nothing needs them."""
    if number:
        return f"the ratios of update {number + 1} need the step to be trained again"
    if config.loss.has_kl_term:
        return "the KL term (loss.kl_coef) needs the policy's log-probabilities, and so the step to be trained again"
    if config.loss.engine_correction is not None:
        return "loss.engine_correction needs the policy's log-probabilities, and so the step to be trained again"
    return None


def _how_replayed(plan: ReplayPlan) -> str:
    begin = f"step {plan.step} was" if plan.start == plan.step - 1 else f"steps {plan.start + 1} to {plan.step} were"
    return f"{begin} trained again in memory from {initial_or_saved(plan)}, with the stored responses"


def _evidence(plan: ReplayPlan, replay: Replay) -> dict[str, Any]:
    found = replay.evidence()
    return {
        "from_step": plan.start,
        "to_step": plan.step,
        "metrics_compared": found.compared,
        "metrics_equal": found.equal,
        "largest_relative_difference": found.largest_difference,
    }


def _most_instructive(light: Sequence[StoredGroup], update: _Update | None) -> int:
    """The id of the group to explain where none is named; see `explain_group`."""
    if update is None:
        return light[0].group.id
    clipped: dict[int, int] = {}
    rewards: dict[int, list[float]] = {}
    for i, sample in enumerate(update.samples):
        number = 0 if update.terms is None else int((update.terms[i].clipped > 0).sum())
        clipped[sample.group_id] = clipped.get(sample.group_id, 0) + number
        rewards.setdefault(sample.group_id, []).append(sample.reward)
    tokens = {each.group.id: each.group.num_tokens for each in light}
    return max(clipped, key=lambda group: (clipped[group], stdev(rewards[group]), -tokens[group], -group))


def _why_chosen(update: _Update | None) -> str:
    """How `_most_instructive` has chosen, in words."""
    if update is None:
        return "the first group of the step, in which none trains"
    spread = "the one with the largest standard deviation of rewards, then the shortest"
    if update.terms is None:
        return f"of the groups of the step's last update {spread} (clipped tokens are not known)"
    return f"the group with the most clipped tokens of the step's last update; of equals {spread}"


def _describe(config: Config, stored: StoredGroup, update: _Update | None) -> dict[str, Any]:
    """All of an explanation but which group it is about."""
    group = stored.group
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
        "eq13": _eq13(config),
        "eq9": None,
        "eq8": None,
        "responses": responses,
        "clipped_tokens": [],
        "notes": _notes(config, stored),
    }
    if update is None:
        return result
    rewards, advantage = update.compared[group.id], config.advantage
    result["eq9"] = {
        "estimator": advantage.estimator,
        "mean": fmean(rewards),
        "std": stdev(rewards),
        "scale": {"group": advantage.scale, "rloo": "none", "reinforce_pp": "std"}[advantage.estimator],
        "eps": STD_EPS,
        "rewards": len(rewards),
    }
    result["eq8"] = _eq8(config, group.id, update)
    for i, sample in enumerate(update.samples):
        if sample.group_id == group.id:
            own = _sample(config, stored, update, i, encoder)
            result["clipped_tokens"] += own.pop("clipped_tokens")
            responses[sample.index] |= own
    return result


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
    """Why a group has its outcome, as a sentence with its numbers."""
    group, sampling = stored.group, config.dynamic_sampling
    valid = [verdict for verdict in group.verdicts if verdict.error is None]
    scores = [verdict.score for verdict in valid]
    k, n = group.num_correct, len(valid)
    if any(verdict.correct is None for verdict in valid):
        signal = f"its scores reach from {min(scores):g} to {max(scores):g}"
    else:
        signal = f"{k} of its {n} responses {'is' if k == 1 else 'are'} right"
    filtered = "dynamic_sampling.filter"
    if stored.outcome == "trained" and not sampling.enabled:
        return f"{signal}; dynamic_sampling.enabled=false trains on every group"
    return {
        "trained": f"{signal}: {'0 < ' + str(k) + ' < ' + str(n) + ', so' if 'right' in signal else 'they differ, so'} "
        f"the group carries a signal" + (f", and {filtered} keeps it" if sampling.filter is not None else ""),
        "all_correct": f"all {n} responses are right: no response is better than another",
        "all_wrong": f"all {n} responses are wrong: no response is better than another",
        "zero_variance": f"all {n} scores are {scores[0] if scores else 0:g}: no response is better than another",
        "filtered": f"{signal}, and {filtered} refuses the group",
        "invalid": f"{n} of its {group.size} responses {'has' if n == 1 else 'have'} a verdict: there is nothing to "
        "compare",
        "excess": "the batch was full before this group's turn came; its problem went back to the stream",
        "aborted": "the batch was full before all of its responses had ended",
    }[stored.outcome]


def _eq13(config: Config) -> dict[str, Any]:
    overlong = config.overlong
    return {
        "mode": overlong.mode,
        "max_length": config.rollout.max_response_tokens,
        "buffer": overlong.buffer_tokens if overlong.mode == "soft" else None,
        "penalty": overlong.penalty if overlong.mode == "soft" else None,
    }


def _response(config: Config, stored: StoredGroup, i: int) -> dict[str, Any]:
    """What is known of a response before the update: its verdict, Eq. 13 and its reward."""
    group = stored.group
    generation, verdict, length = group.generations[i], group.verdicts[i], len(group.generations[i].token_ids)
    penalty = 0.0
    if config.overlong.mode == "soft":
        maximum, buffer = config.rollout.max_response_tokens, config.overlong.buffer_tokens
        penalty = overlong_penalty(length, max_length=maximum, buffer=buffer, factor=config.overlong.penalty)
    return {
        "sample": i,
        "text": group.texts[i],
        "tokens": length,
        "finish": generation.finish,
        "version": generation.version,
        "correct": verdict.correct,
        "score": None if verdict.error is not None else verdict.score,
        "components": dict(verdict.components),
        "error": verdict.error,
        "overlong_penalty": penalty,
        "reward": group.rewards[i],
        "advantage": stored.advantages[i],
        "trains": stored.advantages[i] is not None and trains(generation.finish, mode=config.overlong.mode),
    }


def _eq8(config: Config, group: int, update: _Update) -> dict[str, Any]:
    loss = config.loss
    lengths = [sample.num_trained_tokens for sample in update.samples]
    terms = update.terms
    of_group = [i for i, sample in enumerate(update.samples) if sample.group_id == group]
    return {
        "update": update.number + 1,
        "updates": update.of,
        "groups": list(dict.fromkeys(sample.group_id for sample in update.samples)),
        "responses": len(update.samples),
        "trained_tokens": sum(lengths),
        "aggregate": loss.aggregate,
        "clip": {"low": 1 - loss.clip_low, "high": 1 + loss.clip_high, "dual": loss.dual_clip},
        "kl_coef": loss.kl_coef,
        "entropy_coef": loss.entropy_coef,
        "engine_correction": loss.engine_correction,
        "ratios": dict(update.ratios),
        "loss": None if terms is None else sum(_loss(each, config) for each in terms),
        "loss_of_group": None if terms is None else sum(_loss(terms[i], config) for i in of_group),
        "gradient_share_of_group": (
            None if terms is None else sum(float(terms[i].gradient.abs().sum()) for i in of_group) / update.gradient_sum
        ),
        "clipped_tokens": None if terms is None else sum(int((each.clipped > 0).sum()) for each in terms),
    }


def _loss(terms: TokenTerms, config: Config) -> float:
    return terms.loss + config.loss.kl_coef * terms.kl  # 0 where the loss has no such term


def _sample(
    config: Config, stored: StoredGroup, update: _Update, i: int, encoder: PromptEncoder | None
) -> dict[str, Any]:
    """What an update makes of one response, and the tokens of it that are clipped."""
    sample, replayed = update.samples[i], update.replayed
    generation = stored.group.generations[sample.index]
    texts = None if encoder is None else [encoder.decode_prompt([token]) for token in generation.token_ids]
    tokens: dict[str, Any] = {
        "ids": list(generation.token_ids),
        "texts": texts,
        "engine_logprobs": list(generation.logprobs) or None,
        "old_logprobs": None if replayed is None else list(sample.old_logprobs or ()),
        "logprobs": None if replayed is None else list(replayed.logprobs[i]),
        "reference_logprobs": None if replayed is None or replayed.reference is None else list(replayed.reference[i]),
    }
    found: dict[str, Any] = {"weight": update.weights[i], "token_values": tokens, "clipped_tokens": []}
    if update.terms is None:
        return found | {"loss": None, "gradient_share": None, "clipped": None}
    terms, whole = update.terms[i], update.gradient_sum
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
        "gradient_share": float(terms.gradient.abs().sum()) / whole,
        "clipped": len(found["clipped_tokens"]),
    }


def _clipped_token(config: Config, update: _Update, i: int, position: int, tokens: Mapping[str, Any]) -> dict[str, Any]:
    assert update.terms is not None
    terms, loss = update.terms[i], config.loss
    kind, unclipped = CLIP_NAMES[int(terms.clipped[position])], float(terms.unclipped_gradient[position])
    return {
        "sample": update.samples[i].index,
        "position": position,
        "id": tokens["ids"][position],
        "text": None if tokens["texts"] is None else tokens["texts"][position],
        "ratio": float(terms.ratio[position]),
        "bound": {"low": 1 - loss.clip_low, "high": 1 + loss.clip_high, "dual": loss.dual_clip}[kind],
        "side": kind,
        "gradient": float(terms.gradient[position]),
        "gradient_share": tokens["gradient_shares"][position],
        "gradient_without_clip": unclipped,
        "gradient_share_without_clip": abs(unclipped) / update.unclipped_gradient_sum,
    }


def _notes(config: Config, stored: StoredGroup) -> list[str]:
    """What a reader should know of these numbers."""
    notes = []
    group = stored.group
    shaped = [shaped_reward(g, v, config) for g, v in zip(group.generations, group.verdicts, strict=True)]
    if shaped != list(group.rewards):
        notes.append(
            "the stored rewards are not those of the run's config.yaml: this step ran with other options, given to "
            "`dapo resume`; the numbers here that come from options may be others"
        )
    if config.loss.entropy_coef > 0 or config.loss.entropy_target is not None:
        name = "entropy_coef" if config.loss.entropy_target is None else "entropy_target"
        notes.append(f"the entropy term (loss.{name}) is in no loss and gradient here")
    if config.dynamic_sampling.weights != "none":
        notes.append("the group's own loss weight (dynamic_sampling.weights=inverse) is stored nowhere and left out")
    if config.uses_trainer_group:
        notes.append("the run trained on processes of its own: one process gives the same numbers up to rounding")
    return notes
