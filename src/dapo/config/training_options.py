"""Options of the algorithm and of training: `advantage`, `loss`, `optim`, `critic`, `train`."""

import math
import re
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from dapo.algo.entropy import DELTA, MAX_COEFFICIENT
from dapo.algo.estimator_table import ESTIMATORS
from dapo.algo.surrogate_table import SURROGATES
from dapo.config.section import (
    Auto,
    Float,
    Int,
    Positive,
    Processes,
    Section,
    Seed,
    Tokens,
    option,
    reject_bool,
)

TIS_CAP = 2.0  # the usual cap of truncated importance sampling: `loss.engine_correction: tis`


def _weight_cap(value: object) -> object:
    if isinstance(value, str):
        return {"none": None, "tis": TIS_CAP}.get(value, value)
    return reject_bool(value)


if TYPE_CHECKING:
    SurrogateName: TypeAlias = str
    EstimatorName: TypeAlias = str
else:
    SurrogateName = Literal[tuple(SURROGATES)]
    EstimatorName = Literal[tuple(ESTIMATORS)]

Beta: TypeAlias = Annotated[Float, Field(ge=0, lt=1)]


def fitting_minibatch(prompts_per_step: int, most: int) -> int:
    """Return the largest size of minibatches, up to `most`, that divides the groups of a step.

    >>> fitting_minibatch(48, 32)
    24
    """
    sizes = range(min(prompts_per_step, most), 0, -1)
    return next(size for size in sizes if prompts_per_step % size == 0)


class AdvantageConfig(Section):
    estimator: EstimatorName = option(
        "group",
        "Baseline of a response."
        f" {'; '.join(f'{name}: {row.baseline}' for name, row in ESTIMATORS.items())}. `dapo"
        " show docs losses` has the equations.",
        paper="group",
    )
    scale: Annotated[
        Literal["std", "none"], BeforeValidator(lambda v: "none" if v is None else v)
    ] = option(
        "std",
        "Divisor of advantages. std: the group's standard deviation of rewards (Eq. 9).",
        paper="std",
        only_with="advantage.estimator=group",
        also=[{"type": "null"}],
    )


def _function_path(value: str) -> str:
    if not re.fullmatch(r"[\w.]+:[\w.]+", value):
        raise ValueError("expected module:function, for example my_losses:reinforce")
    return value


class ReferenceServerConfig(Section):
    """A teacher behind a server."""

    url: str = option(
        description=(
            "Address of an OpenAI-compatible server that returns log-probabilities of prompts."
        )
    )
    model: str = option(description="Name of the model that the server serves.")

    def __str__(self) -> str:
        return f"loss.reference.server={{url: {self.url}, model: {self.model}}}"


class ReferenceConfig(Section):
    """The model to which the divergence is measured: exactly one of its options."""

    model: str | None = option(
        None,
        "A teacher with the policy's vocabulary and any architecture: an alias, a directory, a"
        " Hugging Face id, or a run, for its newest checkpoint.",
    )
    every: Positive | None = option(
        None,
        "N: the reference is the policy of the last step that is a multiple of N.",
        unit="steps",
    )
    server: ReferenceServerConfig | None = option(
        None, "A teacher behind a server, for example {url: http://localhost:8000/v1, model: big}."
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        names = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(names) != 1:
            listing = " and ".join(f"loss.reference.{name}" for name in names) or "none"
            raise ValueError(
                f"loss.reference: expected exactly one of model, every and server, got {listing}"
            )
        return self


def _reference_section(value: object) -> object:
    """Refuse the values of earlier versions, which had one option for all kinds of a reference."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return value
    text = str(value)
    if text.isdecimal():
        section = f"{{every: {text}}}"
    elif text.startswith("server:"):
        url, _, model = text.removeprefix("server:").partition("#")
        section = f"{{server: {{url: {url or 'URL'}, model: {model or 'MODEL'}}}}}"
    else:
        section = f"{{model: {text}}}"
    raise ValueError(f"it is a section of model, every or server; write loss.reference={section}")


class LossConfig(Section):
    function: Annotated[str, AfterValidator(_function_path)] | None = option(
        None,
        "module:function of a custom loss that replaces Eq. 8: (logprobs, old_logprobs, advantages,"
        " mask, weights) -> (loss, metrics), see `dapo show docs losses`. none: the loss of the"
        " paper.",
        paper=None,
    )
    surrogate: SurrogateName = option(
        "clip",
        "Contribution of a token with the ratio r to the loss."
        f" {'; '.join(f'{name}: {row.term}' for name, row in SURROGATES.items())}. Equations: `dapo"
        " show docs losses`.",
        paper="clip",
        only_with="has_ratios",
    )
    clip_low: Float = option(
        0.2,
        "Distance below 1 at which a token's ratio is clipped.",
        paper=0.2,
        only_with="clips_low",
        gt=0,
        lt=1,
    )
    clip_high: Float = option(
        0.28,
        "Distance above 1 at which a token's ratio is clipped.",
        paper=0.28,
        only_with="clips_high",
        gt=0,
    )
    dual_clip: Float | None = option(
        None,
        "Largest ratio of tokens with a negative advantage (the released scripts: 10); none: no"
        " limit.",
        paper=None,
        only_with="clips_dual",
        gt=1,
    )
    aggregate: Literal["token", "group", "sequence", "constant"] = option(
        "token",
        "Average of token losses. token: over all tokens, as in DAPO's released code; group: per"
        " group (Eq. 8); sequence: per response (GRPO); constant: divided by the maximum length"
        " (Dr. GRPO).",
        paper="token",
    )
    kl_coef: Float = option(
        0.0,
        "Weight of the KL divergence to the initial policy, or to loss.reference, in the loss or in"
        " the reward.",
        paper=0.0,
        ge=0,
    )
    reference: Annotated[ReferenceConfig | None, BeforeValidator(_reference_section)] = option(
        None,
        "Reference model of the divergence: {model: NAME}, {every: N} or {server: {url: URL,"
        " model: NAME}}; none: the initial policy.",
        paper=None,
        only_with="has_kl",
    )
    kl_estimator: Literal["k1", "k2", "k3", "full"] = option(
        "k3",
        "Estimator of the divergence from sampled tokens, with d = log pi - log pi_ref. k1: d; k2:"
        " d^2 / 2; k3: exp(-d) - 1 + d; full: no estimate, but the divergence over the whole"
        " vocabulary at each token, in the loss. In the loss, the expected gradient of k1 is zero;"
        " in the reward, only k1 has the gradient of the divergence (`dapo show docs losses`).",
        paper="k3",
        only_with="has_kl",
    )
    kl_in: Literal["loss", "reward"] = option(
        "loss",
        "Place of the divergence. loss: a separate term (Eq. 5); reward: subtract kl_coef times its"
        " sum over the response from the reward, after groups are filtered (Eq. 11) and before"
        " advantages are computed.",
        paper="loss",
        only_with="has_kl",
    )
    entropy_coef: Float = option(
        0.0, "Weight of the policy's entropy, which is subtracted from the loss.", paper=0.0, ge=0
    )
    entropy_target: Float | None = option(
        None,
        "Entropy per token below which the loss rewards entropy. Each step raises the weight by"
        f" {DELTA:g}, up to {MAX_COEFFICIENT:g}, if the entropy is lower, and lowers it if the"
        " entropy is higher. none: the weight is loss.entropy_coef.",
        paper=None,
        gt=0,
        unit="nats",
    )
    engine_correction: Annotated[Float | None, BeforeValidator(_weight_cap)] = option(
        None,
        "Cap of truncated importance sampling, which corrects the difference between engine and"
        " trainer: each token's loss is multiplied by min(exp(old_logprob - engine_logprob), cap)."
        " tis: 2; none: no correction.",
        paper=None,
        also=[{"enum": ["tis", "none"]}],
        gt=0,
    )
    engine_ratio: Literal["token", "sequence"] = option(
        "token",
        "Ratio of the engine correction. token: of each token; sequence: the product over the"
        " response.",
        only_with="corrects_engine",
    )
    engine_over_cap: Literal["truncate", "mask"] = option(
        "truncate",
        "Treatment of ratios above loss.engine_correction, the cap. truncate: use the cap"
        " (truncated importance sampling); mask: exclude tokens whose ratio is above the cap or"
        " below 1 / cap (masked importance sampling).",
        only_with="corrects_engine",
    )
    old_logprobs: Literal["policy", "engine"] = option(
        "policy",
        "Source of pi_old in a step with several updates. policy: log-probabilities that the trainer"
        " computes before the first update; engine: those of sampling, which saves that pass. With"
        " loss.engine_correction the ratio is then min(pi / pi_engine, cap), with any engine."
        " Without it engine needs the native engine in the training process, in float32 or float64;"
        " the run ends if the two differ by more than 0.001 nats at any token of a step's first"
        " update.",
        paper="policy",
        only_with="reuses_samples",
    )
    max_approx_kl: Float | None = option(
        10.0,
        "Limit of the mean KL divergence to the old policy (ratio - 1 - log ratio) over an update's"
        " tokens; an update above it is skipped and counted. none: no limit.",
        paper=None,
        gt=0,
        unit="nats",
    )

    @property
    def is_clipped(self) -> bool:
        """True if the built-in loss is that of Eq. 8, which has an explicit gradient."""
        return self.surrogate == "clip"

    @property
    def has_ratio_to_engine(self) -> bool:
        """True if several updates have the ratio pi / pi_engine, which the correction bounds."""
        return self.old_logprobs == "engine" and self.engine_correction is not None

    @property
    def needs_whole_responses(self) -> bool:
        """True if a token's loss depends on the other tokens of its response."""
        correction_needs_them = (
            self.engine_correction is not None and self.engine_ratio == "sequence"
        )
        return SURROGATES[self.surrogate].needs_whole_responses or correction_needs_them

    @property
    def needs_every_sample(self) -> bool:
        """True if responses with an advantage of 0 can have a gradient."""
        has_bonus = self.entropy_coef > 0 or self.entropy_target is not None
        return self.has_kl_term or has_bonus or self.function is not None

    @property
    def teacher(self) -> str | None:
        """The name of the teacher that this process loads; None without one."""
        return None if self.reference is None else self.reference.model

    @property
    def server(self) -> ReferenceServerConfig | None:
        """The teacher behind a server; None without one."""
        return None if self.reference is None else self.reference.server

    @property
    def teacher_name(self) -> str | None:
        """The teacher as messages name it, with the address of its server; None without one."""
        return self.teacher if self.server is None else f"{self.server.model} at {self.server.url}"

    @property
    def has_teacher(self) -> bool:
        """True if the reference is another model than the policy."""
        return self.teacher is not None or self.server is not None

    @property
    def reference_steps(self) -> int | None:
        """The number of steps between copies of the policy to the reference, if it moves."""
        return None if self.reference is None else self.reference.every

    @property
    def has_kl_term(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "loss"

    @property
    def kl_estimate(self) -> Literal["k1", "k2", "k3"]:
        """The estimator from sampled tokens; k2, near which the divergence is, if there is none."""
        return "k2" if self.kl_estimator == "full" else self.kl_estimator

    @property
    def has_full_kl(self) -> bool:
        """True if the KL term is the divergence over the whole vocabulary."""
        return self.has_kl_term and self.kl_estimator == "full"

    @property
    def has_kl_reward(self) -> bool:
        return self.kl_coef > 0 and self.kl_in == "reward"


LAST_FRACTION = 0.1  # of optim.lr, at the last step of a schedule that names none
_SCHEDULE = re.compile(r"constant|(linear|cosine)(:(?P<fraction>[0-9.e+-]+))?")


def _lr_schedule(value: str) -> str:
    match = _SCHEDULE.fullmatch(value)
    try:
        valid = match is not None and 0 <= float(match["fraction"] or 0) <= 1
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(
            "expected constant, linear or cosine, or with a fraction of optim.lr from 0 to 1:"
            " cosine:0.05"
        )
    return value


class OptimConfig(Section):
    lr: Float = option(1.0e-6, "AdamW's learning rate after the warm-up.", paper=1e-6, gt=0)
    warmup_steps: Int = option(
        20,
        "Training steps over which the learning rate grows linearly.",
        paper=20,
        ge=0,
        unit="steps",
    )
    warmup_ratio: Float | None = option(
        None,
        "Share of train.num_steps over which the learning rate grows, rounded down to steps, in"
        " place of optim.warmup_steps. none: optim.warmup_steps.",
        ge=0,
        lt=1,
    )
    schedule: Annotated[str, AfterValidator(_lr_schedule)] = option(
        "constant",
        "Learning rate after the warm-up. constant: optim.lr; linear, cosine: it falls to 0.1 of"
        " optim.lr at the last step; linear:FRACTION, cosine:FRACTION: to that fraction, where 0"
        " makes the last step change nothing.",
        paper="constant",
        also=[{"enum": ["constant", "linear", "cosine"]}],
    )
    weight_decay: Float = option(0.1, "AdamW's weight decay.", paper=0.1, ge=0)
    betas: tuple[Beta, Beta] = option(
        (0.9, 0.999), "AdamW's decay rates of the two moments.", paper=(0.9, 0.999)
    )
    max_grad_norm: Float = option(
        1.0,
        "Largest norm of an update's gradient; a larger gradient is scaled down to it.",
        paper=1.0,
        gt=0,
    )

    def warmup(self, num_steps: int) -> int:
        """Return the steps of the warm-up of a run of `num_steps`."""
        if self.warmup_ratio is None:
            return self.warmup_steps
        return int(self.warmup_ratio * num_steps)

    @property
    def decay(self) -> tuple[str, float]:
        """The kind of `schedule` and the fraction of `lr` that it reaches at the last step."""
        kind, _, fraction = self.schedule.partition(":")
        return kind, float(fraction) if fraction else LAST_FRACTION


class CriticConfig(Section):
    """The value function of PPO: a copy of the initial policy's network with a scalar head."""

    lr: Float = option(
        1.0e-5,
        "Learning rate of the critic's AdamW after the warm-up; the other options of `optim` apply"
        " to the critic too.",
        gt=0,
    )
    gae_lambda: Float = option(
        1.0,
        "Lambda of generalized advantage estimation. 1: the sum of future rewards minus the"
        " critic's value; 0: one step's reward plus the difference of two values; values in between"
        " trade variance for bias.",
        ge=0,
        le=1,
    )
    pretrain_steps: Int = option(
        0, "Training steps at the start that update only the critic.", ge=0, unit="steps"
    )


class TrainConfig(Section):
    num_steps: Positive = option(300, "Training steps of the run.", unit="steps")
    epochs: Annotated[Float, Field(gt=0, le=1_000_000)] | None = option(
        None,
        "Passes over the training data, in place of train.num_steps, which is computed at the start:"
        " rows x epochs / rows of a step, rounded up. Rows of a step are rollout.prompts_per_step,"
        " or train.minibatch_groups demonstrations; what dynamic sampling draws beyond them is not"
        " counted. none: train.num_steps.",
        unit="epochs",
    )
    token_budget: Annotated[Int, Field(gt=0, le=10**15)] | None = option(
        None,
        "Generated tokens after which the run ends, even before train.num_steps; the step that"
        " reaches the number is the last. Groups that do not train count; evaluations do not. none:"
        " no limit.",
        unit="tokens",
    )
    minibatch_groups: Positive = option(32, "Groups per optimiser update.", paper=32, unit="groups")
    passes_per_step: Positive = option(
        1,
        "Passes over the batch of a step, each with a different order of groups. pi_old stays the"
        " policy before the first update (PPO's epochs; verl: ppo_epochs, TRL: num_iterations).",
        paper=1,
        le=1000,
        unit="passes",
    )
    microbatch_tokens: Annotated[Tokens | None, Auto] = option(
        None,
        "Prompt and response tokens per backward pass; a larger number takes more memory and does"
        " not change results. none or auto: the number that fits on the GPU by the estimate of"
        " `dapo check`; 16384 on a CPU.",
        unit="tokens",
    )
    recompute: Annotated[bool | None, Auto] = option(
        None,
        "Recompute activations in the backward pass: a third more arithmetic for a fraction of the"
        " memory. none or auto: on a GPU if 8192 tokens per backward pass, or the longest prompt"
        " and response, do not fit otherwise.",
    )
    save_every: Int = option(
        20, "Steps between checkpoints; 0: a single one at the end.", ge=0, unit="steps"
    )
    keep_checkpoints: Annotated[int | None, Auto] = option(
        None,
        "Number of newest checkpoints from which the run can be resumed or forked; the best one by"
        " evaluation is kept as well. none: 2 during the run and 1 after it; the others keep only"
        " their weights. 0: a finished run keeps only weights.",
        ge=0,
        le=1_000_000,
        unit="checkpoints",
    )
    eval_every: Int = option(
        20,
        "Steps between evaluations; 0: only before the first and after the last step.",
        only_with="data.eval",
        ge=0,
        unit="steps",
    )
    seed: Seed = option(0, "Seed of all random numbers of the run.")
    threads: Processes | None = option(
        None,
        "CPU threads per training or sampling process. none: torch's default, divided by the number"
        " of processes of a machine that compute at the same time.",
        unit="threads",
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Device of the model. auto: a GPU if the machine has one."
    )

    @property
    def kept_in_training(self) -> int:
        """The number of newest checkpoints that a run keeps while it trains."""
        return 2 if self.keep_checkpoints is None else max(1, self.keep_checkpoints)

    @property
    def last_step(self) -> float:
        """The last step; infinite while `train.epochs` waits for the number of rows."""
        return math.inf if self.epochs is not None else self.num_steps

    @property
    def length(self) -> str:
        """The length of the run in words: `466 steps`, or `2 epochs`."""
        if self.epochs is not None:
            return f"{self.epochs:g} epochs"
        return f"{self.num_steps} steps"

    def is_budget_spent(self, tokens_generated: int) -> bool:
        return self.token_budget is not None and tokens_generated >= self.token_budget
