"""Why a call of an agent begins a branch: the first message that differs, in words."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from dapo.core.text import shorten
from dapo.environments.agents.messages import AgentRequest, same_text
from dapo.types import Message

Call: TypeAlias = Any
"""A call of `calls.py`, which imports this file."""

_SHOWN_CHARS = 60
"""The most characters of each of two texts that differ."""
_SAME_CHARS = 12
"""The characters in front of the first difference of two texts."""
FURTHER_ANSWER = "a further answer to the same request"
OTHER_CHAT = "another conversation"
REWRITTEN = "the history was rewritten"


def branch_reason(
    calls: Sequence[Call], request: AgentRequest, parent: Call | None, exchange: int
) -> str:
    """Return why a request begins a branch; an empty text if it is the next turn of its parent.

    The part in front of the colon is the kind of reason, the rest is what differs.

    Args:
        calls: The calls before it.
        request: The request.
        parent: The call that it continues.
        exchange: The number of the request.
    """
    if not calls or (parent is not None and not parent.num_children):
        return ""
    if calls[-1].exchange == exchange:
        return FURTHER_ANSWER
    if parent is not None:
        return f"the history forks: call {parent.number + 1} was continued before"
    if request.prompt is not None:
        return "another text: it does not begin with the text and the answer of an earlier call"
    chats = [call for call in calls if call.new_text is None]
    if not chats:
        return OTHER_CHAT
    nearest = max(chats, key=lambda call: (_num_same(call, request), call.number))
    return _difference(nearest, request)


def _num_same(call: Call, request: AgentRequest) -> int:
    """Return the number of first messages that a call's chat and a request have in common."""
    number = 0
    for message, other in zip(_chat(call), request.messages, strict=False):
        if same_text(message) != same_text(other):
            break
        number += 1
    return number


def _difference(call: Call, request: AgentRequest) -> str:
    """Return what makes a request no continuation of a call."""
    name = f"call {call.number + 1}"
    chat = _chat(call)
    num_same = _num_same(call, request)
    if call.options.tools != request.tools:
        return f"the tools changed: they are not those of {name}"
    if num_same == len(chat):
        if len(request.messages) == num_same:
            return f"the history ends with the answer of {name}: a next turn needs a new message"
        if not call.is_read:
            return f"the answer was not read: the agent did not wait for {name}"
        return f"the template cannot go on: what follows {name} cannot be rendered behind it"
    if num_same == len(request.messages):
        return f"the history is shorter: it ends before message {num_same + 1} of {name}"
    before = chat[num_same]
    now = request.messages[num_same]
    place = f"message {num_same + 1} ({now.get('role')})"
    if not num_same:
        return f"{OTHER_CHAT}: {place} is {_shown(now, before)}"
    return f"{REWRITTEN}: {place} is {_shown(now, before)} of {name}"


def _chat(call: Call) -> list[Message]:
    """Return the messages of a call, with its answer."""
    messages: list[Message] = []
    for earlier in call.path:
        messages += earlier.new_messages
        messages.append(earlier.message)
    return messages


def _shown(message: Message, before: Message) -> str:
    """Return the texts of two messages around their first difference."""
    text = _text(message)
    earlier = _text(before)
    start = 0
    for character, other in zip(text, earlier, strict=False):
        if character != other:
            break
        start += 1
    start = max(0, start - _SAME_CHARS)
    mark = "…" if start else ""
    shown = [mark + shorten(part[start:], _SHOWN_CHARS) for part in (text, earlier)]
    if before.get("role") != message.get("role"):
        return f"{shown[0]!r}, and was {shown[1]!r} ({before.get('role')})"
    return f"{shown[0]!r}, and was {shown[1]!r}"


def _text(message: Message) -> str:
    """Return the text of a message, with the calls in it."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    parts = [str(message.get("content", ""))]
    parts += [f"{call['name']}({call['arguments']})" for call in calls]
    return " ".join(part for part in parts if part)
