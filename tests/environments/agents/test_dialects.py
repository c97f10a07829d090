"""What the endpoint reads and writes in each API: the SDKs' own models take it strictly, and nothing
that a request asks for is dropped.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dapo.environments.agents.dialects import DIALECTS, Dialect
from dapo.environments.agents.messages import AgentRequest, comparable, same_text
from dapo.environments.agents.session import AgentAnswer, AgentError, Session
from dapo.environments.agents.streaming import replayed
from helpers.tables import for_each_row

BY_PATH: Mapping[str, Dialect] = {dialect.path: dialect for dialect in DIALECTS}
CHAT, COMPLETIONS, RESPONSES, MESSAGES = BY_PATH
SCHEMA = {"type": "object", "properties": {"a": {"type": "number"}}}
FUNCTION = {"name": "add", "description": "Add.", "parameters": SCHEMA}
USER = {"role": "user", "content": "hi"}
BODIES: Mapping[str, dict[str, Any]] = {
    CHAT: {"model": "policy", "messages": [USER], "logprobs": True},
    COMPLETIONS: {"model": "policy", "prompt": "hi", "logprobs": 1},
    RESPONSES: {
        "model": "policy",
        "input": "hi",
        "include": ["message.output_text.logprobs"],
        "instructions": "Be brief.",
    },
    MESSAGES: {"model": "policy", "messages": [USER], "max_tokens": 9},
}
"""A request of each API."""


def answer(text: str = "5", *, calls: int = 0, finish: str = "stop") -> AgentAnswer:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_0_{number}",
                "type": "function",
                "function": {"name": "add", "arguments": {"a": 2, "b": [1.5, None, "ü"]}},
            }
            for number in range(calls)
        ]
    return AgentAnswer(
        "abc-0", text, message, finish, (1, 2, 3), (4, 5), (-0.5, -1.0), ("ü", "\ufffd")
    )


ANSWERS = {
    "a text": answer(),
    "nothing": answer("", finish="length"),
    "a text up to a stop text": replace(answer(), stop="Observation:"),
    "a call": answer("", calls=1, finish="tool_calls"),
    "text and calls": answer("Let me see.", calls=2, finish="tool_calls"),
    "a call that was cut": answer("Let me see.", calls=1, finish="length"),
}


def models() -> dict[str, tuple[Any, Any]]:
    """Return the models of a whole answer and of a stream's event, for each API."""
    openai = pytest.importorskip("openai")
    anthropic = pytest.importorskip("anthropic")
    types = openai.types
    return {
        CHAT: (types.chat.ChatCompletion, types.chat.ChatCompletionChunk),
        COMPLETIONS: (types.Completion, types.Completion),
        RESPONSES: (types.responses.Response, types.responses.ResponseStreamEvent),
        MESSAGES: (anthropic.types.Message, anthropic.types.RawMessageStreamEvent),
    }


def test_the_models_of_the_sdks_take_each_answer_strictly():
    from pydantic import TypeAdapter

    for path, (whole, event) in models().items():
        dialect = BY_PATH[path]
        events = TypeAdapter(event)
        for chosen in ANSWERS.values():
            if path == COMPLETIONS and "tool_calls" in chosen.message:
                continue  # the continuation of a text has none
            written = json.dumps(dialect.write(BODIES[path], [chosen]))
            TypeAdapter(whole).validate_json(written, strict=True)
            streamed = list(replayed(dialect, {**BODIES[path], "stream": True}, [chosen]))
            for text in streamed:
                data = text.partition("data: ")[2].strip()
                if data != "[DONE]":
                    events.validate_json(data, strict=True)
            value = json.loads(written)
            assert value.get("choices", [value])[0]["token_ids"] == [4, 5]


def test_anthropics_answers_name_the_stop_text_that_ended_them():
    body = {**BODIES[MESSAGES], "stop_sequences": ["Observation:"], "stream": True}
    chosen = replace(answer(), stop="Observation:")
    written = BY_PATH[MESSAGES].write(body, [chosen])
    assert (written["stop_reason"], written["stop_sequence"]) == ("stop_sequence", "Observation:")
    events = [
        json.loads(text.partition("data: ")[2])
        for text in replayed(BY_PATH[MESSAGES], body, [chosen])
    ]
    assert events[0]["message"]["stop_sequence"] is None
    (delta,) = [event["delta"] for event in events if event["type"] == "message_delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "Observation:"}


@for_each_row("path", BODIES)
def test_an_answer_that_is_sent_back_says_the_same(path: str):
    """Each API writes an answer in a form of its own, and reads it back as what the agent had."""
    for chosen in ANSWERS.values():
        written = BY_PATH[path].write(BODIES[path], [chosen])
        more: dict[str, Any]
        if path == CHAT:
            more = {"messages": [USER, written["choices"][0]["message"], USER]}
        elif path == RESPONSES:
            more = {"input": [USER, *written["output"], USER]}
        elif path == MESSAGES:
            history = {"role": "assistant", "content": written["content"]}
            more = {"messages": [USER, history, USER]}
        else:
            continue
        messages = BY_PATH[path].read({**BODIES[path], **more}).messages
        assert same_text(messages[-2]) == same_text(chosen.message)
        assert messages[-1] == comparable(USER)


SAME = [
    {"content": "<think>\nhm\n</think>\n\n5", "tool_calls": None, "refusal": None},
    {"content": [{"type": "text", "text": "<think>hm</think>5"}], "audio": None, "name": "policy"},
    {"content": '\n<think signature="x">\nhm\n</think>\n5  '},
    {"content": "5", "reasoning_content": "hm"},
    {"content": "5", "reasoning": "hm"},
]
DIFFERENT = [
    {"content": "5"},
    {"content": "<think>\nhm.\n</think>\n\n5"},
    {"content": "<think>\nhm\n</think>\n\n5."},
    {"content": "hm\n\n5"},
]


def test_a_thought_is_known_again_and_a_rewritten_one_is_not():
    texts = {same_text(comparable({"role": "assistant", **message})) for message in SAME}
    assert len(texts) == 1
    for message in DIFFERENT:
        assert same_text(comparable({"role": "assistant", **message})) not in texts


def test_a_tools_answer_is_known_again_by_another_id_of_its_call():
    first = {"role": "tool", "content": "5", "tool_call_id": "a"}
    assert same_text(comparable(first)) == same_text(comparable({**first, "tool_call_id": "b"}))
    assert same_text(comparable(first)) != same_text(comparable({**first, "content": "6"}))


def test_arguments_are_compared_as_values():
    def called(arguments: Any) -> str:
        call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return same_text(comparable({"role": "assistant", "content": None, "tool_calls": [call]}))

    assert called('{"a":2.0,"b":"\\u00fc"}') == called({"b": "ü", "a": 2})
    assert called('{"a": 2.5}') != called('{"a": 2}')
    assert called('{"a": "2"}') != called('{"a": 2}')
    assert called("{}") == called("") == called(None) == called({})
    assert called('{"a": true}') != called('{"a": 1}')
    assert called("{broken") == called("{broken") != called("{ broken")


TOOL = {"type": "function", "function": FUNCTION}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": None}, "messages is missing"),
    (CHAT, {"messages": []}, "messages is empty"),
    (CHAT, {"messages": "hi"}, "messages is str, expected list"),
    (CHAT, {"messages": ["hi"]}, r"messages\[0\] has no role"),
    (CHAT, {"messages": [{"role": "banana"}]}, "has the role 'banana', expected one of system"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "content is int, expected a text"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "part of type 'image_url'; only text can be read",
    ),
    (
        CHAT,
        {"messages": [USER, {"role": "assistant", "tool_calls": "abc"}]},
        "tool_calls is to be a list in an assistant's message",
    ),
    (
        CHAT,
        {"messages": [USER, {"role": "assistant", "tool_calls": ["abc"]}]},
        "a tool call has no function with a name",
    ),
    (CHAT, {"tools": "add"}, "tools is str, expected list"),
    (CHAT, {"tools": ["add"]}, r"tools\[0\] is of type 'str'"),
    (CHAT, {"tools": [{"type": "function"}]}, r"tools\[0\] is not a function with a name"),
    (CHAT, {"tools": [{"function": {"name": "f", "parameters": 5}}]}, "is not a JSON schema"),
    (CHAT, {"tool_choice": 5}, "tool_choice is int, expected a text or a tool"),
    (CHAT, {"n": 0}, "n is 0, expected 1 to 64"),
    (CHAT, {"n": True}, "n is bool, expected int"),
    (CHAT, {"n": 1e9}, "n is float, expected int"),
    (CHAT, {"max_tokens": -1}, "max_tokens is -1"),
    (CHAT, {"temperature": "hot"}, "temperature is str, expected int or float"),
    (CHAT, {"stop": [5]}, "stop is to be a text or at most 16 texts"),
    (CHAT, {"stop": ["a"] * 17}, "at most 16 texts"),
    (CHAT, {"stream": "yes"}, "stream is str, expected bool"),
    (CHAT, {"stream_options": "usage"}, "stream_options is str, expected dict"),
    (CHAT, {"top_logprobs": 5}, "only the log-probability of the sampled token is known"),
    (CHAT, {"functions": [FUNCTION]}, "it is the old form of tools"),
    (CHAT, {"continue_final_message": True}, "an answer is a whole turn"),
    (COMPLETIONS, {"prompt": ["a", "b"]}, "send a request for each"),
    (COMPLETIONS, {"prompt": [1, 2]}, "expected one text"),
    (COMPLETIONS, {"suffix": "x"}, "a text is continued at its end alone"),
    (COMPLETIONS, {"logprobs": 5}, "logprobs is 5, expected 0 to 1"),
    (COMPLETIONS, {"logprobs": 1, "echo": True}, "a prompt's tokens have no logprobs"),
    (COMPLETIONS, {"logprobs": 0, "echo": True}, "a prompt's tokens have no logprobs"),
    (RESPONSES, {"previous_response_id": "x"}, "no response is stored here"),
    (RESPONSES, {"conversation": "x"}, "no conversation is stored here"),
    (RESPONSES, {"background": True}, "wait for the answer"),
    (RESPONSES, {"input": [5]}, r"input\[0\] is int, expected an item"),
    (RESPONSES, {"input": [{"type": "item_reference"}]}, "'item_reference', which cannot be read"),
    (
        RESPONSES,
        {"tools": [{"type": "web_search"}]},
        "'web_search', which the endpoint does not run",
    ),
    (RESPONSES, {"text": "x"}, "text is str, expected dict"),
    (MESSAGES, {"messages": [5]}, r"messages\[0\] is int, expected an object"),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": 5}]},
        "expected a text or a list of blocks",
    ),
    (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "a block of type 'image'; only text can be read",
    ),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": "I"}]}, "is the assistant's"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
    (MESSAGES, {"mcp_servers": [{"url": "x"}]}, "the endpoint runs no tools"),
    (MESSAGES, {"thread": {"type": "create"}}, "no conversation is stored here"),
]


@for_each_row(("path", "changes", "sentence"), REFUSED)
def test_a_request_that_cannot_be_answered_is_refused_in_a_sentence(
    path: str, changes: dict[str, Any], sentence: str
):
    with pytest.raises((AgentError, ValueError), match=sentence):
        BY_PATH[path].read({**BODIES[path], **changes})


FOREIGN: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"logit_bias": {"5": 1}}, "logit_bias"),
    (CHAT, {"frequency_penalty": 0.5}, "frequency_penalty"),
    (CHAT, {"top_k": 50}, "top_k"),
    (CHAT, {"repetition_penalty": 1.1}, "repetition_penalty"),
    (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
    (CHAT, {"guided_json": {}, "a_field_of_tomorrow": "x"}, "a_field_of_tomorrow"),
    (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
    (CHAT, {"include_reasoning": False}, "include_reasoning"),
    (COMPLETIONS, {"best_of": 4}, "best_of"),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.effort"),
    (RESPONSES, {"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
    (MESSAGES, {"top_k": 5}, "top_k"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
    (
        MESSAGES,
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "disable_parallel_tool_use",
    ),
]


@for_each_row(("path", "changes", "name"), FOREIGN)
def test_what_changes_the_distribution_is_refused_or_counted(
    path: str, changes: dict[str, Any], name: str
):
    request = BY_PATH[path].read({**BODIES[path], **changes})
    assert request.foreign == (name,)
    with pytest.raises(AgentError, match=f"{name} is set: training needs the run's own"):
        Session("policy", 1.0, 1.0, overrides=False).submit(request)
    session = Session("policy", 1.0, 1.0, overrides=True)
    session.submit(request)
    assert session.num_overridden == 1


NEUTRAL: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}),
    (CHAT, {"logit_bias": {}, "presence_penalty": 0, "response_format": {"type": "text"}}),
    (CHAT, {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}),
    (CHAT, {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True}),
    (CHAT, {"return_token_ids": True, "modalities": ["text"], "stop": None, "seed": None}),
    (CHAT, {"skip_special_tokens": True, "include_reasoning": True, "echo": False}),
    (RESPONSES, {"store": False, "truncation": "auto", "reasoning": {"summary": "auto"}}),
    (RESPONSES, {"text": {"verbosity": "medium"}, "input": [{"type": None, **USER}]}),
    (MESSAGES, {"metadata": {"user_id": "me"}, "thinking": {"type": "disabled"}}),
]


@for_each_row(("path", "changes"), NEUTRAL)
def test_what_changes_nothing_is_taken(path: str, changes: dict[str, Any]):
    Session("policy", 1.0, 1.0, overrides=False).submit(
        BY_PATH[path].read({**BODIES[path], **changes})
    )


@for_each_row(
    ("stated", "message"),
    [
        ({"temperature": 0.6, "top_p": 0.7}, None),
        ({"temperature": 1.0, "top_p": 1.0}, None),
        ({"temperature": 0.6, "top_p": 1.0}, None),
        ({"temperature": 0.8}, "temperature=0.8, and the run samples at temperature=0.6"),
    ],
)
def test_in_an_evaluation_an_agent_may_state_the_sampling_of_training(
    stated: dict[str, float], message: str | None
):
    session = Session("policy", 0.6, 0.7, overrides=False, trained=(1.0, 1.0))
    request = BY_PATH[CHAT].read({**BODIES[CHAT], **stated})
    if message is None:
        session.submit(request)
    else:
        with pytest.raises(AgentError, match=message):
            session.submit(request)
    assert session.num_overridden == 0


@for_each_row(
    ("own", "stated", "is_taken"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}, True),
        ({"enable_thinking": False}, {"enable_thinking": True}, False),
        ({"enable_thinking": False}, {}, True),
        ({}, {"enable_thinking": False}, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),
    ],
)
def test_a_request_may_repeat_the_runs_variables_of_the_template(
    own: dict[str, Any], stated: dict[str, Any], is_taken: bool
):
    session = Session("policy", 1.0, 1.0, overrides=False, template_kwargs=own)
    request = replace(BY_PATH[CHAT].read(BODIES[CHAT]), template_kwargs=stated)
    if is_taken:
        session.submit(request)
        return
    with pytest.raises(AgentError, match="chat_template_kwargs is set"):
        session.submit(request)


def test_half_of_a_character_is_replaced_in_a_text_to_continue():
    """JavaScript cuts texts between the halves, and no tokenizer encodes one."""
    for prompt in ("cut \ud83d", ["cut \ud83d"]):
        assert BY_PATH[COMPLETIONS].read({"prompt": prompt}).prompt == "cut \ufffd"


def test_all_apis_read_the_same_conversation():
    """A question, a call behind a text, its result and a further question."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "developer", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "user", "content": [{"type": "text", "text": "and"}]},
    ]
    items = [
        USER,
        {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"role": "user", "content": [{"type": "input_text", "text": "and"}]},
    ]
    use = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]}
    messages = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "and"}]},
    ]
    own_tool = {"name": "add", "description": "Add.", "input_schema": SCHEMA}
    requests: list[AgentRequest] = [
        BY_PATH[CHAT].read({"messages": chat, "tools": [TOOL]}),
        BY_PATH[RESPONSES].read(
            {
                "input": items,
                "instructions": "Be brief.",
                "tools": [{"type": "function", "strict": None, **FUNCTION}],
            }
        ),
        BY_PATH[MESSAGES].read(
            {
                "messages": messages,
                "system": [{"type": "text", "text": "Be brief."}],
                "tools": [own_tool],
                "max_tokens": 9,
            }
        ),
    ]
    assert [request.messages for request in requests] == [requests[0].messages] * 3
    assert [request.tools for request in requests] == [requests[0].tools] * 3
