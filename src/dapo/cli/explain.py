"""Prints the result of `dapo explain`, equation by equation."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dapo.analysis.explain import explain_group
from dapo.cli.formatting import number, right
from dapo.core.terminal import print_json, printable
from dapo.core.text import shorten
from dapo.runs.console import SafeConsole
from dapo.runs.directory import RunDirectory
from dapo.runs.outcomes import VERDICT_WORDS, verdict_name

SHOWN_CHARS = 320


def explain(run_dir: Path, step: int | None, group: int | None, *, as_json: bool) -> None:
    """Print the result of `explain_group` for a person, or as JSON.

    Args:
        run_dir: the run directory.
        step: a finished step; None: the last one with responses.
        group: the group's id; None: the group with the largest spread of rewards.
        as_json: print one JSON object.
    """
    step = step or max(RunDirectory.open(run_dir).rollout_tables(), default=1)
    group_facts = explain_group(run_dir, step, group)
    if as_json:
        print_json(group_facts)
        return
    console = SafeConsole()
    for part in _parts(group_facts):
        console.print(part)


def _parts(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield _title(facts)
    if facts["chosen_because"]:
        yield f"chosen: {facts['chosen_because']}"
    yield _heading("The prompt and the responses")
    yield from _prompt(facts)
    yield _responses(facts)
    if any(response["finish"] == "length" for response in facts["responses"]):
        yield "+: cut off at rollout.max_response_tokens"
    yield from _episode(facts)
    yield _heading("Eq. 11: is the group trained on?")
    yield _eq11(facts)
    yield _heading("Eq. 13 and 9: from verdicts to advantages")
    yield _eq13(facts)
    yield "reward = score + penalty"
    yield _rewards(facts)
    if facts["eq9"] is not None:
        yield from _eq9(facts)
    yield from (f"note: {note}" for note in facts["notes"])


def _title(facts: Mapping[str, Any]) -> Text:
    return Text(
        printable(f"{facts['run']}: step {facts['step']}, group {facts['group_id']}"), style="bold"
    )


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold cyan")


def _prompt(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    prompt = shorten(facts["prompt"].strip(), SHOWN_CHARS, keep="ends")
    yield Padding(prompt, (0, 0, 0, 2))
    yield f"reference answer: {facts['answer']}" if facts["answer"] else "no reference answer"


def _responses(facts: Mapping[str, Any]) -> Table:
    table = Table(*right("#"), "verdict", *right("tokens"), "response", box=None)
    for response in facts["responses"]:
        length = f"{response['response_tokens']}"
        if response["finish"] == "length":
            length += "+"
        text = shorten(response["response"].strip(), SHOWN_CHARS, keep="ends")
        table.add_row(f"{response['sample']}", _verdict(response), length, text or "(empty)")
    return table


def _episode(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield the longest episode of the group, turn by turn."""
    longest = max(facts["responses"], key=lambda response: len(response["turns"] or ()))
    if not longest["turns"]:
        return
    yield _heading(f"Response {longest['sample']}: the episode")
    table = Table("role", *right("tokens", "reward"), "text", box=None)
    for turn in longest["turns"]:
        is_observed = turn["role"] != "assistant"
        text = shorten(turn["text"].strip(), SHOWN_CHARS, keep="ends") or "(empty)"
        reward = number(turn["reward"], "+.6g", "-")
        table.add_row(turn["role"], _span(turn), reward, text, style="dim" if is_observed else "")
    yield table
    trains = "train" if longest["trains"] else "would train, but this episode does not"
    yield f"only the tokens of the assistant's turns {trains}; observed tokens never do"


def _span(turn: Mapping[str, Any]) -> str:
    """Return the first and the last token of a turn."""
    if turn["role"] != "assistant":
        return "observed"
    if turn["tokens"] is None:
        return "-"
    first, end = turn["tokens"]
    return f"{first} to {end - 1}"


def _verdict(response: Mapping[str, Any]) -> Text:
    name = verdict_name(response["correct"], response["error"])
    if name == "score":
        return Text(f"score {response['score']:g}")
    return Text(
        VERDICT_WORDS[name], style={"correct": "green", "wrong": "red", "error": "yellow"}[name]
    )


def _eq11(facts: Mapping[str, Any]) -> str:
    eq11 = facts["eq11"]
    answer = "yes" if eq11["kept"] else f"no, its outcome is {facts['outcome']}"
    errors = ""
    if eq11["errors"]:
        errors = f" ({eq11['errors']} of {eq11['group_size']} responses have no verdict)"
    return f"{answer}: {eq11['why']}{errors}"


def _eq13(facts: Mapping[str, Any]) -> str:
    eq13 = facts["eq13"]
    if eq13["mode"] == "filter":
        return "overlong.mode=filter: no penalty, and truncated responses do not train"
    if eq13["mode"] != "soft":
        return f"overlong.mode={eq13['mode']}: no penalty for length"
    longest = eq13["max_length"]
    return (
        f"a response of up to {longest - eq13['buffer']} tokens has no penalty; it grows from there"
        f" to {eq13['penalty']:g} at {longest} tokens (L_max = {longest}, L_cache ="
        f" {eq13['buffer']})"
    )


def _rewards(facts: Mapping[str, Any]) -> Table:
    table = Table(*right("#", "tokens", "score", "penalty", "reward", "advantage"), box=None)
    for response in facts["responses"]:
        values = (response["score"], response["penalty"], response["reward"], response["advantage"])
        table.add_row(
            f"{response['sample']}", f"{response['response_tokens']}", *map(_number, values)
        )
    return table


def _eq9(facts: Mapping[str, Any]) -> Iterator[str]:
    eq9 = facts["eq9"]
    mean = f"{eq9['mean']:.6g}"
    std = f"{eq9['std']:.6g}"
    above = f"reward {'-' if eq9['mean'] >= 0 else '+'} {abs(eq9['mean']):.6g}"
    count = eq9["rewards"]
    estimator = eq9["estimator"]
    if eq9["scale"] == "std":
        formula = f"({above}) / ({std} + {eq9['eps']:g})"
    elif estimator == "rloo":
        formula = (
            f"{count} / {count - 1} ({above}), the reward minus the mean of the other rewards"
            " (RLOO)"
        )
    else:
        formula = f"{above} (advantage.scale=none)"
    rewards = (
        f"{count:,}"
        f" rewards{' of the whole step (REINFORCE++)' if estimator == 'reinforce_pp' else ''} have"
        " mean"
    )
    spread = f"and standard deviation {std}"
    if eq9["differences"] != count:
        spread = (
            f"and the {eq9['differences']:,} rewards of the whole step, less the means of their"
            f" groups, have standard deviation {std} (REINFORCE++ w/ baseline)"
        )
    if eq9["credit"] == "turn":
        yield (
            "environment.credit=turn: the tokens of a turn have the advantage of the rewards from"
            " that turn on, less their mean and divided by their standard deviation over the"
            " responses that reached the turn; the table above has each response's mean over its"
            " tokens"
        )
    else:
        yield f"the {rewards} {mean} {spread}: advantage = {formula}"
    yield (
        "a response's tokens become more probable where its advantage is above 0, less probable"
        " where it is below"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value:
        return f"{value:+.6g}"
    return "0"
