"""TRL's GRPOTrainer in its DAPO configuration, one rollout step a command.

The trainer's own loop runs; a callback waits for the next command where a step begins. Phases are
measured around the trainer's own methods, so nothing is computed twice. The reward functions come
from this repository's sources: they need neither torch nor an installed package.
"""

import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from benchmarks.memory import peak_rss_bytes
from benchmarks.notes import Notes, forced_call
from benchmarks.protocol import Channel
from benchmarks.reward import every_second
from dapo.algo.overlong import overlong_penalty
from dapo.rewards.verifier import get_verifier
from dapo.types import Problem

MAX_STEPS = 1_000_000
"""The coordinator ends the run."""


class Clock:
    """Seconds by phase and counts, since the last step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to a phase."""
        started = time.perf_counter()
        try:
            yield
        finally:
            synchronize()
            self.seconds[name] += time.perf_counter() - started


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer with a clock around its phases."""

    clock: Clock
    channel: Channel
    probe_sizes: list[int] | None = None
    warmup_steps: int = 0
    updates: int = 1

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        """Our rate at every step; that of transformers trains the first step of a warm-up with a
        rate of 0.
        """
        if self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, self._rate)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _rate(self, updates_done: int) -> float:
        return min(1.0, (updates_done // self.updates + 1) / max(1, self.warmup_steps))

    def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **named: Any) -> Any:
        with self.clock.phase("generation"):
            result = super()._generate_single_turn(prompt_ids, *rest, **named)
        self.clock.counts["generated_tokens"] += sum(len(ids) for ids in result[0])
        self.clock.counts["prompt_tokens"] += sum(len(ids) for ids in prompt_ids)
        return result

    def _generate(self, *rest: Any, **named: Any) -> Any:
        with self.clock.phase("episodes"):
            result = super()._generate(*rest, **named)
        prompts, completions, mask = result[:3]
        self.clock.counts["shown_prompt_tokens"] += sum(map(len, prompts))
        sampled = sum(map(len, completions)) if mask is None else sum(map(sum, mask))
        self.clock.counts["observed_tokens"] += sum(map(len, completions)) - sampled
        return result

    def _generate_and_score_completions(self, *rest: Any, **named: Any) -> Any:
        with self.clock.phase("rollout"):
            return super()._generate_and_score_completions(*rest, **named)

    def _get_per_token_logps_and_entropies(self, *rest: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():  # part of the training forward
            return super()._get_per_token_logps_and_entropies(*rest, **named)
        with self.clock.phase("old_logprobs"):
            return super()._get_per_token_logps_and_entropies(*rest, **named)

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        self.clock.counts["trained_tokens"] += int(mask.sum())
        with self.clock.phase("update"):
            return super().compute_loss(model, inputs, *rest, **named)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if self.probe_sizes:
            self.channel.answer({"seconds_per_response": self._probe(model, inputs)})
            raise EndOfCommands
        return super().training_step(model, inputs, num_items_in_batch)

    def _probe(self, model: Any, inputs: Any) -> dict[int, float]:
        """Seconds of forward and backward for each response, by rows in a microbatch."""
        model.train()
        batch = self._prepare_inputs(inputs)
        rows = len(batch["completion_ids"])
        found: dict[int, float] = {}
        for size in (min(self.probe_sizes), *self.probe_sizes):  # the first one warms up
            part = {
                name: (
                    value[:size]
                    if torch.is_tensor(value) and value.ndim and len(value) == rows
                    else value
                )
                for name, value in batch.items()
            }
            started = time.perf_counter()
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, part)
            self.accelerator.backward(loss)
            synchronize()
            found[size] = (time.perf_counter() - started) / size
            model.zero_grad(set_to_none=True)
        return found


class Commands(TrainerCallback):  # type: ignore[misc]
    """Waits for a command where a rollout step begins, and answers where it ends."""

    def __init__(self, channel: Channel, updates: int) -> None:
        self.channel = channel
        self.updates = updates
        self.trainer: TimedTrainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Time the backward and the optimiser too."""
        clock = self.trainer.clock
        backward = self.trainer.accelerator.backward

        def timed(*rest: Any, **named: Any) -> Any:
            with clock.phase("update"):
                return backward(*rest, **named)

        self.trainer.accelerator.backward = timed
        if self.trainer.use_vllm:
            self._time_sync(self.trainer.vllm_generation)

    def _time_sync(self, sampler: Any) -> None:
        """Its weights are loaded within the generation, and are no part of it elsewhere."""
        sync_weights = sampler.sync_weights
        clock = self.trainer.clock

        def timed() -> None:
            with clock.phase("sync"):
                sync_weights()

        sampler.sync_weights = timed

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Serve commands until one asks for a step (or there are no more: the process ends)."""
        if state.global_step % self.updates:
            return
        while (command := self.channel.receive()) is not None:
            name = command.pop("do")
            if name == "probe":  # answered where the microbatches are at hand
                self.trainer.probe_sizes = command["sizes"]
                return
            if name == "step":
                self.trainer.clock.seconds.clear()
                self.trainer.clock.counts.clear()
                self.started = time.perf_counter()
                return
            self.channel.answer(getattr(self, f"do_{name}")(**command))
        raise EndOfCommands

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The optimiser begins."""
        self.optimizer_started = time.perf_counter()
        self.lr = self.trainer.optimizer.param_groups[0]["lr"]

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The optimiser has ended."""
        synchronize()
        self.trainer.clock.seconds["update"] += time.perf_counter() - self.optimizer_started

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Answer after the last update of a rollout step."""
        if state.global_step % self.updates:
            return
        seconds = self.trainer.clock.seconds
        self.channel.answer(
            {
                "step_s": time.perf_counter() - self.started,
                "generation_s": seconds["generation"] - seconds["sync"],
                "update_s": seconds["update"] + seconds["old_logprobs"],
                "old_logprobs_s": seconds["old_logprobs"],
                "rollout_s": seconds["rollout"],
                "episodes_s": seconds["episodes"],
                "lr": self.lr,
                **self.trainer.clock.counts,
            }
        )

    def do_generate(self, prompts: list[list[int]], group: int, tokens: int) -> dict[str, Any]:
        """TRL's own generation alone, outside of a step."""
        del tokens  # the trainer's configuration forces them
        rows = [ids for ids in prompts for _ in range(group)]
        started = time.perf_counter()
        responses, _ = self.trainer._generate_single_turn(rows, None, {}, group)
        return {
            "seconds": time.perf_counter() - started,
            "tokens": sum(len(ids) for ids in responses),
        }

    def do_memory(self) -> dict[str, Any]:
        """Peak bytes: resident, and on the GPU."""
        return peak_memory()

    def do_export(self, directory: str) -> dict[str, Any]:
        """Write the policy as a Hugging Face directory."""
        self.trainer.model.save_pretrained(directory)
        self.trainer.processing_class.save_pretrained(directory)
        return {}


class EndOfCommands(Exception):
    """The coordinator has quit."""


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def quickstart_reward(verifier: str, options: dict[str, Any], max_length: int, buffer: int) -> Any:
    """The quickstart's reward: right or wrong, plus the soft overlong penalty of Eq. 13."""
    judge = get_verifier(verifier, **options)

    def reward(
        completions: list[Any], completion_ids: list[Any], answer: list[str], **_: Any
    ) -> list[float]:
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        return [
            judge(Problem("", "", reference), text).score
            + overlong_penalty(len(ids), max_length=max_length, buffer=buffer)
            for text, ids, reference in zip(texts, completion_ids, answer, strict=True)
        ]

    return reward


def parse_as_call(tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
    """A parser in the form of TRL's that reads every turn as a call of the environment's tool."""
    text = tokenizer.decode(ids, skip_special_tokens=True)
    name, arguments = forced_call(text)
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": text, "tool_calls": [call]}


def notes_of(tokenizer: Any) -> dict[str, Any]:
    """The trainer's arguments for an environment that pays for its episodes, and of which every
    turn is a call.
    """
    # not read: the parser is replaced
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {}}
    grpo_trainer.parse_response = parse_as_call
    return {"environment_factory": Notes}


WEIGHTS = {"dtype": "float32", "attn_implementation": "sdpa"}
"""How TRL loads a model."""


def common_arguments(settings: dict[str, Any], folder: str) -> dict[str, Any]:
    """The arguments of every TRL trainer: our optimiser's, and nothing saved, reported or computed
    again.
    """
    return {
        "output_dir": folder,
        "learning_rate": settings["lr"],
        "optim": "adamw_torch",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "use_cpu": settings["device"] == "cpu",
        "bf16": settings["dtype"] == "bfloat16",
        "gradient_checkpointing": False,
        "model_init_kwargs": WEIGHTS,
        "dataloader_pin_memory": False,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def make_trainer(settings: dict[str, Any], channel: Channel, folder: str) -> TimedTrainer:
    """The trainer of the coordinator's settings."""
    torch.set_num_threads(settings["threads"])
    tokens = settings["max_new_tokens"]
    rollout = settings["prompts"] * settings["group"]
    microbatch = settings["microbatch"]
    updates = settings["updates"]
    if rollout % (microbatch * updates):
        raise ValueError(
            f"{rollout} responses cannot be cut into {updates} updates of microbatches of"
            f" {microbatch}"
        )
    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    turns = settings.get("turns")
    generation = {"min_new_tokens": tokens} if settings["forced"] else None
    if turns is not None:
        generation = {"min_new_tokens": turns["tokens"] - 1, "max_new_tokens": turns["tokens"]}
        generation |= {"forced_eos_token_id": tokenizer.eos_token_id}
    sampler = settings.get("sampler", {})
    if sampler and generation is not None:
        # these become vLLM's sampling parameters, which keep an end from being sampled before
        generation = {"min_tokens": tokens}
    config = GRPOConfig(
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        scale_rewards="group",
        # as in our preset: overlong responses train, with the penalty of Eq. 13 that the reward
        # adds
        mask_truncated_completions=False,
        num_iterations=1,
        num_generations=settings["group"],
        per_device_train_batch_size=microbatch,
        steps_per_generation=rollout // microbatch,
        gradient_accumulation_steps=rollout // microbatch // updates,
        max_steps=MAX_STEPS,
        max_completion_length=tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        generation_kwargs=generation,
        max_tool_calling_iterations=None if turns is None else turns["count"] - 1,
        shuffle_dataset=False,
        seed=settings["seed"],
        **sampler,
        **common_arguments(settings, folder),
    )
    reward = every_second
    if "verifier" in settings:
        reward = quickstart_reward(
            settings["verifier"], settings["options"], tokens, settings["buffer_tokens"]
        )
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in settings["rows"]]
    commands = Commands(channel, updates)
    trainer = TimedTrainer(
        model=settings["model"],
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[commands],
        **({"reward_funcs": [reward]} if turns is None else notes_of(tokenizer)),
    )
    trainer.clock = Clock()
    trainer.channel = channel
    trainer.warmup_steps = settings["warmup_steps"]
    trainer.updates = updates
    commands.trainer = trainer
    return trainer


def train_by_command(
    make: Callable[[dict[str, Any], Channel, str], Any], answer: Callable[[], dict[str, Any]]
) -> None:
    """Open with the first command, then train by command; behind the last step every command gets
    `answer`.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)
    channel = Channel()
    opening = channel.receive()
    if opening is None:
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = make(opening["settings"], channel, folder)
            versions = {
                "trl": trl.__version__,
                "transformers": transformers.__version__,
                "torch": torch.__version__,
            }
            channel.answer({"versions": versions, "threads": torch.get_num_threads()})
            trainer.train()
            while channel.receive() is not None:
                channel.answer(answer())
    except EndOfCommands:
        return
    except Exception as error:
        channel.fail(error)
        raise


def peak_memory() -> dict[str, Any]:
    """Peak bytes: resident, and on the GPU."""
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {"rss_bytes": peak_rss_bytes(), "gpu_bytes": gpu}


if __name__ == "__main__":
    train_by_command(make_trainer, peak_memory)
