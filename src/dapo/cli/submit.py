"""`dapo submit`: writes a batch script that trains on a Slurm allocation, and submits it."""

import importlib.util
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from math import ceil
from pathlib import Path
from typing import Any

from dapo.analysis.check.summary import explain
from dapo.config import Config, dump_config, find_config, load_config
from dapo.core.errors import CheckpointError, ConfigError
from dapo.core.files import atomic_write_text, open_no_link
from dapo.core.terminal import print_text
from dapo.core.text import plural
from dapo.distributed.slurm.job import (
    Allocation,
    Job,
    batch_script,
    folder_of,
    require_sbatch,
    submit,
)
from dapo.runs.directory import RunDirectory, default_run_path, require_new_run
from dapo.start.idle_gpus import idle_gpus

JOBS = "jobs"  # the file with the ids of a script's jobs, one per line


def submit_run(
    config_or_run: Path,
    overrides: Sequence[str],
    allocation: Allocation,
    *,
    run_dir: Path | None,
    setup: tuple[str, ...],
    dry_run: bool,
    trust: bool = False,
) -> dict[str, Any]:
    """Check the configuration, write the script next to the run, and submit it.

    Args:
        config_or_run: a configuration, or a run to resume.
        overrides: options, `key=value`.
        allocation: what the job asks Slurm for.
        run_dir: the directory of the run; None: a new one in `runs`.
        setup: shell lines of the script before the command.
        dry_run: write nothing and submit nothing.
        trust: import modules from the folders that a run's manifest names.

    Returns JSON values: the run, nodes, the script's text and path, and the job's id; path and id
    are None for a dry run.
    """
    is_run = RunDirectory.is_run(config_or_run)
    if is_run and run_dir is not None:
        raise ConfigError(
            f"{config_or_run} is a run, which continues in its directory; leave --run-dir out"
        )
    source = RunDirectory.open(config_or_run).config if is_run else find_config(config_or_run)
    config = load_config(source, overrides)
    list(explain(config))  # reads local data, and so finds its errors
    use_ray = needs_ray(config, allocation)
    placed = config
    if use_ray and not config.uses_ray:
        placed = config.model_copy(update={"launcher": "ray:auto"})
    require_placeable(placed, allocation)
    new = run_dir or default_run_path(source, datetime.now())
    run_dir = (config_or_run if is_run else new).absolute()
    job = Job(
        run_dir=run_dir,
        config=folder_of(run_dir) / "config.yaml",
        work_dir=Path.cwd(),
        python=Path(sys.executable),
        use_ray=use_ray,
        # a new run's are in its config
        overrides=(*(["--trust"] if trust else []), *overrides) if is_run else (),
        setup=setup,
    )
    script = batch_script(job, allocation)
    report = {
        "run": str(run_dir),
        "nodes": allocation.nodes,
        "notes": idle_gpus(placed, allocation.gpus or 0),
        "script": script,
        "script_path": None,
        "job": None,
    }
    if dry_run:
        return report
    require_sbatch()
    if not is_run:
        require_new_run(run_dir)
        if (submitted := job.folder / JOBS).is_file():
            number = submitted.read_text(encoding="ascii").split()[-1]
            again = f"sbatch {shlex.quote(str(job.folder / 'job.sh'))}"
            advice = f"submit it again with `{again}` or choose another --run-dir"
            raise CheckpointError(f"{job.folder} was submitted already, as job {number}; {advice}")
    path = _write(job, script, None if is_run else config)
    number = submit(path)
    with open_no_link(job.folder / JOBS, "a", encoding="ascii") as jobs:
        jobs.write(f"{number}\n")
    return {**report, "script_path": str(path), "job": number, "log": f"{job.folder}/{number}.log"}


def print_submission(report: Mapping[str, Any]) -> None:
    """Print the job with the commands to stop and resume it, or what a dry run would submit.

    The script of a dry run is alone on the standard output, for a file.
    """
    notes = "".join(f"  note             {note}\n" for note in report["notes"])
    if report["job"] is None:
        folder = folder_of(Path(report["run"]))
        print_text(
            f"dry run, nothing is written or submitted: {plural(report['nodes'], 'node')}\n"
            f"{notes}"
            f"  run              {report['run']}\n"
            f"  folder           {folder}, for job.sh and its log\n"
            f"  command          sbatch {shlex.quote(str(folder / 'job.sh'))}\n"
            "  job.sh:",
            file=sys.stderr,
        )
        print_text(report["script"], end="")
        return
    number = report["job"]
    print_text(
        f"job {number}: {plural(report['nodes'], 'node')}, run {report['run']}\n"
        f"{notes}"
        f"  log              {report['log']}\n"
        f"  script           {report['script_path']}\n"
        f"  stop it, saved   scancel --batch --signal=TERM {number}\n"
        f"  continue it      sbatch {shlex.quote(report['script_path'])}"
    )


def _write(job: Job, script: str, config: Config | None) -> Path:
    """Write the script and a copy of the configuration, which may change before the job starts."""
    path = job.folder / "job.sh"
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        if config is not None:
            atomic_write_text(job.config, dump_config(config))
        atomic_write_text(path, script)
    except OSError as error:
        raise ConfigError(f"cannot write to {job.folder}: {error.strerror}") from None
    return path


def require_placeable(config: Config, allocation: Allocation) -> None:
    """Raise ConfigError if the processes of a run have no place on the GPUs of an allocation."""
    if config.train.device == "cpu" or allocation.gpus is None:
        return
    gpus = allocation.gpus
    per_node = allocation.gpus_per_node
    size = config.gpus_per_engine
    parts = [f"distributed.trainer_ranks={config.distributed.trainer_ranks}"]
    if config.engine_processes:
        parts.append(f"rollout.engines={config.engine_processes}")
    if size > 1:
        parts.append(f"rollout.vllm.tensor_parallel={size}")
    needed = config.gpus_needed
    demand = f"{' '.join(parts)} needs {plural(needed, 'GPU')}"
    if not gpus:
        named = config.train.device == "cuda" or config.rollout.engine == "vllm"
        if named or config.distributed.gpus_per_process:
            raise ConfigError(
                f"{demand}, and the job requests none; add --gpus-per-node NUMBER, at least"
                f" {ceil(needed / allocation.nodes)} for --nodes {allocation.nodes}, or set"
                " train.device=cpu"
            )
        return
    if size > per_node:
        raise ConfigError(
            f"rollout.vllm.tensor_parallel={size}: the GPUs of an engine are on one node, and"
            f" --gpus-per-node {per_node} gives {per_node}; lower the former or raise the latter"
        )
    if needed > gpus:
        fitting = f"request --nodes {ceil(needed / per_node)}, or lower those options"
        if not config.uses_ray:
            fitting = f"request --gpus-per-node {needed}, or lower those options"
        raise ConfigError(
            f"{demand}, and --nodes {allocation.nodes} --gpus-per-node {per_node} gives {gpus};"
            f" {fitting}"
        )
    places = allocation.nodes * (per_node // size)
    if config.uses_ray and config.rollout.engine == "vllm" and config.engine_processes > places:
        raise ConfigError(
            f"rollout.engines={config.engine_processes} of {size} GPUs, each on one node:"
            f" --nodes {allocation.nodes} --gpus-per-node {per_node} has room for {places}; set"
            f" rollout.engines={places}, or request more nodes"
        )


def needs_ray(config: Config, allocation: Allocation) -> bool:
    """Return True if the job starts Ray: on several nodes, or with launcher=ray.

    Raises ConfigError if Ray is missing.
    """
    if allocation.nodes == 1 and config.launcher == "local":
        return False
    if importlib.util.find_spec("ray") is None:
        why = f"launcher={config.launcher}" if config.uses_ray else f"--nodes {allocation.nodes}"
        raise ConfigError(f"{why} needs Ray, which is not installed: pip install ray")
    return True
