"""Samples answers from the newest checkpoint of a run."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from dapo.config import Config
from dapo.core.errors import CheckpointError
from dapo.core.terminal import warn
from dapo.data.sources.rows import problem_id
from dapo.engines.engine import capabilities_of
from dapo.evaluation.evaluate import EngineSampler, Response
from dapo.evaluation.scores import EvaluationPlan
from dapo.runs.checkpoints import step_of
from dapo.runs.directory import RunDirectory
from dapo.runs.stored_config import load_run_config
from dapo.start.evaluate import open_engine_sampler
from dapo.start.read import read_model_and_prompts
from dapo.start.resolve import device_for_inputs, resolve_auto, resolve_engine
from dapo.training.state import Run as TrainingRun
from dapo.types import Problem, Prompt


class OpenModel:
    """An engine with the newest checkpoint of a run, which stays open between calls."""

    def __init__(self, directory: RunDirectory) -> None:
        """Load it. Raises CheckpointError if the run has no checkpoint yet."""
        checkpoint = directory.checkpoints.latest(warn=warn)
        if checkpoint is None:
            raise CheckpointError(
                f"{directory.path} has no checkpoint yet: its model is still the initial one"
            )
        self.step = step_of(checkpoint)
        config = resolve_auto(load_run_config(directory), training=False)
        self._loaded, self.encoder = read_model_and_prompts(
            config, device_for_inputs(config, training=False)
        )
        self.config = resolve_engine(config, self._loaded.model)
        with ExitStack() as stack:
            plan = generation_plan(self.config, self._loaded.stop_ids, 1, 1.0, None, 0)
            self._sampler = open_engine_sampler(
                self.config, self._loaded, self.encoder, checkpoint, plan, stack
            )
            self._stack = stack.pop_all()

    def is_outdated(self, directory: RunDirectory) -> bool:
        return directory.checkpoints.newest_step() != self.step

    def sampler(
        self, samples: int, temperature: float, max_new_tokens: int | None, seed: int
    ) -> EngineSampler:
        """Make a sampler; the default of `max_new_tokens` is `rollout.max_response_tokens`."""
        plan = generation_plan(
            self.config, self._loaded.stop_ids, samples, temperature, max_new_tokens, seed
        )
        return self._sampler.with_plan(plan)

    def close(self) -> None:
        self._stack.close()


def live_sampler(
    run: TrainingRun, samples: int, temperature: float, max_new_tokens: int | None, seed: int
) -> EngineSampler:
    """Return a sampler of a run that trains in this process, with the weights after its last step.

    Nothing may be in flight in the run's engine: use it where an evaluation may take place.
    """
    run.sync_engine()
    plan = generation_plan(
        run.config, run.sampling.plan.stop_ids, samples, temperature, max_new_tokens, seed
    )
    engine = run.sampling.engine
    turns = capabilities_of(engine).turns  # answers are single responses, as those of a checkpoint
    return EngineSampler(turns or engine, run.sampling.encoder, plan)


def generation_plan(
    config: Config,
    stop_ids: tuple[int, ...],
    samples: int,
    temperature: float,
    max_new_tokens: int | None,
    seed: int,
) -> EvaluationPlan:
    """Return the sampling settings of `generate`.

    Args:
        config: the options of the run.
        stop_ids: the tokens that end a response.
        samples: responses to each prompt.
        temperature: 0 takes the most likely token.
        max_new_tokens: the length limit; None: `rollout.max_response_tokens`.
        seed: equal seeds give equal answers.
    """
    limit = max_new_tokens or config.rollout.max_response_tokens
    return EvaluationPlan("generate", samples, temperature, 1.0, limit, stop_ids, seed)


def answers_of(
    sampler: EngineSampler, prompt: str | Sequence[Any], *, check: Callable[[], None] = lambda: None
) -> Any:
    """Sample answers to one or several prompts; call `check()` before each poll."""
    prompts: list[Prompt] = [prompt] if _is_one_prompt(prompt) else list(prompt)
    samples = sampler.plan.samples_per_problem
    answers: list[list[str]] = [[""] * samples for _ in prompts]
    num_pending = samples * len(prompts)
    try:
        for index, prompt_text in enumerate(prompts):
            sampler.submit(
                index, Problem(problem_id(prompt_text, ""), prompt_text, "", "generate", {})
            )
        while num_pending:
            check()
            responses: list[tuple[int, int, Response]] = sampler.poll()
            for index, i, response in responses:
                answers[index][i] = response.text
            num_pending -= len(responses)
    except BaseException:
        sampler.abort()  # the engine samples for others, too
        raise
    texts = [answer[0] if samples == 1 else answer for answer in answers]
    return texts[0] if _is_one_prompt(prompt) else texts


def _is_one_prompt(prompt: str | Sequence[Any]) -> bool:
    return isinstance(prompt, str) or all(isinstance(message, Mapping) for message in prompt)
