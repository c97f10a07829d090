"""The `dapo data` commands: import, inspect and clean data sets."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from dapo.cli.arguments import AsJson, Force, overrides_argument
from dapo.core.errors import ConfigError, DataError
from dapo.core.terminal import print_json, print_text, stdout_to_stderr
from dapo.core.text import one_line, plural, shorten

if TYPE_CHECKING:
    from dapo.config import DataSpec
    from dapo.types import Problem

# each command imports what it needs, so that --help is fast

data_app = typer.Typer(no_args_is_help=True)

Spec = Annotated[
    str, Argument(metavar="SPEC", help="A data source, such as problems.jsonl or builtin:sums.")
]
Out = Annotated[Path, Argument(metavar="OUT", help="The file to write: .jsonl or .parquet.")]


@data_app.command(
    "import", epilog="Example: dapo data import problems.csv train.parquet --drop-invalid"
)
def import_(
    spec: Spec,
    out: Out,
    drop_invalid: Annotated[
        bool, Option("--drop-invalid", help="Leave out rows that cannot be used.")
    ] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Convert a data source to one file of problems.

    Writes the columns prompt, answer, source and all others. With --drop-invalid, OUT.removed.jsonl
    lists the rows that were left out.
    """
    from dapo.data.prepare.stats import conflicting_answers
    from dapo.data.prepare.write import require_new_data, write_data
    from dapo.data.problems import unique_problems

    invalid: list[DataError] | None = [] if drop_invalid else None
    report = None if invalid is None else out.with_name(f"{out.name}.removed.jsonl")
    files = [out] if report is None else [out, report]
    require_new_data(*files, force=force)
    warnings: list[str] = []
    problems = _read(spec, invalid=invalid, warnings=warnings)
    write_data(out, problems, report, ({"error": str(error)} for error in invalid or ()))
    conflicts = conflicting_answers(problems)
    counts = {
        "problems": len(problems),
        "distinct": len(unique_problems(problems)),
        "conflicting answers": len(conflicts),
    }
    if invalid is not None:
        counts["removed"] = len(invalid)
    if as_json:
        _report(as_json, spec, "", counts, *files, warnings=warnings)
        return
    print_text(f"{out}: {len(problems):,} problems, {counts['distinct']:,} distinct")
    for warning in warnings:
        print_text(warning)
    if invalid:
        print_text(f"{plural(len(invalid), 'row')} left out; {report} lists the reasons")
    if conflicts:
        text, answers = next(iter(conflicts.items()))
        print_text(
            f"{plural(len(conflicts), 'problem')} with different answers, so one row rewards what"
            f" another refuses: {shorten(one_line(text), 60)!r} has"
            f" {' and '.join(shorten(answer, 30) for answer in answers)}; dapo data dedupe keeps"
            " the answer of most rows"
        )


@data_app.command(
    epilog="Example: dapo data stats train.jsonl --model smollm2-135m-instruct --samples 4"
)
def stats(
    spec: Annotated[str, Argument(metavar="SPEC", help="A data source or a run directory.")],
    overrides: Annotated[
        list[str] | None,
        overrides_argument("Options of the reward and, with --model, of sampling."),
    ] = None,
    run: Annotated[
        Path | None, Option(metavar="RUN_DIR", help="Show the pass rates of this run.")
    ] = None,
    model: Annotated[
        str | None, Option(help="Measure prompt tokens and pass rates of this model.")
    ] = None,
    samples: Annotated[
        int, Option(min=0, help="With --model: responses per problem; 0 measures only lengths.")
    ] = 8,
    problems: Annotated[
        int, Option(min=1, help="With --model: number of problems to sample.")
    ] = 64,
    group_size: Annotated[
        int | None,
        Option(
            min=2, help="Group size of the expected keep rate.", show_default="the run's, or 16"
        ),
    ] = None,
    output: Annotated[
        Path | None, Option(help="File for all statistics as JSON, with one row per problem.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Show the contents and the difficulty of a data source.

    With pass rates, it also shows the fraction of groups that dynamic sampling would keep.
    """
    from dapo.cli import data_stats
    from dapo.core.files import atomic_write_json
    from dapo.data.prepare.stats import PassRate, describe_difficulty, describe_problems
    from dapo.data.prepare.write import require_new
    from dapo.runs.directory import RunDirectory
    from dapo.runs.stored_config import load_run_config

    options = overrides or []
    if model is None:
        _refuse_sampling_options(options)
    if output is not None:
        require_new(output, force=force)
    source: DataSpec = spec
    if RunDirectory.is_run(spec):
        run = Path(spec)
        source = load_run_config(RunDirectory.open(run)).data.train
    group_size = group_size or data_stats.group_size_of(run)
    data = _read(source)
    rates: dict[str, dict[str, PassRate]] = {}
    titles = {"run": f"pass rates in {run}", "model": f"{samples} responses per problem of {model}"}
    if run is not None:
        rates["run"] = data_stats.run_pass_rates(run)
    tokens: dict[str, int] | None = None
    if model is not None:
        tokens, model_rates = data_stats.model_pass_rates(
            source, data, model, samples=samples, count=problems, overrides=options
        )
        if samples:
            rates["model"] = model_rates
    result: dict[str, Any] = {"data": spec, **describe_problems(data, tokens=tokens)}
    for name, table in rates.items():
        result[name] = describe_difficulty(data, table, group_size)
    if output is not None:
        atomic_write_json(output, {**result, "table": data_stats.problem_rows(data, rates, tokens)})
    warnings = data_stats.warn_of_unusable_rows(spec, data, options)
    if as_json:
        written = [] if output is None else [str(output)]
        print_json({**result, "warnings": warnings, "written": written})
        return
    titles = {name: titles[name] for name in rates}
    data_stats.print_statistics(result, titles, data, rates.get("run"))
    for warning in warnings:
        print_text(f"warning: {warning}")
    if output is not None:
        print_text(f"written: {output}")


@data_app.command(epilog="Example: dapo data dedupe train.jsonl clean.jsonl --exact")
def dedupe(
    spec: Spec,
    out: Out,
    threshold: Annotated[
        float,
        Option(min=0.1, max=1.0, help="Jaccard similarity of near duplicates (word 3-grams)."),
    ] = 0.8,
    exact: Annotated[bool, Option("--exact", help="Find exact duplicates only.")] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Keep one row of each problem.

    OUT.removed.jsonl lists the removed rows with the rows that they duplicate.
    """
    from dapo.data.prepare.dedupe import Removed, deduplicate
    from dapo.data.prepare.write import require_new_data, write_data
    from dapo.runs.console import progress

    report = out.with_name(f"{out.name}.removed.jsonl")
    require_new_data(out, report, force=force)
    problems = _read(spec)
    with progress("find near duplicates", unit="texts") as update_progress:
        result = deduplicate(
            problems, threshold=None if exact else threshold, on_progress=update_progress
        )
    counts = {
        "rows": len(problems),
        **{f"removed: {rule}": count for rule, count in result.by_rule.items()},
    }
    counts |= {"kept": len(result.kept), "texts with different answers": result.conflicts}
    if not exact:
        counts["kept: similar, but other numbers or answer"] = result.near_duplicates_kept
    write_data(
        out,
        result.kept,
        report,
        map(Removed.as_json, result.removed),
        if_empty="all answers conflict",
    )
    _report(as_json, spec, f"duplicates in {spec}", counts, out, report)


@data_app.command(
    epilog="Example: dapo data decontaminate train.jsonl clean.jsonl --against test.jsonl"
)
def decontaminate(
    spec: Spec,
    out: Out,
    against: Annotated[list[str], Option(metavar="SPEC", help="Evaluation data; repeatable.")],
    ngram: Annotated[int, Option(min=1, help="Words per n-gram.")] = 8,
    min_overlap: Annotated[
        float,
        Option(
            min=0.01,
            max=1.0,
            help="Fraction of an evaluation problem's n-grams that removes a row.",
        ),
    ] = 0.5,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Remove rows that contain evaluation problems.

    OUT.removed.jsonl lists the removed rows, each with the matching text.
    """
    from dapo.data.prepare.decontaminate import Contaminated, find_contaminated
    from dapo.data.prepare.write import require_new_data, write_data
    from dapo.data.problems import unique_problems

    report = out.with_name(f"{out.name}.removed.jsonl")
    require_new_data(out, report, force=force)
    problems = _read(spec)
    held_out = [
        problem for source in against for problem in _read(source, name="--against", split="eval")
    ]
    clean, removed = find_contaminated(problems, held_out, ngram=ngram, min_overlap=min_overlap)
    counts = {"rows": len(problems), "removed": len(removed), "kept": len(clean)}
    counts["distinct evaluation problems"] = len(unique_problems(held_out))
    counts["evaluation problems found"] = len({contaminated.against.id for contaminated in removed})
    write_data(
        out,
        clean,
        report,
        map(Contaminated.as_json, removed),
        if_empty="all rows overlap with evaluation data",
    )
    _report(as_json, spec, f"{spec} against {', '.join(against)}", counts, out, report)


@data_app.command(
    epilog="Example: dapo data select train.jsonl hard.jsonl --model smollm2-135m-instruct"
)
def select(
    spec: Spec,
    out: Out,
    overrides: Annotated[
        list[str] | None, overrides_argument("With --model: options of sampling and of the reward.")
    ] = None,
    rates: Annotated[
        Path | None,
        Option(metavar="FILE|RUN_DIR", help="Output of dapo eval or dapo data stats, or a run."),
    ] = None,
    model: Annotated[
        str | None, Option(help="Measure the pass rates of this model or run, on every row.")
    ] = None,
    samples: Annotated[int, Option(min=1, help="With --model: responses per problem.")] = 16,
    low: Annotated[float, Option(min=0, max=1, help="The smallest pass rate to keep.")] = 0.2,
    high: Annotated[float, Option(min=0, max=1, help="The largest pass rate to keep.")] = 0.8,
    min_responses: Annotated[
        int, Option(min=1, help="With --rates: remove problems with fewer judged responses.")
    ] = 8,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Keep the rows that a model solves sometimes.

    OUT.removed.jsonl lists the removed rows with their pass rates.
    """
    from dapo.cli import data_stats
    from dapo.data.prepare.select import read_pass_rates, select_by_pass_rate
    from dapo.data.prepare.write import require_new_data, write_data

    if (rates is None) == (model is None):
        raise ConfigError(
            "dapo data select needs pass rates: give --rates FILE or RUN_DIR, or --model, not both"
        )
    if low > high:
        raise ConfigError(f"--low {low:g} is above --high {high:g}: no row would be kept")
    if rates is not None and overrides:
        raise ConfigError(f"{overrides[0]}: options configure how a model is sampled; add --model")
    report = out.with_name(f"{out.name}.removed.jsonl")
    require_new_data(out, report, force=force)
    problems = _read(spec)
    if rates is not None:
        pass_rates = data_stats.run_pass_rates(rates) if rates.is_dir() else read_pass_rates(rates)
    else:
        assert model is not None
        min_responses = 1
        _, pass_rates = data_stats.model_pass_rates(
            spec,
            problems,
            model,
            samples=samples,
            count=len(problems),
            overrides=overrides or [],
        )
    result = select_by_pass_rate(
        problems, pass_rates, low=low, high=high, min_responses=min_responses
    )
    reasons = ", ".join(f"{number:,} rows: {reason}" for reason, number in result.by_reason.items())
    write_data(out, result.kept, report, result.removed, if_empty=reasons)
    counts = {"rows": len(problems), "kept": len(result.kept)}
    counts |= {f"removed: {reason}": number for reason, number in result.by_reason.items()}
    title = f"pass rates from {low:g} to {high:g}"
    _report(as_json, spec, title, counts, out, report, mean_pass_rate=result.mean_pass_rate)


@data_app.command(
    epilog="Example: dapo data integerize a.jsonl b.jsonl --server URL --model NAME --retries 9"
)
def integerize(
    spec: Spec,
    out: Out,
    server: Annotated[
        str,
        Option(metavar="URL", help="OpenAI-compatible server, such as http://localhost:8000/v1."),
    ],
    model: Annotated[str, Option(help="Name of the model on the server.")],
    num_solutions: Annotated[
        int, Option(min=1, help="Solutions per rewriting; more than half must agree.")
    ] = 5,
    concurrency: Annotated[int, Option(min=1, help="Number of concurrent problems.")] = 8,
    max_tokens: Annotated[int, Option(min=16, help="Maximum length of a response.")] = 8192,
    timeout_s: Annotated[float, Option(min=0.1, help="Time limit for one response.")] = 600.0,
    retries: Annotated[
        int, Option(min=0, help="Retries after a failed connection or a status such as 503.")
    ] = 5,
    api_key_env: Annotated[
        str | None, Option(metavar="NAME", help="Environment variable with the server's API key.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite problems to have integer answers.

    Follows section 3.5 of the paper and verifies each rewriting. OUT.decisions.jsonl lists every
    decision with its reason. After an interruption, repeat the command to continue: OUT.partial
    keeps the decisions.
    """
    from dapo.core.journal import open_journal
    from dapo.core.openai_client import ChatClient
    from dapo.core.rng import keyed_seed
    from dapo.data.prepare import integerize as rewriting
    from dapo.data.prepare.write import require_new_data, write_data
    from dapo.runs.console import progress

    report = out.with_name(f"{out.name}.decisions.jsonl")
    journal_path = out.with_name(f"{out.name}.partial")
    require_new_data(out, report, force=force)
    if api_key_env is not None and not os.environ.get(api_key_env):
        raise ConfigError(f"--api-key-env {api_key_env}: that environment variable is not set")
    api_key = os.environ[api_key_env] if api_key_env else None
    client = ChatClient(
        server,
        model,
        api_key=api_key,
        timeout_s=timeout_s,
        retries=retries,
        connections=concurrency,
    )
    problems = _read(spec, require_answer=True)

    def generate(request: str, seed: int) -> str:
        messages = [{"role": "user", "content": request}]
        return client.complete(
            messages, temperature=rewriting.TEMPERATURE, max_tokens=max_tokens, seed=seed
        ).text

    settings = {"model": model, "num_solutions": num_solutions, "max_tokens": max_tokens}
    settings["prompts"] = keyed_seed(rewriting.REWRITE, rewriting.SOLVE)
    with open_journal(journal_path, settings) as journal:
        if journal.records:
            with stdout_to_stderr(as_json):
                print_text(
                    f"{len(journal.records):,} problems were decided before the interruption"
                )
        with progress("integerize") as update_progress:
            rows, decisions = rewriting.integerize(
                problems,
                generate,
                journal,
                num_solutions=num_solutions,
                concurrency=concurrency,
                on_progress=update_progress,
            )
        reason = "they are letters or text"
        if journal.records:
            reason = f"see {journal_path}"
        write_data(
            out,
            rows,
            report,
            map(asdict, decisions.values()),
            if_empty=f"no answer is an integer or can be made one; {reason}",
        )
        journal.records.clear()  # so that the journal is deleted
    actions = [decisions[problem.id].action for problem in problems]
    counts = {"rows": len(problems)}
    for action in rewriting.ACTIONS:
        counts[str(action)] = actions.count(action)
    _report(as_json, spec, f"{spec} with integer answers", counts, out, report)


@data_app.command(
    epilog="Example: dapo data demonstrations runs/a result.json --output sft.jsonl --per-problem 2"
)
def demonstrations(
    sources: Annotated[
        list[Path],
        Argument(
            metavar="RUN|RESULT", help="Runs, and results that dapo eval wrote with --output."
        ),
    ],
    output: Annotated[Path, Option(help="The file to write: .jsonl.")],
    per_problem: Annotated[
        int, Option(min=1, help="Maximum number of responses to each problem.")
    ] = 1,
    choose: Annotated[
        Literal["shortest", "random"],
        Option(
            metavar="shortest|random",
            help="Which right responses to a problem: the shortest, or random ones, by --seed.",
        ),
    ] = "shortest",
    min_score: Annotated[
        float | None,
        Option(
            help="Smallest score of a right response, for verifiers that return scores.",
            show_default="responses judged correct",
        ),
    ] = None,
    against: Annotated[
        list[str] | None, Option(metavar="SPEC", help="Held-out problems to leave out; repeatable.")
    ] = None,
    seed: Annotated[int, Option(min=0, help="Seed of --choose random.")] = 0,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write right responses of runs as demonstrations to train on.

    The file is for dapo train preset=sft data.demonstrations=OUTPUT. Responses that were cut at the
    length limit are left out, and so are the problems in the runs' data.eval.
    """
    from dapo.cli import demonstrations as selection
    from dapo.data.prepare.write import require_new
    from dapo.data.sources.readers import require_file_type

    require_file_type(output, (".jsonl",))
    require_new(output, force=force)
    selection.require_sources(sources)
    judged = [response for source in sources for response in selection.read_judged(source)]
    responses, counts = selection.choose(
        judged, per_problem=per_problem, choice=choose, min_score=min_score, seed=seed
    )
    held_out = selection.held_out_of(sources, against or [])
    rows = responses
    if responses and held_out:
        rows = selection.without_held_out(responses, held_out)
    if not rows:
        reason = "all problems are held out" if responses else "no response is right"
        numbers = ", ".join(f"{name}: {count:,}" for name, count in counts.items())
        raise DataError(f"nothing would be written: {reason}; {numbers}")
    if held_out:
        counts["removed: held out"] = len(responses) - len(rows)
    counts["written"] = len(rows)
    selection.write_demonstrations(output, rows)
    title = f"demonstrations from {', '.join(map(str, sources))}"
    _report(as_json, str(sources[0]), title, counts, output)


def _refuse_sampling_options(options: Sequence[str]) -> None:
    """Raise ConfigError for an option that configures how a model is sampled."""
    for option in options:
        if not option.startswith("reward."):
            raise ConfigError(f"{option}: options configure how a model is sampled; add --model")


def _read(
    spec: "DataSpec", *, name: str = "SPEC", require_answer: bool = False, **how: Any
) -> "list[Problem]":
    """Return the problems of a command's argument `name`.

    Raises ConfigError for no data source, and DataError.
    """
    from dapo.config import parse_data_argument
    from dapo.data.problems import load_problems

    source = parse_data_argument(spec, name=name) if isinstance(spec, str) else spec
    return load_problems(source, require_answer=require_answer, **how)


def _report(
    as_json: bool,
    spec: str,
    title: str,
    counts: Mapping[str, int],
    *paths: Path,
    mean_pass_rate: float | None = None,
    warnings: Sequence[str] = (),
) -> None:
    """Print counts of a command that writes data; JSON names have underscores."""
    if as_json:
        facts: dict[str, Any] = {
            "data": spec,
            "counts": {re.sub(r"\W+", "_", name): count for name, count in counts.items()},
            "written": [str(path) for path in paths],
        }
        if mean_pass_rate is not None:
            facts["mean_pass_rate"] = mean_pass_rate
        if warnings:
            facts["warnings"] = list(warnings)
        print_json(facts)
        return
    from dapo.cli.formatting import right, titled_table
    from dapo.runs.console import SafeConsole

    table = titled_table(title, "", *right(""), show_header=False)
    for name, count in counts.items():
        table.add_row(name, f"{count:,}")
    SafeConsole().print(table)
    for path in paths:
        print_text(f"written: {path}")
    if mean_pass_rate is not None:
        print_text(f"mean pass rate of the kept rows, as measured: {mean_pass_rate:.1%}")
