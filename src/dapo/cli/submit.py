"""`dapo submit`: writes a batch script that trains on a Slurm allocation, and submits it."""

import importlib.util
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
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
    new = run_dir or default_run_path(source, datetime.now())
    run_dir = (config_or_run if is_run else new).absolute()
    job = Job(
        run_dir=run_dir,
        config=folder_of(run_dir) / "config.yaml",
        work_dir=Path.cwd(),
        python=Path(sys.executable),
        use_ray=needs_ray(config, allocation),
        # a new run's are in its config
        overrides=(*(["--trust"] if trust else []), *overrides) if is_run else (),
        setup=setup,
    )
    script = batch_script(job, allocation)
    report = {
        "run": str(run_dir),
        "nodes": allocation.nodes,
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
    if report["job"] is None:
        folder = folder_of(Path(report["run"]))
        print_text(
            f"dry run, nothing is written or submitted: {plural(report['nodes'], 'node')}\n"
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
