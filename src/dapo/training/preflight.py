"""Checks what a run needs of this machine and of the user's code, without torch, in about a second."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from dapo.config import Config
from dapo.config.load import resolve_auto_verifier
from dapo.config.model_options import MODEL_ALIASES
from dapo.core.errors import ConfigError, RewardError
from dapo.core.loading import load_callable
from dapo.core.text import did_you_mean
from dapo.rewards.workers.output import VerifierOutput
from dapo.rewards.workers.pool import VerifierPool
from dapo.runs.directory import require_new_run


@contextmanager
def open_judge(
    config: Config, *, run_dir: Path | None = None, elsewhere: bool = False, prepared: Collection[str] = ()
) -> Iterator[VerifierPool]:
    """Check everything that needs neither torch nor the data, and open the verifiers of a run.

    Args:
        config: the configuration, with `auto` or without.
        run_dir: the directory that a new run would make.
        elsewhere: the run will be on another machine, so packages and models may be missing here.
        prepared: names in `run_dir` that were written for the run.

    Raises:
        ConfigError: a package, a model, or a user's filter or loss is missing.
        CheckpointError: `run_dir` holds a run already, or cannot be made.
        RewardError: a verifier does not exist or cannot be used.
    """
    if run_dir is not None:
        require_new_run(run_dir, prepared=prepared)
    if not elsewhere:
        _require_packages(config)
        _require_model(config.model.name)
    if isinstance(name := config.dynamic_sampling.filter, str):
        load_callable(name, error=ConfigError, option="dynamic_sampling.filter=")
    if config.loss.function is not None:
        from dapo.policy.custom_loss import load_loss  # with torch, which the user's module needs anyway

        load_loss(config.loss.function)
    with VerifierPool(resolve_auto_verifier(config).reward, output=VerifierOutput()) as judge:
        judge.needed_columns = {**judge.needed_columns, **_columns_of_audit(config)}
        yield judge


def _columns_of_audit(config: Config) -> Mapping[str, Collection[str]]:
    """The columns that the audit's verifier requires. Raises RewardError where it cannot be used."""
    if config.audit_reward is None:
        return {}
    try:
        with VerifierPool(config.audit_reward) as audit:
            return audit.needed_columns
    except RewardError as error:
        raise RewardError(f"audit.verifier: {error}") from None


def _require_packages(config: Config) -> None:
    """Raise ConfigError for a missing package that an option needs, with the command that installs it."""
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
