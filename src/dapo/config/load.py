"""Reads a configuration from YAML, presets and `key=value` overrides, and writes it as YAML."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from pydantic import BaseModel, ValidationError

from dapo.config.data_spec import mix_of, without_other_kinds
from dapo.config.messages import SECTIONS, format_validation_errors
from dapo.config.model_options import DataSpec
from dapo.config.option_values import SHORT_FORMS, escape_references, read_value, write_value
from dapo.config.options import PRESETS, STAGES, Config
from dapo.core.errors import ConfigError
from dapo.core.files import read_regular
from dapo.core.loading import AGENT_PREFIX
from dapo.core.secrets import may_be_written

_PACKAGE = Path(__file__).parents[1]


def shipped(folder: Literal["configs", "docs"] = "configs") -> dict[str, Path]:
    """Return the shipped configurations or pages by name, installed or in a clone."""
    paths = sorted((_PACKAGE / folder).glob("*"))
    # a clone has them beside src/
    if not paths:
        paths = sorted((_PACKAGE.parents[1] / folder).glob("*"))
    return {path.stem: path for path in paths if path.suffix in (".yaml", ".md")}


def find_config(path: str | Path) -> Path:
    """Return the YAML file at `path`, or the shipped configuration of that name.

    Raises ConfigError if neither exists.
    """
    path = Path(path)
    if path.is_file():
        return path
    configs = shipped()
    name = path.name.removesuffix(".yaml")
    if name in configs and path.parent in (Path(), Path("configs")):
        return configs[name]
    fault = f"{path} is a folder" if path.is_dir() else f"no config file {path}"
    raise ConfigError(
        f"{fault}; expected a YAML file, or the name of a shipped one: {', '.join(configs)}"
    )


def title_of(path: Path) -> str:
    """Return the first line `# ...` of a configuration or page."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            return line.removeprefix("# ")
    return ""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read and validate a YAML file or a shipped configuration, with overrides.

    The last override of an option wins.

    Raises:
        ConfigError: one message for all faults.
    """
    path = find_config(path)
    options = read_options(path)
    if STAGES in options:
        raise ConfigError(
            f"{path} has stages{names_of_stages(options)}: expected one configuration here; dapo"
            " train and dapo check take several"
        )
    return build_config(options, overrides, where=str(path))


def names_of_stages(options: Mapping[str, Any]) -> str:
    """Return the names of the stages in a file's options, in brackets; empty if it has none."""
    stages = options[STAGES]
    if not isinstance(stages, Mapping) or not stages:
        return ""
    return f" ({', '.join(map(str, stages))})"


def read_options(path: Path) -> dict[str, Any]:
    """Read the options that a YAML file sets. Raises ConfigError."""
    try:
        text = read_regular(path, max_bytes=_MAX_BYTES).decode("utf-8")
        # before OmegaConf, which would expand all aliases
        _require_bounded(text, str(path))
        loaded = OmegaConf.load(path)
        raw = OmegaConf.to_container(loaded) if loaded else {}
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(
            f"{path} is not UTF-8 (byte {byte:#04x}); save the file as UTF-8"
        ) from None
    except (yaml.YAMLError, OmegaConfBaseException, OSError, RecursionError, ValueError) as error:
        # ValueError: a number of thousands of digits
        raise ConfigError(f"{path} is not readable as YAML: {_reason(error)}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold options as `name: value`, got a {type(raw).__name__}")
    return {str(key): value for key, value in raw.items()}


def resolve_references(options: dict[str, Any]) -> dict[str, Any]:
    """Fill in `${section.option}` and `${oc.env:NAME}`; if one fails, none is replaced."""
    with suppress(OmegaConfBaseException, ConfigError), _guarded_environment():
        resolved = OmegaConf.to_container(OmegaConf.create(options), resolve=True)
        if isinstance(resolved, dict):
            options = {str(key): value for key, value in resolved.items()}
    return options


def _require_bounded(text: str, where: str) -> None:
    """Raise ConfigError for YAML that is too deep, or too large by its aliases."""
    sizes: dict[str | None, int] = {}
    levels: list[tuple[str | None, int]] = [(None, 0)]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    # events, not nodes: nothing is built that could be too large
    with suppress(yaml.YAMLError):  # the loader reports it
        for event in yaml.parse(text, loader):
            if isinstance(event, yaml.CollectionStartEvent):
                levels.append((event.anchor, 1))
            if len(levels) > _MAX_DEPTH + 2:
                raise ConfigError(f"{where}: {_TOO_DEEP}")
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, size = levels.pop()
            elif isinstance(event, yaml.AliasEvent):
                anchor = event.anchor
                size = sizes.get(anchor, 0)
            elif isinstance(event, yaml.ScalarEvent):
                anchor = event.anchor
                size = 1
            else:
                continue
            sizes[anchor] = size
            outer_anchor, outer_size = levels[-1]
            levels[-1] = (outer_anchor, outer_size + size)
            if outer_size + size > _MAX_VALUES:
                raise ConfigError(
                    f"{where}: with its aliases it holds more than {_MAX_VALUES:,} values"
                )


def build_config(
    raw: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    where: str = "config",
    command_line: str = "command line",
) -> Config:
    """Merge preset, `raw` and `overrides` in this order, and validate.

    Args:
        raw: the options of a file.
        overrides: `name=value` of a command line.
        where: the file, for the error.
        command_line: what the error names instead if the overrides alone are at fault.

    Raises:
        ConfigError: one message for all faults.
    """
    _require_shallow(raw, where)
    file_options = _with_sections(raw)
    override_options = _with_sections(parse_overrides(overrides))
    name = override_options.get("preset", file_options.get("preset", "dapo"))
    preset = {}
    # the validation answers a name that is not text
    if isinstance(name, str):
        preset = PRESETS.get(name, {})
    merged = _merge(_merge(preset, file_options), override_options)
    for section in SECTIONS & preset.keys():
        # an empty section means its defaults, which the preset sets
        if merged[section] is None:
            merged[section] = preset[section]
    try:
        values = _resolved_values(_with_data(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = list(format_validation_errors(error))
        details = error.errors()
        if all(_is_set_in(override_options, detail["loc"], detail["msg"]) for detail in details):
            where = command_line
        if len(lines) == 1 and "\n" not in lines[0]:
            message = f"{where}: {lines[0].strip()}"
        else:
            message = "\n".join([f"{where}:", *(f"  {line}" for line in lines)])
        raise ConfigError(message) from None


def _with_data(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Let the environment begin all episodes, where it is named and no data is.

    An agent does not write its prompt.
    """
    environment = options.get("environment")
    data = options.get("data")
    name = environment.get("name") if isinstance(environment, Mapping) else None
    has_name = name is not None and not str(name).startswith(AGENT_PREFIX)
    is_mapping = data is None or isinstance(data, Mapping)
    is_supervised = "demonstrations" in (data or {}) or options.get("schedule") == "supervised"
    if not has_name or not is_mapping or is_supervised or "train" in (data or {}):
        return options
    return {**options, "data": {**(data or {}), "train": "environment"}}


def _resolved_values(options: Mapping[str, Any]) -> dict[Any, Any]:
    """Return options with `${...}` filled in, without what means a default."""
    with _guarded_environment():
        container = OmegaConf.to_container(OmegaConf.create(_plain(options)), resolve=True)
    assert isinstance(container, dict)
    # an empty section means its defaults
    empty = [name for name in SECTIONS if name in container and container[name] is None]
    values = {name: value for name, value in container.items() if name not in empty}
    rollout = values.get("rollout")
    # recipes write the only valid value in training
    if isinstance(rollout, dict) and rollout.get("top_p") == 1:
        values["rollout"] = {name: value for name, value in rollout.items() if name != "top_p"}
    return values


def merge_options(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configurations without validation; `top` wins where both set an option."""
    return _merge(_with_sections(base), _with_sections(top))


def _is_set_in(options: Mapping[str, Any], path: Sequence[object], message: str) -> bool:
    """Return True if a fault concerns `path`, or an option that a joint check names."""
    if path:
        return _is_in(path, options)
    names = re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", message)
    return any(_is_in(name.split("."), options) for name in names)


def _is_in(path: Sequence[object], options: object) -> bool:
    """Return True if nested options set a path, or one of its beginnings as a whole."""
    if not path or not isinstance(options, Mapping):
        return True
    return path[0] in options and _is_in(path[1:], options[path[0]])


@contextmanager
def _guarded_environment() -> Iterator[None]:
    """Resolve `${oc.env:NAME}` for places only: config.yaml stores the value."""

    def environment(name: str, *default: str | None) -> str | None:
        if not may_be_written(name):
            raise ConfigError(
                f"${{oc.env:{name}}}: the value of this environment variable would be written to"
                " config.yaml and to trackers, and it may be a secret; read the variable in your"
                " own code, or rename it: variables that end in DIR, PATH, ROOT, HOME, NAME, HOST"
                " and the like are filled in"
            )
        value: str | None = oc.env(name, *default)
        return value

    OmegaConf.register_resolver("oc.env", environment, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_resolver("oc.env", oc.env, replace=True)


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse `["loss.clip_high=0.3"]` to `{"loss": {"clip_high": 0.3}}`.

    The last override of an option wins. Raises ConfigError.
    """
    merged: dict[str, Any] = _Dotted()
    for item in overrides:
        merged = _merge(merged, _parse_override(item))
    return merged


def _parse_override(item: str) -> dict[str, Any]:
    """Parse one `key=value` to nested options. Raises ConfigError."""
    key, equals, value = item.partition("=")
    if not equals or "" in key.split("."):
        raise ConfigError(f"override {item!r}: expected key=value, for example loss.clip_high=0.3")
    try:
        parsed = read_value(key, value, _read_yaml)
    except ConfigError as error:
        raise ConfigError(f"override {key}: {error}") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError) as error:
        reason = _reason(error).removeprefix("line 1: ")
        # such a value is too long to be shown
        shown_item = key if reason == _TOO_DEEP else repr(item)
        raise ConfigError(f"override {shown_item}: {reason}") from None
    _require_shallow([parsed], f"override {key}", depth=_MAX_DEPTH - key.count("."))
    return nested_options({key: parsed})


def _read_yaml(value: str) -> Any:
    """Read a value as YAML.

    Raises ConfigError for one of too many parts, and the errors of the YAML loader.
    """
    _require_bounded(value, "the value")
    parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"v={value}"]))
    return parsed["v"]


def nested_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Nest options by dotted names in sections, as if each was set on a command line."""
    merged: dict[str, Any] = _Dotted()
    for name, value in options.items():
        nested = value
        for part in reversed(name.split(".")):
            nested = _Dotted({part: nested})
        merged = _merge(merged, _with_sections(nested))
    return merged


def override(name: str, value: Any) -> str:
    """Write `name=value` so that `parse_overrides` reads the value back.

    Raises ConfigError as `write_value` does.
    """
    return f"{name}={write_value(name, value, _read_yaml)}"


def require_set_once(items: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise ConfigError if two of the settings contradict each other."""
    settings: dict[str, tuple[str, Any]] = {}
    for origin, options in items:
        leaves = dict(_leaves(_with_sections(options)))
        for name, value in leaves.items():
            for earlier_name, (earlier_origin, earlier) in settings.items():
                is_same = name == earlier_name and value == earlier
                if not is_same and _sets_again(name, earlier_name, earlier):
                    raise ConfigError(
                        f"{name} is set twice, by {earlier_origin} and by {origin}; keep one of"
                        " them"
                    )
        settings |= {name: (origin, value) for name, value in leaves.items()}


def without_repeats(overrides: Sequence[str]) -> list[str]:
    """Return the overrides without those that a later one contradicts."""
    try:
        require_set_once([(item, parse_overrides([item])) for item in overrides])
    except ConfigError:
        # parsing has kept the last value of each option
        leaves = _leaves(parse_overrides(overrides))
        return [override(name, value) for name, value in leaves]
    return list(overrides)


def override_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested options as overrides name them; a value that is set as a whole is one value."""
    return dict(_leaves(options))


def _sets_again(name: str, earlier_name: str, earlier: Any) -> bool:
    """Return True if option `name` contradicts `earlier_name`, whose value is `earlier`."""
    if name.startswith(f"{earlier_name}."):
        return not isinstance(earlier, Mapping)
    return name == earlier_name or earlier_name.startswith(f"{name}.")


def _leaves(options: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield options by dotted names; a value that replaces another as a whole is one."""
    for key, value in options.items():
        here = (*path, str(key))
        is_whole = here in _WHOLE_VALUES and not isinstance(value, _Dotted)
        if isinstance(value, Mapping) and value and not is_whole:
            yield from _leaves(value, here)
        else:
            yield ".".join(here), value


def parse_data_argument(text: str, *, name: str = "--data") -> DataSpec:
    """Parse a data source of the command line: a spec, or a YAML mapping."""
    parsed = parse_overrides([f"data.train={text}"])["data"]["train"]
    if isinstance(parsed, list):
        return mix_of(parsed)
    if not isinstance(parsed, str | dict):
        raise ConfigError(f"{name} {text}: expected a data source or a mapping")
    return parsed


def dump_config(config: Config) -> str:
    """Return the resolved configuration as YAML, from which loading gives an equal Config."""
    return OmegaConf.to_yaml(OmegaConf.create(as_literal(config.model_dump(mode="json"))))


def as_literal(value: Any) -> Any:
    """Escape `${x}` in a value, so that a configuration reads it literally."""
    if isinstance(value, str):
        return escape_references(value)
    if isinstance(value, dict):
        return {key: as_literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_literal(item) for item in value]
    return value


_MAX_BYTES = 2**18
_MAX_VALUES = 10_000  # in a file; an alias counts as all that it stands for
_MAX_DEPTH = 32
_TOO_DEEP = f"values are nested more than {_MAX_DEPTH} deep"
# words of PyYAML's messages, and what is wrong there
_YAML_FAULTS_FILE = Path(__file__).with_name("yaml_faults.tsv")
_YAML_FAULTS = [line.split("\t") for line in _YAML_FAULTS_FILE.read_text("utf-8").splitlines()]


def _reason(error: Exception) -> str:
    """Format a YAML error on one line. OmegaConf has its own error for deep recursion."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    if "maximum recursion depth exceeded" in text:
        return _TOO_DEEP
    words = str(getattr(error, "problem", None) or text)
    duplicate = re.search(r"found duplicate key (\S+)", text)
    if duplicate:
        words = f"{duplicate[1]} is set twice"
    else:
        for fragment, wording in _YAML_FAULTS:
            if fragment in text:
                words = wording
                break
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return words
    # of a bracket that is not closed the line where it was opened
    if "closed" in words:
        mark = getattr(error, "context_mark", None) or mark
    return f"line {mark.line + 1}: {words}"


def _require_shallow(value: Any, where: str, *, depth: int = _MAX_DEPTH) -> None:
    """Raise ConfigError for lists and mappings that are nested too deeply."""
    # by identity: an alias stands for one object, however often it occurs
    level = {id(value): value}
    for _ in range(depth + 1):
        children: dict[int, Any] = {}
        for container in level.values():
            items = container.values() if isinstance(container, Mapping) else container
            for item in items:
                if isinstance(item, Mapping | list):
                    children[id(item)] = item
        if not children:
            return
        level = children
    raise ConfigError(f"{where}: {_TOO_DEEP}")


def _mapping_options(model: type[BaseModel], path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Return the paths of the options whose value may be a mapping with keys of its own."""
    found: set[tuple[str, ...]] = set()
    for name, field in model.model_fields.items():
        here = (*path, name)
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found |= _mapping_options(annotation, here)
        elif "dict[" in str(annotation):
            found.add(here)
    return found


_WHOLE_VALUES = _mapping_options(Config) | {("loss", "reference")}
_DATA_SOURCES = {("data", "train"), ("data", "eval"), ("data", "demonstrations")}


class _Dotted(dict[str, Any]):
    """A mapping from the dots of `a.b.c=1`, as opposed to a written mapping."""


def _plain(value: Any) -> Any:
    """Return a value without the mappings of this module, which OmegaConf does not take."""
    if not isinstance(value, Mapping):
        return value
    return {key: _plain(item) for key, item in value.items()}


def _merge(
    base: Mapping[str, Any], top: Mapping[str, Any], path: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return `base` with the options of `top`; `path` leads to both."""
    merged = _Dotted(base) if isinstance(base, _Dotted) else dict(base)
    for key, value in top.items():
        here = (*path, str(key))
        # a written mapping replaces that of a data source, verifier, reference or free options; a
        # dotted key below it adds to it
        replaces = here in _WHOLE_VALUES and not isinstance(value, _Dotted)
        are_mappings = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        if are_mappings and not replaces:
            base_value = merged[key]
            if here[:2] in _DATA_SOURCES:
                base_value = without_other_kinds(base_value, value)
            elif here in _REPLACED:
                base_value = _without_replaced(base_value, value, _REPLACED[here])
            merged[key] = _merge(base_value, value, here)
        else:
            merged[key] = value
    return merged


_REPLACED = {
    ("train",): [("epochs", "num_steps")],
    ("optim",): [("warmup_ratio", "warmup_steps")],
}
"""Pairs of options of a section, of which the first is another way to set the second."""


def _without_replaced(
    base: Mapping[str, Any], top: Mapping[str, Any], pairs: Sequence[tuple[str, str]]
) -> Mapping[str, Any]:
    """Leave out of a section the options that `top` sets in another way.

    `{num_steps: 300}` under `{epochs: 3}` is left out, and the other way round.
    """
    replaced = set()
    for names in pairs:
        for name, other in (names, reversed(names)):
            if top.get(name) is not None and other not in top:
                replaced.add(other)
    return {name: value for name, value in base.items() if name not in replaced}


def _with_sections(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Expand SHORT_FORMS: `model: NAME`, `data: SOURCE`, `reward: VERIFIER` and so on."""
    values = _Dotted(raw) if isinstance(raw, _Dotted) else dict(raw)
    for section, option in SHORT_FORMS.items():
        value = values.get(section)
        if isinstance(value, str) or (section == "data" and isinstance(value, list | tuple)):
            values[section] = _Dotted({option: values[section]})
    return _with_agent(values)


def _with_agent(options: dict[str, Any]) -> dict[str, Any]:
    """Replace `agent`, in the section `environment` or beside it, by the options that run it.

    Raises ConfigError for a value that names no agent, or if an environment is named, too.
    """
    section = options.get("environment")
    sections: list[Mapping[str, Any]] = [options]
    if isinstance(section, Mapping):
        sections.append(section)
    agents = [mapping["agent"] for mapping in sections if "agent" in mapping]
    if not agents:
        return options
    if len(agents) > 1 or (isinstance(section, Mapping) and {"name", "command"} & set(section)):
        raise ConfigError(
            "agent: environment.name, environment.command and agent name what plays the episodes;"
            " keep one of them"
        )
    inner = _Dotted() if section is None else _Dotted(section)
    inner.pop("agent", None)
    outer = _Dotted(options) if isinstance(options, _Dotted) else dict(options)
    outer.pop("agent", None)
    outer["environment"] = _merge(inner, _agent_options(agents[0]))
    return outer


def _agent_options(agent: object) -> dict[str, Any]:
    """Return the options of `environment` that run an agent. Raises ConfigError."""
    if agent is None:
        return {"name": None, "command": None}
    if isinstance(agent, Mapping) and set(agent) == {"command"}:
        return {"name": None, "command": agent["command"]}
    if isinstance(agent, str) and ":" in agent:
        return {"name": f"agent:{agent.removeprefix('agent:')}", "command": None}
    raise ConfigError(
        "agent: expected module:function, or {command: [python, my_agent.py]}, got"
        f" {json.dumps(agent, default=str)}"
    )


def resolve_auto_verifier(config: Config) -> Config:
    """Replace `reward.verifier: auto` by the verifier that suits the training data."""
    if config.reward.verifier != "auto":
        return config
    name, options = config.auto_verifier
    return config.changed("reward", verifier=name, options=options)
