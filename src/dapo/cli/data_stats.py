"""`dapo data stats`: what a data source holds, and how hard it is for a run or a model."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dapo.cli.data_prepare import read
from dapo.cli.progress import progress
from dapo.config import DataSpec, load_config
from dapo.core.errors import ConfigError, DataError
from dapo.core.files import atomic_write_json
from dapo.core.rng import keyed_permutation
from dapo.data.prepare.describe import describe_problems
from dapo.data.prepare.difficulty import PassRate, describe_difficulty, pass_rates
from dapo.data.problems import unique_problems
from dapo.data.sources.rows import prompt_text
from dapo.training.checkpointing import PROBLEM_STATS_FILE
from dapo.training.run_directory import RunDirectory
from dapo.types import Problem

BAR_WIDTH = 40
SHOWN_PROBLEMS = 10
SHOWN_SOURCES = 10


def show_stats(
    spec: str,
    *,
    rollouts: Path | None,
    model: str | None,
    samples: int,
    problems: int,
    group_size: int,
    output: Path | None,
    force: bool,
    overrides: Sequence[str],
) -> None:
    """Print tables, and write everything as JSON if asked."""
    if overrides and model is None:
        raise ConfigError(f"{overrides[0]}: options say how a model is sampled, and none is named; add --model")
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"--output {output}: there is no directory {output.parent}")
    if output is not None and output.exists() and not force:
        raise ConfigError(f"--output {output} exists already; choose another name, or --force to overwrite it")
    source: DataSpec = spec
    if (Path(spec) / "manifest.json").is_file():
        rollouts = Path(spec)
        source = load_config(RunDirectory.open(rollouts).config).data.train
    data = read(source)
    measured: dict[str, dict[str, PassRate]] = {}
    if rollouts is not None:
        measured["run"] = run_pass_rates(rollouts)
    tokens: dict[str, int] | None = None
    if model is not None:
        tokens, rates = model_pass_rates(source, data, model, samples=samples, count=problems, overrides=overrides)
        measured |= {"model": rates} if samples else {}
    length = (lambda problem: tokens[problem.id]) if tokens is not None else None
    result: dict[str, Any] = {"data": spec, **describe_problems(data, tokens=length)}
    for where, rates in measured.items():
        known = [rates[problem.id] for problem, _ in unique_problems(data) if problem.id in rates]
        result[where] = {
            **describe_difficulty(known, group_size),
            "unseen": result["distinct"] - len(known),
            "not_in_data": len(rates) - len(known),
        }
    if output is not None:
        atomic_write_json(output, {**result, "table": list(table_of(data, measured, tokens))})
    print_description(result)
    for where, title in (("run", f"judged by {rollouts}"), ("model", f"{samples} responses of {model} a problem")):
        if where in result:
            print_difficulty(result[where], title)
    if "run" in measured:
        print_most_visited(data, measured["run"])
    if output is not None:
        Console().print(f"written: {output}", soft_wrap=True, highlight=False, markup=False)


def run_pass_rates(path: Path) -> dict[str, PassRate]:
    """Of every problem that a run has judged, as of its newest checkpoint; before the first, from its responses.

    Raises DataError if it kept neither.
    """
    from dapo.telemetry.rollout_table import read_rollouts

    run = RunDirectory.open(path)
    if (problem_stats := run.path / PROBLEM_STATS_FILE).is_file():
        entries = json.loads(problem_stats.read_text(encoding="utf-8"))
        return {
            problem: PassRate(problem, entry["decided"], entry["correct"], entry["visits"], entry["last_step"])
            for problem, entry in entries.items()
            if entry["decided"]
        }
    tables = sorted(run.rollouts(0).parent.glob("step_*.parquet"))
    if not tables:
        raise DataError(f"{path} has no rollouts/step_NNNNNN.parquet yet; a run writes them with log.rollouts=true")
    columns = ["step", "group_id", "problem_id", "correct"]

    def rows() -> Iterator[dict[str, Any]]:
        for table in tables:
            yield from read_rollouts(table).select(columns).to_pylist()

    return pass_rates(rows())


def model_pass_rates(
    spec: DataSpec, data: Sequence[Problem], model: str, *, samples: int, count: int, overrides: Sequence[str]
) -> tuple[dict[str, int], dict[str, PassRate]]:
    """Prompt tokens of every problem, and pass rates of `count` keyed choices, sampled as in training."""
    from dapo.assemble import build_encoder, build_engine, evaluation_plan, open_judge, read_model, require_context
    from dapo.cli.eval import EvalRequest, evaluation_config, run_options
    from dapo.evaluation.evaluate import evaluate
    from dapo.policy.lora import saved_weights
    from dapo.training.run_directory import step_of

    as_trained = [f"eval.samples_per_problem={max(1, samples)}", "eval.temperature=1.0", "eval.top_p=1.0"]
    request = EvalRequest(str(spec), overrides=(*as_trained, *overrides))
    config, checkpoint = evaluation_config(model, spec, request, run_options(model))
    loaded = read_model(config)
    encoder = build_encoder(config, loaded)
    unique = [problem for problem, _ in unique_problems(data)]
    tokens = {problem.id: encoder.length(problem) for problem in unique}
    if not samples:
        return tokens, {}
    fitting, _ = encoder.split_by_length(unique)
    chosen = [fitting[i] for i in sorted(keyed_permutation(len(fitting), config.train.seed, "stats")[:count])]
    plan = evaluation_plan(config, loaded.stop_ids)
    require_context(loaded, max(tokens[problem.id] for problem in chosen), plan.max_response_tokens)
    with ExitStack() as stack:
        judge = stack.enter_context(open_judge(config))
        engine = build_engine(config, loaded)
        stack.callback(engine.close)
        if checkpoint is not None:
            engine.load_weights(saved_weights(checkpoint, loaded.model), version=step_of(checkpoint))
        update_progress = stack.enter_context(progress("sample and judge"))
        result = evaluate(engine, judge, encoder, chosen, plan, on_progress=update_progress)
    rows = [
        {"step": 0, "group_id": index, "problem_id": judged.problem.id, "correct": response.correct}
        for index, judged in enumerate(result.problems)
        for response in judged.valid
    ]
    return tokens, pass_rates(rows)


def table_of(
    data: Sequence[Problem], measured: Mapping[str, Mapping[str, PassRate]], tokens: Mapping[str, int] | None
) -> Iterator[dict[str, Any]]:
    """One row a distinct problem."""
    for problem, copies in unique_problems(data):
        row = {
            "id": problem.id,
            "source": problem.source,
            "copies": copies,
            "question": prompt_text(problem.prompt),
            "answer": problem.answer,
            "prompt_tokens": tokens[problem.id] if tokens is not None else None,
        }
        yield row | {
            where: rates[problem.id].as_json() if problem.id in rates else None for where, rates in measured.items()
        }


def print_description(result: Mapping[str, Any]) -> None:
    """What the data is."""
    table = Table(title=escape(str(result["data"])), title_style="bold", title_justify="left", show_header=False)
    table.add_column()
    table.add_column()
    table.add_row("rows", f"{result['rows']:,}")
    table.add_row("distinct", f"{result['distinct']:,}")
    table.add_row("copies", f"{result['copies']:,} (at most {result['most_copies_of_one']:,} of one problem)")
    for name in ("prompt_characters", "prompt_tokens"):
        if (summary := result[name]) is not None:
            joined = ", ".join(f"{key} {value:,.0f}" for key, value in summary.items())
            table.add_row(name.replace("_", ", "), joined)
    for name in ("instruction_before", "instruction_after"):
        if result[name]:
            table.add_row(name.replace("_", " "), escape(shortened(result[name])))
    kinds = [(kind, count) for kind, count in result["answer_types"].items() if count]
    table.add_row("answers", ", ".join(f"{kind} {count:,}" for kind, count in kinds))
    sources = list(result["sources"].items())
    more = [f"and {len(sources) - SHOWN_SOURCES} more"] if len(sources) > SHOWN_SOURCES else []
    shown = [f"{escape(name)} {count:,}" for name, count in sources[:SHOWN_SOURCES]]
    table.add_row("sources", ", ".join([*shown, *more]))
    Console().print(table)


def print_difficulty(result: Mapping[str, Any], title: str) -> None:
    """Whether dynamic sampling will find what it needs."""
    table = Table(title=escape(title), title_style="bold", title_justify="left")
    for column in ("pass rate", "problems", ""):
        table.add_column(column, justify="right" if column == "problems" else "left")
    most = max(1, *result["histogram"])
    for tenth, count in enumerate(result["histogram"]):
        bar = "█" * -(-BAR_WIDTH * count // most)
        table.add_row(f"{tenth / 10:.1f} to {(tenth + 1) / 10:.1f}", f"{count:,}", bar)
    console = Console()
    console.print(table)
    lines = [
        f"{result['problems']:,} problems with {result['responses']:,} judged responses, {result['unseen']:,} without"
    ]
    if result["not_in_data"]:
        lines.append(f"{result['of_other_data']:,} further problems of the run are not in this data")
    if result["problems"]:
        lines += [
            f"never correct {result['never_correct']:,}, always correct {result['always_correct']:,}, "
            f"mean pass rate {result['mean_pass_rate']:.1%}",
            f"expected keep rate of dynamic sampling with groups of {result['group_size']}: "
            f"{result['expected_keep_rate']:.1%}, so {needed(result['expected_keep_rate'])}",
        ]
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


def print_most_visited(data: Sequence[Problem], rates: Mapping[str, PassRate]) -> None:
    """The problems that a run has met most often, hardest first."""
    known = [(rates[problem.id], problem) for problem, _ in unique_problems(data) if problem.id in rates]
    table = Table(title="most visited, hardest first", title_style="bold", title_justify="left")
    for column in ("problem", "visits", "responses", "right", "last step", "question"):
        table.add_column(column, justify="left" if column in ("problem", "question") else "right")
    for rate, problem in sorted(known, key=lambda pair: (-pair[0].visits, pair[0].rate, pair[1].id))[:SHOWN_PROBLEMS]:
        question = shortened(prompt_text(problem.prompt), 60)
        cells = (problem.id, f"{rate.visits}", f"{rate.responses}", f"{rate.rate:.0%}", f"{rate.last_seen}", question)
        table.add_row(*(escape(cell) for cell in cells))
    Console().print(table)


def needed(keep_rate: float) -> str:
    """What the keep rate costs."""
    if keep_rate == 0:
        return "it will starve: no group carries a signal"
    return f"a batch takes {1 / keep_rate:.1f} times its groups"


def shortened(text: str, length: int = 100) -> str:
    """The beginning and the end of a long text."""
    return text if len(text) <= length else f"{text[: length // 2]} ... {text[-length // 2 :]}"
