"""Keywords of Python calls as options of the configuration and as arguments of a command line. Imports no torch."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dapo.config import Config
from dapo.config.load import as_literal, parse_overrides
from dapo.config.options import options_of
from dapo.config.other_names import called_elsewhere
from dapo.core.errors import ConfigError

ALIASES: Mapping[str, str] = {
    "steps": "train.num_steps",
    "max_response_tokens": "rollout.max_response_tokens",  # that of eval follows it where it is not set
    "eval_data": "data.eval",
    "lr": "optim.lr",
}
"""Keywords that stand for an option of another name, or for one of several that end alike."""
PAPER_MINIBATCH_GROUPS, PAPER_WARMUP_STEPS, PAPER_STEPS = 32, 20, 300
PAPER_BUFFER_TOKENS, PAPER_RESPONSE_TOKENS = 4096, 20480


def options_from(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their dotted names: `{"steps": 18, "loss.clip_high": 0.3}` -> `{"train.num_steps": 18, ...}`.

    Args:
        keywords: names of options without their section where only one ends so, dotted names otherwise.

    Raises:
        ConfigError: a name is unknown or stands for several options, or two names stand for the same one.
    """
    found: dict[str, Any] = {}
    for keyword, value in keywords.items():
        name = option_named(keyword)
        if name in found:
            raise ConfigError(f"{keyword}: {name} is set twice in one call")
        found[name] = as_literal(_plain(value))
    return found


def option_named(keyword: str) -> str:
    """The dotted name of the option that a keyword stands for. Raises ConfigError."""
    if "." in keyword or keyword in Config.model_fields:
        return keyword  # what is unknown below a section is refused with the nearest name when the config is built
    if keyword in ALIASES:
        return ALIASES[keyword]
    names = [name for name, _ in options_of()]
    candidates = [name for name in names if name.rpartition(".")[2] == keyword]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        example = f'**{{"{candidates[0]}": ...}}'
        raise ConfigError(f"{keyword!r} may be {' or '.join(candidates)}: write the whole name, as in {example}")
    if elsewhere := called_elsewhere(keyword):
        raise ConfigError(f"unknown option {keyword!r}; {elsewhere}")
    known = [*ALIASES, *(name.rpartition(".")[2] for name in names)]
    near = get_close_matches(keyword, list(dict.fromkeys(known)), n=1)
    whole = {
        each: [ALIASES[each]] if each in ALIASES else [n for n in names if n.endswith(f".{each}")] for each in near
    }
    hints = [f"{each} ({' or '.join(options)})" if options else each for each, options in whole.items()]
    hint = f"did you mean {' or '.join(hints)}?" if hints else "docs/options.md has all of them"
    raise ConfigError(f"unknown option {keyword!r}; {hint}")


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by dotted names as a configuration: `{"loss.clip_high": 0.3}` -> `{"loss": {"clip_high": 0.3}}`."""
    raw: dict[str, Any] = {}
    for name, value in options.items():
        *sections, last = name.split(".")
        inner = raw
        for section in sections:
            below = inner.setdefault(section, {})
            if not isinstance(below, dict):  # the short form of `model`
                below = inner[section] = {"name": below}
            inner = below
        if isinstance(value, dict) and isinstance(inner.get(last), dict):
            inner[last] |= value
        else:
            inner[last] = value
    return raw


def sized_to_fit(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from a smaller size for options that are not set, whose defaults are those of the paper's size.

    An update takes at most the groups of a step, the penalty on length begins at the same fraction of the limit, and
    the warm-up is the same fraction of the steps.

    Args:
        raw: a configuration as it is before defaults are filled in.

    Returns:
        Options by dotted names; none where everything fits.

    Example:
        >>> sized_to_fit({"rollout": {"prompts_per_step": 8}})
        {'train.minibatch_groups': 8}
    """
    more: dict[str, Any] = {}
    prompts, length, steps = (
        _count(raw, name) for name in ("rollout.prompts_per_step", "rollout.max_response_tokens", "train.num_steps")
    )
    if prompts and _option(raw, "train.minibatch_groups") is None and prompts % PAPER_MINIBATCH_GROUPS:
        limit = min(prompts, PAPER_MINIBATCH_GROUPS)
        more["train.minibatch_groups"] = max(n for n in range(1, limit + 1) if prompts % n == 0)
    is_soft = _option(raw, "overlong.mode") in (None, "soft") and _option(raw, "preset") != "grpo"
    if length and is_soft and _option(raw, "overlong.buffer_tokens") is None and length < PAPER_BUFFER_TOKENS:
        more["overlong.buffer_tokens"] = max(1, length * PAPER_BUFFER_TOKENS // PAPER_RESPONSE_TOKENS)
    if steps and _option(raw, "optim.warmup_steps") is None and steps < PAPER_STEPS:
        more["optim.warmup_steps"] = round(steps * PAPER_WARMUP_STEPS / PAPER_STEPS)
    return more


def _option(raw: Mapping[str, Any], name: str) -> Any:
    value: Any = raw
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _count(raw: Mapping[str, Any], name: str) -> int:
    """An option that is a positive integer; 0 where it is not set, or is something else, which is refused elsewhere."""
    value = _option(raw, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def as_overrides(options: Mapping[str, Any]) -> list[str]:
    """The options as arguments of the command line, `key=value`."""
    return [f"{name}={_yaml(value)}" for name, value in options.items()]


def command_line(arguments: Iterable[str], *, environment: Mapping[str, str] | None = None) -> str:
    """Arguments as one line that a shell reads as they are, after the variables that they need."""
    variables = [f"{name}={shlex.quote(value)}" for name, value in (environment or {}).items()]
    return " ".join([*variables, shlex.join(arguments)])


def _yaml(value: Any) -> str:
    """A value as `parse_overrides` reads it; text stands as it is where that gives the same text."""
    plain = str(value)
    if isinstance(value, str) and "\n" not in value:
        try:
            if parse_overrides([f"v={plain}"])["v"] == value:
                return plain
        except ConfigError:
            pass
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> Any:
    """A value as YAML has it: paths as text, numbers of numpy as Python's, tuples as lists."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return value.item()
    return value
