"""TRL's DistillationTrainer on forced lengths, one step a command."""

import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer

from benchmarks.protocol import Channel
from benchmarks.workers.trl import (
    MAX_STEPS,
    WEIGHTS,
    EndOfCommands,
    common_arguments,
    peak_memory,
    train_by_command,
)


class TimedDistillation(DistillationTrainer):  # type: ignore[misc]
    """DistillationTrainer that adds up the seconds of sampling, and the trained tokens."""

    generation_s = 0.0
    trained_tokens = 0

    def _generate_single_turn(self, *rest: Any, **named: Any) -> Any:
        started = time.perf_counter()
        result = super()._generate_single_turn(*rest, **named)
        self.generation_s += time.perf_counter() - started
        return result

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        self.trained_tokens += int(inputs["completion_mask"].sum())
        return super().compute_loss(model, inputs, *rest, **named)


class Commands(TrainerCallback):  # type: ignore[misc]
    """Waits for a command where a step begins, and answers with its seconds where it ends."""

    trainer: TimedDistillation

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Serve commands until one asks for a step."""
        while (command := self._channel.receive()) is not None:
            if command["do"] == "step":
                self.trainer.generation_s = 0.0
                self.trainer.trained_tokens = 0
                self._started = time.perf_counter()
                return
            self._channel.answer(peak_memory())
        raise EndOfCommands

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Answer with the seconds; what is not sampling is the update, the teacher's forward
        included.
        """
        step_s = time.perf_counter() - self._started
        generation_s = self.trainer.generation_s
        answer = {"step_s": step_s, "generation_s": generation_s, "update_s": step_s - generation_s}
        self._channel.answer(answer | {"trained_tokens": self.trainer.trained_tokens})


def make_trainer(settings: dict[str, Any], channel: Channel, folder: str) -> TimedDistillation:
    """The trainer of the coordinator's settings."""
    torch.set_num_threads(settings["threads"])
    config = DistillationConfig(
        per_device_train_batch_size=settings["microbatch"],
        gradient_accumulation_steps=settings["prompts"] // settings["microbatch"],
        max_steps=MAX_STEPS,
        max_completion_length=settings["tokens"],
        generation_kwargs={"min_new_tokens": settings["tokens"]},
        beta=1.0,
        lr_scheduler_type="constant",
        teacher_model_init_kwargs=WEIGHTS,
        shuffle_dataset=False,
        **common_arguments(settings, folder),
    )
    commands = Commands(channel)
    trainer = TimedDistillation(
        model=settings["model"],
        teacher_model=settings["model"],
        args=config,
        train_dataset=Dataset.from_list(settings["rows"]),
        processing_class=AutoTokenizer.from_pretrained(settings["model"], padding_side="left"),
        callbacks=[commands],
    )
    commands.trainer = trainer
    return trainer


if __name__ == "__main__":
    train_by_command(make_trainer, peak_memory)
