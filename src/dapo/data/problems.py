"""Load the problems that a data spec names."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from itertools import islice, zip_longest
from typing import Any

from dapo.config.data_spec import (
    Columns,
    CountingColumns,
    FileSource,
    HubSource,
    MixSource,
    Source,
    TaskSource,
    parse_spec,
)
from dapo.core.errors import DataError
from dapo.data.begun import episode_name
from dapo.data.sources.builtin import Split, builtin_problems
from dapo.data.sources.gym_source import gym_problems
from dapo.data.sources.readers import read_hub_rows, read_rows
from dapo.data.sources.rows import lost_type, problem_from_row, problem_id, prompt_text
from dapo.types import Problem

SHOWN_ERRORS = 10
DEFAULT_SIZE: dict[Split, int] = {"train": 1000, "eval": 200}
# reasoning-gym's item (seed, index) is also item (seed + 1, index - 1): seeds far apart share no
# items
DEFAULT_GYM_SEED: dict[Split, int] = {"train": 0, "eval": 1_000_000}


def load_problems(
    spec: str | dict[str, Any] | Source,
    *,
    split: Split = "train",
    require_answer: bool = True,
    invalid: list[DataError] | None = None,
    convert: Callable[..., Problem] = problem_from_row,
    texts: dict[str, str] | None = None,
    warnings: list[str] | None = None,
) -> list[Problem]:
    """Return all problems that `spec` names, in order; at least one.

    A spec is a path (`problems.csv`), `hub:NAME[:SPLIT]`, `builtin:TASK,...`, `gym:TASK,...` or a
    mapping: `{path: FILE, prompt: COLUMN, answer: COLUMN, size: N}`, `{hub: NAME, config:, split:,
    prompt:, answer:, size:}`, `{builtin: {sums: {terms: 3}}, size: N, seed: S}`, `{gym: {chain_sum:
    {max_terms: 2}}, size: N, seed: S}`, `{environment: {}, size: N, seed: S}`, `{mix: {easy: SPEC,
    hard: SPEC}}`. `size` takes the first rows of a file; for generated problems it is the total
    over all tasks, in round-robin order.

    Files and hub data sets give the same rows for both values of `split`, copies included. Built-in
    tasks have disjoint questions for training and evaluation. Generated evaluation sets contain no
    copies, so they may be smaller than `size`.

    Args:
        spec: the data source.
        split: whether the problems are for training or for evaluation.
        require_answer: whether rows without a reference answer are errors; if not, theirs is "".
        invalid: gets the errors of rows that cannot be used, which are then left out.
        convert: makes a problem of a row (`problem_from_row`, `demonstration_from_row`).
        texts: gets the columns whose values became texts, each with the type that they had.
        warnings: gets a line for each source whose pattern `remove` matches in no answer.

    Raises:
        DataError: nothing can be read; without `invalid` also for rows that cannot be used, of
            which it names the first ten.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split must be train or eval, got {split!r}")
    source = parse_spec(spec)
    if isinstance(source, MixSource):
        return _mixed(
            source,
            split,
            require_answer=require_answer,
            invalid=invalid,
            convert=convert,
            texts=texts,
            warnings=warnings,
        )
    if isinstance(source, TaskSource):
        return _generated(source, split)
    errors: list[DataError] = []
    columns = CountingColumns(*astuple(source.columns))
    rows = _read(source, columns, errors, convert, require_answer=require_answer, texts=texts)
    problems = list(islice(rows, source.size))
    if warnings is not None and columns.remove is not None and not columns.counts["changed"]:
        warnings.append(
            f"remove={columns.remove!r} matches in none of the {columns.counts['read']:,} answers of"
            f" {source.label}, so nothing is deleted; correct the pattern, or leave it out"
        )
    if not problems and errors:
        raise errors[0]
    if not problems:
        if isinstance(source, FileSource):
            name = str(source.path)
        else:
            name = f"hub:{source.name}:{source.split}"
        raise DataError(f"{name} is empty; expected at least one problem with prompt and answer")
    if invalid is not None:
        invalid += errors
    elif len(errors) == 1:
        raise errors[0]
    elif errors:
        raise _listed(errors)
    return problems


def unique_problems(problems: Sequence[Problem]) -> list[tuple[Problem, int]]:
    """Return the distinct problems (by id) in order, with the number of copies of each."""
    counts = Counter(problem.id for problem in problems)
    # reversed: of copies the first stays
    first = {problem.id: problem for problem in reversed(problems)}
    return [(first[key], count) for key, count in counts.items()]


def remove_overlap(
    train: Sequence[Problem], held_out: Sequence[Problem], *, option: str = "data.train"
) -> tuple[list[Problem], int]:
    """Return the training problems that are not held out, and the number of the others.

    Texts are compared with whitespace collapsed and without system messages; answers are not
    compared.

    Args:
        train: the training problems.
        held_out: the problems of evaluations.
        option: the option of the training problems, for the error.

    Raises:
        DataError: nothing is left.
    """
    texts = {prompt_text(problem.prompt) for problem in held_out}
    remaining = [problem for problem in train if prompt_text(problem.prompt) not in texts]
    if train and not remaining:
        raise DataError(
            f"{option}: every problem is also in data.eval; nothing is left to train on"
        )
    return remaining, len(train) - len(remaining)


def _listed(errors: Sequence[DataError]) -> DataError:
    lines = [f"{len(errors):,} rows cannot be used:"]
    lines += [str(error) for error in errors[:SHOWN_ERRORS]]
    if len(errors) > SHOWN_ERRORS:
        lines.append(f"and {len(errors) - SHOWN_ERRORS:,} more")
    listed = "\n  ".join(lines)
    return DataError(
        f"{listed}\nMend them, or leave them out: dapo data import SOURCE OUT.jsonl --drop-invalid"
    )


def _mixed(source: MixSource, split: Split, **options: Any) -> list[Problem]:
    """Return the problems of all parts in round-robin order, each in the first part that has it."""
    first_parts: dict[str, str] = {}
    parts = []
    for name, part in source.parts.items():
        problems = []
        for problem in load_problems(part, split=split, **options):
            # copies must have one source, by which metrics are split
            first_part = first_parts.setdefault(problem.id, name)
            problems.append(replace(problem, source=first_part))
        parts.append(problems)
    return _round_robin(parts)


def _round_robin(parts: Sequence[Sequence[Problem]]) -> list[Problem]:
    """Return the first problem of each part, then the second of each, and so on."""
    rows = zip_longest(*parts)
    return [problem for row in rows for problem in row if problem is not None]


def _read(
    source: FileSource | HubSource,
    columns: Columns,
    errors: list[DataError],
    convert: Callable[..., Problem],
    *,
    require_answer: bool,
    texts: dict[str, str] | None,
) -> Iterator[Problem]:
    if isinstance(source, FileSource):
        rows = read_rows(source.path)
        name = source.path.stem
    else:
        rows = read_hub_rows(source)
        name = source.name
    # the released DAPO file repeats each problem a hundred times: equal copies share one object
    problems_by_id: dict[str, Problem] = {}
    for where, row in rows:
        if texts is not None and not isinstance(row, DataError):
            for column, value in row.items():
                kind = lost_type(str(column), value, source.columns)
                if kind is not None:
                    texts.setdefault(str(column), kind)
        try:
            problem = convert(
                row,
                where=where,
                source=name,
                columns=columns,
                require_answer=require_answer,
            )
        except DataError as error:
            errors.append(error)
            continue
        first = problems_by_id.setdefault(problem.id, problem)
        # the representation tells 1, 1.0 and True apart, which are equal
        is_copy = first == problem and repr(first.fields) == repr(problem.fields)
        yield first if is_copy else problem


def _generated(source: TaskSource, split: Split) -> list[Problem]:
    """Return the problems of tasks in round-robin order."""
    size = DEFAULT_SIZE[split]
    if source.size is not None:
        size = source.size
    if size < len(source.tasks):
        raise DataError(
            f"data source {source.kind}: size={size} is less than the {len(source.tasks)} tasks it"
            " names"
        )
    num_tasks = len(source.tasks)
    # round-robin: problem i is of task i mod n
    sizes = [len(range(index, size, num_tasks)) for index in range(num_tasks)]
    seed = source.seed or 0
    by_task = []
    if source.kind == "environment":
        by_task.append(_begun_by_environment(size, seed, split))
    elif source.kind == "builtin":
        for (name, options), task_size in zip(source.tasks.items(), sizes, strict=True):
            problems = builtin_problems(name, options, size=task_size, seed=seed, split=split)
            by_task.append(problems)
    else:
        if source.seed is None:
            seed = DEFAULT_GYM_SEED[split]
        by_task = gym_problems(source.tasks, sizes, seed=seed, distinct=split == "eval")
    return _round_robin(by_task)


def _begun_by_environment(size: int, seed: int, split: Split) -> list[Problem]:
    """Return problems with distinct ids, the seeds of episodes; `reset` gives the prompts."""
    prompts = [episode_name(index, split=split, seed=seed) for index in range(size)]
    return [Problem(problem_id(prompt, ""), prompt, "", source="environment") for prompt in prompts]
