"""Opens the environment of a run, and finds the prompts with which it begins its episodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from dapo.config import Config
from dapo.core.clock import Clock
from dapo.core.errors import DataError
from dapo.engines.engine import RolloutEngine
from dapo.environments.engine import EpisodeEngine, environment_seed
from dapo.environments.pool import EnvironmentPool
from dapo.environments.rendering import TurnRenderer
from dapo.rewards.workers.output import VerifierOutput
from dapo.types import Problem

_FIRST, _AT_A_TIME = 8, 1024


@dataclass(frozen=True)
class Episodes:
    """The processes of an environment, and the renderer of its observations."""

    pool: EnvironmentPool
    renderer: TurnRenderer
    config: Config

    def play_in(self, engine: RolloutEngine, log: Callable[[str], None], clock: Clock | None = None) -> RolloutEngine:
        """An engine that plays episodes, whose turns `engine` samples; closing it closes both."""
        self.pool.log_to(log)
        options, seed = self.config.environment, self.config.train.seed
        return EpisodeEngine(engine, self.pool, self.renderer, options, seed=seed, clock=clock)

    def with_prompts(self, problems: Sequence[Problem]) -> list[Problem]:
        """The problems with the prompts with which the environment begins their episodes.

        If the first problems keep their own prompts, all do. Raises DataError if an episode cannot begin.
        """
        first = self._with_prompts(problems[:_FIRST])
        if first == list(problems[:_FIRST]):
            return list(problems)
        starts = range(_FIRST, len(problems), _AT_A_TIME)
        return [*first, *(each for i in starts for each in self._with_prompts(problems[i : i + _AT_A_TIME]))]

    def _with_prompts(self, problems: Sequence[Problem]) -> list[Problem]:
        handles = [self.pool.open(each, environment_seed(self.config.train.seed, each)) for each in problems]
        found = []
        for problem, handle in zip(problems, handles, strict=True):
            answer = handle.reset.result()
            handle.close()
            if "error" in answer:
                raise DataError(
                    f"environment.name={self.config.environment.name}: problem {problem.id}: {answer['error']}"
                )
            found.append(problem if answer["prompt"] is None else replace(problem, prompt=answer["prompt"]))
        return found


def open_episodes(config: Config, tokenizer: PreTrainedTokenizerBase) -> Episodes:
    """Start the environment's processes, and check the chat template. Raises ConfigError or DataError."""
    options = config.environment
    pool = EnvironmentPool(options, memory_gib=config.reward.memory_gib, output=VerifierOutput())
    try:
        roles = ["tool"] if pool.tools else ["user"]
        renderer = TurnRenderer(tokenizer, config.data, tools=pool.tools, history=options.history, roles=roles)
    except BaseException:
        pool.close()
        raise
    pool.call_form = None if renderer.calls is None else renderer.calls.form
    return Episodes(pool, renderer, config)
