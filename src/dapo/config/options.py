"""The configuration of a run: its sections, derived values, and checks across sections."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

import yaml
from pydantic import AfterValidator, model_validator

from dapo.algo.surrogate_table import SURROGATES
from dapo.config.data_spec import kinds
from dapo.config.engines import OWN_ENGINES, engines_with
from dapo.config.environment import EnvironmentConfig
from dapo.config.model_options import DataConfig, ModelConfig
from dapo.config.reward_options import AuditConfig, OverlongConfig, RewardConfig
from dapo.config.rollout_options import DynamicSamplingConfig, RolloutConfig
from dapo.config.run_options import DistributedConfig, EvalConfig, LogConfig, ProfileConfig
from dapo.config.section import Int, Section, option
from dapo.config.training_options import (
    AdvantageConfig,
    CriticConfig,
    LossConfig,
    OptimConfig,
    TrainConfig,
    fitting_minibatch,
)
from dapo.core.errors import ConfigError, DataError
from dapo.core.loading import AGENT_PREFIX
from dapo.core.secrets import find_secrets

PRESETS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("presets.yaml").read_bytes()
)
"""The options that each method sets by default."""
STAGES = "stages"
"""The key of a configuration with a mapping of names to the options of each stage."""
# dynamic_sampling.oversampling: auto. Beyond it small batches save little more time, and the tokens
# grow (docs/lab/scale.md)
GPU_OVERSAMPLING = 0.25

if TYPE_CHECKING:
    PresetName: TypeAlias = str
else:
    PresetName = Literal[tuple(PRESETS)]


@dataclass(frozen=True)
class GpuShares:
    """The number of trainer ranks and engines on a GPU."""

    trainers: float = 1  # trainer ranks per GPU
    engines: float = 1  # processes of engines per GPU
    is_shared: bool = False  # whether ranks and engines compute on the same GPUs
    is_paired: bool = False  # whether there is a rank on each GPU of every engine
    alternates: bool = False  # whether engines give their memory up while the policy updates
    transfer: Literal["nccl", "ipc"] | None = None  # how weights go from GPU to GPU; None: as files

    @property
    def processes(self) -> float:
        """The processes per GPU."""
        return self.trainers + self.engines if self.is_shared else 1

    @property
    def sampling(self) -> float:
        """The processes per GPU that divide its free memory while engines sample."""
        return self.engines if self.alternates else self.processes


def _launcher(value: str) -> str:
    name, colon, address = value.partition(":")
    if value != "local" and (name != "ray" or (colon and not address)):
        raise ValueError("expected local, ray, ray:auto or ray:HOST:PORT")
    return value


class Config(Section):
    """The options of a run."""

    preset: PresetName = option("dapo", "The method: sets the defaults of its options.")
    model: ModelConfig = option(
        description="The model, for example model=smollm2-135m-instruct.", also=[{"type": "string"}]
    )
    data: DataConfig = option(
        description="The data, for example data.train=builtin:sums.", also=[{"type": "string"}]
    )
    rollout: RolloutConfig = RolloutConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    reward: RewardConfig = RewardConfig()
    audit: AuditConfig = AuditConfig()
    overlong: OverlongConfig = OverlongConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    environment: EnvironmentConfig = option(EnvironmentConfig(), also=[{"type": "string"}])
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    critic: CriticConfig = option(CriticConfig(), only_with="advantage.estimator=gae")
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = option(EvalConfig(), only_with="data.eval")
    launcher: Annotated[str, AfterValidator(_launcher)] = option(
        "local",
        "Launcher of processes. local: this machine; ray: this machine, through Ray; ray:auto or"
        " ray:HOST:PORT: a running Ray cluster (for Slurm: `dapo submit`).",
    )
    schedule: Literal["sync", "async", "supervised"] = option(
        "sync",
        "sync: Algorithm 1; async: sample while the policy updates (one_step_off: the same with"
        " max_staleness=1); supervised: imitate data.demonstrations, without sampling or rewards.",
        paper="sync",
        also=[{"const": "one_step_off"}],
    )
    max_staleness: Int = option(
        2,
        "Largest age, in steps, of the weights that sampled a token at the step that trains on it."
        " 0: as schedule=sync; 1: sample the next batch during the update; more: responses"
        " continue under newer policies.",
        only_with="schedule=async",
        ge=0,
        le=64,
        unit="steps",
    )
    distributed: DistributedConfig = DistributedConfig()
    log: LogConfig = LogConfig()
    profile: ProfileConfig = ProfileConfig()

    @model_validator(mode="before")
    @classmethod
    def _holds_no_secrets(cls, values: Any) -> Any:
        for name, why in find_secrets(values):
            reason = f"{name} {why}, and options are written to config.yaml and to trackers; "
            if not name.startswith("reward.options."):
                raise ValueError(
                    f"{reason}leave it out, and read an environment variable where it is needed"
                )
            raise ValueError(
                f"{reason}have the verifier read an environment variable, and give at most the"
                f" variable's name: {name}_env=NAME"
            )
        return values

    def changed(self, section: str, **values: Any) -> Self:
        """Return a copy with changed options of a section, without validation."""
        changed = getattr(self, section).model_copy(update=values)
        for name in changed.__dict__.keys() - type(changed).model_fields.keys():
            del changed.__dict__[name]  # a cached property of the old values
        return self.model_copy(update={section: changed})

    def without_trainer(self, gpus: int | None) -> Self:
        """Return the options of an evaluation, which counts its engines only.

        Args:
            gpus: the GPUs that engines of this machine have; None: no limit is known. There are no
                more engines than have GPUs of their own.
        """
        part = self.distributed.gpus_per_process
        # an engine that took its GPUs in turn with its ranks has them for itself
        if self.uses_ray and self.gpu_shares(0).is_paired:
            part = None
        config = self.changed("distributed", trainer_ranks=0, gpus_per_process=part)
        if not gpus or self.uses_ray:
            return config
        most = max(1, gpus // self.gpus_per_engine)
        return config.changed("rollout", engines=min(self.rollout.engines, most))

    def conflict(self) -> str | None:
        """Return why options that `changed` has set do not fit the others; None if they do."""
        try:
            self._fitting()
        except ValueError as error:
            return str(error)
        return None

    def value_of(self, name: str) -> Any:
        """Return the value of an option or of a property by its dotted name."""
        value: Any = self
        for part in name.split("."):
            value = getattr(value, part)
        return value

    def sets(self, name: str) -> bool:
        """Return True if the configuration or its preset sets an option, by its dotted name."""
        section: Any = self
        for part in name.split("."):
            if part not in section.model_fields_set:
                return False
            section = getattr(section, part)
        return True

    def at_time(self, time: datetime) -> "Config":
        """Return a copy whose chat templates read this local time as now."""
        return self.model_copy(update={"data": self.data.at_time(time)})

    @property
    def samples_ahead(self) -> bool:
        """True if responses are sampled while the policy updates (`schedule: async`)."""
        return self.schedule == "async" and self.max_staleness > 0

    @property
    def suspends_responses(self) -> bool:
        """True if responses continue under newer weights."""
        return self.samples_ahead and (self.max_staleness > 1 or self.rollout.clock == "load")

    def lookahead(self, step: int) -> int:
        """Return the number of later batches whose groups are started during a step.

        It is half of the bound: with more, so many responses share the engine that long ones become
        too old.
        """
        if not self.samples_ahead:
            return 0
        # none beyond the last step
        return max(0, min(self.max_staleness // 2, self.train.num_steps - step))

    @property
    def rows_per_step(self) -> int:
        """The rows of the training data that a step takes, but for those of dynamic sampling."""
        if self.is_supervised:
            return self.train.minibatch_groups
        return self.rollout.prompts_per_step

    def with_steps_of_epochs(self, num_rows: int) -> Self:
        """Return the options with `train.num_steps` in place of `train.epochs`.

        A warm-up that is not set is at most the fraction of these steps that its default is of the
        default of `train.num_steps`.

        Args:
            num_rows: the rows of the training data.

        Raises:
            ConfigError: other options do not fit this number of steps.
        """
        epochs = self.train.epochs
        if epochs is None:
            return self
        steps = max(1, ceil(num_rows * epochs / self.rows_per_step))
        config = self.changed("train", num_steps=steps, epochs=None)
        if self.optim.warmup_ratio is None and not self.sets("optim.warmup_steps"):
            default_steps = TrainConfig.model_fields["num_steps"].default
            warmup = OptimConfig.model_fields["warmup_steps"].default
            scaled_warmup = round(steps * warmup / default_steps)
            config = config.changed("optim", warmup_steps=min(warmup, scaled_warmup))
        conflict = config.conflict()
        if conflict is not None:
            raise ConfigError(f"train.epochs={epochs:g}: {conflict}")
        return config

    @property
    def max_groups_per_step(self) -> int:
        return self.dynamic_sampling.max_groups_per_step or 10 * self.rollout.prompts_per_step

    @property
    def oversampling(self) -> float:
        """The value of `dynamic_sampling.oversampling`, after `train.device` was resolved."""
        share = self.dynamic_sampling.oversampling
        if share is not None:
            return share
        return 0.0 if self.train.device == "cpu" else GPU_OVERSAMPLING

    @property
    def updates_per_step(self) -> int:
        if self.is_supervised:
            return 1
        return (
            self.rollout.prompts_per_step
            // self.train.minibatch_groups
            * self.train.passes_per_step
        )

    @property
    def data_option(self) -> str:
        """The option that names the training data."""
        return "data.demonstrations" if self.is_supervised else "data.train"

    @property
    def is_supervised(self) -> bool:
        """True if steps imitate demonstrations."""
        return self.schedule == "supervised"

    @property
    def microbatch_tokens(self) -> int:
        """The value of `train.microbatch_tokens`, after `auto` was resolved."""
        tokens = self.train.microbatch_tokens
        if tokens is None:
            raise ValueError("train.microbatch_tokens=auto is not resolved: see start/resolve.py")
        return tokens

    @property
    def plays_episodes(self) -> bool:
        """True if responses are episodes of several turns."""
        environment = self.environment
        return environment.name is not None or bool(environment.tools or environment.command)

    @property
    def runs_agent(self) -> bool:
        """True if an agent plays the episodes, over an endpoint."""
        name = self.environment.name
        return bool(self.environment.command) or (
            name is not None and name.startswith(AGENT_PREFIX)
        )

    @property
    def credits_turns(self) -> bool:
        """True if the turns of an episode have advantages of their own."""
        return self.plays_episodes and self.environment.credit == "turn"

    @property
    def max_observed_tokens(self) -> int:
        """The maximum of observed tokens in an episode; 0 without an environment."""
        if not self.plays_episodes:
            return 0
        return (self.environment.max_turns - 1) * self.environment.max_observation_tokens

    @property
    def uses_plugin_engine(self) -> bool:
        """True if another package brings the engine."""
        return self.rollout.engine not in (*OWN_ENGINES, "auto")

    @property
    def reuses_samples(self) -> bool:
        """True if a step has several updates, after which the policy is a newer one."""
        return self.updates_per_step > 1

    @property
    def has_ratios(self) -> bool:
        """True if a built-in loss has ratios other than 1."""
        return self.reuses_samples and self.loss.function is None

    @property
    def clips_low(self) -> bool:
        return self._clips("clip_low")

    @property
    def clips_high(self) -> bool:
        return self._clips("clip_high")

    @property
    def clips_dual(self) -> bool:
        return self._clips("dual_clip")

    def _clips(self, bound: str) -> bool:
        return self.has_ratios and bound in SURROGATES[self.loss.surrogate].bounds

    @property
    def corrects_engine(self) -> bool:
        return self.loss.engine_correction is not None

    @property
    def has_critic(self) -> bool:
        return self.advantage.estimator == "gae"

    @property
    def has_kl(self) -> bool:
        return self.loss.kl_coef > 0

    @property
    def trains_on_rewards(self) -> bool:
        return self.reward.coef > 0

    @property
    def learns_from_rewards(self) -> bool:
        return self.trains_on_rewards and not self.is_supervised

    @property
    def compares_responses_of_a_group(self) -> bool:
        """True if a group of one response cannot train."""
        compares_over_batch = self.advantage.estimator in ("gae", "reinforce_pp")
        has_other_baseline = compares_over_batch and self.rollout.prompts_per_step > 1
        # dynamic sampling keeps groups whose verdicts differ, which takes two responses
        is_alone = has_other_baseline and not self.dynamic_sampling.enabled
        return self.learns_from_rewards and not is_alone

    @property
    def decays_lr(self) -> bool:
        return self.optim.schedule != "constant"

    @property
    def engine_processes(self) -> int:
        """The number of engine processes; 0: the training process also samples."""
        return max(self.rollout.engines, int(self.rollout.engine_kind.needs_process))

    @property
    def gpus_per_engine(self) -> int:
        return getattr(self.rollout.engine_options, "tensor_parallel", 1)

    @property
    def gpus_wanted(self) -> int:
        """The number of GPUs on which trainer ranks and engines do not share."""
        # without processes the controller samples
        engines = max(self.engine_processes, int(self.uses_trainer_group))
        if self.is_multiprocess:
            return self.distributed.trainer_ranks + engines * self.gpus_per_engine
        return 1

    @property
    def gpus_needed(self) -> int:
        """The least number of GPUs on which all processes that compute have their place."""
        ranks = self.distributed.trainer_ranks
        if not self.uses_ray:
            return max(ranks, self.gpus_per_engine)
        part = self.distributed.gpus_per_process
        if part is None:
            return ranks + self.engine_processes * self.gpus_per_engine
        if self.gpu_shares(0).is_paired:
            return ranks
        return ceil(part * (ranks + self.engine_processes))

    def gpu_shares(self, gpus: int) -> GpuShares:
        """Return how `gpus` of this machine are shared: by all processes, or by none."""
        ranks = self.distributed.trainer_ranks
        engines = self.gpus_wanted - self.distributed.trainer_ranks
        if self.train.device == "cpu" or not self.is_multiprocess:
            return GpuShares()
        if self.uses_ray:
            part = min(1.0, self.distributed.gpus_per_process or 1.0)
            is_shared = part < 1
            is_paired = part == 0.5 and ranks == engines and self.engine_processes > 0
            per_gpu: Sequence[float] = (0.5 / part, 0.5 / part)
        else:
            # without processes the controller samples, on the GPU of the first rank
            is_shared = self.gpus_wanted > gpus or not self.engine_processes
            is_paired = ranks >= gpus
            per_gpu = (min(ranks, 1), 1)
            if is_shared:
                per_gpu = [ceil(count / max(1, gpus)) for count in (ranks, engines)]
        has_trainer = ranks > 0  # an evaluation has none
        # else the policy changes while a lost engine would need the weights of the step before
        alternates = (
            has_trainer
            and not self.samples_ahead
            and is_shared
            and (is_paired or not self.uses_ray)
        )
        transfer: Literal["nccl", "ipc"] | None = None
        # torch counts one reader of a buffer that processes share: a second one would keep the
        # buffer from being freed
        can_send = has_trainer and (not is_shared or (is_paired and per_gpu[1] <= 1))
        # an engine that is lost while the policy updates waits for the next weights, in no order that
        # a repetition would have; ranks know whether those that it had are still theirs
        can_wait = self.rollout.clock == "load" and self.uses_trainer_group
        can_send = can_send and (can_wait or not self.samples_ahead)
        if can_send and self.rollout.engine_kind.receives_weights:
            transfer = "ipc" if is_shared else "nccl"
        return GpuShares(per_gpu[0], per_gpu[1], is_shared, is_paired, alternates, transfer)

    @property
    def is_multiprocess(self) -> bool:
        return self.engine_processes > 0 or self.uses_trainer_group

    @property
    def uses_trainer_group(self) -> bool:
        """True if the policy has its own processes."""
        return self.distributed.trainer_ranks > 1 or self.uses_ray

    @property
    def uses_ray(self) -> bool:
        return self.launcher != "local"

    @property
    def ray_address(self) -> str | None:
        return self.launcher.partition(":")[2] or None

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        return self._fitting()

    def _fitting(self) -> Self:
        """Return itself. Raises ValueError if options of different sections do not fit."""
        self._sizes_fit()
        self._loss_and_rate_fit()
        self._critic_and_prediction_fit()
        self._teacher_fits()
        self._schedule_fits()
        self._agent_fits()
        if self.loss.has_ratio_to_engine:
            self._ratio_to_engine_fits()
        elif self.loss.old_logprobs == "engine":
            obstacle = self._why_engine_is_not_pi_old()
            if obstacle is not None:
                raise ValueError(
                    f"loss.old_logprobs=engine without loss.engine_correction {obstacle}; set that,"
                    " loss.engine_correction=tis (the ratio is then the one to the engine, at most"
                    " 2), or loss.old_logprobs=policy"
                )
        return self

    def _sizes_fit(self) -> None:
        rollout = self.rollout
        train = self.train
        overlong = self.overlong
        length = rollout.max_response_tokens
        bound = self.dynamic_sampling.max_groups_per_step
        smallest = 1
        purpose = ""
        if self.compares_responses_of_a_group:
            smallest = 2
            purpose = " to compare responses with each other"
        if rollout.group_size < smallest:
            raise ValueError(
                f"rollout.group_size must be at least {smallest}{purpose}, got {rollout.group_size}"
            )
        if rollout.prompts_per_step % train.minibatch_groups and not self.is_supervised:
            fitting = fitting_minibatch(rollout.prompts_per_step, train.minibatch_groups)
            raise ValueError(
                f"rollout.prompts_per_step={rollout.prompts_per_step} (prompts per step) must be a"
                f" multiple of train.minibatch_groups={train.minibatch_groups} (prompts per"
                f" optimiser update); try train.minibatch_groups={fitting}"
            )
        for name, temperature in (
            ("rollout", rollout.temperature),
            ("eval", self.eval.temperature),
        ):
            low, high = rollout.engine_kind.temperatures
            if temperature and not low <= temperature <= high:
                raise ValueError(
                    f"{name}.temperature must be from {low:g} to {high:g} with"
                    f" rollout.engine={rollout.engine}, got {temperature:g}"
                )
        if overlong.mode == "soft" and overlong.buffer_tokens > length:
            raise ValueError(
                f"overlong.buffer_tokens={overlong.buffer_tokens} must not exceed "
                f"rollout.max_response_tokens={length}; lower it or set overlong.mode=off"
            )
        if self.dynamic_sampling.enabled and bound is not None and bound < rollout.prompts_per_step:
            raise ValueError(
                f"dynamic_sampling.max_groups_per_step={bound} must be at least "
                f"rollout.prompts_per_step={rollout.prompts_per_step}, or no batch could be full"
            )

    def _loss_and_rate_fit(self) -> None:
        if self.loss.function is not None and self.loss.dual_clip is not None:
            raise ValueError(
                f"loss.dual_clip={self.loss.dual_clip:g} bounds the ratio of the paper's loss,"
                f" which loss.function={self.loss.function} replaces; set one of the two"
            )
        surrogate = self.loss.surrogate
        prefix = f"loss.surrogate={self.loss.surrogate} replaces the loss that loss."
        if surrogate != "clip" and self.loss.function is not None:
            raise ValueError(
                f"{prefix}function={self.loss.function} replaces too; set one of the two"
            )
        if "dual_clip" not in SURROGATES[surrogate].bounds and self.loss.dual_clip is not None:
            raise ValueError(f"{prefix}dual_clip={self.loss.dual_clip} bounds; set one of the two")
        if self.loss.entropy_target is not None and self.loss.entropy_coef:
            raise ValueError(
                f"loss.entropy_target={self.loss.entropy_target:g} sets the entropy's weight in"
                f" each update, which loss.entropy_coef={self.loss.entropy_coef:g} would fix; set"
                " one of the two"
            )
        if self.loss.engine_over_cap == "mask":
            cap = self.loss.engine_correction
            if cap is not None and cap < 1:
                raise ValueError(
                    "loss.engine_over_cap=mask keeps ratios from 1 / loss.engine_correction to it, so "
                    f"loss.engine_correction must be at least 1, got {cap:g}"
                )
        self._length_fits()
        if self.decays_lr and self.train.token_budget is not None:
            raise ValueError(
                f"optim.schedule={self.optim.schedule} reaches its lowest rate in the step"
                f" train.num_steps, and train.token_budget={self.train.token_budget} may end the"
                " run earlier; set optim.schedule=constant, or leave the budget out"
            )
        if self.loss.has_kl_reward and self.loss.kl_estimator == "full":
            raise ValueError(
                "loss.kl_estimator=full is a term of the loss, and loss.kl_in=reward subtracts an"
                " estimate from the reward; set loss.kl_in=loss, or loss.kl_estimator=k1"
            )
        if self.has_kl and self.loss.reference_steps is not None and self.model.lora is not None:
            raise ValueError(
                f"loss.reference.every={self.loss.reference_steps} needs a copy of the policy, and"
                " with model.lora the reference is the model without its adapters; leave"
                " loss.reference out, or train all weights"
            )

    def _length_fits(self) -> None:
        train = self.train
        optim = self.optim
        # a stored configuration has a value for each option: a default contradicts nothing
        default_steps = TrainConfig.model_fields["num_steps"].default
        if train.epochs is not None and train.num_steps != default_steps:
            raise ValueError(
                f"train.epochs={train.epochs:g} sets train.num_steps, which is {train.num_steps};"
                " set one of the two"
            )
        default_warmup = OptimConfig.model_fields["warmup_steps"].default
        if optim.warmup_ratio is not None and optim.warmup_steps != default_warmup:
            raise ValueError(
                f"optim.warmup_ratio={optim.warmup_ratio:g} sets optim.warmup_steps, which is"
                f" {optim.warmup_steps}; set one of the two"
            )
        is_long = optim.warmup_ratio is None and optim.warmup_steps >= train.last_step
        if self.decays_lr and is_long:
            raise ValueError(
                f"optim.schedule={self.optim.schedule} lowers the learning rate after"
                f" optim.warmup_steps={self.optim.warmup_steps}, and"
                f" train.num_steps={self.train.num_steps} leaves no step for that; lower"
                " optim.warmup_steps, or set optim.schedule=constant"
            )

    def _critic_and_prediction_fit(self) -> None:
        sampling = self.dynamic_sampling
        if self.has_critic and self.uses_trainer_group:
            raise ValueError(
                "advantage.estimator=gae trains its critic in the process that trains the policy;"
                " set distributed.trainer_ranks=1 and launcher=local, or another estimator"
            )
        if self.has_critic and self.model.lora is not None:
            raise ValueError(
                "advantage.estimator=gae trains all weights of a second network, which model.lora"
                " avoids; leave model.lora out, or set another estimator"
            )
        if self.has_critic and self.critic.pretrain_steps >= self.train.last_step:
            raise ValueError(
                f"critic.pretrain_steps={self.critic.pretrain_steps} leaves none of"
                f" train.num_steps={self.train.num_steps} steps to train the policy; lower the"
                " former or raise the latter"
            )
        if self.credits_turns and self.advantage.estimator != "group":
            raise ValueError(
                "environment.credit=turn compares the members of a group at each turn, and"
                f" advantage.estimator={self.advantage.estimator} does not; set"
                " advantage.estimator=group, or environment.credit=episode"
            )
        if self.credits_turns and (self.uses_trainer_group or self.loss.has_kl_reward):
            obstacle = "a trainer in separate processes"
            if self.loss.has_kl_reward:
                obstacle = "loss.kl_in=reward"
            raise ValueError(
                "environment.credit=turn gives tokens of a response different advantages, which"
                f" {obstacle} does not carry; set environment.credit=episode"
            )
        if sampling.predict and not sampling.enabled:
            raise ValueError(
                "dynamic_sampling.predict=true skips problems whose groups Eq. 11 would drop, and "
                "dynamic_sampling.enabled=false drops none; set dynamic_sampling.predict=false"
            )
        if sampling.predict and sampling.has_filter:
            raise ValueError(
                "dynamic_sampling.predict=true predicts the groups that Eq. 11 keeps, not those of "
                "dynamic_sampling.filter, min_spread or mean_between; set one of the two"
            )
        if sampling.predict and sampling.metric != "correct":
            raise ValueError(
                "dynamic_sampling.predict=true predicts which groups have right and wrong"
                f" responses, and dynamic_sampling.metric={sampling.metric} keeps others; set one"
                " of the two"
            )

    def _agent_fits(self) -> None:
        """Raise ValueError for options that an agent would leave without effect."""
        environment = self.environment
        if environment.command and environment.name is not None:
            command = shlex.join(environment.command)
            raise ValueError(
                f"environment.name={environment.name} and environment.command={command} both play"
                " the episodes; leave one of them out"
            )
        if not self.runs_agent:
            return
        agent = str(environment.title).removeprefix(AGENT_PREFIX)
        if environment.tools:
            raise ValueError(
                f"environment.tools={', '.join(environment.tools)} cannot be called: the agent"
                f" {agent} sends its own tools with its requests; leave environment.tools out"
            )
        if self.credits_turns:
            raise ValueError(
                f"environment.credit=turn needs a reward of each turn, and the agent {agent} gives"
                " one of its whole episode; set environment.credit=episode"
            )
        for option_name, text in (
            ("data.instruction", self.data.instruction),
            ("data.system", self.data.system),
        ):
            if text:
                raise ValueError(
                    f"{option_name} would not be seen: the agent {agent} writes its own messages;"
                    " write the text there"
                )

    def _teacher_fits(self) -> None:
        loss = self.loss
        if loss.server is not None and self.has_kl:
            self._server_fits(str(loss.server))
        if self.trains_on_rewards:
            return
        if loss.has_kl_reward or self.has_critic:
            which = "advantage.estimator=gae estimates"
            if loss.has_kl_reward:
                which = "loss.kl_in=reward subtracts from"
            raise ValueError(
                f"{which} rewards, and with reward.coef=0 they do not train; set loss.kl_in=loss"
                " and another advantage.estimator, or leave reward.coef out"
            )
        learns_from_a_teacher = loss.has_kl_term and loss.has_teacher
        has_bonus = loss.entropy_coef > 0 or loss.entropy_target is not None
        if not (learns_from_a_teacher or has_bonus or loss.function is not None):
            raise ValueError(
                "reward.coef=0 leaves nothing to train on; set a teacher (loss.reference.model=NAME"
                " loss.kl_coef=1 loss.kl_estimator=full), or leave reward.coef out"
            )

    def _server_fits(self, server: str) -> None:
        """Raise ValueError for options that need more than log-probabilities of a teacher."""
        loss = self.loss
        if loss.kl_estimator == "full" or loss.has_kl_reward:
            wrong = "loss.kl_in=reward" if loss.has_kl_reward else "loss.kl_estimator=full"
            raise ValueError(
                f"{server} gives log-probabilities of sampled tokens alone, which {wrong} cannot "
                "use; set loss.kl_in=loss loss.kl_estimator=k2"
            )
        if self.rollout.temperature != 1:
            raise ValueError(
                f"{server} gives log-probabilities at temperature 1, and "
                f"rollout.temperature={self.rollout.temperature:g}; set rollout.temperature=1"
            )
        if self.uses_trainer_group or self.has_critic or self.is_supervised:
            which = "this kind of update"
            if self.uses_trainer_group:
                which = "a trainer in separate processes"
            raise ValueError(
                f"{server} scores samples in the process that trains, which {which} does not use;"
                " set loss.reference.model instead"
            )

    @model_validator(mode="before")
    @classmethod
    def _every_group_teaches(cls, values: Any) -> Any:
        """Turn dynamic sampling off, unless it is set, if rewards do not train."""
        if not isinstance(values, Mapping):
            return values
        reward = values.get("reward", {})
        if not isinstance(reward, Mapping):
            return values
        sampling = values.get("dynamic_sampling", {})
        # the text comes from a command line, which is converted later
        if reward.get("coef") not in (0, "0"):
            return values
        if not isinstance(sampling, Mapping) or "enabled" in sampling:
            return values
        return {**values, "dynamic_sampling": {**sampling, "enabled": False}}

    @model_validator(mode="before")
    @classmethod
    def _demonstrations_are_training_data(cls, values: Any) -> Any:
        """Use the demonstrations of `schedule: supervised` as `data.train`."""
        if not isinstance(values, Mapping) or values.get("schedule") != "supervised":
            return values
        data = values.get("data", {})
        demonstrations = data.get("demonstrations") if isinstance(data, Mapping) else None
        if demonstrations is None:
            raise ValueError(
                "schedule=supervised imitates demonstrations; set data.demonstrations, for example"
                " sft.jsonl with the columns prompt and response (`dapo data demonstrations` writes"
                " one from judged responses)"
            )
        return {**values, "data": {**data, "train": demonstrations}}

    @model_validator(mode="before")
    @classmethod
    def _async_is_corrected(cls, values: Any) -> Any:
        """Set the correction for older policies of `schedule: async`."""
        if not isinstance(values, Mapping):
            return values
        if values.get("schedule") == "one_step_off":
            # 2 is the default of other schedules
            staleness = values.get("max_staleness", 1)
            if staleness not in (1, 2, "1", "2"):
                raise ValueError(
                    "schedule=one_step_off is schedule=async with max_staleness=1, got"
                    f" max_staleness={staleness}; set schedule=async"
                )
            values = {**values, "schedule": "async", "max_staleness": 1}
        if values.get("schedule") == "async" and values.get("max_staleness") not in (0, "0"):
            loss = values.get("loss", {})
            if isinstance(loss, Mapping) and "engine_correction" not in loss:
                return {**values, "loss": {**loss, "engine_correction": "tis"}}
        return values

    def _schedule_fits(self) -> None:
        if self.is_supervised:
            self._supervised_fits()
        part = self.distributed.gpus_per_process
        # with pairs an engine has a half of each of its GPUs
        is_split = self.uses_ray and part is not None and part < 1 < self.gpus_per_engine
        if is_split and not self.gpu_shares(0).is_paired:
            raise ValueError(
                f"distributed.gpus_per_process={part:g} gives an engine a part of one GPU, and it"
                f" computes on rollout.vllm.tensor_parallel={self.gpus_per_engine}; leave"
                " distributed.gpus_per_process out, or set 0.5 and a rank per GPU,"
                f" distributed.trainer_ranks={self.gpus_per_engine * self.engine_processes}"
            )
        if not self.samples_ahead:
            return
        if self.loss.engine_correction is None:
            raise ValueError(
                "schedule=async trains on responses of policies up to"
                f" max_staleness={self.max_staleness} steps old, which loss.engine_correction=none"
                " leaves uncorrected; set loss.engine_correction=tis (the default of this"
                " schedule), or schedule=sync"
            )
        if not self.engine_processes:
            raise ValueError(
                "schedule=async samples while the policy updates, so the engine needs its own"
                " process; set rollout.engines=1 (or more), or schedule=sync"
            )

    def _supervised_fits(self) -> None:
        """Raise ValueError for an option about rewards, which demonstrations lack."""
        loss = self.loss
        train = self.train
        obstacles = {
            f"advantage.estimator={self.advantage.estimator}": self.has_critic,
            f"loss.function={loss.function}": loss.function is not None,
            "loss.kl_in=reward": loss.has_kl_reward,
            f"loss.surrogate={loss.surrogate}": loss.surrogate != "clip",
            f"loss.aggregate={loss.aggregate}": loss.aggregate != "token",
            f"loss.engine_correction={loss.engine_correction}": loss.engine_correction is not None,
            f"train.passes_per_step={train.passes_per_step}": train.passes_per_step > 1,
            f"train.token_budget={train.token_budget}": train.token_budget is not None,
            "reward.coef=0": not self.trains_on_rewards,
            "audit.verifier": self.audit.name_and_options is not None,
        }
        for name, is_set in obstacles.items():
            if is_set:
                raise ValueError(
                    f"{name} is for sampled responses, and schedule=supervised imitates given ones;"
                    " leave it out"
                )
        if self.rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature={self.rollout.temperature:g} divides the logits whose"
                " likelihood is trained, and schedule=supervised trains that of the model itself;"
                " leave it out"
            )

    @model_validator(mode="after")
    def _audit_is_another_verifier(self) -> "Config":
        if self.audit.name_and_options is None:
            return self
        name, options = self.audit.name_and_options
        assert self.audit_reward is not None  # its options are valid
        trains = self.reward.verifier
        verifier_options = self.reward.options
        if trains == "auto":
            trains, verifier_options = self.auto_verifier
        # several verifiers have their options by name
        if not isinstance(trains, str):
            is_same = name in trains
            verifier_options = verifier_options.get(name, {})
        else:
            is_same = name == trains
        if is_same and options == (verifier_options or {}):
            raise ValueError(
                f"audit.verifier={name} equals reward.verifier, so the two could never disagree;"
                " set another verifier, or leave audit.verifier out"
            )
        return self

    @property
    def audit_reward(self) -> RewardConfig | None:
        """The section `reward` of the audit's verifier; None: no audit."""
        if self.audit.name_and_options is None:
            return None
        name, options = self.audit.name_and_options
        limits = {"timeout_s": self.reward.timeout_s, "memory_gib": self.reward.memory_gib}
        return RewardConfig(verifier=name, options=options, workers=1, **limits)

    @property
    def auto_verifier(self) -> tuple[str, dict[str, Any]]:
        """Resolve `reward.verifier: auto` by the training data; return its options, too."""
        if self.plays_episodes:
            return "environment", dict(self.reward.options)
        option = "data.train"
        source = self.data.train_source
        if self.is_supervised and self.data.eval_source is not None:
            option = "data.eval"
            source = self.data.eval_source
        verifiers = {"builtin": "exact", "gym": "gym"}
        names = {verifiers.get(kind, "math") for kind in kinds(source)}
        if len(names) > 1:
            raise DataError(
                f"{option} mixes sources of different verifiers ({', '.join(sorted(names))}); set"
                " reward.verifier to one that judges all of them"
            )
        name = names.pop()
        # built-in tasks ask for the answer alone, but a model may explain it
        if name == "exact":
            return name, {"extract": "final"} | self.reward.options
        return name, dict(self.reward.options)

    def _ratio_to_engine_fits(self) -> None:
        """Raise ValueError where a cap of each token's ratio to the engine has no sound meaning."""
        loss = self.loss
        cap = loss.engine_correction
        assert cap is not None
        alternative = "or loss.old_logprobs=policy"
        if loss.engine_ratio == "sequence":
            raise ValueError(
                "loss.engine_ratio=sequence weighs a response by the product of its tokens' ratios,"
                " and with loss.old_logprobs=engine each token has its ratio already; set"
                f" loss.engine_ratio=token, {alternative}"
            )
        surrogate = SURROGATES[loss.surrogate]
        if surrogate.needs_whole_responses:
            raise ValueError(
                f"loss.surrogate={loss.surrogate} clips the mean ratio of a response, within bounds"
                " that the engine's rounding alone exceeds with loss.old_logprobs=engine; set"
                f" another surrogate, {alternative}"
            )
        clips = loss.function is None and "clip_high" in surrogate.bounds
        if clips and loss.engine_over_cap == "truncate" and cap <= 1 + loss.clip_high:
            raise ValueError(
                f"loss.engine_correction={cap:g} caps the ratio to the engine before"
                f" loss.clip_high={loss.clip_high:g} can clip it; with loss.old_logprobs=engine set"
                f" it above {1 + loss.clip_high:g}, {alternative}"
            )

    def _why_engine_is_not_pi_old(self) -> str | None:
        """Explain why the engine's log-probabilities may differ from the policy's."""
        if not self.rollout.engine_kind.rounds_as_trainer:
            engines = engines_with("rounds_as_trainer")
            return f"needs an engine that rounds like the trainer: rollout.engine={engines}"
        if self.uses_trainer_group:
            return (
                "keeps the samples in one process: it needs distributed.trainer_ranks=1 and"
                " launcher=local"
            )
        if self.engine_processes:
            return "needs the engine in the process that trains: rollout.engines=0"
        if self.model.dtype not in ("float32", "float64"):
            return (
                f"needs model.dtype=float32 or float64, not {self.model.dtype}, which rounds"
                " ratios to whole percents"
            )
        return None
