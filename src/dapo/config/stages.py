"""Stages: one configuration that trains several runs, each from the model of the one before."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.config.load import build_config, merge_options, parse_overrides
from dapo.config.messages import SECTIONS
from dapo.config.options import STAGES, Config
from dapo.core.errors import ConfigError
from dapo.core.text import did_you_mean


@dataclass(frozen=True)
class Stage:
    """One run of a training in stages."""

    config: Config
    takes_model_from: str | None
    """The earlier stage whose model it trains; None: that of its own options."""


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def build_stages(
    raw: Mapping[str, Any], overrides: Sequence[str] = (), *, where: str = "config"
) -> dict[str, Stage]:
    """Build the configuration of each stage of `raw`, in their order.

    A stage has the options beside `stages`, those of its own, and the overrides, of which the last
    win. `stages.NAME.OPTION=VALUE` overrides an option of one stage. A later stage trains the model
    of the one before, unless its own options name another: until it begins, its configuration names
    the model with which the stages before it began. An empty section of a stage sets nothing.

    Raises ConfigError: one message for all faults of the first stage that has any.
    """
    stages = raw[STAGES]
    if not isinstance(stages, Mapping) or not stages:
        raise ConfigError(
            f"{where}: stages must map the name of each stage to its options, got {stages!r}"
        )
    for name, options in stages.items():
        if not _NAME.fullmatch(str(name)):
            raise ConfigError(
                f"{where}: stages: {name!r} cannot be the name of a folder; use letters, digits, _"
                " and -"
            )
        if not isinstance(options, Mapping):
            written = "nothing" if options is None else repr(options)
            raise ConfigError(
                f"{where}: stages.{name} must hold options, got {written}; {{}} leaves it those"
                " beside `stages`"
            )
    common = {name: value for name, value in raw.items() if name != STAGES}
    for name, options in common.items():
        has_options = isinstance(options, Mapping) and options.keys() & Config.model_fields.keys()
        if name not in Config.model_fields and has_options:
            raise ConfigError(
                f"{where}: {name} stands beside `stages`; if it is a stage, indent it below them"
            )
    own, shared = _split_overrides(overrides, list(stages))
    _require_own_presets(shared, stages)
    built: dict[str, Stage] = {}
    previous = None
    for name, written in stages.items():
        stage_where = f"{where}, stage {name}"
        options = _without_empty_sections(written)
        merged = merge_options(common, options)
        own_model = merge_options(options, parse_overrides(own[name])).get("model")
        # adapters or a number format alone are of the model that comes from the stage before
        has_own_model = isinstance(own_model, Mapping) and "name" in own_model
        if previous is not None and not has_own_model:
            model_name = built[previous].config.model.name
            merged = merge_options(merged, {"model": {"name": model_name}})
        command_line = f"command line, stage {name}" if own[name] else "command line"
        config = build_config(
            merged,
            [*shared, *own[name]],
            where=stage_where,
            command_line=command_line,
        )
        built[name] = Stage(config, None if has_own_model else previous)
        previous = name
    return built


def _require_own_presets(shared: Sequence[str], stages: Mapping[str, Any]) -> None:
    """Raise ConfigError for a preset of all stages where the file gives them different ones."""
    own = {name: options["preset"] for name, options in stages.items() if "preset" in options}
    for item in shared:
        option, _, preset = item.partition("=")
        others = [name for name, value in own.items() if value != preset]
        if option == "preset" and others:
            # a warm start on worked examples has no other preset
            meant = [name for name in stages if own.get(name) != "sft"] or list(stages)
            raise ConfigError(
                f"{item} sets the preset of every stage, and the file has"
                f" preset={own[others[0]]} for stage {others[0]}; write"
                f" {STAGES}.{meant[-1]}.{item}"
            )


def _without_empty_sections(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out sections that hold nothing, as where each line of `train:` is a comment.

    No section can be null, so that an empty one sets nothing.
    """
    return {
        name: value for name, value in options.items() if value is not None or name not in SECTIONS
    }


def _split_overrides(
    overrides: Sequence[str], stages: Sequence[str]
) -> tuple[dict[str, list[str]], list[str]]:
    """Return the overrides of one stage each, without its name, and those of all stages.

    Raises ConfigError.
    """
    own: dict[str, list[str]] = {name: [] for name in stages}
    shared = []
    for item in overrides:
        option, equals, value = item.partition("=")
        section, *path = option.split(".")
        if section != STAGES:
            if section in own and section not in Config.model_fields:
                raise ConfigError(f"{item}: {section} is a stage; write {STAGES}.{item}")
            shared.append(item)
            continue
        name = path[0] if path else ""
        if name and name not in own:
            raise ConfigError(f"{item}: no stage {name!r}; {did_you_mean(name, stages)}")
        if not equals or len(path) < 2:
            raise ConfigError(f"{item}: expected {STAGES}.{name or 'NAME'}.OPTION=VALUE")
        own[name].append(f"{'.'.join(path[1:])}={value}")
    return own, shared
