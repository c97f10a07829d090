"""Templates with the rules of published models: each continues exactly, in the tokens that the
template itself writes, or is refused with a sentence that names what it does.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import pytest

from dapo.config import DataConfig
from dapo.config.data_spec import ANY_COLUMNS
from dapo.core.errors import DataError
from dapo.data.demonstrations import demonstration_from_row, turns_of
from dapo.data.prompts import PromptEncoder, chat_messages
from dapo.environments.calls import tool_schema
from dapo.environments.rendering import TurnRenderer
from dapo.training.demonstrations import AnswerEncoder
from dapo.types import Problem
from helpers.published_templates import PUBLISHED, published

SYSTEM = {"system": "Be brief."}
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
NO_THINKING_BY_SYSTEM = {"system": "Be brief. /no_think"}
CASES: list[tuple[str, Mapping[str, Any]]] = [
    *((name, {}) for name in PUBLISHED),
    *((name, SYSTEM) for name in PUBLISHED),
    ("smollm3", NO_THINKING),
    ("smollm3", NO_THINKING_BY_SYSTEM),
    ("glm-4.5", NO_THINKING),
    ("granite-3", {"chat_template_kwargs": {"thinking": True}}),
]
REMOVES_THOUGHTS = 'removes "<thought>..." from earlier turns; environment.history=append'
REWRITES: dict[str, str] = {
    "exaone-deep": REMOVES_THOUGHTS,
    "deepseek-r1-distill": REMOVES_THOUGHTS.replace("thought>", "think>"),
    "glm-4.5": 'removes "<think>..." from earlier turns|rewrites earlier turns .*<think></think>',
}
"""What a template does to earlier turns; the others leave them as they are."""
CALLS = {
    "mistral-7b-v0.3": r"writes tool calls as .*\[TOOL_CALLS\]",
    "granite-3": "has tools, and writes no calls",
    "qwen3-coder": "writes tool calls as .*<function=sentinel_tool>",
    "deepseek-r1-distill": "writes tool calls as .*tool▁call▁begin",
    "glm-4.5": "writes tool calls as .*<arg_key>sentinel</arg_key>",
    "kimi-k2": "has tools, and writes no calls",
}
"""How a template that takes tools writes calls; the others get tools as a text of the problem."""


def add(a: int) -> int:
    """Adds one.

    Args:
        a: a number
    """
    return a + 1


def configured(options: Mapping[str, Any]) -> DataConfig:
    return DataConfig(train="builtin:sums", **options).at_time(datetime(2031, 1, 5, 12))


def episode_of(renderer: TurnRenderer, role: str) -> tuple[list[dict[str, str]], list[int]]:
    """Two turns with their observations: messages, and ids up to the third turn's header."""
    tokenizer = renderer._tokenizer
    end = renderer.prompts.turn_end
    assert end is not None
    assert end.token_id is not None
    problem = Problem("1", "2+3?", "5")
    ids = list(renderer.prompts.encode(problem))
    messages = []
    lead = (
        renderer.prompts.encode_rendered(" ")
        if tokenizer.chat_template.count("trim }}</s>")
        else ()
    )
    for answer, observation in (("It is 5.", "Sure?"), ("Yes.", "And why?")):
        behind = renderer.following(observation, ended=True, role=role)
        ids += [*lead, *renderer.prompts.encode_rendered(answer), end.token_id, *behind]
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": role, "content": observation})
    return messages, ids


def case_name(value: object) -> str:
    return str(value) if isinstance(value, str) else ", ".join(map(str, dict(value).values()))  # type: ignore[call-overload]


@pytest.mark.parametrize(("name", "options"), CASES, ids=case_name)
def test_observations_are_continued_in_the_templates_own_tokens_or_refused_by_name(
    name: str, options: Mapping[str, Any]
) -> None:
    refusal = REWRITES.get(name)
    if name == "mistral-7b-v0.3" and "system" in options:
        # the system message stands in the last question alone
        refusal = r"rewrites earlier turns .*\[INST\] Be brief\..*environment\.history=append"
    if refusal is not None:
        with pytest.raises(DataError, match=f"the chat template of {name} ({refusal})"):
            TurnRenderer(published(name), configured(options))
        TurnRenderer(published(name), configured(options), history="append")
        return
    renderer = TurnRenderer(published(name), configured(options))
    messages, ids = episode_of(renderer, "user")
    assert renderer.difference(Problem("1", "2+3?", "5"), messages, ids) is None
    assert renderer.difference(Problem("1", "2+4?", "5"), messages, ids) is not None


@pytest.mark.parametrize(("name", "options"), CASES, ids=case_name)
def test_tools_are_called_in_a_form_that_is_read_or_refused_by_name(
    name: str, options: Mapping[str, Any]
) -> None:
    tools = [tool_schema(add)]
    config = configured(options)
    if name in CALLS:
        for history in ("exact", "append"):
            with pytest.raises(DataError, match=f"(?s)the chat template of {name} {CALLS[name]}"):
                TurnRenderer(published(name), config, tools=tools, history=history)  # type: ignore[arg-type]
        return
    history = "append" if name in REWRITES else "exact"
    renderer = TurnRenderer(published(name), config, tools=tools, history=history)  # type: ignore[arg-type]
    prompt = renderer.prompts.render(Problem("1", "2+3?", "5"))
    assert '"name": "add"' in prompt
    assert "<tool_call>" in prompt
    assert renderer.calls is not None
    assert renderer.calls.form == "hermes"


ROWS: dict[str, dict[str, Any]] = {
    "an answer": {"prompt": "4 + 3?", "response": "It is 7"},
    "a thought": {"prompt": "4 + 3?", "response": "<think>\nhm\n</think>\n\nIt is 7"},
    "two turns": {
        "messages": [
            {"role": "user", "content": "4 + 3?"},
            {"role": "assistant", "content": "7"},
            {"role": "user", "content": "And + 1?"},
            {"role": "assistant", "content": "It is 8"},
        ]
    },
}
OPENS_A_THOUGHT = ("exaone-deep", "deepseek-r1-distill")
NO_SECOND = "in which the thought is empty, and the response .* has another one; leave it out, or"


def refusal_of(name: str, options: Mapping[str, Any], kind: str) -> str | None:
    """The reason why a demonstration is refused; None if it is not."""
    is_off = options in (NO_THINKING, NO_THINKING_BY_SYSTEM)
    if name == "deepseek-r1-distill" and kind == "a thought":
        return None
    if name in OPENS_A_THOUGHT:
        return "does not close this thought; the chat template itself writes"
    if kind == "two turns" and name in REWRITES:
        return REWRITES[name]
    if kind == "two turns" and name == "mistral-7b-v0.3" and "system" in options:
        return "rewrites earlier turns"
    return NO_SECOND if is_off and kind == "a thought" else None


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize(("name", "options"), CASES, ids=case_name)
def test_a_demonstration_has_the_templates_own_tokens_or_is_refused_by_name(
    name: str, options: Mapping[str, Any], kind: str
) -> None:
    config = configured(options)
    prompts = PromptEncoder(published(name), config)
    encoder = AnswerEncoder(published(name), config, prompts)
    row = demonstration_from_row(ROWS[kind], where="row 1", source="t", columns=ANY_COLUMNS)
    refusal = refusal_of(name, options, kind)
    if refusal is not None:
        with pytest.raises(DataError, match=refusal):
            encoder.encode(row)
        return
    answer = encoder.encode(row)
    sent = prompts.decode_prompt([*prompts.encode(row), *answer.token_ids])
    if name == "deepseek-r1-distill":  # the template leaves out the thought that it asked for
        assert sent.endswith("<think>\nhm\n</think>\n\nIt is 7<｜end▁of▁sentence｜>")
        return
    messages = [*chat_messages(row, system=config.system), *turns_of(row)]
    if name == "mistral-7b-v0.3":  # it writes the system message before a question at the end alone
        assert sent.endswith(f" {turns_of(row)[-1]['content']}</s>")
        messages = [message for message in messages if message["role"] != "system"]
        sent = sent.replace("Be brief.\n\n", "")
    own = prompts.render_messages(messages, header=False)
    if name == "glm-4.5":
        own += "</s>"  # its turns end where the next one begins
    assert sent == own.rstrip("\n")
    assert prompts.encode_rendered(sent) == (*prompts.encode(row), *answer.token_ids) or (
        name == "mistral-7b-v0.3"
    )


def test_the_date_is_that_of_the_run() -> None:
    for name in ("granite-3", "smollm3"):
        prompts = PromptEncoder(published(name), configured({}))
        text = prompts.render(Problem("1", "2+3?", "5"))
        assert ("January 05, 2031" if name == "granite-3" else "05 January 2031") in text
        assert any("reads the clock" in note for note in prompts.notes([]))


def test_a_column_tools_reaches_the_templates_that_read_it_and_is_named_for_the_others() -> None:
    problem = Problem("1", "2+3?", "5", fields={"tools": [tool_schema(add)]})
    for name, template in PUBLISHED.items():
        prompts = PromptEncoder(published(name), configured({}))
        reads = "{% if tools" in template
        assert ('"name": "add"' in prompts.render(problem)) == (reads and name != "qwen3-coder")
        assert ("<name>add</name>" in prompts.render(problem)) == (name == "qwen3-coder")
        notes = "; ".join(prompts.notes([problem]))
        assert ("does not read tools: the column tools is not shown" in notes) == (not reads)
