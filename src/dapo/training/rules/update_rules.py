"""Rules over a run's updates: entropy, step size, gradients, and the gap between sampler and
trainer.
"""

import math
from collections.abc import Mapping
from statistics import fmean, median

from dapo.algo.surrogate_table import SURROGATES
from dapo.config import Config
from dapo.training.rules.finding import Symptom
from dapo.training.rules.history import GAIN, LONG, MIN_KEEP_RATE, MIN_STEPS, MetricHistory
from dapo.training.rules.sampling_rules import signal_rate

ENTROPY_FRACTION = 0.1  # the fraction of the first steps' entropy below which it has collapsed
LOW_ENTROPY = 0.01  # nats per token below which it has collapsed, whatever it was at first
SOLVED = 0.9  # the accuracy at which a policy may be certain: its problems are solved
# steps of a mean accuracy that is compared: five steps of few prompts vary by more than half
FALL_STEPS = 16
ENTROPY_GROWTH = 1.5
ENTROPY_RISE = 0.5
"""The factor over the first steps' entropy, and the nats above it, that are an explosion."""
# nats per token between sampler and trainer, mean over a step's tokens, above which a run warns
MAX_LOGPROB_GAP = 0.1
IDLE_CLIPPED = 1e-3
IDLE_KEPT = 0.9
IDLE_TRUNCATED = 0.02
IDLE_LENGTHS = 1.5
"""The fraction of tokens at the upper clip, of groups with a signal, and of truncated responses,
and the longest response over the mean one, from which on clip-higher, dynamic sampling, the
overlong treatment and the token-level loss are idle.
"""
# the factor over the usual gradient norm (the median of the last steps) that is a spike
SPIKE = 10.0
SPIKE_STEPS = 6  # steps from which a norm is usual
HIGH_KL = 0.1
HIGH_CLIPPED = 0.2
"""Nats per token from the policy at the start of the step, and fraction of clipped tokens, that are
too much.
"""
# the smallest clip_low or clip_high whose clipped tokens count: Eq. 8's lower bound
MIN_BOUND = 0.2
_CLIP_FRACTIONS = ("loss/clip_high_fraction", "loss/clip_low_fraction")
# the fraction of skipped updates that is an error; a rare one costs a run nothing
MANY_SKIPPED = 0.1
LOW_KL = 1e-8  # nats per token below which the policy does not move
MIN_LR_FRACTION = 0.1  # the fraction of optim.lr below which the rate of a step is low by design


def entropy_collapse(history: MetricHistory, config: Config) -> Symptom | None:
    """The policy has become certain, and its responses are not correct.

    A policy that learns its task becomes certain as well: what accuracy does decides.
    """
    name = "loss/entropy"
    performance = history.performance
    entropy = history.mean(name)
    first_entropy = history.first_mean(name)
    now = history.mean(performance)
    if entropy is None or first_entropy is None or history.gain is None or now is None:
        return None
    is_low = entropy < ENTROPY_FRACTION * first_entropy or (
        entropy < LOW_ENTROPY and entropy < first_entropy / 2
    )
    is_accuracy = performance == "reward/accuracy"
    if not is_low or (is_accuracy and now >= SOLVED) or not _has_changed(history, below=1.0):
        return None
    has_lost = _has_halved(history) and not config.dynamic_sampling.predict
    has_gained = history.gain >= GAIN and not has_lost
    if has_gained and is_accuracy:
        return None
    if has_lost:
        result = "has halved"
    elif has_gained:
        result = "can rise further"
    else:
        result = "has not risen"
    wrong = f": {1 - now:.0%} of the responses are wrong" if is_accuracy else ""
    warmer = ("rollout.temperature=1.0",) if config.rollout.temperature < 1 else ()
    # without ratios, or in a loss without that bound, nothing is clipped
    wider: tuple[str, ...] = ()
    if config.clips_high:
        bound = 1.25 * config.loss.clip_high
        # the paper's bound is of a token's ratio; that of a whole response is a thousandth of it
        if not SURROGATES[config.loss.surrogate].needs_whole_responses:
            bound = max(0.28, bound)
        wider = (f"loss.clip_high={bound:.2g}",)
    return Symptom(
        f"the policy explores no more: its entropy is {entropy:.3g} nats per token, after"
        f" {first_entropy:.3g} in the first steps, {'if' if has_gained else 'and'} {performance}"
        f" {result}{wrong}",
        {name: entropy, f"{name} at first": first_entropy, performance: now}
        | {f"{performance} at first": history.first_mean(performance)},
        (*warmer, *wider, _lower_lr(config)),
        # a score has no known maximum; selection keeps the accuracy of sampled problems near one
        # half
        severity=(
            "warning"
            if has_gained or (config.dynamic_sampling.predict and history.evaluations < 2)
            else None
        ),
    )


def _has_changed(history: MetricHistory, *, below: float = math.inf, above: float = 0.0) -> bool:
    """Return True if the entropy over all responses changed by a factor within these bounds.

    `loss/entropy` is the mean over the tokens that train: it changes with their choice as well.
    True where it is not known.
    """
    now, first_entropy = (
        get("rollout/entropy_estimate") for get in (history.mean, history.first_mean)
    )
    return not now or not first_entropy or above < now / first_entropy < below


def _has_halved(history: MetricHistory) -> bool:
    """Return True if accuracy is at most half of its recent best, both means over FALL_STEPS."""
    values = history.values("reward/accuracy", LONG)
    means = [fmean(values[end - FALL_STEPS : end]) for end in range(FALL_STEPS, len(values) + 1)]
    return bool(means) and means[-1] <= max(means) / 2


def entropy_explosion(history: MetricHistory, config: Config) -> Symptom | None:
    """The policy becomes more and more random, and does not learn its task."""
    name = "loss/entropy"
    loss = config.loss
    entropy = history.mean(name)
    first_entropy = history.first_mean(name)
    if entropy is None or first_entropy is None:
        return None
    largest = max(
        ENTROPY_GROWTH * first_entropy,
        first_entropy + ENTROPY_RISE,
        ENTROPY_GROWTH * (loss.entropy_target or 0.0),
    )
    has_learned = (
        not loss.entropy_coef and (history.gain or 0.0) >= GAIN and not _has_halved(history)
    )
    has_learned = has_learned or _fits_examples(history)
    if entropy <= largest or has_learned or not _has_changed(history, above=1.0):
        return None
    bonus = (f"loss.entropy_coef={loss.entropy_coef / 10:.2g}",) if loss.entropy_coef else ()
    paid = f"loss.entropy_coef={loss.entropy_coef:g} rewards randomness"
    reason = paid if bonus else "the updates destroy what the model knew"
    return Symptom(
        f"the policy becomes random: its entropy is {entropy:.3g} nats per token, after"
        f" {first_entropy:.3g} in the first steps; {reason}",
        {
            name: entropy,
            f"{name} at first": first_entropy,
            "reward/mean": history.mean("reward/mean"),
        },
        (*bonus, _lower_lr(config)),
    )


def _fits_examples(history: MetricHistory) -> bool:
    """Return True if worked examples become likelier: a policy may be as varied as they are."""
    now = history.mean("loss/nll")
    first = history.first_mean("loss/nll")
    return now is not None and first is not None and now < first


def idle_techniques(history: MetricHistory, config: Config) -> Symptom | None:
    """A technique of the paper that is on has nothing to act on."""
    loss = config.loss
    overlong = config.overlong
    rollout = config.rollout
    means = history.means("loss/clip_high_fraction", "loss/movement", "rollout/truncated_fraction")
    means |= history.means(
        "rollout/response_tokens_max", "rollout/response_tokens_mean", "loss/ratio_mean"
    )
    stopped, moved, truncated, longest, usual, ratio = means.values()
    clips = SURROGATES[loss.surrogate].bounds and not loss.function and ratio is not None
    # 0: no update, so no evidence
    clips_higher = config.clips_high and loss.clip_high > loss.clip_low and moved != 0
    idle = list[str]()
    change = tuple[str, ...]()
    if clips and not config.reuses_samples:
        idle.append("clipping (with one update per step every ratio is 1)")
        groups = rollout.prompts_per_step
        change = tuple(
            f"train.minibatch_groups={n}" for n in range(groups - 1, 0, -1) if groups % n == 0
        )[:1]
    elif clips_higher and stopped is not None and stopped < IDLE_CLIPPED:
        movement = ""
        if (moved or 0) > 0:
            movement = f"tokens move by {moved:.2g} nats per step (root mean square), and "
        bound = f"one is stopped from {math.log1p(loss.clip_high):.2g} nats on"
        idle.append(
            f"clip-higher (the upper clip stops {stopped:.2g} of the tokens: {movement}{bound})"
        )
    signal_fraction = signal_rate(history, config)
    samples_every_problem = config.dynamic_sampling.enabled and not config.dynamic_sampling.predict
    if samples_every_problem and signal_fraction is not None and signal_fraction >= IDLE_KEPT:
        idle.append(f"dynamic sampling ({signal_fraction:.0%} of the groups carry a signal)")
    is_far = (
        overlong.mode == "filter"
        or (longest or math.inf) <= rollout.max_response_tokens - overlong.buffer_tokens
    )
    if overlong.mode != "off" and truncated is not None and truncated < IDLE_TRUNCATED and is_far:
        idle.append(
            f"overlong.mode={overlong.mode} ({truncated:.1%} of the responses reach the limit)"
        )
    if (
        loss.aggregate == "token"
        and longest is not None
        and usual
        and longest < IDLE_LENGTHS * usual
    ):
        idle.append(
            f"the token-level loss (the longest response has {longest / usual:.2g} times the mean"
            " length)"
        )
    if not idle:
        return None
    return Symptom(
        f"these techniques have nothing to act on: {'; '.join(idle)}",
        means,
        change,
        advice=(
            "an idle technique costs little and may act later; dapo show docs doctor has the"
            " conditions"
        ),
    )


def sampler_gap(history: MetricHistory, config: Config) -> Symptom | None:
    """The log-probabilities of engine and trainer differ."""
    gap = history.mean("rollout/engine_logprob_gap_mean")
    # NaN is a gap too
    if gap is None or gap <= MAX_LOGPROB_GAP or config.loss.engine_correction is not None:
        return None
    return Symptom(
        f"sampler and trainer differ by {gap:.3g} nats per token on average (more than"
        f" {MAX_LOGPROB_GAP:g}): the engine may hold other weights, or compute in a coarser dtype,"
        " which loss.engine_correction=tis corrects",
        history.means("rollout/engine_logprob_gap_mean", "rollout/engine_logprob_gap_max"),
        ("loss.engine_correction=tis", "model.dtype=float32"),
    )


def skipped_updates(history: MetricHistory, config: Config) -> Symptom | None:
    """Updates were not made."""
    skipped = history.total("optim/skipped")
    if not skipped:
        return None
    updates = config.updates_per_step * len(history.window())
    means = history.means("optim/grad_norm", "loss/approx_kl")
    averages = (
        ", ".join(f"{name} {value:.3g}" for name, value in means.items() if value is not None)
        or "no gradient"
    )
    limit = config.loss.max_approx_kl
    moved = means["loss/approx_kl"]
    change = _lower_lr(config)
    advice = ""
    if config.loss.function is not None:
        change = ""
        advice = (
            f"check that {config.loss.function} returns finite values for every ratio and advantage"
        )
    # a usual step
    elif limit is not None and limit <= HIGH_KL and moved is not None and moved <= HIGH_KL:
        change = f"loss.max_approx_kl={max(1.0, 10 * limit):g}"
    return Symptom(
        f"{skipped:.0f} of {updates} updates skipped, with {averages} on average: the loss or the"
        " gradient was not finite, or the policy had moved too far from the one that sampled",
        {"optim/skipped": skipped} | means,
        (change,) if change else (),
        advice,
        severity=None if skipped > MANY_SKIPPED * updates else "warning",
    )


def gradient_spike(history: MetricHistory, config: Config) -> Symptom | None:
    """A gradient was far larger than the run's usual ones."""
    name = "optim/grad_norm"
    norms = [norm for norm in history.values(name, LONG) if norm > 0]
    recent = [norm for norm in history.values(name) if norm > 0]
    if len(norms) < SPIKE_STEPS or not recent:
        return None
    usual = median(norms)
    largest = max(recent)
    # every update has that norm, this one as well
    is_clipped_anyway = usual >= config.optim.max_grad_norm
    # whose norms are small
    is_of_few_groups = history.rate("rollout/zero_advantage_fraction") > 1 - MIN_KEEP_RATE
    if (
        is_clipped_anyway
        or is_of_few_groups
        or largest <= max(SPIKE * usual, config.optim.max_grad_norm)
    ):
        return None
    at = [record.get(name) for record in history.window()].index(largest)
    scale = ("advantage.scale=std",) if config.advantage.scale == "none" else ()
    return Symptom(
        f"the gradient of step {history.span()[0] + at} has the norm {largest:.3g},"
        f" {largest / usual:.0f} times the usual {usual:.3g}: one batch turns the policy"
        + (", as unscaled advantages let one extreme reward outweigh the others" if scale else ""),
        {name: largest, f"{name} usually": usual, "reward/mean": history.mean("reward/mean")},
        (*scale, f"optim.max_grad_norm={max(usual, 1e-3):.1g}", _lower_lr(config)),
    )


def lr_too_high(history: MetricHistory, config: Config) -> Symptom | None:
    """A step moves the policy farther than clipping can hold it."""
    divergence = history.median("loss/approx_kl")
    clipped = _clipped_tokens(history, config)
    if divergence is None or (divergence <= 10 * HIGH_KL and len(history.window()) < MIN_STEPS):
        return None
    if divergence <= HIGH_KL and clipped <= HIGH_CLIPPED:
        return None
    clipping = f", and {clipped:.0%} of the tokens are clipped" if clipped else ""
    return Symptom(
        f"each step moves the policy too far: {divergence:.3g} nats per token"
        f" (loss/approx_kl){clipping}",
        {"loss/approx_kl": divergence} | {name: history.median(name) for name in _CLIP_FRACTIONS},
        (_lower_lr(config),),
    )


def _clipped_tokens(history: MetricHistory, config: Config) -> float:
    """Return the fraction of tokens whose own ratio is beyond a bound at least as wide as Eq. 8's.

    Tighter bounds clip without a large step. So does a ratio per response: GSPO's published bounds
    clip 14 % of the tokens at 0.0003. A surrogate without a bound has no such tokens.
    """
    loss = config.loss
    row = SURROGATES[config.loss.surrogate]
    if loss.function is not None or row.needs_whole_responses:
        return 0.0
    sides = zip(_CLIP_FRACTIONS, ("clip_high", "clip_low"), strict=True)
    counted = [
        name for name, bound in sides if bound in row.bounds and getattr(loss, bound) >= MIN_BOUND
    ]
    return sum(history.median(name) or 0.0 for name in counted)


def lr_too_low(history: MetricHistory, config: Config) -> Symptom | None:
    """The policy does not move, although it trains."""
    divergence = history.mean("loss/approx_kl")
    rate = history.mean("optim/lr")
    warmup = config.optim.warmup(config.train.num_steps)
    is_warm = history.step - len(history.window()) >= warmup
    # by its schedule, or for the critic
    is_decayed = rate is not None and rate < MIN_LR_FRACTION * config.optim.lr
    trained = [record for record in history.window() if _trains_twice(record, config)]
    is_sure = (
        is_warm
        and not is_decayed
        and len(trained) >= MIN_STEPS
        and not history.total("optim/skipped")
    )
    if divergence is None or not is_sure or not divergence <= LOW_KL:
        return None
    return Symptom(
        f"the policy does not move: after a step's updates it is {max(divergence, 0.0):.1e} nats"
        " per token from where the step began",
        {"loss/approx_kl": divergence, "optim/lr": rate},
        (f"optim.lr={100 * config.optim.lr:.2g}",),
    )


def _trains_twice(record: Mapping[str, float], config: Config) -> bool:
    """Return True if tokens with an advantage trained twice in a step; until then ratios are 1."""
    share = 1 - record.get("rollout/zero_advantage_fraction", 0.0)
    with_advantage = share * record.get("rollout/groups_trained", 0.0)
    return config.reuses_samples and with_advantage > config.train.minibatch_groups


def _lower_lr(config: Config) -> str:
    return f"optim.lr={config.optim.lr / 10:.2g}"
