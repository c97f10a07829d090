"""Writes checkpoints as Hugging Face models; torch is imported once run and place are checked."""

from collections.abc import Callable
from pathlib import Path

from dapo.config import Config
from dapo.core.errors import CheckpointError
from dapo.core.model_files import require_new_folder
from dapo.runs.checkpoints import step_of
from dapo.runs.directory import RunDirectory
from dapo.runs.stored_config import load_run_config


def exported_run(option: str, name: str, log: Callable[[str], None]) -> str:
    """Return the directory with the exported newest checkpoint of a run that an option names.

    Raises CheckpointError.
    """
    run = RunDirectory.open(name)
    checkpoint = run.checkpoints.latest(warn=log)
    if checkpoint is None:
        raise CheckpointError(f"{option}={name} has no checkpoint yet")
    exported = run.exported_folder / checkpoint.name
    if not exported.is_dir():
        export_model_of(run.path, exported, step=step_of(checkpoint), warn=log)
    log(f"{option}: {name} is exported to {exported}")
    return str(exported)


def export_model_of(
    path: Path,
    out_dir: Path,
    *,
    step: int | None,
    warn: Callable[[str], None],
    adapter: bool = False,
) -> tuple[Config, int]:
    """Write a checkpoint (default: the newest) as a Hugging Face model, or its `adapter`.

    Args:
        path: the run.
        out_dir: the directory to make.
        step: the step of the checkpoint; None: the newest one.
        warn: gets messages about damaged checkpoints, which are skipped.
        adapter: write only the adapter, for peft.

    Returns the run's options and the step of the checkpoint. Raises CheckpointError if the run has
    no such checkpoint.
    """
    run = RunDirectory.open(path)
    require_new_folder(out_dir)
    stored_config = load_run_config(run)
    checkpoint = (
        run.checkpoints.find(step) if step is not None else run.checkpoints.latest(warn=warn)
    )
    if checkpoint is None:
        raise CheckpointError(f"{run.path} has no checkpoint to export yet")
    from dapo.policy.lora import export_adapter, saved_weights
    from dapo.policy.model import export_model
    from dapo.start.read import read_model
    from dapo.start.resolve import resolve_auto

    config = resolve_auto(stored_config, training=False)
    loaded = read_model(config.model, config.train, "cpu")
    if adapter:
        export_adapter(checkpoint, loaded, out_dir)
    else:
        export_model(saved_weights(checkpoint, loaded.model).named_tensors(), loaded, out_dir)
    return config, step_of(checkpoint)
