"""Prints the result of `dapo whatif`: changed outcomes, verdicts and advantages in counts, and examples."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dapo.cli.formatting import number, option_text, right
from dapo.core.terminal import print_json, print_text, printable
from dapo.core.text import one_line, shorten
from dapo.runs.console import SafeConsole

SHOWN_STEPS = 20
SHOWN_CHARS = 160


def whatif(run_dir: Path, overrides: Sequence[str], *, steps: str, gradient: bool, as_json: bool) -> None:
    """`dapo whatif`: print the result of `what_if` for a person, or as JSON."""
    from dapo.analysis.whatif import what_if  # torch

    def log(text: str) -> None:
        if sys.stderr.isatty():
            print_text(text, file=sys.stderr)

    found = what_if(run_dir, overrides, steps=steps, gradient=gradient, log=log)
    (print_json if as_json else _print_changes)(found)


def _print_changes(found: Mapping[str, Any]) -> None:
    console = SafeConsole()
    steps, total = found["steps"], found["total"]
    of_steps = f"step {steps[0]['step']}" if len(steps) == 1 else f"{len(steps)} steps"
    console.print(_heading(f"{found['run']}: {total['responses']:,} stored responses of {of_steps}"))
    for option in found["options"]:
        console.print(f"{option['name']}: {option_text(option['old'])} -> {option_text(option['new'])}")
    if not found["options"]:
        console.print("no option is changed: any difference comes from a verifier that is not deterministic")
    elif not found["judged_again"]:
        console.print("no option of the reward is changed: the stored verdicts are used")
    console.print(_step_table(steps, total))
    if len(steps) > SHOWN_STEPS:
        console.print(f"the last {SHOWN_STEPS} of {len(steps)} steps are shown: --json has all")
    if total["shortfall_groups"]:
        console.print(f"{total['shortfall_groups']} groups are missing to full batches: a run would have sampled more")
    console.print(_changed(total))
    for name, unit in (("outcomes", "groups"), ("verdicts", "responses")):
        if any(row["from"] != row["to"] for row in found[name]):
            console.print(_heading(f"\n{name}"), _transitions(found[name], unit), sep="\n")
    _print_errors(console, found)
    _print_examples(console, found["examples"])
    if found["gradients"] is not None:
        console.print(_heading("\npolicy gradients"), _gradients(found["gradients"]), sep="\n")
    for note in found["notes"]:
        console.print(f"note: {note}")


def _heading(text: str) -> Text:
    return Text(printable(text), style="bold")


def _step_table(steps: Sequence[Mapping[str, Any]], total: Mapping[str, Any]) -> Table:
    changed = right(*(f"changed {name}" for name in ("outcomes", "verdicts", "advantages")))
    values = right("groups", "keep rate", "mean reward", "accuracy", no_wrap=True)
    table = Table(*right("step"), *values, *changed, box=None)
    for step in steps[-SHOWN_STEPS:]:
        table.add_row(f"{step['step']}", *_cells(step))
    if len(steps) > 1:
        table.add_row("all", *_cells(total), style="bold")
    return table


def _cells(of: Mapping[str, Any]) -> list[str]:
    old, new, changed = of["old"], of["new"], of["changed"]
    formats = {"groups": "", "keep_rate": ".0%", "reward_mean": "+.3f", "accuracy": ".1%"}
    pairs = [_pair(form, old[name], new[name]) for name, form in formats.items()]
    return [*pairs, *(f"{changed[name]}" for name in ("outcomes", "verdicts", "advantages"))]


def _pair(form: str, old: float | None, new: float | None) -> str:
    before, after = (number(value, form, "-") for value in (old, new))
    return before if before == after else f"{before} -> {after}"


def _changed(total: Mapping[str, Any]) -> str:
    changed = total["changed"]
    signs = f" ({changed['advantage_signs']} change their sign)" if changed["advantage_signs"] else ""
    return (
        f"of {total['responses']:,} responses {changed['verdicts']:,} get a different verdict, {changed['rewards']:,} "
        f"a different reward and {changed['advantages']:,} a different advantage{signs}"
    )


def _transitions(rows: Sequence[Mapping[str, Any]], unit: str) -> Table:
    table = Table("from", "to", *right(unit), box=None)
    for row in rows:
        to, style = ("the same", "dim") if row["from"] == row["to"] else (row["to"], "")
        table.add_row(row["from"], to, f"{row[unit]:,}", style=style)
    return table


def _print_errors(console: SafeConsole, found: Mapping[str, Any]) -> None:
    old, new = (found["total"][side]["verifier_errors"] for side in ("old", "new"))
    if not old and not new:
        return
    console.print(f"\nresponses without a verdict: {old:,} -> {new:,}")
    for each in found["errors"]["new"]:
        console.print(f"  {each['responses']:,} times: {_shortened(each['error'])}")


def _print_examples(console: SafeConsole, examples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    if examples["verdicts"]:
        console.print(_heading("\nexamples of changed verdicts"))
    for each in examples["verdicts"][:4]:
        scores = f"{_number(each['old_score'])} -> {_number(each['new_score'])}"
        change = f"{each['from']} -> {each['to']} (score {scores})"
        console.print(f"step {each['step']}, group {each['group']}, response {each['sample']}: {change}")
        console.print(f"  prompt    {_shortened(each['prompt'])}")
        console.print(f"  reference {_shortened(each['answer'])}")
        console.print(f"  response  {_shortened(each['response'])}")
        if each["error"]:
            console.print(f"  error     {_shortened(each['error'])}")
    if examples["outcomes"]:
        console.print(_heading("\nexamples of changed outcomes"))
    for each in examples["outcomes"][:4]:
        sides = [" ".join(map(_number, each[f"{side}_scores"])) for side in ("old", "new")]
        shown = sides[0] if sides[0] == sides[1] else " -> ".join(sides)
        console.print(f"step {each['step']}, group {each['group']}: {each['from']} -> {each['to']}, scores {shown}")


def _gradients(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(*right("step", "at checkpoint", "cosine", "norm", "groups"), box=None)
    for row in rows:
        cosine = number(row["cosine"], ".6f", "-")
        norms, groups = ((row[f"old_{name}"], row[f"new_{name}"]) for name in ("norm", "groups"))
        table.add_row(f"{row['step']}", f"{row['checkpoint']}", cosine, _pair(".4g", *norms), _pair("", *groups))
    return table


def _number(value: float | None) -> str:
    return number(value, "g", "-")


def _shortened(text: str) -> str:
    return shorten(one_line(text), SHOWN_CHARS, keep="ends")
