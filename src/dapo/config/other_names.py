"""What options of TRL, verl and AReaL are called here: for error messages, and for the tables of docs/from_*.md."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

Peer: TypeAlias = Literal["trl", "verl", "areal"]
TITLES: Mapping[Peer, str] = {"trl": "TRL", "verl": "verl", "areal": "AReaL"}


@dataclass(frozen=True)
class Counterpart:
    """An option of another system, and what does the same here."""

    theirs: str
    """Its name, or `name=value` for one of its values."""
    ours: tuple[str, ...]
    """Names of options here, or overrides `option=value`; empty: there is none."""
    remark: str = ""
    converted: bool = False
    """The value of a single option is another number or word here, as the remark says; else it is the same."""

    @property
    def name(self) -> str:
        return self.theirs.partition("=")[0]

    @property
    def keeps_value(self) -> bool:
        """Whether the value moves to our option as it is."""
        return len(self.ours) == 1 and "=" not in self.ours[0] and "=" not in self.theirs and not self.converted


def _same(theirs: str, *ours: str, remark: str = "") -> Counterpart:
    return Counterpart(theirs, ours, remark)


def _converted(theirs: str, *ours: str, remark: str) -> Counterpart:
    return Counterpart(theirs, ours, remark, converted=True)


def _none(theirs: str, remark: str) -> Counterpart:
    return Counterpart(theirs, (), remark)


TRL = (
    _same("model", "model.name", remark="Also `model: NAME`."),
    _converted("train_dataset", "data.train", remark="A file, `hub:NAME:SPLIT` and others; from Python also rows."),
    _converted("eval_dataset", "data.eval", remark="As above; its texts are removed from the training problems."),
    _converted("reward_funcs", "reward.verifier", remark="`module:function`; several: a mapping to their weights."),
    _converted("reward_weights", "reward.verifier", remark='`{"rewards:accuracy": 1.0, "rewards:format": 0.2}`'),
    _same("num_generations", "rollout.group_size"),
    _converted(
        "generation_batch_size",
        "rollout.prompts_per_step",
        remark="Theirs counts responses, ours prompts: divide by `num_generations`. By default it is "
        "`per_device_train_batch_size` x processes x `steps_per_generation`.",
    ),
    _converted(
        "steps_per_generation",
        "train.minibatch_groups",
        remark="There `steps_per_generation / gradient_accumulation_steps` updates per batch, here groups per update.",
    ),
    _converted(
        "per_device_train_batch_size",
        "train.microbatch_tokens",
        remark="What one backward pass holds: here tokens, chosen by the memory, without effect on the result.",
    ),
    _none("gradient_accumulation_steps", "Not needed: `train.minibatch_groups` is the update, however it is cut."),
    _none("num_iterations", "Each response trains once."),
    _same("max_completion_length", "rollout.max_response_tokens"),
    _same("max_prompt_length", "data.max_prompt_tokens", remark="Longer prompts are left out and counted, never cut."),
    _same("temperature", "rollout.temperature"),
    _same("top_p", "rollout.top_p", remark="Training needs 1; `eval.top_p` is free."),
    _none("top_k", "Sampling is from the whole distribution, whose log-probabilities are trained."),
    _none("min_p", "As for `top_k`."),
    _none("repetition_penalty", "As for `top_k`."),
    _same(
        "beta",
        "loss.kl_coef",
        remark="0 in both by default; k3 in both, there times the ratio unless `use_bias_correction_kl=False`.",
    ),
    _same("epsilon", "loss.clip_low", remark="It is `loss.clip_high` too where `epsilon_high` is not set."),
    _same("epsilon_high", "loss.clip_high", remark="Here 0.28 by default."),
    _same("delta", "loss.dual_clip"),
    _same("loss_type=dapo", "loss.aggregate=token"),
    _same("loss_type=grpo", "loss.aggregate=sequence"),
    _same("loss_type=dr_grpo", "loss.aggregate=constant", "advantage.scale=none"),
    _converted(
        "loss_type=cispo",
        "loss.surrogate=cispo",
        remark="`epsilon_high` there is the bound of the weight, here 1 + `loss.clip_high` is: 5 there is 4 here.",
    ),
    _same("loss_type=sapo", "loss.surrogate=sapo", "loss.aggregate=sequence"),
    _none("sapo_temperature_pos", "1 in both by default."),
    _none("sapo_temperature_neg", "1.05 in both by default."),
    _same("loss_type=bnpo", "loss.aggregate=token", remark="Over the tokens of the whole update, not of one device."),
    _same("importance_sampling_level=token", "loss.surrogate=clip"),
    _same("importance_sampling_level=sequence", "loss.surrogate=gspo", remark="GSPO, with `loss_type=grpo` there."),
    _same("scale_rewards=group", "advantage.scale=std"),
    _same("scale_rewards=none", "advantage.scale=none"),
    _same("scale_rewards=batch", remark="None: advantages are of the group (Eq. 9)."),
    _converted(
        "ref_model_sync_steps",
        "loss.reference_every",
        remark="With `sync_ref_model=True`: updates there, which mix by `ref_model_mixup_alpha`; training steps here, "
        "which copy.",
    ),
    _same("entropy_coef", "loss.entropy_coef"),
    _same("entropy_target", "loss.entropy_target", remark="With `use_adaptive_entropy=True` there."),
    _none("entropy_coef_delta", "0.005 in both by default."),
    _same("mask_truncated_completions=True", "overlong.mode=filter"),
    _converted(
        "get_soft_overlong_punishment",
        "overlong.mode=soft",
        "overlong.buffer_tokens",
        remark="`soft_punish_cache` is `overlong.buffer_tokens`; on by default, so leave the reward function out.",
    ),
    _converted("use_vllm", "rollout.engine=vllm", remark="The native engine is the default, on CPUs too."),
    _same("vllm_tensor_parallel_size", "rollout.vllm.tensor_parallel"),
    _converted("vllm_gpu_memory_utilization", "rollout.vllm.cache_gib", remark="GiB for the cache, or auto."),
    _converted(
        "vllm_importance_sampling_correction",
        "loss.engine_correction",
        remark="Off here by default; the value is the cap, `vllm_importance_sampling_clip_max` there.",
    ),
    _same("vllm_importance_sampling_clip_max", "loss.engine_correction", remark="3 there by default; `tis` is 2."),
    _none("vllm_importance_sampling_clip_min", "With `loss.engine_over_cap=mask` ratios below 1 / cap do not train."),
    _same(
        "vllm_importance_sampling_mode=sequence_mask",
        "loss.engine_ratio=sequence",
        "loss.engine_over_cap=mask",
        remark="The default there.",
    ),
    _same(
        "vllm_importance_sampling_mode=sequence_truncate",
        "loss.engine_ratio=sequence",
        "loss.engine_over_cap=truncate",
    ),
    _same("vllm_importance_sampling_mode=token_mask", "loss.engine_ratio=token", "loss.engine_over_cap=mask"),
    _same("vllm_importance_sampling_mode=token_truncate", "loss.engine_ratio=token", "loss.engine_over_cap=truncate"),
    _same("learning_rate", "optim.lr", remark="1e-6 in both by default."),
    _converted(
        "max_steps",
        "train.num_steps",
        remark="Theirs counts updates; a step here is a batch: divide by the updates per batch.",
    ),
    _converted("warmup_steps", "optim.warmup_steps", remark="Divided as `max_steps`."),
    _same("lr_scheduler_type", "optim.schedule", remark="`linear` there by default, to 0: `optim.min_lr_fraction=0`."),
    _same("weight_decay", "optim.weight_decay"),
    _converted("adam_beta1", "optim.betas", remark="The first of the two."),
    _converted("adam_beta2", "optim.betas", remark="The second of the two."),
    _same("max_grad_norm", "optim.max_grad_norm"),
    _converted("num_train_epochs", "train.num_steps", remark="Steps: the stream begins anew where the data ends."),
    _converted("save_steps", "train.save_every", remark="Divided as `max_steps`."),
    _same("save_total_limit", "train.keep_checkpoints", remark="The best evaluated one is kept besides."),
    _converted("eval_steps", "train.eval_every", remark="Divided as `max_steps`."),
    _same("seed", "train.seed"),
    _same("bf16=True", "model.dtype=bfloat16", remark="Master weights stay float32."),
    _same("gradient_checkpointing", "train.recompute"),
    _converted("peft_config", "model.lora", remark="`{rank: 16, alpha: 32}` for `LoraConfig(r=16, lora_alpha=32)`."),
    _converted("report_to", "log.sinks", remark="`[wandb]`, `[tensorboard]`, `[trackio]`."),
    _none("log_completions", "Every judged response is written, to `rollouts/` in the run directory."),
    _none("output_dir", "`dapo train CONFIG.yaml --run-dir DIR`."),
)
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VERL = (
    _same("actor_rollout_ref.model.path", "model.name"),
    _same("actor_rollout_ref.model.lora_rank", "model.lora.rank"),
    _same("actor_rollout_ref.model.lora_alpha", "model.lora.alpha"),
    _same("actor_rollout_ref.model.enable_gradient_checkpointing", "train.recompute"),
    _same("actor_rollout_ref.model.trust_remote_code", "model.trust_remote_code"),
    _same("data.train_files", "data.train", remark="verl's Parquet files load as they are; one file."),
    _same("data.val_files", "data.eval"),
    _converted("data.prompt_key", "data.train", remark="`{path: FILE, prompt: COLUMN}`, where it is not `prompt`."),
    _same("data.max_prompt_length", "data.max_prompt_tokens", remark="Longer prompts are left out, never cut."),
    _same("data.max_response_length", "rollout.max_response_tokens"),
    _same("data.train_batch_size", "rollout.prompts_per_step", remark="Prompts in both."),
    _none("data.gen_batch_size", "Not needed: groups are asked one by one until the batch is full."),
    _same("data.seed", "train.seed"),
    _same(f"{_ROLLOUT}.n", "rollout.group_size"),
    _same(f"{_ROLLOUT}.temperature", "rollout.temperature"),
    _same(f"{_ROLLOUT}.top_p", "rollout.top_p", remark="Training needs 1."),
    _none(f"{_ROLLOUT}.top_k", "Sampling is from the whole distribution (-1 there)."),
    _same(f"{_ROLLOUT}.name=vllm", "rollout.engine=vllm"),
    _same(f"{_ROLLOUT}.tensor_model_parallel_size", "rollout.vllm.tensor_parallel"),
    _same(f"{_ROLLOUT}.max_num_seqs", "rollout.vllm.max_sequences"),
    _same(f"{_ROLLOUT}.enforce_eager", "rollout.vllm.eager"),
    _converted(f"{_ROLLOUT}.gpu_memory_utilization", "rollout.vllm.cache_gib", remark="GiB for the cache, or auto."),
    _same(f"{_ROLLOUT}.val_kwargs.n", "eval.samples_per_problem"),
    _same(f"{_ROLLOUT}.val_kwargs.temperature", "eval.temperature"),
    _same(f"{_ROLLOUT}.val_kwargs.top_p", "eval.top_p"),
    _same(f"{_ACTOR}.ppo_mini_batch_size", "train.minibatch_groups", remark="Prompts in both."),
    _same(
        f"{_ACTOR}.ppo_max_token_len_per_gpu",
        "train.microbatch_tokens",
        remark="Packing is always on; without effect on the result.",
    ),
    _none(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "Not needed: `train.microbatch_tokens`, chosen by the memory."),
    _none(f"{_ACTOR}.use_dynamic_bsz", "Always so: sequences are packed by their tokens."),
    _none(f"{_ACTOR}.ppo_epochs", "Each response trains once."),
    _same(f"{_ACTOR}.clip_ratio_low", "loss.clip_low"),
    _same(f"{_ACTOR}.clip_ratio_high", "loss.clip_high"),
    _converted(f"{_ACTOR}.clip_ratio", "loss.clip_low", "loss.clip_high", remark="Both."),
    _same(f"{_ACTOR}.clip_ratio_c", "loss.dual_clip", remark="3 there by default; here none, as in the paper."),
    _same(f"{_ACTOR}.policy_loss.loss_mode=vanilla", "loss.surrogate=clip"),
    _same(f"{_ACTOR}.policy_loss.loss_mode=gspo", "loss.surrogate=gspo"),
    _same(
        f"{_ACTOR}.policy_loss.loss_mode=cispo",
        "loss.surrogate=cispo",
        remark="There the weight has a lower bound too, 1 - `clip_ratio_low`.",
    ),
    _same(
        f"{_ACTOR}.policy_loss.loss_mode=sapo",
        "loss.surrogate=sapo",
        "loss.aggregate=sequence",
        remark="There always the mean over responses, whatever `loss_agg_mode` says.",
    ),
    _same(f"{_ACTOR}.loss_agg_mode=token-mean", "loss.aggregate=token"),
    _same(f"{_ACTOR}.loss_agg_mode=seq-mean-token-mean", "loss.aggregate=sequence"),
    _same(f"{_ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", "loss.aggregate=constant"),
    _same(f"{_ACTOR}.entropy_coeff", "loss.entropy_coef"),
    _same(f"{_ACTOR}.kl_loss_coef", "loss.kl_coef", remark="Where `use_kl_loss` is on."),
    _none(f"{_ACTOR}.use_kl_loss", "`loss.kl_coef` above 0."),
    _same(f"{_ACTOR}.kl_loss_type=low_var_kl", "loss.kl_estimator=k3", remark="The default in both; there at most 10."),
    _same(f"{_ACTOR}.kl_loss_type=mse", "loss.kl_estimator=k2"),
    _same(f"{_ACTOR}.kl_loss_type=kl", "loss.kl_estimator=k1"),
    _same("algorithm.kl_ctrl.kl_coef", "loss.kl_coef", remark="With `loss.kl_in=reward`."),
    _same("algorithm.use_kl_in_reward=True", "loss.kl_in=reward"),
    _same("algorithm.kl_penalty=kl", "loss.kl_estimator=k1", remark="With `loss.kl_in=reward`."),
    _same("algorithm.adv_estimator=grpo", "advantage.scale=std", remark="Eq. 9."),
    _same("algorithm.norm_adv_by_std_in_grpo=False", "advantage.scale=none"),
    _same("algorithm.adv_estimator=rloo", "advantage.estimator=rloo"),
    _same(
        "algorithm.adv_estimator=reinforce_plus_plus",
        "advantage.estimator=reinforce_pp",
        remark="Mean and standard deviation over responses here, over tokens there.",
    ),
    _same("algorithm.adv_estimator=gae", "advantage.estimator=gae", remark="PPO, the default there."),
    _same("algorithm.gamma", "critic.gamma"),
    _same("algorithm.lam", "critic.gae_lambda"),
    _same("critic.optim.lr", "critic.lr"),
    _same("critic.cliprange_value", "critic.clip_range"),
    _converted(
        "trainer.critic_warmup",
        "critic.pretrain_steps",
        remark="The step from which on the policy trains there, the steps before that here: one less.",
    ),
    _same("algorithm.rollout_correction.rollout_is=token", "loss.engine_ratio=token"),
    _same("algorithm.rollout_correction.rollout_is=sequence", "loss.engine_ratio=sequence"),
    _same(
        "algorithm.rollout_correction.rollout_is_threshold",
        "loss.engine_correction",
        remark="One number truncates in both; `lower_upper` there is `loss.engine_over_cap=mask` with one number here.",
    ),
    _none("algorithm.rollout_correction.rollout_rs", "`loss.engine_over_cap=mask` with `loss.engine_ratio=sequence`."),
    _same(
        "algorithm.rollout_correction.bypass_mode=True",
        "loss.old_logprobs=engine",
        "model.dtype=float32",
        remark="Here the run ends where the two differ by more than 0.001 nats.",
    ),
    _same("algorithm.filter_groups.enable", "dynamic_sampling.enabled"),
    _none(
        "algorithm.filter_groups.metric",
        "The verdict decides: right or wrong, or the score, before the penalty on length (`acc` there).",
    ),
    _converted(
        "algorithm.filter_groups.max_num_gen_batches",
        "dynamic_sampling.max_groups_per_step",
        remark="Groups, not batches; what happens at the limit: `dynamic_sampling.on_shortfall`.",
    ),
    _same(f"{_ACTOR}.optim.lr", "optim.lr"),
    _same(f"{_ACTOR}.optim.lr_warmup_steps", "optim.warmup_steps"),
    _same(f"{_ACTOR}.optim.lr_scheduler_type", "optim.schedule", remark="`constant` in both by default."),
    _same(f"{_ACTOR}.optim.min_lr_ratio", "optim.min_lr_fraction"),
    _same(f"{_ACTOR}.optim.weight_decay", "optim.weight_decay"),
    _same(f"{_ACTOR}.optim.betas", "optim.betas"),
    _same(f"{_ACTOR}.grad_clip", "optim.max_grad_norm"),
    _converted(
        "reward.custom_reward_function.path",
        "reward.verifier",
        remark="`module:function` for path and name; `custom_reward_function.path` in older versions.",
    ),
    _converted("custom_reward_function.path", "reward.verifier", remark="As above."),
    _same("reward.num_workers", "reward.workers"),
    _same("reward_model.reward_manager=dapo", "overlong.mode=soft"),
    _same("reward.reward_manager.name=dapo", "overlong.mode=soft"),
    _same("reward_model.overlong_buffer.enable=True", "overlong.mode=soft"),
    _same("reward_model.overlong_buffer.len", "overlong.buffer_tokens"),
    _same("reward_model.overlong_buffer.penalty_factor", "overlong.penalty"),
    _converted("trainer.total_epochs", "train.num_steps", remark="Steps: the stream begins anew where the data ends."),
    _same("trainer.total_training_steps", "train.num_steps"),
    _same("trainer.save_freq", "train.save_every"),
    _same("trainer.test_freq", "train.eval_every"),
    _same("trainer.project_name", "log.project"),
    _converted("trainer.logger", "log.sinks", remark="The console is always there."),
    _same("trainer.max_actor_ckpt_to_keep", "train.keep_checkpoints"),
    _none("trainer.default_local_dir", "`dapo train CONFIG.yaml --run-dir DIR`."),
    _none("trainer.resume_mode", "`dapo resume RUN_DIR`."),
    _converted("trainer.nnodes", "distributed.trainer_ranks", remark="`dapo submit --nodes N` on Slurm."),
)
AREAL = (
    _same("actor.path", "model.name"),
    _same("train_dataset.path", "data.train", remark="A file or `hub:NAME:SPLIT`."),
    _same("valid_dataset.path", "data.eval"),
    _same("train_dataset.batch_size", "rollout.prompts_per_step", remark="Prompts in both."),
    _same("train_dataset.max_length", "data.max_prompt_tokens", remark="Longer prompts are left out, never cut."),
    _same("gconfig.n_samples", "rollout.group_size"),
    _same("gconfig.max_new_tokens", "rollout.max_response_tokens"),
    _same("gconfig.temperature", "rollout.temperature"),
    _same("gconfig.top_p", "rollout.top_p", remark="Training needs 1."),
    _same("actor.eps_clip", "loss.clip_low", remark="It is `loss.clip_high` too where `eps_clip_higher` is not set."),
    _same("actor.eps_clip_higher", "loss.clip_high"),
    _same("actor.c_clip", "loss.dual_clip"),
    _same("actor.overlong_reward_penalty=true", "overlong.mode=soft"),
    _same("actor.overlong_reward_penalty=false", "overlong.mode=off"),
    _same("actor.overlong_tokens", "overlong.buffer_tokens"),
    _same("actor.overlong_penalty_factor", "overlong.penalty"),
    _same(
        "actor.mask_no_eos_with_zero=true",
        "overlong.mode=filter",
        remark="There the reward becomes 0 after its normalisation; here the tokens do not train.",
    ),
    _same("actor.importance_sampling_level=token", "loss.surrogate=clip"),
    _same("actor.importance_sampling_level=sequence", "loss.surrogate=gspo"),
    _same("actor.use_sapo_loss=true", "loss.surrogate=sapo"),
    _none("actor.sapo_tau_pos", "1 in both by default."),
    _none("actor.sapo_tau_neg", "1.05 in both by default."),
    _converted(
        "dynamic_filter_fn",
        "dynamic_sampling.filter",
        remark="`module:function` from a `Group` to a bool; without one, Eq. 11, for which AReaL needs a function.",
    ),
    _converted("should_accept_fn", "dynamic_sampling.filter", remark="The same as `dynamic_filter_fn`."),
    _converted(
        "dynamic_bs=true",
        "dynamic_sampling.max_groups_per_step",
        "dynamic_sampling.on_shortfall=train",
        remark="`max_groups_per_step` equal to `rollout.prompts_per_step`: accepted and rejected groups together are "
        "one batch, and the accepted ones train.",
    ),
    _same(
        "dynamic_bs=false",
        "dynamic_sampling.max_groups_per_step=null",
        remark="The default: until the batch is full.",
    ),
    _same(
        "actor.kl_ctl",
        "loss.kl_coef",
        remark="0 here by default, 0.1 there, where it is in the reward: `loss.kl_in=reward`.",
    ),
    _same("actor.kl_estimator", "loss.kl_estimator", remark="k3 here by default, k1 there."),
    _same("actor.reward_norm.mean_leave1out=true", "advantage.estimator=rloo", remark="With `std_level=null`."),
    _same("actor.discount", "critic.gamma", remark="With `advantage.estimator=gae`."),
    _same("actor.gae_lambda", "critic.gae_lambda", remark="With `advantage.estimator=gae`."),
    _same("critic.optimizer.lr", "critic.lr"),
    _same("critic.eps_clip", "critic.clip_range"),
    _same("actor.reward_norm.std_level=group", "advantage.scale=std", remark="Eq. 9."),
    _same("actor.reward_norm.std_level=null", "advantage.scale=none"),
    _none("actor.adv_norm", "Advantages are of the group (Eq. 9), without another normalisation over the batch."),
    _none("actor.reward_scaling", "Scores are used as the verifier gives them."),
    _none("actor.reward_bias", "As above: the group's mean is subtracted."),
    _converted(
        "actor.ppo_n_minibatches",
        "train.minibatch_groups",
        remark="Minibatches per step there, groups per minibatch here: `prompts_per_step / ppo_n_minibatches`.",
    ),
    _same("actor.mb_spec.max_tokens_per_mb", "train.microbatch_tokens", remark="Without effect on the result."),
    _same("actor.gradient_checkpointing", "train.recompute"),
    _same("actor.dtype", "model.dtype"),
    _same("actor.optimizer.lr", "optim.lr"),
    _same("actor.optimizer.lr_scheduler_type", "optim.schedule", remark="`constant` in both by default."),
    _same("actor.optimizer.min_lr_ratio", "optim.min_lr_fraction"),
    _same("actor.optimizer.weight_decay", "optim.weight_decay"),
    _same("actor.optimizer.gradient_clipping", "optim.max_grad_norm"),
    _converted("actor.optimizer.beta1", "optim.betas", remark="The first of the two."),
    _converted("actor.optimizer.beta2", "optim.betas", remark="The second of the two."),
    _converted("actor.optimizer.warmup_steps_proportion", "optim.warmup_steps", remark="Steps, not a share."),
    _converted(
        "actor.use_decoupled_loss",
        "loss.engine_correction=tis",
        remark="The ratio is to the trainer's own probabilities here by default; the weight is truncated at 2.",
    ),
    _same("actor.rejection_sampling.upper", "loss.engine_correction"),
    _none("actor.rejection_sampling.lower", "With `loss.engine_over_cap=mask`, 1 / `loss.engine_correction`."),
    _same("actor.rejection_sampling.action=clamp", "loss.engine_over_cap=truncate"),
    _same("actor.rejection_sampling.action=mask", "loss.engine_over_cap=mask", remark="The default there."),
    _same("actor.rejection_sampling.level=token", "loss.engine_ratio=token"),
    _same(
        "actor.rejection_sampling.level=sequence",
        "loss.engine_ratio=sequence",
        remark="The product of the tokens' ratios here, their geometric mean there.",
    ),
    _converted(
        "rollout.max_head_offpolicyness",
        "schedule=one_step_off",
        "rollout.engines=1",
        remark="1 at most, with engines in processes of their own; 0 is `schedule=sync`.",
    ),
    _converted("rollout.backend", "rollout.engine", remark="`native` or `vllm`, with `rollout.engines` processes."),
    _converted("cluster.n_nodes", "launcher=ray", remark="`dapo submit --nodes N` on Slurm."),
    _converted("total_train_epochs", "train.num_steps", remark="Steps: the stream begins anew where the data ends."),
    _same("total_train_steps", "train.num_steps"),
    _converted("saver.freq_steps", "train.save_every", remark="Each checkpoint continues the run exactly."),
    _same("evaluator.freq_steps", "train.eval_every"),
    _none("recover", "`dapo resume RUN_DIR`, always possible."),
    _none("experiment_name", "`dapo train CONFIG.yaml --run-dir DIR`."),
)
COUNTERPARTS: Mapping[Peer, tuple[Counterpart, ...]] = {"trl": TRL, "verl": VERL, "areal": AREAL}


def called_elsewhere(name: str, value: object = None) -> str | None:
    """A sentence on an unknown option that another system has: `TRL's beta is loss.kl_coef here`; None: none has it.

    Args:
        name: the option as it was typed, with dots; the last part alone is enough.
        value: what it was set to: a mapping stands for the options in it.
    """
    rows = [(peer, row) for peer, table in COUNTERPARTS.items() for row in table]
    for typed in _leaves(name, value):
        # the name itself, else names that end in it, else those that share its last part
        exact = [(peer, row) for peer, row in rows if row.name == typed]
        ending = [(peer, row) for peer, row in rows if row.name.endswith(f".{typed}")]
        alike = [(peer, row) for peer, row in rows if row.name.rpartition(".")[2] == typed.rpartition(".")[2]]
        for found in filter(None, (exact, ending, alike)):
            peer, first = found[0]
            theirs = f"{TITLES[peer]}'s {first.name}"
            same = [row for other, row in found if other == peer and row.name == first.name]
            if ours := dict.fromkeys(option.partition("=")[0] for row in same for option in row.ours):
                return f"{theirs} is {' and '.join(ours)} here (docs/from_{peer}.md)"
            return f"{theirs} has no option here: {first.remark[0].lower()}{first.remark[1:].rstrip('.')}"
    return None


def _leaves(name: str, value: object) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    else:
        yield name


def options_table(peer: Peer) -> str:
    """The table of options of docs/from_PEER.md in Markdown."""
    lines = [f"| {TITLES[peer]} | here | remark |", "|---|---|---|"]
    for row in COUNTERPARTS[peer]:
        ours = ", ".join(f"`{option}`" for option in row.ours) or "none"
        lines.append(f"| `{row.theirs}` | {ours} | {row.remark} |")
    return "\n".join(lines)


def with_table(page: str, peer: Peer) -> str:
    """The text of a page with the table between its two marks `<!-- options -->` made anew."""
    table = f"<!-- options -->\n{options_table(peer)}\n<!-- options -->"
    return re.sub(r"<!-- options -->.*?<!-- options -->", lambda _: table, page, flags=re.DOTALL)
