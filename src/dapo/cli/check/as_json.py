"""`dapo check --json`: what a configuration would run, for a program."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dapo.cli.check.estimate import ResourceEstimate
from dapo.cli.check.report import describe_response_end, estimate_of, find_problems, whole_step_seconds
from dapo.cli.check.summary import DataFacts, changed_paper_values, data_facts, ignored_options, safeguards
from dapo.config import Config
from dapo.config.load import resolve_auto_verifier
from dapo.policy.memory_model import GIB


def check_as_json(
    config: Config, needed_columns: Mapping[str, Collection[str]], assume: Sequence[str] = ()
) -> dict[str, Any]:
    """What `dapo check` finds, as JSON values; `problems` is empty where the configuration can run.

    Args:
        config: The configuration.
        needed_columns: The columns that each function of the reward cannot be called without (`VerifierPool`).
        assume: `NAME=VALUE` over the assumptions of the estimate.

    Raises:
        DataError: A data source that is at hand cannot be read, or lacks what the reward reads.
        RewardError: The reward can judge none of its rows.
    """
    config = resolve_auto_verifier(config)
    data, num_removed = data_facts(config, needed_columns)
    estimate, note = estimate_of(config, assume)
    rollout = config.rollout
    found = [] if estimate is None else list(find_problems(estimate))
    if note is not None and note.startswith("problem: "):
        found.insert(0, note.removeprefix("problem: "))
    return {
        "config": config.model_dump(mode="json"),
        "data": {each.role: _data_json(each) for each in data} | {"removed_from_train": num_removed},
        "step": {
            "prompts": rollout.prompts_per_step,
            "responses": rollout.prompts_per_step * rollout.group_size,
            "max_groups": config.max_groups_per_step,
            "updates": config.updates_per_step,
        },
        "ignored": [dict(zip(("option", "why"), line.split(": ", 1), strict=True)) for line in ignored_options(config)],
        "differs_from_paper": [
            {"option": name, "value": value, "paper": paper} for name, value, paper in changed_paper_values(config)
        ],
        "safeguards": list(safeguards(config)),
        "notes": list(describe_response_end(config)),
        "estimate": None if estimate is None else _estimate_json(estimate),
        "problems": found,
    }


def _data_json(data: DataFacts) -> dict[str, Any]:
    if data.problems is None:
        return {"source": data.label, "problems": None, "distinct": None, "sources": {}, "warnings": []}
    return {
        "source": data.label,
        "problems": len(data.problems),
        "distinct": data.num_distinct,
        "sources": dict(data.sources),
        "warnings": list(data.warnings),
    }


def _estimate_json(estimate: ResourceEstimate) -> dict[str, Any]:
    """Bytes and seconds; memory by part, of the process that samples and trains, or of trainer and engine."""
    config, phases = estimate.config, estimate.step_seconds()
    step = whole_step_seconds(config, phases)
    if estimate.is_colocated:
        memory = {"process": estimate.process_memory()}
    else:
        memory = {"trainer": estimate.trainer_memory(), "engine": estimate.engine_memory()}
    return {
        "parameters": estimate.dimensions.parameters,
        "devices": estimate.devices,
        "memory_bytes": memory,
        "memory_available_bytes": estimate.profile.memory_gib * GIB,
        "weight_sync_bytes": estimate.sync_bytes,
        "generated_responses_per_step": estimate.generated_responses,
        "phase_seconds": phases,
        "step_seconds": step,
        "run_seconds": step * config.train.num_steps,
        "assumed": asdict(estimate.profile),
    }
