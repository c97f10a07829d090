"""Renders the episodes of an environment, and finds the prompts with which they begin."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from dapo.config import Config
from dapo.config.lengths import agent_context
from dapo.core.errors import ConfigError, DataError
from dapo.core.loading import AGENT_PREFIX, own_name
from dapo.data.prompts import PromptEncoder
from dapo.engines.engine import SuspendableEngine
from dapo.environments.agents.engine import AgentEngine
from dapo.environments.agents.nonsense import NOT_DETERMINISTIC, TOO_SLOW, NonsenseAgents
from dapo.environments.agents.pool import AgentPool
from dapo.environments.agents.rendering import AgentRenderer
from dapo.environments.engine import EpisodeEngine
from dapo.environments.nonsense import (
    BUDGET_S,
    FAILING_BUDGET_S,
    KINDS,
    NonsensePlayer,
    Play,
    failures_table,
    faults_of,
    is_unusable,
)
from dapo.environments.pool import EnvironmentPool
from dapo.environments.rendering import TurnRenderer
from dapo.environments.starts import EpisodeStarts, environment_seed
from dapo.types import GenerationRequest, Problem

_PROVEN = 4
"""The number of first problems behind which the chat template's treatment of earlier turns is
proved.
"""


@dataclass(frozen=True)
class Episodes:
    """The processes of an environment, and the renderer of its observations."""

    pool: EnvironmentPool
    renderer: TurnRenderer
    starts: EpisodeStarts
    config: Config
    tokenizer: PreTrainedTokenizerBase

    @property
    def encoder(self) -> PromptEncoder:
        """The encoder of the prompts with which episodes begin."""
        return self.renderer.prompts

    def play_in(self, engine: SuspendableEngine, log: Callable[[str], None]) -> EpisodeEngine:
        """Return an engine that plays episodes with turns from `engine`, and closes it."""
        self.pool.log_to(log)
        return EpisodeEngine(
            engine,
            self.pool,
            self.renderer,
            self.config.environment,
            starts=self.starts,
            by_load=not self.config.rollout.is_reproducible,
            warn=log,
        )

    def with_prompts(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems with the prompts with which the environment begins their episodes.

        Raises DataError.
        """
        try:
            begun = self.starts.with_prompts(problems)
        except DataError as error:
            name = self.config.environment.name
            raise DataError(f"environment.name={name}: {error}") from error
        for problem in begun:
            if problem.begun_answer is not None:
                raise DataError(
                    f"problem {problem.id}: the prompt ends with the beginning of the answer, which"
                    " is continued in single responses alone; in an episode the policy begins each"
                    " turn: remove the last message"
                )
        self.renderer.require_exact(begun[:_PROVEN])
        return begun

    def play_nonsense(
        self, problems: Sequence[Problem], *, budget_s: float | None = None
    ) -> list[Play]:
        """Play nonsense, for at most some seconds, in episodes of problems from `with_prompts`."""
        return self.player().play_all(problems, budget_s=budget_s)

    def player(self) -> NonsensePlayer:
        """Return the player of texts that no model has sampled."""
        options = self.config.environment
        return NonsensePlayer(self.tokenizer, self.pool, self.renderer, self.starts, options)

    def try_out(self, problems: Sequence[Problem]) -> list[str]:
        """Play nonsense, and return warnings.

        Raises ConfigError, with a table and the place in the user's code, if the environment fails
        whatever the policy says.
        """
        self._require_reward()
        plays = self.play_nonsense(problems, budget_s=BUDGET_S)
        # on a busy machine, too few to tell
        if len(plays) < len(KINDS) and any(play.error is not None for play in plays):
            plays = self.play_nonsense(problems, budget_s=FAILING_BUDGET_S)
        environment = self.config.environment
        name = self._name()
        if not is_unusable(plays):
            faults = faults_of(plays, penalty=_penalty_of_a_cut(self.config))
            return [f"warning: environment {name}: {fault}" for fault in faults]
        test_of = name if name == environment.name else None
        raise _refused("environment", name, plays, test_of=test_of)

    def _name(self) -> str:
        environment = self.config.environment
        return ", ".join(map(own_name, environment.tools)) or own_name(str(environment.name))

    def _require_reward(self) -> None:
        """Raise ConfigError if all episodes would have a reward of 0."""
        if self.pool.has_reward or self.config.reward.verifier not in ("auto", "environment"):
            return
        environment = self.config.environment
        if environment.name is None:
            raise ConfigError(
                "environment.tools give no reward: set reward.verifier to what judges the last"
                " turn, for example reward.verifier=math"
            )
        name = own_name(environment.name)
        raise ConfigError(
            f"environment {name}: it has no get_reward, so every episode would have a reward of 0:"
            " define get_reward(self), or set reward.verifier"
        )


def _refused(kind: str, name: str, plays: Sequence[Play], *, test_of: str | None) -> ConfigError:
    """Return the error for an environment or an agent whose episodes of nonsense fail.

    `dapo test TEST_OF` plays the same episodes; None: nothing does.
    """
    failed = sum(play.error is not None for play in plays)
    again = ""
    if test_of is not None:
        again = f"; dapo test {shlex.quote(test_of)} plays the same episodes"
    return ConfigError(
        f"{kind} {name}: {failed} of {len(plays)} episodes of nonsense failed, which are"
        " played before the first step; nothing can be learned from episodes that fail\n"
        f"{failures_table(plays)}\nCorrect the {kind}{again}"
    )


def _penalty_of_a_cut(config: Config) -> float | None:
    """Return what the overlong penalty (Eq. 13) takes from a cut turn.

    None if the environment's rewards do not train, or not those of responses that are cut.
    """
    verifier = config.reward.verifier
    names = [verifier] if isinstance(verifier, str) else list(verifier)
    if not {"auto", "environment"} & set(names):
        return None
    # a turn that is cut at its own limit has tokens left, and no penalty
    limit = config.environment.max_turn_tokens
    if limit is not None and limit < config.rollout.max_response_tokens:
        return 0.0
    if config.overlong.mode == "filter":
        return None
    return config.overlong.penalty if config.overlong.mode == "soft" else 0.0


@dataclass(frozen=True)
class AgentEpisodes:
    """The processes of an agent, and the renderer of its chats."""

    pool: AgentPool
    renderer: AgentRenderer
    config: Config
    tokenizer: PreTrainedTokenizerBase
    max_context: int
    """The most tokens of a request with its answer."""

    @property
    def encoder(self) -> PromptEncoder:
        """The encoder of the problems' own prompts, which an agent may show or not."""
        return self.renderer.plain.prompts

    def play_in(self, engine: SuspendableEngine, log: Callable[[str], None]) -> AgentEngine:
        """Return an engine that answers agents by `engine`, and closes it."""
        self.pool.log_to(log)
        seed = self.config.train.seed

        def seed_of(request: GenerationRequest) -> int:
            assert request.problem is not None
            return environment_seed(seed, request.problem)

        return AgentEngine(
            engine,
            self.pool,
            self.renderer,
            self.config.environment,
            seed_of=seed_of,
            max_context=self.max_context,
            by_load=not self.config.rollout.is_reproducible,
        )

    def try_out(self, problems: Sequence[Problem]) -> list[str]:
        """Start the agent for the first problem with answers of nonsense, and return warnings.

        Raises ConfigError, with a table and the place in the user's code, if it fails whatever the
        policy says.
        """
        plays = self._nonsense.first_plays(problems[0])
        environment = self.config.environment
        name = str(environment.title).removeprefix(AGENT_PREFIX)
        if not plays:
            return [f"warning: agent {name}: {TOO_SLOW}"]
        last = plays[-1]
        if last.error is not None:
            raise _refused("agent", name, plays, test_of=environment.name)
        return [f"warning: agent {name}: {NOT_DETERMINISTIC}"] if last.differs else []

    def play_nonsense(self, problems: Sequence[Problem]) -> list[Play]:
        """Play answers of nonsense in episodes of problems."""
        return self._nonsense.play_all(problems)

    @property
    def _nonsense(self) -> NonsenseAgents:
        return NonsenseAgents(
            self.tokenizer,
            self.pool,
            self.renderer,
            self.config.environment,
            temperature=self.config.rollout.temperature,
            max_context=self.max_context,
            by_load=not self.config.rollout.is_reproducible,
        )

    def with_prompts(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems as they are: the agent writes its own prompts."""
        return list(problems)


def episodes_of(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    pool: EnvironmentPool | AgentPool,
    *,
    positions: int | None = None,
) -> Episodes | AgentEpisodes:
    """Return the episodes of an environment or an agent. Raises DataError for the chat template.

    `positions` is the number that the model has; None: unknown.
    """
    if isinstance(pool, AgentPool):
        return agent_episodes(config, tokenizer, pool, positions=positions)
    return environment_episodes(config, tokenizer, pool)


def agent_episodes(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    pool: AgentPool,
    *,
    positions: int | None = None,
) -> AgentEpisodes:
    """Return the episodes of an agent. Raises DataError for the chat template.

    `positions` is the number that the model has; None: unknown.
    """
    renderer = AgentRenderer(tokenizer, config.data, config.environment.history)
    max_context = agent_context(config, positions)
    return AgentEpisodes(pool, renderer, config, tokenizer, max_context)


def environment_episodes(
    config: Config, tokenizer: PreTrainedTokenizerBase, pool: EnvironmentPool
) -> Episodes:
    """Return the episodes of an environment. Raises DataError for the chat template."""
    renderer = turn_renderer(config, tokenizer, pool)
    return Episodes(pool, renderer, EpisodeStarts(pool, seed=config.train.seed), config, tokenizer)


def turn_renderer(
    config: Config, tokenizer: PreTrainedTokenizerBase, pool: EnvironmentPool
) -> TurnRenderer:
    """Return the renderer of the observations, in whose form `pool` reads calls.

    Raises DataError for the chat template.
    """
    roles = ["tool"] if pool.tools else ["user"]
    history = config.environment.history
    renderer = TurnRenderer(tokenizer, config.data, tools=pool.tools, history=history, roles=roles)
    pool.read_calls_as(renderer)
    return renderer
