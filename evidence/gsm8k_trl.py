"""TRL's GRPOTrainer on GSM8K, from the warm start of configs/gsm8k_laptop.yaml, for some minutes.

    make .venv-trl/.installed
    PYTHONPATH=src .venv-trl/bin/python -m evidence.gsm8k_trl MODEL train.jsonl OUT --minutes 30 --lr 5e-5

Everything that both systems have is equal: the model, the problems, the verifier, the group size,
the lengths, the temperature, the optimiser, the precision and two updates a step. TRL samples the
groups of a step once, and trains all of them.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from dapo.rewards.verifier import get_verifier
from dapo.types import Problem

PROMPTS = 16
GROUP = 8
MICROBATCH = 8
UPDATES = 2
MAX_TOKENS = 256


class TimeLimit(TrainerCallback):  # type: ignore[misc]
    """Ends the training after a number of seconds, and counts them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.elapsed_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock behind the loading."""
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop between two rollout steps."""
        self.elapsed_s = time.perf_counter() - self._started
        if self.elapsed_s >= self._seconds and state.global_step % UPDATES == 0:
            control.should_training_stop = True


def main() -> None:
    """Train for the given minutes, then write the model and `training.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("rows")
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    lines = Path(arguments.rows).read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    dataset = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
            for row in rows
        ]
    )
    judge = get_verifier("gsm8k")

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        texts = [completion[-1]["content"] for completion in completions]
        return [
            judge(Problem("", "", reference), text).score
            for text, reference in zip(texts, answer, strict=True)
        ]

    responses = PROMPTS * GROUP
    config = GRPOConfig(
        output_dir=str(arguments.out / "trainer"),
        num_generations=GROUP,
        per_device_train_batch_size=MICROBATCH,
        steps_per_generation=responses // MICROBATCH,
        gradient_accumulation_steps=responses // MICROBATCH // UPDATES,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        learning_rate=arguments.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2 * UPDATES,
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=1_000_000,
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        dataloader_pin_memory=False,
        logging_steps=UPDATES,
        report_to="none",
        save_strategy="no",
        seed=arguments.seed,
    )
    limit = TimeLimit(60 * arguments.minutes)
    trainer = GRPOTrainer(
        model=arguments.model,
        args=config,
        train_dataset=dataset,
        reward_funcs=[reward],
        processing_class=AutoTokenizer.from_pretrained(arguments.model, padding_side="left"),
        callbacks=[limit],
    )
    trainer.train()
    trainer.model.to(torch.float32).save_pretrained(arguments.out)
    trainer.processing_class.save_pretrained(arguments.out)
    facts = {
        "steps": trainer.state.global_step // UPDATES,
        "seconds": limit.elapsed_s,
        "log": trainer.state.log_history,
    }
    (arguments.out / "training.json").write_text(json.dumps(facts), "utf-8")


if __name__ == "__main__":
    main()
