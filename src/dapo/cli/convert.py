"""`dapo convert`: translates a script or YAML file of verl, AReaL or TRL, which it reads and never runs."""

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dapo.api.keywords import nested
from dapo.config import build_config
from dapo.config.load import as_literal, read_options, resolve_references
from dapo.config.option_fields import options_of
from dapo.config.other_names import DEFAULTS, DEFAULTS_HERE, TITLES, Peer, known_rows, peer_that_knows
from dapo.core.errors import ConfigError
from dapo.core.files import read_regular
from dapo.core.secrets import may_be_written
from foreign_options import Counterpart, Unknown, leaves_of, read_script, read_shell, shown_value, translated, value_of

MAX_BYTES = 2**20
EXPECTED = (
    "expected a shell script with verl's options (data.train_batch_size=512), a YAML file of verl, AReaL or TRL, or a "
    "Python script that calls TRL's GRPOConfig(...)"
)


@dataclass
class Translation:
    """A configuration of ours, and the options of another system that have no place in it."""

    peer: Peer
    ours: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Values by option, each with the option of the other system that it comes from; empty: from its defaults."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Options of the other system by the reason why they have no place."""

    def text(self, name: str) -> str:
        """The configuration as YAML, with comments on where values come from and what is left out."""
        title, order = TITLES[self.peer], {name: i for i, (name, _) in enumerate(options_of())}
        lines = [f"# Converted from {name} by `dapo convert`; `dapo check` explains what it does."]
        shown: tuple[str, ...] = ()
        for option in sorted(self.ours, key=lambda each: order.get(each, 0)):
            value, origin = self.ours[option]
            *sections, leaf = option.split(".")
            for depth, section in enumerate(sections):
                if shown[: depth + 1] != (*sections[: depth + 1],):
                    lines.append(f"{'  ' * depth}{section}:")
            shown = (*sections,)
            written = yaml.safe_dump(as_literal(value), default_flow_style=True, width=10**6).removesuffix("...\n")
            lines.append(f"{'  ' * len(sections)}{leaf}: {written.strip()}  # {origin or f'the default of {title}'}")
        for reason, options in self.left_out.items():
            lines += ["", f"# {reason}:", *(f"#   {option}" for option in options)]
        return "\n".join(lines) + "\n"


def convert_file(path: Path) -> Translation:
    """Translate a file of another system. Raises ConfigError if it is none."""
    given = _read(path)
    peer = peer_that_knows(given)
    ours = given.keys() & {name for name, _ in options_of()}
    known = 0 if peer is None else sum(bool(known_rows(peer, name)) for name in given)
    if len(ours) > known / 2:
        raise ConfigError(f"{path} is a configuration of dapo already; dapo check {shlex.quote(str(path))} explains it")
    if peer is None or 2 * known < len(given):
        raise ConfigError(f"{path} has {known} options of verl, AReaL or TRL; {EXPECTED}")
    return translate(peer, given)


def translate(peer: Peer, given: Mapping[str, Any]) -> Translation:
    """Translate options of another system; those that are not set have its defaults."""
    found = Translation(peer, {option: (value, "") for option, value in DEFAULTS_HERE[peer].items()})
    names = {name: value for name, value in {**DEFAULTS[peer], **given}.items() if not isinstance(value, Unknown)}
    unset = {name: value_of(name, names) for name in DEFAULTS[peer] if name not in given and known_rows(peer, name)}
    for name, value in {**unset, **given}.items():
        rows = known_rows(peer, name)
        shown = f"{name}={_one_line(value)}"
        if not rows:
            if name in given:
                found.left_out.setdefault(f"{TITLES[peer]} may have these options; dapo does not know them", []).append(
                    shown
                )
            continue
        row, ours = (rows[0], {}) if isinstance(value, Unknown) else translated(rows, value, names)
        origin = name if name in given else _origins(peer, row, given)
        for option, own in ours.items():
            before, source = found.ours.get(option, (own, ""))
            if before != own and source in given and name in given:
                found.left_out.setdefault(f"Also {option}={_one_line(own)} by {name}, which holds", []).append(source)
        found.ours |= {option: (own, origin) for option, own in ours.items()}
        if name not in given or ours or value is None:
            continue
        options = dict.fromkeys(option.partition("=")[0] for each in rows for option in each.ours)
        if isinstance(value, Unknown) and options:
            reason = f"Set {', '.join(options)} yourself: the value is known only when the script runs"
        elif row is None:
            reason = f"{' and '.join(options)}: no such value here"
        else:
            reason = " or ".join(options) + ": " * bool(options) + (row.remark or "the default").rstrip(".")
        found.left_out.setdefault(reason, []).append(shown)
    return found


def _origins(peer: Peer, row: Counterpart | None, given: Mapping[str, Any]) -> str:
    """The options that are set and that the formula of another option uses."""
    text = row.formula if row else ""
    formulas = {name: value for name, value in DEFAULTS[peer].items() if isinstance(value, str) and value[:2] == "= "}
    for _ in range(3):  # formulas of formulas
        text = re.sub(r"[\w.]+", lambda match: formulas.get(match[0], match[0]), text)
    return ", ".join(name for name in given if name in re.findall(r"[\w.]+", text))


def faults_of(found: Translation) -> str | None:
    """The message about a configuration that does not load; None if it loads."""
    try:
        build_config(nested({option: as_literal(value) for option, (value, _) in found.ours.items()}))
    except ConfigError as error:
        return str(error)
    return None


def _one_line(value: Any) -> str:
    return " ".join(str(value if isinstance(value, Unknown) else shown_value(value)).split())


def _read(path: Path) -> dict[str, Any]:
    """The options that a file sets, by their names in the other system. Raises ConfigError."""
    if path.suffix in (".yaml", ".yml"):
        return {name: _resolved(value) for name, value in leaves_of("", resolve_references(read_options(path))) if name}
    try:
        text = read_regular(path, max_bytes=MAX_BYTES).decode("utf-8")
        if path.suffix == ".py":
            return read_script(text, path.stem)
        return read_shell(text, {name: value for name, value in os.environ.items() if may_be_written(name)})
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable ({error}); {EXPECTED}") from None


def _resolved(value: Any) -> Any:
    return Unknown(value) if isinstance(value, str) and "${" in value else value
