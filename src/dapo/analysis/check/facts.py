"""What is known of a configuration before it runs, for `dapo check` and `dapo.check` in Python.

What imports torch is imported when the data is read, so that a wrong option is refused at once.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from dapo.analysis.check.summary import DataFacts, data_facts
from dapo.config import Config
from dapo.config.option_fields import changed_paper_values
from dapo.core.errors import ConfigError, DataError
from dapo.core.memory import GIB
from dapo.core.text import plural, size
from dapo.start.check import Checked
from dapo.start.ignored_options import ignored_options
from dapo.types import Problem

if TYPE_CHECKING:
    from dapo.analysis.check.estimate import ResourceEstimate
    from dapo.analysis.probe import Probe


PROBE_ADVICE = "; --probe measures the time"
"""The end of a verdict without a probe."""


@dataclass(frozen=True)
class CheckedFacts:
    """What is known of a configuration before it runs."""

    config: Config
    data: Sequence[DataFacts]
    num_removed: int  # the training problems that are in the evaluation data, too
    estimate: "ResourceEstimate | None"  # None if the model's sizes are not known
    faults: Sequence[str]  # the reasons why it cannot run; empty if it can
    length_notes: Sequence[str] = ()  # how many rows are left out for their length

    @classmethod
    def of(cls, checked: Checked) -> Self:
        """Read the data and estimate the memory. Raises DataError and RewardError as `explain`."""
        config = checked.config
        data, num_removed = data_facts(checked)
        rows = data[0].problems
        if rows is not None:
            config = config.with_steps_of_epochs(len(rows) - num_removed)
        from dapo.analysis.check.estimate import hardware_profile_for
        from dapo.analysis.check.lengths import describe_lengths
        from dapo.analysis.check.report import estimate_of, find_problems

        estimate, note = estimate_of(config, hardware_profile_for(config))
        faults = missing_hardware(config)
        if note is not None and note.startswith("problem: "):
            faults.append(note.removeprefix("problem: "))
        if estimate is not None:
            faults += find_problems(estimate)
        length_notes = list[str]()
        try:
            length_notes += describe_lengths(config, data)
        except DataError as error:
            faults.append(str(error))
        return cls(config, data, num_removed, estimate, faults, length_notes)

    @property
    def problems(self) -> list[Problem]:
        """All problems that are here."""
        return [problem for facts in self.data for problem in facts.problems or ()]

    @property
    def notes(self) -> list[str]:
        """The rows left out, what `auto` has chosen for this machine, and what of it stays idle."""
        if self.estimate is None:
            return list(self.length_notes)
        from dapo.analysis.check.report import notes_of

        return [*self.length_notes, *notes_of(self.estimate)]

    @property
    def eval_problems(self) -> int | None:
        """The number of evaluation problems; None if there are none or they are not here."""
        counts = [
            len(facts.problems)
            for facts in self.data
            if facts.role == "eval" and facts.problems is not None
        ]
        return counts[0] if counts else None

    def disk(self, *, in_training: bool = False) -> dict[str, float] | None:
        """Return the bytes of the run directory by part; None if the sizes are not known."""
        if self.estimate is None:
            return None
        from dapo.analysis.check.disk import disk_bytes

        return disk_bytes(self.estimate, eval_problems=self.eval_problems, in_training=in_training)

    def verdict(self, probe: "Probe | None" = None) -> str:
        """Say whether the configuration fits and what the run takes, in a sentence."""
        from dapo.analysis.check.report import fullest_device

        memory = None if self.estimate is None else fullest_device(self.estimate)
        needed = ""
        if memory is not None:
            needed = f"{memory.needed / GIB:,.1f} of {memory.available / GIB:,.1f} GiB"
        if self.faults:
            if memory is not None and memory.needed > memory.available:
                return f"does not fit: needs {needed}{memory.owner}"
            return f"cannot run: {plural(len(self.faults), 'problem')}"
        facts = [f"{needed}{memory.owner}"] if memory is not None else ["unknown memory"]
        disk = self.disk()
        if disk is not None:
            facts.append(f"{size(sum(disk.values()))} of disk")
        if probe is None:
            return f"ok: {', '.join(facts)}{PROBE_ADVICE}"
        seconds = run_seconds(self, probe)
        facts.append("unknown time" if seconds is None else f"about {_minutes(seconds)}")
        signal = round(probe.kept * probe.problems)
        has_error = any(finding.severity == "error" for finding in probe.findings)
        opening = "fits, but with the error below" if has_error else "ok"
        return (
            f"{opening}: {', '.join(facts)}; {signal} of {plural(probe.problems, 'problem')} carry"
            " a signal"
        )


def run_seconds(facts: CheckedFacts, probe: "Probe") -> float | None:
    """Return the seconds of the whole run at the measured rates; None if no step was measured.

    Steps as in the probe, and evaluations at its rate of sampling; a model that learns shorter or
    longer responses takes other times.
    """
    if probe.step_s is None:
        return None
    from dapo.analysis.check.disk import num_evaluations, steps_in_budget

    config = facts.config
    tokens = probe.groups_per_step * config.rollout.group_size * probe.response_tokens
    config = config.changed("train", num_steps=steps_in_budget(config, tokens))
    responses = (facts.eval_problems or 0) * config.eval.samples_per_problem
    evaluation = responses * probe.response_tokens / probe.tokens_per_s
    return config.train.num_steps * probe.step_s + num_evaluations(config) * evaluation


def _minutes(seconds: float) -> str:
    """Return a time in its unit, as an estimate deserves.

    >>> _minutes(20), _minutes(100), _minutes(8000), _minutes(400_000)
    ('1 minute', '2 minutes', '2.2 hours', '4.6 days')
    """
    minutes = seconds / 60
    if minutes < 90:
        return plural(max(1, round(minutes)), "minute")
    if minutes < 36 * 60:
        return f"{minutes / 60:.2g} hours"
    return f"{minutes / 60 / 24:.2g} days"


def missing_hardware(config: Config) -> list[str]:
    """Return the hardware that a local run requires and this machine lacks, as sentences."""
    from dapo.start.resolve import require_hardware

    try:
        if not config.uses_ray:
            require_hardware(config)
    except ConfigError as error:
        return [str(error)]
    return []


def check_as_json(facts: CheckedFacts) -> dict[str, Any]:
    """Return the result of `dapo check` as JSON values; `problems` is empty if it can run."""
    from dapo.analysis.check.report import describe_prompts

    config = facts.config
    rollout = config.rollout
    return {
        "config": config.model_dump(mode="json"),
        "verdict": facts.verdict(),
        "data": (
            {source.role: _data_json(source) for source in facts.data}
            | {"removed_from_train": facts.num_removed}
        ),
        "step": {
            "prompts": config.rows_per_step,
            "responses": config.rows_per_step * (1 if config.is_supervised else rollout.group_size),
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
        "notes": [*describe_prompts(config, facts.problems), *facts.notes],
        "estimate": None if facts.estimate is None else _estimate_json(facts.estimate),
        "disk_bytes": facts.disk(),
        "problems": list(facts.faults),
    }


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
