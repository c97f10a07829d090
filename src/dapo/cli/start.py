"""What a run needs of this machine and of the user's code, verified first and without torch, in about a second."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from dapo.config import Config, load_config
from dapo.config.load import resolve_auto_verifier
from dapo.config.model_data import MODEL_ALIASES
from dapo.core.errors import ConfigError, DataError, RewardError
from dapo.core.loading import load_callable
from dapo.core.suggest import did_you_mean
from dapo.rewards.workers.output import VerifierOutput
from dapo.rewards.workers.pool import VerifierPool
from dapo.training.run_directory import RunDirectory, require_new_run


@contextmanager
def open_judge(config: Config, *, run_dir: Path | None = None, elsewhere: bool = False) -> Iterator[VerifierPool]:
    """The verifiers of a run, once all that can be known without torch and without its data is in order.

    Args:
        config: the configuration, with `auto` or without.
        run_dir: the directory that a new run would make.
        elsewhere: the run will be on another machine, so that packages and models need not be here.

    Raises:
        ConfigError: a package, a model or a user's filter is missing.
        CheckpointError: `run_dir` holds a run already, or cannot be made.
        RewardError: a verifier does not exist or cannot be used.
    """
    if run_dir is not None:
        require_new_run(run_dir)
    if not elsewhere:
        _require_packages(config)
        _require_model(config.model.name)
    if isinstance(name := config.dynamic_sampling.filter, str):
        load_callable(name, error=ConfigError, option="dynamic_sampling.filter=")
    with VerifierPool(resolve_auto_verifier(config).reward, output=VerifierOutput()) as judge:
        yield judge


def load_run_config(run: RunDirectory, overrides: Sequence[str] = ()) -> Config:
    """The options of a run, whose relative paths and modules are those of the folder that it was started in.

    What is not there is looked for in the current folder, as are the paths of `overrides`. Raises ConfigError.
    """
    folder = _started_in(run)
    if folder is None or not folder.is_dir():
        return load_config(run.config, overrides)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    own = load_config(run.config)
    there = []
    for name, spec in (("data.train", own.data.train), ("data.eval", own.data.eval)):
        key, path = (f"{name}.path", spec.get("path")) if isinstance(spec, dict) else (name, spec)
        if isinstance(path, str) and (folder / path).is_file():
            there.append(f"{key}={json.dumps(str(folder / path))}")
    if (folder / own.model.name).is_dir():
        there.append(f"model.name={json.dumps(str(folder / own.model.name))}")
    return load_config(run.config, [*there, *overrides])


@contextmanager
def naming_start_folder(run: RunDirectory) -> Iterator[None]:
    """Add to an error of data, rewards or options in the block where the run was started, if that is elsewhere."""
    try:
        yield
    except (ConfigError, DataError, RewardError) as error:
        folder = _started_in(run)
        if folder is None or folder == Path.cwd():
            raise
        advice = "its data and modules are looked for there, then here; data.train=PATH and the like override"
        raise type(error)(f"{error} (the run was started in {folder}: {advice})") from error


def _started_in(run: RunDirectory) -> Path | None:
    """The folder that a run was started in; None where its manifest does not say."""
    try:
        folder = json.loads(run.manifest.read_text(encoding="utf-8"))["folder"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Path(folder) if isinstance(folder, str) else None


def _require_packages(config: Config) -> None:
    """Raise ConfigError for a package that an option needs and that is not installed, with what installs it."""
    needed: list[tuple[str, str, str]] = [("log.sinks", sink, sink) for sink in config.log.sinks]
    needed += [("launcher", "ray", "ray")] if config.uses_ray else []
    needed += [("model.lora", "peft", "lora")] if config.model.lora is not None else []
    for option, package, extra in needed:
        spec = find_spec(package)
        if spec is None or spec.origin is None:  # without origin: a folder of that name, such as W&B makes
            raise ConfigError(
                f"{option} needs the package {package}, which is not installed here: pip install 'dapo-rl[{extra}]'"
            )


def _require_model(name: str) -> None:
    """Raise ConfigError for a name that can be neither an alias nor a directory nor a Hugging Face id."""
    path = Path(name).expanduser()
    if name in MODEL_ALIASES or name.count("/") == 1 or os.path.lexists(path):
        return
    if path.is_absolute() or name.startswith(".") or "/" in name:
        raise ConfigError(f"model {name!r}: there is no such directory")
    near = did_you_mean(name, MODEL_ALIASES, otherwise="")
    raise ConfigError(
        f"model {name!r} is no alias ({', '.join(MODEL_ALIASES)}), no directory here and no Hugging Face id, which is "
        f"OWNER/NAME{'; ' * bool(near)}{near}"
    )
