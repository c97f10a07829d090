"""The controller alone: `train()` with an engine, verifiers and a trainer that take no part of its time.

What goes to and from them is pickled on the way, as it would be between processes, so bytes are counted exactly and the
controller's part of that work is in its time. What the other side does (making tokens, verdicts, reading a message) is
clocked apart. Kernel copies through sockets are in neither.
"""

import pickle
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.memory import current_rss_bytes, peak_rss_bytes
from dapo.config import Config, dump_config
from dapo.data.prompts import PromptEncoder
from dapo.data.stream import ProblemStream
from dapo.engines.engine import WeightSource
from dapo.engines.inspection import InspectedEngine
from dapo.engines.scripted import ScriptedEngine
from dapo.keyed import keyed_seed, keyed_uniforms
from dapo.packed import Packed, array_of
from dapo.parts import Parts, Progress
from dapo.policy.aliases import smollm2_directory
from dapo.rewards.combine import RewardSpec
from dapo.rewards.jobs import jobs_of
from dapo.rollout import DynamicSampler, sampling_plan
from dapo.run import RunDirectory
from dapo.telemetry.sinks import JsonlSink, read_metrics
from dapo.telemetry.tracker import Tracker
from dapo.train import train
from dapo.types import Finish, Generation, GenerationRequest, Problem, Sample, Verdict

POOL_TOKENS = 2**22
"""Drawn once; a response is a copy of some place in it."""
RARE = 2e-5
"""The share of tokens that are not ASCII: then about one response in ten makes Python keep two bytes a character."""
PROBLEMS = 17_000
WORDS_A_PROMPT = 120
TOKENS_A_POLL = 512
RESPONSES_A_MESSAGE = 16
"""What one of many engines has finished at a time."""
SAMPLES_A_MESSAGE = 8
"""What each of 64 trainer ranks gets of a minibatch of 512."""
SLOTS = 4096
BETWEEN = "metrics, log, checkpoint"
PHASES = {
    "generate": "collecting: decisions, checks of answers",
    "old log-probabilities": "gap between sampler and trainer",
    "update": "minibatches",
    "save": BETWEEN,
}
"""What a step's phase is for the controller itself, by the name that the display is told."""
DESCRIBING = "rewards, advantages, metrics of the batch, rows of the table"
ENGINE, VERIFIERS, TRAINER = "engine's own", "verifiers' own", "trainer's own"
OTHERS = (ENGINE, VERIFIERS, TRAINER)
PROTOCOL = pickle.HIGHEST_PROTOCOL


class Clock:
    """Processor seconds of this thread by name; what runs inside of something else counts for itself alone.

    The thread computes all the time, so on a machine with nothing else to do these are the seconds that pass; and what
    else the machine does is not in them.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._stack = [BETWEEN]
        self._mark = time.thread_time()

    def now(self, name: str) -> None:
        """What is not booked under another name goes to this one from here on."""
        self._book()
        self._stack[0] = name

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Book the time in here under `name`."""
        self._book()
        self._stack.append(name)
        try:
            yield
        finally:
            self._book()
            self._stack.pop()

    def own(self) -> float:
        """The controller's seconds so far."""
        self._book()
        return sum(seconds for name, seconds in self.spent.items() if name not in OTHERS)

    def _book(self) -> None:
        now = time.thread_time()
        self.spent[self._stack[-1]] += now - self._mark
        self._mark = now


@dataclass(frozen=True)
class Law:
    """How long responses are: log-normal, cut at the limit, keyed by the request's seed."""

    limit: int
    median: float
    sigma: float = 0.9

    def length(self, seed: int) -> int:
        """Of the response that a seed stands for."""
        draw = float(keyed_uniforms(keyed_seed("length", seed), 1)[0])
        return max(1, min(self.limit, round(self.median * np.exp(self.sigma * NormalDist().inv_cdf(max(draw, 1e-12))))))


class Texts:
    """Random tokens of a tokenizer, and log-probabilities beside them."""

    def __init__(self, tokenizer: Any, stop_id: int, *, pool_tokens: int = POOL_TOKENS) -> None:
        random = np.random.Generator(np.random.Philox(key=keyed_seed("texts")))
        pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))], skip_special_tokens=True)
        ascii_ids = np.array([i for i, piece in enumerate(pieces) if piece and piece.isascii()], np.int32)
        rare_ids = np.array([i for i, piece in enumerate(pieces) if piece and not piece.isascii()], np.int32)
        weights = 1 / (np.arange(len(ascii_ids)) + 10)  # frequent tokens have small ids
        self.ids = random.choice(ascii_ids, pool_tokens, p=weights / weights.sum())
        rare = random.random(pool_tokens) < RARE
        if len(rare_ids):
            self.ids[rare] = random.choice(rare_ids, int(rare.sum()))
        self.logprobs = -random.exponential(0.5, pool_tokens).astype(np.float32)
        self.stop_id = stop_id

    def response(self, seed: int, length: int, limit: int) -> tuple["Packed[int]", Finish]:
        """So many tokens, the last of them the end token unless the limit cuts it off."""
        ids = self._cut(self.ids, seed, length)
        if length < limit:
            ids[-1] = self.stop_id
            return Packed(ids), "stop"
        return Packed(ids), "length"

    def logprobs_of(self, count: int) -> "Packed[float]":
        """So many."""
        return Packed(self._cut(self.logprobs, count, count))

    def words(self, tokenizer: Any, seed: int, count: int) -> str:
        """A text of about so many tokens."""
        return str(tokenizer.decode(self._cut(self.ids, seed, count).tolist()))

    def _cut(self, pool: NDArray[Any], seed: int, length: int) -> NDArray[Any]:
        start = seed % max(1, len(pool) - length)
        return np.resize(pool[start : start + length], length)  # a copy


class Link:
    """An engine in another process: what is said goes through pickle, and is counted."""

    def __init__(self, engine: ScriptedEngine, clock: Clock, moved: dict[str, int]) -> None:
        self._engine, self._clock, self._moved = engine, clock, moved
        self.spent_at_last = 0.0
        """By the controller when responses last came: from here on it is waited for."""

    def load_weights(self, weights: WeightSource, version: int) -> None:
        """Only the version: the bytes of real weights are arithmetic."""
        with self._clock.inside(ENGINE):
            self._engine.load_weights(weights, version)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """As an engine does."""
        with self._clock.inside("requests to engines"):
            message = pickle.dumps(list(requests), PROTOCOL)
            self._moved["controller to engines"] += len(message)
            with self._clock.inside(ENGINE):
                self._engine.submit(pickle.loads(message))

    def poll(self) -> list[Generation]:
        """As an engine does."""
        return self._received(self._engine.poll, note=True)

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        """As an engine does."""
        return self._received(lambda: self._engine.abort(request_ids))

    def close(self) -> None:
        """As an engine does."""
        self._engine.close()

    def _received(self, call: Callable[[], list[Generation]], *, note: bool = False) -> list[Generation]:
        with self._clock.inside(ENGINE):
            found = call()
            messages = [
                pickle.dumps(found[i : i + RESPONSES_A_MESSAGE], PROTOCOL)
                for i in range(0, len(found), RESPONSES_A_MESSAGE)
            ]
            del found
        if note and messages:
            self.spent_at_last = self._clock.own()
        with self._clock.inside("responses from engines"):
            self._moved["engines to controller"] += sum(map(len, messages))
            return [generation for message in messages for generation in pickle.loads(message)]


class Judge:
    """Verifiers in other processes: a problem of three carries a signal, the others are all right or all wrong."""

    def __init__(self, clock: Clock, moved: dict[str, int]) -> None:
        self._clock, self._moved = clock, moved
        self._spec = RewardSpec.of("math")

    def submit(
        self, problem: Problem, responses: Sequence[str], token_ids: Sequence[Sequence[int]]
    ) -> "Future[tuple[Verdict, ...]]":
        """The jobs are made as for real workers, and thrown away."""
        with self._clock.inside("responses to verifiers"):
            _, jobs = jobs_of(self._spec, {"response": [0], "group": []}, problem, responses, token_ids)
            self._moved["controller to verifiers"] += sum(len(job.request) for job in jobs)
        with self._clock.inside(VERIFIERS):
            number, count = int(problem.id), len(responses)
            right = {0: 1 + number % (count - 1), 1: 0, 2: count}[number % 3]
            future: Future[tuple[Verdict, ...]] = Future()
            future.set_result(tuple(Verdict(i < right, 1.0 if i < right else -1.0) for i in range(count)))
            return future


class NoPolicy:
    """A trainer in other processes that trains nothing."""

    skipped_in_a_row = 0

    def __init__(self, clock: Clock, moved: dict[str, int]) -> None:
        self._clock, self._moved = clock, moved

    def weights(self) -> WeightSource:
        """None to speak of."""
        return self  # type: ignore[return-value]

    def named_tensors(self) -> Iterator[Any]:
        """None."""
        return iter(())

    def record_old_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """The engine's come back as the policy's."""
        done: list[Sample] = []
        for start in range(0, len(samples), SAMPLES_A_MESSAGE):
            part = samples[start : start + SAMPLES_A_MESSAGE]
            message = self._sent(part, "old log-probabilities")
            with self._clock.inside(TRAINER):
                answer = pickle.dumps(
                    [Packed(array_of(sample.engine_logprobs).copy()) for sample in pickle.loads(message)], PROTOCOL
                )
            with self._clock.inside("old log-probabilities from the trainer"):
                self._moved["trainer to controller"] += len(answer)
                rows = pickle.loads(answer)
                done += [replace(sample, old_logprobs=row) for sample, row in zip(part, rows, strict=True)]
        return done

    def update(self, minibatch: Sequence[Sample], *, step: int) -> dict[str, float]:
        """Nothing changes."""
        for start in range(0, len(minibatch), SAMPLES_A_MESSAGE):
            self._sent(minibatch[start : start + SAMPLES_A_MESSAGE], "updates")
        names = ("loss/policy", "optim/update_tokens", "optim/grad_norm", "optim/lr", "optim/skipped")
        return dict.fromkeys(names, 0.0)

    def save(self, directory: Path) -> None:
        """No weights."""

    def load(self, directory: Path) -> None:
        """No weights."""

    def snapshot(self) -> Callable[[Path], None]:
        """No weights."""
        return self.save

    def _sent(self, samples: Sequence[Sample], purpose: str) -> bytes:
        with self._clock.inside(f"samples to the trainer, {purpose}"):
            message = pickle.dumps(list(samples), PROTOCOL)
            self._moved["controller to trainer"] += len(message)
            return message


class TimedEncoder(PromptEncoder):
    """The real one, clocked."""

    clock: Clock

    def encode(self, problem: Problem) -> tuple[int, ...]:
        """As it is."""
        with self.clock.inside("prompts to tokens"):
            return super().encode(problem)

    def decode(self, ids: Sequence[int]) -> str:
        """As it is."""
        with self.clock.inside("responses to text"):
            return super().decode(ids)


class Looks:
    """A tracker's display that notes what stands on the clock when a step is done."""

    def __init__(self, clock: Clock, link: Link, moved: Mapping[str, int]) -> None:
        self._clock, self._link, self._moved = clock, link, moved
        self.steps: list[dict[str, Any]] = []
        self.messages: list[str] = []

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """The clock is told where the controller is."""
        self._clock.now(DESCRIBING if name == "generate" and 0 < total == done else PHASES[name])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done."""
        own = self._clock.own()
        self.steps.append(
            {
                "step": step,
                "own": own,
                "after_last": own - self._link.spent_at_last,
                "process": time.process_time() - time.thread_time(),
                "spent": dict(self._clock.spent),
                "moved": dict(self._moved),
                "rss_bytes": current_rss_bytes(),
            }
        )
        self._clock.now(BETWEEN)

    def message(self, text: str) -> None:
        """Kept."""
        self.messages.append(text)

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Simulation:
    """One run of the controller."""

    config: Config
    folder: Path
    tokenizer: Any
    median_tokens: float

    def run(self) -> dict[str, Any]:
        """Train for `num_steps`; figures of each step, and of the process."""
        clock, moved = Clock(), defaultdict(int)
        stop_id = int(self.tokenizer.eos_token_id)
        texts = Texts(self.tokenizer, stop_id)
        law = Law(self.config.rollout.max_response_tokens, self.median_tokens)
        engine = ScriptedEngine(
            lambda request: texts.response(request.seed, law.length(request.seed), law.limit),
            delay=lambda request: -(-law.length(request.seed) // TOKENS_A_POLL),
            slots=SLOTS,
            logprob=texts.logprobs_of,
        )
        link = Link(engine, clock, moved)
        looks = Looks(clock, link, moved)
        run = RunDirectory.create(self.folder / "run", dump_config(self.config), {})
        encoder = TimedEncoder(self.tokenizer, max_prompt_tokens=self.config.data.max_prompt_tokens)
        encoder.clock = clock
        problems, _ = encoder.split_by_length(self._problems(texts))  # as a run begins
        parts = Parts(
            stream=ProblemStream(problems, seed=self.config.train.seed),
            engine=InspectedEngine(link, vocabulary=len(self.tokenizer)),
            judge=Judge(clock, moved),
            policy=NoPolicy(clock, moved),
            sampler=DynamicSampler(
                prompts_per_step=self.config.rollout.prompts_per_step,
                max_groups_per_step=self.config.max_groups_per_step,
            ),
            encoder=encoder,
            plan=sampling_plan(self.config, (stop_id,)),
            tracker=Tracker([JsonlSink(run.metrics)], looks),
            run=run,
        )
        before = current_rss_bytes()
        looks.log(0, {})
        train(self.config, parts, Progress(unlogged=None))
        parts.tracker.close()
        logged = [row for row in read_metrics(run.metrics) if row["step"]]
        steps = [
            step_figures(looks.steps[i], looks.steps[i + 1], row, run.rollouts(row["step"]).stat().st_size)
            for i, row in enumerate(logged)
        ]
        return {"steps": steps, "start_bytes": before, "peak_bytes": peak_rss_bytes()}

    def _problems(self, texts: Texts) -> list[Problem]:
        return [
            Problem(str(i), texts.words(self.tokenizer, keyed_seed("prompt", i), WORDS_A_PROMPT), str(i), "simulated")
            for i in range(PROBLEMS)
        ]


def step_figures(
    before: Mapping[str, Any], after: Mapping[str, Any], metrics: Mapping[str, Any], table_bytes: int
) -> dict[str, Any]:
    """One step: processor seconds of the controller by part, those after the last response, bytes, tokens."""
    spent = {name: seconds - before["spent"].get(name, 0.0) for name, seconds in after["spent"].items()}
    others = {name: spent.pop(name, 0.0) for name in OTHERS}
    return {
        "groups": int(metrics["rollout/groups_generated"]),
        "tokens": int(metrics["rollout/tokens_generated"]),
        "tokens_trained": int(metrics["rollout/tokens_in_minibatches"]),
        "keep_rate": metrics["rollout/keep_rate"],
        "response_tokens_mean": metrics["rollout/response_tokens_mean"],
        "truncated": metrics["rollout/truncated_fraction"],
        "controller_s": after["own"] - before["own"],
        "after_last_response_s": after["after_last"],
        "by_part_s": spent,
        "beside_s": after["process"] - before["process"],
        "waited_for_table_s": metrics["time/write_rollouts_s"],
        "others_s": others,
        "table_bytes": table_bytes,
        "moved_bytes": {name: count - before["moved"].get(name, 0) for name, count in after["moved"].items()},
        "rss_bytes": after["rss_bytes"],
    }


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level vocabulary without merges: one token a byte, and an end token."""
    from dapo.data.detokenize import byte_alphabet

    vocabulary = dict(byte_alphabet()) | {"<eos>": 256}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False)


def real_tokenizer() -> Any:
    """SmolLM2's, a byte-level vocabulary of 49,152."""
    return AutoTokenizer.from_pretrained(smollm2_directory())
