"""The first step of a start: checks the options, loads the user's code and reads the data, without
torch and in about a second.
"""

import os
import pkgutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dapo.config import Config
from dapo.config.data_spec import kinds
from dapo.config.load import resolve_auto_verifier
from dapo.config.model_options import MODEL_ALIASES
from dapo.core.errors import ConfigError, RewardError
from dapo.core.loading import load_callable, module_file, require_package
from dapo.core.model_files import require_hub_model, require_model_files
from dapo.core.text import did_you_mean
from dapo.data.demonstrations import load_demonstrations
from dapo.data.problems import remove_overlap
from dapo.data.stream import sizes_by
from dapo.environments.agents.pool import AgentPool
from dapo.environments.pool import EnvironmentPool
from dapo.processes.output import WorkerOutput
from dapo.rewards.combine import InlineJudge
from dapo.rewards.pool import VerifierPool
from dapo.runs.directory import RunDirectory
from dapo.start.card.facts import has_trained
from dapo.start.rows import RunData, distinct, load_rows
from dapo.types import Group, Problem

if TYPE_CHECKING:
    from dapo.policy.custom_loss import CustomLoss


@dataclass(frozen=True)
class UserCode:
    """The code that options name, loaded once; None for what a run does not have."""

    judge: VerifierPool | InlineJudge | None = None
    audit: VerifierPool | None = None
    keep_group: Callable[[Group], bool] | None = None  # dynamic_sampling.filter
    loss: "CustomLoss | None" = None  # loss.function
    environment: EnvironmentPool | AgentPool | None = None

    @property
    def needed_columns(self) -> Mapping[str, Collection[str]]:
        """The data columns that each function of the reward and of the audit requires."""
        columns: dict[str, Collection[str]] = {}
        for judge in (self.judge, self.audit):
            if judge is not None:
                columns |= judge.needed_columns
        return columns


@dataclass(frozen=True)
class Checked:
    """Options that need nothing that is missing here, and the user's code that they name."""

    config: Config  # the verifier is not `auto`
    code: UserCode
    notes: Sequence[str] = ()
    has_trained: bool = False  # the model is that of a run, exported or not, or of an earlier stage


@contextmanager
def check(
    config: Config,
    *,
    training: bool = True,
    elsewhere: bool = False,
    starts: bool = True,
    has_run: bool = False,
) -> Iterator[Checked]:
    """Check all that needs neither torch nor the data, and load the user's code.

    The processes of verifiers and environment end with the block. Raises ConfigError if a package,
    a model, or a user's filter, loss or environment is missing, and RewardError if a verifier does
    not exist or cannot be used.

    Args:
        config: The options.
        training: False for an evaluation, which needs only verifiers and environment.
        elsewhere: The run is for another machine, so packages and models may be missing here.
        starts: False to describe a run, which reports a missing engine, and needs no model's files.
        has_run: The model is that of a run, or of an earlier stage of this one.
    """
    functions = UserCode()
    if training:
        _require_environment(config)
        if not elsewhere:
            _require_packages(config)
            require_model(config.model.name, on_hub=starts)
            _require_teacher(config, on_hub=starts)
            if starts:
                _require_engine(config)
        functions = load_functions(config)
    time = config.data.template_time
    config = resolve_auto_verifier(config).at_time(time)
    output = WorkerOutput() if training else None
    with (
        VerifierPool(config.reward, output=output, template_time=time) as judge,
        open_audit(config) as audit,
        open_environment(config) as environment,
    ):
        code = replace(functions, judge=judge, audit=audit, environment=environment)
        yield Checked(config, code, has_trained=has_run or has_trained(config.model.name))


def read_data(checked: Checked, *, training: bool = True) -> RunData:
    """Read training problems or demonstrations, and held-out problems, which are never trained on.

    For an evaluation (`training` is False) only held-out problems are read. Raises DataError for a
    file or a column that is missing, and RewardError if the reward can judge no row.
    """
    config = checked.config
    columns = checked.code.needed_columns
    problems = list[Problem]()
    notes = list[str]()
    if training and config.is_supervised:
        problems, notes = load_demonstrations(config.data.train_source)
    elif training:
        problems, notes = load_rows(
            config.data, config.reward, columns, "train", has_trained=checked.has_trained
        )
    held_out = list[Problem]()
    copies = 1
    if (source := config.data.eval_source) is not None:
        rows, warnings = load_rows(
            config.data,
            config.reward,
            columns,
            "eval",
            has_trained=checked.has_trained,
            demonstrations=problems if config.is_supervised else (),
        )
        held_out, copies = distinct(rows, source)
        notes += warnings
    problems, removed = remove_overlap(problems, held_out, option=config.data_option)
    if removed:
        kind = "demonstrations" if config.is_supervised else "training problems"
        notes.append(f"{removed} {kind} left out: their text is in the evaluation set")
    if training and config.data.order is not None:
        # before the model is loaded, or an earlier stage is trained
        sizes_by(problems, config.data.order)
    return RunData(problems, held_out, notes, copies)


@contextmanager
def open_audit(config: Config) -> Iterator[VerifierPool | None]:
    """Start the processes of the audit's verifier, if there is one.

    Raises RewardError if it cannot be used.
    """
    if config.audit_reward is None:
        yield None
        return
    try:
        time = config.data.template_time
        audit = VerifierPool(config.audit_reward, output=WorkerOutput(), template_time=time)
    except RewardError as error:
        raise RewardError(f"audit.verifier: {error}") from None
    with audit:
        yield audit


@contextmanager
def open_environment(config: Config) -> Iterator[EnvironmentPool | AgentPool | None]:
    """Start the processes of the environment, if there is one. Raises ConfigError."""
    if not config.plays_episodes:
        yield None
        return
    memory_gib = config.reward.memory_gib
    if config.runs_agent:
        with AgentPool(
            config.environment,
            memory_gib=memory_gib,
            # the whole distribution is sampled in training
            trained=(config.rollout.temperature, 1.0),
            template_kwargs=config.data.chat_template_kwargs,
            output=WorkerOutput(),
        ) as agents:
            yield agents
        return
    with EnvironmentPool(
        config.environment, memory_gib=memory_gib, output=WorkerOutput()
    ) as environment:
        yield environment


def load_functions(config: Config) -> UserCode:
    """Load the user's filter and loss. Raises ConfigError."""
    keep_group = None
    name = config.dynamic_sampling.filter
    if name is not None:
        keep_group = load_callable(name, error=ConfigError, option="dynamic_sampling.filter=")
    loss = None
    name = config.loss.function
    if name is not None:
        if module_file(name.partition(":")[0]) is None:
            load_callable(name, error=ConfigError, option="loss.function=")  # raises, without torch
        from dapo.policy.custom_loss import load_loss  # imports torch, as the user's module does

        loss = load_loss(name)
    return UserCode(keep_group=keep_group, loss=loss)


def _require_environment(config: Config) -> None:
    """Raise ConfigError if problems are to come from an environment, and there is none."""
    for option, source in (
        ("data.train", config.data.train_source),
        ("data.eval", config.data.eval_source),
    ):
        if (
            source is not None
            and "environment" in kinds(source)
            and config.environment.name is None
        ):
            raise ConfigError(
                f"{option}=environment: expected environment.name, whose environment gives the"
                " prompts, got none; set environment.name=my_games:Game, or name problems in"
                f" {option}"
            )


def _require_packages(config: Config) -> None:
    """Raise ConfigError, with a command to install it, if an option's package is missing."""
    requirements: list[tuple[str, str]] = [("log.sinks", sink) for sink in config.log.sinks]
    requirements += [("launcher", "ray")] if config.uses_ray else []
    requirements += [("model.lora", "peft")] if config.model.lora is not None else []
    for option, package in requirements:
        require_package(package, purpose=option, error=ConfigError)


def _require_engine(config: Config) -> None:
    """Raise ConfigError if the package of the engine is missing."""
    require = config.rollout.engine_kind.require_package
    if require is not None:
        pkgutil.resolve_name(require)(config)


def _require_teacher(config: Config, *, on_hub: bool) -> None:
    """Raise ConfigError if the model of `loss.reference.model` is missing."""
    if config.loss.teacher is None or config.loss.server is not None:
        return
    try:
        require_model(config.loss.teacher, on_hub=on_hub)
    except ConfigError as error:
        raise ConfigError(f"loss.reference.model: {error}") from None


def require_model(name: str, *, on_hub: bool = True) -> None:
    """Raise ConfigError if a name is not an alias, a directory of a model or a Hugging Face id.

    With `on_hub` the hub, or the cache of it, must have the id. Runs are models, too: their
    checkpoint is exported when it is loaded.
    """
    path = Path(name).expanduser()
    if name in MODEL_ALIASES or RunDirectory.is_run(path):
        return
    if os.path.lexists(path) or "/" in name or name.startswith((".", "~")):
        if require_model_files(name) == name and on_hub:
            require_hub_model(name)
        return
    near = did_you_mean(name, MODEL_ALIASES, otherwise="")
    raise ConfigError(
        f"model {name!r} is not an alias ({', '.join(MODEL_ALIASES)}), a directory here or a"
        f" Hugging Face id (OWNER/NAME){'; ' * bool(near)}{near}"
    )
