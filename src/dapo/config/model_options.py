"""Options of the model and of the problems: `model`, `data`."""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator

from dapo.config.data_spec import Source, mix_of, parse_spec, paths_in
from dapo.config.section import Float, Positive, Section, Switch, Tokens, option
from dapo.core.model_files import DtypeName


def _list_as_mix(value: object) -> object:
    return mix_of(value) if isinstance(value, list | tuple) and value else value


DataSpec: TypeAlias = Annotated[str | dict[str, Any], BeforeValidator(_list_as_mix)]
_ALSO_LISTS = [{"type": "array"}]
MODEL_ALIASES = ("smollm2-135m-instruct", "tiny-random")  # the short names of models


class LoraConfig(Section):
    """Options of low-rank adapters of every linear layer except the head."""

    rank: Positive = option(16, "Rank of the adapters' two factors.", le=16384)
    alpha: Float = option(
        32.0, "Scale of an adapter: its product is multiplied by alpha / rank.", gt=0
    )


def _rank_or_options(value: object) -> object:
    """Accept `true` for adapters of the default rank, `false` for none, and a rank."""
    if isinstance(value, bool):
        return {} if value else None
    return {"rank": value} if isinstance(value, int) else value


class ModelConfig(Section):
    name: str = option(
        description=(
            "The model: an alias (smollm2-135m-instruct, tiny-random), a Hugging Face id, a"
            " directory, or a run, for its newest checkpoint."
        )
    )
    dtype: DtypeName = option(
        "auto",
        "Number format of the forward and backward passes; master weights are float32 (float64 with"
        " float64). auto: bfloat16 if the processor, or a GPU from compute capability 8.0,"
        " multiplies it in hardware, else float32.",
    )
    trust_remote_code: bool = option(False, "Run Python code from the model's repository.")
    lora: Annotated[LoraConfig | None, BeforeValidator(_rank_or_options)] = option(
        None,
        "Train only low-rank adapters, for example {rank: 16, alpha: 32}, or a rank, or true; none:"
        " train all weights.",
        paper=None,
        also=[{"type": "integer", "minimum": 1}, {"type": "boolean"}],
    )


_TAKEN_VARIABLES = {
    "messages",
    "conversation",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "documents",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "strftime_now",
    "raise_exception",
}
"""Arguments of `apply_chat_template` and names that a template gets already."""


def _require_free_variables(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    conflicts = sorted(variables.keys() & _TAKEN_VARIABLES)
    if conflicts:
        raise ValueError(
            f"{', '.join(conflicts)} cannot be set: prompts are rendered with a value of their own"
        )
    try:
        json.dumps(variables, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError(
            "the values are to be JSON: texts, numbers, booleans, null, lists and mappings"
        ) from None
    return variables


DATA_SOURCES = ("train", "eval", "demonstrations")
"""The options of `data` that name a data source."""


class DataConfig(Section):
    train: DataSpec = option(
        description=(
            "Training problems: a path, hub:NAME[:SPLIT], builtin:TASK,..., gym:TASK,... or a"
            " mapping; {mix: {NAME: SOURCE, ...}} combines several sources under names, as does a"
            " list of them. An environment that is named without data gives the prompts itself."
        ),
        also=_ALSO_LISTS,
    )
    eval: DataSpec | None = option(
        None,
        "Held-out problems, in the forms of data.train; problems with the same text are removed"
        " from training.",
        also=_ALSO_LISTS,
    )
    demonstrations: DataSpec | None = option(
        None,
        "Prompts with responses to imitate, in the forms of data.train: rows with the columns"
        " prompt and response (or completion), or with messages.",
        only_with="schedule=supervised",
        also=_ALSO_LISTS,
    )
    order: str | None = option(
        None,
        "Column that orders the problems of the first epoch, the smallest first: a number by its"
        " value, a text by its length, such as solution for short worked solutions first. -COLUMN:"
        " the largest first, such as -pass_rate. none: shuffled, as later epochs always are.",
    )
    max_prompt_tokens: Tokens = option(
        2048,
        "Largest length of a prompt; longer ones are dropped and counted, never cut.",
        unit="tokens",
    )
    instruction: str = option(
        "", "Text appended to each problem before the chat template is applied."
    )
    system: str | None = option(None, "System message for chat models.")
    chat_template: Annotated[Literal["auto", "on", "off"], Switch] = option(
        "auto", "Whether prompts use the model's chat template. auto: if the tokenizer has one."
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_require_free_variables)] = (
        option(
            {},
            "Variables for the chat template, such as {enable_thinking: false}: any JSON values.",
        )
    )

    @cached_property
    def train_source(self) -> Source:
        """`data.train`, parsed. Raises DataError."""
        return parse_spec(self.train)

    @cached_property
    def eval_source(self) -> Source | None:
        """`data.eval`, parsed; None if it is not set. Raises DataError."""
        return None if self.eval is None else parse_spec(self.eval)

    @cached_property
    def template_time(self) -> datetime:
        """Return the time that chat templates read: the first call's, or `at_time`."""
        return datetime.now().replace(microsecond=0)

    def at_time(self, time: datetime) -> "DataConfig":
        """Return a copy whose chat templates read this time as now; it is not an option."""
        copy = self.model_copy()
        copy.__dict__["template_time"] = time
        return copy

    @property
    def sources(self) -> dict[str, str | dict[str, Any]]:
        """The data sources that are set, by option."""
        specs = {f"data.{name}": getattr(self, name) for name in DATA_SOURCES}
        return {option: spec for option, spec in specs.items() if spec is not None}

    @property
    def paths(self) -> dict[str, str]:
        """Possible file paths in the data sources, by option."""
        return {
            option: path
            for name, spec in self.sources.items()
            for option, path in paths_in(spec, name).items()
        }
