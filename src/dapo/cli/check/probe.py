"""`dapo check --probe`: prints measured values next to estimates or a run's first steps."""

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dapo.analysis.check.estimate import hardware_profile_for
from dapo.analysis.check.report import estimate_of
from dapo.analysis.probe import (
    FIRST_STEPS,
    TOLERANCE,
    Probe,
    compare_with_run,
    default_problems,
    probe_run,
)
from dapo.config import Config
from dapo.core.memory import GIB
from dapo.core.text import with_interval
from dapo.runs.console import progress
from dapo.runs.directory import RunDirectory
from dapo.start.check import Checked, read_data
from dapo.start.read import read
from dapo.start.resolve import resolve

_BAR = 30


def run_probe(checked: Checked, problems: int | None, samples: int | None) -> tuple[Config, Probe]:
    """Probe a configuration on this machine, with a progress bar on the standard error.

    Returns the resolved options, too.
    """
    inputs = read(resolve(checked), read_data(checked))
    with progress("probe") as show:
        show(0, problems or default_problems(inputs.config))
        probe = probe_run(inputs, problems=problems, samples=samples, on_progress=show)
    return inputs.config, probe


def probe_as_json(probe: Probe, against: Path | None) -> dict[str, Any]:
    """Return a probe as JSON values, with its comparison with a run if one is given."""
    result: dict[str, Any] = asdict(probe)
    if against is not None:
        checks = compare_with_run(probe, RunDirectory.open(against))
        result["against"] = {
            "run": str(against),
            "values": [
                asdict(check) | {"ratio": check.ratio, "is_close": check.is_close}
                for check in checks
            ],
        }
    return result


def summarize_probe(probe: Probe) -> Iterator[str]:
    """Yield the accuracy, the truncated responses and the seconds of a step, and the findings."""
    facts = [f"{probe.samples} responses to each problem"]
    if probe.accuracy is not None:
        facts.append(f"accuracy {probe.accuracy:.1%}")
    facts.append(f"{probe.truncated:.1%} truncated")
    if probe.step_s is not None:
        facts.append(f"{_number(probe.step_s)} s per step")
    if probe.verifier_errors:
        facts.append(f"{probe.verifier_errors} without a verdict")
    yield f"probe     {', '.join(facts)}"
    for finding in probe.findings:
        if finding.severity != "note":
            yield f"{finding.severity}: {finding.one_line()}"


def describe_probe(config: Config, probe: Probe) -> Iterator[str]:
    """Yield lines about pass rates, responses, lengths, speed and memory; `config` is resolved."""
    yield f"probe of {probe.problems} problems x {probe.samples} responses with the real model:"
    if probe.accuracy is not None:
        yield f"  accuracy    {with_interval(probe.accuracy, probe.accuracy_interval)}"
        yield "  pass rate   problems"
        for tenth in probe.histogram:
            bar = "#" * round(_BAR * tenth.fraction)
            interval = f"({tenth.low:.0%} to {tenth.high:.0%})"
            share = f"{tenth.problems:>4}  {tenth.fraction:>4.0%}"
            yield f"  {tenth.name:12}{share} {interval:14} {bar}".rstrip()
    yield f"  keep rate   {_keep_rate(probe)}"
    groups = probe.groups_per_step
    num_groups = config.rollout.prompts_per_step
    yield (
        f"  per step    {groups:,.0f} groups = {groups * probe.group_size:,.0f} responses, for"
        f" {num_groups} that train"
    )
    quantiles = ", ".join(
        f"{name} {value:,.0f}" for name, value in probe.response_quantiles.items()
    )
    yield f"  length      {probe.response_tokens:,.1f} tokens on average; quantiles: {quantiles}"
    yield f"  truncated   {with_interval(probe.truncated, probe.truncated_interval)}"
    if probe.verifier_errors:
        yield f"  errors      {probe.verifier_errors} responses have no verdict"
    for finding in probe.findings:
        yield f"  {finding.severity}: {finding.one_line()}"
    yield ""
    yield from _speed(config, probe)


def compare_probe(probe: Probe, run: Path) -> Iterator[str]:
    """Yield the measurements next to those of a run's first steps."""
    checks = compare_with_run(probe, RunDirectory.open(run))
    yield f"compared with steps 1 to {FIRST_STEPS} of {run}:"
    yield f"  {'':24}{'probe':>12}{'measured':>12}{'ratio':>8}"
    for check in checks:
        verdict = "" if check.is_close else f"  differs by more than {TOLERANCE:.0%}"
        yield (
            f"  {check.name:24}{_number(check.probe):>12}{_number(check.measured):>12}"
            f"{check.ratio:>8.2f}{verdict}"
        )
    close = sum(check.is_close for check in checks)
    yield f"  {close} of {len(checks)} within {TOLERANCE:.0%}"


def _keep_rate(probe: Probe) -> str:
    measured = f"{probe.kept:.1%} of the judged groups would train"
    if probe.expected_keep_rate is None:
        return measured
    rate = with_interval(probe.expected_keep_rate, probe.expected_keep_interval)
    expected = f"{rate} expected for groups of {probe.group_size}"
    if probe.samples < probe.group_size:
        expected += f", roughly: there are only {probe.samples} responses per problem"
    if math.isclose(probe.expected_keep_rate, probe.kept):
        return expected
    return f"{expected}; here {measured}"


def _speed(config: Config, probe: Probe) -> Iterator[str]:
    """Yield the seconds of a step's phases, and the peak of memory next to its estimate."""
    estimate, _ = estimate_of(config, hardware_profile_for(config))
    if estimate is not None and not estimate.config.is_multiprocess:
        memory = sum(estimate.process_memory().values()) / GIB
    else:
        memory = None
    rate = probe.update_tokens_per_s
    trained = "no group carries a signal, so none was made"
    if rate is not None:
        trained = f"{rate:,.0f} trained tokens/s"
    overlap = "sampling and updates overlap" if config.samples_ahead else ""
    yield "  one step"
    for name, measured, note in (
        ("load weights, s", probe.load_s, ""),
        ("generation, s", probe.generate_s, f"{probe.tokens_per_s:,.0f} tokens/s"),
        ("update, s", probe.update_s, trained),
        ("total, s", probe.step_s, overlap),
        (
            "peak memory, GiB",
            probe.peak_memory_gib,
            "" if memory is None else f"{_number(memory)} estimated",
        ),
    ):
        yield f"  {name:20}{_number(measured):>10}  {note}".rstrip()


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{1 if value >= 10 else 3}f}"
