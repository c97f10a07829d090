"""Evaluates a model or compares two, for `dapo eval` and runs in Python.

Torch is imported once options, data and verifier are checked.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo.config import Config, DataSpec, build_config, parse_data_argument, parse_overrides
from dapo.config.data_spec import BENCHMARKS, INSTRUCTION
from dapo.config.load import as_literal, resolve_auto_verifier
from dapo.core.errors import ConfigError, DataError, RewardError
from dapo.core.files import atomic_write_json, damage_of, read_json
from dapo.core.journal import Journal, open_journal
from dapo.core.terminal import print_text, warn
from dapo.data.prepare.write import require_new
from dapo.data.problems import load_problems
from dapo.data.prompts import PromptEncoder, chat_request
from dapo.evaluation.evaluate import EngineSampler, Sampler, evaluate
from dapo.evaluation.pairing import paired_difference
from dapo.evaluation.scores import Evaluation, EvaluationPlan, evaluation_plan, require_summary
from dapo.evaluation.server import ServerSampler
from dapo.runs.checkpoints import step_of
from dapo.runs.console import progress
from dapo.runs.directory import RunDirectory
from dapo.runs.evaluations import with_verifier
from dapo.runs.manifest import TEMPLATE_TIME, template_time_of
from dapo.runs.stages import run_path_of
from dapo.runs.stored_config import load_run_config, with_start_folder
from dapo.start.check import Checked, check, read_data
from dapo.start.model_choice import DEFAULT_TOKENS, choose_model
from dapo.start.rows import RunData
from dapo.training.signals import END_AT_ONCE, InterruptHandler, signals_as_requests
from dapo.types import Problem

if TYPE_CHECKING:
    from dapo.policy.model import LoadedModel
    from dapo.start.episodes import AgentEpisodes, Episodes
    from dapo.start.read import Inputs


@dataclass(frozen=True)
class EvalRequest:
    """The arguments of `dapo eval`."""

    data: DataSpec | None  # None: the run's `data.eval`
    samples_per_problem: int | None = None
    """None: eval.samples_per_problem, or the number of times that a data file repeats each problem.
    """
    server: str | None = None
    output: Path | None = None
    overrides: tuple[str, ...] = ()
    concurrency: int = 16  # the number of requests in flight at `server`
    on_second_interrupt: InterruptHandler = END_AT_ONCE
    until_width: float | None = None  # the interval, in points, that ends it; None: all problems

    @property
    def named_verifier(self) -> Any:
        return self._override("reward", "verifier")

    @property
    def sets_samples_per_problem(self) -> bool:
        return (
            self.samples_per_problem is not None
            or self._override("eval", "samples_per_problem") is not None
        )

    def _override(self, section: str, option: str) -> Any:
        values = parse_overrides(self.overrides).get(section)
        return values.get(option) if isinstance(values, dict) else None


def evaluate_model(model: str, request: EvalRequest) -> dict[str, Any]:
    """Evaluate a model, a run or a served model; write to `output` and return the result."""
    _require_writable(request.output)
    _require_models([model], request)
    journal = _journal_path(request.output)
    result = _evaluate(model, request, base=run_options(model), journal=journal)
    return _written(request.output, result)


def compare_models(first: str, second: str, request: EvalRequest) -> dict[str, Any]:
    """Compare two models on the same problems, with the same random numbers where both are sampled.

    Each is a model, a run, or a file of `dapo eval --output` or a run. A run's options apply to
    both.
    """
    _require_writable(request.output)
    _require_models([first, second], request)
    base = run_options(first)
    second_base = run_options(second)
    judges = [
        options["reward"]["verifier"] for options in (base, second_base) if options is not None
    ]
    if len(judges) == 2 and judges[0] != judges[1] and request.named_verifier is None:
        print_text(
            f"the verifier of {first} judges both ({judges[0]}); {second} was trained with"
            f" {judges[1]}"
        )
    base = base or second_base
    results = []
    for index, model in enumerate((first, second), start=1):
        if model.endswith(".json"):
            results.append(_read_result(Path(model)))
        else:
            journal = _journal_path(request.output, f".{index}")
            results.append(_evaluate(model, request, base=base, journal=journal))
    try:
        difference = paired_difference(*results)
    except DataError as error:
        raise DataError(f"{first} and {second} cannot be compared: {error}") from None
    result = {"first": results[0], "second": results[1], "comparison": difference}
    return _written(request.output, result)


def run_options(model: str) -> dict[str, Any] | None:
    """Return the options of a run; None if `model` is not a run directory."""
    if not RunDirectory.is_run(model):
        return None
    config = load_run_config(RunDirectory.open(model))
    return resolve_auto_verifier(config).model_dump(mode="json")


def evaluation_config(
    model: str, data: DataSpec, request: EvalRequest, base: Mapping[str, Any] | None
) -> tuple[Config, Path | None]:
    """Return the options of an evaluation and, for a run, its newest checkpoint.

    Args:
        model: an alias, a Hugging Face id, a model directory or a run directory.
        data: the problems.
        request: the arguments of the command; its overrides win.
        base: the options of a run, whose verifier judges any problems; None: the defaults of the
            paper's evaluation.

    Raises CheckpointError if the run has no checkpoint yet.
    """
    checkpoint = None
    raw: dict[str, Any] = {"model": model, "data": {}, "overlong": {"mode": "off"}}
    raw["rollout"] = {"max_response_tokens": DEFAULT_TOKENS}
    if base is not None:
        raw = {**as_literal(json.loads(json.dumps(base))), "audit": {}}
        verifier = request.named_verifier
        if verifier is not None and verifier != raw["reward"]["verifier"]:
            limits = ("workers", "timeout_s", "memory_gib")
            raw["reward"] = {name: raw["reward"][name] for name in limits}
    if RunDirectory.is_run(model):
        choice = choose_model(model)
        checkpoint = choice.checkpoint
        run_config = choice.config.model_dump(mode="json")
        raw["model"] = as_literal(run_config["model"])
        # those of its own evaluations
        raw["rollout"]["native"]["kernels"] = run_config["rollout"]["native"]["kernels"]
    elif base is not None:
        # trust_remote_code is about one model
        raw["model"] = {"name": model, "dtype": raw["model"]["dtype"]}
        raw["rollout"]["native"]["kernels"] = None
    raw["data"] |= {"train": data, "eval": data}
    if isinstance(data, str) and data in BENCHMARKS and not raw["data"].get("instruction"):
        raw["data"]["instruction"] = INSTRUCTION
    if request.samples_per_problem is not None:
        raw["eval"] = {**raw.get("eval", {}), "samples_per_problem": request.samples_per_problem}
    config = build_config(raw, request.overrides, where="dapo eval")
    if checkpoint is not None:
        time = template_time_of(RunDirectory.open(model))
        if time is not None:
            config = config.at_time(time)
    return config, checkpoint


def _evaluate(
    model: str, request: EvalRequest, *, base: Mapping[str, Any] | None, journal: Path | None
) -> dict[str, Any]:
    """Return the summary and the table of one evaluation; problems in the journal are skipped."""
    data = evaluation_data(request, base)
    config, checkpoint = evaluation_config(model, data, request, base)
    with with_start_folder(RunDirectory(run_path_of(model))), ExitStack() as stack:
        has_run = checkpoint is not None
        checked = stack.enter_context(check(config, training=False, has_run=has_run))
        inputs, problems, copies = _read_problems(checked, request, is_run=base is not None)
        config = checked.config if inputs is None else inputs.config
        stop_ids = inputs.loaded.stop_ids if inputs is not None else ()
        plan = evaluation_plan(config, stop_ids)
        if copies > 1 and not request.sets_samples_per_problem:
            print_text(
                f"{plan.name} holds each problem {copies} times: {copies} samples for each of"
                f" {len(problems)} problems"
            )
            plan = replace(plan, samples_per_problem=copies)
        sampler: Sampler
        if inputs is not None:
            sampler = open_engine_sampler(
                config, inputs.loaded, inputs.encoder, checkpoint, plan, stack, inputs.episodes
            )
        else:
            server = _server_sampler(model, request, config, plan)
            sampler = stack.enter_context(closing(server))
        time = None if inputs is None else inputs.encoder.time_read
        records = None
        if journal is not None:
            identity = {
                "model": model,
                "checkpoint": str(checkpoint) if checkpoint is not None else None,
            }
            date = {} if time is None else {"date of the chat template": str(time.date())}
            identity |= {"server": request.server, **_settings(config, plan, problems), **date}
            records = stack.enter_context(open_journal(journal, identity))
            _say_what_is_judged(records, problems, journal)
        stop = stack.enter_context(
            signals_as_requests(
                "stopping; Ctrl-C ends at once", on_second=request.on_second_interrupt
            )
        )
        advice = "; with --output it could be continued"
        if journal is not None:
            advice = "; the same command continues"
        show = stack.enter_context(progress(f"evaluate {model}"))
        check_stop = partial(stop.check, advice)
        assert checked.code.judge is not None
        result = evaluate(
            sampler,
            checked.code.judge,
            problems,
            journal=records,
            on_progress=show,
            check=check_stop,
            until_width=request.until_width,
        )
    step = {} if checkpoint is None else {"step": step_of(checkpoint)}
    moment = {} if time is None else {TEMPLATE_TIME: time.isoformat()}
    return {
        "model": model,
        **step,
        "data": request.data or data,
        **moment,
        **_summary_of(result, request.until_width),
        "table": result.table(),
    }


def _say_what_is_judged(records: Journal, problems: Sequence[Problem], journal: Path) -> None:
    judged = len(records.records)
    if judged:
        print_text(
            f"continuing: {judged} of {len(problems)} problems are judged already ({journal})"
        )


def _summary_of(result: Evaluation, until_width: float | None) -> dict[str, Any]:
    """Return the summary of an evaluation, and print if its interval is too wide."""
    summary = result.summary()
    note = _width_note(summary, until_width)
    if note:
        print_text(note)
    return summary


def _width_note(summary: Mapping[str, Any], until_width: float | None) -> str:
    """Say that all problems were judged before the interval was narrow enough; or nothing."""
    if until_width is None or "until_width" in summary or summary["low"] is None:
        return ""
    points = 100 * (summary["high"] - summary["low"])
    if points <= until_width:
        return ""
    return (
        f"all {summary['problems']} problems are judged, and the interval is {points:.1f} points"
        f" wide, not {until_width:g}: more problems or more samples per problem narrow it"
    )


def _server_sampler(
    model: str, request: EvalRequest, config: Config, plan: EvaluationPlan
) -> ServerSampler:
    """Return a sampler of the served model. Raises ConfigError for a run that plays episodes."""
    assert request.server is not None
    if config.plays_episodes:
        raise ConfigError(
            "a server samples single responses, and this run plays episodes: evaluate it"
            " without a server"
        )
    to_request = partial(chat_request, config=config.data)
    return ServerSampler(request.server, model, plan, to_request, concurrency=request.concurrency)


def _read_problems(
    checked: Checked, request: EvalRequest, *, is_run: bool
) -> tuple["Inputs | None", list[Problem], int]:
    """Read the problems, with their copies, and then the model unless a server has it.

    Raises DataError and RewardError.
    """
    data = _read_rows(checked, request, is_run=is_run)
    if request.server is not None:
        inputs = None
        problems = data.held_out
        notes = data.notes
    else:
        from dapo.start.read import read
        from dapo.start.resolve import resolve

        inputs = read(resolve(checked, training=False), data)
        problems = inputs.held_out
        notes = inputs.notes
    for note in notes:
        print_text(note)
    return inputs, problems, data.copies


def _read_rows(checked: Checked, request: EvalRequest, *, is_run: bool) -> RunData:
    """Read the problems. Raises DataError and RewardError."""
    config = checked.config
    source = config.data.eval_source
    assert source is not None
    try:
        return read_data(checked, training=False)
    except (DataError, RewardError) as error:
        if not is_run or request.named_verifier is not None:
            raise
        # raises if no verifier could judge
        load_problems(source, split="eval", require_answer=False)
        raise type(error)(
            f"{error}. An evaluation keeps the run's verifier, here {config.reward.verifier};"
            ' another one judges with reward.verifier=NAME, in Python with reward={"verifier":'
            ' "NAME"}'
        ) from None


def evaluation_data(request: EvalRequest, base: Mapping[str, Any] | None) -> DataSpec:
    """Return the problems of `--data`, or of the run's `data.eval`.

    Raises ConfigError without either.
    """
    if request.data is not None:
        return parse_data_argument(request.data) if isinstance(request.data, str) else request.data
    source: DataSpec | None = None if base is None else base["data"]["eval"]
    if source is None:
        reason = ": the run was trained without data.eval"
        if base is None:
            reason = ", except for a run with data.eval"
        raise ConfigError(f"dapo eval needs --data SOURCE{reason}")
    return source


def open_engine_sampler(
    config: Config,
    loaded: "LoadedModel",
    encoder: PromptEncoder,
    checkpoint: Path | None,
    plan: EvaluationPlan,
    stack: ExitStack,
    episodes: "Episodes | AgentEpisodes | None" = None,
) -> EngineSampler:
    """Open a sampler with the weights of a checkpoint or the model; `stack` closes it.

    Args:
        config: the resolved options.
        loaded: the model, its tokenizer and its weights.
        encoder: the encoder of prompts.
        checkpoint: a checkpoint of the run; None: the weights of `loaded`.
        plan: the sampling settings.
        stack: closes the engine and its processes.
        episodes: the environment of a run that plays episodes.
    """
    from dapo.policy.lora import saved_weights
    from dapo.start.build import build_engine, open_launcher

    launcher = stack.enter_context(open_launcher(config))
    engine = build_engine(config, loaded, launcher, episodes=episodes, log=warn)
    stack.callback(engine.close)
    if checkpoint is not None:
        engine.load_weights(saved_weights(checkpoint, loaded.model), version=step_of(checkpoint))
    elif launcher is not None:  # engines in other processes may have started without weights
        engine.load_weights(loaded, version=0)
    positions = getattr(loaded.model.config, "max_position_embeddings", None)
    return EngineSampler(engine, encoder, plan, positions=positions)


_PROMPT_OPTIONS = {"instruction", "system", "chat_template", "chat_template_kwargs"}


def _settings(config: Config, plan: EvaluationPlan, problems: list[Problem]) -> dict[str, Any]:
    text = "\n".join(problem.id for problem in problems)
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    episodes = {}
    if config.plays_episodes:
        episodes = {"environment": config.environment.model_dump(mode="json")}
    return {
        "problems": digest.hexdigest(),
        **{f"plan.{name}": value for name, value in asdict(plan).items()},
        "prompt": config.data.model_dump(mode="json", include=_PROMPT_OPTIONS),
        "reward": config.reward.model_dump(mode="json"),
        "dtype": config.model.dtype,
        **episodes,
    }


def _require_models(models: Sequence[str], request: EvalRequest) -> None:
    """Raise the errors of `choose_model`, unless a server has the model."""
    for model in models:
        if request.server is None and not model.endswith(".json"):
            choose_model(model)


def _require_writable(output: Path | None) -> None:
    try:
        if output is not None:
            require_new(output, force=True)
            if output.exists() and not _is_result(output):
                raise ConfigError(
                    f"{output} holds something else than an evaluation, and would be replaced;"
                    " choose another name"
                )
    except ConfigError as error:
        raise ConfigError(f"--output {error}") from None


def _is_result(path: Path) -> bool:
    """Return True if a file has an evaluation or a comparison, or nothing."""
    if path.stat().st_size == 0:
        return True
    try:
        content = read_json(path)
    except (OSError, ValueError):  # too large, or no JSON
        return False
    return isinstance(content, dict) and ("table" in content or "comparison" in content)


def _journal_path(output: Path | None, infix: str = "") -> Path | None:
    return None if output is None else output.with_name(f"{output.name}{infix}.partial")


def _written(output: Path | None, result: dict[str, Any]) -> dict[str, Any]:
    """Write a result to `output`, if there is one, and remove its journals."""
    if output is not None:
        atomic_write_json(output, result)
        for infix in ("", ".1", ".2"):
            output.with_name(f"{output.name}{infix}.partial").unlink(missing_ok=True)
    return result


def _read_result(path: Path) -> dict[str, Any]:
    with damage_of(path):
        content = read_json(path)
    return {"model": str(path), **with_verifier(require_summary(content, str(path)), path)}
