"""`dapo check`: prints the facts of a configuration, its memory and, on request, a probe.

As in `analysis/check/facts.py`, what imports torch is imported when the data is read.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.analysis.check.facts import PROBE_ADVICE, CheckedFacts, check_as_json, run_seconds
from dapo.analysis.check.summary import (
    explain,
    in_short,
)
from dapo.cli.formatting import say
from dapo.config import Config
from dapo.core.terminal import print_json, stdout_to_stderr
from dapo.core.text import size
from dapo.runs.console import SafeConsole
from dapo.runs.directory import RunDirectory
from dapo.runs.manifest import Fork
from dapo.start.check import check

if TYPE_CHECKING:
    from dapo.analysis.probe import Probe


def check_config(
    config: Config,
    *,
    path: Path,
    probe: bool,
    problems: int | None,
    samples: int | None,
    against: Path | None,
    verbose: bool,
    as_json: bool,
    stage: str | None = None,
    is_later_stage: bool = False,
) -> bool:
    """Describe a configuration, the verdict first; return True if it can run.

    Args:
        config: the configuration to describe.
        path: its file; the origin of a fork is printed if the file is in the fork's directory.
        probe: also measure two steps of the real model.
        problems: the least number of problems that the probe judges; None: the default.
        samples: responses to each problem of the probe; None: `rollout.group_size`.
        against: a run whose first steps are compared with the probe.
        verbose: print everything that is known.
        as_json: print JSON instead of lines.
        stage: the name of the stage that it is; None: a run of its own.
        is_later_stage: it trains the model of an earlier stage.
    """
    result: dict[str, Any] = {}
    with (
        # the module of a function that an option names may print
        stdout_to_stderr(as_json),
        check(config, elsewhere=config.uses_ray, starts=False, has_run=is_later_stage) as checked,
    ):
        facts = CheckedFacts.of(checked)
        measured = None
        if probe and not facts.faults:
            from dapo.cli.check.probe import run_probe

            measured = run_probe(checked, problems, samples)
        if as_json:
            result = check_as_json(facts)
            if measured is not None:
                from dapo.cli.check.probe import probe_as_json

                result["probe"] = probe_as_json(measured[1], against)
                result["verdict"] = facts.verdict(measured[1])
                result["seconds"] = run_seconds(facts, measured[1])
        else:
            _print_lines(facts, path, measured, against, verbose=verbose, stage=stage)
    if as_json:
        print_json(result)
    return not facts.faults


def _print_lines(
    facts: CheckedFacts,
    path: Path,
    measured: "tuple[Config, Probe] | None",
    against: Path | None,
    *,
    verbose: bool,
    stage: str | None,
) -> None:
    """Print the verdict and the problems, then what a first look needs, or all (`verbose`)."""
    from dapo.analysis.check.estimate import hardware_profile_for
    from dapo.analysis.check.report import describe_estimate, describe_prompts

    console = SafeConsole()
    probe = None if measured is None else measured[1]
    verdict = facts.verdict(probe)
    if stage is not None:
        verdict = f"stage {stage}: {verdict.removesuffix(PROBE_ADVICE)}"  # stages have no --probe
    say(console, verdict, style="bold")
    if (fork := Fork.of(RunDirectory(path.parent))) is not None:
        say(console, f"fork of {fork.describe()}")
    for fault in facts.faults:
        say(console, f"problem: {fault}")
    config = facts.config
    notes = list(describe_prompts(config, facts.problems))
    if verbose:
        lines = [*explain(config, (facts.data, facts.num_removed)), "", *notes]
        estimate = describe_estimate(config, hardware_profile_for(config))
        lines += [line for line in estimate if not line.startswith("problem: ")]
        lines += ["", *_disk_lines(facts)]
    else:
        lines = list(in_short(config, facts.data, facts.num_removed))
        # the first note names the end tokens, which are right where nothing follows
        lines += notes[1:]
        lines += facts.notes
    if measured is not None:
        from dapo.cli.check.probe import describe_probe, summarize_probe

        if verbose:
            lines += ["", *describe_probe(*measured)]
        else:
            lines += summarize_probe(measured[1])
    if against is not None and measured is not None:
        from dapo.cli.check.probe import compare_probe

        lines += ["", *compare_probe(measured[1], against)]
    for line in lines:
        _print_aligned(console, line)
    if not verbose:
        say(console, "--verbose shows the step, memory and disk by part, and the paper's values")


def _print_aligned(console: SafeConsole, line: str) -> None:
    """Print a line, and what does not fit under the text behind its label."""
    label = re.match(r" *(?:\S+(?: \S+)* {2,})?", line)
    assert label is not None
    if label.end() > console.width // 2:
        say(console, line)
    else:
        say(console, line[label.end() :], label=label[0], indent=label.end())


def _disk_lines(facts: CheckedFacts) -> list[str]:
    """Return the parts of the run directory, the largest size and the size of an export."""
    from dapo.analysis.check.disk import export_bytes

    disk = facts.disk()
    largest = facts.disk(in_training=True)
    if disk is None or largest is None or facts.estimate is None:
        return []
    lines = ["disk, after the run:"]
    lines += [f"  {size(count):>10}  {name}" for name, count in disk.items()]
    lines.append(
        f"  {size(sum(disk.values())):>10}  total; at most {size(sum(largest.values()))} while it"
        f" trains; an export takes {size(export_bytes(facts.estimate))}"
    )
    return lines
