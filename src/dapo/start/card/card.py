"""The model card of an export: the README.md that the Hugging Face hub shows.

It says what the files of the run say. Files are named without their folders, and servers without
their address.
"""

from dapo.config.data_spec import HubSource
from dapo.start.card.facts import (
    TAG,
    Base,
    Card,
    base_of,
    earlier_data_sets,
    is_data_set,
    is_distilled,
    method_name,
    parts_of,
    trained_on,
    version_of,
)
from dapo.start.card.results import results
from dapo.start.card.text import escaped
from dapo.start.card.training import training
from dapo.start.card.use import use


def model_card(card: Card) -> str:
    """Return the text of a card: front matter that the hub reads, then Markdown."""
    base = base_of(card.config.model.name)
    sections = [
        f"---\n{front_matter(card, base)}---",
        f"# {escaped(card.name.rpartition('/')[2])}",
        _summary(card, base),
        *results(card),
        *use(card, base),
        *training(card, base),
        "## Licence",
        "The licence is that of the base model. Whoever publishes this model adds it here, and as"
        " `license` in the front matter of this file.",
    ]
    return "\n\n".join(sections) + "\n"


def front_matter(card: Card, base: Base) -> str:
    """Return the facts that the hub reads, as YAML."""
    from huggingface_hub import ModelCardData

    sources = parts_of(trained_on(card.config))
    data_sets = {x.name for x in sources if isinstance(x, HubSource) and is_data_set(x)}
    data_sets.update(earlier_data_sets(card.config.model.name))
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
    if is_distilled(config):
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
    method = "" if config.is_supervised else f" ({method_name(config)})"
    what = f"A LoRA adapter for {base.link}" if card.is_adapter else base.link
    steps = f"{card.step:,} {'step' if card.step == 1 else 'steps'}"
    text = f"{what}, after {steps} of {kind}{method} with dapo {version_of(card)}."
    return text[0].upper() + text[1:]
