"""What a model card is written of: a checkpoint, the model before it, and the run's files."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.config import Config
from dapo.config.data_spec import HubSource, MixSource, Source, parse_spec
from dapo.config.load import resolve_auto_verifier
from dapo.config.model_options import MODEL_ALIASES
from dapo.core.files import read_json
from dapo.core.secrets import mask_options
from dapo.runs.checkpoints import step_of
from dapo.runs.directory import RunDirectory
from dapo.runs.evaluations import first_and_last_evaluation
from dapo.runs.manifest import PROVENANCE_FILE
from dapo.runs.stored_config import load_run_config
from dapo.start.card.text import code, escaped, public

TAG = "dapo"
"""The tag of each card, by which a run that begins with an export knows it."""
CARD_FILE = "README.md"
TRAINING_HEADING = "## Training"
FIRST_FACT = "- **Data**: "
"""The beginning of the list of facts about a training."""
PAPER = "https://arxiv.org/abs/2503.14476"
_HUB = "https://huggingface.co"
_HUB_IDS = {"smollm2-135m-instruct": "HuggingFaceTB/SmolLM2-135M-Instruct"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_CACHED = re.compile(r"models--([\w.-]+)--([\w.-]+)/snapshots/")


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
    evaluated: Config  # the options in force in the step of the last evaluation

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
    evaluated = config
    if evaluations:
        evaluated = load_run_config(run, step=evaluations[-1]["step"])
    return Card(run, checkpoint, config, name, uses_template, is_adapter, evaluations, evaluated)


def is_exported(model: Path) -> bool:
    """Return whether a model directory has the card of an export of dapo."""
    card = model / CARD_FILE
    return card.is_file() and TAG in (_front_matter_of(card).get("tags") or ())


def has_trained(name: str) -> bool:
    """Return whether a model, by the name that `model` takes, is that of a run or exported from one.

    Such a model may have learned the form of its answers, which its prompts do not request.
    """
    path = Path(name).expanduser()
    return RunDirectory.is_run(path) or is_exported(path)


def base_of(name: str) -> Base:
    """Find out which model a run began with: an alias, an id of the hub or a directory."""
    if name in MODEL_ALIASES:
        hub_id = _HUB_IDS.get(name)
        kind = "a random model made by dapo" if hub_id is None else f"a 4-bit copy of {hub_id}"
        return Base(f"{code(name)}, {kind}", hub_id)
    cached = _CACHED.search(name)
    if cached is not None:
        hub_id = f"{cached[1]}/{cached[2]}"
        return Base(code(hub_id), hub_id)
    path = Path(name).expanduser()
    if not path.exists():
        return Base(code(name), name if _HUB_ID.fullmatch(name) else None)
    text = f"the model in {code(path.name)}"
    if path.parent.name == RunDirectory(path).exported_folder.name:
        number = path.name.removeprefix("step_").partition("-")[0]
        step = number.lstrip("0") or "0"
        text = f"the model of the run {code(path.parents[1].name)} after step {step}"
    base = _front_matter_of(path / CARD_FILE).get("base_model")
    ancestor_id = None
    # the card of anybody else's model names the base of that model, not the model itself
    if is_exported(path) and isinstance(base, str) and _HUB_ID.fullmatch(base):
        ancestor_id = base
        text += f" (trained from {code(base)} by dapo)"
    return Base(text, ancestor_id=ancestor_id)


def earlier_facts(name: str) -> list[str]:
    """Return the facts of each training before this run, as Markdown lists, the last one first.

    They are those in the card of the model with which the run began, if that is an export of dapo.
    """
    model = Path(name).expanduser()
    if not is_exported(model):
        return []
    text = (model / CARD_FILE).read_text(encoding="utf-8", errors="replace")
    _, _, rest = text.partition(f"\n{TRAINING_HEADING}\n")
    section, _, _ = rest.partition("\n## ")
    blocks = [block.strip() for block in section.split("\n\n")]
    return [block for block in blocks if block.startswith(FIRST_FACT)]


def earlier_data_sets(name: str) -> list[str]:
    """Return the data sets of the hub on which the model that a run began with was trained."""
    model = Path(name).expanduser()
    if not is_exported(model):
        return []
    names = _front_matter_of(model / CARD_FILE).get("datasets")
    # the hub takes one name, too
    if isinstance(names, str):
        return [names]
    return [str(name) for name in names or ()]


def _front_matter_of(path: Path) -> dict[str, Any]:
    """Read the front matter of a model's own card; empty without one, or if it is damaged."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    with suppress(OSError, ValueError, YAMLError):
        values = metadata_load(path)
        return values if isinstance(values, dict) else {}
    return {}


def hub_link(name: str, kind: str = "") -> str:
    """Return a link to a model of the hub, or with `datasets/` to a data set."""
    return f"[{escaped(name)}]({_HUB}/{kind}{name})"


def trained_on(config: Config) -> Source:
    """Return the source of the training problems, or of the demonstrations."""
    return parse_spec(config.value_of(config.data_option))


def parts_of(source: Source) -> Sequence[Any]:
    """Return the sources of a mix, or the only one."""
    return list(source.parts.values()) if isinstance(source, MixSource) else [source]


def is_data_set(source: HubSource) -> bool:
    """Return True if a source is an id of the hub, and not a folder here."""
    return _HUB_ID.fullmatch(source.name) is not None and not Path(source.name).exists()


def provenance_of(card: Card, kind: str) -> Mapping[str, Any]:
    """Return a part of what the checkpoint records of its process; empty if it is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        facts = read_json(card.checkpoint / PROVENANCE_FILE)[kind]
        return facts if isinstance(facts, dict) else {}
    return {}


def version_of(card: Card) -> str:
    """Return the version that trained the model."""
    versions = provenance_of(card, "versions")
    return escaped(str(versions.get("dapo", "of unknown version")))


def is_distilled(config: Config) -> bool:
    """Return True if the model learns from a teacher's distributions."""
    return config.has_kl and config.loss.has_teacher and not config.is_supervised


def method_name(config: Config) -> str:
    """Return the method in Markdown."""
    if config.preset == "dapo":
        return f"[DAPO]({PAPER})"
    return f"preset {code(config.preset)}"


def verifier_text(verifier: str | Mapping[str, float]) -> str:
    """Return a verifier, or several with their weights, in Markdown."""
    if isinstance(verifier, str):
        return code(public(verifier))
    return " + ".join(f"{weight:g} × {code(public(name))}" for name, weight in verifier.items())


def codes(names: Sequence[str]) -> str:
    """Return names as code."""
    return ", ".join(code(public(name)) for name in names)


def readable(value: Any) -> Any:
    """Return the user's words to the model, without secrets and the name of the home directory."""
    value = mask_options(value)
    home = str(Path.home())
    if isinstance(value, str) and len(home) > 1:
        return value.replace(home, "~")
    return value
