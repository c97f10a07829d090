"""The fields of all options, with metadata and the conditions of their effect."""

import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dapo.algo.surrogate_table import surrogates_with
from dapo.config.engines import engines_with
from dapo.config.options import Config
from dapo.config.section import Section

_SEVERAL_UPDATES = "several updates per step (in the first the ratio is 1, and nothing is clipped)"


def _clips(bound: str) -> str:
    """Describe the condition of a bound of the ratio."""
    return f"{_SEVERAL_UPDATES}, and loss.surrogate={surrogates_with(bound)} (no loss.function)"


CONDITIONS = {
    "clips_low": _clips("clip_low"),
    "clips_high": _clips("clip_high"),
    "clips_dual": _clips("dual_clip"),
    "corrects_engine": "loss.engine_correction",
    "engine_processes": (
        f"engine processes (rollout.engines, or rollout.engine={engines_with('needs_process')})"
    ),
    "has_kl": "loss.kl_coef above 0",
    "plays_episodes": "environment.name or environment.tools",
    "runs_agent": "environment.name=agent:module:function or environment.command",
    "has_ratios": f"{_SEVERAL_UPDATES}, and no loss.function",
    "reuses_samples": _SEVERAL_UPDATES,
    "uses_plugin_engine": "an engine of another package",
    "uses_ray": "launcher=ray",
    "uses_trainer_group": (
        "a trainer in separate processes (distributed.trainer_ranks, or launcher=ray)"
    ),
}
"""Descriptions of the conditions that are properties of Config."""

ALIASES = {
    "steps": "train.num_steps",
    "max_response_tokens": "rollout.max_response_tokens",  # the default of eval.max_response_tokens
    "eval_data": "data.eval",
    "lr": "optim.lr",
    "model": "model.name",
    "data": "data.train",
    "reward": "reward.verifier",
    "name": "model.name",
    "options": "reward.options",
    "timeout_s": "reward.timeout_s",
    "workers": "reward.workers",
}
"""Arguments and keywords of Python calls whose option has another name, or is one of several with
that last part.
"""


def section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section that an option is or may hold; None for a plain value."""
    # the type itself, or a member of a union
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def options_of(
    section: type[BaseModel] = Config, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield every option and section by its dotted name, with its field."""
    for name, info in section.model_fields.items():
        yield f"{prefix}{name}", info
        subsection = section_in(info.annotation)
        if subsection:
            yield from options_of(subsection, f"{prefix}{name}.")


def names_by_keyword() -> dict[str, list[str]]:
    """Return the options that each alias or last part of a name can mean."""
    names: dict[str, list[str]] = {}
    for name, _ in options_of():
        names.setdefault(name.rpartition(".")[2], []).append(name)
    return names | {alias: [name] for alias, name in ALIASES.items()}


def known_about(info: FieldInfo) -> dict[str, Any]:
    """Return the metadata of an option: `paper`, `only_with`, `unit`, `also`."""
    # pydantic also allows a function there
    if not isinstance(info.json_schema_extra, dict):
        return {}
    return info.json_schema_extra


def changed_paper_values(config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield each option whose value differs from the paper's, with both values."""
    for name, info in options_of():
        facts = known_about(info)
        if "paper" in facts:
            value = config.value_of(name)
            if value != facts["paper"]:
                yield name, value, facts["paper"]


def option_text(value: object) -> str:
    """Return the value of an option as a configuration file writes it."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Section):  # with the defaults, which its repr leaves out
        return " ".join(f"{name}={getattr(value, name)!r}" for name in type(value).model_fields)
    return json.dumps(value, default=str) if isinstance(value, bool | list | dict) else str(value)
