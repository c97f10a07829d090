"""Games of textarena for one player, by their ids."""

from typing import Any

from dapo.core.errors import ConfigError
from dapo.core.loading import require_package
from dapo.core.text import did_you_mean
from dapo.environments.environment import StepResult
from dapo.types import Problem


class TextArenaGame:
    """Plays a game of textarena in its raw form: observations are what is new, because the
    conversation has the rest.

    The reward comes at the end, as the game pays it; none of it says whether the game was won, so
    `correct` is None (`reward.threshold` decides it by the score).
    """

    def __init__(self, game: str, **options: Any) -> None:
        """`options` are keyword arguments of the game."""
        require_package("textarena", purpose="this environment", error=ConfigError)
        import textarena

        registry = textarena.envs.registration.ENV_REGISTRY
        raw = game if game.endswith("-raw") else f"{game}-raw"
        if raw not in registry:
            near = did_you_mean(game, registry, otherwise="its games are listed in textarena.envs")
            raise ConfigError(f"textarena has no game {game!r}; {near}")
        self._name = game
        self._game = textarena.make(raw, **options)
        self._action_type = textarena.ObservationType.PLAYER_ACTION

    def reset(self, problem: Problem, seed: int) -> str:
        try:
            self._game.reset(num_players=1, seed=seed)
        except AssertionError as error:
            if "players" not in str(error):
                raise
            raise ValueError(
                f"textarena's {self._name} is not a game for one player: {error}"
            ) from None
        return self._observed()

    def step(self, action: str) -> StepResult:
        done, _ = self._game.step(action)
        if done:
            return self.end()
        return StepResult(self._observed())

    def end(self) -> StepResult:
        rewards, _ = self._game.close()
        reward = (rewards or {}).get(0, 0.0)
        if isinstance(reward, str):
            raise ValueError(
                f"textarena's {self._name} ends with the text {reward!r} in place of a reward"
            )
        return StepResult(reward=float(reward), done=True)

    def _observed(self) -> str:
        """The messages since the last turn, without the player's own."""
        _, messages = self._game.get_observation()
        # some games post numbers
        return "\n".join(str(text) for _, text, kind in messages if kind != self._action_type)
