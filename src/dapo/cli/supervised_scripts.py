"""Translates scripts that imitate demonstrations: verl's `sft_trainer`, and TRL's `SFTTrainer`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dapo.config.other_names import COUNTERPARTS
from dapo.libs.foreign_options import Counterpart, Reading, Table, Unknown

Supervised: TypeAlias = Literal["verl", "verl_engine", "trl"]
_TRAINERS: Mapping[str, Supervised] = {
    "fsdp_sft_trainer": "verl",
    "sft_trainer": "verl_engine",
    "sft_trainer_ray": "verl_engine",
    "sft": "trl",
}
"""The programs that imitate demonstrations, by the last part of their names."""
_HELD_OUT = "`data.eval` takes problems that the model answers, no demonstrations."
_LENGTH = "Demonstrations above `rollout.max_response_tokens` are left out and counted, never cut."
_PACKED = "Sequences are always packed; `train.microbatch_tokens` bounds a pass."
_RUN = "The run chooses it; results do not depend on it."
_RANKS = "Ranks shard by FSDP2 (`distributed.trainer_ranks`)."
_SCHEDULE = "`optim.schedule` and `optim.warmup_ratio`."
_BATCH = "per_device_train_batch_size * gradient_accumulation_steps * processes"
_FILES_OF_VERL = (
    "{'path': data.train_files, 'prompt': data.prompt_key, 'answer': data.response_key}"
    " if data.prompt_key else files(data.train_files)"
)


_ANSWERS = "The tokens of answers train, and never those of prompts."
_SHARED_OF_TRL = {
    "adam_beta1",
    "adam_beta2",
    "bf16",
    "chat_template_kwargs",
    "dtype",
    "gradient_checkpointing",
    "lora_alpha",
    "lr_scheduler_type",
    "max_grad_norm",
    "r",
    "report_to",
    "save_total_limit",
    "seed",
    "system_prompt",
    "torch_dtype",
    "trust_remote_code",
    "use_cpu",
    "use_peft",
    "weight_decay",
}
"""Options that do the same in both trainers of TRL."""
_SHARE = "A share of all steps in both."


def _row(theirs: str, ours: str = "", formula: str = "", remark: str = "") -> Counterpart:
    """Return a row of the tables below; `converted` marks a value for a person."""
    is_for_person = formula == "converted"
    return Counterpart(
        theirs,
        (ours,) if ours else (),
        remark,
        converted=bool(formula),
        formula="" if is_for_person else formula,
    )


def _without_counterpart(
    rows: Iterable[Counterpart], own: Sequence[Counterpart]
) -> list[Counterpart]:
    """Return the rows of the other trainer that only explain, for options without a row here."""
    names = {row.name for row in own}
    return [row for row in rows if not row.ours and row.name not in names]


_ROWS_OF_VERL = (
    _row("model.partial_pretrain", "model.name"),
    _row("model.path", "model.name"),
    _row("model.trust_remote_code", "model.trust_remote_code"),
    _row("model.enable_gradient_checkpointing", "train.recompute"),
    _row("model.lora_rank", "model.lora.rank", "model.lora_rank or None"),
    _row(
        "model.lora_alpha",
        "model.lora.alpha",
        "model.lora_alpha if model.lora_rank else None",
    ),
    _row("model.target_modules", remark="Adapters are in every linear layer but the head."),
    _row("model.use_remove_padding", remark=_PACKED),
    _row("model.use_liger", remark=_RUN),
    _row("model.use_shm", remark=_RUN),
    _row("model.strategy", remark=_RANKS),
    _row("model.fsdp_config.*", remark=_RANKS),
    _row("data.train_files", "data.demonstrations", _FILES_OF_VERL),
    _row("data.prompt_key", remark="The `prompt` of `data.demonstrations`."),
    _row("data.response_key", remark="The `answer` of `data.demonstrations`."),
    _row("data.prompt_dict_keys", remark="A dot names a nested column."),
    _row("data.response_dict_keys", remark="A dot names a nested column."),
    _row("data.multiturn.enable", remark="A column `messages` is a conversation."),
    _row("data.multiturn.messages_key=messages", remark="A column `messages` is a conversation."),
    _row("data.messages_key=messages", remark="A column `messages` is a conversation."),
    _row("data.val_files", remark=_HELD_OUT),
    _row("data.train_batch_size", "train.minibatch_groups"),
    _row("data.max_length", remark=_LENGTH),
    _row("data.truncation", remark=_LENGTH),
    _row("data.micro_batch_size", remark=_PACKED),
    _row("data.micro_batch_size_per_gpu", remark=_PACKED),
    _row("data.max_token_len_per_gpu", "train.microbatch_tokens"),
    _row("data.use_dynamic_bsz", remark=_PACKED),
    _row("data.pad_mode", remark=_PACKED),
    _row("data.apply_chat_template_kwargs", "data.chat_template_kwargs"),
    _row("use_remove_padding", remark=_PACKED),
    _row("ulysses_sequence_parallel_size", remark=_RANKS),
    _row("engine", remark=_RANKS),
    _row("engine.*", remark=_RANKS),
    _row("optim.lr", "optim.lr"),
    _row("optim.betas", "optim.betas"),
    _row("optim.weight_decay", "optim.weight_decay"),
    _row("optim.clip_grad", "optim.max_grad_norm"),
    _row("optim.lr_scheduler=cosine", "optim.schedule=cosine:0"),
    _row("optim.lr_scheduler", remark=_SCHEDULE),
    _row("optim.lr_scheduler_type=constant", "optim.schedule=constant"),
    _row(
        "optim.lr_scheduler_type",
        "optim.schedule",
        "schedule(optim.lr_scheduler_type, optim.min_lr_ratio or 0)",
    ),
    _row(
        "optim.warmup_style",
        "optim.schedule",
        "schedule(optim.warmup_style, optim.min_lr_ratio or 0)",
    ),
    _row("optim.min_lr_ratio", remark="The fraction of `optim.schedule=cosine:FRACTION`."),
    _row(
        "optim.lr_warmup_steps",
        "optim.warmup_steps",
        "optim.lr_warmup_steps if optim.lr_warmup_steps > 0"
        " else None if optim.lr_warmup_steps_ratio else 0",
    ),
    _row(
        "optim.lr_warmup_steps_ratio",
        "optim.warmup_ratio",
        "None if optim.lr_warmup_steps > 0 else optim.lr_warmup_steps_ratio or None",
        _SHARE,
    ),
    _row("optim.warmup_steps_ratio", remark=_SCHEDULE),
    _row(
        "trainer.total_epochs",
        "train.epochs",
        "None if trainer.total_training_steps else trainer.total_epochs",
    ),
    _row(
        "trainer.total_training_steps",
        "train.num_steps",
        "trainer.total_training_steps or None",
    ),
    _row("trainer.save_freq", "train.save_every", "max(trainer.save_freq, 0)"),
    _row("trainer.test_freq", remark=_HELD_OUT),
    _row("trainer.max_ckpt_to_keep", "train.keep_checkpoints"),
    _row("trainer.logger", "log.sinks", "sinks(trainer.logger)"),
    _row("trainer.seed", "train.seed"),
    _row("trainer.default_local_dir", remark="`dapo train CONFIG.yaml --run-dir DIR`."),
    _row("trainer.project_name", remark="The environment variable `WANDB_PROJECT`."),
    _row("checkpoint.*", remark="A checkpoint holds all that the run needs to continue."),
)
_DEFAULTS_OF_VERL = {
    "data.train_batch_size": 256,
    "model.lora_rank": 0,
    "optim.weight_decay": 0.01,
    "optim.min_lr_ratio": 0.0,
    "optim.lr_warmup_steps": -1,
    "trainer.total_training_steps": None,
    "trainer.save_freq": -1,
    "trainer.seed": 1,
}


def _table_of_verl(defaults: Mapping[str, Any]) -> Table:
    """Return the table of one of verl's two supervised trainers."""
    others = [row for row in COUNTERPARTS["verl"] if row.name.startswith(("trainer.", "hydra."))]
    rows = [*_ROWS_OF_VERL, *_without_counterpart(others, _ROWS_OF_VERL)]
    return Table("verl", (*rows,), {**_DEFAULTS_OF_VERL, **defaults}, {})


# verl/trainer/config/sft_trainer.yaml
_OF_VERL = _table_of_verl(
    {
        "data.prompt_key": "question",
        "data.response_key": "answer",
        "optim.lr": 1e-5,
        "optim.betas": [0.9, 0.95],
        "optim.lr_scheduler": "cosine",
        "optim.lr_warmup_steps_ratio": 0.1,
    }
)
# verl/trainer/config/sft_trainer_engine.yaml and optim/fsdp.yaml
_OF_VERL_ENGINE = _table_of_verl(
    {
        "data.prompt_key": None,
        "optim.lr": 1e-3,
        "optim.betas": [0.9, 0.999],
        "optim.lr_scheduler_type": "constant",
        "optim.lr_warmup_steps_ratio": 0.0,
    }
)
_OWN_ROWS_OF_TRL = (
    _row("model", "model.name"),
    _row("model_name_or_path", "model.name"),
    _row("train_dataset", "data.demonstrations", "files(train_dataset)"),
    _row(
        "dataset_name",
        "data.demonstrations",
        "dataset(dataset_name, dataset_train_split, dataset_config)",
    ),
    _row("dataset_train_split", remark="The last part of `hub:NAME:SPLIT`."),
    _row("dataset_config", remark="The `config` of `{hub: NAME, config: main, split: train}`."),
    _row("eval_dataset", remark=_HELD_OUT),
    _row("eval_steps", remark=_HELD_OUT),
    _row("learning_rate", "optim.lr"),
    _row(
        "warmup_steps",
        "optim.warmup_steps",
        "warmup_steps if warmup_steps >= 1 else None if warmup_steps or warmup_ratio else 0",
    ),
    _row(
        "warmup_ratio",
        "optim.warmup_ratio",
        "None if warmup_steps >= 1 else warmup_steps or warmup_ratio or None",
        _SHARE,
    ),
    _row("per_device_train_batch_size", "train.minibatch_groups", _BATCH),
    _row("gradient_accumulation_steps", "train.minibatch_groups", _BATCH),
    _row("max_steps", "train.num_steps", "max_steps if max_steps > 0 else None"),
    _row(
        "num_train_epochs",
        "train.epochs",
        "None if max_steps > 0 else num_train_epochs",
    ),
    _row("save_steps", "train.save_every"),
    _row("max_length", remark=_LENGTH),
    _row("max_seq_length", remark=_LENGTH),
    _row("packing", remark=_PACKED),
    _row("packing_strategy", remark=_PACKED),
    _row("eval_packing", remark=_PACKED),
    _row("assistant_only_loss", remark=_ANSWERS),
    _row("completion_only_loss", remark=_ANSWERS),
    _row("output_dir", remark="`dapo train CONFIG.yaml --run-dir DIR`."),
)


def _table_of_trl() -> Table:
    """Return the table of TRL's SFTTrainer, with the rows that it shares with GRPOTrainer."""
    shared = [row for row in COUNTERPARTS["trl"] if row.name in _SHARED_OF_TRL]
    own = [*_OWN_ROWS_OF_TRL, *shared]
    rows = [*own, *_without_counterpart(COUNTERPARTS["trl"], own)]
    return Table("TRL", (*rows,), _DEFAULTS_OF_TRL, {})


_DEFAULTS_OF_TRL = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "learning_rate": 2e-5,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "max_steps": -1,
    "num_train_epochs": 3,
    "save_steps": 500,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "seed": 42,
    "dataset_train_split": "train",
    "dataset_config": None,
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "r": None,
}
_OF_TRL = _table_of_trl()
SUPERVISED: Mapping[Supervised, Table] = {
    "verl": _OF_VERL,
    "verl_engine": _OF_VERL_ENGINE,
    "trl": _OF_TRL,
}
_OF_SFT_ALONE = {
    "assistant_only_loss",
    "completion_only_loss",
    "dataset_text_field",
    "eval_packing",
    "max_seq_length",
    "packing",
    "packing_strategy",
}
"""Options of TRL's SFTConfig that its other trainers have not."""
_OF_REWARDS = ("num_generations", "max_completion_length", "reward_funcs", "actor_rollout_ref")


def supervised_system(path: Path, text: str, reading: Reading) -> Supervised | None:
    """Return the system whose supervised trainer a script runs; None: another trainer."""
    if path.suffix in (".yaml", ".yml"):
        return _system_of_options(reading.options)
    if path.suffix in (".py", ".ipynb"):
        is_supervised = "GRPO" not in text and re.search(r"\bSFT(?:Config|Trainer)\b", text)
        return "trl" if is_supervised else None
    if re.search(r"\btrl sft$", reading.command):
        return "trl"
    name = reading.program.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    return _TRAINERS.get(name)


def _system_of_options(options: Mapping[str, Any]) -> Supervised | None:
    """Return the system whose supervised trainer alone has these options; a file names no trainer."""
    if any(name.partition(".")[0] in _OF_REWARDS for name in options):
        return None
    if _OF_SFT_ALONE & options.keys():
        return "trl"
    if "data.train_files" not in options or "optim.lr" not in options:
        return None
    return "verl" if "model.partial_pretrain" in options else "verl_engine"


def with_whole_columns(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of verl with nested columns as `extra_info.question`.

    A conversation has no column of a prompt, and of several files each column is the usual one.
    """
    whole = dict(options)
    for part in ("prompt", "response"):
        keys = options.get(f"data.{part}_dict_keys")
        if isinstance(keys, list) and len(keys) == 1:
            column = options.get(f"data.{part}_key", "extra_info")
            whole[f"data.{part}_key"] = f"{column}.{keys[0]}"
    files = options.get("data.train_files")
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
        whole["data.train_files"] = files
    is_conversation = options.get("data.multiturn.enable") or "data.messages_key" in options
    if is_conversation or isinstance(files, list | Unknown):
        whole["data.prompt_key"] = None
    return whole
