"""`dapo convert`: translates a script or YAML file of verl, AReaL or TRL, which it reads and never runs."""

import os
import shlex
from pathlib import Path
from typing import Any

import yaml

from dapo.config import build_config
from dapo.config.load import as_literal, read_options, resolve_references
from dapo.config.option_fields import options_of
from dapo.config.other_names import OTHERS, peer_that_knows
from dapo.core.errors import ConfigError
from dapo.core.files import read_regular
from dapo.core.secrets import may_be_written
from foreign_options import Unknown, leaves_of, read_script, read_shell

MAX_BYTES = 2**20
EXPECTED = (
    "expected a shell script with verl's options (data.train_batch_size=512), a YAML file of verl, AReaL or TRL, or a "
    "Python script that calls TRL's GRPOConfig(...)"
)


def convert_file(path: Path) -> tuple[str, str | None]:
    """Translate a file of another system to YAML; also returns why it does not load yet, or None.

    Raises ConfigError if the file is of no other system.
    """
    given, names = _read(path), [name for name, _ in options_of()]
    peer = peer_that_knows(given)
    known = 0 if peer is None else sum(bool(OTHERS[peer].rows_of(name)) for name in given)
    if len(given.keys() & set(names)) > known / 2:
        check = f"dapo check {shlex.quote(str(path))}"
        raise ConfigError(f"{path} has the options of this system, not of another; {check} explains it")
    if peer is None or 2 * known < len(given):
        raise ConfigError(f"{path} has {known} options of verl, AReaL or TRL; {EXPECTED}")
    text = OTHERS[peer].translate(given).text(names, as_literal)
    fault = None
    try:
        build_config(yaml.safe_load(text) or {})
    except ConfigError as error:
        fault = str(error)
    return f"# Converted from {path.name} by `dapo convert`; `dapo check` explains what it does.\n{text}", fault


def _read(path: Path) -> dict[str, Any]:
    """The options that a file sets, by their names in the other system. Raises ConfigError."""
    if path.suffix in (".yaml", ".yml"):
        leaves = leaves_of("", resolve_references(read_options(path)))
        return {name: Unknown(value) if "${" in str(value) else value for name, value in leaves if name}
    try:
        text = read_regular(path, max_bytes=MAX_BYTES).decode("utf-8")
        if path.suffix == ".py":
            return read_script(text, path.stem)
        return read_shell(text, {name: value for name, value in os.environ.items() if may_be_written(name)})
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable ({error}); {EXPECTED}") from None
