"""The calls of an agent's episode: a tree of turns, each with the tokens that the policy sampled.

A request whose messages extend those of an answered call is its next turn: only what is new is
rendered, behind the tokens that were sampled. A second turn behind the same call forks a branch,
and a history that no call has (rewritten, compacted, a sub-agent's) begins one. So each sampled
token stands in one conversation, behind exactly the tokens that the policy has read.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo.core.rng import keyed_seed
from dapo.engines.continuation import Versions, extended
from dapo.engines.engine import float_array
from dapo.environments.agents.messages import AgentRequest, is_same
from dapo.types import Finish, Generation, Message


@dataclass(eq=False)
class Call:
    """One answer that an agent asked for."""

    number: int
    """Its place in the order in which the calls of the episode were served."""
    parent: "Call | None"
    """The call whose messages and tokens it continues; None: it begins a conversation."""
    conversation: int
    """The number of its conversation; the first call behind another one stays in that one's."""
    turn: int
    """The number of sampled turns before it in its conversation."""
    new_messages: tuple[Message, ...]
    """The messages behind those of `parent`, or all of them."""
    new_text: str | None
    """Likewise, of a request for the continuation of a text."""
    new_ids: tuple[int, ...]
    """The tokens of the new messages, behind those of `parent`."""
    key: str
    """The key of its request."""
    options: AgentRequest
    """Its request without the messages."""
    exchange: int = 0
    """The number of its request: the answers of one request have the same."""
    limit: int = 0
    """The most tokens of the answer."""
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("d"))
    version: int = 0
    versions: Versions | None = None
    finish: Finish | None = None
    """How the turn ended; None while it is sampled."""
    text: str = ""
    """The turn's text."""
    is_ended: bool = True
    """Whether its last token ends a turn in the chat template."""
    message: Message = field(default_factory=dict)
    """The assistant's message as the agent received it."""
    is_read: bool = False
    """Whether the agent received the answer."""
    num_children: int = 0
    num_retries: int = 0

    @property
    def context_ids(self) -> tuple[int, ...]:
        """All tokens before its own."""
        if self.parent is None:
            return self.new_ids
        return (*self.parent.context_ids, *self.parent.token_ids, *self.new_ids)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The whole chat, with its answer."""
        before = () if self.parent is None else self.parent.messages
        return (*before, *self.new_messages, self.message)

    @property
    def whole_text(self) -> str:
        """The whole text, with its answer, of requests for the continuation of a text."""
        before = "" if self.parent is None else self.parent.whole_text
        return f"{before}{self.new_text or ''}{self.text}"

    def is_continued_by(self, request: AgentRequest) -> bool:
        """Return True if the request's messages, or its text, are this call's and further ones."""
        if not self.is_read or self.options.tools != request.tools:
            return False
        if request.prompt is not None:
            if self.new_text is None:
                return False
            whole = self.whole_text
            return len(request.prompt) > len(whole) and request.prompt.startswith(whole)
        messages = self.messages
        if self.new_text is not None or len(request.messages) <= len(messages):
            return False
        return all(map(is_same, messages, request.messages))

    def add(self, generation: Generation) -> None:
        """Add tokens of the turn, or of a part of it."""
        start = len(self.token_ids)
        versions = self.versions or ((0, self.version),)
        self.versions = extended(versions, generation, at=start)
        if not start:
            self.version = generation.version
        self.token_ids.extend(iter(generation.token_ids))
        self.logprobs.extend(iter(generation.logprobs))

    def generation(self) -> Generation:
        """Return its tokens so far as a response of their own."""
        return Generation(
            "",
            self.token_ids,
            float_array(self.logprobs),
            self.finish or "aborted",
            self.version,
            versions=self.versions,
        )

    def random_seed(self, seed: int) -> int:
        """Return the seed of its tokens: in the first conversation that of an episode's turn."""
        if self.conversation:
            result = keyed_seed(seed, "conversation", self.conversation, self.turn)
        elif self.turn:
            result = keyed_seed(seed, "turn", self.turn)
        else:
            result = seed
        if self.options.seed is not None:
            result = keyed_seed(result, "agent", self.options.seed)
        return result

    def forget_tokens(self) -> None:
        """Forget the tokens of a turn that is still sampled: the engine returns all of them."""
        self.token_ids = array("i")
        self.logprobs = array("d")
        self.version = 0
        self.versions = None

    def record(self) -> dict[str, Any]:
        """Return what a page shows of it and what `calls_of` reads, beside its tokens, as JSON."""
        return {
            "number": self.number,
            "parent": None if self.parent is None else self.parent.number,
            "conversation": self.conversation,
            "turn": self.turn,
            "messages": [dict(message) for message in self.new_messages],
            "prompt": self.new_text,
            "new_tokens": len(self.new_ids),
            "tokens": len(self.token_ids),
            "key": self.key,
            "options": self.options.options_json(),
            "exchange": self.exchange,
            "limit": self.limit,
            "finish": self.finish,
            "text": self.text,
            "is_ended": self.is_ended,
            "answer": dict(self.message),
            "is_read": self.is_read,
            "retries": self.num_retries,
        }


@dataclass
class CallTree:
    """The calls of an episode in the order in which they were served."""

    calls: list[Call] = field(default_factory=list)

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(len(call.token_ids) for call in self.calls)

    @property
    def num_conversations(self) -> int:
        return 1 + max((call.conversation for call in self.calls), default=-1)

    def parent_of(self, request: AgentRequest) -> Call | None:
        """Return the call with the longest history that the request continues, or None."""
        candidates = [call for call in self.calls if call.is_continued_by(request)]
        if request.prompt is not None:
            return max(candidates, key=lambda call: len(call.whole_text), default=None)
        return max(candidates, key=lambda call: len(call.messages), default=None)

    def add(
        self, request: AgentRequest, parent: Call | None, new_ids: tuple[int, ...], exchange: int
    ) -> Call:
        """Add a call of a request behind a call; the second one behind it begins a branch."""
        extends = parent is not None and not parent.num_children
        before = 0
        before_text = 0
        if parent is not None:
            before = len(parent.messages)
            before_text = len(parent.whole_text)
        new_text = None if request.prompt is None else request.prompt[before_text:]
        call = Call(
            number=len(self.calls),
            parent=parent,
            conversation=parent.conversation if parent and extends else self.num_conversations,
            turn=parent.turn + 1 if parent and extends else 0,
            new_messages=request.messages[before:],
            new_text=new_text,
            new_ids=new_ids,
            key=request.key,
            options=request.without_messages(),
            exchange=exchange,
        )
        if parent is not None:
            parent.num_children += 1
        self.calls.append(call)
        return call

    def conversation(self, number: int) -> list[Call]:
        """Return the calls of a conversation in their order."""
        return [call for call in self.calls if call.conversation == number]

    def generations(
        self, request_id: str, first_prompt: tuple[int, ...], trained: "set[int]"
    ) -> list[Generation]:
        """Return each conversation's tokens; the tail of calls that do not train is one of its own.

        Args:
            request_id: The id of the episode's request.
            first_prompt: The tokens of the problem's own prompt; a conversation behind it has no
                `prompt_ids`.
            trained: The numbers of the calls that train.
        """
        results: list[Generation] = []
        for number in range(self.num_conversations):
            calls = self.conversation(number)
            length = len(calls)
            while length and calls[length - 1].number not in trained:
                length -= 1
            for part, is_masked in ((calls[:length], False), (calls[length:], True)):
                if part:
                    results.append(_joined(request_id, part, first_prompt, is_masked=is_masked))
        return results


def _joined(
    request_id: str, calls: Sequence[Call], first_prompt: tuple[int, ...], *, is_masked: bool
) -> Generation:
    """Return the tokens of adjacent calls of a conversation as one response."""
    prompt_ids = calls[0].context_ids
    token_ids = array("i")
    logprobs = array("d")
    sampled = []
    versions: Versions | None = None
    version = calls[0].version
    for call in calls:
        if call is not calls[0]:
            token_ids.extend(call.new_ids)
            logprobs.extend([0.0] * len(call.new_ids))
        start = len(token_ids)
        part = call.generation()
        versions = extended(versions or ((0, version),), part, at=start)
        token_ids.extend(call.token_ids)
        logprobs.extend(call.logprobs)
        sampled.append((start, len(token_ids)))
    return Generation(
        request_id,
        token_ids,
        float_array(logprobs),
        calls[-1].finish or "aborted",
        version,
        sampled=tuple(sampled),
        versions=versions,
        prompt_ids=None if prompt_ids == first_prompt else prompt_ids,
        is_masked=is_masked,
    )


def calls_of(
    records: Sequence[Mapping[str, Any]],
    conversations: Sequence[Generation],
    first_prompt: tuple[int, ...],
) -> CallTree:
    """Return the calls whose records and tokens `Call.record` and `CallTree.generations` gave.

    All of them train: a suspended episode has no reward yet.
    """
    tree = CallTree()
    positions = [0] * len(conversations)
    for record in records:
        parent = None if record["parent"] is None else tree.calls[record["parent"]]
        number = record["conversation"]
        conversation = conversations[number]
        num_new = record["new_tokens"]
        if positions[number] == 0:
            prompt = first_prompt
            if conversation.prompt_ids is not None:
                prompt = conversation.prompt_ids
            new_ids = prompt[len(prompt) - num_new :]
            start = 0
        else:
            start = positions[number] + num_new
            new_ids = tuple(conversation.token_ids[positions[number] : start])
        end = start + record["tokens"]
        positions[number] = end
        starts = conversation.versions or ((0, conversation.version),)
        version = [value for begin, value in starts if begin <= start][-1]
        later = [(begin - start, value) for begin, value in starts if start < begin < end]
        call = Call(
            number=record["number"],
            parent=parent,
            conversation=number,
            turn=record["turn"],
            new_messages=tuple(record["messages"]),
            new_text=record["prompt"],
            new_ids=tuple(new_ids),
            key=record["key"],
            options=AgentRequest.of_options(record["options"]),
            exchange=record["exchange"],
            limit=record["limit"],
            token_ids=array("i", conversation.token_ids[start:end]),
            logprobs=array("d", conversation.logprobs[start:end]),
            version=version,
            versions=((0, version), *later) if later else None,
            finish=record["finish"],
            text=record["text"],
            is_ended=record["is_ended"],
            message=record["answer"],
            is_read=record["is_read"],
            num_retries=record["retries"],
        )
        if parent is not None:
            parent.num_children += 1
        tree.calls.append(call)
    return tree
