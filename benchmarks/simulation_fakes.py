"""Fakes of the engines and verifiers that a controller talks to, each behind a link that really
moves bytes.

What goes to and from them is pickled on the way, as it would be between processes, so bytes are
counted exactly and the controller's part of that work is in its time. What the other side does
(making tokens, verdicts, reading a message) is clocked apart. The kernel's copies through sockets
are in neither.
"""

import pickle
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.scripted_engine import ScriptedEngine
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.data.prompts import PromptEncoder
from dapo.engines.engine import WeightSource
from dapo.rewards.combine import RewardSpec
from dapo.rewards.pool import make_tasks
from dapo.types import Finish, Generation, GenerationRequest, Problem, Verdict

POOL_TOKENS = 2**22
"""Sampled once; a response is a copy of a slice of it."""
RARE = 2e-5
"""The share of tokens that are not ASCII: then about one response in ten makes Python keep two
bytes per character.
"""
KEEP_RATE = 1 / 3
"""The probability that a problem carries a signal (Eq. 11)."""
RESPONSES_PER_MESSAGE = 16
"""Number of responses in one message of an engine."""
BETWEEN = "metrics, log, checkpoint"
PHASES = {
    "generate": "collecting: decisions, checks of answers",
    "load_weights": BETWEEN,
    "old_logprobs": BETWEEN,
    "write_rollouts": BETWEEN,
    "update": "minibatches",
    "save": BETWEEN,
}
"""The controller's name for a phase, by the name that the display shows."""
DESCRIBING = "rewards, advantages, metrics of the batch, rows of the table"
ENGINE = "engine's own"
VERIFIERS = "verifiers' own"
OTHERS = (ENGINE, VERIFIERS)
PROTOCOL = pickle.HIGHEST_PROTOCOL


class Clock:
    """Processor seconds of this thread by name; what runs inside of something else counts for
    itself alone.

    The thread computes all the time, so on a machine with nothing else to do these are the seconds
    that pass; and what else the machine does is not in them.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._stack = [BETWEEN]
        self._mark = time.thread_time()

    def now(self, name: str) -> None:
        """Charge time to this name from now on, until another is given."""
        self._charge()
        self._stack[0] = name

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Charge the time in here to `name`."""
        self._charge()
        self._stack.append(name)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def own(self) -> float:
        """The controller's seconds so far."""
        return sum(self.by_name().values())

    def by_name(self) -> dict[str, float]:
        """The seconds so far by name, those of others left out."""
        self._charge()
        return {name: seconds for name, seconds in self.spent.items() if name not in OTHERS}

    def _charge(self) -> None:
        now = time.thread_time()
        self.spent[self._stack[-1]] += now - self._mark
        self._mark = now


@dataclass(frozen=True)
class LengthDistribution:
    """How long responses are: log-normal, cut at the limit, keyed by the request's seed."""

    limit: int
    median: float
    sigma: float = 0.9

    def length(self, seed: int) -> int:
        """The length of the response with this seed, in tokens."""
        uniform = float(keyed_uniforms(keyed_seed("length", seed), 1)[0])
        return max(
            1,
            min(
                self.limit,
                round(self.median * np.exp(self.sigma * NormalDist().inv_cdf(max(uniform, 1e-12)))),
            ),
        )


class Texts:
    """Random tokens of a tokenizer, and log-probabilities for them."""

    def __init__(self, tokenizer: Any, stop_id: int, *, pool_tokens: int = POOL_TOKENS) -> None:
        random = np.random.Generator(np.random.Philox(key=keyed_seed("texts")))
        texts = tokenizer.batch_decode(
            [[i] for i in range(len(tokenizer))], skip_special_tokens=True
        )
        ascii_ids = np.array(
            [i for i, text in enumerate(texts) if text and text.isascii()], np.int32
        )
        rare_ids = np.array(
            [i for i, text in enumerate(texts) if text and not text.isascii()], np.int32
        )
        weights = 1 / (np.arange(len(ascii_ids)) + 10)  # frequent tokens have small ids
        self.ids = random.choice(ascii_ids, pool_tokens, p=weights / weights.sum())
        rare = random.random(pool_tokens) < RARE
        if len(rare_ids):
            self.ids[rare] = random.choice(rare_ids, int(rare.sum()))
        self.logprobs = -random.exponential(0.5, pool_tokens).astype(np.float32)
        self.stop_id = stop_id

    def response(self, seed: int, length: int, limit: int) -> tuple["array[int]", Finish]:
        """A response of `length` tokens, the last of which is the end token unless the limit cuts
        it off.
        """
        ids = self._cut(self.ids, seed, length)
        if length < limit:
            ids[-1] = self.stop_id
            return array("i", ids.tobytes()), "stop"
        return array("i", ids.tobytes()), "length"

    def logprobs_of(self, count: int) -> "array[float]":
        """A slice of `count` log-probabilities."""
        return array("f", self._cut(self.logprobs, count, count).tobytes())

    def words(self, tokenizer: Any, seed: int, count: int) -> str:
        """A text of about so many tokens."""
        return str(tokenizer.decode(self._cut(self.ids, seed, count).tolist()))

    def _cut(self, pool: NDArray[Any], seed: int, length: int) -> NDArray[Any]:
        start = seed % max(1, len(pool) - length)
        return np.resize(pool[start : start + length], length)  # a copy


class SharedRows:
    """One row of each length, in place of all rows of that length: so that ten times the paper's
    size fits in memory.

    What is made of a response before (bytes, text, jobs) is made of its own tokens; afterwards only
    the length counts.
    """

    def __init__(self) -> None:
        self._generations: dict[int, Generation] = {}
        self._texts: dict[int, str] = {}

    def generation(self, generation: Generation) -> Generation:
        """The same with shared rows."""
        first = self._generations.setdefault(len(generation.token_ids), generation)
        return replace(generation, token_ids=first.token_ids, logprobs=first.logprobs)

    def text(self, ids: Sequence[int], text: str) -> str:
        """The text of the first response of this length."""
        return self._texts.setdefault(len(ids), text)


class Link:
    """An engine in another process: calls and answers go through pickle, and their bytes are
    counted.
    """

    def __init__(
        self,
        engine: ScriptedEngine,
        clock: Clock,
        moved: dict[str, int],
        shared_rows: SharedRows | None,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._moved = moved
        self._shared_rows = shared_rows
        self.spent_at_last: dict[str, float] = {}
        """By name, when responses last came: from here on the controller is waited for."""
        self.last_at = 0.0
        """When that was, by `time.monotonic`."""

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Only the version: the bytes of real weights are arithmetic."""
        with self._clock.inside(ENGINE):
            self._engine.load_weights(weights, version)

    def drop_weights(self) -> None:
        """Pass it on."""
        self._engine.drop_weights()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        with self._clock.inside("requests to engines"):
            message = pickle.dumps(list(requests), PROTOCOL)
            self._moved["controller to engines"] += len(message)
            with self._clock.inside(ENGINE):
                self._engine.submit(pickle.loads(message))

    def poll(self) -> list[Generation]:
        return self._received(self._engine.poll, note=True)

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        return self._received(lambda: self._engine.abort(request_ids))

    def close(self) -> None:
        self._engine.close()

    def _received(
        self, call: Callable[[], list[Generation]], *, note: bool = False
    ) -> list[Generation]:
        with self._clock.inside(ENGINE):
            found = call()
            messages = [
                pickle.dumps(found[i : i + RESPONSES_PER_MESSAGE], PROTOCOL)
                for i in range(0, len(found), RESPONSES_PER_MESSAGE)
            ]
            del found
        if note and messages:
            self.spent_at_last = self._clock.by_name()
            self.last_at = time.monotonic()
        with self._clock.inside("responses from engines"):
            self._moved["engines to controller"] += sum(map(len, messages))
            received = [generation for message in messages for generation in pickle.loads(message)]
        if self._shared_rows is None:
            return received
        with self._clock.inside(ENGINE):
            return [self._shared_rows.generation(generation) for generation in received]


def num_right(number: int, count: int, *, keep_rate: float = KEEP_RATE) -> int:
    """Return how many of `count` responses to a problem are right, drawn from its number.

    Some are with the probability `keep_rate`, all and none with half of the rest.
    """
    signal, share = keyed_uniforms(keyed_seed("signal", number), 2)
    if signal < keep_rate:
        return 1 + int(share * (count - 1))
    return count if share < 0.5 else 0


class Judge:
    """Verifiers in other processes: a problem carries a signal with the probability KEEP_RATE, the
    others are all right or all wrong.
    """

    def __init__(self, clock: Clock, moved: dict[str, int]) -> None:
        self._clock = clock
        self._moved = moved
        self._spec = RewardSpec.of("math")

    def submit(
        self, problem: Problem, responses: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> "Future[tuple[Verdict, ...]]":
        """The jobs are made as for real workers, and thrown away."""
        with self._clock.inside("responses to verifiers"):
            _, tasks = make_tasks(
                self._spec, {"response": [0], "group": []}, problem, responses, token_ids
            )
            self._moved["controller to verifiers"] += sum(len(task.request) for task in tasks)
        with self._clock.inside(VERIFIERS):
            count = len(responses)
            right = num_right(int(problem.id), count)
            future: Future[tuple[Verdict, ...]] = Future()
            future.set_result(
                tuple(Verdict(i < right, 1.0 if i < right else -1.0) for i in range(count))
            )
            return future


class TimedEncoder(PromptEncoder):
    """The real one, clocked."""

    clock: Clock
    shared_rows: SharedRows | None = None

    def encode(self, problem: Problem) -> tuple[int, ...]:
        with self.clock.inside("prompts to tokens"):
            return super().encode(problem)

    def decode(self, ids: Sequence[int]) -> str:
        with self.clock.inside("responses to text"):
            text = super().decode(ids)
        return text if self.shared_rows is None else self.shared_rows.text(ids, text)
