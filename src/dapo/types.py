"""The values that flow through a step. They are frozen: a later stage makes new values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from dapo.algo.sampling import is_informative
from dapo.core.constant_rows import constant_row
from dapo.core.ranges import Ranges, mask_of, merged, select, zeroed

__all__ = [
    "Episode",
    "EpisodeText",
    "Finish",
    "Generation",
    "GenerationRequest",
    "Group",
    "Message",
    "Problem",
    "Prompt",
    "RankRecord",
    "Sample",
    "Verdict",
    "WeightLayout",
    "content_text",
]

Message: TypeAlias = Mapping[str, Any]
"""`role`, `content` (a text, a list of parts of text, or None beside `tool_calls`), and whatever a
template reads.
"""
Prompt: TypeAlias = str | Sequence[Message]
Finish: TypeAlias = Literal["stop", "length", "aborted"]


def content_text(message: Message) -> str:
    """The text of a message's content: parts are joined by newlines, and no content is an empty
    text.
    """
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content or ())


@dataclass(frozen=True)
class Problem:
    """A question with its reference answer: the paper's (q, a)."""

    id: str
    """An id unique within the data set; copies of one problem share it."""
    prompt: Prompt
    """Text, or chat messages with `role`, `content` and further keys, such as `tool_calls`."""
    answer: str
    """The reference answer as text, which the verifier parses."""
    source: str = ""
    """The origin of the problem: a file or the name of a task."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the data set, which reward functions receive as keywords.

    They are JSON values, and dates, times, durations, decimals and UUIDs.
    """

    @property
    def question(self) -> str:
        """The prompt's text; of chat messages the last one's before the beginning of an answer."""
        if isinstance(self.prompt, str):
            return self.prompt
        if self.begun_answer is not None and len(self.prompt) > 1:
            return content_text(self.prompt[-2])
        return content_text(self.prompt[-1])

    @property
    def begun_answer(self) -> str | None:
        """The text of an assistant's message at the end of the prompt; None without one."""
        if isinstance(self.prompt, str) or self.prompt[-1]["role"] != "assistant":
            return None
        return content_text(self.prompt[-1])


@dataclass(frozen=True)
class GenerationRequest:
    """One response to sample."""

    id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    """The key of its random numbers: token t depends only on (seed, offset + t) and the model's
    distribution.
    """
    stop_ids: tuple[int, ...]
    """The tokens that end the response, of which they are the last token."""
    min_new_tokens: int = 0
    """Number of first tokens that are no stop ids: their distribution is renormalised over the
    other tokens.
    """
    offset: int = 0
    """Number of tokens of this response that were sampled before, with which `prompt_ids` ends.

    The two limits count the tokens that are left. So a response that was aborted after t tokens and
    goes on at offset t equals the one that was sampled whole.
    """
    previous: str | None = None
    """The id of the request with whose prompt and response `prompt_ids` begins.

    An engine that still holds their keys and values may use them, which changes no result but
    rounding.
    """
    is_continued: bool = False
    """Whether a later request may name this one as `previous`: an engine may keep its keys and
    values until then.
    """
    problem: Problem | None = None
    """The task of an episode; an engine that samples single responses does not read it."""


@dataclass(frozen=True)
class Episode:
    """The turns of the policy and the answers of an environment, which a `Generation` holds as
    tokens.

    Example: `Episode(messages=({"role": "assistant", "content": "4821 + 3977"}, {"role": "user",
    "content": "The calculator shows 8798"}, {"role": "assistant", "content": "8798"}),
    rewards=(0.0, 1.0), correct=True)`.
    """

    messages: Sequence[Message]
    """The conversation behind the prompt: turns with the role `assistant`, observations with
    another one.
    """
    rewards: Sequence[float]
    """The reward of each turn."""
    correct: bool | None = None
    """Whether the environment counts the episode as solved; None: only the rewards count."""
    error: str | None = None
    """The reason why the environment failed; such an episode has no verdict and never trains."""
    is_cut: bool = False
    """Whether no tokens or turns were left before the environment ended the episode."""
    tool_calls: int = 0
    tool_errors: int = 0
    ending: str = ""
    """What the environment said last, with `done` or in `end`: the policy never reads it."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Further numbers that an agent returned with its reward, by name."""
    calls: Sequence[Mapping[str, Any]] = ()
    """The requests of an agent, in the order in which they were served; empty for an environment."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What else is counted of an agent: branches, retries, tokens that do not train."""

    @property
    def answer(self) -> str:
        """The text of the last turn, which verifiers of single responses judge."""
        turns = [message["content"] for message in self.messages if message["role"] == "assistant"]
        return turns[-1] if turns else ""

    @property
    def transcript(self) -> str:
        """The conversation behind the prompt as text, with the role of each observation in
        brackets.
        """
        parts = [
            m["content"] if m["role"] == "assistant" else f"[{m['role']}] {m['content']}"
            for m in self.messages
        ]
        return "\n".join(parts)

    @property
    def num_turns(self) -> int:
        """The number of the policy's turns: of an agent, its calls in all branches."""
        if self.calls:
            return len(self.calls)
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def failure(self) -> str | None:
        """Why the environment, or the agent, failed; None: it did not."""
        if self.error is None or self.error.startswith("the agent"):
            return self.error
        return f"{'agent' if self.counts else 'environment'}: {self.error}"


class EpisodeText(str):
    """The text of an episode's last turn, with the episode: verifiers of single responses judge it
    as a text.
    """

    episode: Episode

    def __new__(cls, episode: Episode) -> "EpisodeText":
        text = super().__new__(cls, episode.answer)
        text.episode = episode
        return text

    def __reduce__(self) -> tuple[type["EpisodeText"], tuple[Episode]]:
        return EpisodeText, (self.episode,)


@dataclass(frozen=True)
class Generation:
    """One sampled response (o_i)."""

    request_id: str
    token_ids: Sequence[int]
    """The response with its sampled end token, if there is one, which is trained too.

    An engine may return any sequence of integers; `CheckedEngine` makes it an `array.array` of 4
    bytes per token, which other processes get as bytes.
    """
    logprobs: Sequence[float]
    """Log-probabilities of the tokens under the sampler at the sampling temperature, likewise an
    array, of float32 unless that changes one.

    Those of tokens that were not sampled are 0, whatever was given.
    """
    finish: Finish
    version: int
    """The version of the weights that sampled its first token: the number of finished training
    steps.
    """
    sampled: Ranges | None = None
    """The ascending ranges [start, end) of `token_ids` that the policy sampled, without gaps of 0
    tokens; None: all.

    Example: an episode with the turns (5, 6) and (7, 2), and the observation (30, 31) between them:

        Generation("7/4/0", (5, 6, 30, 31, 7, 2), (-0.1, -0.2, 0, 0, -0.3, -0.1), "stop", 3, sampled=((0, 2), (4, 6)))
    """
    episode: Episode | None = None
    """The answers and rewards of an environment; None for a single response."""
    versions: tuple[tuple[int, int], ...] | None = None
    """The first token of each part that other weights sampled, with their version; None: `version`
    sampled all.

    Example: `((0, 11), (137, 12))` for a response that was begun by version 11 and went on with
    version 12.
    """
    prompt_ids: tuple[int, ...] | None = None
    """The tokens behind which it was sampled, where an agent wrote them; None: its group's prompt."""
    branches: tuple["Generation", ...] = ()
    """The other conversations of an agent's episode, each behind its own `prompt_ids`.

    A branch begins where the agent rewrote or forked the history. What it shares with an earlier
    branch is part of its prompt, so that each sampled token occurs in one branch.
    """
    is_masked: bool = False
    """Whether none of its tokens trains: an agent never read the answer, or no reward refers to it."""

    def __post_init__(self) -> None:
        if self.sampled is None:
            return
        object.__setattr__(self, "sampled", merged(self.sampled, len(self.token_ids)))
        if self.sampled is not None and len(self.logprobs) == len(self.token_ids):
            object.__setattr__(self, "logprobs", zeroed(self.logprobs, self.sampled))

    @property
    def num_sampled(self) -> int:
        """The length of the response: the number of tokens that the policy sampled, in all
        branches.
        """
        own = num_sampled(self.token_ids, self.sampled)
        return own + sum(branch.num_sampled for branch in self.branches)

    @property
    def conversations(self) -> "tuple[Generation, ...]":
        """The response itself and its branches."""
        return self, *self.branches

    @property
    def mask(self) -> Sequence[int]:
        """1 for each token that trains: those that the policy sampled, unless it is masked."""
        length = len(self.token_ids)
        if self.is_masked:
            return constant_row(False, length)
        return constant_row(True, length) if self.sampled is None else mask_of(self.sampled, length)

    @property
    def tokens_by_version(self) -> dict[int, int]:
        """The number of sampled tokens of each version that sampled some."""
        starts = self.versions or ((0, self.version),)
        ends = [start for start, _ in starts[1:]] + [len(self.token_ids)]
        found: dict[int, int] = {}
        for (start, version), end in zip(starts, ends, strict=True):
            sampled = self.sampled if self.sampled is not None else ((start, end),)
            if count := sum(max(0, min(end, b) - max(start, a)) for a, b in sampled):
                found[version] = found.get(version, 0) + count
        for branch in self.branches:
            for version, count in branch.tokens_by_version.items():
                found[version] = found.get(version, 0) + count
        return found

    def text(self, decode: Callable[[Sequence[int]], str]) -> str:
        """The response as verifiers receive it: its tokens as `decode` gives them, or an
        EpisodeText.
        """
        return decode(self.token_ids) if self.episode is None else EpisodeText(self.episode)


def num_sampled(token_ids: Sequence[int], sampled: Ranges | None) -> int:
    """The number of sampled tokens of a response."""
    return len(token_ids) if sampled is None else sum(end - start for start, end in sampled)


@dataclass(frozen=True)
class Verdict:
    """A verifier's judgement of one response."""

    correct: bool | None
    """Whether the response is right; None from a verifier that gives only a score."""
    score: float
    """Eq. 7: +1 for right, -1 for wrong; a verifier with scores may give any finite number."""
    error: str | None = None
    """The reason for a missing verdict (timeout, crash, unparsable reference), which is never
    scored as a zero.
    """
    answer: str | None = field(default=None, compare=False)
    """The normalized answer for majority votes; "" if none was found, None if the verifier extracts
    none.
    """
    components: Mapping[str, float] = field(default_factory=dict, compare=False)
    """The unweighted score of each of several verifiers that applied, and further numbers that an
    agent returned.
    """
    deciders: tuple[str, ...] = field(default=(), compare=False)
    """Of several verifiers, those that say right or wrong, and so decide `correct`."""


@dataclass(frozen=True)
class Group:
    """G responses to one prompt, with their verdicts: `generations[i]` has `verdicts[i]`.

    Example: three responses to 2 + 3 at `overlong.buffer_tokens=2` and
    `rollout.max_response_tokens=4`; the last one has no verdict:

        Group(problem=Problem("7", "2 + 3 =", "5"), prompt_ids=(17, 4), id=12,
              generations=(<2 tokens>, <3 tokens>, <1 token>),
              texts=("5", "it is 6", "?"),
              verdicts=(Verdict(True, 1.0), Verdict(False, -1.0), Verdict(None, 0.0, "timed out")),
              rewards=(1.0, -1.5, None))

    The group is informative: one of its two valid verdicts is correct.
    """

    problem: Problem
    prompt_ids: tuple[int, ...]
    generations: tuple[Generation, ...]
    verdicts: tuple[Verdict, ...]
    id: int = 0
    """The problem's position in the stream; a problem that occurs twice makes two groups."""
    texts: tuple[str, ...] = ()
    """The texts of the responses, as the verifier received them."""
    rewards: tuple[float | None, ...] = ()
    """The shaped rewards: score plus overlong penalty (Eq. 13); None for a response without a
    verdict.
    """

    @property
    def size(self) -> int:
        """G: the number of sampled responses, judged or not."""
        return len(self.generations)

    @property
    def num_correct(self) -> int:
        return sum(v.correct is True for v in self.verdicts)

    @property
    def num_errors(self) -> int:
        return sum(v.error is not None for v in self.verdicts)

    @property
    def num_tokens(self) -> int:
        """Sampled response tokens over the whole group."""
        return sum(g.num_sampled for g in self.generations)

    @cached_property
    def is_informative(self) -> bool:
        """Whether the valid verdicts carry a signal (Eq. 11)."""
        return is_informative(self.verdicts)


@dataclass(frozen=True)
class RankRecord:
    """The controller's record of a sample whose old log-probabilities stay on a trainer rank."""

    batch: int
    number: int
    """The index of the sample in the trainer's batch."""


@dataclass(frozen=True)
class Sample:
    """A response with its reward and advantage, ready to train on.

    Example: the first response of the group above. Rewards 1 and -1.5 have mean -0.25 and standard
    deviation 1.7678; the advantage is 1.25 / 1.7678:

        Sample(group_id=12, index=0, prompt_ids=(17, 4), response_ids=(9, 2), reward=1.0, advantage=0.7071,
               engine_logprobs=(-0.1, -0.02), old_logprobs=None, mask=(1, 1))
    """

    group_id: int
    prompt_ids: tuple[int, ...]
    response_ids: Sequence[int]
    reward: float
    """The shaped reward: score plus overlong penalty (Eq. 13), minus `loss.kl_coef` times `kl` if
    that is set.
    """
    advantage: float
    """The advantage of every token by `advantage.estimator` (Eq. 9), or the mean of
    `token_advantages`.
    """
    engine_logprobs: Sequence[float]
    old_logprobs: Sequence[float] | None
    """Log-probabilities of the policy before the step's first update; None until the trainer
    records them, during that update, and if the trainer ranks keep them.
    """
    mask: Sequence[int]
    """1 (or True) for each response token that trains, else 0."""
    index: int = 0
    """The index of the response in its group."""
    kl: float | None = None
    """The divergence to the reference summed over the sampled tokens, with `loss.kl_in: reward`."""
    rank_record: RankRecord | None = None
    """The record of old log-probabilities that a trainer rank keeps."""
    token_advantages: Sequence[float] | None = None
    """The advantage of each response token, if they differ (`advantage.estimator: gae`)."""
    old_values: Sequence[float] | None = None
    """A critic's value of each response token before the step's first update; None without a
    critic.
    """
    value_targets: Sequence[float] | None = None
    """The target of the critic's value of each response token."""
    sampled: Ranges | None = None
    """The ranges of `response_ids` that the policy sampled (`Generation.sampled`); None: all."""
    reference_logprobs: Sequence[float] | None = None
    """Log-probabilities by a teacher behind a server; None: the policy computes those of its
    reference itself.
    """
    weight: float = 1.0
    """The share of its episode: 1 / the number of branches that train, whose shares add up to 1."""

    @property
    def num_sampled(self) -> int:
        """The number of response tokens that the policy sampled, with those that do not train."""
        return num_sampled(self.response_ids, self.sampled)

    @cached_property
    def has_signal(self) -> bool:
        """Whether a token has an advantage other than 0, among the sampled ones."""
        if self.token_advantages is None:
            return bool(self.advantage)
        return any(select(self.token_advantages, self.sampled))

    @cached_property
    def num_trained_tokens(self) -> int:
        """Response tokens with a true mask."""
        import numpy as np  # verifier processes import this module without numpy

        return int(np.count_nonzero(self.mask))


@dataclass(frozen=True)
class WeightLayout:
    """The names, types and shapes of a set of weights, known before any of them is computed.

    A linear layer and a head that is tied to the embedding: `WeightLayout({"embed": ("bfloat16",
    (197, 48)), "up": ("bfloat16", (96, 48))}, {"head": "embed"})`.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Type by its torch name and shape of each stored weight, in the order of a `WeightSource`."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Further names of weights, each with the name under which the weight is stored."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight; tied weights occur under each name."""
        stored = {name: shape for name, (_, shape) in self.tensors.items()}
        return stored | {name: stored[first] for name, first in self.tied.items()}
