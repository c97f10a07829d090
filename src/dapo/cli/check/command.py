"""`dapo check`: prints what a configuration would run and need, and with `--probe` what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dapo.cli.check.as_json import check_as_json
from dapo.cli.check.report import describe_estimate, describe_response_end
from dapo.cli.check.summary import explain
from dapo.config import Config
from dapo.core.errors import ConfigError
from dapo.core.terminal import print_json, print_text
from dapo.runs.directory import RunDirectory
from dapo.runs.manifest import Fork
from dapo.training.assemble.resolve import require_hardware
from dapo.training.start import open_judge


@dataclass(frozen=True)
class ProbeRequest:
    """The arguments of `--probe`."""

    problems: int | None = None
    """None: those of a few steps."""
    samples: int | None = None
    """None: rollout.group_size."""
    against: Path | None = None
    """A run with whose first steps the probe is compared."""


def check_config(
    config: Config, assume: Sequence[str], *, path: Path, probe: ProbeRequest | None, as_json: bool
) -> bool:
    """Print what there is to know about a configuration; whether it can run.

    Args:
        config: The configuration.
        assume: `NAME=VALUE` over the assumptions of the estimate.
        path: The file of the configuration; that of a fork says where the run was forked from.
        probe: Measure with the real model, too, if the configuration can run.
        as_json: Print one JSON object.
    """
    elsewhere = bool(assume) or config.uses_ray
    if probe is not None and assume:
        raise ConfigError("--probe measures on this machine, and --assume is for another: give one of them")
    with open_judge(config, elsewhere=elsewhere) as judge:
        needed_columns = judge.needed_columns
    if not elsewhere:
        require_hardware(config)
    if as_json:
        found = check_as_json(config, needed_columns, assume)
        if probe is not None and not found["problems"]:
            found["probe"] = _probe_as_json(config, probe)
        print_json(found)
        return not found["problems"]
    if (fork := Fork.of(RunDirectory(path.parent))) is not None:
        print_text(f"fork      of {fork.describe()}")
    for line in explain(config, needed_columns):
        print_text(line)
    print_text()
    for line in describe_response_end(config):
        print_text(line)
    faults = 0
    for line in describe_estimate(config, assume):
        print_text(line)
        faults += line.startswith("problem: ")
    if probe is not None and not faults:
        _print_probe(config, probe)
    return not faults


def _probe_as_json(config: Config, request: ProbeRequest) -> dict[str, Any]:
    from dapo.cli.check.probe import probe_as_json, run_probe

    measured = run_probe(config, problems=request.problems, samples=request.samples)
    return probe_as_json(measured, request.against)


def _print_probe(config: Config, request: ProbeRequest) -> None:
    from dapo.cli.check.probe import describe_against, describe_probe, run_probe

    print_text()
    measured = run_probe(config, problems=request.problems, samples=request.samples)
    for line in describe_probe(config, measured):
        print_text(line)
    if request.against is not None:
        print_text()
        for line in describe_against(measured, request.against):
            print_text(line)
