"""Converts keywords of Python calls to options and command-line arguments. Imports no torch."""

import inspect
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from dapo.api.code_writer import CodeWriter, NameClash, WrittenModule
from dapo.api.in_memory_data import Reward, verifier_option, weights_by_name
from dapo.api.plain_values import described, lora_options, model_name, plain_value
from dapo.config import PRESETS, Config, build_config, find_config
from dapo.config.load import (
    as_literal,
    merge_options,
    names_of_stages,
    nested_options,
    override,
    read_options,
    require_set_once,
)
from dapo.config.option_fields import names_by_keyword, options_of
from dapo.config.options import STAGES
from dapo.config.training_options import fitting_minibatch
from dapo.core.errors import ConfigError, RewardError
from dapo.core.text import quoted

_MODELS = ("model.name", "loss.reference.model")
"""The options that name a model."""
DEFAULTS: Mapping[str, Any] = {name: info.default for name, info in options_of()}


def options_from(keywords: Mapping[str, Any], *, section: str = "") -> dict[str, Any]:
    """Return options by dotted names: `{"steps": 18}` becomes `{"train.num_steps": 18}`.

    Of several options with a keyword's name, that of `section` is meant. An unknown or ambiguous
    keyword stays: build_config answers all of them together. Raises ConfigError if two mean the
    same option.
    """
    options: dict[str, Any] = {}
    for keyword, value in keywords.items():
        name = option_named(keyword, section=section)
        if name in options:
            raise ConfigError(f"{keyword}: {name} is set twice in one call")
        if name == "model.lora":
            value = lora_options(value)
        if name in _MODELS:
            value = model_name(value, keyword)
        options[name] = as_literal(plain_value(value, keyword))
    require_set_once_in_call(options)
    return options


def read_keywords(
    arguments: Mapping[str, Any],
    reward: Reward,
    keywords: Mapping[str, Any],
    *,
    section: str = "",
) -> tuple[dict[str, Any], list[WrittenModule], list[str]]:
    """Return a call's options by dotted names, the modules of its functions, and folders.

    Args:
        arguments: options of the function's own arguments, by dotted names.
        reward: the reward of the call; None: it sets none.
        keywords: the options of the call by keyword.
        section: the section whose options a keyword means first.

    Raises ConfigError and RewardError.
    """
    arguments = dict(arguments)
    writers: list[CodeWriter] = []
    if reward is not None:
        arguments["reward.verifier"], writers = _written_reward(reward)
    loss = keywords.get("loss", "")
    if not isinstance(loss, str | Mapping) and not callable(loss):
        raise ConfigError(
            f"loss: expected a function, module:function or options of the loss, got {quoted(loss)}"
        )
    keywords, option_writers = named_functions(
        with_teacher(keywords, has_reward=reward is not None)
    )
    writers += option_writers
    named_options = options_from(keywords, section=section)
    twice = sorted(arguments.keys() & named_options.keys())
    if twice:
        raise ConfigError(f"{twice[0]} is set twice in one call")
    both = options_from(arguments) | named_options
    require_set_once_in_call(both)
    modules = [writer.module() for writer in writers if not writer.is_empty]
    return both, modules, sorted({folder for writer in writers for folder in writer.folders})


def _written_reward(reward: Reward) -> tuple[Any, list[CodeWriter]]:
    """Return the value of `reward.verifier`, and the modules of the functions in it.

    Functions share a module; one that has the name of another, or uses such a thing, has its own.
    """
    writers: list[CodeWriter] = []

    def name_of(function: Callable[..., Any]) -> str:
        for number, writer in enumerate(writers):
            try:
                return _numbered(number, writer.add(function))
            except NameClash:
                continue
        writers.append(CodeWriter("reward"))
        return _numbered(len(writers) - 1, writers[-1].add(function))

    by_name = {}
    for name, weight in weights_by_name(reward, name_of).items():
        number, colon, written = name.partition(":")
        # of a function that is written here
        if number.isdigit():
            name = writers[int(number)].qualified(f"{colon}{written}")
        # equal text has one name, as of two partial functions with equal arguments
        if name in by_name:
            raise RewardError(f"reward: {written} is listed twice; list it once, with a weight")
        by_name[name] = weight
    return verifier_option(by_name), writers


def _numbered(number: int, name: str) -> str:
    """Return `0:name` for a function written by a writer, and the path of an importable one."""
    return f"{number}{name}" if name.startswith(":") else name


def named_functions(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], list[CodeWriter]]:
    """Replace functions in the keywords by import paths; return the modules, too."""
    keywords = _with_functions_outside(keywords)
    options = dict(keywords)
    writers = list[CodeWriter]()
    for name, value in keywords.items():
        if name in ("environment", "environment.name"):
            _require_class(value, "environment", "reset")
        if name == "agent":
            _require_class(value, name, "run")
        is_code = name in ("loss", "environment", "agent") or "." in option_named(name)
        if callable(value) and is_code:
            writers.append(writer := CodeWriter(name.rpartition(".")[2]))
            options[name] = writer.qualified(writer.add(value))
    _require_no_argument_of_the_class(keywords)
    for argument in ("tools", "environment.tools"):
        tools = keywords.get(argument)
        if not tools:
            continue
        if callable(tools) or isinstance(tools, str):
            tools = [tools]
        for tool in tools if isinstance(tools, list | tuple) else [tools]:
            if not callable(tool) and not isinstance(tool, str):
                raise ConfigError(
                    "tools: expected functions, whose types and docstrings are their schemas, or"
                    f" module:function, got {quoted(tool)}"
                )
        writers.append(writer := CodeWriter("tool"))
        names = [writer.add(tool) if callable(tool) else tool for tool in tools]
        options[argument] = [writer.qualified(name) for name in names]
    return options, writers


def _with_functions_outside(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords with the functions that stand in sections under their dotted names.

    Example: `loss={"function": f, "clip_high": 0.3}` is `loss={"clip_high": 0.3}` and
    `**{"loss.function": f}`.
    """
    result: dict[str, Any] = {}
    for name, value in keywords.items():
        result[name] = value
        if name not in Config.model_fields or not isinstance(value, Mapping):
            continue
        functions = {key: item for key, item in value.items() if _has_function(item)}
        if functions:
            result[name] = {key: item for key, item in value.items() if key not in functions}
            result |= {f"{name}.{key}": item for key, item in functions.items()}
    return result


def _has_function(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(callable(item) for item in value)
    return callable(value)


def _require_no_argument_of_the_class(keywords: Mapping[str, Any]) -> None:
    """Raise ConfigError for a keyword that is a parameter of the environment's or agent's own."""
    for owner in ("environment", "agent"):
        value = keywords.get(owner)
        if not callable(value):
            continue
        try:
            parameters = inspect.signature(value).parameters
        except (TypeError, ValueError):
            continue
        for name, item in keywords.items():
            if (
                name in parameters
                and option_named(name) not in DEFAULTS
                and name not in Config.model_fields
            ):
                label = getattr(value, "__name__", owner)
                raise ConfigError(
                    f"{name} is a parameter of {label}, not of dapo: write"
                    f' **{{"environment.options": {{"{name}": {quoted(item)}}}}}'
                )


def _require_class(value: Any, keyword: str, method: str) -> None:
    """Raise ConfigError for an object where its class belongs, which has this method."""
    kind = type(value)
    if isinstance(value, type) or not callable(getattr(value, method, None)):
        return
    name = kind.__name__
    raise ConfigError(
        f"{keyword}: got an object of {name}, and each episode plays an object of its own; pass"
        f" the class, {keyword}={name}, and the arguments of its constructor as"
        ' **{"environment.options": {...}}'
    )


def with_teacher(keywords: Mapping[str, Any], *, has_reward: bool) -> dict[str, Any]:
    """Replace `teacher` by the options of on-policy distillation that are not set.

    Without a reward only the teacher trains.
    """
    arguments = dict(keywords)
    teacher = arguments.pop("teacher", None)
    if teacher is None:
        return arguments
    path = model_name(teacher, "teacher")
    options = {"loss.reference.model": path, "loss.kl_coef": 1.0, "loss.kl_estimator": "full"}
    if not has_reward:
        options["reward.coef"] = 0.0
    names = {option_named(name) for name in arguments}
    return arguments | {name: value for name, value in options.items() if name not in names}


def require_set_once_in_call(options: Mapping[str, Any]) -> None:
    """Raise ConfigError if a section and a keyword of one call set the same option."""
    try:
        require_set_once([(name, nested_options({name: value})) for name, value in options.items()])
    except ConfigError as error:
        text = str(error).replace("is set twice, by", "is set twice in one call, by")
        raise ConfigError(text) from None


def option_named(keyword: str, *, section: str = "") -> str:
    """Return the dotted name of a keyword's option; the keyword if there is none or several."""
    if section and f"{section}.{keyword}" in DEFAULTS:
        return f"{section}.{keyword}"
    names = [] if keyword in Config.model_fields else names_by_keyword().get(keyword, [])
    return names[0] if len(names) == 1 else keyword


def load_base(
    config: str | Path | Mapping[str, Any] | None,
) -> tuple[Mapping[str, Any], list[str], str]:
    """Read the base configuration: options, command-line arguments, and a title for runs."""
    if config is None:
        return {}, [], "run"
    if not isinstance(config, str | os.PathLike | Mapping):
        raise ConfigError(
            "config: expected a YAML file, the name of a shipped configuration or a mapping, got"
            f" {described(config)}"
        )
    if not isinstance(config, Mapping):
        path = find_config(config)
        options = read_options(path)
        _require_one_stage(options)
        return options, [str(config)], path.stem
    mapping: Mapping[str, Any] = plain_value(config, "config")
    _require_one_stage(mapping)
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        inner = {name: value}
        if isinstance(value, Mapping):
            inner = {f"{name}.{key}": item for key, item in value.items()}
        flat |= inner
    return mapping, as_overrides(flat), "run"


def _require_one_stage(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a configuration with stages, which the command trains."""
    if STAGES in options:
        raise ConfigError(
            f"config has stages{names_of_stages(options)}: expected one configuration; call"
            " dapo.train for each of them, with model=PREVIOUS_RUN"
        )


def build_scaled(
    base: Mapping[str, Any], options: Mapping[str, Any], *, where: str
) -> tuple[Config, dict[str, Any]]:
    """Build a configuration from a base and options; return the scaled defaults, too."""
    values = {name: _json_value(value) for name, value in options.items()}
    raw = merge_options(base, nested_options(values))
    scaled = scale_defaults(raw)
    return build_config(merge_options(raw, nested_options(scaled)), where=where), scaled


def scale_defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Scale defaults that fit only the paper's sizes to the sizes that are set.

    A minibatch holds at most the groups of a step; the overlong penalty starts at the same fraction
    of the length limit; the warm-up is the same fraction of the steps. `raw` is a configuration
    before defaults are filled in. Returns the scaled options by dotted names, without those that
    are set or whose default fits.

    Example:
        >>> scale_defaults({"rollout": {"prompts_per_step": 8}})
        {'train.minibatch_groups': 8}
    """
    with_preset = merge_options(PRESETS.get(str(raw.get("preset")), {}), raw)
    prompts = _count(raw, "rollout.prompts_per_step")
    length = _count(raw, "rollout.max_response_tokens")
    steps = _count(raw, "train.num_steps")
    groups = "train.minibatch_groups"
    buffer = "overlong.buffer_tokens"
    warmup = "optim.warmup_steps"
    scaled: dict[str, Any] = {}
    if prompts and _option(raw, groups) is None and prompts % DEFAULTS[groups]:
        scaled[groups] = fitting_minibatch(prompts, DEFAULTS[groups])
    is_soft = _option(with_preset, "overlong.mode") in (None, "soft")
    if length and is_soft and _option(raw, buffer) is None and length < DEFAULTS[buffer]:
        paper_length = DEFAULTS["rollout.max_response_tokens"]
        scaled[buffer] = max(1, length * DEFAULTS[buffer] // paper_length)
    if steps and _option(raw, warmup) is None and steps < DEFAULTS["train.num_steps"]:
        scaled[warmup] = round(steps * DEFAULTS[warmup] / DEFAULTS["train.num_steps"])
    return scaled


def _option(raw: Mapping[str, Any], name: str) -> Any:
    value: Any = raw
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _count(raw: Mapping[str, Any], name: str) -> int:
    """Return an option's value that is a positive integer; 0 if it is not set, or invalid."""
    value = _option(raw, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def as_overrides(options: Mapping[str, Any]) -> list[str]:
    """Format options as arguments `key=value`."""
    return [override(name, value) for name, value in options.items()]


def _json_value(value: Any) -> Any:
    """Return a value as JSON has it, with functions by their import paths."""
    return json.loads(json.dumps(value, default=_as_text))


def _as_text(value: Any) -> str:
    return f"{value.__module__}:{value.__name__}" if isinstance(value, FunctionType) else str(value)
