"""Prints the result of `dapo explain`, equation by equation."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dapo.cli.formatting import number, plural, right
from dapo.core.terminal import print_json, print_text, printable
from dapo.core.text import shorten
from dapo.runs.console import SafeConsole
from dapo.runs.directory import RunDirectory
from dapo.runs.outcomes import VERDICT_WORDS, verdict_name

SHOWN_CHARS = 320
SHOWN_TOKENS = 20
_CONTEXT_TOKENS = 3
_WEIGHTS = {
    "token": "1 / trained tokens of the update (Eq. 12 as released)",
    "group": "1 / (groups x trained tokens of the group) (Eq. 8 and 12)",
    "sequence": "1 / (responses x tokens of the response) (GRPO, Eq. 5)",
    "constant": "1 / (responses x rollout.max_response_tokens) (Dr. GRPO)",
}


def explain(
    run_dir: Path, step: int | None, group: int | None, *, replay: bool, as_json: bool
) -> None:
    """`dapo explain`: print the result of `explain_group` for a person, or as JSON."""
    from dapo.analysis.explain import explain_group  # torch

    step = step or max(RunDirectory.open(run_dir).rollout_tables(), default=1)
    found = explain_group(
        run_dir, step, group, recompute=replay, log=partial(print_text, file=sys.stderr)
    )
    if as_json:
        print_json(found)
        return
    console = SafeConsole()
    for part in _parts(found):
        console.print(part)


def _parts(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield _title(found)
    if found["chosen_because"]:
        yield f"chosen: {found['chosen_because']}"
    yield _heading("The prompt and the responses")
    yield from _prompt(found)
    yield _responses(found)
    if any(each["finish"] == "length" for each in found["responses"]):
        yield "+: cut off at rollout.max_response_tokens"
    yield from _episode(found)
    yield _heading("Eq. 11: is the group trained on?")
    yield _eq11(found)
    yield _heading("Eq. 13 and 9: from verdicts to advantages")
    yield _eq13(found)
    yield "reward = score + penalty"
    yield _rewards(found)
    if found["eq9"] is not None:
        yield from _eq9(found)
        yield _heading("Eq. 8: what each token adds to the loss")
        yield from _eq8(found)
        yield from _contributions(found)
        yield from _clipped(found)
    yield from (f"note: {note}" for note in found["notes"])


def _title(found: Mapping[str, Any]) -> Text:
    update = ""
    if (eq8 := found["eq8"]) is not None:
        update = f", in update {eq8['update']} of {eq8['updates']} of the step"
    return Text(
        printable(f"{found['run']}: step {found['step']}, group {found['group']}{update}"),
        style="bold",
    )


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold cyan")


def _prompt(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    problem = found["problem"]
    prompt = shorten(problem["prompt"].strip(), SHOWN_CHARS, keep="ends")
    yield Padding(prompt, (0, 0, 0, 2))
    yield f"reference answer: {problem['answer']}" if problem["answer"] else "no reference answer"


def _responses(found: Mapping[str, Any]) -> Table:
    table = Table(*right("#"), "verdict", *right("tokens"), "response", box=None)
    for each in found["responses"]:
        length = f"{each['tokens']}{'+' if each['finish'] == 'length' else ''}"
        text = shorten(each["text"].strip(), SHOWN_CHARS, keep="ends")
        table.add_row(f"{each['sample']}", _verdict(each), length, text or "(empty)")
    return table


def _episode(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The longest episode of the group, turn by turn."""
    chosen = max(found["responses"], key=lambda each: len(each["turns"] or ()))
    if not chosen["turns"]:
        return
    yield _heading(f"Response {chosen['sample']}: the episode")
    table = Table("role", *right("tokens", "reward", "advantage"), "text", box=None)
    for turn in chosen["turns"]:
        tokens = turn["tokens"]
        if tokens is None:
            span = "observed"
        elif tokens[1] > tokens[0]:
            span = f"{tokens[0]} to {tokens[1] - 1}"
        else:
            span = "none"
        text = shorten(turn["text"].strip(), SHOWN_CHARS, keep="ends") or "(empty)"
        values = (number(turn[name], "+.6g", "-") for name in ("reward", "advantage"))
        table.add_row(turn["role"], span, *values, text, style="dim" if tokens is None else "")
    yield table
    trains = "train" if chosen["trains"] else "would train, but this episode does not"
    yield f"only the tokens of the assistant's turns {trains}; observed tokens never do"


def _verdict(response: Mapping[str, Any]) -> Text:
    name = verdict_name(response["correct"], response["error"])
    if name == "score":
        return Text(f"score {response['score']:g}")
    return Text(
        VERDICT_WORDS[name], style={"correct": "green", "wrong": "red", "error": "yellow"}[name]
    )


def _eq11(found: Mapping[str, Any]) -> str:
    eq11 = found["eq11"]
    kept = "yes" if eq11["kept"] else f"no, its outcome is {eq11['outcome']}"
    errors = (
        f" ({eq11['errors']} of {eq11['group_size']} responses have no verdict)"
        if eq11["errors"]
        else ""
    )
    return f"{kept}: {eq11['why']}{errors}"


def _eq13(found: Mapping[str, Any]) -> str:
    eq13 = found["eq13"]
    if eq13["mode"] == "filter":
        return "overlong.mode=filter: no penalty, and truncated responses do not train"
    if eq13["mode"] == "off":
        return "overlong.mode=off: no penalty for length"
    longest = eq13["max_length"]
    return (
        f"a response of up to {longest - eq13['buffer']} tokens has no penalty; it grows from there"
        f" to {eq13['penalty']:g} at {longest} tokens (L_max = {longest}, L_cache ="
        f" {eq13['buffer']})"
    )


def _rewards(found: Mapping[str, Any]) -> Table:
    table = Table(*right("#", "tokens", "score", "penalty", "reward", "advantage"), box=None)
    for each in found["responses"]:
        values = (each["score"], each["overlong_penalty"], each["reward"], each["advantage"])
        table.add_row(f"{each['sample']}", f"{each['tokens']}", *map(_number, values))
    return table


def _eq9(found: Mapping[str, Any]) -> Iterator[str]:
    eq9 = found["eq9"]
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


def _eq8(found: Mapping[str, Any]) -> Iterator[str]:
    eq8 = found["eq8"]
    ratios = eq8["ratios"]
    clip = eq8["clip"]
    yield (
        f"update {eq8['update']} of {eq8['updates']} has {eq8['trained_tokens']:,} trained tokens"
        f" in {eq8['responses']} responses of {plural(len(eq8['groups']), 'group')}; each token"
        f" weighs {_WEIGHTS[eq8['aggregate']]}"
    )
    dual = "" if clip["dual"] is None else f", or A < 0 and r > {clip['dual']:g}"
    bounds = f"A > 0 and r > {clip['high']:g}, or A < 0 and r < {clip['low']:g}{dual}"
    if ratios["source"] == "first_update":
        yield f"{ratios['why']} (in later updates where {bounds})"
        return
    if not ratios["known"]:
        yield f"ratios are not known. {ratios['why']}"
        yield "the values above need no ratios; tokens with the engine's log-probabilities: --json"
        return
    yield (
        "a token's loss is -weight x min(r A, clip(r) A), where r is its probability now over its"
        " probability before the step (Eq. 6) and A its response's advantage; it is clipped, and"
        f" loses its gradient, where {bounds}"
    )
    replay = ratios["replay"]
    equal = (
        f"{replay['metrics_equal']} of {replay['metrics_compared']} logged metrics are equal to the"
        " last bit"
    )
    if replay["metrics_equal"] < replay["metrics_compared"]:
        equal += f", the rest to {replay['largest_relative_difference']:.1g} (relative)"
    yield f"{ratios['why']}: {equal}"


def _contributions(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    eq8 = found["eq8"]
    names = (
        "#",
        "tokens",
        "weight per token",
        "clipped",
        "ratio",
        "part of the loss",
        "part of the gradient",
    )
    table = Table(*right(*names), box=None)
    for each in found["responses"]:
        if each.get("weight") is None:
            continue
        values = each["token_values"].get("ratios") or []
        ratios = f"{min(values):.3f} to {max(values):.3f}" if values else "-"
        clipped = number(each["clipped"], "", "-")
        share = number(each["gradient_share"], ".2%", "-")
        row = (
            f"{each['tokens']}",
            f"{each['weight']:.4g}",
            clipped,
            ratios,
            _number(each["loss"]),
            share,
        )
        table.add_row(f"{each['sample']}", *row)
    yield table
    if eq8["loss"] is None:
        return
    with_kl = f", with {eq8['kl_coef']:g} x KL" if eq8["kl_coef"] > 0 else ""
    yield (
        f"the group: {eq8['loss_of_group']:+.6f} of the update's loss of"
        f" {eq8['loss']:+.6f}{with_kl}, and {eq8['gradient_share_of_group']:.1%} of its gradient"
    )
    yield (
        "part of the gradient: the size of the loss's derivative by each token's log-probability,"
        " divided by its sum over the update; a clipped token has none"
    )


def _clipped(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    eq8 = found["eq8"]
    tokens = found["clipped_tokens"]
    if not eq8["ratios"]["known"] or eq8["ratios"]["source"] == "first_update":
        return
    if not tokens:
        yield f"no token of the group is clipped ({eq8['clipped_tokens']} in the update)"
        return
    numbers = ("A", "ratio", "bound", "gradient without clip")
    table = Table(*right("#", "token"), "text", "in context", *right(*numbers), box=None)
    yield (
        f"\n{plural(len(tokens), 'clipped token')} of the group ({eq8['clipped_tokens']} in the"
        " update)"
    )
    shown = sorted(tokens, key=lambda each: -each["gradient_share_without_clip"])[:SHOWN_TOKENS]
    for each in shown:
        response = found["responses"][each["sample"]]
        sign = "<" if each["side"] == "low" else ">"
        numbers_of = (
            f"{response['advantage']:+.3f}",
            f"{each['ratio']:.4f}",
            f"{sign} {each['bound']:g}",
        )
        share = f"{each['gradient_share_without_clip']:.2%}"
        text = f"{each['id']}" if each["text"] is None else repr(each["text"])
        table.add_row(
            f"{each['sample']}",
            f"{each['position']}",
            text,
            _context(response, each),
            *numbers_of,
            share,
        )
    yield table
    if len(tokens) > len(shown):
        yield f"and {len(tokens) - len(shown)} more: --json"


def _context(response: Mapping[str, Any], token: Mapping[str, Any]) -> Text:
    texts: Sequence[str] | None = response["token_values"]["texts"]
    if texts is None:
        return Text("")
    at = token["position"]
    before = "".join(texts[max(0, at - _CONTEXT_TOKENS) : at])
    after = "".join(texts[at + 1 : at + 1 + _CONTEXT_TOKENS])
    parts = ((before, ""), (texts[at], "bold reverse"), (after, ""))
    shown = (
        (printable(text.replace("\n", "\\n").replace("\t", "\\t")), style) for text, style in parts
    )
    return Text.assemble(*shown)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value:
        return f"{value:+.6g}"
    return "0"
