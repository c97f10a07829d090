"""Options of the model and of the problems: `model`, `data`."""

from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

from dapo.config.data_spec import Source, parse_spec, paths_in
from dapo.config.section import Float, Positive, Section, Switch, Tokens, option

DataSpec: TypeAlias = str | dict[str, Any]
MODEL_ALIASES = ("smollm2-135m-instruct", "tiny-random")
"""Models that need no directory and no download."""


class LoraConfig(Section):
    """Options of low-rank adapters, which every linear layer but the head gets."""

    rank: Positive = option(16, "Rank of the adapters' two factors.", le=16384)
    alpha: Float = option(32.0, "An adapter's product is scaled by alpha / rank.", gt=0)


class ModelConfig(Section):
    name: str = option(
        description="An alias (smollm2-135m-instruct, tiny-random), a Hugging Face id or a directory of a model."
    )
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = option(
        "auto",
        "Number format of the forward and backward pass. Master weights are float32, or float64 with float64. "
        "auto: bfloat16 if the processor multiplies it fast, else float32.",
    )
    trust_remote_code: bool = option(False, "Run the Python code that comes with the model.")
    lora: LoraConfig | None = option(
        None, "Train low-rank adapters, {rank: 16, alpha: 32}; none: all weights.", paper=None
    )


class DataConfig(Section):
    train: DataSpec = option(
        description="Problems to train on: a path, hub:NAME[:SPLIT], builtin:TASK,..., gym:TASK,... or a mapping; "
        "{mix: {NAME: SOURCE, ...}} takes several, each under a name of its own."
    )
    eval: DataSpec | None = option(
        None, "Held-out problems, given as for data.train. Their texts are removed from the training problems."
    )
    max_prompt_tokens: Tokens = option(
        2048, "Length of the longest prompt, in tokens; longer ones are dropped and counted, never cut.", unit="tokens"
    )
    instruction: str = option("", "Text to append to each problem, before the chat template.")
    system: str | None = option(None, "System message for chat models; none: no system message.")
    chat_template: Annotated[Literal["auto", "on", "off"], Switch] = option(
        "auto", "Apply the model's chat template to prompts. auto: if the tokenizer has one."
    )

    @cached_property
    def train_source(self) -> Source:
        """`data.train`, parsed. Raises DataError."""
        return parse_spec(self.train)

    @cached_property
    def eval_source(self) -> Source | None:
        """`data.eval`, parsed; None where it is not set. Raises DataError."""
        return None if self.eval is None else parse_spec(self.eval)

    @property
    def paths(self) -> dict[str, str]:
        """Possible paths of files in `data.train` and `data.eval`, by the option that holds each."""
        return paths_in(self.train, "data.train") | ({} if self.eval is None else paths_in(self.eval, "data.eval"))
