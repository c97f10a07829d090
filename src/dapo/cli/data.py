"""The `dapo data` commands."""

from pathlib import Path
from typing import Annotated

import typer

# as in cli.py, what a command needs is imported inside of it

data_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Spec = Annotated[str, typer.Argument(metavar="SPEC", help="data source, for example problems.jsonl or builtin:sums")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="the file to write: .jsonl or .parquet")]
Force = Annotated[bool, typer.Option("--force", help="overwrite what is there")]


@data_app.command("import")
def import_(spec: Spec, out: Out, force: Force = False) -> None:
    """Write any data source as rows of prompt, answer, source and its other fields."""
    from dapo.cli.data_prepare import import_data

    import_data(spec, out, force=force)


@data_app.command()
def stats(
    spec: Spec,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="with --model: options of how it is sampled and judged"),
    ] = None,
    rollouts: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="pass rates from the responses that this run has judged")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="prompt lengths in its tokens, and pass rates of its responses")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="with --model: responses a problem; 0: only lengths")] = 8,
    problems: Annotated[int, typer.Option(min=1, help="with --model: how many problems are sampled")] = 64,
    group_size: Annotated[int, typer.Option(min=2, help="G of the expected keep rate")] = 16,
    output: Annotated[Path | None, typer.Option(help="write everything, with a row a problem, as JSON")] = None,
    force: Force = False,
) -> None:
    """Tell what a data source holds, how hard it is, and how much of it dynamic sampling would keep."""
    from dapo.cli.data_stats import show_stats

    show_stats(
        spec,
        rollouts=rollouts,
        model=model,
        samples=samples,
        problems=problems,
        group_size=group_size,
        output=output,
        force=force,
        overrides=overrides or [],
    )


@data_app.command()
def dedupe(
    spec: Spec,
    out: Out,
    threshold: Annotated[
        float,
        typer.Option(min=0.1, max=1.0, help="Jaccard similarity of word runs from which on texts are near copies"),
    ] = 0.8,
    exact: Annotated[bool, typer.Option("--exact", help="look for exact copies only")] = False,
    force: Force = False,
) -> None:
    """Keep one of each problem; what goes, and what it is a copy of, is told in OUT.removed.jsonl."""
    from dapo.cli.data_prepare import dedupe_data

    dedupe_data(spec, out, threshold=None if exact else threshold, force=force)


@data_app.command()
def decontaminate(
    spec: Spec,
    out: Out,
    against: Annotated[list[str], typer.Option(metavar="SPEC", help="evaluation data; may be given several times")],
    ngram: Annotated[int, typer.Option(min=1, help="words in a run")] = 8,
    min_overlap: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="of an evaluation problem's runs, from which on a row goes")
    ] = 0.5,
    force: Force = False,
) -> None:
    """Leave out what gives evaluation problems away; each such row and the text it shares is in OUT.removed.jsonl."""
    from dapo.cli.data_prepare import decontaminate_data

    decontaminate_data(spec, out, against=against, ngram=ngram, min_overlap=min_overlap, force=force)


@data_app.command()
def integerize(
    spec: Spec,
    out: Out,
    server: Annotated[str, typer.Option(metavar="URL", help="OpenAI-compatible, such as http://localhost:8000/v1")],
    model: Annotated[str, typer.Option(help="the model's name on the server")],
    num_solutions: Annotated[int, typer.Option(min=1, help="solutions of a rewritten problem; most must agree")] = 5,
    concurrency: Annotated[int, typer.Option(min=1, help="problems in work at once")] = 8,
    max_tokens: Annotated[int, typer.Option(min=16, help="of a response")] = 8192,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="for one response")] = 600.0,
    retries: Annotated[int, typer.Option(min=0, help="after a failed connection or a status such as 503")] = 5,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="the environment variable that holds the server's key")
    ] = None,
    force: Force = False,
) -> None:
    """Have problems rewritten so that their answers are integers (section 3.5), and each checked by solving it anew.

    What is decided of a problem is kept in OUT.partial: after an interruption the same command goes on. Every decision
    is told in OUT.decisions.jsonl.
    """
    from dapo.cli.data_prepare import integerize_data

    integerize_data(
        spec,
        out,
        server=server,
        model=model,
        num_solutions=num_solutions,
        concurrency=concurrency,
        max_tokens=max_tokens,
        timeout_s=timeout_s,
        retries=retries,
        api_key_env=api_key_env,
        force=force,
    )
