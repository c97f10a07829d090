"""Opens a model or a run, and samples answers to prompts, whole or as they grow."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dapo.config import Config
from dapo.core.errors import ConfigError, DataError
from dapo.core.text import quoted
from dapo.data.sources.rows import PROMPT_COLUMNS, prompted_problem, usual_column
from dapo.engines.engine import RolloutEngine, capabilities_of
from dapo.engines.request_checks import TEMPERATURES, is_temperature
from dapo.evaluation.evaluate import EngineSampler, Response
from dapo.evaluation.scores import EvaluationPlan
from dapo.runs.directory import RunDirectory
from dapo.start.evaluate import open_engine_sampler
from dapo.start.model_choice import ModelChoice, choose_model
from dapo.start.read import read_model_and_prompts
from dapo.start.resolve import device_for_inputs, resolve_engine, resolve_sampling
from dapo.training.state import Run as TrainingRun
from dapo.types import Problem, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def _is_count(value: float) -> bool:
    return isinstance(value, int) and value >= 1


@dataclass(frozen=True)
class SamplingOptions:
    """How answers are sampled."""

    samples: int = 1
    """Answers to each prompt."""
    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Samples only the most likely tokens, up to this sum of their probabilities."""
    max_new_tokens: int | None = None
    """The length limit; None: `rollout.max_response_tokens`."""
    seed: int = 0
    """Equal seeds give equal answers."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a number that cannot be sampled with."""
        count = "a whole number of at least 1"
        self._require("samples", count, _is_count)
        self._require("temperature", TEMPERATURES, is_temperature)
        self._require("top_p", "a number above 0 and up to 1", lambda value: 0 < value <= 1)
        if self.max_new_tokens is not None:
            self._require("max_new_tokens", count, _is_count)
        self._require("seed", "a whole number", lambda value: isinstance(value, int))

    def _require(self, name: str, expected: str, is_valid: Callable[[Any], bool]) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not is_valid(value):
            raise ConfigError(f"{name}: expected {expected}, got {quoted(value)}")

    def plan(self, config: Config, stop_ids: tuple[int, ...]) -> EvaluationPlan:
        """Return the settings for a model with these options and end tokens."""
        limit = self.max_new_tokens or config.rollout.max_response_tokens
        return EvaluationPlan(
            "generate", self.samples, self.temperature, self.top_p, limit, stop_ids, self.seed
        )


class OpenModel:
    """An engine with a model or a checkpoint of a run, which stays open between calls."""

    def __init__(self, choice: ModelChoice) -> None:
        """Load the model with its tokenizer. Raises ConfigError if there is no such model."""
        self.choice = choice
        config = resolve_sampling(_for_this_machine(choice.config))
        self._loaded, self.encoder = read_model_and_prompts(
            config, device_for_inputs(config, training=False)
        )
        self.config = resolve_engine(config, self._loaded.model)
        self._stack = ExitStack()
        self._sampler = self._open(choice.checkpoint)
        self._untrained: EngineSampler | None = None

    @classmethod
    def of_run(cls, path: str | Path) -> "OpenModel":
        """Open the newest checkpoint. Raises CheckpointError if the run has none yet."""
        return cls(choose_model(path))

    @property
    def positions(self) -> int | None:
        """The tokens of the model's context; None if its files name no number."""
        positions: int | None = getattr(self._loaded.model.config, "max_position_embeddings", None)
        return positions

    @property
    def engine(self) -> RolloutEngine:
        """The engine, for whoever submits its own requests; nothing else may use it meanwhile."""
        return self._sampler.engine

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        return self._loaded.tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a response."""
        return self._loaded.stop_ids

    def is_outdated(self, directory: RunDirectory) -> bool:
        return directory.checkpoints.newest_step() != self.choice.step

    def sampler(self, options: SamplingOptions, *, untrained: bool = False) -> EngineSampler:
        """Make a sampler.

        Args:
            options: how it samples.
            untrained: sample from the model with which the run began; it is opened on first use.
        """
        sampler = self._sampler
        if untrained and self.choice.checkpoint is not None:
            if self._untrained is None:
                self._untrained = self._open(None)
            sampler = self._untrained
        return sampler.with_plan(options.plan(self.config, self._loaded.stop_ids))

    def close(self) -> None:
        self._stack.close()

    def _open(self, checkpoint: Path | None) -> EngineSampler:
        """Open an engine with the weights of a checkpoint; None: those of the model's files."""
        with ExitStack() as stack:
            plan = SamplingOptions().plan(self.config, self._loaded.stop_ids)
            sampler = open_engine_sampler(
                self.config, self._loaded, self.encoder, checkpoint, plan, stack
            )
            self._stack.push(stack.pop_all())
        return sampler


def _for_this_machine(config: Config) -> Config:
    """Return the options of a run that was trained on GPUs so that a machine without one answers.

    A conversation takes no options that would say so.
    """
    if config.train.device != "cuda" or config.uses_ray or torch.cuda.is_available():
        return config
    engine = "native" if config.rollout.engine == "vllm" else config.rollout.engine
    # as many processes and sequences as a CPU takes
    native = config.rollout.native.model_copy(update={"slots": None})
    config = config.changed("rollout", engine=engine, engines=0, native=native)
    return config.changed("train", device="auto")


def live_sampler(run: TrainingRun, options: SamplingOptions) -> EngineSampler:
    """Return a sampler of a run that trains in this process, with the weights after its last step.

    Nothing may be in flight in the run's engine: use it where an evaluation may take place.
    """
    run.sync_engine()
    plan = options.plan(run.config, run.sampling.plan.stop_ids)
    engine = run.sampling.engine
    turns = capabilities_of(engine).turns  # answers are single responses, as those of a checkpoint
    return EngineSampler(turns or engine, run.sampling.encoder, plan)


def answers_of(
    sampler: EngineSampler, prompt: Any, *, check: Callable[[], None] = lambda: None
) -> Any:
    """Sample answers to one or several prompts, or rows; call `check()` before each poll.

    Raises DataError for a row without a question.
    """
    if isinstance(prompt, Mapping):
        prompt = _question_of(prompt)
    elif not isinstance(prompt, str):
        prompt = [_question_of(item) if _is_row(item) else item for item in prompt]
    is_one = _is_one_prompt(prompt)
    prompts: list[Prompt] = [prompt] if is_one else list(prompt)
    if any(isinstance(text, str) and not text.strip() for text in prompts):
        raise DataError("prompt: a question is empty; expected a text or messages")
    samples = sampler.plan.samples_per_problem
    problems = [prompted_problem(text) for text in prompts]
    answers: list[list[str]] = [[""] * samples for _ in prompts]
    for index, i, response in responses_to(sampler, problems, check=check):
        answers[index][i] = response.text
    texts = [answer[0] if samples == 1 else answer for answer in answers]
    return texts[0] if is_one else texts


def responses_to(
    sampler: EngineSampler,
    problems: Sequence[Problem],
    *,
    check: Callable[[], None] = lambda: None,
    partial: bool = False,
) -> Iterator[tuple[int, int, Response]]:
    """Yield the responses to problems with the indices of problem and sample, as they end.

    Args:
        sampler: samples them; nothing else may be in flight in its engine. If the iteration ends
            early, by an error or by `close()`, nothing of it stays there.
        problems: the prompts.
        check: called before each poll; its error ends the iteration.
        partial: also yield the responses in flight after each poll, without a finish, as far as
            their text can no longer change.
    """
    num_pending = 0
    try:
        for index, problem in enumerate(problems):
            sampler.submit(index, problem)
            num_pending += sampler.plan.samples_per_problem
        while num_pending:
            check()
            responses = sampler.poll()
            num_pending -= len(responses)
            yield from responses
            for index, i, response in sampler.partial() if partial else ():
                yield index, i, replace(response, text=settled(response.text))
    except BaseException:
        sampler.abort()  # the engine samples for others, too
        raise


def settled(text: str) -> str:
    """Return a growing text without its end that the next token may change: half a character."""
    return text.rstrip("\ufffd")


def _is_one_prompt(prompt: str | Sequence[Any]) -> bool:
    if isinstance(prompt, str):
        return True
    return bool(prompt) and all(isinstance(message, Mapping) for message in prompt)


def _is_row(value: Any) -> bool:
    """Return True for a row of data, which is no message."""
    return isinstance(value, Mapping) and "role" not in value


def _question_of(row: Mapping[str, Any]) -> Any:
    if "role" in row:
        return [row]
    column = usual_column(row, PROMPT_COLUMNS)
    if column is not None:
        return row[column]
    raise DataError(
        f"prompt: a row has no column {', '.join(PROMPT_COLUMNS[:-1])} or {PROMPT_COLUMNS[-1]}; columns"
        f" here: {', '.join(map(str, row))}"
    )
