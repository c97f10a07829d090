"""Writes checkpoints as Hugging Face models; torch is imported once run and place are checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import dapo
from dapo.config import Config, DataConfig
from dapo.core.errors import CheckpointError, ConfigError
from dapo.core.files import crc32_of
from dapo.core.model_files import DtypeName, require_new_folder
from dapo.runs.checkpoints import step_of
from dapo.runs.directory import RunDirectory
from dapo.runs.stored_config import load_run_config
from dapo.start.card.card import model_card
from dapo.start.card.facts import CARD_FILE, base_of, read_card
from dapo.start.card.use import evaluation_words
from dapo.start.hub import find_repository, push_folder
from dapo.training.saved_state import STATE_FILE

if TYPE_CHECKING:
    from dapo.policy.model import LoadedModel


def exported_run(option: str, name: str, log: Callable[[str], None]) -> str:
    """Return the directory with the exported newest checkpoint of a run that an option names.

    Raises CheckpointError.
    """
    run = RunDirectory.open(Path(name).expanduser())
    checkpoint = run.checkpoints.latest(warn=log)
    if checkpoint is None:
        raise CheckpointError(f"{option}={name} has no checkpoint yet")
    # a step that is trained anew, as after a damaged checkpoint, has other counts: its seconds, ...
    counts = crc32_of(checkpoint / STATE_FILE)
    exported = run.exported_folder / f"{checkpoint.name}-{counts}"
    if not exported.is_dir():
        # another run begins with these weights: unrounded
        export_model_of(run.path, exported, step=step_of(checkpoint), warn=log, dtype=None)
    log(f"{option}: {name} is exported to {exported}")
    return str(exported)


@dataclass(frozen=True)
class Exported:
    """An export, as it was made."""

    config: Config  # the run's options
    step: int  # the step of the checkpoint
    address: str | None  # the page of the model on the hub; None if it was not pushed
    is_adapter: bool
    # the words of the command that evaluates the model as the run did; None without one
    evaluation: Sequence[str] | None


def export_model_of(
    path: Path,
    out_dir: Path,
    *,
    step: int | None,
    warn: Callable[[str], None],
    adapter: bool = False,
    push: str | None = None,
    private: bool = False,
    dtype: DtypeName | None = "auto",
) -> Exported:
    """Write a checkpoint (default: the newest) as a Hugging Face model, or its `adapter`.

    The directory has a model card, README.md.

    Args:
        path: the run.
        out_dir: the directory to make.
        step: the step of the checkpoint; None: the newest one.
        warn: gets messages about damaged checkpoints, which are skipped.
        adapter: write only the adapter, for peft.
        push: the repository on the hub, [OWNER/]NAME, to which it is uploaded; None: none.
        private: make that repository private.
        dtype: the type of the weights; `auto`: that of the run; None: as the checkpoint has them.
            An adapter keeps its own.

    Raises:
        CheckpointError: the run has no such checkpoint.
        ConfigError: the directory is not empty, or nothing can be pushed from here.
        PushFailed: the hub did not take the model; the directory stays, if it was written.
    """
    run = RunDirectory.open(path)
    require_new_folder(out_dir)
    stored_config = load_run_config(run)
    checkpoint = (
        run.checkpoints.find(step) if step is not None else run.checkpoints.latest(warn=warn)
    )
    if checkpoint is None:
        raise CheckpointError(f"{run.path} has no checkpoint to export yet")
    repository = None
    if push is not None:
        repository = find_repository(push, private=private)
    elif private:
        raise ConfigError("private is about the repository of a push, and none is named")
    import torch

    from dapo.policy.lora import export_adapter, saved_weights
    from dapo.policy.model import export_model
    from dapo.start.resolve import resolve_auto

    config = resolve_auto(stored_config, training=False)
    loaded = _initial_model(config, checkpoint, adapter=adapter)
    card = read_card(
        run,
        checkpoint,
        name=out_dir.absolute().name if repository is None else repository.id,
        has_template=bool(getattr(loaded.tokenizer, "chat_template", None)),
        is_adapter=adapter,
    )
    files = {CARD_FILE: model_card(card)}
    if adapter:
        base = base_of(loaded.name).own_id or loaded.name
        # who downloads it has no use for a path of this machine
        if repository is not None and Path(base).is_absolute():
            base = Path(base).name
        export_adapter(checkpoint, loaded, out_dir, base=base, files=files)
    else:
        weights = saved_weights(checkpoint, loaded.model).named_tensors()
        written = None
        if dtype is not None:
            written = getattr(torch, config.model.dtype if dtype == "auto" else dtype)
        _name_turn_end(loaded, config.data)
        export_model(weights, loaded, out_dir, files=files, dtype=written)
    address = None
    if repository is not None:
        message = f"Step {card.step} of a run of dapo {dapo.__version__}"
        address = push_folder(out_dir, repository, message=message)
    evaluation = evaluation_words(card, model=str(out_dir))
    return Exported(config, card.step, address, adapter, evaluation)


def _name_turn_end(loaded: "LoadedModel", data: DataConfig) -> None:
    """Name the token after an assistant's turn in the generation settings, if it ended responses.

    Programs that read only the model's files would sample beyond it, to their length limit.
    """
    from dapo.data.prompts import PromptEncoder

    turn_end = PromptEncoder(loaded.tokenizer, data).turn_end
    settings = loaded.model.generation_config
    if turn_end is None or turn_end.token_id is None or settings is None:
        return
    if turn_end.token_id not in loaded.stop_ids:
        settings.eos_token_id = [*loaded.stop_ids, turn_end.token_id]


def _initial_model(config: Config, checkpoint: Path, *, adapter: bool) -> "LoadedModel":
    """Load the initial model, with its weights only if the export contains any of its tensors."""
    from dapo.policy.checkpoint import SavedWeights
    from dapo.policy.hf_io import stored_buffers
    from dapo.start.read import read_model

    # only what an adapter changes is read: all other weights are in the checkpoint
    is_merged = SavedWeights(checkpoint).lora is not None and not adapter
    loaded = read_model(config.model, config.train, "cpu" if is_merged else "meta")
    if is_merged or adapter or not stored_buffers(loaded.model):
        return loaded
    # a checkpoint has none of them: they are those of the initial model's files
    return read_model(config.model, config.train, "cpu")
