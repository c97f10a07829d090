"""`dapo data stats`: describes a data set and its difficulty for a run or a model."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dapo.cli.formatting import right, titled_table
from dapo.config import DataSpec, build_config, parse_data_argument
from dapo.config.load import as_literal, resolve_auto_verifier
from dapo.core.errors import ConfigError, DataError
from dapo.core.rng import keyed_permutation
from dapo.core.text import shorten
from dapo.data.prepare.stats import PassRate
from dapo.data.problems import unique_problems
from dapo.data.sources.rows import prompt_text
from dapo.rewards.data_check import has_tests, unusable_rows
from dapo.runs.console import SafeConsole, progress
from dapo.runs.directory import RunDirectory
from dapo.runs.stored_config import load_run_config
from dapo.types import Problem

BAR_WIDTH = 40
PAPER_GROUP_SIZE = 16
SHOWN_ROWS = 10  # sources, and visited problems
CODE_STARTS = ("assert ", "def check(", "def test_")
"""Beginnings of answers that mark rows for the verifier `code`, as the column of tests does."""


def group_size_of(run: Path | None) -> int:
    """Return the group size of a run; the paper's if there is no readable run."""
    try:
        if run is None:
            return PAPER_GROUP_SIZE
        return load_run_config(RunDirectory.open(run)).rollout.group_size
    except ConfigError:
        return PAPER_GROUP_SIZE


def run_pass_rates(path: Path) -> dict[str, PassRate]:
    """Return the pass rates of a run's problems by id, as of its newest checkpoint.

    Raises DataError before the first one.
    """
    from dapo.sampling.problem_stats import read_problem_stats

    file = RunDirectory.open(path).problem_stats
    if not file.is_file():
        raise DataError(f"{path} has no {file.name} yet; a run writes it with its first checkpoint")
    try:
        stats = read_problem_stats(file)
    except DataError as error:
        raise DataError(f"{error}; the newest checkpoint of the run has a copy") from None
    rates = {}
    for problem, entry in stats.by_problem().items():
        if entry["decided"]:
            counts = [int(entry[name]) for name in ("decided", "correct", "visits", "last_step")]
            rates[problem] = PassRate(problem, *counts)
    return rates


def model_pass_rates(
    spec: DataSpec,
    data: Sequence[Problem],
    model: str,
    *,
    samples: int,
    count: int,
    overrides: Sequence[str],
) -> tuple[dict[str, int], dict[str, PassRate]]:
    """Measure prompt lengths and the pass rates of a random subset, sampled as in training.

    Args:
        spec: the data source of `data`.
        data: the problems.
        model: an alias, a Hugging Face id, a model directory or a run directory.
        samples: responses to each sampled problem; 0: measure lengths only.
        count: how many problems are sampled.
        overrides: options of sampling and of the reward, `key=value`; without a verifier in them,
            the run's judges, or the default of the source.

    Returns the length of every prompt in tokens, and the pass rates, both by problem id.
    """
    from dapo.evaluation.evaluate import evaluate
    from dapo.evaluation.scores import evaluation_plan
    from dapo.start.check import check
    from dapo.start.episodes import episodes_of
    from dapo.start.evaluate import (
        EvalRequest,
        evaluation_config,
        open_engine_sampler,
        run_options,
    )
    from dapo.start.read import read_model_and_prompts, require_fit
    from dapo.start.resolve import device_for_inputs, resolve_engine, resolve_sampling

    spec = parse_data_argument(spec) if isinstance(spec, str) else spec
    as_trained = [
        f"eval.samples_per_problem={max(1, samples)}",
        "eval.temperature=1.0",
        "eval.top_p=1.0",
    ]
    request = EvalRequest(str(spec), overrides=(*as_trained, *overrides))
    config, checkpoint = evaluation_config(model, spec, request, run_options(model))
    config = resolve_sampling(config)
    loaded, encoder = read_model_and_prompts(
        config, device_for_inputs(config, training=False) if samples else "meta"
    )
    unique = [problem for problem, _ in unique_problems(data)]
    with progress("count tokens", unit="prompts", after_s=1) as update_progress:
        encoder.measure(unique, on_progress=update_progress)
    tokens = {problem.id: encoder.length(problem) for problem in unique}
    if not samples:
        return tokens, {}
    fitting, _ = encoder.split_by_length(unique)
    order = keyed_permutation(len(fitting), config.train.seed, "stats")
    sample = [fitting[index] for index in sorted(order[:count])]
    plan = evaluation_plan(config, loaded.stop_ids)
    require_fit(sample, encoder, loaded, config, plan.max_response_tokens)
    with ExitStack() as stack:
        code = stack.enter_context(check(config, training=False)).code
        assert code.judge is not None
        episodes = None
        if code.environment is not None:
            episodes = episodes_of(
                config,
                loaded.tokenizer,
                code.environment,
                positions=getattr(loaded.model.config, "max_position_embeddings", None),
            )
            sample = episodes.with_prompts(sample)
            encoder = episodes.encoder
        sampler = open_engine_sampler(
            resolve_engine(config, loaded.model),
            loaded,
            encoder,
            checkpoint,
            plan,
            stack,
            episodes,
        )
        update_progress = stack.enter_context(progress("sample and verify"))
        result = evaluate(sampler, code.judge, sample, on_progress=update_progress)
    rates = {}
    for judged in result.problems:
        verdicts = [response.correct for response in judged.valid if response.correct is not None]
        if verdicts:
            name = judged.problem.id
            rates[name] = PassRate(name, len(verdicts), sum(verdicts))
    return tokens, rates


def problem_rows(
    data: Sequence[Problem],
    measured: Mapping[str, Mapping[str, PassRate]],
    tokens: Mapping[str, int] | None,
) -> list[dict[str, Any]]:
    """Return a JSON object per distinct problem, with pass rates by name of their source."""
    rows = []
    for problem, copies in unique_problems(data):
        row: dict[str, Any] = {
            "id": problem.id,
            "source": problem.source,
            "copies": copies,
            "question": prompt_text(problem.prompt),
            "answer": problem.answer,
            "prompt_tokens": tokens[problem.id] if tokens is not None else None,
        }
        for name, rates in measured.items():
            row[name] = rates[problem.id].as_json() if problem.id in rates else None
        rows.append(row)
    return rows


def print_statistics(
    result: Mapping[str, Any],
    titles: Mapping[str, str],
    data: Sequence[Problem],
    visited: Mapping[str, PassRate] | None,
) -> None:
    """Print the results of `describe_problems` and `describe_difficulty`.

    Args:
        result: the results, those of `describe_difficulty` by name.
        titles: the titles of their tables by the same names.
        data: the problems.
        visited: the pass rates of a run, whose most visited problems are printed; None: no run.
    """
    _print_description(result)
    for name, title in titles.items():
        _print_difficulty(result[name], title)
    if visited is not None:
        _print_most_visited(data, visited)


def _print_description(result: Mapping[str, Any]) -> None:
    title = str(result["data"])
    table = titled_table(title, "", "", show_header=False)
    table.add_row("rows", f"{result['rows']:,}")
    table.add_row("distinct problems", f"{result['distinct']:,}")
    table.add_row(
        "copies", f"{result['copies']:,} (at most {result['max_copies']:,} rows per problem)"
    )
    conflicts = result["conflicting_answers"]
    if conflicts:
        table.add_row(
            "different answers",
            f"{conflicts:,} texts (dapo data dedupe keeps the majority's, or none)",
        )
    for name in ("prompt_characters", "prompt_tokens"):
        summary = result[name]
        if summary is not None:
            numbers = [f"{key} {value:,.0f}" for key, value in summary.items()]
            table.add_row(name.replace("_", ", "), ", ".join(numbers))
    for name in ("instruction_before", "instruction_after"):
        if result[name]:
            table.add_row(name.replace("_", " "), shorten(result[name], 100, keep="ends"))
    kinds = [f"{kind} {count:,}" for kind, count in result["answer_types"].items() if count]
    table.add_row("answer types", ", ".join(kinds))
    sources = [f"{name} {count:,}" for name, count in result["sources"].items()]
    num_hidden = len(sources) - SHOWN_ROWS
    if num_hidden > 0:
        sources[SHOWN_ROWS:] = [f"and {num_hidden} more"]
    table.add_row("sources", ", ".join(sources))
    SafeConsole().print(table)


def warn_of_unusable_rows(
    spec: str, data: Sequence[Problem], overrides: Sequence[str]
) -> list[str]:
    """Warn of rows whose responses the reward cannot judge.

    The reward is a run's own, or the default of a data source, which is `code` where rows hold
    Python; `overrides` of `reward` change it.
    """
    raw: dict[str, Any] = {"model": "none"}
    if RunDirectory.is_run(spec):
        run_config = load_run_config(RunDirectory.open(Path(spec)))
        run_options = as_literal(run_config.model_dump(mode="json"))
        raw["data"] = {"train": run_options["data"]["train"]}
        raw["reward"] = run_options["reward"]
    else:
        raw["data"] = {"train": parse_data_argument(spec)}
        if any(has_tests(problem) or problem.answer.startswith(CODE_STARTS) for problem in data):
            raw["reward"] = {"verifier": "code"}
    reward_options = [option for option in overrides if option.startswith("reward.")]
    config = build_config(raw, reward_options, where="dapo data stats")
    reward = resolve_auto_verifier(config).reward
    return [str(rows) for rows in unusable_rows(data, reward.verifier, reward.options)]


def _print_difficulty(result: Mapping[str, Any], title: str) -> None:
    table = titled_table(title, "pass rate", *right("problems"), "")
    most = max(1, *result["histogram"])
    for tenth, count in enumerate(result["histogram"]):
        bar = "█" * -(-BAR_WIDTH * count // most)
        table.add_row(f"{tenth / 10:.1f} to {(tenth + 1) / 10:.1f}", f"{count:,}", bar)
    console = SafeConsole()
    console.print(table)
    lines = [
        f"{result['problems']:,} problems with {result['responses']:,} verdicts,"
        f" {result['unseen']:,} without"
    ]
    if result["not_in_data"]:
        lines.append(f"{result['not_in_data']:,} other problems of the run are not in this data")
    keep_rate = result["expected_keep_rate"]
    if keep_rate is not None:
        cost = "no group has a signal"
        if keep_rate:
            cost = f"each batch samples {1 / keep_rate:.1f} times its groups"
        lines += [
            (
                f"never correct: {result['never_correct']:,}, always correct:"
                f" {result['always_correct']:,}, mean pass rate: {result['mean_pass_rate']:.1%}"
            ),
            (
                f"expected keep rate of dynamic sampling with groups of {result['group_size']}:"
                f" {keep_rate:.1%} ({cost})"
            ),
        ]
    for line in lines:
        console.print(line, soft_wrap=True)


def _print_most_visited(data: Sequence[Problem], rates: Mapping[str, PassRate]) -> None:
    rated = [
        (rates[problem.id], problem) for problem, _ in unique_problems(data) if problem.id in rates
    ]
    numbers = right("visits", "responses", "pass rate", "last step")
    table = titled_table("most visited problems, hardest first", "problem", *numbers, "question")
    rated.sort(key=lambda pair: (-pair[0].visits, pair[0].rate, pair[1].id))
    for rate, problem in rated[:SHOWN_ROWS]:
        question = shorten(prompt_text(problem.prompt), 60, keep="ends")
        cells = (
            problem.id,
            f"{rate.visits}",
            f"{rate.responses}",
            f"{rate.rate:.0%}",
            f"{rate.last_seen}",
            question,
        )
        table.add_row(*cells)
    SafeConsole().print(table)
