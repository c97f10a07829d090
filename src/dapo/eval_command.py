"""`dapo eval`: what is evaluated, by which responses, and how the result is told."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from dapo.assemble import build_engine, evaluation_plan, open_judge, read_inputs, resolve_auto
from dapo.config import Config, DataSpec, build_config, load_config, parse_data_argument
from dapo.data.benchmarks import BENCHMARKS, INSTRUCTION
from dapo.data.problems import load_problems, unique_problems
from dapo.data.prompts import chat_messages
from dapo.data.spec import spec_kind
from dapo.engines.server import ServerClient, ServerOptions
from dapo.errors import CheckpointError, ConfigError, DataError
from dapo.evaluation import EngineSampler, Journal, Response, Sampler, evaluate_samples
from dapo.policy.checkpoint import SavedWeights
from dapo.run import RunDirectory, atomic_write_json, step_of
from dapo.scores import Evaluation, EvaluationPlan, has_many_errors, paired_difference
from dapo.telemetry.console import duration
from dapo.types import Problem

DEFAULT_TOKENS = 1024
"""Response limit for a model that no run made; eval.max_response_tokens overrides it."""
_LINES_OF_PROGRESS = 10
_SAME_IN_A_COMPARISON = ("samples_per_problem", "temperature", "top_p", "max_response_tokens", "seed", "binary")


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    data: str
    samples_per_problem: int | None = None
    """None: eval.samples_per_problem; a file that holds each problem k times asks for k."""
    server: str | None = None
    output: Path | None = None
    overrides: tuple[str, ...] = ()


def evaluate_model(model: str, request: Request) -> None:
    """Evaluate one model, run or served model; print, and write if asked."""
    require_folder(request.output)
    summary, result = evaluated(model, request, base=run_options(model), journal=journal_path(request.output))
    if request.output is not None:
        atomic_write_json(request.output, {**summary, "table": result.table()})
        delete_journals(request.output)
    print_evaluation(summary, request.output)


def compare_models(first: str, second: str, request: Request) -> None:
    """Evaluate two on the same problems with the same draws, and tell the paired difference.

    Each is a model, a run, or the file that an evaluation has written. A run's options hold for both.
    """
    require_folder(request.output)
    base = run_options(first) or run_options(second)
    results = []
    for place, model in enumerate((first, second), start=1):
        if model.endswith(".json"):
            results.append(read_result(Path(model)))
            continue
        journal = journal_path(request.output, place)
        summary, result = evaluated(model, request, base=base, journal=journal)
        results.append({**summary, "table": result.table()})
    for name in _SAME_IN_A_COMPARISON:
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


def evaluated(
    model: str, request: Request, *, base: Mapping[str, Any] | None, journal: Path | None
) -> tuple[dict[str, Any], Evaluation]:
    """One evaluation's summary and result; continues where the journal ends."""
    config, checkpoint = evaluation_config(model, parse_data_argument(request.data), request, base)
    with ExitStack() as stack:
        if request.server is not None:
            problems, plan, open_sampler = _served(config, request.server, model)
        else:
            problems, plan, open_sampler = _sampled_here(config, checkpoint)
        plan, problems = with_copies(config, request, plan, problems)
        judge = stack.enter_context(open_judge(config))
        sampler = open_sampler(plan, stack)
        notes = None
        if journal is not None:
            notes = stack.enter_context(Journal(journal, _identity(model, checkpoint, request, config, plan, problems)))
            if notes.rows:
                print(f"continuing: {len(notes.rows)} of {len(problems)} problems are judged already ({journal})")
        tell = stack.enter_context(progress(f"evaluate {model}"))
        result = evaluate_samples(sampler, judge, problems, plan, journal=notes, on_progress=tell)
    return {"model": model, "data": request.data, **result.summary()}, result


def run_options(model: str) -> dict[str, Any] | None:
    """The options that a run was trained with; None for what is no run."""
    if not (Path(model) / "manifest.json").is_file():
        return None
    return load_config(RunDirectory.open(model).config).model_dump(mode="json")


def evaluation_config(
    model: str, data: DataSpec, request: Request, base: Mapping[str, Any] | None
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
        if spec_kind(data) != spec_kind(raw["data"]["train"]):
            raw["reward"] = {}  # another kind of problem wants another verifier
    if (Path(model) / "manifest.json").is_file():
        run = RunDirectory.open(model)
        checkpoint = run.latest_checkpoint(warn=lambda text: print(f"warning: {text}", file=sys.stderr))
        if checkpoint is None:
            raise CheckpointError(f"{run.path} has no checkpoint yet, so there is nothing to evaluate")
        raw["model"] = load_config(run.config).model_dump(mode="json")["model"]
    elif base is not None:
        raw["model"] = {**raw["model"], "name": model}
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


def journal_path(output: Path | None, place: int | None = None) -> Path | None:
    """Where the first part of an unfinished evaluation lies; without an output there is none."""
    if output is None:
        return None
    return output.with_name(f"{output.name}{f'.{place}' if place else ''}.partial")


def delete_journals(output: Path) -> None:
    """The result is written."""
    for place in (None, 1, 2):
        if path := journal_path(output, place):
            path.unlink(missing_ok=True)


def read_result(path: Path) -> dict[str, Any]:
    """A file that `dapo eval --output` has written. Raises DataError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as an evaluation: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("table"), list):
        raise DataError(f"{path} is not what `dapo eval --output` writes: it holds no table")
    return found


Opened: TypeAlias = tuple[list[Problem], EvaluationPlan, Callable[[EvaluationPlan, ExitStack], Sampler]]


def _sampled_here(config: Config, checkpoint: Path | None) -> Opened:
    """Problems and plan for a model that is loaded here, and how its sampler is opened."""
    inputs = read_inputs(config, training=False)

    def open_sampler(plan: EvaluationPlan, stack: ExitStack) -> Sampler:
        engine = build_engine(config, inputs.loaded)
        stack.callback(engine.close)
        if checkpoint is not None:
            engine.load_weights(SavedWeights(checkpoint), version=step_of(checkpoint))
        return EngineSampler(engine, inputs.encoder, plan)

    return inputs.held_out, evaluation_plan(config, inputs.loaded.stop_ids), open_sampler


def _served(config: Config, url: str, model: str) -> Opened:
    """Problems and plan for a model behind a server: nothing is loaded here."""
    assert config.data.eval is not None
    problems = [problem for problem, _ in unique_problems(load_problems(config.data.eval, split="eval"))]

    def open_sampler(plan: EvaluationPlan, stack: ExitStack) -> Sampler:
        options = ServerOptions(
            url=url,
            model=model,
            samples=plan.samples_per_problem,
            temperature=plan.temperature,
            top_p=plan.top_p,
            max_tokens=plan.max_response_tokens,
            seed=plan.seed,
            concurrency=config.eval.server_concurrency,
            timeout_s=config.eval.server_timeout_s,
            retries=config.eval.server_retries,
        )
        ask = partial(chat_messages, instruction=config.data.instruction, system=config.data.system)
        return ServerSampler(stack.enter_context(ServerClient(options, ask)))

    return problems[: config.eval.max_problems], evaluation_plan(config, ()), open_sampler


@dataclass(frozen=True)
class ServerSampler:
    """A server's answers as an evaluation's responses."""

    client: ServerClient

    def submit(self, place: int, problem: Problem) -> None:
        """As the client does."""
        self.client.submit(place, problem)

    def poll(self) -> list[tuple[int, int, Response]]:
        """As the client does; a server gives text, not tokens."""
        return [
            (place, i, Response(found.text, (), found.tokens, found.finish, found.error))
            for place, i, found in self.client.poll()
        ]


def with_copies(
    config: Config, request: Request, plan: EvaluationPlan, problems: list[Problem]
) -> tuple[EvaluationPlan, list[Problem]]:
    """A file that holds every problem k times, as released evaluation sets do, asks for k samples a problem."""
    asked_for = request.samples_per_problem is not None or any(
        override.startswith("eval.samples_per_problem=") for override in request.overrides
    )
    assert config.data.eval is not None
    if not asked_for and spec_kind(config.data.eval) in ("path", "hub"):
        copies = {count for _, count in unique_problems(load_problems(config.data.eval, split="eval"))}
        if len(copies) == 1 and (count := copies.pop()) > 1:
            print(f"{plan.name} holds each problem {count} times: {count} samples for each of {len(problems)} problems")
            return replace(plan, samples_per_problem=count), problems
    return plan, problems


def _identity(
    model: str,
    checkpoint: Path | None,
    request: Request,
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
        "plan": asdict(plan),
        "prompt": config.data.model_dump(mode="json", include={"instruction", "system", "chat_template"}),
        "reward": config.reward.model_dump(mode="json"),
        "dtype": config.model.dtype,
    }


@contextmanager
def progress(title: str) -> Iterator[Any]:
    """A function `(done, total)`: on a terminal a bar with the time left, elsewhere ten lines in all."""
    console = Console()
    is_live = console.is_terminal
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("problems"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not is_live,
    )
    task = bar.add_task(title)
    said = 0

    def tell(done: int, total: int) -> None:
        nonlocal said
        bar.update(task, completed=done, total=total)
        if not is_live and done * _LINES_OF_PROGRESS // total > said:
            said = done * _LINES_OF_PROGRESS // total
            left = bar.tasks[0].time_remaining
            print(f"{title}: {done}/{total} problems" + (f", {duration(left)} left" if left else ""), flush=True)

    with bar:
        yield tell


def print_evaluation(summary: Mapping[str, Any], output: Path | None) -> None:
    """The result as a small table."""
    console = Console()
    console.print(_result_table([summary]))
    _print_errors(console, summary)
    if output is not None:
        console.print(f"written to {output}", soft_wrap=True)


def print_comparison(results: Sequence[Mapping[str, Any]], difference: Mapping[str, Any], output: Path | None) -> None:
    """Both results side by side, and what pairing tells."""
    console = Console()
    console.print(_result_table(results))
    for result in results:
        _print_errors(console, result)
    low, high = difference["low"], difference["high"]
    verdict = "no difference can be told" if low <= 0 <= high else "higher" if low > 0 else "lower"
    console.print(
        f"second - first, paired over {difference['problems']} problems: {difference['difference']:+.4f} "
        f"(95 % interval {low:+.4f} to {high:+.4f}): {verdict}\n"
        f"better on {difference['better']} problems, worse on {difference['worse']}, equal on {difference['equal']}",
        soft_wrap=True,
    )
    if output is not None:
        console.print(f"written to {output}", soft_wrap=True)


def _result_table(results: Sequence[Mapping[str, Any]]) -> Table:
    first = results[0]
    title = f"{first['model']} on {first['name']}" if len(results) == 1 else f"on {first['name']}"
    table = Table(title=title, title_style="bold", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column("result" if len(results) == 1 else str(result["model"]), justify="right")
    k = first["samples_per_problem"]

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    row(f"avg@{k}", *(_share(r["accuracy"], (r["low"], r["high"]), binary=r["binary"]) for r in results))
    for name in (name for name in first if name.startswith(("pass@", "cons@"))):
        row(name, *(_share(r[name], r["intervals"][name]) if name in r else "" for r in results))
    for source in first["by_source"] if len(first["by_source"]) > 1 else ():
        count = first["by_source"][source]["problems"]
        row(f"  {source} ({count} problems)", *(_source(r, source) for r in results))
    row("problems", *(f"{r['problems']:,}" for r in results))
    row("mean response, tokens", *(f"{r['response_tokens_mean']:.1f}" for r in results))
    row("truncated", *(f"{r['truncated_fraction']:.1%}" for r in results))
    if any(r["no_answer_fraction"] is not None for r in results):
        row("without an answer", *(_optional_share(r["no_answer_fraction"]) for r in results))
    return table


def _print_errors(console: Console, summary: Mapping[str, Any]) -> None:
    if not summary["verifier_errors"]:
        return
    total = summary["problems"] * summary["samples_per_problem"]
    told = f"{summary['verifier_errors']} of {total} responses have no judgement: {summary['most_frequent_error']}"
    if has_many_errors(summary):
        told = f"WARNING, over 1 % errors, so the figures above are of the others only: {told}"
    console.print(told, soft_wrap=True, highlight=False, markup=False)


def _share(value: float, interval: Sequence[float], *, binary: bool = True) -> str:
    low, high = interval
    if not binary:
        return f"{value:.4f} ({low:.4f} to {high:.4f})"
    return f"{value:.1%} ({low:.1%} to {high:.1%})"


def _optional_share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _source(result: Mapping[str, Any], source: str) -> str:
    found = result["by_source"].get(source)
    return "" if found is None else f"{found['accuracy']:.3f}"
