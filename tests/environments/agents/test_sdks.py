"""The clients that agents are made of work against the endpoint as they are, in one conversation.

What they send back of an answer differs from it: ids, white space, null, parts, items. None of this
may look like a rewritten history, whose calls would train apart from each other.
"""

import gc
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from dapo.environments.agents.worker import _function
from dapo.types import Generation, Problem
from helpers.faulty_agents import complete, post
from helpers.scripted_agents import TOKENIZER, Play, play_episode

pytestmark = pytest.mark.filterwarnings("ignore")  # what the clients' own code warns of

CALLS = (
    "<think>\nTwo sums.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "add", "arguments": {"a": 2.50, "b": 3}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {"b":1,"a": 4.0}, "name": "add"}\n</tool_call>'
)
"""Two calls whose JSON no client would write like this, behind a thought and a text."""
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
SCRIPT = (CALLS, CALL, " 5 \n")
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
CHAT_TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS},
    }
]
QUESTION = "What is 2 + 3?"


@pytest.fixture(scope="module", autouse=True)
def _sockets_of_clients():
    """Free the connections that clients leave open while their warnings are ignored."""
    yield
    gc.collect()


def rows(name: str, table: dict[str, Any]) -> pytest.MarkDecorator:
    """Run a test with each row of a table: a row whose client is not installed skips."""
    return pytest.mark.parametrize(name, list(table.values()), ids=list(table))


def added(arguments: dict[str, Any]) -> str:
    return str(arguments["a"] + arguments["b"])


def sampled_texts(generation: Generation) -> list[str]:
    ranges = generation.sampled or ((0, len(generation.token_ids)),)
    return [TOKENIZER.decode(generation.token_ids[start:end]) for start, end in ranges]


def assert_one_conversation(play: Play, texts: tuple[str, ...]) -> Generation:
    """Play, and check that what trains is what was sampled, in a single conversation."""
    generation = play_episode(play, texts)
    assert generation.episode is not None
    counts = generation.episode.counts
    assert (counts["calls"], counts["branches"], counts["retries"]) == (len(texts), 0, 0)
    assert counts["masked_tokens"] == 0
    assert sampled_texts(generation) == [f"{text}<|im_end|>" for text in texts]
    return generation


# --- the SDK of OpenAI


def openai_client(base_url: str, api_key: str, **options: Any) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=base_url, api_key=api_key, **{"max_retries": 0, **options})


def chat_loop(write: Callable[[Any], Any], *, streams: bool = False) -> Play:
    """Return a loop of chat completions that keeps answers as `write` gives them."""

    def play(problem: Problem, *, base_url: str, api_key: str) -> float:
        client = openai_client(base_url, api_key)
        messages: list[Any] = [
            {"role": "developer", "content": "Use the tool."},
            {"role": "user", "content": [{"type": "text", "text": QUESTION}]},
        ]
        while True:
            values = {"model": "policy", "messages": messages, "tools": CHAT_TOOLS}
            if streams:
                with client.chat.completions.stream(**values) as stream:
                    completion = stream.get_final_completion()
            else:
                completion = client.chat.completions.create(**values, tool_choice="auto")
            message = completion.choices[0].message
            messages.append(write(message))
            if not message.tool_calls:
                return float(message.content.strip() == "5")
            assert completion.choices[0].finish_reason == "tool_calls"
            for call in message.tool_calls:
                result = added(json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    return play


def stripped(message: Any) -> dict[str, Any]:
    """Return an answer as frameworks rebuild it, with arguments written anew and other ids."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {
                "name": call.function.name,
                "arguments": json.dumps(json.loads(call.function.arguments), indent=1),
            },
        }
        for call in message.tool_calls or ()
    ]
    content = [{"type": "text", "text": (message.content or "").strip()}]
    return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}


CHATS = {
    "the message itself": chat_loop(lambda message: message),
    "model_dump": chat_loop(lambda message: message.model_dump()),
    "without null": chat_loop(lambda message: message.model_dump(exclude_none=True)),
    "rebuilt": chat_loop(stripped),
    "streamed": chat_loop(lambda message: message.model_dump(exclude_none=True), streams=True),
}


@rows("play", CHATS)
def test_a_chat_loop_of_the_openai_sdk_is_one_conversation(play: Play):
    pytest.importorskip("openai")
    assert assert_one_conversation(play, SCRIPT).episode.correct is None


@rows("streams", {"whole": False, "streamed": True})
def test_a_responses_loop_of_the_openai_sdk_is_one_conversation(streams: bool):
    pytest.importorskip("openai")

    def play(problem: Problem, *, base_url: str, api_key: str) -> float:
        client = openai_client(base_url, api_key)
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        tools = [{"type": "function", "strict": True, **CHAT_TOOLS[0]["function"]}]
        while True:
            values = {"model": "policy", "input": items, "tools": tools, "instructions": "Use it."}
            if streams:
                with client.responses.stream(**values) as stream:
                    response = stream.get_final_response()
            else:
                response = client.responses.create(**values, store=False)
            items += response.output
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return float(response.output_text.strip() == "5")
            for call in calls:
                output = [{"type": "input_text", "text": added(json.loads(call.arguments))}]
                items.append(
                    {"type": "function_call_output", "call_id": call.call_id, "output": output}
                )

    assert_one_conversation(play, SCRIPT)


def test_the_openai_sdk_reads_every_field():
    openai = pytest.importorskip("openai")

    async def play(problem: Problem, *, base_url: str, api_key: str) -> float:
        # the key alone names the session, too
        root = base_url.partition("/sessions/")[0]
        async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key=api_key) as client:
            assert [model.id async for model in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("policy")).id == "policy"
            chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            raw = await client.chat.completions.with_raw_response.create(
                **chat,
                n=2,
                seed=3,
                logprobs=True,
                stop="ne",
                temperature=1.0,
                top_p=1,
                max_tokens=9,
            )
            first, second = raw.parse().choices
            assert (first.message.content, second.message.content) == ("o", "two")
            assert (first.finish_reason, second.finish_reason) == ("stop", "stop")
            assert [token.logprob for token in second.logprobs.content] == [-1.0] * 4
            assert TOKENIZER.decode(second.token_ids) == "two<|im_end|>"
            assert TOKENIZER.decode(raw.parse().prompt_token_ids).endswith(
                "<|im_start|>assistant\n"
            )
            text = await client.completions.create(model="policy", prompt="2 + 3 =", logprobs=1)
            assert (text.choices[0].text, text.choices[0].finish_reason) == ("three", "stop")
            assert TOKENIZER.decode(text.choices[0].prompt_token_ids) == "2 + 3 ="
            none = await client.chat.completions.create(
                **chat, tools=CHAT_TOOLS, tool_choice="none"
            )
            assert none.choices[0].message.content == CALL
            assert none.choices[0].message.tool_calls is None
            with pytest.raises(openai.BadRequestError, match="response_format is set"):
                await client.chat.completions.create(
                    **chat, response_format={"type": "json_object"}
                )
            with pytest.raises(openai.BadRequestError, match=r"temperature=0\.7, and the run"):
                await client.chat.completions.create(**chat, temperature=0.7)
            with pytest.raises(openai.NotFoundError, match="only policy"):
                await client.models.retrieve("gpt")
            with pytest.raises(openai.NotFoundError, match="embeddings here; there are POST"):
                await client.embeddings.create(model="policy", input="hi")
            other = client.with_options(api_key="sk-other")
            with pytest.raises(openai.AuthenticationError, match="unknown API key"):
                await other.models.list()
            return 1.0

    generation = play_episode(play, ["one", "two", "three", CALL])
    assert generation.episode is not None
    assert generation.episode.counts["branches"] == 3  # n, a text, and other tools


def test_a_retry_behind_a_dropped_connection_trains_once():
    pytest.importorskip("openai")
    http = pytest.importorskip("httpx2")
    dropped = []

    class Dropping(http.HTTPTransport):
        def handle_request(self, request: Any) -> Any:
            response = super().handle_request(request)
            if len(dropped) < 2:
                dropped.append(response.read())
                raise http.ReadError("the connection was lost")
            return response

    def play(problem: Problem, *, base_url: str, api_key: str) -> float:
        transport = http.Client(transport=Dropping())
        client = openai_client(base_url, api_key, max_retries=2, http_client=transport)
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        answer = client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "again"}]
        client.chat.completions.create(model="policy", messages=messages)
        return 1.0

    generation = play_episode(play, ["first", "second"])
    assert generation.episode is not None
    counts = generation.episode.counts
    assert (counts["calls"], counts["branches"], counts["retries"]) == (2, 0, 2)
    first, second = [{**json.loads(body), "created": 0} for body in dropped]
    assert first == second
    assert sampled_texts(generation) == ["first<|im_end|>", "second<|im_end|>"]


def test_a_rewritten_history_is_a_branch():
    pytest.importorskip("openai")

    def play(problem: Problem, *, base_url: str, api_key: str) -> float:
        client = openai_client(base_url, api_key)

        def ask(*messages: Any) -> Any:
            answer = client.chat.completions.create(model="policy", messages=list(messages))
            return answer.choices[0].message

        question = {"role": "user", "content": QUESTION}
        more = {"role": "user", "content": "more"}
        answer = ask(question)
        ask(question, {"role": "assistant", "content": "<think>other</think>\n\n5"}, more)
        ask(question, {"role": "assistant", "content": "5"}, more)  # the thought is left out
        ask(question, answer, more)
        return 1.0

    generation = play_episode(play, ["<think>\nhm\n</think>\n\n5", "b", "c", "d"])
    assert generation.episode is not None
    assert generation.episode.counts["branches"] == 2
    assert [call["parent"] for call in generation.episode.calls] == [None, None, None, 0]


# --- the SDK of Anthropic

MESSAGE_TOOLS = [{"name": "add", "description": "Add.", "input_schema": PARAMETERS}]


def anthropic_client(base_url: str, api_key: str) -> Any:
    return pytest.importorskip("anthropic").Anthropic(
        base_url=base_url, api_key=api_key, max_retries=0
    )


def messages_loop(*, streams: bool, writes: Callable[[Any], Any]) -> Play:
    def play(problem: Problem, *, base_url: str, api_key: str) -> float:
        client = anthropic_client(base_url, api_key)
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        system = [{"type": "text", "text": "Use the tool.", "cache_control": {"type": "ephemeral"}}]
        while True:
            values = {
                "model": "policy",
                "messages": messages,
                "tools": MESSAGE_TOOLS,
                "system": system,
                "max_tokens": 500,
            }
            if streams:
                with client.messages.stream(**values) as stream:
                    message = stream.get_final_message()
            else:
                message = client.messages.create(**values)
            messages.append({"role": "assistant", "content": [writes(b) for b in message.content]})
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                assert message.stop_reason == "end_turn"
                return float(message.content[0].text.strip() == "5")
            assert message.stop_reason == "tool_use"
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": added(call.input)}
                for call in calls
            ]
            messages.append({"role": "user", "content": results})

    return play


def tool_runner(problem: Problem, *, base_url: str, api_key: str) -> float:
    from anthropic import beta_tool

    @beta_tool
    def add(a: float, b: float) -> str:
        """Add two numbers."""
        return str(a + b)

    runner = anthropic_client(base_url, api_key).beta.messages.tool_runner(
        model="policy",
        max_tokens=500,
        tools=[add],
        messages=[{"role": "user", "content": QUESTION}],
    )
    return float(runner.until_done().content[0].text.strip() == "5")


@rows(
    "play",
    {
        "whole": messages_loop(streams=False, writes=lambda block: block),
        "streamed": messages_loop(streams=True, writes=lambda block: block.model_dump()),
        "tool_runner": tool_runner,
    },
)
def test_a_loop_of_the_anthropic_sdk_is_one_conversation(play: Play):
    pytest.importorskip("anthropic")
    assert_one_conversation(play, SCRIPT)


# --- frameworks


def openai_agents(*, responses: bool, streams: bool) -> Play:
    async def play(problem: Problem, *, base_url: str, api_key: str) -> float:
        from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
        from openai import AsyncOpenAI

        @function_tool
        def add(a: float, b: float) -> float:
            """Add two numbers."""
            return a + b

        client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        provider = OpenAIProvider(openai_client=client, use_responses=responses)
        config = RunConfig(model_provider=provider, model="policy", tracing_disabled=True)
        agent = Agent(name="sums", instructions="Use the tool.", tools=[add])
        result: Any
        if streams:
            result = Runner.run_streamed(agent, QUESTION, run_config=config)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, QUESTION, run_config=config)
        more = [*result.to_input_list(), {"role": "user", "content": "And 3 + 3?"}]
        result = await Runner.run(agent, more, run_config=config)
        return float(result.final_output == "6")

    return play


@rows(
    "play",
    {
        f"{'responses' if responses else 'chat'}, {'streamed' if streams else 'whole'}": (
            openai_agents(responses=responses, streams=streams)
        )
        for responses in (False, True)
        for streams in (False, True)
    },
)
def test_a_loop_of_openai_agents_is_one_conversation(play: Play):
    pytest.importorskip("agents.models")  # the folder of these tests is found as agents, too
    assert_one_conversation(play, (*SCRIPT, "6"))


@rows("responses", {"chat": False, "responses": True})
def test_a_react_loop_of_langgraph_is_one_conversation(responses: bool):
    pytest.importorskip("langgraph")
    models = pytest.importorskip("langchain_openai")

    async def play(problem: Problem, *, base_url: str, api_key: str) -> float:
        from langgraph.prebuilt import create_react_agent

        def add(a: float, b: float) -> float:
            """Add two numbers."""
            return a + b

        model = models.ChatOpenAI(
            model="policy", base_url=base_url, api_key=api_key, use_responses_api=responses
        )
        agent = create_react_agent(model, [add], prompt="Use the tool.")
        state = await agent.ainvoke({"messages": [{"role": "user", "content": QUESTION}]})
        more = {"role": "user", "content": "And 3 + 3?"}
        state = await agent.ainvoke({"messages": [*state["messages"], more]})
        return float(state["messages"][-1].text == "6")

    assert_one_conversation(play, (*SCRIPT, "6"))


SUBMIT = '<tool_call>\n{"name": "submit", "arguments": {"answer": "5"}}\n</tool_call>'


@rows(
    "provider",
    {
        "chat": ("openai-api/dapo", {}),
        "responses": ("openai", {}),
        "messages": ("anthropic", {"streaming": True}),
    },
)
def test_an_agent_of_inspect_ai_is_one_conversation(provider: tuple[str, Any], tmp_path: Any):
    inspect = pytest.importorskip("inspect_ai")

    def play(problem: Problem, *, base_url: str, api_key: str) -> float:
        from inspect_ai.agent import react
        from inspect_ai.dataset import Sample
        from inspect_ai.model import get_model
        from inspect_ai.scorer import match
        from inspect_ai.tool import tool

        @tool
        def add() -> Any:
            async def execute(a: float, b: float) -> str:
                """Add two numbers.

                Args:
                    a: The first number.
                    b: The second number.
                """
                return str(a + b)

            return execute

        name, options = provider
        model = get_model(
            f"{name}/policy", base_url=base_url, api_key=api_key, memoize=False, **options
        )
        task = inspect.Task(
            dataset=[Sample(input=QUESTION, target="5")],
            solver=react(tools=[add()]),
            scorer=match(),
        )
        log = inspect.eval(task, model=model, display="none", log_dir=str(tmp_path))[0]
        assert log.status == "success", log.error
        return float(log.results.scores[0].metrics["accuracy"].value)

    assert assert_one_conversation(play, (CALLS, CALL, SUBMIT)).episode.rewards[-1] == 1.0


@rows("texts", {"ToolEnv": (CALLS, CALL, "5"), "MultiTurnEnv": ("3", "4 ", "5")})
def test_an_environment_of_verifiers_plays_its_own_rollout(texts: tuple[str, ...]):
    vf = pytest.importorskip("verifiers")
    if not hasattr(vf, "ToolEnv"):
        pytest.skip("needs verifiers before 0.4, which has MultiTurnEnv and ToolEnv")
    from datasets import Dataset

    def add(a: float, b: float) -> float:
        """Add two numbers."""
        return a + b

    async def right(completion: list[Any], answer: str, **_: Any) -> float:
        return float(answer in str(completion[-1]))

    class Again(vf.MultiTurnEnv):
        async def env_response(self, messages: Any, state: Any, **_: Any) -> list[Any]:
            return [{"role": "user", "content": "Try again."}]

    data = Dataset.from_list([{"question": QUESTION, "answer": "5"}])
    rubric = vf.Rubric(funcs=[right])
    environment = (
        vf.ToolEnv(dataset=data, tools=[add], rubric=rubric, max_turns=6)
        if texts[0] == CALLS
        else Again(dataset=data, rubric=rubric, max_turns=3)
    )

    async def play(problem: Problem, *, base_url: str, api_key: str) -> float:
        os.environ["AGENT_KEY"] = api_key
        client = vf.ClientConfig(api_base_url=base_url, api_key_var="AGENT_KEY")
        results = await environment.generate(data_set, client=client, model="policy")
        return float(results["outputs"][0]["reward"])

    data_set = environment.get_dataset().select([0])
    assert assert_one_conversation(play, texts).episode.rewards[-1] == 1.0


def test_an_environment_of_skyrl_gym_is_played_by_an_agent():
    gym = pytest.importorskip("skyrl_gym")
    pytest.importorskip("openai")

    def play(problem: Problem, *, base_url: str, api_key: str) -> float:
        client = openai_client(base_url, api_key)
        spec = {"reward_spec": {"ground_truth": "5"}, "extra_info": {"max_turns": 3}}
        environment = gym.make("gsm8k_multi_turn", env_config={}, extras=spec)
        messages, _ = environment.init([{"role": "user", "content": QUESTION}])
        score = 0.0
        while True:
            answer = client.chat.completions.create(model="policy", messages=messages)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            step = environment.step(answer.choices[0].message.content)
            messages += step["observations"]
            score += step["reward"]
            if step["done"]:
                return score

    rewards = assert_one_conversation(play, ("#### 4", "#### 5")).episode.rewards
    assert round(rewards[-1], 6) == round(1 + 0.2 / 3, 6)


class RunsData:
    """An agent of the form `run(data, **extra_kwargs)`, which refers its rewards to answers."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> dict[str, float]:
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=extra_kwargs.get("base_url"), api_key="DUMMY", max_retries=0)
        messages = data["messages"].copy()
        rewards = {}
        for _ in range(3):
            answer = await client.chat.completions.create(
                messages=messages, model="default", **self.options
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            rewards[answer.id] = float(message.content == data["answer"])
            messages.append({"role": "user", "content": "Try again."})
        return rewards


def test_an_agent_with_the_method_run_gives_rewards_by_answer():
    pytest.importorskip("openai")
    play = _function(f"{__name__}:RunsData", {"temperature": 1.0, "max_completion_tokens": 9})
    texts = ("4", "5", "5")
    generation = assert_one_conversation(
        lambda problem, base_url, api_key: play(problem, base_url, api_key), texts
    )
    assert generation.episode.rewards == (0.0, 0.0, 2.0)


# --- calls that cannot be made

WRONG_CALLS = {
    "an unknown tool": ('{"name": "sub", "arguments": {"a": 1}}', ("sub", {"a": 1})),
    "wrong arguments": ('{"name": "add", "arguments": {"x": "2"}}', ("add", {"x": "2"})),
    "half of a character": (
        r'{"name": "add", "arguments": {"a": "\ud83d"}}',
        ("add", {"a": "\ufffd"}),
    ),
    "no JSON": ('{"name": "add", "arguments": {"a": ', None),
    "arguments in a list": ('{"name": "add", "arguments": [2, 3]}', None),
}


@rows("row", WRONG_CALLS)
def test_a_wrong_call_reaches_the_agent_as_it_was_written(row: tuple[str, Any]):
    """So its own tools answer it; what no SDK can read as a call is text."""
    pytest.importorskip("openai")
    written, call = row
    text = f"<tool_call>\n{written}\n</tool_call>"

    def play(problem: Problem, *, base_url: str, api_key: str) -> float:
        client = openai_client(base_url, api_key)
        question = {"role": "user", "content": QUESTION}
        values = {"model": "policy", "tools": CHAT_TOOLS}
        answer = client.chat.completions.create(messages=[question], **values)
        message = answer.choices[0].message
        if call is None:
            assert (message.content, message.tool_calls) == (text, None)
            reply = {"role": "user", "content": "That was no call."}
        else:
            function = message.tool_calls[0].function
            assert (function.name, json.loads(function.arguments)) == call
            call_id = message.tool_calls[0].id
            reply = {"role": "tool", "tool_call_id": call_id, "content": "Error: no such call"}
        client.chat.completions.create(messages=[question, message, reply], **values)
        return 0.0

    assert_one_conversation(play, (text, "5"))


def test_a_call_in_front_of_a_stop_text_is_a_call():
    """Agents of smolagents send tools and the stop text `Observation:` together."""

    def play(problem: Problem, *, base_url: str, api_key: str) -> float:
        options = {"tools": CHAT_TOOLS, "stop": ["Observation:"]}
        question = {"role": "user", "content": QUESTION}
        choice = complete(base_url, api_key, [question], **options)["choices"][0]
        message = choice["message"]
        (call,) = message["tool_calls"]
        assert (message["content"], choice["finish_reason"]) == (None, "tool_calls")
        assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
        reply = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
        chat = [question, message, reply]
        choice = complete(base_url, api_key, chat, **options)["choices"][0]
        # the stop text ends the answer before the call does
        assert choice["message"]["content"] == "Done.\n<tool_call>\n{"
        tools = [{"name": "add", "input_schema": PARAMETERS}]
        body = {"messages": [question], "tools": tools, "stop_sequences": ["Observation:"]}
        answer = post(f"{base_url}/messages", api_key, body)
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
        return 1.0

    observed = f"{CALL}\nObservation: 5"
    play_episode(play, [observed, "Done.\n<tool_call>\n{Observation: 5", observed])


def test_a_call_that_a_thought_only_weighs_stays_in_the_text():
    thought = f"<think>\nI may write {CALL} here.\n</think>\n\nLet me see."

    def play(problem: Problem, *, base_url: str, api_key: str) -> float:
        question = {"role": "user", "content": QUESTION}
        answer = complete(base_url, api_key, [question], tools=CHAT_TOOLS)
        message = answer["choices"][0]["message"]
        assert message["content"] == thought
        assert len(message["tool_calls"]) == 1
        return 1.0

    play_episode(play, [f"{thought}\n{CALL}"])
