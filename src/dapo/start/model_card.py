"""The model card of an export: the README.md that the Hugging Face hub shows.

It says what the files of the run say: no number is computed or rounded in another way than by
`dapo eval`. Files are named without their folders, and servers without their address.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dapo
from dapo.config import Config
from dapo.config.data_spec import FileSource, HubSource, MixSource, Source, TaskSource, parse_spec
from dapo.config.environment import EnvironmentConfig
from dapo.config.load import override, resolve_auto_verifier
from dapo.config.model_options import DATA_SOURCES, MODEL_ALIASES, DataSpec
from dapo.config.option_fields import changed_paper_values, option_text, options_of, section_in
from dapo.core.errors import DapoError, DataError
from dapo.core.files import read_json
from dapo.core.secrets import mask_options
from dapo.core.text import with_interval
from dapo.environments.adapters import GAMES, PACKAGES
from dapo.evaluation.pairing import paired_difference
from dapo.runs.checkpoints import step_of
from dapo.runs.directory import RunDirectory
from dapo.runs.evaluations import first_and_last_evaluation
from dapo.runs.manifest import PROVENANCE_FILE, Fork, manifest_entry
from dapo.runs.stored_config import DATA_FOLDER, load_run_config, option_changes
from dapo.start.card_text import block, code, escaped, public, public_data, table, value_text

CARD_FILE = "README.md"
TAG = "dapo"
"""The tag of each card, by which a run that begins with an export knows it."""
PAPER = "https://arxiv.org/abs/2503.14476"
QUESTION = "What is 17 + 25?"
"""The prompt of the example: the user's own problems may be private."""
_HUB = "https://huggingface.co"
_HUB_IDS = {"smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CACHED = re.compile(r"models--([\w.-]+)--([\w.-]+)/snapshots/")
_PROMPT_OPTIONS = (
    "data.instruction",
    "data.system",
    "data.chat_template",
    "data.chat_template_kwargs",
)
_SUPERVISED = ("model.", "optim.", "train.", "eval.", "schedule")
"""Prefixes of the options with an effect on imitating demonstrations."""


@dataclass(frozen=True)
class Card:
    """What a card is written of."""

    run: RunDirectory
    checkpoint: Path
    config: Config  # the options in force in the checkpoint's step
    name: str  # of the directory, or of the repository on the hub
    uses_template: bool  # whether prompts are rendered by the model's chat template
    is_adapter: bool  # whether only the adapter is exported
    evaluations: Sequence[Mapping[str, Any]]
    """The first evaluation and the last one up to the checkpoint; one, or none."""

    @property
    def step(self) -> int:
        return step_of(self.checkpoint)

    @property
    def model(self) -> str:
        """The name by which examples load the whole model."""
        return "merged" if self.is_adapter else self.name


@dataclass(frozen=True)
class Base:
    """The model with which a run began."""

    text: str  # as the card names it, in Markdown
    own_id: str | None = None  # its id on the hub; None if it is not known to be there
    ancestor_id: str | None = None  # the id of the model that an export of dapo was trained from

    @property
    def link(self) -> str:
        return self.text if self.own_id is None else hub_link(self.own_id)


def read_card(
    run: RunDirectory, checkpoint: Path, *, name: str, has_template: bool, is_adapter: bool
) -> Card:
    """Read what the card of an exported checkpoint is written of.

    Args:
        run: the run.
        checkpoint: the checkpoint.
        name: the name of the directory, or of the repository on the hub.
        has_template: whether the model has a chat template.
        is_adapter: whether only the adapter is exported.

    Raises:
        ConfigError: the options of the step cannot be read.
    """
    step = step_of(checkpoint)
    config = resolve_auto_verifier(load_run_config(run, step=step))
    uses_template = has_template and config.data.chat_template != "off"
    evaluations = first_and_last_evaluation(run, up_to_step=step)
    return Card(run, checkpoint, config, name, uses_template, is_adapter, evaluations)


def model_card(card: Card) -> str:
    """Return the text of a card: front matter that the hub reads, then Markdown."""
    base = base_of(card.config.model.name)
    sections = [
        f"---\n{front_matter(card, base)}---",
        f"# {escaped(card.name.rpartition('/')[2])}",
        _summary(card, base),
        *_results(card),
        *_use(card, base),
        *_training(card, base),
        "## Licence",
        "The licence is that of the base model. Whoever publishes this model adds it here and, as"
        " `license`, above.",
    ]
    return "\n\n".join(sections) + "\n"


def base_of(name: str) -> Base:
    """Find out which model a run began with: an alias, an id of the hub or a directory."""
    if name in MODEL_ALIASES:
        return Base(f"{code(name)}, a random model that dapo makes", _HUB_IDS.get(name))
    cached = _CACHED.search(name)
    if cached is not None:
        hub_id = f"{cached[1]}/{cached[2]}"
        return Base(code(hub_id), hub_id)
    path = Path(name).expanduser()
    if not path.exists():
        return Base(code(name), name if _HUB_ID.fullmatch(name) else None)
    text = f"the model in {code(path.name)}"
    if path.parent.name == RunDirectory(path).exported_folder.name:
        step = path.name.removeprefix("step_").lstrip("0") or "0"
        text = f"the model of the run {code(path.parents[1].name)} after step {step}"
    own_card = _front_matter_of(path / CARD_FILE)
    base = own_card.get("base_model")
    ancestor_id = None
    # the card of anybody else's model names the base of that model, not the model itself
    if TAG in (own_card.get("tags") or ()) and isinstance(base, str) and _HUB_ID.fullmatch(base):
        ancestor_id = base
        text += f" (trained by dapo from {code(base)})"
    return Base(text, ancestor_id=ancestor_id)


def _front_matter_of(path: Path) -> dict[str, Any]:
    """Read the front matter of a model's own card; empty without one, or if it is damaged."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    with suppress(OSError, ValueError, YAMLError):
        values = metadata_load(path)
        return values if isinstance(values, dict) else {}
    return {}


def front_matter(card: Card, base: Base) -> str:
    """Return the facts that the hub reads, as YAML."""
    from huggingface_hub import ModelCardData

    sources = _parts(_trained_on(card.config))
    data_sets = {x.name for x in sources if isinstance(x, HubSource) and _is_data_set(x)}
    facts = ModelCardData(
        base_model=base.own_id if card.is_adapter else base.own_id or base.ancestor_id,
        library_name="peft" if card.is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=_tags(card),
        datasets=sorted(data_sets) or None,
    )
    return facts.to_yaml() + "\n"


def _tags(card: Card) -> list[str]:
    config = card.config
    tags = [TAG]
    if config.is_supervised:
        tags.append("sft")
    elif config.trains_on_rewards:
        tags.append("reinforcement-learning")
    if _is_distilled(config):
        tags.append("distillation")
    if config.preset not in tags and config.preset != "distill":
        tags.append(config.preset.replace("_", "-"))
    if config.model.lora is not None:
        tags.append("lora")
    return tags


def _summary(card: Card, base: Base) -> str:
    config = card.config
    kind = "reinforcement learning"
    if config.is_supervised:
        kind = "supervised training"
    elif not config.trains_on_rewards:
        kind = "distillation"
    method = "" if config.is_supervised else f" ({_method_name(config)})"
    what = f"A LoRA adapter for {base.link}" if card.is_adapter else base.link
    steps = f"{card.step:,} {'step' if card.step == 1 else 'steps'}"
    text = f"{what}, after {steps} of {kind}{method} with dapo {_version(card)}."
    return text[0].upper() + text[1:]


def _method_name(config: Config) -> str:
    if config.preset == "dapo":
        return f"[DAPO]({PAPER})"
    return f"preset {code(config.preset)}"


def _version(card: Card) -> str:
    versions = _provenance(card).get("versions") or manifest_entry(card.run, "versions") or {}
    return escaped(str(versions.get("dapo", "of unknown version")))


# Results


def _results(card: Card) -> Iterator[str]:
    """Yield the accuracies before and after training, or why there are none."""
    yield "## Results"
    if not card.evaluations:
        yield "The run made no evaluation on held-out problems."
        return
    last = card.evaluations[-1]
    yield _how_evaluated(card, last)
    yield table(["", *map(_when, card.evaluations)], _figures(card.evaluations))
    if len(card.evaluations) == 2:
        yield _difference(*card.evaluations)
    if last["step"] != card.step:
        yield f"The weights are those after step {card.step}, which was not evaluated."
    for evaluation in card.evaluations:
        if evaluation.get("warning"):
            yield f"{_when(evaluation)}: {escaped(str(evaluation['warning']))}."


def _when(evaluation: Mapping[str, Any]) -> str:
    return f"after step {evaluation['step']}" if evaluation["step"] else "before training"


def _how_evaluated(card: Card, evaluation: Mapping[str, Any]) -> str:
    samples = evaluation["samples_per_problem"]
    limit = evaluation["max_response_tokens"]
    judge = ""
    if "verifier" in evaluation:
        judge = f", judged by {_verifier(evaluation['verifier'])}"
    return (
        f"{evaluation['problems']:,} held-out problems of {code(evaluation['name'])}, {samples}"
        f" {'response' if samples == 1 else 'responses'} to each at temperature"
        f" {evaluation['temperature']:g} and top_p {evaluation['top_p']:g}, of at most {limit:,}"
        f" tokens{judge}. In brackets: 95 % intervals over problems."
    )


def _figures(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the rows of the table of results."""
    means = []
    for evaluation in evaluations:
        interval = (evaluation["low"], evaluation["high"])
        means.append(with_interval(evaluation["accuracy"], interval, _style(evaluation)))
    last = evaluations[-1]
    label = f"accuracy (avg@{last['samples_per_problem']})" if last["binary"] else "mean score"
    yield [label, *means]
    for name in _estimates(last):
        values = []
        for evaluation in evaluations:
            interval = evaluation["intervals"].get(name)
            is_there = name in evaluation
            values.append(with_interval(evaluation[name], interval) if is_there else "")
        yield [name, *values]
    sources = list(last["by_source"])
    for source in sources if len(sources) > 1 else ():
        values = []
        for evaluation in evaluations:
            row = evaluation["by_source"].get(source)
            style = _style(evaluation)
            values.append("" if row is None else f"{row['accuracy']:{style}}")
        yield [code(source), *values]
    yield ["tokens of a response", *(f"{x['response_tokens_mean']:.1f}" for x in evaluations)]
    yield ["truncated responses", *(f"{x['truncated_fraction']:.1%}" for x in evaluations)]


def _estimates(evaluation: Mapping[str, Any]) -> list[str]:
    """Return the names of pass@k and cons@k; of one response both are the accuracy."""
    samples = evaluation["samples_per_problem"]
    names = [f"pass@{samples}", f"cons@{samples}"]
    return [name for name in names if samples > 1 and name in evaluation]


def _style(evaluation: Mapping[str, Any]) -> str:
    return ".1%" if evaluation["binary"] else ".3f"


def _difference(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Return the paired difference in a sentence, or that there is none."""
    try:
        paired = paired_difference(first, last)
    except DataError:
        return (
            "The two evaluations differ in their settings or problems, so that their difference is"
            " not that of training."
        )
    if paired["difference"] is None:
        return "No problem has a verdict in both evaluations."
    scale, style, unit = (100, "+.1f", " points") if last["binary"] else (1, "+.3f", "")
    text = f"Difference, paired by problem: {scale * paired['difference']:{style}}{unit}"
    if paired["low"] is not None:
        low = scale * paired["low"]
        high = scale * paired["high"]
        text += f" (95 % interval {low:{style}} to {high:{style}})"
    return (
        f"{text}; {paired['better']} problems better, {paired['worse']} worse, {paired['equal']}"
        " equal."
    )


# Use


def _use(card: Card, base: Base) -> Iterator[str]:
    """Yield how to load the model, what prompts look like, and how to evaluate it."""
    yield "## Use"
    if card.is_adapter and base.own_id is None:
        yield f"The base model is not on the hub: set `BASE` to the directory of {base.text}."
    yield block(example(card, base), "python")
    yield from _prompts(card)
    yield "## Evaluate"
    data = card.config.data.eval
    words = evaluation_words(
        card,
        model=card.model,
        data=None if data is None else public_data(data),
        is_public=True,
    )
    if words is None:
        yield "The run had no evaluation; `test.jsonl` stands for held-out problems:"
        words = ["dapo", "eval", card.model, "--data", "test.jsonl"]
    elif card.is_adapter:
        yield "With the `merged` model of the example above:"
    yield block(shlex.join(words), "bash")
    if _needs(card.config):
        yield f"The command needs {' and '.join(_needs(card.config))} in the current folder."


def example(card: Card, base: Base) -> str:
    """Return Python code that loads the model and prints an answer."""
    data = card.config.data
    question = QUESTION + (f"\n{data.instruction}" if data.instruction else "")
    prompt: Any = _readable(question)
    arguments = {"max_new_tokens": str(card.config.rollout.max_response_tokens)}
    if card.uses_template:
        prompt = [{"role": "user", "content": prompt}]
        if data.system is not None:
            prompt.insert(0, {"role": "system", "content": _readable(data.system)})
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


def _readable(value: Any) -> Any:
    """Return the user's words to the model, without secrets and the name of the home directory."""
    value = mask_options(value)
    home = str(Path.home())
    if isinstance(value, str) and len(home) > 1:
        return value.replace(home, "~")
    return value


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
        yield block(_readable(data.instruction), "text")
    if data.system is not None:
        yield "System message:"
        yield block(_readable(data.system), "text")
    if data.chat_template_kwargs:
        yield f"Variables of the chat template: {code(value_text(data.chat_template_kwargs))}."
    if card.config.plays_episodes:
        environment = card.config.environment
        names = [name for name in (environment.name, *environment.tools) if name is not None]
        yield (
            "Trained in episodes of at most"
            f" {environment.max_turns} turns with {_codes(names)}, whose messages follow the"
            " model's turns; the example above takes one turn."
        )


def evaluation_words(
    card: Card, *, model: str, data: DataSpec | None, is_public: bool = False
) -> list[str] | None:
    """Return the words of the command that repeats the last evaluation; None without one.

    Args:
        card: the card.
        model: the name or the directory of the model.
        data: the held-out problems.
        is_public: leave out folders, addresses and secrets.
    """
    config = card.config
    if not card.evaluations or data is None:
        return None
    last = card.evaluations[-1]
    options = {name: config.value_of(name) for name in _evaluated_options() if config.sets(name)}
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
            shown = _readable(value) if is_prompt else public(value)
        words.append(override(name, list(shown) if isinstance(shown, tuple) else shown))
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
    needed = {}
    for path in paths:
        module, colon, _ = path.partition(":")
        # textarena:ID names a package
        if (
            colon
            and module not in (*GAMES, *PACKAGES)
            and module.partition(".")[0] != dapo.__name__
        ):
            needed[f"the module {code(public(module))}"] = None
    for source in _parts(parse_spec(config.data.eval)) if config.data.eval is not None else ():
        if isinstance(source, FileSource):
            needed[code(source.path.name)] = None
    return list(needed)


# Training


def _training(card: Card, base: Base) -> Iterator[str]:
    """Yield what the model was trained on, how, how long and by which run."""
    config = card.config
    yield "## Training"
    yield "\n".join(f"- {line}" for line in _facts(card, base))
    changed = list(_changed_options(config))
    if changed:
        yield f"Options that differ from those of the [paper]({PAPER}):"
        yield table(["option", "this run", "paper"], changed)
    else:
        yield f"All options that the [paper]({PAPER}) gives have its values."
    lines = [*_resumes(card), *_origin(card)]
    if lines:
        yield "\n".join(f"- {line}" for line in lines)


def _facts(card: Card, base: Base) -> Iterator[str]:
    config = card.config
    source = _trained_on(config)
    problems = _count(card, "training problems")
    kind = "demonstrations" if config.is_supervised else "problems"
    number = "" if problems is None else f"{problems:,} {kind}: "
    yield f"**Data**: {number}{'; '.join(_describe(part, card) for part in _parts(source))}"
    yield f"**Method**: {_method(config)}"
    if config.learns_from_rewards:
        reward = _verifier(config.reward.verifier)
        if config.reward.threshold is not None:
            reward += f", correct from a score of {config.reward.threshold:g} on"
        yield f"**Reward**: {reward}"
    if config.model.lora is not None:
        lora = config.model.lora
        place = "which this directory holds" if card.is_adapter else "merged into these weights"
        yield f"**LoRA**: adapters of rank {lora.rank} and alpha {lora.alpha:g}, {place}"
    yield f"**Length**: {_length(card)}"
    started = manifest_entry(card.run, "started")
    time = f", started {escaped(str(started))}" if started else ""
    exporter = "" if _version(card) == dapo.__version__ else f", exported by {dapo.__version__}"
    yield (
        f"**Run**: {code(card.run.path.resolve().name)}, seed {config.train.seed}{time}; dapo"
        f" {_version(card)}{exporter}"
    )


def _method(config: Config) -> str:
    if config.is_supervised:
        return "supervised: the model imitates the responses; nothing is sampled or rewarded"
    text = _method_name(config)
    if config.loss.function is not None:
        text += f" with the loss {code(public(config.loss.function))}"
    if _is_distilled(config):
        teacher = "a model behind a server"
        if config.loss.teacher is not None:
            teacher = base_of(config.loss.teacher).text  # perhaps a folder of the run's start
        text += f", with the teacher {teacher}"
        if not config.trains_on_rewards:
            text += "; rewards do not train"
    return text


def _is_distilled(config: Config) -> bool:
    return config.has_kl and config.loss.has_teacher and not config.is_supervised


def _length(card: Card) -> str:
    config = card.config
    steps = f"{card.step:,} of {config.train.num_steps:,} steps"
    with suppress(OSError, ValueError, KeyError, TypeError):
        state = read_json(card.checkpoint / "state.json")["train_state"]
        trained = f"{int(state['tokens_trained']):,} tokens trained"
        if config.is_supervised:
            return f"{steps}, {trained}"
        return f"{steps}, {int(state['tokens_generated']):,} tokens generated, {trained}"
    return steps


def _changed_options(config: Config) -> Iterator[list[str]]:
    for name, value, paper in changed_paper_values(config):
        if config.is_supervised and not name.startswith(_SUPERVISED):
            continue
        # which the list above names
        if name in ("model.lora", "loss.function", "loss.reference", "environment.name"):
            continue
        yield [code(name), code(value_text(value)), code(option_text(paper))]


def _resumes(card: Card) -> Iterator[str]:
    """Yield the options that were changed before the checkpoint's step."""
    for change in option_changes(card.run):
        if change["after_step"] >= card.step:
            continue
        options = [
            f"{code(name)} from {code(_option(name, old))} to {code(_option(name, new))}"
            for name, (old, new) in change["options"].items()
        ]
        if options:
            yield f"After step {change['after_step']} options were changed: {', '.join(options)}."


def _origin(card: Card) -> Iterator[str]:
    """Yield the run from which this one was forked, if it was."""
    fork = Fork.of(card.run)
    if fork is not None:
        changes = [
            f"{code(name)} from {code(_option(name, old))} to {code(_option(name, new))}"
            for name, (old, new) in fork.changed.items()
        ]
        yield (
            f"The first {fork.step} steps are those of the run {code(Path(fork.parent).name)}, from"
            f" which it was forked{' with ' if changes else ''}{', '.join(changes)}."
        )


def _option(name: str, value: Any) -> str:
    """Return an option's value, of which a data source or a path is named without folders."""
    if isinstance(value, str):
        parts = name.split(".")
        if parts[0] == "data" and parts[1] in DATA_SOURCES:
            with suppress(DapoError):
                return str(public_data(value))
        if name == "model.name" or parts[-1] in ("path", "model"):
            return Path(value).name if Path(value).is_absolute() else value_text(value)
    return value_text(value)


def _trained_on(config: Config) -> Source:
    return parse_spec(config.value_of(config.data_option))


def _parts(source: Source) -> Sequence[Any]:
    return list(source.parts.values()) if isinstance(source, MixSource) else [source]


def _describe(source: Any, card: Card) -> str:
    """Describe a source of problems that is no mix."""
    if isinstance(source, HubSource):
        if not _is_data_set(source):
            return f"the data set {code(Path(source.name).name)}"
        config = "" if source.config is None else f", configuration {code(source.config)}"
        return f"{hub_link(source.name, 'datasets/')}{config}, split {code(source.split)}"
    if isinstance(source, TaskSource):
        if source.kind == "environment":
            return "those of the environment"
        origin = "reasoning-gym" if source.kind == "gym" else "dapo"
        return f"{_codes(list(source.tasks))}, generated by {origin}"
    if source.path.parent.name == DATA_FOLDER and RunDirectory.is_run(source.path.parents[1]):
        return f"rows given from Python ({code(source.path.name)})"
    return f"the file {code(source.path.name)}"


def _is_data_set(source: HubSource) -> bool:
    """Return True if a source is an id of the hub, and not a folder here."""
    return _HUB_ID.fullmatch(source.name) is not None and not Path(source.name).exists()


def _verifier(verifier: str | Mapping[str, float]) -> str:
    if isinstance(verifier, str):
        return code(public(verifier))
    return " + ".join(f"{weight:g} × {code(public(name))}" for name, weight in verifier.items())


def _codes(names: Sequence[str]) -> str:
    return ", ".join(code(public(name)) for name in names)


def hub_link(name: str, kind: str = "") -> str:
    """Return a link to a model of the hub, or with `datasets/` to a data set."""
    return f"[{escaped(name)}]({_HUB}/{kind}{name})"


def _provenance(card: Card) -> Mapping[str, Any]:
    with suppress(OSError, ValueError):
        facts = read_json(card.checkpoint / PROVENANCE_FILE)
        return facts if isinstance(facts, dict) else {}
    return {}


def _count(card: Card, kind: str) -> int | None:
    """Return the number of problems that the process of the checkpoint read; None if unknown."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        return int(_provenance(card)["data"][kind].partition(" ")[0])
    return None
