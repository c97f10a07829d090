"""The length of a response or an episode as a sum of options, and which of them to lower."""

from dapo.config.options import Config


def limit_of_response(config: Config, section: str = "rollout") -> tuple[str, int]:
    """Return the option that cuts a response, and its value in tokens.

    Of an episode each turn is cut at `environment.max_turn_tokens`, where that is lower. `section`
    is `rollout` or, where that has a limit, `eval`.
    """
    limit: int = getattr(config, section).max_response_tokens
    turn = config.environment.max_turn_tokens
    if config.plays_episodes and turn is not None and turn < limit:
        return "environment.max_turn_tokens", turn
    return f"{section}.max_response_tokens", limit


def agent_context(config: Config, positions: int | None = None) -> int:
    """Return the most tokens of an agent's request with its answer.

    `positions` is the number that the model has; None: unknown.
    """
    limits = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    context = limits + config.max_observed_tokens
    return context if positions is None else min(context, positions)


def length_as_sum(config: Config, response_tokens: int) -> str:
    """Write the largest length of an episode as a sum, `3616 = 32 + 7 x 512`, with its options.

    It is empty without an environment, where a response has the length of its option.
    """
    if not config.max_observed_tokens:
        return ""
    turns = config.environment.max_turns - 1
    observation = config.environment.max_observation_tokens
    total = response_tokens + turns * observation
    return (
        f"{total} = {response_tokens} + {turns} x {observation} (the tokens of all turns, and the"
        f" observations between environment.max_turns={turns + 1} turns of at most"
        f" environment.max_observation_tokens={observation})"
    )


def lower_lengths(config: Config, response_tokens: int, prompt_tokens: int = 0) -> str:
    """Return the options to lower for shorter sequences, that of the largest term first.

    `prompt_tokens` is the length of the longest prompt; 0 if it is not known.
    """
    options = {
        "rollout.max_response_tokens": response_tokens,
        "data.max_prompt_tokens": prompt_tokens,
    }
    if config.max_observed_tokens:
        observed = "environment.max_turns or environment.max_observation_tokens"
        options = {observed: config.max_observed_tokens, **options}
    ranked = sorted(options, key=lambda name: options[name], reverse=True)
    return f"lower {ranked[0]} first, then {' or '.join(ranked[1:])}"
