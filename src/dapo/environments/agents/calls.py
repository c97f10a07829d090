"""The calls of an agent's episode: a tree of turns, each with the tokens that the policy sampled.

A request whose messages extend those of an answered call is its next turn: only what is new is
rendered, behind the tokens that were sampled. A second turn behind the same call forks a branch,
and a history that no call has (rewritten, compacted, a sub-agent's) begins one. So each sampled
token stands in one conversation, behind exactly the tokens that the policy has read.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dapo.core.rng import keyed_seed
from dapo.engines.continuation import Versions, extended
from dapo.engines.engine import float_array
from dapo.environments.agents.branches import branch_reason
from dapo.environments.agents.messages import AgentRequest, same_text, to_json
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
    digest: bytes = b""
    """A digest of the chat before its answer."""
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
    """The turn's text as the agent received it."""
    cut: str = ""
    """The sampled text behind it, from a stop text on."""
    is_ended: bool = True
    """Whether its last token ends a turn in the chat template."""
    message: Message = field(default_factory=dict)
    """The assistant's message as the agent received it."""
    deliveries: tuple[int, ...] = ()
    """Which of the episode's answers it was to the agent; more than one: a client asked again."""
    num_children: int = 0
    num_retries: int = 0
    branch_reason: str = ""
    """Why it begins a branch; empty for the next turn of a conversation."""

    @property
    def is_read(self) -> bool:
        """Whether the agent received the answer."""
        return bool(self.deliveries)

    @property
    def path(self) -> "list[Call]":
        """The calls before it, from the first one, and itself."""
        calls = [self]
        while calls[-1].parent is not None:
            calls.append(calls[-1].parent)
        return calls[::-1]

    @property
    def context_ids(self) -> tuple[int, ...]:
        """All tokens before its own."""
        ids: list[int] = []
        *earlier, _ = self.path
        for call in earlier:
            ids += call.new_ids
            ids += call.token_ids
        return (*ids, *self.new_ids)

    @property
    def num_messages(self) -> int:
        """The number of messages of the whole chat, with its answer."""
        return sum(len(call.new_messages) + 1 for call in self.path)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the whole chat, with its answer."""
        return sum(len(call.new_ids) + len(call.token_ids) for call in self.path)

    @property
    def whole_text(self) -> str:
        """The whole text, with its answer, of requests for the continuation of a text.

        The stop text of an answer is in it: the policy has sampled it, so a text that goes on there
        without it is another one.
        """
        return "".join(f"{call.new_text or ''}{call.text}{call.cut}" for call in self.path)

    @property
    def stop(self) -> str | None:
        """The stop text that ended the answer; None: none of them did."""
        return next((stop for stop in self.options.stop if self.cut.startswith(stop)), None)

    @property
    def history(self) -> bytes:
        """A digest of the whole chat, with its answer, by which the next turn finds the call."""
        return _next_digest(self.digest, self.message)

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
            "cut": self.cut,
            "is_ended": self.is_ended,
            "answer": dict(self.message),
            "is_read": self.is_read,
            "deliveries": list(self.deliveries),
            "retries": self.num_retries,
            "branch_reason": self.branch_reason,
        }


def _chat_digest(
    request: AgentRequest, parent: Call | None, new_messages: Sequence[Message]
) -> bytes:
    """Return a digest of the messages behind those of `parent`, if there is one."""
    digest = _first_digest(request) if parent is None else parent.history
    for message in new_messages:
        digest = _next_digest(digest, message)
    return digest


def _first_digest(request: AgentRequest) -> bytes:
    return hashlib.sha256(to_json(request.tools).encode("utf-8", "surrogatepass")).digest()


def _next_digest(digest: bytes, message: Message) -> bytes:
    text = same_text(message).encode("utf-8", "surrogatepass")
    return hashlib.sha256(digest + text).digest()


@dataclass
class CallTree:
    """The calls of an episode in the order in which they were served."""

    calls: list[Call] = field(default_factory=list)
    _read_chats: dict[bytes, Call] = field(default_factory=dict)
    """The first call whose answer the agent has read with each history."""
    _read_texts: list[Call] = field(default_factory=list)
    """Likewise, the calls that continue a text."""

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(len(call.token_ids) for call in self.calls)

    @property
    def num_conversations(self) -> int:
        return 1 + max((call.conversation for call in self.calls), default=-1)

    def parent_of(self, request: AgentRequest) -> Call | None:
        """Return the call with the longest history that the request continues, or None."""
        if request.prompt is not None:
            return self._parent_of_text(request.prompt)
        parent: Call | None = None
        digest = _first_digest(request)
        for message in request.messages[:-1]:  # the last one is new
            digest = _next_digest(digest, message)
            call = self._read_chats.get(digest)
            if call is not None:
                parent = call
                digest = call.history
        return parent

    def _parent_of_text(self, prompt: str) -> Call | None:
        parent: Call | None = None
        longest = 0
        for call in self._read_texts:
            whole = call.whole_text
            if longest < len(whole) < len(prompt) and prompt.startswith(whole):
                parent = call
                longest = len(whole)
        return parent

    def deliver(self, call: Call, number: int) -> None:
        """Note that the agent has received a call's answer as the episode's answer `number`."""
        if not call.is_read:
            self._add_read(call)
        call.deliveries = (*call.deliveries, number)

    def _add_read(self, call: Call) -> None:
        """Let the call be continued."""
        if call.new_text is not None:
            self._read_texts.append(call)
        else:
            self._read_chats.setdefault(call.history, call)
            if call.cut:  # an agent may put the stop text back, which the policy has sampled
                content = f"{call.message['content']}{call.cut}"
                whole = _next_digest(call.digest, {**call.message, "content": content})
                self._read_chats.setdefault(whole, call)

    def add(
        self, request: AgentRequest, parent: Call | None, new_ids: tuple[int, ...], exchange: int
    ) -> Call:
        """Add a call of a request behind a call; the second one behind it begins a branch."""
        extends = parent is not None and not parent.num_children
        before = 0
        before_text = 0
        if parent is not None:
            before = parent.num_messages
            if request.prompt is not None:
                before_text = len(parent.whole_text)
        new_text = None if request.prompt is None else request.prompt[before_text:]
        new_messages = request.messages[before:]
        call = Call(
            number=len(self.calls),
            parent=parent,
            conversation=parent.conversation if parent and extends else self.num_conversations,
            turn=parent.turn + 1 if parent and extends else 0,
            new_messages=new_messages,
            new_text=new_text,
            new_ids=new_ids,
            key=request.key,
            options=request.without_messages(),
            digest=_chat_digest(request, parent, new_messages),
            exchange=exchange,
            branch_reason=branch_reason(self.calls, request, parent, exchange),
        )
        if parent is not None:
            parent.num_children += 1
        self.calls.append(call)
        return call

    def conversation(self, number: int) -> list[Call]:
        """Return the calls of a conversation in their order."""
        return [call for call in self.calls if call.conversation == number]

    def generations(
        self, request_id: str, first_prompt: tuple[int, ...], trained: set[int]
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
        if record["turn"] == 0:
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
        new_messages = tuple(record["messages"])
        options = AgentRequest.of_options(record["options"])
        call = Call(
            number=record["number"],
            parent=parent,
            conversation=number,
            turn=record["turn"],
            new_messages=new_messages,
            new_text=record["prompt"],
            new_ids=tuple(new_ids),
            key=record["key"],
            options=options,
            digest=_chat_digest(options, parent, new_messages),
            exchange=record["exchange"],
            limit=record["limit"],
            token_ids=array("i", conversation.token_ids[start:end]),
            logprobs=array("d", conversation.logprobs[start:end]),
            version=version,
            versions=((0, version), *later) if later else None,
            finish=record["finish"],
            text=record["text"],
            cut=record.get("cut", ""),
            is_ended=record["is_ended"],
            message=record["answer"],
            deliveries=tuple(record["deliveries"]),
            num_retries=record["retries"],
            branch_reason=record["branch_reason"],
        )
        if parent is not None:
            parent.num_children += 1
        tree.calls.append(call)
    for call in sorted(filter(_is_read, tree.calls), key=lambda call: call.deliveries):
        tree._add_read(call)
    return tree


def _is_read(call: Call) -> bool:
    return call.is_read
