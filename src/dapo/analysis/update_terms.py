"""The optimizer update of a group: the terms of its tokens in loss and gradient (Eq. 8), from the
code that trains.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dapo.algo.loss import LOG_RATIO_BOUND, Responses, clip_log_ratio
from dapo.analysis.replay import CannotReplay, Replay, ReplayedUpdate, plan_replay
from dapo.analysis.stored_groups import StoredGroup
from dapo.config import Config, LossConfig
from dapo.policy.minibatch import loss_weights
from dapo.policy.objective import (
    corrected_weights,
    gradient_terms,
    objective_gradient,
    objective_sums,
)
from dapo.runs.directory import RunDirectory
from dapo.training.samples import minibatches, with_advantages
from dapo.types import Sample

CLIP_NAMES = ("none", "low", "high", "dual")
"""The kinds of `TokenTerms.clipped`: no clip, 1 - clip_low, 1 + clip_high, dual_clip."""


@dataclass(frozen=True)
class TokenTerms:
    """The terms of one response's tokens in the loss of its update; `[T]` float64 each."""

    ratio: Tensor  # the ratio r of Eq. 6: the policy over pi_old
    # factor of the token's surrogate in the loss: Eq. 12's, times the engine correction, if any
    weight: Tensor
    # derivative of the loss by the token's log-probability; a clipped token has only its KL term's
    gradient: Tensor
    # `gradient` without clipping; equal to it if `loss.surrogate` is not `clip`
    unclipped_gradient: Tensor
    clipped: Tensor  # indices into CLIP_NAMES; 0 if `loss.surrogate` is not `clip`
    loss: float  # the response's part of the policy loss (Eq. 8, negated)
    # the response's part of the KL divergence, before `loss.kl_coef`; 0 without a KL term
    kl: float

    @property
    def gradient_size(self) -> float:
        """Sum over tokens of abs(d loss / d logprob)."""
        return float(self.gradient.abs().sum())

    @property
    def num_clipped(self) -> int:
        return int((self.clipped > 0).sum())


def token_terms(
    samples: Sequence[Sample],
    weights: Sequence[float],
    config: LossConfig,
    logprobs: Sequence[Sequence[float]] | None = None,
    reference: Sequence[Sequence[float]] | None = None,
) -> list[TokenTerms]:
    """Compute the terms of all samples of an update in float64, with `weights` per token, without
    an entropy term.

    `logprobs` are those of the policy that the update begins with (None: it is pi_old, every ratio
    is 1), `reference` those of a KL term.
    """
    found = []
    for i, (sample, weight) in enumerate(zip(samples, weights, strict=True)):
        length = len(sample.response_ids)
        ones = torch.ones(length, dtype=torch.float64)
        own = sample.token_advantages
        advantages = sample.advantage * ones if own is None else _row(own)
        tokens = {
            "mask": _row(sample.mask).bool(),
            "weights": weight * ones,
            "advantages": advantages,
        }
        now = ones - 1 if logprobs is None else _row(logprobs[i])
        if logprobs is not None:
            tokens["old"] = _row(sample.old_logprobs or ())
        if len(sample.engine_logprobs) == length:
            tokens["engine"] = _row(sample.engine_logprobs)
        if reference is not None:
            tokens["reference"] = _row(reference[i])
        found.append(_terms_of(now, tokens, config))
    return found


def _terms_of(logprobs: Tensor, tokens: dict[str, Tensor], config: LossConfig) -> TokenTerms:
    responses = Responses(torch.zeros(len(logprobs), dtype=torch.int64), (len(logprobs),))
    terms = gradient_terms(tokens, config, responses, logprobs)
    old = tokens.get("old", logprobs)
    advantages = tokens["advantages"]
    log_ratio = (logprobs - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    wide = terms
    clipped = torch.zeros(len(old), dtype=torch.int64)
    if config.is_clipped:
        bounds = {
            "low": torch.full_like(old, -LOG_RATIO_BOUND),
            "high": torch.full_like(old, LOG_RATIO_BOUND),
        }
        wide = {**terms, **bounds}
        trained = torch.where(tokens["mask"], log_ratio, 0.0)
        bounded = clip_log_ratio(trained, terms["low"], terms["high"])
        clipped[bounded > trained] = CLIP_NAMES.index("low")
        clipped[(bounded < trained) & (advantages > 0)] = CLIP_NAMES.index("high")
        clipped[(bounded < trained) & (advantages < 0)] = CLIP_NAMES.index("dual")
    sums = objective_sums(logprobs, torch.zeros_like(old), terms, config, responses=responses)
    weights, _ = corrected_weights(old, terms, config)
    weights = torch.where(tokens["mask"], weights, 0.0)
    return TokenTerms(
        ratio=log_ratio.exp(),
        weight=weights,
        gradient=objective_gradient(logprobs, terms, config).by_logprob,
        unclipped_gradient=objective_gradient(logprobs, wide, config).by_logprob,
        clipped=clipped,
        loss=float(sums["loss"]),
        kl=float(sums["kl"]) if "kl" in sums else 0.0,
    )


def _row(values: Sequence[float]) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float64).copy())


@dataclass(frozen=True)
class GroupUpdate:
    """The optimizer update that trains a group."""

    number: int  # its index in the step, from 0
    num_updates: int
    samples: Sequence[Sample]
    weights: Sequence[float]
    terms: Sequence[TokenTerms] | None
    """The terms of its tokens; None: the log-probabilities that the loss needs are not known."""
    replayed: ReplayedUpdate | None
    ratios: Mapping[str, Any]  # whether and how the ratios are known, as JSON values
    rewards: Mapping[int, Sequence[float]]  # the rewards of each group of the step, by group id

    @property
    def gradient_sum(self) -> float:
        """Sum over tokens of abs(d loss / d logprob); 1 if there are no terms, to divide by."""
        return sum(each.gradient_size for each in self.terms or ()) or 1.0

    @property
    def unclipped_gradient_sum(self) -> float:
        """The same sum without clipping."""
        return sum(float(each.unclipped_gradient.abs().sum()) for each in self.terms or ()) or 1.0


def find_update(
    directory: RunDirectory,
    config: Config,
    groups: Sequence[StoredGroup],
    step: int,
    group: int | None,
    *,
    recompute: bool,
    log: Callable[[str], None],
) -> GroupUpdate | None:
    """Find the update that trains a group, or the step's last update; None if none trains it."""
    trained = [each for each in groups if each.outcome == "trained"]
    samples = with_advantages([each.group for each in trained], config)
    updates = minibatches(samples, config, step=step)
    members = [{sample.group_id for sample in update} for update in updates]
    taking_part = [i for i, ids in enumerate(members) if group is None or group in ids]
    if not taking_part:
        return None
    number = taking_part[-1]
    own = updates[number]
    weights = loss_weights(updates[number], config).tolist()
    needs = _why_log_probabilities(config, number)
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.group_id, []).append(sample.reward)
    update = GroupUpdate(number, len(updates), own, weights, None, None, {}, rewards)
    if config.loss.function is not None:
        why = (
            f"the loss is {config.loss.function}, not Eq. 8, so the terms of its tokens are not"
            " known"
        )
        return replace(update, ratios=_ratios("own_loss", why))
    if needs is None:
        why = (
            "the first update of a step begins with the policy that sampled it: every ratio is 1,"
            " nothing is clipped"
        )
        return replace(
            update,
            terms=token_terms(own, weights, config.loss),
            ratios=_ratios("first_update", why),
        )
    if not recompute:
        return replace(update, ratios=_ratios("missing", f"{needs}, which was not requested"))
    try:
        plan = plan_replay(directory, config, step)
        replay = Replay(directory, config, plan, log=log)
        found = replay.update(number)
    except CannotReplay as error:
        return replace(update, ratios=_ratios("missing", f"{needs}: {error}"))
    terms = token_terms(found.samples, weights, config.loss, found.logprobs, found.reference)
    ratios = _ratios("replayed", plan.describe()) | {"replay": replay.evidence()}
    return replace(update, samples=found.samples, terms=terms, replayed=found, ratios=ratios)


def _ratios(
    source: Literal["own_loss", "first_update", "missing", "replayed"], why: str
) -> dict[str, Any]:
    return {"known": source in ("first_update", "replayed"), "source": source, "why": why}


def _why_log_probabilities(config: Config, number: int) -> str | None:
    """The reason why an update needs the policy's log-probabilities; None if nothing does."""
    if number:
        return f"the ratios of update {number + 1} need the step to be trained again"
    needs = "needs the policy's log-probabilities, and so the step to be trained again"
    if config.loss.has_kl_term:
        return f"the KL term (loss.kl_coef) {needs}"
    return None if config.loss.engine_correction is None else f"loss.engine_correction {needs}"
