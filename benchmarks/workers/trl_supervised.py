"""TRL's SFTTrainer on token ids that ours has encoded, one update a command."""

import time
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.protocol import Channel
from benchmarks.workers.trl import EndOfCommands, common_arguments, peak_memory, train_by_command


class InOrder(SFTTrainer):  # type: ignore[misc]
    """SFTTrainer that takes the rows in their order."""

    def _get_train_sampler(self, *_: Any, **__: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class Commands(TrainerCallback):  # type: ignore[misc]
    """Waits for a command where an update begins, and answers with its seconds and its loss."""

    def __init__(self, channel: Channel, tokens: list[int]) -> None:
        self._channel = channel
        self._tokens = tokens

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Serve commands until one asks for an update."""
        while (command := self._channel.receive()) is not None:
            if command["do"] == "step":
                self._started = time.perf_counter()
                return
            self._channel.answer(peak_memory())
        raise EndOfCommands

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The seconds of the update; the loss is logged behind it."""
        self._seconds = time.perf_counter() - self._started

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Answer with the loss of the update."""
        if logs is not None and "loss" in logs:
            tokens = self._tokens[state.global_step - 1]
            self._channel.answer(
                {"step_s": self._seconds, "loss": float(logs["loss"]), "trained_tokens": tokens}
            )


def make_trainer(settings: dict[str, Any], channel: Channel, folder: str) -> InOrder:
    """The trainer of the coordinator's settings."""
    torch.set_num_threads(settings["threads"])
    samples = settings["samples"]
    per_update = settings["per_update"]
    rows = [
        {
            "input_ids": [*each["prompt_ids"], *each["response_ids"]],
            "completion_mask": [0] * len(each["prompt_ids"]) + [1] * len(each["response_ids"]),
        }
        for each in samples
    ]
    counts = [len(each["response_ids"]) for each in samples]
    tokens = [sum(counts[i : i + per_update]) for i in range(0, len(counts), per_update)]
    config = SFTConfig(
        per_device_train_batch_size=settings["microbatch"],
        gradient_accumulation_steps=per_update // settings["microbatch"],
        max_steps=len(tokens),
        completion_only_loss=True,
        lr_scheduler_type="constant",
        packing=False,
        **common_arguments(settings, folder),
    )
    return InOrder(
        model=settings["model"],
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        callbacks=[Commands(channel, tokens)],
    )


if __name__ == "__main__":
    train_by_command(make_trainer, peak_memory)
