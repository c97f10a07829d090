"""The values that flow through a step. They are frozen: a later stage makes a new value instead of changing one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from dapo.algo.sampling import is_informative

__all__ = [
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
]

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
    """The key of its random numbers: token t is a function of (seed, t) and the model's distribution alone."""
    stop_ids: tuple[int, ...]
    """Sampling one of these ends the response; the token itself belongs to it."""
    min_new_tokens: int = 0
    """None of the first `min_new_tokens` tokens is a stop id: their distribution is renormalised over the others."""


@dataclass(frozen=True)
class Generation:
    """One sampled response (o_i)."""

    request_id: str
    token_ids: Sequence[int]
    """The response with its sampled end token, if there is one: it is trained on.

    A tuple or, from the engines here, an `array.array` of 4 bytes per token, which crosses to other processes as bytes.
    """
    logprobs: Sequence[float]
    """Log-probabilities of the tokens under the sampler, at the sampling temperature; a tuple or array as well."""
    finish: Finish
    version: int
    """The version of the weights that sampled it: the number of finished training steps."""


@dataclass(frozen=True)
class Verdict:
    """A verifier's judgement of one response."""

    correct: bool | None
    """None: the verifier gives a score without deciding right or wrong."""
    score: float
    """Eq. 7: +1 right, -1 wrong; a graded verifier may give any finite number."""
    error: str | None = None
    """Why there is no verdict (timed out, crashed, unparsable reference). Never silently a zero."""
    answer: str | None = field(default=None, compare=False)
    """The response's answer, normalized, for majority votes; "" if none was found, None if none was looked for."""
    components: Mapping[str, float] = field(default_factory=dict, compare=False)
    """With several verifiers: the score of each that applied, before its weight. Empty with a single verifier."""


@dataclass(frozen=True)
class Group:
    """G responses to one prompt, with their verdicts: `generations[i]` has `verdicts[i]`.

    Example: three responses to 2 + 3, of which the last could not be judged, at `overlong.buffer_tokens=2` and
    `rollout.max_response_tokens=4`:

        Group(problem=Problem("7", "2 + 3 =", "5"), prompt_ids=(17, 4), id=12,
              generations=(<2 tokens>, <3 tokens>, <1 token>),
              texts=("5", "it is 6", "?"),
              verdicts=(Verdict(True, 1.0), Verdict(False, -1.0), Verdict(None, 0.0, "timed out")),
              rewards=(1.0, -1.5, None))

    It is informative: one of its two valid verdicts is correct.
    """

    problem: Problem
    prompt_ids: tuple[int, ...]
    generations: tuple[Generation, ...]
    verdicts: tuple[Verdict, ...]
    id: int = 0
    """The problem's position in the stream: the same text twice is two groups."""
    texts: tuple[str, ...] = ()
    """The responses as the verifier read them."""
    rewards: tuple[float | None, ...] = ()
    """Shaped: each verdict's score plus the overlong penalty (Eq. 13); None for a response without a verdict."""

    @property
    def size(self) -> int:
        """G: the number of sampled responses, judged or not."""
        return len(self.generations)

    @property
    def num_correct(self) -> int:
        """The number of responses that a verifier called correct."""
        return sum(v.correct is True for v in self.verdicts)

    @property
    def num_errors(self) -> int:
        """The number of responses with an error verdict."""
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
class RankRecord:
    """The controller's record of a sample whose old log-probabilities stay on a trainer rank."""

    batch: int
    """The number of the trainer's batch."""
    number: int
    """The number of the sample in that batch."""


@dataclass(frozen=True)
class Sample:
    """A response with its reward and advantage, ready to train on.

    Example: the first response of the group above. Rewards 1 and -1.5 have mean -0.25 and standard deviation 1.7678, so
    its advantage is 1.25 / 1.7678:

        Sample(group_id=12, index=0, prompt_ids=(17, 4), response_ids=(9, 2), reward=1.0, advantage=0.7071,
               engine_logprobs=(-0.1, -0.02), old_logprobs=None, mask=(1, 1))
    """

    group_id: int
    prompt_ids: tuple[int, ...]
    response_ids: Sequence[int]
    reward: float
    """Shaped: the verdict's score plus the overlong penalty (Eq. 13), minus `loss.kl_coef` times `kl`, if set."""
    advantage: float
    """The advantage of every token by `advantage.estimator` (Eq. 9); the mean, where there are `token_advantages`."""
    engine_logprobs: Sequence[float]
    old_logprobs: Sequence[float] | None
    """Log-probabilities of the policy before the step's first update; None until the trainer has recorded them, in that
    update itself, and where the trainer's ranks keep them."""
    mask: Sequence[int]
    """1 (or True) for each response token that trains, 0 for the others."""
    index: int = 0
    """The index of the response in its group."""
    weight: float = 1.0
    """Its group's factor in the loss (`dynamic_sampling.weights`)."""

    kl: float | None = None
    """The divergence to the reference, summed over its tokens, where it is in the reward (`loss.kl_in: reward`)."""

    rank_record: RankRecord | None = None
    """Set where trainer ranks have recorded the old log-probabilities, and keep them."""
    token_advantages: Sequence[float] | None = None
    """The advantage of each response token, where they differ (`advantage.estimator: gae`); None: all `advantage`."""
    old_values: Sequence[float] | None = None
    """A critic's value of each response token before the step's first update; None without a critic."""
    value_targets: Sequence[float] | None = None
    """The target of the critic's value of each response token."""

    @cached_property
    def has_signal(self) -> bool:
        """Whether a token has an advantage other than 0."""
        return bool(self.advantage) if self.token_advantages is None else any(self.token_advantages)

    @cached_property
    def num_trained_tokens(self) -> int:
        """Response tokens with a true mask."""
        import numpy as np  # verifier processes import the types, and count nothing

        return int(np.count_nonzero(self.mask))


@dataclass(frozen=True)
class WeightLayout:
    """The names, types and shapes of a set of weights, which are known before any of them is computed.

    A linear layer and a head that is tied to the embedding:
    `WeightLayout({"embed": ("bfloat16", (197, 48)), "up": ("bfloat16", (96, 48))}, {"head": "embed"})`.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Type, as torch names it, and shape of each stored weight, in the order in which a `WeightSource` yields them."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Each further name of a weight -> the name under which it is stored."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight, tied ones under each of their names."""
        stored = {name: shape for name, (_, shape) in self.tensors.items()}
        return stored | {name: stored[first] for name, first in self.tied.items()}
