"""`dapo convert`: translates a script or YAML file of verl, AReaL or TRL without running it."""

import ast
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dapo.cli.other_trainers import names_no_trainer, other_trainer
from dapo.cli.supervised_scripts import (
    SUPERVISED,
    Supervised,
    supervised_system,
    with_whole_columns,
)
from dapo.config import build_config
from dapo.config.load import as_literal, read_options, resolve_references
from dapo.config.option_fields import options_of
from dapo.config.other_names import OTHERS, Peer, peer_that_knows
from dapo.core.errors import ConfigError
from dapo.core.files import read_regular
from dapo.core.secrets import may_be_written
from dapo.libs.foreign_options import (
    Reading,
    Translation,
    Unknown,
    leaves_of,
    read_script,
    read_shell,
)

SUCCESS = 0
FAULT = 1  # as of every check that finds something
NOT_WHOLE = 3
NO_ALGORITHM = 4  # no option of the result repairs that, so that scripts can tell it from FAULT
MAX_BYTES = 2**20
MAX_NOTEBOOK_BYTES = 2**25  # a notebook holds the pictures of its outputs too
_PRIME_RL = re.compile(r"\buv run (?:-\S+ )*(?:rl|sft|trainer|orchestrator)\b")
EXPECTED = (
    "expected a shell script with verl's options (data.train_batch_size=512), a YAML file of verl,"
    " AReaL or TRL, or a Python script or notebook that calls TRL's GRPOConfig(...)"
)


@dataclass(frozen=True)
class Conversion:
    """A translated file."""

    text: str
    """The configuration as YAML, with what it lacks in comments above it."""
    exit_code: int
    """That of the command: SUCCESS, FAULT, NOT_WHOLE or NO_ALGORITHM; wrong input is a ConfigError.
    """
    message: str | None
    """What the exit code means for this file; None: SUCCESS."""


def convert_file(path: Path, num_processes: int | None = None) -> Conversion:
    """Translate a file of another system to YAML.

    `num_processes` is the number of trainer processes that a script of TRL is launched on; None: as
    its launcher says, else 1. Raises ConfigError if the file is of no other system.
    """
    if path.suffix == ".toml":
        raise ConfigError(
            f"{path} is TOML, as prime-rl's configurations are, which are not read; {EXPECTED}"
        )
    readings = _readings(path)
    reading = max(readings, key=_num_known, default=Reading())
    # the file that names the trainer
    source = Path(reading.script) if reading.script else path
    is_yaml = source.suffix in (".yaml", ".yml")
    peer = peer_that_knows(reading.options)
    is_python = source.suffix in (".py", ".ipynb")
    system = supervised_system(source, "" if is_yaml else _text(source), reading)
    trainer = None if is_python else other_trainer(peer, reading, is_supervised=system is not None)
    if trainer is not None:
        raise ConfigError(
            f"{path} is for {trainer}, which is not read; of TRL, GRPOTrainer and SFTTrainer are,"
            " and of AReaL the trainer on rewards"
        )
    if system is not None:
        return _supervised(path, system, reading, num_processes)
    options = reading.options
    fault = _fault_of_file(path, reading, peer)
    if peer is None or fault is not None:
        raise ConfigError(fault)
    facts = _facts(path, peer, reading, num_processes)
    options = OTHERS[peer].fold_mappings(options)
    translation = OTHERS[peer].translate(options, facts)
    translation.unread += reading.unread
    translation.assumed += [*_other_commands(readings, reading), *reading.assumed]
    if peer == "trl":
        translation.assumed += _batch_of_trl(options, facts)
        translation.unknown |= _open_rewards(options, translation)
        translation.missing += _missing_episodes(options, translation)
        _hold_nothing_out_twice(translation)
        _reward_of_environment(translation, reading)
        if is_python:
            translation.unknown |= _code_of_script(source, translation)
    if not is_python and names_no_trainer(peer, reading):
        translation.assumed.append(
            "no option names a trainer: the file is taken as one of `trl grpo`; one of `trl sft`"
            " looks the same"
        )
    for name in _FILES_OF_OPTIONS & options.keys():
        translation.unread.append(f"the options in the file {options[name]} ({name})")
    if peer == "trl":
        translation.unknown |= _open_intervals(options, translation)
    if peer == "verl":
        for person, assignments in _left_to_a_person(options, translation):
            translation.unknown[person] = assignments
        translation.unread += [*_trainer_around_verl(reading), *_configuration_of_verl(options)]
    return _conversion(path, translation, _fault_of_batch(translation, facts))


def _fault_of_file(path: Path, reading: Reading, peer: Peer | None) -> str | None:
    """Return why a file is not of another system: it is of this one, or of one not read."""
    options = reading.options
    matches = _num_known(reading)
    num_own = _num_own(options)
    if num_own > matches / 2 and num_own >= len(options) / 2:
        check = f"dapo check {shlex.quote(str(path))}"
        return f"{path} has the options of this system, not of another; {check} explains it"
    if peer is not None and 2 * matches >= _num_of_system(options, peer):
        return None
    program = f" (it runs {reading.program})" if reading.program else ""
    is_yaml = path.suffix in (".yaml", ".yml")
    if not is_yaml and _PRIME_RL.search(_text(path)):
        program = " (it runs prime-rl, whose options are not read)"
    return f"{path}{program} has {matches} options of verl, AReaL or TRL; {EXPECTED}"


def _supervised(
    path: Path, system: Supervised, reading: Reading, num_processes: int | None
) -> Conversion:
    """Translate a script that imitates demonstrations, which `preset=sft` does."""
    options = reading.options
    facts = {}
    if system == "trl":
        facts["processes"] = num_processes or reading.num_processes or 1
        options = OTHERS["trl"].fold_mappings(options)
    else:
        options = with_whole_columns(options)
    translation = SUPERVISED[system].translate(options, facts)
    trainer = reading.program or "SFTTrainer"
    translation.ours["preset"] = ("sft", f"{trainer} imitates demonstrations")
    translation.unread += reading.unread
    translation.assumed += reading.assumed
    return _conversion(path, translation, None)


def _conversion(path: Path, translation: Translation, fault: str | None) -> Conversion:
    """Return the translated file with its exit code."""
    text = translation.text([name for name, _ in options_of()], as_literal)
    exit_code, message = _verdict(translation, text, fault)
    head = f"# Converted from {path.name} by `dapo convert`; `dapo check` explains what it does.\n"
    return Conversion(head + text, exit_code, message)


def _verdict(translation: Translation, text: str, fault: str | None) -> tuple[int, str | None]:
    """Return the exit code of a translation, and the sentence that explains it.

    An algorithm without a counterpart counts before the rest: what follows describes another one.
    """
    if translation.missing:
        return NO_ALGORITHM, f"no such algorithm here: {'; '.join(translation.missing)}"
    if fault is not None:
        return FAULT, fault
    try:
        build_config(yaml.safe_load(text) or {})
    except ConfigError as error:
        return FAULT, f"the converted configuration does not load yet: {error}"
    if translation.is_whole:
        return SUCCESS, None
    return NOT_WHOLE, (
        "options could not be read, or their values are not known; the comments above the"
        " configuration name them"
    )


_FILES_OF_OPTIONS = {"config", "config_file"}
_OWN_CONFIGURATIONS_OF_VERL = {
    "ppo_trainer",
    "ppo_megatron_trainer",
    "dapo_trainer",
    "dapo_megatron_trainer",
}
"""The configurations whose values are verl's defaults."""
_SECTION_OF_VERL = "actor_rollout_ref."


_TRAINERS_OF_VERL = {"main_ppo", "main_dapo", "fully_async_main"}


def _trainer_around_verl(reading: Reading) -> list[str]:
    """Describe the program of a command of verl, unless it is one of verl's own trainers.

    FlowRL, PRIME and SPPO have verl's options and a loss of their own, which no option names.
    """
    name = reading.program_name
    if not name or name in _TRAINERS_OF_VERL:
        return []
    return [f"line {reading.line}: the code of {reading.program}, which may train in its own way"]


def _configuration_of_verl(options: Mapping[str, Any]) -> list[str]:
    """Describe the configuration that a command of verl starts from, unless it is verl's own."""
    name = options.get("config-name")
    if name is None or str(name).removesuffix(".yaml") in _OWN_CONFIGURATIONS_OF_VERL:
        return []
    return [f"the options in the configuration {name} (--config-name)"]


_TURNS_OF_VERL = f"{_SECTION_OF_VERL}rollout.multi_turn."
_TOOLS_OF_VERL = (
    f"{_TURNS_OF_VERL}tool_config_path",
    f"{_TURNS_OF_VERL}interaction_config_path",
    f"{_SECTION_OF_VERL}rollout.agent.agent_loop_config_path",
)


def _left_to_a_person(
    options: Mapping[str, Any], translation: Translation
) -> Iterator[tuple[str, list[str]]]:
    """Yield what a person is to set, each with the options of verl that ask for it.

    Tools and interactions are code in other files.
    """
    enable = f"{_TURNS_OF_VERL}enable"
    names = [name for name in _TOOLS_OF_VERL if options.get(name) is not None]
    if options.get(enable):
        names.insert(0, enable)
    if names and options.get(enable) is not False:
        person = (
            "Set environment or agent yourself: the tools and turns of a conversation are code"
            " here (dapo show docs environments)"
        )
        yield person, [f"{name}={options[name]}" for name in names]


def _open_rewards(options: Mapping[str, Any], translation: Translation) -> dict[str, list[str]]:
    """Return the rewards of TRL that a person is to set: models, and names of a script's own."""
    functions = options.get("reward_funcs")
    model = options.get("reward_model_name_or_path")
    names = []
    if functions is not None and not isinstance(functions, Unknown):
        if "reward.verifier" not in translation.ours:
            names.append(f"reward_funcs={functions}")
        if model is not None:
            names.append(f"reward_model_name_or_path={model}")
    person = (
        "Set reward.verifier yourself: module:function for a function that the script knows by"
        " another name, reward_model for a model that judges alone (dapo show docs verifiers)"
    )
    return {person: names} if names else {}


def _missing_episodes(options: Mapping[str, Any], translation: Translation) -> Iterator[str]:
    """Yield the environments and tools of TRL that cannot be named here."""
    for name, option in (
        ("environment_factory", "environment.name"),
        ("tools", "environment.tools"),
    ):
        value = options.get(name)
        is_known = bool(value) and not isinstance(value, Unknown)
        if is_known and option not in translation.ours:
            expected = "one class" if name == "environment_factory" else "functions"
            yield f"{name}={json.dumps(value, default=str)} has no counterpart: expected {expected}"


def _hold_nothing_out_twice(translation: Translation) -> None:
    """Leave `data.eval` out where a script holds out a part of its training rows."""
    held_out, _ = translation.ours.get("data.eval", (None, ""))
    train, _ = translation.ours.get("data.train", (None, ""))
    if held_out is not None and held_out == train:
        del translation.ours["data.eval"]
        translation.assumed.append(
            "data.eval is left out: the script holds out a part of the training rows; write that"
            " part to a file and name it"
        )


def _reward_of_environment(translation: Translation, reading: Reading) -> None:
    """Add the reward that an environment of TRL gives by its method get_reward, of weight 1."""
    environment, origin = translation.ours.get("environment.name", (None, ""))
    if "get_reward" not in reading.methods.get(str(environment), ()):
        return
    verifier, reward_origin = translation.ours.get("reward.verifier", ({}, ""))
    weights = {verifier: 1.0} if isinstance(verifier, str) else dict(verifier)
    if weights:
        both = f"{origin}, {reward_origin}"
        translation.ours["reward.verifier"] = ({"environment": 1.0, **weights}, both)


def _code_of_script(path: Path, translation: Translation) -> dict[str, list[str]]:
    """Return the functions that a person is to move: importing the script would start its training.

    The translation names them in the module to which they are moved.
    """
    own_prefix = f"{path.stem}:"
    is_notebook = path.suffix == ".ipynb"
    if not is_notebook and not _trains_on_import(_text(path)):
        return {}
    moved: dict[str, str] = {}
    for option in ("reward.verifier", "environment.name", "environment.tools"):
        value, origin = translation.ours.get(option, (None, ""))
        names = [value] if isinstance(value, str) else list(value or ())
        for name in names:
            if name.startswith(own_prefix):
                moved[name] = f"{_MOVED_CODE}:{name.removeprefix(own_prefix)}"
        new_value: Any = value
        if isinstance(value, str):
            new_value = moved.get(value, value)
        elif isinstance(value, dict):
            new_value = {moved.get(name, name): weight for name, weight in value.items()}
        elif isinstance(value, list):
            new_value = [moved.get(name, name) for name in value]
        if new_value != value:
            translation.ours[option] = (new_value, origin)
    if not moved:
        return {}
    reason = "a notebook is no module"
    if not is_notebook:
        reason = "importing the script would start its training"
    person = f"Move these functions, with what they use, to {_MOVED_CODE}.py, as {reason}"
    return {person: [name.removeprefix(own_prefix) for name in moved]}


def _trains_on_import(text: str) -> bool:
    """Return True if a script calls `train()` or `main()` where an import would run the call."""
    try:
        statements: list[ast.AST] = list(ast.parse(text).body)
    except SyntaxError:  # of a newer Python
        return True
    while statements:
        node = statements.pop()
        is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        is_guarded = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        if is_definition or is_guarded:
            continue
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in ("train", "main"):
                return True
        statements += ast.iter_child_nodes(node)
    return False


_MOVED_CODE = "my_code"
"""The module to which the functions of a script are moved."""


def _open_intervals(options: Mapping[str, Any], translation: Translation) -> dict[str, list[str]]:
    """Return the intervals of TRL that a person is to set: shares of an unknown number of steps."""
    unknown: dict[str, list[str]] = {}
    for name, option in (("save_steps", "train.save_every"), ("eval_steps", "train.eval_every")):
        share = options.get(name)
        is_share = isinstance(share, float) and 0 < share < 1
        if is_share and option not in translation.ours:
            person = (
                f"Set {option} yourself: a share of all steps, whose number (max_steps) the script"
                " does not set"
            )
            unknown[person] = [f"{name}={share}"]
    return unknown


def _num_known(reading: Reading) -> int:
    """Return the number of options that the tables know."""
    peer = peer_that_knows(reading.options)
    return 0 if peer is None else sum(bool(OTHERS[peer].rows_of(name)) for name in reading.options)


def _num_own(options: Mapping[str, Any]) -> int:
    """Return the number of options that are of this system, or keys in a mapping that is one."""
    names = {name for name, _ in options_of()}
    num_own = 0
    for name in options:
        section, *parts = name.split(".")
        wholes = [f"{section}.{'.'.join(parts[:end])}" for end in range(1, len(parts) + 1)]
        num_own += name in names or not names.isdisjoint(wholes)
    return num_own


def _num_of_system(options: Mapping[str, Any], peer: Peer) -> int:
    """Return how many options belong to the system itself.

    A program around verl (rllm, verl-tool) has sections of its own, which say nothing against verl;
    other programs share a few names with it (`data.train_files`), but none of its main section.
    """
    is_around_verl = peer == "verl" and any(name.startswith(_SECTION_OF_VERL) for name in options)
    if not is_around_verl:
        return len(options)
    sections = {row.name.partition(".")[0] for row in OTHERS[peer].rows}
    return sum(name.partition(".")[0] in sections for name in options)


def _facts(path: Path, peer: Peer, reading: Reading, num_processes: int | None) -> dict[str, Any]:
    """Return inputs of formulas that are no options.

    They are processes and use of unsloth for TRL, and for verl which of its trainers it is.
    """
    if peer == "verl":
        return {"fully_async": int(reading.program_name == "fully_async_main")}
    if peer != "trl":
        return {}
    uses_unsloth = path.suffix in (".py", ".ipynb") and re.search(
        r"^\s*(?:from|import)\s+unsloth\b", _text(path), re.M
    )
    return {
        "processes": num_processes or reading.num_processes or 1,
        "unsloth": int(bool(uses_unsloth)),
    }


def _other_commands(readings: Sequence[Reading], trainer: Reading) -> list[str]:
    """Describe the commands of a script that have options too and are not translated."""
    notes = [f"line {trainer.line}: the command {trainer.command}"] if trainer.line else []
    for reading in readings:
        if reading is trainer or not _num_known(reading):
            continue
        differ = [
            name for name, value in reading.options.items() if trainer.options.get(name) != value
        ]
        if differ:
            notes.append(
                f"line {reading.line}: {reading.command} is another command, with"
                f" {', '.join(differ)}"
            )
    return notes


def _batch_of_trl(options: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Describe what the batch size of TRL depends on."""
    notes = []
    if facts["processes"] == 1:
        notes.append(
            "one process trains; `dapo convert --processes N` for a script that is launched on N"
        )
    size = options.get("per_device_train_batch_size")
    group = options.get("num_generations")
    if facts["unsloth"] and isinstance(size, int) and isinstance(group, int) and size % group:
        notes.append(
            "unsloth raises per_device_train_batch_size to num_generations if the batch is not a"
            " multiple of it"
        )
    return notes


def _fault_of_batch(translation: Translation, facts: Mapping[str, Any]) -> str | None:
    """Remove a batch that is not a whole number of prompts; ask for the number of processes."""
    name = "rollout.prompts_per_step"
    value, origin = translation.ours.get(name, (1, ""))
    if "processes" not in facts or not isinstance(value, float) or value.is_integer():
        return None
    fault = (
        f"{origin} make {value:g} groups per batch on {facts['processes']} process(es), which is not"
        " a whole number: `dapo convert --processes N` takes the number of processes that the script"
        " is launched on"
    )
    for option in (name, "train.minibatch_groups"):
        translation.ours.pop(option, None)
    translation.unread.append(fault)
    return fault


def _readings(path: Path) -> list[Reading]:
    """Return the commands of a file with their options, by their names in the other system.

    Raises ConfigError.
    """
    if path.suffix in (".yaml", ".yml"):
        return [Reading(_options_in(path))]
    try:
        text = _text(path)
        if path.suffix in (".py", ".ipynb"):
            return [read_script(text, path.stem)]
        environment = {name: value for name, value in os.environ.items() if may_be_written(name)}
        readings = read_shell(text, environment)
        for reading in readings:
            # other programs have flags with dashes as well: `uv run rl --max-steps 20`
            if "trl" in (reading.command[1:4], peer_that_knows(reading.options)):
                reading.options = _flags_of_trl(reading.options)
        with_files = [_with_files(reading, path) for reading in readings]
        return [_with_script(reading, path) for reading in with_files]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable ({error}); {EXPECTED}") from None


def _options_in(file: Path) -> dict[str, Any]:
    """Return the options of a YAML file by their whole names. Raises ConfigError."""
    options: dict[str, Any] = {}
    for name, value in leaves_of("", resolve_references(read_options(file))):
        if name:
            options[name] = Unknown(str(value)) if "${" in str(value) else value
    return options


def _with_files(reading: Reading, path: Path) -> Reading:
    """Return a command with the options in the files that it names; its own hold before those.

    Args:
        reading: the command.
        path: the file that it stands in, near which the others are searched.

    Raises ConfigError.
    """
    options = dict(reading.options)
    unread = list(reading.unread)
    for name in _FILES_OF_OPTIONS & options.keys():
        file = _located(str(options[name]), path)
        if file is not None and file.suffix in (".yaml", ".yml"):
            del options[name]
            options = _options_in(file) | options
    configuration = _configuration_named(options, path)
    if configuration is not None:
        del options["config-name"]
        options.pop("config-path", None)
        inner = _options_in(configuration)
        groups = inner.pop("defaults", None) or []
        bases = set(map(str, groups)) - {*_OWN_CONFIGURATIONS_OF_VERL, "_self_"}
        unread += [f"the options of {base} in {configuration.name}" for base in sorted(bases)]
        options = {
            name: value for name, value in inner.items() if not name.startswith("hydra.")
        } | options
    num_processes = _processes_of(reading, path)
    return replace(reading, options=options, unread=unread, num_processes=num_processes)


def _configuration_named(options: Mapping[str, Any], path: Path) -> Path | None:
    """Return the file of a configuration that a command of verl names (Hydra); None: unknown."""
    name = str(options.get("config-name", "")).removesuffix(".yaml")
    if not name or name in _OWN_CONFIGURATIONS_OF_VERL:
        return None
    # where the command is started
    folder = str(options.get("config-path", ".")).removeprefix("$(pwd)").lstrip("/")
    return _located(f"{folder}/{name}.yaml", path)


def _with_script(reading: Reading, path: Path) -> Reading:
    """Return a command of TRL with the calls of the script that it runs.

    Raises OSError, ValueError and SyntaxError.
    """
    script = _located(reading.program, path)
    if script is None or script.suffix != ".py":
        return reading
    text = _text(script)
    if "GRPOTrainer" not in text and "SFTTrainer" not in text:
        return reading
    calls = read_script(text, script.stem, reading.options)
    if "train_dataset" in calls.options:
        # by these the script has read its data
        for name in _DATA_OF_TRL & calls.options.keys():
            del calls.options[name]
    return replace(
        reading,
        options=calls.options,
        unread=[*reading.unread, *(f"{script.name}, {line}" for line in calls.unread)],
        assumed=[*reading.assumed, *(f"{script.name}, {line}" for line in calls.assumed)],
        methods=calls.methods,
        script=str(script),
    )


def _processes_of(reading: Reading, path: Path) -> int | None:
    """Return the trainer processes of a command, which accelerate's own file may say; or None."""
    launcher = re.search(r"--config_file[= ](\S+)", reading.command)
    file = None
    if launcher is not None and reading.num_processes is None:
        file = _located(launcher[1], path)
    if file is None or file.suffix not in (".yaml", ".yml"):
        return reading.num_processes
    number = read_options(file).get("num_processes")
    return number if isinstance(number, int) else None


def _located(name: str, path: Path) -> Path | None:
    """Return a file that a command names, from here or from a folder around its script; or None."""
    if not name:
        return None
    for folder in (Path(), *path.resolve().parents[:_FOLDERS_AROUND]):
        file = folder / name
        if file.is_file():
            return file
    return None


_FOLDERS_AROUND = 4
"""The number of folders around a script in which the files that it names are searched."""
_DATA_OF_TRL = {"dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"}


def _flags_of_trl(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with the names of TRL, whose commands take `--max-steps` and `--no_bf16` too."""
    knows = OTHERS["trl"].rows_of
    named = {}
    for name, value in options.items():
        plain = name.replace("-", "_")
        positive = plain.removeprefix("no_")
        if knows(plain):
            named[plain] = value
        elif value is True and positive != plain and knows(positive):
            named[positive] = False
        else:
            named[name] = value
    return named


def _text(path: Path) -> str:
    """Return the text of a script, or that of a notebook's cells of code."""
    is_notebook = path.suffix == ".ipynb"
    max_bytes = MAX_NOTEBOOK_BYTES if is_notebook else MAX_BYTES
    text = read_regular(path, max_bytes=max_bytes).decode("utf-8-sig")
    if not is_notebook:
        return text
    cells = json.loads(text)
    listing = cells.get("cells") if isinstance(cells, dict) else None
    code = [
        cell for cell in listing or [] if isinstance(cell, dict) and cell.get("cell_type") == "code"
    ]
    return "\n".join(_cell(cell.get("source", "")) for cell in code)


def _cell(source: str | Sequence[str]) -> str:
    """Return a cell without the commands of notebooks, which are no Python."""
    text = source if isinstance(source, str) else "".join(source)
    if text.lstrip().startswith("%%") and not text.lstrip().startswith("%%capture"):
        return ""
    # a command goes on behind a backslash, as in a shell
    text = re.sub(r"^(\s*)[%!](?:.*\\\n)*.*$", r"\1pass", text, flags=re.MULTILINE)
    try:
        ast.parse(text)
    except SyntaxError:
        return "" if "GRPO" not in text else text
    return text
