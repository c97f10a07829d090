"""The lines of a model card that load the model and evaluate it."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

import dapo
from dapo.config import Config
from dapo.config.data_spec import FileSource, parse_spec
from dapo.config.environment import EnvironmentConfig
from dapo.config.load import as_literal, override
from dapo.config.option_fields import options_of, section_in
from dapo.environments.adapters import GAMES, PACKAGES
from dapo.start.card.facts import Base, Card, codes, parts_of, readable
from dapo.start.card.text import block, code, public, public_data, value_text

QUESTION = "What is 17 + 25?"
"""The prompt of the example: the user's own problems may be private."""
_PROMPT_OPTIONS = (
    "data.instruction",
    "data.system",
    "data.chat_template",
    "data.chat_template_kwargs",
)


def use(card: Card, base: Base) -> Iterator[str]:
    """Yield how to load the model, what prompts look like, and how to evaluate it."""
    yield "## Use"
    if card.is_adapter and base.own_id is None:
        yield f"The base model is not on the hub: set `BASE` to the directory of {base.text}."
    yield block(example(card, base), "python")
    yield from _prompts(card)
    yield "## Evaluate"
    words = evaluation_words(card, model=card.model, is_public=True)
    if words is None:
        yield "The run had no evaluation; `test.jsonl` stands for held-out problems:"
        words = ["dapo", "eval", card.model, "--data", "test.jsonl"]
    elif card.is_adapter:
        yield "With the `merged` model of the example above:"
    yield block(shlex.join(words), "bash")
    if _needs(card.evaluated):
        yield f"The command needs {' and '.join(_needs(card.evaluated))} in the current folder."


def example(card: Card, base: Base) -> str:
    """Return Python code that loads the model and prints an answer."""
    data = card.config.data
    question = QUESTION + (f"\n{data.instruction}" if data.instruction else "")
    prompt: Any = readable(question)
    arguments = {"max_new_tokens": str(card.config.rollout.max_response_tokens)}
    if card.uses_template:
        prompt = [{"role": "user", "content": prompt}]
        if data.system is not None:
            prompt.insert(0, {"role": "system", "content": readable(data.system)})
        if data.chat_template_kwargs:
            arguments["tokenizer_encode_kwargs"] = repr(dict(data.chat_template_kwargs))
    arguments |= {"do_sample": "True", "return_full_text": "False"}
    keywords = ", ".join(f"{name}={value}" for name, value in arguments.items())
    lines = ["from transformers import pipeline", ""]
    lines.append(f'generate = pipeline("text-generation", model={json.dumps(card.name)})')
    if card.is_adapter:
        lines = [
            "from peft import PeftModel",
            "from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline",
            "",
            f"BASE = {json.dumps(base.own_id or 'BASE')}",
            "tokenizer = AutoTokenizer.from_pretrained(BASE)",
            "model = AutoModelForCausalLM.from_pretrained(BASE)",
            f"model = PeftModel.from_pretrained(model, {json.dumps(card.name)}).merge_and_unload()",
            'model.save_pretrained("merged")',
            'tokenizer.save_pretrained("merged")',
            'generate = pipeline("text-generation", model=model, tokenizer=tokenizer)',
        ]
    return "\n".join(
        [
            *lines,
            f"prompt = {prompt!r}",
            f"answers = generate(prompt, {keywords})",
            'print(answers[0]["generated_text"])',
        ]
    )


def _prompts(card: Card) -> Iterator[str]:
    """Yield the form of the prompts in training."""
    data = card.config.data
    form = "Prompts are plain text, without a chat template"
    if card.uses_template:
        form = "Prompts use the model's chat template, with the problem as the user's message"
    form += ", as in training."
    if data.instruction:
        form += " A line with the instruction follows each problem."
    yield form
    if data.instruction:
        yield "Instruction:"
        yield block(readable(data.instruction), "text")
    if data.system is not None:
        yield "System message:"
        yield block(readable(data.system), "text")
    if data.chat_template_kwargs:
        yield f"Variables of the chat template: {code(value_text(data.chat_template_kwargs))}."
    if card.config.plays_episodes:
        environment = card.config.environment
        names = [name for name in (environment.name, *environment.tools) if name is not None]
        yield (
            "Trained in episodes of at most"
            f" {environment.max_turns} turns with {codes(names)}, whose messages follow the"
            " model's turns; the example above takes one turn."
        )


def evaluation_words(card: Card, *, model: str, is_public: bool = False) -> list[str] | None:
    """Return the words of the command that repeats the last evaluation; None without one.

    Args:
        card: the card.
        model: the name or the directory of the model.
        is_public: leave out folders, addresses and secrets.
    """
    config = card.evaluated
    data: Any = config.data.eval
    if not card.evaluations or data is None:
        return None
    if is_public:
        data = public_data(data)
    last = card.evaluations[-1]
    options = {name: config.value_of(name) for name in _evaluated_options()}
    options["reward.verifier"] = last.get("verifier", config.reward.verifier)
    options["reward.options"] = last.get("verifier_options", config.reward.options)
    options["reward.threshold"] = last.get("threshold", config.reward.threshold)
    for name in ("temperature", "top_p", "max_response_tokens"):
        options[f"eval.{name}"] = last[name]
    options["train.seed"] = last["seed"]
    words = ["dapo", "eval", model, "--data", data if isinstance(data, str) else json.dumps(data)]
    words += ["--samples-per-problem", str(last["samples_per_problem"])]
    fields = dict(options_of())
    for name, value in options.items():
        if value == fields[name].get_default(call_default_factory=True):
            continue
        is_prompt = name in _PROMPT_OPTIONS
        shown = value
        if is_public:
            shown = readable(value) if is_prompt else public(value)
        shown = list(shown) if isinstance(shown, tuple) else shown
        words.append(override(name, as_literal(shown)))
    return words


def _evaluated_options() -> Iterator[str]:
    """Yield the options, beside the verifier's and those of sampling, that decide an evaluation."""
    yield from (*_PROMPT_OPTIONS, "model.dtype")
    for name, info in options_of(EnvironmentConfig, "environment."):
        if section_in(info.annotation) is None:
            yield name


def _needs(config: Config) -> list[str]:
    """Return the names of what an evaluation needs and a model directory has not."""
    verifier = config.reward.verifier
    paths = [verifier] if isinstance(verifier, str) else list(verifier)
    if config.plays_episodes:
        paths += [name for name in (config.environment.name, *config.environment.tools) if name]
    # before a colon stands the package of a game, or a module of the user
    others = {"", dapo.__name__, *GAMES, *PACKAGES}
    needed: dict[str, None] = {}
    for path in paths:
        module = path.rpartition(":")[0]
        if module.partition(".")[0] not in others:
            needed[f"the module {code(public(module))}"] = None
    for source in parts_of(parse_spec(config.data.eval)) if config.data.eval is not None else ():
        if isinstance(source, FileSource):
            needed[code(source.path.name)] = None
    return list(needed)
