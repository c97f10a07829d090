"""`dapo generate`: answers to prompts, for people or as JSON."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from dapo.cli.answer_text import GrowingText, describe_model, describe_sampling
from dapo.core.terminal import print_json, print_text
from dapo.data.sources.rows import prompt_text
from dapo.evaluation.evaluate import Response
from dapo.runs.console import SafeConsole
from dapo.start.generate import OpenModel, SamplingOptions, responses_to
from dapo.start.model_choice import ModelChoice
from dapo.training.signals import signals_as_requests
from dapo.types import Problem


def generate_answers(
    choice: ModelChoice, problems: Sequence[Problem], options: SamplingOptions, *, as_json: bool
) -> None:
    """Print the answers to prompts, in their order."""
    model = OpenModel(choice)
    try:
        sampler = model.sampler(options)
        limit = sampler.plan.max_response_tokens
        print_text(describe_model(choice), file=sys.stderr)
        print_text(describe_sampling(options, limit), file=sys.stderr)
        with signals_as_requests("stopping; Ctrl-C ends at once") as stop:
            is_streamed = len(problems) * options.samples == 1 and sys.stdout.isatty()
            responses = responses_to(
                sampler, problems, check=stop.check, partial=is_streamed and not as_json
            )
            if as_json:
                num_cut = _print_json(choice, problems, options, responses)
            elif is_streamed:
                num_cut = _print_growing(problems[0], responses)
            else:
                num_cut = _print_text(problems, options.samples, responses)
    finally:
        model.close()
    if num_cut:
        total = len(problems) * options.samples
        print_text(
            f"{num_cut} of {total} answers {'was' if num_cut == 1 else 'were'} cut at the length"
            " limit; --max-new-tokens sets it",
            file=sys.stderr,
        )


def _in_order(
    responses: Iterator[tuple[int, int, Response]], samples: int
) -> Iterator[tuple[int, list[Response]]]:
    """Yield the index of each prompt with all its responses, in the order of the prompts."""
    finished: dict[int, dict[int, Response]] = {}
    following = 0
    for index, i, response in responses:
        finished.setdefault(index, {})[i] = response
        while len(finished.get(following, ())) == samples:
            by_sample = finished.pop(following)
            yield following, [by_sample[number] for number in range(samples)]
            following += 1


def _print_json(
    choice: ModelChoice,
    problems: Sequence[Problem],
    options: SamplingOptions,
    responses: Iterator[tuple[int, int, Response]],
) -> int:
    """Print an object in each line, and return the number of answers that were cut."""
    num_cut = 0
    for index, group in _in_order(responses, options.samples):
        for i, response in enumerate(group):
            num_cut += response.finish == "length"
            row: dict[str, Any] = {
                "prompt": problems[index].prompt,
                "response": response.text,
                "sample": i,
                "tokens": response.tokens,
                "finish": response.finish,
                "seed": options.seed,
                "temperature": options.temperature,
                "top_p": options.top_p,
                "model": choice.name,
                "step": choice.step,
            }
            print_json(row, on_one_line=True)
    return num_cut


def _print_growing(problem: Problem, responses: Iterator[tuple[int, int, Response]]) -> int:
    """Print one answer as it grows; return 1 if it was cut."""
    _print_prompt(problem)
    paper = GrowingText(SafeConsole().width)
    finish = None
    for _, _, response in responses:
        paper.show(response.text)
        finish = response.finish
    paper.end()
    return int(finish == "length")


def _print_text(
    problems: Sequence[Problem], samples: int, responses: Iterator[tuple[int, int, Response]]
) -> int:
    """Print prompts with their answers, and return the number of answers that were cut."""
    num_cut = 0
    for index, group in _in_order(responses, samples):
        if index:
            print_text()
        _print_prompt(problems[index])
        for i, response in enumerate(group, start=1):
            num_cut += response.finish == "length"
            print_text(f"[{i}] {response.text}" if samples > 1 else response.text)
    return num_cut


def _print_prompt(problem: Problem) -> None:
    text = problem.prompt if isinstance(problem.prompt, str) else prompt_text(problem.prompt)
    for line in text.splitlines():
        print_text(f"> {line}")
