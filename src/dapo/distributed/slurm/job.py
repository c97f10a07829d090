"""Batch scripts for Slurm, which `dapo submit` writes and passes to sbatch."""

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import dapo
from dapo.config.run_options import START_TIMEOUT_S
from dapo.core.errors import ConfigError, LaunchError

JOB = Path(__file__).with_name("job.sh")  # the body of every script, after the variables of the job
SBATCH_TIMEOUT_S = 60.0
_NAME = re.compile(r"[\w.,:@+=/\[\]-]+", re.ASCII)
_TIME = re.compile(r"(?:(\d+)-)?(\d+(?::\d+){0,2})", re.ASCII)


@dataclass(frozen=True)
class Allocation:
    """The resources that a job requests from Slurm."""

    nodes: int = 1
    gpus_per_node: int = 0
    cpus_per_node: int | None = None  # none: whole nodes, with all their memory
    # the time limit in sbatch's format, `2-12:00:00`; None: the partition's
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    # how long before the time limit Slurm sends the signal on which the run saves
    stop_before_s: int = 120
    options: tuple[str, ...] = ()  # further options of sbatch, `--qos=high`

    @property
    def gpus(self) -> int | None:
        """The GPUs of the job; None where `options` request them, in one of Slurm's many ways."""
        if any("gpu" in option or "gres" in option for option in self.options):
            return None
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Job:
    """The job of an allocation. All paths are absolute and the same on every node."""

    run_dir: Path
    config: Path  # the configuration of a run that does not exist yet
    work_dir: Path
    python: Path
    use_ray: bool
    overrides: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()  # shell lines that run first: `module load cuda`
    start_timeout_s: float = START_TIMEOUT_S

    @property
    def folder(self) -> Path:
        """Return the folder of script, logs and config; a run's own directory must be new."""
        return folder_of(self.run_dir)


def folder_of(run_dir: Path) -> Path:
    """Return `runs/NAME.slurm` for `runs/NAME`."""
    return run_dir.with_name(f"{run_dir.name}.slurm")


def batch_script(job: Job, allocation: Allocation) -> str:
    """Return the script. Raises ConfigError for a value that Slurm would refuse or misread."""
    variables = {
        "run_dir": str(job.run_dir),
        "config": str(job.config),
        "state": str(job.folder),
        "python": str(job.python),
        "use_ray": "yes" if job.use_ray else "",
        "start_timeout_s": f"{job.start_timeout_s:.0f}",
    }
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {directive}" for directive in directives(job, allocation)),
        (
            f"# Written by `dapo submit` (dapo {dapo.__version__}). However the job ends, this"
            " continues the run:"
        ),
        f"#   sbatch {shlex.quote(str(job.folder / 'job.sh'))}",
        "",
        *(f"{name}={shlex.quote(value)}" for name, value in variables.items()),
        f"overrides=({' '.join(map(shlex.quote, job.overrides))})",
        f"cd {shlex.quote(str(job.work_dir))} || exit 1",
        *(line for setup in job.setup for line in _setup_lines(setup)),
    ]
    return "\n".join(lines) + "\n" + JOB.read_text(encoding="utf-8")


def directives(job: Job, allocation: Allocation) -> list[str]:
    """Return the options on the `#SBATCH` lines."""
    if allocation.time is not None and seconds_of(allocation.time) <= allocation.stop_before_s:
        raise ConfigError(
            f"--time {allocation.time} ends before the signal that comes {allocation.stop_before_s}"
            " s earlier (--stop-before) could stop the run; give it more time"
        )
    output = str(job.folder).replace("%", "%%") + "/%j.log"
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"dapo-{job.run_dir.name}")
    lines = [f"--job-name={name}", f"--nodes={allocation.nodes}", "--ntasks-per-node=1"]
    cpus = allocation.cpus_per_node
    lines += ["--exclusive", "--mem=0"] if cpus is None else [f"--cpus-per-task={cpus}"]
    if allocation.gpus_per_node:
        lines.append(f"--gpus-per-node={allocation.gpus_per_node}")
    for option in ("time", "partition", "account"):
        if (value := getattr(allocation, option)) is not None:
            lines.append(f"--{option}={_name(option, value)}")
    return [
        *lines,
        f"--output={_quoted(output)}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{allocation.stop_before_s}",  # not TERM, which scancel sends as well
        *map(_option, allocation.options),
    ]


def seconds_of(time: str) -> float:
    """Return the seconds of a time limit of sbatch; 0 means none. Raises ConfigError."""
    if time.lower() in ("infinite", "unlimited"):
        return float("inf")
    if (match := _TIME.fullmatch(time)) is not None:
        days, clock = match.groups()
        fields = [int(field) for field in clock.split(":")]
        if days is None and len(fields) < 3:
            fields.insert(0, 0)  # MINUTES, MINUTES:SECONDS
        hours, minutes, seconds = [*fields, 0, 0][:3]
        return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) or float("inf")
    raise ConfigError(
        f"--time {time!r}: expected MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS or"
        " DAYS-HOURS[:MINUTES[:SECONDS]], for example 12:00:00 or 2-0"
    )


def require_sbatch() -> None:
    """Raise LaunchError if sbatch is not on PATH."""
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "sbatch is not on PATH: run dapo submit on a login node of a Slurm cluster; --dry-run"
            " prints the script, and dapo train trains here"
        )


def submit(script: Path) -> str:
    """Submit a script with sbatch; returns the job's id.

    Raises LaunchError with sbatch's error message.
    """
    command = ["sbatch", "--parsable", str(script)]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=SBATCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        late = f"sbatch gave no answer within {SBATCH_TIMEOUT_S:g} s"
        raise LaunchError(f"{late}; squeue shows whether it has a job") from None
    if answer.returncode:
        reason = " ".join(answer.stderr.split()) or f"exit code {answer.returncode}"
        raise LaunchError(f"sbatch refused the job: {reason}; the script is {script}")
    return answer.stdout.strip().split(";")[0]  # JOB or JOB;CLUSTER


def _setup_lines(setup: str) -> list[str]:
    """Return the user's shell lines, unchanged; the job ends if they fail."""
    message = shlex.quote(f"dapo submit: this failed: {' '.join(setup.split())}")
    return ["{", setup, "} || {", f"    echo {message} >&2", "    exit 1", "}"]


def _name(option: str, value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ConfigError(f"--{option} {value!r}: expected a name without spaces and quotes")
    return value


def _quoted(text: str) -> str:
    """Quote for a #SBATCH line: Slurm reads quotes and backslashes like a shell, not dollars."""
    if "\n" in text:
        raise ConfigError(
            f"{text!r} contains a line break, which a batch script's options cannot hold"
        )
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _option(text: str) -> str:
    if not text.startswith("-") or "\n" in text:
        raise ConfigError(
            f"--sbatch {text!r}: expected an option of sbatch, for example --sbatch=--qos=high"
        )
    return text
