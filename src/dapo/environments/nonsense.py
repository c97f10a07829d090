"""Plays an environment with turns of nonsense, before training and for `dapo test ENVIRONMENT`.

Prompts, turns, observations, cuts and rewards go through the code of training; only the turns are
not sampled from a model. So an environment that always fails is refused before the first step.
"""

import math
import random
import string
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dapo.config.environment import EnvironmentConfig
from dapo.engines.continuation import ContinuingEngine
from dapo.engines.engine import Capabilities, WeightSource
from dapo.environments.engine import EpisodeEngine
from dapo.environments.pool import EnvironmentPool
from dapo.environments.rendering import TurnRenderer
from dapo.environments.starts import EpisodeStarts
from dapo.rewards.combine import build_verifier
from dapo.types import Episode, EpisodeText, Finish, Generation, GenerationRequest, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT = "cut off"
ANSWERS = ("random text", "a number")
ENDED = ("nothing", *ANSWERS)
KINDS = (*ENDED, CUT, *ENDED, *ENDED)
"""What each turn of an episode is; the first ones have every kind, if time ends the others."""
BUDGET_S = 1.5
"""The seconds that a start of training spends here at most, if no episode fails."""
FAILING_BUDGET_S = 10.0
"""The seconds if one fails: a run of nothing but failures costs more."""
_MAX_TOKENS = 2**30


@dataclass(frozen=True)
class Play:
    """An episode of nonsense, and whether a second play of it differed."""

    seed: int
    kind: str
    episode: Episode
    differs: bool = False
    has_tools: bool = False
    is_agent: bool = False

    @property
    def turns(self) -> int:
        return self.episode.num_turns

    @property
    def reward(self) -> float:
        return math.fsum(self.episode.rewards)

    @property
    def correct(self) -> bool | None:
        return self.episode.correct

    @property
    def error(self) -> str | None:
        return self.episode.error

    def as_json(self) -> dict[str, Any]:
        """Return the episode as JSON values."""
        names = ("seed", "kind", "turns", "reward", "correct", "error", "differs")
        return {name: getattr(self, name) for name in names}


class TextEngine:
    """A rollout engine without a model: `say` returns the text of each requested turn.

    None is a turn that is cut off before its first token.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        stop_id: int,
        say: Callable[[GenerationRequest], str | None],
        *,
        is_cut: bool = False,
        keeps_limits: bool = False,
    ) -> None:
        """With `is_cut` every turn ends at the limit of tokens; with `keeps_limits` a long one."""
        self._tokenizer = tokenizer
        self._stop_id = stop_id
        self._say = say
        self._is_cut = is_cut
        self._keeps_limits = keeps_limits
        self._waiting: list[GenerationRequest] = []

    def load_weights(self, weights: WeightSource, version: int) -> None:
        raise NotImplementedError("texts have no weights")

    def drop_weights(self) -> None:
        raise NotImplementedError("texts have no weights")

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._waiting += requests

    def poll(self) -> list[Generation]:
        requests = self._waiting
        self._waiting = []
        return [self._turn(request) for request in requests]

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        self._waiting = [request for request in self._waiting if request.id not in set(request_ids)]
        return [Generation(name, (), (), "aborted", version=0) for name in request_ids]

    def close(self) -> None:
        self._waiting.clear()

    def _turn(self, request: GenerationRequest) -> Generation:
        text = self._say(request)
        is_cut = self._is_cut or text is None
        ids = [*self._tokenizer(text or "", add_special_tokens=False)["input_ids"]]
        if self._keeps_limits and len(ids) >= request.max_new_tokens:
            is_cut = True
            ids = ids[: request.max_new_tokens]
        if not is_cut:
            ids.append(self._stop_id)
        logprobs = array("f", [-1.0] * len(ids))
        finish: Finish = "length" if is_cut else "stop"
        return Generation(request.id, array("i", ids), logprobs, finish, version=0)


class NonsensePlayer:
    """Plays nonsense with the processes, prompts and renderer of a run."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        pool: EnvironmentPool,
        renderer: TurnRenderer,
        starts: EpisodeStarts,
        options: EnvironmentConfig,
    ) -> None:
        self._tokenizer = tokenizer
        self._pool = pool
        self._renderer = renderer
        self._starts = starts
        self._options = options

    def play_all(self, problems: Sequence[Problem], *, budget_s: float | None = None) -> list[Play]:
        """Play as the function `play_all` does.

        `problems` have the prompts of their environments.
        """
        return play_all(self._play, problems, budget_s=budget_s)

    def play(self, problem: Problem, say: Callable[[str], str | None]) -> Episode:
        """Play one episode whose turns `say` returns for the conversation before them, as text.

        None ends the episode.
        """

        def turn(request: GenerationRequest) -> str | None:
            return say(str(self._tokenizer.decode([*request.prompt_ids])))

        episode = self._episode(problem, 0, turn, math.inf)
        assert episode is not None
        return episode

    def _play(self, problem: Problem, seed: int, deadline: float) -> Play | None:
        """Play one episode of nonsense; None if the environment has not answered by the deadline."""
        say = nonsense_of(seed)
        episode = self._episode(problem, seed, say, deadline, is_cut=KINDS[seed] == CUT)
        if episode is None:
            return None
        return Play(seed, KINDS[seed], episode, has_tools=bool(self._pool.tools))

    def _episode(
        self,
        problem: Problem,
        seed: int,
        say: Callable[[GenerationRequest], str | None],
        deadline: float,
        *,
        is_cut: bool = False,
    ) -> Episode | None:
        """Play one episode; None if its environment has not answered by the deadline.

        Args:
            problem: the problem, with the prompt of its environment.
            seed: the seed of the request.
            say: returns the text of each turn.
            deadline: the time of `time.monotonic`, or infinity.
            is_cut: whether the turns are cut at the limit of tokens.
        """
        request = text_request(self._tokenizer, self._renderer, problem, seed)
        (stop_id,) = request.stop_ids
        turns = ContinuingEngine(TextEngine(self._tokenizer, stop_id, say, is_cut=is_cut))
        engine = EpisodeEngine(
            turns, self._pool, self._renderer, self._options, starts=self._starts
        )
        engine.submit([request])
        ended: list[Generation] = []
        try:
            while not ended:
                if not engine.wait_for_answers(deadline - time.monotonic()):
                    return None
                ended = engine.poll()
        finally:
            engine.close()
        return judged(problem, ended[0])


def play_all(
    play: Callable[[Problem, int, float], Play | None],
    problems: Sequence[Problem],
    *,
    budget_s: float | None,
) -> list[Play]:
    """Play an episode of each of KINDS, then repeat them in reverse order.

    Args:
        play: Plays a problem with the turns of a seed until a time of the monotonic clock; None: it
            did not end in time.
        problems: Are taken in turn.
        budget_s: Seconds after which no other episode is played; None: all are.

    Returns the episodes that were played to their end.
    """
    half = math.inf if budget_s is None else budget_s / 2
    started = time.monotonic()
    plays: list[Play] = []
    for seed in range(len(KINDS)):
        first = play(problems[seed % len(problems)], seed, started + half)
        if first is None:
            break
        plays.append(first)
    # state that one episode leaves to the next shows in another order
    for index in reversed(range(len(plays))):
        first = plays[index]
        repetition = play(problems[first.seed % len(problems)], first.seed, started + 2 * half)
        if repetition is None:
            break
        plays[index] = compared(first, repetition)
    return plays


def compared(first: Play, repetition: Play) -> Play:
    """Return the first play with whether the second one differs.

    If one of the two failed, that one is returned: a busy machine alone can end an episode by its
    time limit, which says nothing about the seed.
    """
    if first.error is None and repetition.error is not None:
        return repetition
    if first.error is not None and repetition.error is None:
        return first
    return replace(first, differs=first.episode != repetition.episode)


def text_request(
    tokenizer: "PreTrainedTokenizerBase", renderer: TurnRenderer, problem: Problem, seed: int
) -> GenerationRequest:
    """Return the request for an episode whose turns are texts, with the token that ends a turn."""
    prompts = renderer.prompts
    end = prompts.turn_end
    stop_id = tokenizer.eos_token_id if end is None or end.token_id is None else end.token_id
    prompt_ids = prompts.encode(problem)
    return GenerationRequest(
        "0", prompt_ids, _MAX_TOKENS, 1.0, 1.0, seed, (stop_id,), problem=problem
    )


def judged(problem: Problem, generation: Generation) -> Episode:
    """Return an episode, whose error is that of its verdict."""
    episode = generation.episode
    assert episode is not None
    verifier = build_verifier("environment")
    text = EpisodeText(episode)
    verdict = verifier.judge_group(problem, [text], [generation.token_ids])[0]
    if verdict.error is None:
        return episode
    return replace(episode, error=verdict.error.removeprefix("environment: "))


def nonsense_of(seed: int) -> Callable[[GenerationRequest], str]:
    """Return what says the turns of the episode of nonsense of a seed, which KINDS describes."""
    chance = random.Random(seed)
    return lambda request: _nonsense(KINDS[seed], chance)


def _nonsense(kind: str, chance: random.Random) -> str:
    """Return the text of one turn."""
    if kind == "nothing":
        return ""
    if kind == "a number":
        return str(chance.randint(0, 99))
    return "".join(chance.choices(string.printable, k=40))


def is_unusable(plays: Sequence[Play]) -> bool:
    """Return True if most episodes fail, whatever their turns are.

    An environment that fails on some kinds of turns may still be trained on the others. Episodes
    that were not played count as well played, so more of them never make an environment usable.
    """
    failed = Counter(play.kind for play in plays if play.error is not None)
    return all(2 * failed[kind] > KINDS.count(kind) for kind in ENDED)


@dataclass(frozen=True)
class RewardedCut:
    """A turn that is cut at the limit of tokens gets a higher reward than a wrong answer."""

    cut: float
    wrong: float
    goes_on: bool
    """Whether an episode continues after wrong answers until no turns are left."""
    has_tools: bool

    @property
    def advice(self) -> str:
        """A sentence with what to write."""
        wrong = f"{self.wrong:.3g}"
        result = f"StepResult(reward={wrong}, done=True)"
        if self.has_tools:
            change = f"let get_reward return at most {wrong} where no tool has been called"
        elif self.goes_on:
            change = (
                f"let a wrong turn end the episode with `{result}`, and give the environment `def"
                f" end(self): return {result}`"
            )
        else:
            change = f"give the environment `def end(self): return {result}`"
        return (
            f"a turn that is cut at the limit of tokens gets {self.cut:.3g}, and wrong answers"
            f" {wrong}, so the policy learns never to end its turn; {change}"
        )


def rewarded_cut(plays: Sequence[Play], *, penalty: float = 0.0) -> RewardedCut | None:
    """Return the rewards of being cut and of wrong answers if being cut is rewarded more.

    `penalty` is taken from the reward of a turn that is cut. The reward of wrong answers is the
    mean of the kind of turns with the lowest one.
    """
    # an agent sees that an answer was cut
    valid = [play for play in plays if play.error is None and not play.is_agent]
    cut = [play.reward - penalty for play in valid if play.kind == CUT]
    wrong = []
    for kind in ANSWERS:
        of_kind = [play for play in valid if play.kind == kind and play.correct is not True]
        if of_kind:
            goes_on = any(play.episode.is_cut for play in of_kind)
            wrong.append((fmean(play.reward for play in of_kind), goes_on))
    if not cut or not wrong or fmean(cut) <= min(wrong)[0]:
        return None
    least, goes_on = min(wrong)
    return RewardedCut(fmean(cut), least, goes_on, any(play.has_tools for play in plays))


NOT_DETERMINISTIC = (
    "the environment is not deterministic: two plays with the same seed and the same turns differ,"
    " so the members of a group play different games; draw from the global `random` or a"
    " generator of `seed`, and keep nothing between episodes"
)


def faults_of(plays: Sequence[Play], *, penalty: float | None = 0.0) -> list[str]:
    """Return a sentence for each fault of an environment with which a run can still train.

    `penalty` is that of `rewarded_cut`; None: the rewards of the environment do not train.
    """
    faults = []
    failed = [play for play in plays if play.error is not None]
    if failed:
        reason, _ = Counter(play.error for play in failed).most_common(1)[0]
        faults.append(
            f"{len(failed)} of {len(plays)} episodes of nonsense failed, and such episodes never"
            f" train: {reason}; answer a turn in a wrong form with a StepResult"
        )
    if any(play.differs for play in plays):
        faults.append(NOT_DETERMINISTIC)
    cut = None if penalty is None else rewarded_cut(plays, penalty=penalty)
    if cut is not None:
        faults.append(cut.advice)
    return faults


def failures_table(plays: Sequence[Play]) -> str:
    """Return lines with the failures by kind of turn."""
    lines = [f"  {'each turn':<12} {'failed':<7} why"]
    for kind in dict.fromkeys(KINDS):
        of_kind = [play for play in plays if play.kind == kind]
        errors = Counter(play.error for play in of_kind if play.error is not None)
        if not of_kind:
            continue
        if errors:
            why, _ = errors.most_common(1)[0]
        else:
            why = f"reward {fmean(play.reward for play in of_kind):g}"
        count = f"{errors.total()} of {len(of_kind)}"
        lines.append(f"  {kind:<12} {count:<7} {why}")
    return "\n".join(lines)


def verdict_on(plays: Sequence[Play]) -> str:
    """Say whether episodes failed or differed, and how much nonsense is rewarded."""
    failed = [play for play in plays if play.error is not None]
    different = [play for play in plays if play.differs]
    rewards = [play.reward for play in plays if play.error is None]
    issues = []
    if failed:
        issues.append(f"{len(failed)} of {len(plays)} episodes failed: {failed[0].error}")
    if different:
        issues.append(f"{len(different)} of {len(plays)} episodes differ when they are repeated")
    if not issues:
        issues.append(f"nothing suspicious in {len(plays)} episodes of nonsense, played twice")
    if rewards:
        issues.append(f"the highest reward of nonsense is {max(rewards):g}")
    return "; ".join(issues)


def is_suspicious(plays: Sequence[Play]) -> bool:
    """Return True if two plays differ, the environment fails, or being cut pays."""
    return rewarded_cut(plays) is not None or any(
        play.differs or play.error is not None for play in plays
    )
