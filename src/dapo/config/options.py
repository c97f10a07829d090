"""Every option, with its default (the paper's value where it has one) and its meaning. Imports no torch."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

DataSpec: TypeAlias = str | dict[str, Any]


def _yaml_switch(value: object) -> object:
    """YAML reads a bare `on` or `off` as a truth value; here they are words."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _reject_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


def _weight_cap(value: object) -> object:
    """`tis` is short for the usual cap of truncated importance sampling."""
    return {"none": None, "tis": 2.0}.get(value, value) if isinstance(value, str) else _reject_bool(value)


def _launcher(value: str) -> str:
    name, colon, address = value.partition(":")
    if value != "local" and (name != "ray" or (colon and not address)):
        raise ValueError("expected local, ray, ray:auto or ray:HOST:PORT")
    return value


def _one_or_several(value: object) -> object:
    """`3` is short for `[3]`, and nothing for none."""
    if value is None:
        return []
    return value if isinstance(value, list | tuple) else [value]


Int: TypeAlias = Annotated[int, BeforeValidator(_reject_bool)]
Float: TypeAlias = Annotated[float, BeforeValidator(_reject_bool)]
Positive: TypeAlias = Annotated[Int, Field(gt=0)]
Beta: TypeAlias = Annotated[Float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A group of options; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


class LoraConfig(Section):
    """`model.lora`: low-rank adapters are trained instead of the weights."""

    rank: Positive = Field(16, description="of the adapters")
    alpha: Float = Field(32.0, gt=0, description="an adapter's product is scaled by alpha / rank")
    targets: str | list[str] = Field(
        "all-linear", description="names of the linear layers that get adapters; all-linear: every one but the head"
    )


class ModelConfig(Section):
    name: str = Field(description="alias (smollm2-135m-instruct, tiny-random), Hugging Face id or directory")
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = Field(
        "auto",
        description="of the forward and backward (master weights are float32, or float64 if that is asked); auto: "
        "bfloat16 where the processor multiplies it fast, else float32",
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    lora: LoraConfig | None = Field(
        None, description="train low-rank adapters: {rank: 16, alpha: 32}; none: all weights"
    )


class DataConfig(Section):
    train: DataSpec = Field(description="path, hub:NAME[:SPLIT], builtin:TASK,..., gym:TASK,... or a mapping")
    eval: DataSpec | None = Field(None, description="held-out problems; their texts are removed from training")
    max_prompt_tokens: Positive = Field(2048, description="longer prompts are dropped and counted, never cut")
    instruction: str = Field("", description="added after a problem's text, before the chat template")
    system: str | None = Field(None, description="system message, for chat models")
    chat_template: Annotated[Literal["auto", "on", "off"], BeforeValidator(_yaml_switch)] = Field(
        "auto", description="auto: on if the tokenizer has one"
    )


class VllmConfig(Section):
    """`rollout.vllm`: options of the vLLM engine."""

    cache_gib: Float = Field(2.0, gt=0, description="memory for keys and values, for each engine (GPU)")
    max_sequences: Positive = Field(256, description="sequences decoded at a time")
    tensor_parallel: Positive = Field(1, description="GPUs an engine")
    eager: bool = Field(True, description="no compilation and no captured graphs: starts at once, decodes slower")
    python: str | None = Field(
        None, description="interpreter with vLLM, where it has an environment of its own; none: the one that trains"
    )


class NativeConfig(Section):
    """`rollout.native`: options of the native engine."""

    slots: Positive = Field(64, description="sequences decoded at a time per engine")
    cache_tokens: Positive | None = Field(
        None, description="bound on the prompt and response tokens held at a time per engine; none: as slots need"
    )


class RolloutConfig(Section):
    engine: Literal["native", "vllm"] = Field("native", description="what samples the responses")
    engines: Int = Field(
        0, ge=0, description="engine processes; 0: in the process that trains (vllm always has one of its own)"
    )
    engine_threads: Positive | None = Field(None, description="CPU threads of an engine process; none: an equal share")
    reproducible: bool = Field(
        True, description="several engines share requests by key, in lockstep; off: by load, equal only up to rounding"
    )
    native: NativeConfig = NativeConfig()
    vllm: VllmConfig = VllmConfig()
    prompts_per_step: Positive = Field(512, description="informative groups that make a batch")
    group_size: Int = Field(16, description="G: responses sampled to each prompt")
    max_response_tokens: Positive = Field(20480, description="L_max, the sampled end token included")
    min_response_tokens: Int = Field(
        0, ge=0, description="end tokens cannot be sampled before; for measurements of equal work, not for training"
    )
    temperature: Float = Field(1.0, gt=0)


class ScoreThresholdsConfig(Section):
    """`dynamic_sampling.filter` as thresholds."""

    min_spread: Float = Field(0.0, ge=0, description="largest minus smallest score of a group")
    mean_between: tuple[Float | None, Float | None] = Field(
        (None, None), description="a group's mean score is above the first and below the second number; null: no bound"
    )

    @field_validator("mean_between")
    @classmethod
    def _bounds_are_ordered(cls, value: tuple[float | None, float | None]) -> tuple[float | None, float | None]:
        low, high = value
        if low is not None and high is not None and low >= high:
            raise ValueError("the first number must be less than the second")
        return value


class DynamicSamplingConfig(Section):
    enabled: bool = True
    max_groups_per_step: Positive | None = Field(
        None, description="bound on the groups judged in a step; none: ten times prompts_per_step"
    )
    filter: str | ScoreThresholdsConfig | None = Field(
        None,
        description="module:function from a Group to a bool, instead of Eq. 11; or thresholds on scores, beside it: "
        "{min_spread: 0.5, mean_between: [0, 9]}",
    )


class RewardConfig(Section):
    verifier: str | dict[str, float] = Field(
        "auto",
        description="a name, module:function, or a mapping of several to their weights; auto: exact for builtin:, "
        "gym for gym:, math otherwise",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="the verifier's own (docs/verifiers.md), such as letters: ABCD for choice; of several: by verifier",
    )
    threshold: Float | None = Field(None, description="graded scores: correct from here on; none: no right or wrong")
    timeout_s: Float = Field(10.0, gt=0, description="for one verdict; then it is an error")
    workers: Positive = Field(2, description="verifier processes")
    memory_gib: Float = Field(4.0, gt=0, description="for each verifier process, and for it with all it starts")


class OverlongConfig(Section):
    mode: Annotated[Literal["soft", "filter", "off"], BeforeValidator(_yaml_switch)] = Field(
        "soft", description="soft: Eq. 13; filter: truncated responses do not train; off"
    )
    buffer_tokens: Positive = Field(4096, description="L_cache: the penalty grows over this many tokens")
    penalty: Float = Field(1.0, ge=0, description="at max_response_tokens")


class AdvantageConfig(Section):
    scale: Annotated[Literal["std", "none"], BeforeValidator(lambda v: "none" if v is None else v)] = Field(
        "std", description="Eq. 9 divides by the group's standard deviation"
    )


class LossConfig(Section):
    clip_low: Float = Field(0.2, gt=0, lt=1)
    clip_high: Float = Field(0.28, gt=0)
    dual_clip: Float | None = Field(None, gt=1, description="bound on the ratio where A < 0; released scripts: 10")
    aggregate: Literal["token", "group", "sequence", "constant"] = Field(
        "token", description="token: DAPO as released; group: Eq. 8; sequence: GRPO; constant: Dr. GRPO"
    )
    kl_coef: Float = Field(0.0, ge=0, description="k3 estimator against the frozen initial policy")
    entropy_coef: Float = Field(0.0, ge=0)
    engine_correction: Annotated[Float | None, BeforeValidator(_weight_cap)] = Field(
        None,
        gt=0,
        description="truncated importance sampling, where the engine computes otherwise than the trainer: each token's "
        "loss times min(exp(old_logprob - engine_logprob), this number); tis: 2; none: no correction",
    )
    max_approx_kl: Float | None = Field(
        10.0,
        gt=0,
        description="nats to the old policy (r - 1 - log r), mean over an update's tokens; beyond, the ratio has "
        "exploded: the update is skipped and counted; none: no limit",
    )


class OptimConfig(Section):
    lr: Float = Field(1.0e-6, gt=0)
    warmup_steps: Int = Field(20, ge=0, description="training steps of linear warm-up, then constant")
    weight_decay: Float = Field(0.1, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    max_grad_norm: Float = Field(1.0, gt=0)


class TrainConfig(Section):
    num_steps: Positive = 300
    minibatch_groups: Positive = Field(32, description="prompts (groups) an optimiser update")
    microbatch_tokens: Positive = Field(16384, description="prompt + response tokens a backward")
    recompute: bool = Field(
        False,
        description="keep only each layer's input for the backward and compute the rest again: a third more "
        "arithmetic, a fraction of the memory",
    )
    save_every: Int = Field(20, ge=0, description="steps between checkpoints; 0: only at the end")
    keep_checkpoints: Positive = Field(2, description="newest checkpoints kept, besides the best evaluated one")
    eval_every: Int = Field(20, ge=0, description="steps between evaluations; 0: only first and last")
    seed: Int = Field(0, ge=0)
    threads: Positive | None = Field(
        None, description="CPU threads of each process that trains; none: torch's own choice, divided among the ranks"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"


class EvalConfig(Section):
    samples_per_problem: Positive = Field(1, description="k of avg@k; the paper's is 32")
    temperature: Float = Field(1.0, ge=0, description="0: greedy")
    top_p: Float = Field(0.7, gt=0, le=1)
    max_response_tokens: Positive | None = Field(None, description="none: as in the rollout")


class DistributedConfig(Section):
    """More than one process."""

    trainer_ranks: Positive = Field(1, description="processes that the model is sharded over (FSDP2)")
    max_restarts: Int = Field(
        3, ge=0, description="times that the run goes back to its last checkpoint by itself when a trainer rank is lost"
    )
    start_timeout_s: Float = Field(300.0, gt=0, description="for all processes to be ready")
    gpus_per_process: Float | None = Field(
        None,
        ge=0,
        description="GPUs that Ray gives each trainer rank and each engine; 0.5: two share one; none: one where the "
        "cluster has GPUs, and rollout.vllm.tensor_parallel for an engine",
    )


class LogConfig(Section):
    sinks: list[Literal["tensorboard", "wandb", "trackio"]] = Field(
        default_factory=list, description="besides metrics.jsonl and the console"
    )
    project: str = Field("dapo", description="of W&B and trackio")
    rollouts: bool = Field(True, description="write every judged response to rollouts/*.parquet")


class ProfileConfig(Section):
    steps: Annotated[list[Positive], BeforeValidator(_one_or_several)] = Field(
        default_factory=list, description="training steps, one or a list, whose traces go to profile/ in the run"
    )


class Config(Section):
    """A whole run."""

    preset: Literal["dapo", "grpo"] = "dapo"
    model: ModelConfig = Field(description="for example model=smollm2-135m-instruct")
    data: DataConfig = Field(description="for example data.train=builtin:sums")
    rollout: RolloutConfig = RolloutConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    reward: RewardConfig = RewardConfig()
    overlong: OverlongConfig = OverlongConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    launcher: Annotated[str, AfterValidator(_launcher)] = Field(
        "local",
        description="where processes run; local: on this machine; ray: on it, by Ray; ray:auto or ray:HOST:PORT: on a "
        "running Ray cluster (`dapo submit` for Slurm)",
    )
    schedule: Literal["sync", "one_step_off"] = Field(
        "sync", description="sync: Algorithm 1; one_step_off: the next batch is sampled while the policy updates"
    )
    distributed: DistributedConfig = DistributedConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig = ProfileConfig()

    @property
    def max_groups_per_step(self) -> int:
        """The bound on the groups judged in a step."""
        return self.dynamic_sampling.max_groups_per_step or 10 * self.rollout.prompts_per_step

    @property
    def updates_per_step(self) -> int:
        """Optimiser updates in a step with a full batch."""
        return self.rollout.prompts_per_step // self.train.minibatch_groups

    @property
    def engine_processes(self) -> int:
        """Engines in processes of their own; 0: the one that trains also samples."""
        return max(self.rollout.engines, int(self.rollout.engine == "vllm"))

    @property
    def is_multiprocess(self) -> bool:
        """Is there any process of the run besides the controller's (and the verifiers')?"""
        return self.engine_processes > 0 or self.uses_trainer_group

    @property
    def uses_trainer_group(self) -> bool:
        """Is the policy in processes of its own? On a cluster it is, since the controller's machine may have no GPU."""
        return self.distributed.trainer_ranks > 1 or self.uses_ray

    @property
    def uses_ray(self) -> bool:
        """Whether processes run on a Ray cluster."""
        return self.launcher != "local"

    @property
    def ray_address(self) -> str | None:
        """The address of a running Ray cluster; None: the run starts Ray on this machine."""
        return self.launcher.partition(":")[2] or None

    @model_validator(mode="after")
    def _no_secrets(self) -> "Config":
        for name in secret_names(self.reward.options):
            raise ValueError(
                f"reward.options.{name} looks like a secret, and options are written to config.yaml and to trackers; "
                "have the verifier read an environment variable, which its processes inherit, and give at most the "
                f"variable's name: reward.options.{name}_env=NAME"
            )
        return self

    @model_validator(mode="after")
    def _verifiers_end_in_time(self) -> "Config":
        verifier, reward = self.reward.verifier, self.reward
        for name, (limit, default) in _LIMITS_OF_VERIFIERS.items():
            if name != verifier and not (isinstance(verifier, dict) and name in verifier):
                continue
            options = reward.options if isinstance(verifier, str) else reward.options.get(name, {})
            seconds = options.get(limit, default) if isinstance(options, dict) else default
            if isinstance(seconds, int | float) and seconds >= reward.timeout_s:
                option_path = (
                    f"reward.options.{limit}" if isinstance(verifier, str) else f"reward.options.{name}.{limit}"
                )
                raise ValueError(
                    f"{option_path}={seconds:g} (s) must be less than reward.timeout_s={reward.timeout_s:g}, at "
                    "which a verdict becomes an error"
                )
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> "Config":
        rollout, train = self.rollout, self.train
        if rollout.group_size < 2:
            raise ValueError(
                f"rollout.group_size must be at least 2 to compare responses with each other, got {rollout.group_size}"
            )
        if rollout.min_response_tokens > rollout.max_response_tokens:
            raise ValueError(
                f"rollout.min_response_tokens={rollout.min_response_tokens} must not exceed "
                f"rollout.max_response_tokens={rollout.max_response_tokens}"
            )
        if rollout.prompts_per_step % train.minibatch_groups:
            raise ValueError(
                f"rollout.prompts_per_step={rollout.prompts_per_step} (prompts a step) must be a multiple of "
                f"train.minibatch_groups={train.minibatch_groups} (prompts an optimiser update)"
            )
        for name, temperature in (("rollout", rollout.temperature), ("eval", self.eval.temperature)):
            if rollout.engine == "vllm" and temperature and not 0.01 <= temperature <= 2:
                raise ValueError(
                    f"{name}.temperature must be from 0.01 to 2 with rollout.engine=vllm, got {temperature:g}"
                )
        if self.overlong.mode == "soft" and self.overlong.buffer_tokens > rollout.max_response_tokens:
            raise ValueError(
                f"overlong.buffer_tokens={self.overlong.buffer_tokens} must not exceed "
                f"rollout.max_response_tokens={rollout.max_response_tokens}; lower it or set overlong.mode=off"
            )
        bound = self.dynamic_sampling.max_groups_per_step
        if self.dynamic_sampling.enabled and bound is not None and bound < rollout.prompts_per_step:
            raise ValueError(
                f"dynamic_sampling.max_groups_per_step={bound} must be at least "
                f"rollout.prompts_per_step={rollout.prompts_per_step}, or no batch could ever be full"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _one_step_off_is_corrected(cls, values: Any) -> Any:
        """`schedule: one_step_off` has a default of its own: its responses are those of another policy."""
        if isinstance(values, Mapping) and values.get("schedule") == "one_step_off":
            loss = values.get("loss", {})
            if isinstance(loss, Mapping) and "engine_correction" not in loss:
                return {**values, "loss": {**loss, "engine_correction": "tis"}}
        return values

    @model_validator(mode="after")
    def _schedule_fits(self) -> "Config":
        if self.schedule != "one_step_off":
            return self
        if self.loss.engine_correction is None:
            raise ValueError(
                "schedule=one_step_off trains on responses that the policy of one step before has sampled, which "
                "loss.engine_correction=none would leave uncorrected; set loss.engine_correction=tis (what this "
                "schedule takes where nothing is set), or schedule=sync"
            )
        if self.rollout.engine == "native" and not self.rollout.engines:
            raise ValueError(
                "schedule=one_step_off samples while the policy updates, for which the engine needs a process of its "
                "own; set rollout.engines=1 (or more), or schedule=sync"
            )
        return self


_SECRET = re.compile(
    r"(^|_)(password|passwd|passphrase|secret|credentials?|(api|access|private|auth|secret)_?key"
    r"|((^|_)(api|access|auth|bearer|hf|hub|refresh|session|secret)_?|^)token)$"
)


def secret_names(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Options whose name says that their text is a secret, by dotted name; `stop_token` and `max_tokens` do not."""
    for name, value in options.items():
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name)).replace("-", "_").lower()  # apiKey is two words
        if isinstance(value, Mapping):
            yield from secret_names(value, f"{prefix}{name}.")
        elif isinstance(value, str) and value and _SECRET.search(words):
            yield f"{prefix}{name}"


_LIMITS_OF_VERIFIERS = {"code": ("time_s", 6.0), "server": ("total_s", 9.0)}
"""Options of verifiers that have a time limit of their own, and their defaults."""
