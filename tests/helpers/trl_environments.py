"""Environments in the form of TRL's `environment_factory`, by the rules of its published examples,
without servers.
"""

import random
from typing import Any


class EchoTools:
    """Pays for the length of the echoed message; its prompts are those of the data."""

    def __init__(self) -> None:
        self.reward = 0.0

    def reset(self, **columns: Any) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """Echoes a message.

        Args:
            message: the message

        Returns:
            The same message.
        """
        self.reward = len(message) / 10
        return message

    def get_reward(self) -> float:
        return self.reward


class Words:
    """Guess the word of the row; a tool raises once the game is over."""

    def reset(self, **columns: Any) -> str | None:
        self.word = columns["word"]
        self.tries = 3
        self.done = False
        self.reward = 0.0
        return f" The word has {len(self.word)} letters."

    def guess(self, guess: str) -> str:
        """Guesses.

        Args:
            guess: the word in brackets, as in [abc]
        """
        if self.done:
            raise ValueError("Game over.")
        self.tries -= 1
        self.reward = float(guess.strip("[]") == self.word)
        self.done = self.reward == 1.0 or not self.tries
        return "".join(
            "G" if a == b else "X" for a, b in zip(guess.strip("[]"), self.word, strict=False)
        )

    def get_reward(self) -> float:
        return self.reward


class Catch:
    """A ball falls from a random column; a tool without arguments, and one that refuses what it
    does not know.
    """

    def reset(self, **columns: Any) -> str:
        self.ball = random.randint(0, 4)
        self.paddle = 2
        self.row = 0
        return f"\n{self._seen()}"

    def _seen(self) -> str:
        return f"ball {self.ball} row {self.row} paddle {self.paddle}"

    def move(self, direction: str) -> str:
        """Moves the paddle.

        Args:
            direction: left or right
        """
        if direction not in ("left", "right"):
            raise ValueError(f"Invalid direction {direction!r}")
        self.paddle += 1 if direction == "right" else -1
        return self.stay()

    def stay(self) -> str:
        """Lets the ball fall."""
        self.row += 1
        return self._seen()

    def get_reward(self) -> float:
        return float(self.paddle == self.ball)


class Several(Words):
    """Plays what the column `env` says: words with a text at the start, or an echo with none."""

    def reset(self, **columns: Any) -> str | None:
        self.active = columns["env"]
        return super().reset(**columns) if self.active == "words" else None


class Columns:
    """Says what it was given: columns of any type, its own prompt among them."""

    def reset(self, prompt: Any, level: Any) -> str:
        return f"|{type(prompt).__name__} {level!r}"

    def nothing(self) -> str:
        """Does nothing."""
        return ""


class Parts:
    """Answers with a list of parts, as TRL's classes for images may."""

    def reset(self, **columns: Any) -> list[dict[str, str]]:
        return [{"type": "text", "text": " a"}, {"type": "text", "text": "b"}]

    def nothing(self) -> str:
        """Does nothing."""
        return ""


class Say:
    """Appends the answer of the row to its prompt."""

    def reset(self, **columns: Any) -> str:
        return f"Say {columns['answer']}."

    def say(self, word: str) -> str:
        """Says a word.

        Args:
            word: the word
        """
        return word

    def get_reward(self) -> float:
        return 1.0


class Restless:
    """Returns another prompt each time."""

    calls = 0

    def reset(self, **columns: Any) -> str:
        Restless.calls += 1
        return str(Restless.calls)

    def nothing(self) -> str:
        """Does nothing."""
        return ""
