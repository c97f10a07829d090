"""What is seen of an agent's episode: metrics, the tree of calls, reasons of branches, errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import dapo
from dapo.analysis.explain import explain_group
from dapo.analysis.stored_groups import read_groups
from dapo.analysis.view.queries import Runs, group
from dapo.cli.explain import _agent_episode
from dapo.config import build_config
from dapo.core.errors import ConfigError
from dapo.environments.agents.branches import branch_reason
from dapo.environments.agents.calls import Call, CallTree
from dapo.environments.agents.messages import AgentRequest, comparable
from dapo.runs.directory import RunDirectory
from helpers.tables import for_each_row

SIZES: dict[str, Any] = {
    "steps": 1,
    "prompts_per_step": 1,
    "group_size": 4,
    "max_response_tokens": 64,
    "max_groups_per_step": 1,
    "lr": 1e-3,
    "dynamic_sampling.enabled": False,
    "environment.max_turn_tokens": 10,
    "overlong.mode": "off",
    "train.threads": 1,
}
ROWS = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(4)]


def trained(path: Path, agent: Any) -> dapo.Run:
    return dapo.train("tiny-random", agent=agent, data=ROWS, run_dir=path, **SIZES)


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> dapo.Run:
    """A run of one group of four episodes."""
    path = tmp_path_factory.mktemp("agents") / "run"
    return trained(path, "helpers.asking_agents:fork_and_summarize")


def test_metrics_count_branches_retries_refusals_and_masked_tokens(forked: dapo.Run):
    row = forked.metrics.iloc[-1]
    per_episode = {
        "rollout/turns_mean": 4,
        "rollout/branches_mean": 2,
        "rollout/retried_requests": 4,
        "rollout/refused_requests": 4,
        "rollout/overridden_requests": 0,
        "rollout/rewritten_histories": 0,
        "rollout/empty_answers": 0,
    }
    assert {name: row[name] for name in per_episode} == per_episode
    (stored,) = read_groups(RunDirectory(forked.path), 1)
    masked = 0
    for generation in stored.group.generations:
        tails = [part for part in generation.conversations if part.is_masked]
        masked += sum(part.num_sampled for part in tails)
    assert row["rollout/masked_tokens"] == masked > 0
    num_stored = sum(
        len(part.token_ids)
        for generation in stored.group.generations
        for part in generation.conversations
    )
    sampled = row["rollout/tokens_generated"]
    assert row["rollout/observation_tokens"] == num_stored - sampled > 0


def test_explain_and_the_page_show_a_tree_of_calls_whose_tokens_are_the_stored_ones(
    forked: dapo.Run,
):
    explained = explain_group(forked.path, 1)
    for response in explained["responses"]:
        calls = response["calls"]
        assert response["turns"] is None
        assert [(call["parent"], call["branch"], call["turn"]) for call in calls] == [
            (None, 0, 1),
            (1, 0, 2),
            (1, 1, 1),
            (None, 2, 1),
        ]
        assert [call["retries"] for call in calls] == [1, 0, 0, 0]
        assert [call["masked"] for call in calls] == [None] * 3 + ["no reward refers to it"]
        assert [call["messages"][0]["text"] for call in calls[1:]] == [
            "Shorter.",
            "Longer.",
            "Summary.",
        ]
        assert [len(call["token_ids"]) for call in calls] == [
            call["sampled_tokens"] for call in calls
        ]
        assert sum(len(call["token_ids"]) for call in calls) == response["response_tokens"]
        assert all(value < 0 for call in calls for value in call["logprobs"])
        # beside that of the first call, which is the group's own prompt
        assert [len(call["context_ids"]) for call in calls[1:]] == [
            call["observed_tokens"] for call in calls[1:]
        ]
    console = Console(width=200)
    with console.capture() as capture:
        for part in _agent_episode(explained["responses"][0]):
            console.print(part)
    printed = capture.get()
    assert "branch 1 behind call 1: the history forks: call 1 was continued before" in printed
    assert "branch 2: another conversation: message 1 (user) is 'Summary.'" in printed
    assert "masked: no reward refers to it" in printed
    runs = Runs([forked.path])
    query = {"step": "1", "group": str(explained["group_id"])}
    shown = group(runs[forked.path.name], query)["responses"][0]
    runs.close()
    assert [len(call["probabilities"]) for call in shown["calls"]] == [
        call["sampled_tokens"] for call in shown["calls"]
    ]
    assert json.dumps(shown)


def test_a_function_of_a_call_is_an_agent_whose_numbers_are_components(tmp_path: Path):
    from helpers.asking_agents import measured

    run = trained(tmp_path / "run", measured)
    (stored,) = read_groups(RunDirectory(run.path), 1)
    numbers = [verdict.components["digits"] for verdict in stored.group.verdicts]
    assert run.metrics.iloc[-1]["reward/component/digits"] == sum(numbers) / 4
    assert list(run.rollouts["component.digits"]) == numbers
    assert all(branches == [] for branches in run.rollouts.get("branches", []))


def test_an_agents_error_says_why_the_endpoint_refused_its_request(tmp_path: Path):
    # played before the first step
    with pytest.raises(ConfigError) as failed:
        trained(tmp_path / "run", "helpers.asking_agents:too_warm")
    text = str(failed.value)
    assert "agent: raised HTTPError: HTTP Error 400" in text
    assert "the endpoint had refused a request: temperature=0.25, and the run samples at" in text
    assert "Correct the agent" in text


@for_each_row(
    ("arguments", "name", "command"),
    [
        (["agent=my:solve"], "agent:my:solve", ()),
        (["environment.agent=my:solve"], "agent:my:solve", ()),
        (["environment.name=agent:my:solve"], "agent:my:solve", ()),
        (["agent={command: [node, a.js]}"], None, ("node", "a.js")),
        (["environment.command=node 'a b.js'"], None, ("node", "a b.js")),
        (["environment=calculator", "agent=my:solve"], "agent:my:solve", ()),
    ],
)
def test_an_agent_is_named_in_these_ways(arguments: list[str], name: str, command: tuple[str]):
    config = build_config({"model": "none", "data": "builtin:sums"}, arguments)
    assert (config.environment.name, config.environment.command) == (name, command)
    assert config.runs_agent


@for_each_row(
    ("options", "reason"),
    [
        ({"agent": "solve"}, "agent: expected module:function, or {command:"),
        ({"agent": {"command": "x", "env": 1}}, "agent: expected module:function"),
        ({"agent": "a:b", "environment": {"name": "calculator"}}, "keep one of them"),
        ({"environment": {"agent": "a:b", "command": ["x"]}}, "keep one of them"),
    ],
)
def test_what_names_no_agent_is_refused(options: dict[str, Any], reason: str):
    with pytest.raises(ConfigError, match=reason):
        build_config({"model": "none", "data": "builtin:sums", **options})


def request(*messages: tuple[str, str], **options: Any) -> AgentRequest:
    written = tuple(comparable({"role": role, "content": text}) for role, text in messages)
    return AgentRequest(messages=written, **options)


def answered(tree: CallTree, asked: AgentRequest, text: str) -> Call:
    exchange = len({call.exchange for call in tree.calls})
    call = tree.add(asked, tree.parent_of(asked), (1,), exchange)
    call.message = comparable({"role": "assistant", "content": text})
    tree.deliver(call, call.number)
    return call


FIRST = (("system", "Be brief."), ("user", "What is 2 + 3?"))
ANSWER = ("assistant", "It is 5.")


@for_each_row(
    ("messages", "reason"),
    [
        ((*FIRST, ANSWER, ("user", "Sure?")), ""),
        ((("user", "Alone."),), "another conversation: message 1 (user) is 'Alone.', and was"),
        (
            (FIRST[0], ("user", "What is 2 + 4?"), ANSWER, ("user", "Sure?")),
            "the history was rewritten: message 2 (user) is 'What is 2 + 4?', and was"
            " 'What is 2 + 3?' of call 1",
        ),
        (
            (*FIRST, ("assistant", "5."), ("user", "Sure?")),
            "the history was rewritten: message 3 (assistant) is '5.', and was 'It is 5.' of call 1",
        ),
        (FIRST, "the history is shorter: it ends before message 3 of call 1"),
        ((*FIRST, ANSWER), "the history ends with the answer of call 1"),
    ],
)
def test_a_branch_says_which_message_differs_first(messages: tuple[Any, ...], reason: str):
    tree = CallTree()
    answered(tree, request(*FIRST), ANSWER[1])
    call = answered(tree, request(*messages), "Yes.")
    assert call.branch_reason.startswith(reason)
    assert bool(call.branch_reason) == bool(reason) == bool(call.conversation)
    assert call.record()["branch_reason"] == call.branch_reason


def test_forks_further_answers_and_other_tools_are_named():
    tree = CallTree()
    first = answered(tree, request(*FIRST), ANSWER[1])
    answered(tree, request(*FIRST, ANSWER, ("user", "Sure?")), "Yes.")
    other = request(*FIRST, ANSWER, ("user", "Why?"))
    assert branch_reason(tree.calls, other, first, 2) == (
        "the history forks: call 1 was continued before"
    )
    assert branch_reason(tree.calls, other, None, 1) == "a further answer to the same request"
    with_tools = request(*FIRST, ANSWER, ("user", "Why?"), tools=({"name": "add"},))
    assert branch_reason(tree.calls, with_tools, None, 2).startswith("the tools changed")
