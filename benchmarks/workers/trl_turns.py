"""TRL's trainer on scripted turns: the chat templates that it accepts, and the ids that it trains.

A model of one layer takes one step. Only sampling and the parser of calls are replaced.
"""

import tempfile
import warnings
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import trl
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from benchmarks.notes import EchoedNotes
from benchmarks.protocol import serve


class ScriptedTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer whose turns are given, and which keeps the ids that its loss trains."""

    turns: list[list[int]]
    """The ids of each turn; the same in every episode."""

    def _generate_single_turn(self, prompt_ids: Any, *rest: Any, **named: Any) -> Any:
        self.contexts.append(list(prompt_ids[0]))
        turn = self.turns[len(self.contexts) - 1]
        return [list(turn) for _ in prompt_ids], None

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        shown, trains = (
            inputs["completion_mask"] * mask for mask in (1, inputs.get("tool_mask", 1))
        )
        ids = inputs["completion_ids"][0]
        self.trained = ids[trains[0].bool()].tolist()
        prompt = inputs["prompt_ids"][0][inputs["prompt_mask"][0].bool()]
        self.whole = [*prompt.tolist(), *ids[shown[0].bool()].tolist()]
        return super().compute_loss(model, inputs, *rest, **named)


def shipped_texts(names: dict[str, str]) -> dict[str, Any]:
    """TRL's copies of public chat templates by the given keys, and its version."""
    folder = files("trl") / "chat_templates"
    texts = {
        key: (folder / f"{name}.jinja").read_text(encoding="utf-8") for key, name in names.items()
    }
    return {"texts": texts, "version": trl.__version__}


def play(directory: str, prompt: str, turns: list[list[int]], calls: list[str]) -> dict[str, Any]:
    """Train one step on an episode of these turns; `calls` are the texts that all turns but the
    last one note.

    Returns:
        `refused`, the reason for which the trainer as installed refuses the template, or None;
        `refused_by_hand`, the same with a parser of calls set by hand; and `trained`, `whole` and
        `contexts` if the episode was played.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    found: dict[str, Any] = {"refused": None, "refused_by_hand": None}
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = make_trainer(tokenizer, prompt, folder)
        except Exception as error:  # jinja2's, too
            found["refused"] = str(error)
            tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
            tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {}}
        try:
            trainer = make_trainer(tokenizer, prompt, folder) if found["refused"] else trainer
            trainer.turns = turns
            trainer.contexts = []
            grpo_trainer.parse_response = scripted_parser(turns, calls)
            trainer.train()
        except Exception as error:
            return found | {"refused_by_hand": f"{type(error).__name__}: {error}"}
    return found | {
        "trained": trainer.trained,
        "whole": trainer.whole,
        "contexts": trainer.contexts,
    }


def make_trainer(tokenizer: PreTrainedTokenizerBase, prompt: str, folder: str) -> ScriptedTrainer:
    """A trainer with the environment, for one step of one group of two episodes."""
    model = Qwen2Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
    )
    config = GRPOConfig(
        output_dir=folder,
        max_steps=1,
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=4096,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    return ScriptedTrainer(
        model=Qwen2ForCausalLM(model),
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": prompt}]}] * 2),
        processing_class=tokenizer,
        environment_factory=EchoedNotes,
    )


def scripted_parser(turns: list[list[int]], calls: list[str]) -> Callable[..., dict[str, Any]]:
    """A parser in the form of TRL's that reads all turns but the last one as calls of the
    environment's tool.
    """

    def parse_response(tokenizer: Any, ids: list[int], **_: Any) -> dict[str, Any]:
        message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        number = turns.index(list(ids))
        if number == len(calls):
            return message
        function = {"name": "note", "arguments": {"text": calls[number]}}
        return message | {"tool_calls": [{"type": "function", "function": function}]}

    return parse_response


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    serve({"shipped_texts": shipped_texts, "play": play})
