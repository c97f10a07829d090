"""`dapo eval`: what is evaluated, by which responses, and how the result is told."""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from dapo.assemble import build_engine, distinct, evaluation_plan, open_judge, read_inputs, resolve_auto
from dapo.cli.eval_report import print_comparison, print_evaluation
from dapo.cli.progress import progress
from dapo.config import Config, DataSpec, build_config, load_config, parse_data_argument, parse_overrides
from dapo.config.data_spec import BENCHMARKS, INSTRUCTION, parse_spec
from dapo.core.errors import CheckpointError, ConfigError, DataError
from dapo.core.files import atomic_write_json
from dapo.core.journal import open_journal
from dapo.data.problems import load_problems
from dapo.data.prompts import chat_messages
from dapo.distributed.launch import open_launcher
from dapo.evaluation.evaluate import EngineSampler, Response, Sampler, evaluate_samples
from dapo.evaluation.scores import Evaluation, EvaluationPlan, paired_difference, require_summary
from dapo.evaluation.server import ServerClient, ServerOptions
from dapo.policy.lora import saved_weights
from dapo.training.run_directory import RunDirectory, step_of
from dapo.training.signals import signals_as_requests
from dapo.types import Problem

DEFAULT_TOKENS = 1024
"""Response limit for a model that no run made; eval.max_response_tokens overrides it."""
_SETTINGS_THAT_MUST_MATCH = ("samples_per_problem", "temperature", "top_p", "max_response_tokens", "seed", "binary")


@dataclass(frozen=True)
class EvalRequest:
    """What the command line asks for."""

    data: str
    samples_per_problem: int | None = None
    """None: eval.samples_per_problem; a file that holds each problem k times asks for k."""
    server: str | None = None
    output: Path | None = None
    overrides: tuple[str, ...] = ()
    concurrency: int = 16
    """Requests that are in flight at `server`."""
    by_problem: bool = False
    """Also print a line a problem."""

    @property
    def sets_samples_per_problem(self) -> bool:
        """Has the user said how many samples a problem there shall be?"""
        asked = parse_overrides(self.overrides).get("eval")
        return self.samples_per_problem is not None or (isinstance(asked, dict) and "samples_per_problem" in asked)


def evaluate_model(model: str, request: EvalRequest) -> None:
    """Evaluate one model, run or served model; print, and write if asked."""
    require_folder(request.output)
    summary, result = run_evaluation(model, request, base=run_options(model), journal=journal_path(request.output))
    if request.output is not None:
        atomic_write_json(request.output, {**summary, "table": result.table()})
        delete_journals(request.output)
    print_evaluation(summary, request.output, result.table() if request.by_problem else None)


def compare_models(first: str, second: str, request: EvalRequest) -> None:
    """Evaluate two on the same problems with the same draws, and tell the paired difference.

    Each is a model, a run, or the file that an evaluation has written. A run's options hold for both.
    """
    require_folder(request.output)
    base = run_options(first) or run_options(second)
    results = []
    for index, model in enumerate((first, second), start=1):
        if model.endswith(".json"):
            results.append(read_result(Path(model)))
            continue
        journal = journal_path(request.output, index)
        summary, result = run_evaluation(model, request, base=base, journal=journal)
        results.append({**summary, "table": result.table()})
    for name in _SETTINGS_THAT_MUST_MATCH:
        if results[0].get(name) != results[1].get(name):
            raise DataError(
                f"{first} and {second} cannot be compared: {name} is {results[0].get(name)} in one and "
                f"{results[1].get(name)} in the other"
            )
    difference = paired_difference(results[0]["table"], results[1]["table"])
    if request.output is not None:
        atomic_write_json(request.output, {"first": results[0], "second": results[1], "comparison": difference})
        delete_journals(request.output)
    print_comparison(results, difference, request.output)


def run_evaluation(
    model: str, request: EvalRequest, *, base: Mapping[str, Any] | None, journal: Path | None
) -> tuple[dict[str, Any], Evaluation]:
    """One evaluation's summary and result; continues where the journal ends."""
    config, checkpoint = evaluation_config(model, parse_data_argument(request.data), request, base)
    with ExitStack() as stack:
        if request.server is not None:
            problems, copies, plan, open_sampler = _open_served_model(
                config, request.server, model, request.concurrency
            )
        else:
            problems, copies, plan, open_sampler = _open_local_model(config, checkpoint)
        if copies > 1 and not request.sets_samples_per_problem:
            print(
                f"{plan.name} holds each problem {copies} times: {copies} samples for each of {len(problems)} problems"
            )
            plan = replace(plan, samples_per_problem=copies)
        judge = stack.enter_context(open_judge(config))
        sampler = open_sampler(plan, stack)
        partial_results = None
        if journal is not None:
            identity = _identity(model, checkpoint, request, config, plan, problems)
            partial_results = stack.enter_context(open_journal(journal, identity))
            if partial_results.records:
                print(
                    f"continuing: {len(partial_results.records)} of {len(problems)} problems are judged already "
                    f"({journal})"
                )
        stop = stack.enter_context(signals_as_requests("stopping; Ctrl-C ends at once"))
        advice = "; the same command continues" if journal is not None else "; with --output it could be continued"
        update_progress = stack.enter_context(progress(f"evaluate {model}"))
        result = evaluate_samples(
            sampler,
            judge,
            problems,
            plan,
            journal=partial_results,
            on_progress=update_progress,
            check=partial(stop.check, advice),
        )
    return {"model": model, "data": request.data, **result.summary()}, result


def run_options(model: str) -> dict[str, Any] | None:
    """The options that a run was trained with; None for what is no run."""
    if not (Path(model) / "manifest.json").is_file():
        return None
    return load_config(RunDirectory.open(model).config).model_dump(mode="json")


def evaluation_config(
    model: str, data: DataSpec, request: EvalRequest, base: Mapping[str, Any] | None
) -> tuple[Config, Path | None]:
    """A run's own options and newest checkpoint, or the paper's evaluation of a model that no run made."""
    checkpoint = None
    raw: dict[str, Any] = {
        "model": model,
        "data": {},
        "rollout": {"max_response_tokens": DEFAULT_TOKENS},
        "overlong": {"mode": "off"},
    }
    if base is not None:
        raw = json.loads(json.dumps(base))
        if parse_spec(data).kind != parse_spec(raw["data"]["train"]).kind:
            raw["reward"] = {}  # another kind of problem wants another verifier
    if (Path(model) / "manifest.json").is_file():
        run = RunDirectory.open(model)
        checkpoint = run.latest_checkpoint(warn=warn)
        if checkpoint is None:
            raise CheckpointError(f"{run.path} has no checkpoint yet, so there is nothing to evaluate")
        raw["model"] = load_config(run.config).model_dump(mode="json")["model"]
    elif base is not None:
        raw["model"] = {"name": model, "dtype": raw["model"]["dtype"]}  # trust in one model is not trust in another
    raw["data"] |= {"train": data, "eval": data}
    if isinstance(data, str) and data in BENCHMARKS and not raw["data"].get("instruction"):
        raw["data"]["instruction"] = INSTRUCTION
    if request.samples_per_problem is not None:
        raw["eval"] = {**raw.get("eval", {}), "samples_per_problem": request.samples_per_problem}
    return resolve_auto(build_config(raw, request.overrides, where="dapo eval")), checkpoint


def require_folder(output: Path | None) -> None:
    """Raise ConfigError where the result could not be written: before anything is sampled."""
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}")


def journal_path(output: Path | None, index: int | None = None) -> Path | None:
    """Where the first part of an unfinished evaluation lies; without an output there is none."""
    if output is None:
        return None
    return output.with_name(f"{output.name}{f'.{index}' if index else ''}.partial")


def delete_journals(output: Path) -> None:
    """The result is written."""
    for index in (None, 1, 2):
        if path := journal_path(output, index):
            path.unlink(missing_ok=True)


def read_result(path: Path) -> dict[str, Any]:
    """A file that `dapo eval --output`, or a run, has written. Raises DataError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as an evaluation: {error}") from None
    return {"model": str(path), **require_summary(found, str(path))}


EvaluationSetup: TypeAlias = tuple[list[Problem], int, EvaluationPlan, Callable[[EvaluationPlan, ExitStack], Sampler]]
"""Problems, how often each is in its file, the plan, and what opens the sampler."""


def warn(text: str) -> None:
    """To the standard error."""
    print(f"warning: {text}", file=sys.stderr)


def _open_local_model(config: Config, checkpoint: Path | None) -> EvaluationSetup:
    """Problems and plan for a model that is loaded here, and how its sampler is opened."""
    inputs = read_inputs(config, training=False)

    def open_sampler(plan: EvaluationPlan, stack: ExitStack) -> Sampler:
        launcher = stack.enter_context(open_launcher(config))
        engine = build_engine(config, inputs.loaded, launcher, log=warn)
        stack.callback(engine.close)
        if checkpoint is not None:
            engine.load_weights(saved_weights(checkpoint, inputs.loaded.model), version=step_of(checkpoint))
        elif launcher is not None:  # an engine elsewhere may have begun without any weights
            engine.load_weights(inputs.loaded, version=0)
        return EngineSampler(engine, inputs.encoder, plan)

    return inputs.held_out, inputs.copies, evaluation_plan(config, inputs.loaded.stop_ids), open_sampler


def _open_served_model(config: Config, url: str, model: str, concurrency: int) -> EvaluationSetup:
    """Problems and plan for a model behind a server: nothing is loaded here."""
    source = config.data.eval_source
    assert source is not None
    problems, copies = distinct(load_problems(source, split="eval"), source)

    def open_sampler(plan: EvaluationPlan, stack: ExitStack) -> Sampler:
        options = ServerOptions(
            url=url,
            model=model,
            samples=plan.samples_per_problem,
            temperature=plan.temperature,
            top_p=plan.top_p,
            max_tokens=plan.max_response_tokens,
            seed=plan.seed,
            concurrency=concurrency,
        )
        ask = partial(chat_messages, instruction=config.data.instruction, system=config.data.system)
        return ServerSampler(stack.enter_context(ServerClient(options, ask)))

    return problems, copies, evaluation_plan(config, ()), open_sampler


@dataclass(frozen=True)
class ServerSampler:
    """A server's answers as an evaluation's responses."""

    client: ServerClient

    def submit(self, index: int, problem: Problem) -> None:
        """As the client does."""
        self.client.submit(index, problem)

    def poll(self) -> list[tuple[int, int, Response]]:
        """As the client does; a server gives text, not tokens."""
        return [
            (index, i, Response(found.text, (), found.tokens, found.finish, found.error))
            for index, i, found in self.client.poll()
        ]


def _identity(
    model: str,
    checkpoint: Path | None,
    request: EvalRequest,
    config: Config,
    plan: EvaluationPlan,
    problems: Sequence[Problem],
) -> dict[str, Any]:
    """What makes two evaluations the same, so that one may continue the other."""
    ids = hashlib.blake2b("\n".join(problem.id for problem in problems).encode(), digest_size=8).hexdigest()
    return {
        "model": model,
        "checkpoint": str(checkpoint) if checkpoint is not None else None,
        "server": request.server,
        "problems": ids,
        **{f"plan.{name}": value for name, value in asdict(plan).items()},
        "prompt": config.data.model_dump(mode="json", include={"instruction", "system", "chat_template"}),
        "reward": config.reward.model_dump(mode="json"),
        "dtype": config.model.dtype,
    }
