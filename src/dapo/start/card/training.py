"""How a model was trained, for its card: data, method, options, length and run."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import dapo
from dapo.config import Config
from dapo.config.data_spec import HubSource, TaskSource
from dapo.config.model_options import DATA_SOURCES, MODEL_ALIASES
from dapo.config.option_fields import changed_paper_values, option_text
from dapo.core.errors import DapoError
from dapo.core.files import read_json
from dapo.runs.directory import RunDirectory
from dapo.runs.manifest import Fork, manifest_entry
from dapo.runs.stored_config import DATA_FOLDER, option_changes
from dapo.start.card.facts import (
    FIRST_FACT,
    PAPER,
    TRAINING_HEADING,
    Base,
    Card,
    base_of,
    codes,
    earlier_facts,
    hub_link,
    is_data_set,
    is_distilled,
    method_name,
    parts_of,
    provenance_of,
    trained_on,
    verifier_text,
    version_of,
)
from dapo.start.card.text import code, escaped, public, public_data, table, value_text

_SUPERVISED = ("model.", "optim.", "train.", "eval.", "schedule")
"""Prefixes of the options with an effect on imitating demonstrations."""
_LISTED = ("model.lora", "loss.function", "loss.reference", "environment.name")
"""Options that the list of facts names."""


def training(card: Card, base: Base) -> Iterator[str]:
    """Yield what the model was trained on, how, how long and by which run."""
    config = card.config
    yield TRAINING_HEADING
    yield FIRST_FACT + "\n- ".join(_facts(card, base))
    changed = list(_changed_options(config))
    if changed:
        yield f"Options that differ from those of the [paper]({PAPER}):"
        yield table(["option", "this run", "paper"], changed)
    else:
        yield f"All options that the [paper]({PAPER}) gives have its values."
    lines = [*_resumes(card), *_origin(card)]
    if lines:
        yield "\n".join(f"- {line}" for line in lines)
    earlier = earlier_facts(config.model.name)
    if earlier:
        yield "### Earlier training"
        yield from earlier


def _facts(card: Card, base: Base) -> Iterator[str]:
    """Yield the facts of the list, the first one without its beginning, which is FIRST_FACT."""
    config = card.config
    source = trained_on(config)
    problems = _count(card, "training problems")
    kind = "demonstrations" if config.is_supervised else "problems"
    number = "" if problems is None else f"{problems:,} {kind}: "
    yield number + "; ".join(_describe(part, card) for part in parts_of(source))
    yield f"**Method**: {_method(config)}"
    if config.learns_from_rewards:
        reward = verifier_text(config.reward.verifier)
        if config.reward.threshold is not None:
            reward += f", correct from a score of {config.reward.threshold:g} on"
        yield f"**Reward**: {reward}"
    if config.model.lora is not None:
        lora = config.model.lora
        place = "which this directory holds" if card.is_adapter else "merged into these weights"
        yield f"**LoRA**: adapters of rank {lora.rank} and alpha {lora.alpha:g}, {place}"
    yield f"**Length**: {_length(card)}"
    if base.own_id is not None and card.config.model.name in MODEL_ALIASES:
        yield f"**Base**: {base.text}, as it comes with dapo"
    started = manifest_entry(card.run, "started")
    time = f", started {escaped(str(started))}" if started else ""
    exporter = "" if version_of(card) == dapo.__version__ else f", exported by {dapo.__version__}"
    yield (
        f"**Run**: {code(card.run.path.resolve().name)}, seed {config.train.seed}{time}; dapo"
        f" {version_of(card)}{exporter}"
    )


def _method(config: Config) -> str:
    if config.is_supervised:
        return "supervised: the model imitates the responses; nothing is sampled or rewarded"
    text = method_name(config)
    if config.loss.function is not None:
        text += f" with the loss {code(public(config.loss.function))}"
    if is_distilled(config):
        teacher = "a model behind a server"
        if config.loss.teacher is not None:
            teacher = base_of(config.loss.teacher).text  # perhaps a folder of the run's start
        text += f", with the teacher {teacher}"
        if not config.trains_on_rewards:
            text += "; rewards do not train"
    return text


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
        if name in _LISTED:
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


def _describe(source: Any, card: Card) -> str:
    """Describe a source of problems that is no mix."""
    if isinstance(source, HubSource):
        if not is_data_set(source):
            return f"the data set {code(Path(source.name).name)}"
        config = "" if source.config is None else f", configuration {code(source.config)}"
        return f"{hub_link(source.name, 'datasets/')}{config}, split {code(source.split)}"
    if isinstance(source, TaskSource):
        if source.kind == "environment":
            return "those of the environment"
        origin = "reasoning-gym" if source.kind == "gym" else "dapo"
        return f"{codes(list(source.tasks))}, generated by {origin}"
    if source.path.parent.name == DATA_FOLDER and RunDirectory.is_run(source.path.parents[1]):
        return f"rows given from Python ({code(source.path.name)})"
    return f"the file {code(source.path.name)}"


def _count(card: Card, kind: str) -> int | None:
    """Return the number of problems that the process of the checkpoint read; None if unknown."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        return int(provenance_of(card, "data")[kind].partition(" ")[0])
    return None
