"""A game as an environment: the model guesses a number, and the game answers higher or lower.

    python examples/guess_number.py

trains a small model on a processor. All members of a group look for the same number, because the
game is a function of its seed. The reward grows with each guess that the hints allow, so groups
differ long before a game is won. No answer says `correct`, so Eq. 11 compares the scores of a
group.
"""

import re
from typing import Any

import dapo
from dapo.environments import StepResult

LARGEST = 20


class GuessNumber:
    """Pays .2 for a guess within the known bounds, 1 for the number, and -1 where the game is lost.

    A turn without a number loses it, and so does one that is cut at the limit of tokens: were that
    not the lowest reward, the model would learn never to end its turn.
    """

    def reset(self, problem: Any, seed: int) -> str:
        """Choose the number by the seed; return the prompt."""
        self.number = seed % LARGEST + 1
        self.low = 1
        self.high = LARGEST
        return f"Guess my number from 1 to {LARGEST}. Reply with one number only."

    def step(self, action: str) -> StepResult:
        """Answer a guess with a hint, or end the game."""
        found = re.search(r"\d{1,4}", action)
        if found is None:
            return self.end()
        guess = int(found[0])
        if guess == self.number:
            return StepResult(reward=1.0, done=True)
        follows_hints = self.low <= guess <= self.high
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            hint = f"My number is higher than {guess}."
        else:
            self.high = min(self.high, guess - 1)
            hint = f"My number is lower than {guess}."
        return StepResult(hint, reward=0.2 if follows_hints else 0.0)

    def end(self) -> StepResult:
        """End a game for which no tokens or no turns are left."""
        return StepResult(reward=-1.0, done=True)


def train(model: str = "smollm2-135m-instruct", **options: Any) -> dapo.Run:
    """The run; `options` are laid over those here."""
    sizes = {
        "steps": 20,
        "prompts_per_step": 8,
        "group_size": 8,
        "max_response_tokens": 48,
        "lr": 2e-5,
    }
    limits = {
        "environment.max_turns": 6,
        "environment.max_observation_tokens": 48,
        "overlong.mode": "off",
    }
    return dapo.train(
        model, data="environment", environment=GuessNumber, **(sizes | limits | options)
    )


def conversation(run: dapo.Run) -> list[dict[str, str]]:
    """The messages of the best episode of a run's last step."""
    rows = run.rollouts
    last = rows[(rows["step"] == rows["step"].max()) & rows["score"].notna()]
    messages: list[dict[str, str]] = last.loc[last["score"].idxmax(), "episode"]["messages"]
    return messages


if __name__ == "__main__":
    run = train()
    print(run.metrics[["reward/score_mean", "rollout/turns_mean"]])
    for message in conversation(run):
        print(f"{message['role']}: {message['content']}")
