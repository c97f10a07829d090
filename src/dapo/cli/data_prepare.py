"""What the `dapo data` commands do that write data, from reading their inputs to telling the result."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dapo.cli.progress import progress
from dapo.config import DataSpec, parse_data_argument
from dapo.core.errors import ConfigError, DataError
from dapo.core.files import fsync
from dapo.core.journal import Journal, open_journal
from dapo.core.openai_client import ChatClient, ServerFailed
from dapo.core.rng import keyed_seed
from dapo.data.prepare.concurrent_map import concurrent_map
from dapo.data.prepare.decontaminate import decontaminate
from dapo.data.prepare.dedupe import deduplicate
from dapo.data.prepare.integerize import (
    ACTIONS,
    REWRITE,
    SOLVE,
    Decision,
    apply,
    decide,
    decide_without_model,
    question_texts,
)
from dapo.data.prepare.normalize import find_instruction_template
from dapo.data.prepare.write import require_file_type, write_problems
from dapo.data.problems import load_problems, unique_problems
from dapo.data.sources.builtin import Split
from dapo.types import Problem

TEMPERATURE = 0.7
"""Of rewriting and solving: solutions that were all the same would confirm nothing."""


def import_data(spec: str, out: Path, *, force: bool) -> None:
    """`dapo data import`."""
    require_new(out, force=force)
    problems = read(spec)
    with new_files(out) as (target,):
        write_problems(target, problems)
    print(f"{out}: {len(problems):,} problems, {len(unique_problems(problems)):,} distinct")


def dedupe_data(spec: str, out: Path, *, threshold: float | None, force: bool) -> None:
    """`dapo data dedupe`."""
    removed_out = sibling_path(out, "removed.jsonl")
    require_new(out, removed_out, force=force)
    problems = read(spec)
    with progress("dedupe", unit="rows") as update_progress:
        result = deduplicate(
            problems, threshold=threshold, on_progress=lambda done: update_progress(done, len(problems))
        )
    require_some(result.kept, "every row contradicts a copy of it")
    with new_files(out, removed_out) as (target, removed_target):
        write_problems(target, result.kept)
        write_lines(removed_target, (removed.as_json() for removed in result.removed))
    rules = {f"removed: {rule}": count for rule, count in result.by_rule.items()}
    also = {"texts whose copies differ in the answer": result.conflicts}
    if threshold is not None:
        also["kept, though like an earlier one but for numbers or answer"] = result.near_duplicates_kept
    print_counts(f"copies in {spec}", {"rows": len(problems), **rules, "kept": len(result.kept), **also})
    print_paths(out, removed_out)


def decontaminate_data(
    spec: str, out: Path, *, against: Sequence[str], ngram: int, min_overlap: float, force: bool
) -> None:
    """`dapo data decontaminate`."""
    removed_out = sibling_path(out, "removed.jsonl")
    require_new(out, removed_out, force=force)
    problems = read(spec)
    held_out = [problem for other in against for problem in read(other, name="--against", split="eval")]
    kept, removed = decontaminate(problems, held_out, ngram=ngram, min_overlap=min_overlap)
    require_some(kept, "every row shares too much with the evaluation data")
    with new_files(out, removed_out) as (target, removed_target):
        write_problems(target, kept)
        write_lines(removed_target, (contaminated.as_json() for contaminated in removed))
    counts = {
        "rows": len(problems),
        "removed": len(removed),
        "kept": len(kept),
        "distinct evaluation problems": len(unique_problems(held_out)),
        "of these given away": len({contaminated.against.id for contaminated in removed}),
    }
    print_counts(f"{spec} against {', '.join(against)}", counts)
    print_paths(out, removed_out)


def integerize_data(
    spec: str,
    out: Path,
    *,
    server: str,
    model: str,
    num_solutions: int,
    concurrency: int,
    max_tokens: int,
    timeout_s: float,
    retries: int,
    api_key_env: str | None,
    force: bool,
) -> None:
    """`dapo data integerize`. Raises ServerFailed, with what is done kept, where problems remain to be asked."""
    decisions_out, journal_path = sibling_path(out, "decisions.jsonl"), sibling_path(out, "partial")
    require_new(out, decisions_out, force=force)
    client = ChatClient(
        server, model, api_key=secret(api_key_env), timeout_s=timeout_s, retries=retries, connections=concurrency
    )
    problems = read(spec)
    instruction_template = find_instruction_template(question_texts(problems))

    def work(problem: Problem, check: Callable[[], None]) -> Decision:
        def ask(request: str, seed: int) -> str:
            check()
            messages = [{"role": "user", "content": request}]
            return client.complete(messages, temperature=TEMPERATURE, max_tokens=max_tokens, seed=seed).text

        return decide(problem, instruction_template, ask, num_solutions=num_solutions)

    settings = {
        "model": model,
        "num_solutions": num_solutions,
        "max_tokens": max_tokens,
        "prompts": keyed_seed(REWRITE, SOLVE),
    }
    distinct = [problem for problem, _ in unique_problems(problems)]
    decisions = {
        problem.id: decision for problem in distinct if (decision := decide_without_model(problem)) is not None
    }
    with open_journal(journal_path, settings) as journal:
        to_ask = [problem for problem in distinct if problem.id not in decisions]
        decide_all(to_ask, work, journal, concurrency=concurrency)
        decisions |= {key: Decision.from_json(record) for key, record in journal.records.items()}
        kept = [new for p in problems if (new := apply(p, decisions[p.id], instruction_template)) is not None]
        reasons = f"{journal_path} says why" if journal.records else "they are letters or words"
        require_some(kept, f"no answer is an integer or could be made one; {reasons}")
        with new_files(out, decisions_out) as (target, decisions_target):
            write_problems(target, kept)
            write_lines(decisions_target, (decisions[problem.id].as_json() for problem in distinct))
        journal.records.clear()  # so that it is deleted
    actions = [decisions[problem.id].action for problem in problems]
    print_counts(f"{spec} with integer answers", {"rows": len(problems), **{a: actions.count(a) for a in ACTIONS}})
    print_paths(out, decisions_out)


def decide_all(
    problems: Sequence[Problem],
    work: Callable[[Problem, Callable[[], None]], Decision],
    journal: Journal,
    *,
    concurrency: int,
) -> None:
    """Fill the journal with what it lacks of these. Raises ServerFailed if something is still missing then."""
    missing = [problem for problem in problems if problem.id not in journal.records]
    if len(missing) < len(problems):
        print(f"{len(problems) - len(missing):,} of {len(problems):,} problems were decided before")
    with progress("integerize") as update_progress:

        def keep(decision: Decision) -> None:
            journal.add(decision.as_json())
            update_progress(len(journal.records), len(problems))

        failures = concurrent_map(missing, work, keep, concurrency=concurrency)
    if failures:
        undone = sum(problem.id not in journal.records for problem in missing)
        raise ServerFailed(
            f"{undone:,} of {len(problems):,} problems are not decided, because the server failed {len(failures)} "
            f"times ({failures[-1]}); what is done is kept: repeat the command to go on"
        )


def read(spec: DataSpec, *, name: str = "SPEC", split: Split = "train") -> list[Problem]:
    """The problems of a source that is named on the command line, or in a configuration."""
    return load_problems(parse_data_argument(spec, name=name) if isinstance(spec, str) else spec, split=split)


def sibling_path(out: Path, ending: str) -> Path:
    """`data.jsonl` -> `data.jsonl.removed.jsonl`."""
    return out.with_name(f"{out.name}.{ending}")


def require_new(out: Path, *others: Path, force: bool) -> None:
    """Raise ConfigError where a file is there already, unless forced, and where none can be written."""
    require_file_type(out)
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: there is no directory {out.parent}")
    for path in (out, *others):
        if path.is_dir():
            raise ConfigError(f"{path} is a directory; expected the name of a file to write")
        if path.exists() and not force:
            raise ConfigError(f"{path} exists already; choose another name, or --force to overwrite it")


@contextmanager
def new_files(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """Yields places to write; once the block ends, what is there takes its names. If it raises, nothing is written."""
    try:
        directory = Path(tempfile.mkdtemp(prefix=".dapo-data-", dir=paths[0].parent))
    except OSError as error:
        raise ConfigError(f"{paths[0]} cannot be written: {error.strerror}") from None
    try:
        targets = tuple(directory / path.name for path in paths)
        yield targets
        for target in targets:
            fsync(target)
        # the data last: where it is, all of the others are
        for target, path in reversed(list(zip(targets, paths, strict=True))):
            os.replace(target, path)
        fsync(paths[0].parent)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """JSON Lines."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        for line in lines:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def require_some(kept: Sequence[Problem], why: str) -> None:
    """Raise DataError where no problem is left: an empty file is no data source."""
    if not kept:
        raise DataError(f"nothing would be left: {why}")


def secret(variable: str | None) -> str | None:
    """A key from the environment, where it is named. Raises ConfigError if it is not set."""
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"--api-key-env {variable}: that environment variable is not set")
    return os.environ[variable]


def print_counts(title: str, counts: Mapping[str, int]) -> None:
    """A table of whole numbers."""
    table = Table(title=escape(title), title_style="bold", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, count in counts.items():
        table.add_row(name, f"{count:,}")
    Console().print(table)


def print_paths(*paths: Path) -> None:
    """Where the files are."""
    for path in paths:
        Console().print(f"written: {path}", soft_wrap=True, highlight=False, markup=False)
