"""`dapo check`: prints the facts of a configuration, its memory and, on request, a probe.

What imports torch is imported when the data is read, so that a wrong option is refused at once.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.cli.check.summary import (
    DataFacts,
    changed_paper_values,
    data_facts,
    explain,
)
from dapo.config import Config
from dapo.core.errors import ConfigError
from dapo.core.terminal import print_json, print_text
from dapo.runs.directory import RunDirectory
from dapo.runs.manifest import Fork
from dapo.start.check import Checked, check
from dapo.start.ignored_options import ignored_options
from dapo.types import Problem

if TYPE_CHECKING:
    from dapo.cli.check.estimate import ResourceEstimate


def check_config(
    config: Config,
    *,
    path: Path,
    probe: bool,
    problems: int | None,
    samples: int | None,
    against: Path | None,
    as_json: bool,
) -> bool:
    """Describe a configuration, its problems first; return True if it can run.

    Args:
        config: the configuration to describe.
        path: its file; the origin of a fork is printed if the file is in the fork's directory.
        probe: also measure two steps of the real model.
        problems: the least number of problems that the probe judges; None: the default.
        samples: responses to each problem of the probe; None: `rollout.group_size`.
        against: a run whose first steps are compared with the probe.
        as_json: print JSON instead of lines.
    """
    with check(config, elsewhere=config.uses_ray, starts=False) as checked:
        if as_json:
            result = check_as_json(checked)
            faults = result["problems"]
        else:
            if (fork := Fork.of(RunDirectory(path.parent))) is not None:
                print_text(f"fork      of {fork.describe()}")
            faults = _print_lines(checked)
        if probe and not faults:
            from dapo.cli.check.probe import describe_probe, probe_as_json, run_probe

            resolved, measured = run_probe(checked, problems, samples)
            if as_json:
                result["probe"] = probe_as_json(measured, against)
            else:
                print_text()
                for line in describe_probe(resolved, measured, against):
                    print_text(line)
    if as_json:
        print_json(result)
    return not faults


def _print_lines(checked: Checked) -> list[str]:
    """Print the description, problems first, and return the problems."""
    config = checked.config
    data, num_removed = data_facts(checked)
    from dapo.cli.check.estimate import hardware_profile_for
    from dapo.cli.check.report import describe_estimate, describe_prompts

    description = explain(config, (data, num_removed))
    estimate = describe_estimate(config, hardware_profile_for(config))
    lines = [*description, "", *describe_prompts(config, _problems(data)), *estimate]
    faults = [f"problem: {fault}" for fault in missing_hardware(config)]
    faults += [line for line in lines if line.startswith("problem: ")]
    for line in [
        *faults,
        *([""] if faults else []),
        *(line for line in lines if line not in faults),
    ]:
        print_text(line)
    return faults


def missing_hardware(config: Config) -> list[str]:
    """Return the hardware that a local run requires and this machine lacks, as sentences."""
    from dapo.start.resolve import require_hardware

    try:
        if not config.uses_ray:
            require_hardware(config)
    except ConfigError as error:
        return [str(error)]
    return []


def check_as_json(checked: Checked) -> dict[str, Any]:
    """Return the result of `dapo check` as JSON values; `problems` is empty if it can run.

    Raises DataError and RewardError, as `explain` does.
    """
    config = checked.config
    data, num_removed = data_facts(checked)
    from dapo.cli.check.estimate import hardware_profile_for
    from dapo.cli.check.report import describe_prompts, estimate_of, find_problems

    estimate, note = estimate_of(config, hardware_profile_for(config))
    rollout = config.rollout
    faults = missing_hardware(config)
    if note is not None and note.startswith("problem: "):
        faults.append(note.removeprefix("problem: "))
    if estimate is not None:
        faults += find_problems(estimate)
    return {
        "config": config.model_dump(mode="json"),
        "data": (
            {facts.role: _data_json(facts) for facts in data} | {"removed_from_train": num_removed}
        ),
        "step": {
            "prompts": rollout.prompts_per_step,
            "responses": rollout.prompts_per_step * rollout.group_size,
            "max_groups": config.max_groups_per_step,
            "updates": config.updates_per_step,
        },
        "ignored": [
            dict(zip(("option", "why"), line.split(": ", 1), strict=True))
            for line in ignored_options(config)
        ],
        "differs_from_paper": [
            {"option": name, "value": value, "paper": paper}
            for name, value, paper in changed_paper_values(config)
        ],
        "notes": list(describe_prompts(config, _problems(data))),
        "estimate": None if estimate is None else _estimate_json(estimate),
        "problems": faults,
    }


def _problems(data: Sequence[DataFacts]) -> list[Problem]:
    return [problem for facts in data for problem in facts.problems or ()]


def _data_json(data: DataFacts) -> dict[str, Any]:
    problems = data.problems
    return {
        "source": data.label,
        "problems": None if problems is None else len(problems),
        "distinct": None if problems is None else data.num_distinct,
        "sources": dict(data.sources),
        "warnings": list(data.warnings),
    }


def _estimate_json(estimate: "ResourceEstimate") -> dict[str, Any]:
    """Return counts and bytes; memory is by part of each process."""
    if not estimate.config.is_multiprocess:
        memory = {"process": estimate.process_memory()}
    else:
        memory = {"trainer": estimate.trainer_memory(), "engine": estimate.engine_memory()}
    return {
        "parameters": estimate.dimensions.parameters,
        "devices": estimate.devices,
        "memory_bytes": memory,
        "memory_available_bytes": estimate.available,
        "weight_sync_bytes": estimate.sync_bytes,
        "generated_responses_per_step": estimate.generated_responses,
        "assumed": asdict(estimate.profile),
    }
