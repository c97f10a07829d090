"""The controller alone: `train()` with an engine, verifiers and a trainer that take no part of its
time.
"""

import gc
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.memory import current_rss_bytes, peak_rss_bytes
from benchmarks.scripted_engine import ScriptedEngine
from benchmarks.simulated_trainer import SimulatedLauncher, TimedTrainer
from benchmarks.simulation_fakes import (
    BETWEEN,
    DESCRIBING,
    OTHERS,
    PHASES,
    Clock,
    Judge,
    LengthDistribution,
    Link,
    SharedRows,
    Texts,
    TimedEncoder,
)
from dapo.config import Config, dump_config
from dapo.config.options import GPU_OVERSAMPLING
from dapo.core.rng import keyed_seed
from dapo.data.byte_level import byte_alphabet
from dapo.data.stream import ProblemStream
from dapo.engines.checked import CheckedEngine
from dapo.policy.builtin_models import smollm2_directory
from dapo.runs.directory import RunDirectory
from dapo.runs.metrics_file import JsonlSink, read_metrics
from dapo.runs.sinks import Tracker
from dapo.sampling.batch import Sampling, sampling_plan
from dapo.sampling.dynamic_sampling import DynamicSampler
from dapo.sampling.samples import shaped_reward
from dapo.training.state import Run
from dapo.training.train import train
from dapo.types import Problem

PROBLEMS = 17_000
WORDS_PER_PROMPT = 120
TOKENS_PER_POLL = 512
SLOTS = 4096


class StepRecorder:
    """A display for the tracker that records the clock at the end of each step."""

    def __init__(
        self, clock: Clock, link: Link, moved: Mapping[str, int], trainer: TimedTrainer
    ) -> None:
        self._clock = clock
        self._link = link
        self._moved = moved
        self._trainer = trainer
        self.steps: list[dict[str, Any]] = []
        self.messages: list[str] = []

    def phase(self, name: str, done: int = 0, total: int = 0, note: str = "") -> None:
        """Book the time from here on under this phase."""
        self._clock.now(
            DESCRIBING if name == "generate" and 0 < total == done else PHASES.get(name, BETWEEN)
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step is done."""
        own = self._clock.own()
        self.steps.append(
            {
                "step": step,
                "own": own,
                "after_last": own - sum(self._link.spent_at_last.values()),
                "until_scored": {
                    name: seconds - self._link.spent_at_last.get(name, 0.0)
                    for name, seconds in self._trainer.spent_when_scored.items()
                },
                "until_first_logprob": self._trainer.ready_at - self._link.last_at,
                "until_first_pass": (
                    self._trainer.own_when_sent - sum(self._link.spent_at_last.values())
                ),
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
    shared_rows: bool = False

    def run(self) -> dict[str, Any]:
        """Train for `num_steps`; figures of each step, and of the process."""
        clock = Clock()
        moved = defaultdict(int)
        with (
            closing(SimulatedLauncher(self.folder / "logs", moved)) as launcher,
            closing(TimedTrainer(self.config, launcher, clock)) as trainer,
        ):
            return self._run(clock, moved, trainer)

    def _run(self, clock: Clock, moved: dict[str, int], trainer: TimedTrainer) -> dict[str, Any]:
        rows = SharedRows() if self.shared_rows else None
        stop_id = int(self.tokenizer.eos_token_id)
        texts = Texts(self.tokenizer, stop_id)
        distribution = LengthDistribution(
            self.config.rollout.max_response_tokens, self.median_tokens
        )
        engine = ScriptedEngine(
            lambda request: texts.response(
                request.seed, distribution.length(request.seed), distribution.limit
            ),
            delay=lambda request: -(-distribution.length(request.seed) // TOKENS_PER_POLL),
            slots=SLOTS,
            logprob=texts.logprobs_of,
        )
        link = Link(engine, clock, moved, rows)
        recorder = StepRecorder(clock, link, moved, trainer)
        run = RunDirectory.create(self.folder / "run", dump_config(self.config), {})
        encoder = TimedEncoder(self.tokenizer, self.config.data)
        encoder.clock = clock
        encoder.shared_rows = rows
        problems, _ = encoder.split_by_length(self._problems(texts))  # as a run begins
        training_run = Run(
            config=self.config,
            sampling=Sampling(
                stream=ProblemStream(problems, seed=self.config.train.seed),
                engine=CheckedEngine(link, vocabulary=len(self.tokenizer)),
                judge=Judge(clock, moved),
                sampler=DynamicSampler(
                    prompts_per_step=self.config.rollout.prompts_per_step,
                    max_groups_per_step=self.config.max_groups_per_step,
                ),
                encoder=encoder,
                plan=sampling_plan(self.config.rollout, (stop_id,), seed=self.config.train.seed),
                reward=partial(shaped_reward, config=self.config),
                oversampling=GPU_OVERSAMPLING,
                slots=SLOTS,
            ),
            policy=trainer,
            tracker=Tracker([JsonlSink(run.metrics)], recorder),
            directory=run,
        )
        before = current_rss_bytes()
        ranks_before, _ = trainer.rss_bytes()
        recorder.log(0, {})
        training_run.state.pending_metrics = None
        gc.freeze()  # as `dapo train` does
        train(training_run)
        training_run.tracker.close()
        logged = [row for row in read_metrics(run.metrics) if row["step"]]
        steps = [
            step_figures(
                recorder.steps[i],
                recorder.steps[i + 1],
                row,
                run.rollouts(row["step"]).stat().st_size,
            )
            for i, row in enumerate(logged)
        ]
        return {
            "steps": steps,
            "start_bytes": before,
            "peak_bytes": peak_rss_bytes(),
            "ranks_start_bytes": ranks_before,
            "ranks_peak_bytes": trainer.rss_bytes()[1],
        }

    def _problems(self, texts: Texts) -> list[Problem]:
        return [
            Problem(
                str(i),
                texts.words(self.tokenizer, keyed_seed("prompt", i), WORDS_PER_PROMPT),
                str(i),
                "simulated",
            )
            for i in range(PROBLEMS)
        ]


def step_figures(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    metrics: Mapping[str, Any],
    table_bytes: int,
) -> dict[str, Any]:
    """One step: processor seconds of the controller by part, those after the last response, bytes,
    tokens.
    """
    spent = {
        name: seconds - before["spent"].get(name, 0.0) for name, seconds in after["spent"].items()
    }
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
        "until_first_logprob_s": after["until_first_logprob"],
        "until_first_pass_s": after["until_first_pass"],
        "until_scored_by_part_s": {
            name: seconds for name, seconds in after["until_scored"].items() if seconds > 0
        },
        "by_part_s": spent,
        "background_s": after["process"] - before["process"],
        "waited_for_table_s": metrics["time/write_rollouts_s"],
        "others_s": others,
        "table_bytes": table_bytes,
        "moved_bytes": {
            name: count - before["moved"].get(name, 0) for name, count in after["moved"].items()
        },
        "rss_bytes": after["rss_bytes"],
    }


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level vocabulary without merges: one token per byte, and an end token."""
    vocabulary = byte_alphabet() | {"<eos>": 256}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False
    )


def real_tokenizer() -> Any:
    """SmolLM2's, a byte-level vocabulary of 49,152."""
    return AutoTokenizer.from_pretrained(smollm2_directory())
