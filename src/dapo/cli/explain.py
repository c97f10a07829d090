"""Prints the result of `dapo explain`: a group in short, and on request its equations and tokens."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from dapo.analysis.explain import explain_group, instructive_step
from dapo.cli.formatting import number, right, say
from dapo.core.terminal import print_json
from dapo.core.text import one_line, shorten
from dapo.runs.console import SafeConsole
from dapo.runs.directory import RunDirectory
from dapo.runs.outcomes import VERDICT_WORDS, verdict_name

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SHOWN_CHARS = 320
OTHER_COLUMNS = 48
"""The characters of a line of the short form that are not of the response."""
LEAST_CHARS = 12
"""The characters of a response that a terminal without room for them shows, on several lines."""
SHOWN_RESPONSES = 8
"""The most responses of which the short form shows all, in at most 15 lines."""
EXTREMES = 3
"""Of more responses, the number with the lowest and that with the highest advantages."""
LABEL = 10


def explain(
    run_dir: Path,
    step: int | None,
    group: int | None,
    *,
    equations: bool = False,
    tokens: bool = False,
    as_json: bool,
) -> None:
    """Print the result of `explain_group` for a person, or as JSON.

    Args:
        run_dir: the run directory.
        step: a finished step; None: the newest one in which a group trained.
        group: the group's id; None: an instructive one.
        equations: also print equations 11, 13 and 9 with the numbers of the group.
        tokens: also print the probability of each token.
        as_json: print one JSON object.
    """
    step = step or instructive_step(run_dir)
    group_facts = explain_group(run_dir, step, group)
    if as_json:
        print_json(group_facts)
        return
    console = SafeConsole()
    say(console, _headline(group_facts), style="bold")
    say(
        console,
        f"{group_facts['run']}: step {group_facts['step']}, group {group_facts['group_id']}",
    )
    if not equations:
        _print_group(console, group_facts)
    else:
        if group_facts["chosen_because"]:
            say(console, f"chosen: {group_facts['chosen_because']}")
        for part in _equations(group_facts):
            if isinstance(part, str):
                say(console, part)
            else:
                console.print(part)
    if tokens:
        _print_tokens(console, run_dir, group_facts)


def _headline(facts: Mapping[str, Any]) -> str:
    """Say whether the group trained, and why."""
    eq11 = facts["eq11"]
    if not eq11["kept"]:
        return f"not trained ({facts['outcome']}): {eq11['why']}"
    if any(response["correct"] is not None for response in facts["responses"]):
        return f"trained: {eq11['correct']} of {eq11['valid']} responses are right"
    return f"trained: the scores are {eq11['lowest_score']:g} to {eq11['highest_score']:g}"


def _print_group(console: SafeConsole, facts: Mapping[str, Any]) -> None:
    """Print question, verdicts, rewards and advantages; a text takes one line."""
    question = one_line(facts["question"] or facts["prompt"])
    room = console.width - LABEL
    # two lines, whose words do not fill them
    question = shorten(question, 2 * room - LABEL, keep="ends")
    say(console, question, label="question", indent=LABEL)
    if facts["answer"]:
        answer = shorten(one_line(facts["answer"]), room, keep="ends")
        say(console, answer, label="answer", indent=LABEL)
    shown = _most_telling(facts["responses"])
    table = Table(
        *right("#"),
        "verdict",
        *right("tokens", "reward", "advantage"),
        "response",
        box=None,
        pad_edge=False,
    )
    for response in shown:
        text = one_line(response["response"]) or "(empty)"
        table.add_row(
            f"{response['sample']}",
            _verdict(response),
            _length(response),
            _number(response["reward"], digits=3),
            _number(response["advantage"], digits=3),
            shorten(text, max(LEAST_CHARS, console.width - OTHER_COLUMNS), keep="ends"),
        )
    console.print(table)
    say(console, _rest(facts, shown))


def _most_telling(responses: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return all responses, or of more than SHOWN_RESPONSES some with extreme advantages."""
    if len(responses) <= SHOWN_RESPONSES:
        return list(responses)
    ordered = sorted(responses, key=_rank)
    shown = [*ordered[:EXTREMES], *ordered[-EXTREMES:]]
    return sorted(shown, key=lambda response: response["sample"])


def _rank(response: Mapping[str, Any]) -> float:
    """Return the advantage of a response, else its reward; 0 without a verdict."""
    for name in ("advantage", "reward"):
        if response[name] is not None:
            return float(response[name])
    return 0.0


def _rest(facts: Mapping[str, Any], shown: Sequence[Mapping[str, Any]]) -> str:
    """Count the responses that are not shown, and name the options that show more."""
    samples = {response["sample"] for response in shown}
    hidden = [response for response in facts["responses"] if response["sample"] not in samples]
    text = ""
    if any(response["finish"] == "length" for response in facts["responses"]):
        text = "+: cut off; "
    if hidden:
        verdicts = Counter(str(_verdict(response)) for response in hidden)
        counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        text += f"{len(hidden)} more ({counts}); "
    how = "how"
    if any(response["calls"] for response in facts["responses"]):
        how = "how, and an episode's calls"
    return f"{text}--equations shows {how}, --tokens each token's probability"


def _equations(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield the prompt and the responses, and each equation with their numbers."""
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


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold cyan")


def _prompt(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    prompt = shorten(facts["prompt"].strip(), SHOWN_CHARS, keep="ends")
    yield Padding(prompt, (0, 0, 0, 2))
    yield f"reference answer: {facts['answer']}" if facts["answer"] else "no reference answer"


def _responses(facts: Mapping[str, Any]) -> Table:
    table = Table(*right("#"), "verdict", *right("tokens"), "response", box=None)
    for response in facts["responses"]:
        text = shorten(response["response"].strip(), SHOWN_CHARS, keep="ends")
        cells = (_verdict(response), _length(response), text or "(empty)")
        table.add_row(f"{response['sample']}", *cells)
    return table


def _length(response: Mapping[str, Any]) -> str:
    """Return the number of tokens, with a mark if the response was cut off."""
    mark = "+" if response["finish"] == "length" else ""
    return f"{response['response_tokens']}{mark}"


def _episode(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield the longest episode of the group, turn by turn or call by call."""
    with_calls = [response for response in facts["responses"] if response["calls"]]
    if with_calls:
        yield from _agent_episode(max(with_calls, key=lambda response: len(response["calls"])))
        return
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


def _agent_episode(response: Mapping[str, Any]) -> Iterator[RenderableType]:
    """Yield an agent's calls as a tree: each branch below the conversation in which it begins."""
    yield _heading(f"Response {response['sample']}: the episode's calls")
    counts = response["episode"]["counts"]
    yield "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in counts.items() if value)
    calls = response["calls"]
    tree = Tree("the first conversation", guide_style="dim")
    nodes = {0: tree}
    for branch in sorted({call["branch"] for call in calls}):
        members = [call for call in calls if call["branch"] == branch]
        if branch:
            parent = members[0]["parent"]
            above = 0 if parent is None else calls[parent - 1]["branch"]
            place = "" if parent is None else f" behind call {parent}"
            label = Text(f"branch {branch}{place}: ", style="bold")
            label.append(one_line(members[0]["reason"]), style="dim")
            nodes[branch] = nodes[above].add(label)
        for call in members:
            _add_call(nodes[branch], call)
    yield tree
    trains = "train" if response["trains"] else "would train, but this episode does not"
    yield f"only sampled tokens {trains}; what a call reads, and masked calls, never do"


def _add_call(node: Tree, call: Mapping[str, Any]) -> None:
    """Add what a call read and what was sampled to a conversation."""
    for message in call["messages"]:
        text = shorten(one_line(message["text"]), SHOWN_CHARS, keep="ends")
        node.add(Text(f"{message['role']}: {text}", style="dim"))
    facts = [f"call {call['number']}", f"{call['observed_tokens']} read"]
    facts.append(f"{call['sampled_tokens']} sampled{'+' if call['finish'] == 'length' else ''}")
    if call["retries"]:
        facts.append(f"asked {call['retries'] + 1} times")
    if call["tool_calls"]:
        facts.append(f"tool {', '.join(call['tool_calls'])}")
    if call["masked"]:
        facts.append(f"masked: {call['masked']}")
    label = Text(f"{', '.join(facts)}: ", style="yellow" if call["masked"] else "")
    label.append(shorten(one_line(call["text"]), SHOWN_CHARS, keep="ends") or "(empty)")
    node.add(label)


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
    if eq9["coef"] != 1:
        formula = f"{formula}, times reward.coef={eq9['coef']:g}"
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


def _number(value: float | None, digits: int = 6) -> str:
    if value is None:
        return "-"
    if value:
        return f"{value:+.{digits}g}"
    return "0"


def _print_tokens(console: SafeConsole, run_dir: Path, facts: Mapping[str, Any]) -> None:
    """Print the probability with which each token was sampled, response by response."""
    console.print(_heading("Tokens, each with the probability with which it was sampled"))
    tokenizer = _tokenizer_of(run_dir)
    for response in facts["responses"]:
        label = f"{response['sample']}"
        if response["calls"]:
            for call in response["calls"]:
                entries = _entries(tokenizer, call["token_ids"], call["logprobs"])
                name = f"{label}.{call['number']}"
                say(console, entries, label=name, indent=max(4, len(name) + 1))
        else:
            entries = _entries(tokenizer, response["response_ids"], response["engine_logprobs"])
            say(console, entries, label=label, indent=4)


def _entries(
    tokenizer: "Tokenizer | None", token_ids: Sequence[int], logprobs: Sequence[float] | None
) -> str:
    """Return each token with its probability."""
    if logprobs is None:
        return "probabilities are not recorded"
    entries = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        name = f"{token_id}" if tokenizer is None else _token_text(tokenizer, token_id)
        entries.append(f"{name}\N{NO-BREAK SPACE}{exp(min(0.0, logprob)):.2f}")
    return "  ".join(entries)


def _tokenizer_of(run_dir: Path) -> "Tokenizer | None":
    """Return the tokenizer of a run; None if its files have no fast one."""
    file = RunDirectory.open(run_dir).tokenizer / "tokenizer.json"
    if not os.path.isfile(file):
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


def _token_text(tokenizer: "Tokenizer", token_id: int) -> str:
    """Return the text of a token, with its white space as escapes."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    return repr(text)[1:-1].replace(" ", "\N{OPEN BOX}") or f"{token_id}"
