"""Options of episodes: `environment`."""

import shlex
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from dapo.config.section import (
    Int,
    Positive,
    Processes,
    Seconds,
    Section,
    Tokens,
    one_or_several,
    option,
)


def _words(value: object) -> object:
    """Accept a command as a shell's line, and null for none."""
    if value is None:
        return []
    return shlex.split(value) if isinstance(value, str) else value


class EnvironmentConfig(Section):
    name: str | None = option(
        None,
        "The environment that answers the policy's turns: calculator, module:Class, textarena:ID or"
        " skyrl:ID; or agent:module:function, an agent that asks the policy over an OpenAI endpoint."
        " none: each response is one turn.",
        paper=None,
    )
    options: dict[str, Any] = option(
        {}, "Keyword arguments of the environment's constructor.", only_with="environment.name"
    )
    tools: Annotated[tuple[str, ...], BeforeValidator(one_or_several)] = option(
        (),
        "Functions, one or a list, as module:function, that the policy may call in every turn, alone"
        " or beside the methods of an environment that has no step.",
        also=[{"type": "string"}, {"type": "null"}],
    )
    command: Annotated[tuple[str, ...], BeforeValidator(_words)] = option(
        (),
        "The command of an agent in any language: it gets the problem as JSON on its standard input,"
        " the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY, and writes the reward as its last line.",
        also=[{"type": "string"}, {"type": "null"}],
    )
    foreign_sampling: Literal["refuse", "override"] = option(
        "refuse",
        "Treatment of an agent's request with another temperature or another distribution than the"
        " run's. refuse: status 400; override: sample as the run does, and count it.",
        only_with="runs_agent",
    )
    listen: str | None = option(
        None,
        "Address of the interface on which agents elsewhere reach the endpoint; none: this machine"
        " alone.",
        only_with="runs_agent",
    )
    max_turns: Positive = option(
        8,
        "Largest number of the policy's turns in an episode.",
        le=1000,
        only_with="plays_episodes",
        unit="turns",
    )
    max_turn_tokens: Tokens | None = option(
        None,
        "Largest number of tokens sampled in one turn; none: what is left of"
        " rollout.max_response_tokens, which bounds the tokens sampled in an episode.",
        only_with="plays_episodes",
        unit="tokens",
    )
    max_observation_tokens: Tokens = option(
        512,
        "Largest number of tokens between two turns: the observation and the chat template around"
        " it. A longer observation is cut in its middle.",
        only_with="plays_episodes",
        unit="tokens",
    )
    history: Literal["exact", "append"] = option(
        "exact",
        "Treatment of a chat template that rewrites earlier turns, for example without their"
        " thoughts. exact: refuse it; append: keep earlier turns as they were sampled.",
        only_with="plays_episodes",
    )
    credit: Literal["episode", "turn"] = option(
        "episode",
        "Tokens that a reward trains. episode: all tokens of an episode have its advantage; turn:"
        " those of a turn have the advantage of the rewards from that turn on, among the members of"
        " the group that reached it.",
        only_with="plays_episodes",
    )
    timeout_s: Seconds = option(
        10.0,
        "Time limit of one answer of the environment; beyond it the episode is an error.",
        only_with="plays_episodes",
        unit="s",
    )
    workers: Processes = option(
        2, "Processes that run environments.", only_with="plays_episodes", unit="processes"
    )
    lag_polls: Int = option(
        2,
        "Tokens that the engine samples for other episodes before an environment's answer counts,"
        " with rollout.clock=history. Higher values keep the engine busy while slow environments"
        " answer.",
        ge=1,
        le=10**6,
        only_with="plays_episodes",
        unit="polls",
    )

    @property
    def title(self) -> str | None:
        """The name of what plays the episodes: an environment, an agent or its command."""
        if self.command:
            return f"agent:{shlex.join(self.command)}"
        return self.name
