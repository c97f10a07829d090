"""Checks the machine, the user's code and the rows of the data before a run, without torch and in
about a second.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from dapo.config import Config, DataConfig, RewardConfig
from dapo.config.data_spec import kinds
from dapo.config.load import resolve_auto_verifier
from dapo.config.model_options import MODEL_ALIASES
from dapo.core.errors import ConfigError, RewardError
from dapo.core.loading import load_callable, require_package
from dapo.core.text import did_you_mean
from dapo.data.prepare.stats import conflicting_answers
from dapo.data.problems import load_problems
from dapo.data.sources.builtin import Split
from dapo.data.sources.rows import describe_texts
from dapo.rewards.combine import RewardSpec
from dapo.rewards.data_check import warnings_about_rows
from dapo.rewards.verifier import ANSWER_MARKERS, VERIFIERS
from dapo.rewards.verifiers.function import require_columns
from dapo.rewards.workers.output import VerifierOutput
from dapo.rewards.workers.pool import VerifierPool
from dapo.runs.directory import require_new_run
from dapo.types import Group, Problem, Prompt, content_text

NO_COLUMNS: Mapping[str, Collection[str]] = {}


def load_rows(
    data: DataConfig,
    verifier: RewardConfig,
    split: Split,
    needed_columns: Mapping[str, Collection[str]] = NO_COLUMNS,
) -> tuple[list[Problem], list[str]]:
    """Load the rows of `data.train` or `data.eval`, with warnings about rows that cannot be judged.

    In the options of the reward `auto` is resolved. `needed_columns` are those that each user
    function of the reward requires (`VerifierPool`). Raises DataError if rows lack a column that
    the reward reads, and RewardError if it can judge no row.
    """
    source = data.train_source if split == "train" else data.eval_source
    assert source is not None
    reward = RewardSpec.of(verifier.verifier, options=verifier.options)
    texts: dict[str, str] = {}
    rows = load_problems(source, split=split, require_answer=reward.reads_answer, texts=texts)
    where = f"data.{split}"
    require_columns(rows, needed_columns, where=where)
    warnings = warnings_about_rows(rows, verifier.verifier, verifier.options, where=where)
    if texts and any(name not in VERIFIERS for name in reward.weights):
        warnings.append(f"{where}: {describe_texts(texts)}")
    if reward.reads_answer:
        conflicts = conflicting_answers(rows)
        if conflicts:
            warnings.append(
                f"{where}: texts with different answers: {conflicts:,}, so a row rewards what another"
                " refuses; dapo data dedupe keeps the answer of most rows, and none without a majority"
            )
    return rows, [*warnings, *_unrequested_markers(data, rows, reward, where)]


def _unrequested_markers(
    data: DataConfig, rows: Sequence[Problem], reward: RewardSpec, where: str
) -> Iterator[str]:
    """Warn of each verifier that reads an answer marker which most prompts do not request."""
    always = f"{data.instruction}\n{data.system or ''}"
    for name in reward.weights:
        markers = VERIFIERS[name].markers if name in VERIFIERS else ()
        if not markers or reward.options[name].get("flexible"):
            continue
        requested = Counter(
            marker
            for row in rows
            for marker in ANSWER_MARKERS
            if marker in f"{_text(row.prompt)}\n{always}".casefold()
        )
        most = max(requested[marker] for marker in markers)
        if 2 * most >= len(rows):
            continue
        verifier_markers = [ANSWER_MARKERS[marker] for marker in markers]
        requested_markers = [
            f"{ANSWER_MARKERS[m]} ({count:,} rows)"
            for m, count in requested.items()
            if m not in markers
        ]
        marked_by = " or ".join(verifier_markers)
        alternatives = (
            f"; they request {' and '.join(requested_markers)}" if requested_markers else ""
        )
        yield (
            f"{where}: the verifier {name} reads an answer marked by {marked_by}, which {most:,} of"
            f" {len(rows):,} prompts request{alternatives}. Request it in data.instruction, or use"
            " another verifier"
        )


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(content_text(message) for message in prompt)


@contextmanager
def open_judge(
    config: Config,
    *,
    run_dir: Path | None = None,
    elsewhere: bool = False,
    prepared: Collection[str] = (),
) -> Iterator[VerifierPool]:
    """Check everything that needs neither torch nor the data, and open the verifiers of a run.

    Raises ConfigError if a package, a model, or a user's filter or loss is missing, CheckpointError
    if `run_dir` has a run or cannot be made, and RewardError if a verifier does not exist or cannot
    be used.

    Args:
        config: The options.
        run_dir: The directory of a new run.
        elsewhere: The run is for another machine, so packages and models may be missing here.
        prepared: The names in `run_dir` that were written for the run.
    """
    if run_dir is not None:
        require_new_run(run_dir, prepared=prepared)
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
    if not elsewhere:
        _require_packages(config)
        _require_model(config.model.name)
    load_filter(config.dynamic_sampling.filter)
    if config.loss.function is not None:
        from dapo.policy.custom_loss import load_loss  # imports torch, as the user's module does

        load_loss(config.loss.function)
    with VerifierPool(
        resolve_auto_verifier(config).reward,
        output=VerifierOutput(),
        template_time=config.data.template_time,
    ) as judge:
        judge.needed_columns = {**judge.needed_columns, **_columns_of_audit(config)}
        yield judge


def load_filter(name: str | None) -> Callable[[Group], bool] | None:
    """Load the user's filter, `dynamic_sampling.filter`; None without one. Raises ConfigError."""
    if name is None:
        return None
    return load_callable(name, error=ConfigError, option="dynamic_sampling.filter=")


def _columns_of_audit(config: Config) -> Mapping[str, Collection[str]]:
    """Return the columns that the audit's verifier requires.

    Raises RewardError if it cannot be used.
    """
    if config.audit_reward is None:
        return {}
    try:
        with VerifierPool(config.audit_reward) as audit:
            return audit.needed_columns
    except RewardError as error:
        raise RewardError(f"audit.verifier: {error}") from None


def _require_packages(config: Config) -> None:
    """Raise ConfigError, with a command to install it, if an option's package is missing."""
    requirements: list[tuple[str, str]] = [("log.sinks", sink) for sink in config.log.sinks]
    requirements += [("launcher", "ray")] if config.uses_ray else []
    requirements += [("model.lora", "peft")] if config.model.lora is not None else []
    for option, package in requirements:
        require_package(package, purpose=option, error=ConfigError)


def _require_model(name: str) -> None:
    """Raise ConfigError if a name is not an alias, a directory or a Hugging Face id."""
    path = Path(name).expanduser()
    if name in MODEL_ALIASES or name.count("/") == 1 or os.path.lexists(path):
        return
    if path.is_absolute() or name.startswith(".") or "/" in name:
        raise ConfigError(f"model {name!r}: there is no such directory")
    near = did_you_mean(name, MODEL_ALIASES, otherwise="")
    raise ConfigError(
        f"model {name!r} is not an alias ({', '.join(MODEL_ALIASES)}), a directory here or a"
        f" Hugging Face id (OWNER/NAME){'; ' * bool(near)}{near}"
    )
