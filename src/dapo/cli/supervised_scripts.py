"""Translates scripts that imitate demonstrations: verl's `sft_trainer`, and TRL's `SFTTrainer`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dapo.libs.foreign_options import Counterpart, Reading, Table, Unknown

Supervised: TypeAlias = Literal["verl", "trl"]
_TRAINERS: Mapping[str, Supervised] = {
    "fsdp_sft_trainer": "verl",
    "sft_trainer": "verl",
    "sft": "trl",
}
"""The programs that imitate demonstrations, by the last part of their names."""
_STEPS = "Steps: rows x epochs / `train.minibatch_groups`; the data begins anew where it ends."
_HELD_OUT = "`data.eval` takes problems that the model answers, no demonstrations."
_LENGTH = "Demonstrations above `rollout.max_response_tokens` are left out and counted, never cut."
_PACKED = "Sequences are always packed; `train.microbatch_tokens` bounds a pass."
_SCHEDULE = "`optim.schedule` and `optim.warmup_steps`, which counts steps, not a share."
_BATCH = "per_device_train_batch_size * gradient_accumulation_steps * processes"
_FILES_OF_VERL = (
    "{'path': data.train_files, 'prompt': data.prompt_key, 'answer': data.response_key}"
    " if data.prompt_key else files(data.train_files)"
)


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


_OF_VERL = Table(
    "verl",
    (
        _row("model.partial_pretrain", "model.name"),
        _row("model.path", "model.name"),
        _row("model.trust_remote_code", "model.trust_remote_code"),
        _row("model.lora_rank", "model.lora.rank", "model.lora_rank or None"),
        _row(
            "model.lora_alpha",
            "model.lora.alpha",
            "model.lora_alpha if model.lora_rank else None",
        ),
        _row("data.train_files", "data.demonstrations", _FILES_OF_VERL),
        _row("data.prompt_key", remark="The `prompt` of `data.demonstrations`."),
        _row("data.response_key", remark="The `answer` of `data.demonstrations`."),
        _row("data.prompt_dict_keys", remark="A dot names a nested column."),
        _row("data.response_dict_keys", remark="A dot names a nested column."),
        _row("data.val_files", remark=_HELD_OUT),
        _row("data.train_batch_size", "train.minibatch_groups"),
        _row("data.max_length", remark=_LENGTH),
        _row("data.truncation", remark=_LENGTH),
        _row("data.micro_batch_size", remark=_PACKED),
        _row("data.micro_batch_size_per_gpu", remark=_PACKED),
        _row("optim.lr", "optim.lr"),
        _row("optim.betas", "optim.betas"),
        _row("optim.weight_decay", "optim.weight_decay"),
        _row("optim.clip_grad", "optim.max_grad_norm"),
        _row("optim.lr_scheduler=cosine", "optim.schedule=cosine:0"),
        _row("optim.lr_scheduler", remark=_SCHEDULE),
        _row("optim.warmup_steps_ratio", remark=_SCHEDULE),
        _row("trainer.total_epochs", "train.num_steps", "converted", _STEPS),
        _row(
            "trainer.total_training_steps",
            "train.num_steps",
            "trainer.total_training_steps or None",
        ),
        _row("trainer.logger", "log.sinks", "sinks(trainer.logger)"),
        _row("trainer.seed", "train.seed"),
        _row("trainer.default_local_dir", remark="`dapo train CONFIG.yaml --run-dir DIR`."),
        _row("trainer.project_name", remark="The environment variable `WANDB_PROJECT`."),
    ),
    # verl/trainer/config/sft_trainer.yaml
    {
        "data.prompt_key": "question",
        "data.response_key": "answer",
        "data.train_batch_size": 256,
        "model.lora_rank": 0,
        "optim.lr": 1e-5,
        "optim.betas": [0.9, 0.95],
        "optim.weight_decay": 0.01,
        "optim.lr_scheduler": "cosine",
    },
    {},
)
_OF_TRL = Table(
    "TRL",
    (
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
        _row("learning_rate", "optim.lr"),
        _row("weight_decay", "optim.weight_decay"),
        _row("max_grad_norm", "optim.max_grad_norm"),
        _row("warmup_steps", "optim.warmup_steps"),
        _row("warmup_ratio", remark=_SCHEDULE),
        _row("lr_scheduler_type=linear", "optim.schedule=linear:0"),
        _row("lr_scheduler_type=cosine", "optim.schedule=cosine:0"),
        _row("lr_scheduler_type=constant", "optim.schedule=constant"),
        _row("lr_scheduler_type", remark=_SCHEDULE),
        _row("per_device_train_batch_size", "train.minibatch_groups", _BATCH),
        _row("gradient_accumulation_steps", "train.minibatch_groups", _BATCH),
        _row("max_steps", "train.num_steps", "max_steps if max_steps > 0 else None"),
        _row("num_train_epochs", "train.num_steps", "converted", _STEPS),
        _row("max_length", remark=_LENGTH),
        _row("packing", remark=_PACKED),
        _row("r", "model.lora.rank"),
        _row("lora_alpha", "model.lora.alpha", "lora_alpha if r else None"),
        _row("report_to", "log.sinks", "sinks(report_to)"),
        _row("seed", "train.seed"),
        _row("output_dir", remark="`dapo train CONFIG.yaml --run-dir DIR`."),
    ),
    {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.0,
        "warmup_steps": 0,
        "dataset_train_split": "train",
        "dataset_config": None,
        "r": None,
    },
    {},
)
SUPERVISED: Mapping[Supervised, Table] = {"verl": _OF_VERL, "trl": _OF_TRL}
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
    is_of_verl = "data.train_files" in options and "optim.lr" in options
    return "verl" if is_of_verl else None


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
