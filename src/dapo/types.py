"""The values that flow through a step: frozen, so that what has been made is never changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from dapo.algo.sampling import is_informative
from dapo.core.packed import array_of, compact

Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = str | Sequence[Message]
Finish: TypeAlias = Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class Problem:
    """A question with its reference answer: the paper's (q, a)."""

    id: str
    """Unique within its data set; copies of one problem share it."""
    prompt: Prompt
    """Text, or chat messages with `role` and `content`."""
    answer: str
    """The reference, as text; the verifier decides how to read it."""
    source: str = ""
    """Where the problem came from: a file, or a task's name."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The data set's other columns, as JSON values; handed to reward functions as keywords."""


@dataclass(frozen=True)
class GenerationRequest:
    """One response to sample."""

    id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    """Keys every draw: token t is a function of (seed, t) and the model's law alone."""
    stop_ids: tuple[int, ...]
    """Sampling one of these ends the response; the token itself belongs to it."""
    min_new_tokens: int = 0
    """None of the first so many tokens is one of `stop_ids`: the law is renormalised over the others."""


@dataclass(frozen=True)
class Generation:
    """One sampled response (o_i)."""

    request_id: str
    token_ids: Sequence[int]
    """With the sampled end token, if there is one: it is trained on. A tuple, or packed (`dapo.core.packed`)."""
    logprobs: Sequence[float]
    """Of the sampler, one a token, at the sampling temperature."""
    finish: Finish
    version: int
    """Of the weights that sampled it."""

    def __getstate__(self) -> dict[str, Any]:
        """To another process rows of numbers go packed."""
        return _with_compact_arrays(self, "token_ids", "logprobs")


@dataclass(frozen=True)
class Verdict:
    """What a verifier says of one response's text."""

    correct: bool | None
    """None: the verifier grades without deciding right or wrong."""
    score: float
    """Eq. 7: +1 right, -1 wrong; a graded verifier may give any finite number."""
    error: str | None = None
    """Why there is no judgement (timed out, crashed, unparsable reference): never a silent zero."""
    answer: str | None = field(default=None, compare=False)
    """What the verifier took for the response's answer, in one spelling, so that responses can be counted as votes; ""
    if it found none, None if it does not look for one."""
    components: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Of several verifiers: each one's own score, before its weight, where it applied; empty for a single one."""


@dataclass(frozen=True)
class Group:
    """G responses to one prompt, with their verdicts: `generations[i]` was judged `verdicts[i]`."""

    problem: Problem
    prompt_ids: tuple[int, ...]
    generations: tuple[Generation, ...]
    verdicts: tuple[Verdict, ...]
    id: int = 0
    """The problem's place in the stream: the same text twice is two groups."""
    texts: tuple[str, ...] = ()
    """The responses as the verifier read them."""
    rewards: tuple[float | None, ...] = ()
    """Shaped: each verdict's score plus the overlong penalty (Eq. 13); None for a response without a verdict."""

    @property
    def size(self) -> int:
        """G: how many responses were sampled, judged or not."""
        return len(self.generations)

    @property
    def num_correct(self) -> int:
        """How many responses a verifier called correct."""
        return sum(v.correct is True for v in self.verdicts)

    @property
    def num_errors(self) -> int:
        """How many responses got no judgement."""
        return sum(v.error is not None for v in self.verdicts)

    @property
    def num_tokens(self) -> int:
        """Response tokens over the whole group."""
        return sum(len(g.token_ids) for g in self.generations)

    @cached_property
    def is_informative(self) -> bool:
        """Eq. 11 over the valid verdicts: does the group carry a signal?"""
        return is_informative(self.verdicts)


@dataclass(frozen=True)
class Sample:
    """A response with its reward and advantage, ready to train on."""

    group_id: int
    prompt_ids: tuple[int, ...]
    response_ids: Sequence[int]
    reward: float
    """Shaped: the verdict's score plus the overlong penalty (Eq. 13)."""
    advantage: float
    """Eq. 9, the same for every token of the response."""
    engine_logprobs: Sequence[float]
    old_logprobs: Sequence[float] | None
    """Of the policy before the step's first update; None until the trainer has recorded them."""
    mask: Sequence[bool]
    """Which response tokens train."""
    index: int = 0
    """Which of its group's responses this is."""

    @property
    def num_trained_tokens(self) -> int:
        """Response tokens with a true mask."""
        return int(array_of(self.mask).astype(bool).sum())

    def __getstate__(self) -> dict[str, Any]:
        """To another process rows of numbers go packed."""
        return _with_compact_arrays(self, "response_ids", "engine_logprobs", "old_logprobs", "mask")


def _with_compact_arrays(value: object, *names: str) -> dict[str, Any]:
    fields = dict(vars(value))
    return fields | {name: compact(fields[name]) for name in names if fields[name] is not None}
