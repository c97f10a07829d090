"""`dapo clean`: frees the disk space of runs that have ended."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dapo.core.errors import CheckpointError, ConfigError
from dapo.core.terminal import print_json, print_text
from dapo.core.text import size
from dapo.runs.checkpoints import bytes_below, numbered
from dapo.runs.directory import RunDirectory
from dapo.runs.stages import StagesFolder, has_stages
from dapo.runs.stored_config import load_run_config

WHOLE = {"newest": 1, "weights": 0, "nothing": 0}
"""The checkpoints that stay as they are, by what `--keep` names."""


def clean_runs(paths: Sequence[Path], *, keep: str, apply: bool, as_json: bool) -> None:
    """Reduce or remove checkpoints of runs that do not train.

    Args:
        paths: run directories; the folder of a training in stages stands for all of its runs.
        keep: what stays as it is: a name in WHOLE.
        apply: write the changes; False: list them.
        as_json: print JSON instead of lines.
    """
    if keep not in WHOLE:
        raise ConfigError(f"--keep {keep}: expected one of {', '.join(WHOLE)}")
    runs = [RunDirectory.open(path) for path in _run_paths(paths)]
    if live := [str(run.path) for run in runs if run.holder() is not None]:
        raise CheckpointError(
            f"{', '.join(live)} is being trained; nothing was removed. Clean a run when it has"
            " ended"
        )
    checkpoints: list[dict[str, Any]] = []
    for run in runs:
        saved = numbered(run.checkpoints.folder)
        chosen = saved
        if keep != "nothing":
            chosen = run.checkpoints.with_optimizer_state(but_newest=WHOLE[keep])
        for path in chosen:
            if keep == "nothing":
                kept_bytes = 0
            else:
                kept_bytes = sum(
                    bytes_below(path, name) for name in ("weights*", "*.json", "prob*")
                )
            checkpoints.append(
                {
                    "run": str(run.path),
                    "step": int(path.name[5:]),
                    "bytes": bytes_below(path) - kept_bytes,
                }
            )
        if apply:
            with run.lock():
                if keep == "nothing":
                    run.checkpoints.drop_after(-1)
                elif chosen:
                    from dapo.start.run import keep_weights_only  # imports torch

                    keep_weights_only(run, load_run_config(run), chosen)
    total = sum(checkpoint["bytes"] for checkpoint in checkpoints)
    if as_json:
        print_json({"keep": keep, "applied": apply, "bytes": total, "checkpoints": checkpoints})
        return
    removed = "checkpoint" if keep == "nothing" else "optimizer state"
    for checkpoint in checkpoints:
        amount = size(checkpoint["bytes"])
        print_text(f"{checkpoint['run']}: {removed} of step {checkpoint['step']}: {amount}")
    does = "freed" if apply else "would be freed; nothing was removed, --yes does it"
    print_text(f"{size(total)} {does}" if checkpoints else "nothing to remove")


def _run_paths(paths: Sequence[Path]) -> list[Path]:
    """Return the runs that are named, with those of each training in stages."""
    run_paths: list[Path] = []
    for path in paths:
        run_paths += StagesFolder.open(path).run_paths if has_stages(path) else [path]
    return run_paths
