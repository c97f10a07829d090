"""The results in a model card: the first and the last evaluation of the run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dapo.core.errors import DataError
from dapo.core.text import with_interval
from dapo.evaluation.pairing import paired_difference
from dapo.start.card.facts import Card, verifier_text
from dapo.start.card.text import code, escaped, table


def results(card: Card) -> Iterator[str]:
    """Yield the accuracies before and after training, or why there are none."""
    yield "## Results"
    if not card.evaluations:
        yield "The run made no evaluation on held-out problems."
        return
    last = card.evaluations[-1]
    yield _how_evaluated(card, last)
    yield table(["", *map(_when, card.evaluations)], _figures(card.evaluations))
    if len(card.evaluations) == 2:
        yield _difference(*card.evaluations)
    if last["step"] != card.step:
        yield f"The weights are those after step {card.step}, which was not evaluated."
    for evaluation in card.evaluations:
        if evaluation.get("warning"):
            yield f"{_when(evaluation)}: {escaped(str(evaluation['warning']))}."


def _when(evaluation: Mapping[str, Any]) -> str:
    return f"after step {evaluation['step']}" if evaluation["step"] else "before training"


def _how_evaluated(card: Card, evaluation: Mapping[str, Any]) -> str:
    samples = evaluation["samples_per_problem"]
    limit = evaluation["max_response_tokens"]
    judge = ""
    if "verifier" in evaluation:
        judge = f", judged by {verifier_text(evaluation['verifier'])}"
    return (
        f"{evaluation['problems']:,} held-out problems of {code(evaluation['name'])}, {samples}"
        f" {'response' if samples == 1 else 'responses'} to each at temperature"
        f" {evaluation['temperature']:g} and top_p {evaluation['top_p']:g}, of at most {limit:,}"
        f" tokens{judge}. In brackets: 95 % intervals over problems."
    )


def _figures(evaluations: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the rows of the table of results."""
    means = []
    for evaluation in evaluations:
        interval = (evaluation["low"], evaluation["high"])
        means.append(with_interval(evaluation["accuracy"], interval, _style(evaluation)))
    last = evaluations[-1]
    label = f"accuracy (avg@{last['samples_per_problem']})" if last["binary"] else "mean score"
    yield [label, *means]
    for name in _estimates(last):
        values = []
        for evaluation in evaluations:
            interval = evaluation["intervals"].get(name)
            is_there = name in evaluation
            values.append(with_interval(evaluation[name], interval) if is_there else "")
        yield [name, *values]
    sources = list(last["by_source"])
    for source in sources if len(sources) > 1 else ():
        values = []
        for evaluation in evaluations:
            row = evaluation["by_source"].get(source)
            style = _style(evaluation)
            values.append("" if row is None else f"{row['accuracy']:{style}}")
        yield [code(source), *values]
    yield ["tokens of a response", *(f"{x['response_tokens_mean']:.1f}" for x in evaluations)]
    yield ["truncated responses", *(f"{x['truncated_fraction']:.1%}" for x in evaluations)]


def _estimates(evaluation: Mapping[str, Any]) -> list[str]:
    """Return the names of pass@k and cons@k; of one response both are the accuracy."""
    samples = evaluation["samples_per_problem"]
    names = [f"pass@{samples}", f"cons@{samples}"]
    return [name for name in names if samples > 1 and name in evaluation]


def _style(evaluation: Mapping[str, Any]) -> str:
    return ".1%" if evaluation["binary"] else ".3f"


def _difference(first: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """Return the paired difference in a sentence, or that there is none."""
    try:
        paired = paired_difference(first, last)
    except DataError:
        return (
            "The two evaluations differ in their settings or problems, so that their difference is"
            " not that of training."
        )
    if paired["difference"] is None:
        return "No problem has a verdict in both evaluations."
    scale, style, unit = (100, "+.1f", " points") if last["binary"] else (1, "+.3f", "")
    text = f"Difference, paired by problem: {scale * paired['difference']:{style}}{unit}"
    if paired["low"] is not None:
        low = scale * paired["low"]
        high = scale * paired["high"]
        text += f" (95 % interval {low:{style}} to {high:{style}})"
    return (
        f"{text}; {paired['better']} problems better, {paired['worse']} worse, {paired['equal']}"
        " equal."
    )
