"""An environment in the form of TRL's `environment_factory`, which both systems play unchanged;
imports neither.
"""

from typing import Any


class Notes:
    """The tool `note` keeps a text and answers with a line; an even number of characters in all
    texts pays 1.
    """

    def reset(self, **columns: Any) -> None:
        """Begin an episode, and leave its prompt unchanged."""
        self.texts: list[str] = []

    def note(self, text: str) -> str:
        """Keeps a text for later.

        Args:
            text: the text to keep
        """
        self.texts.append(text)
        return "The note is kept. Write the next one, or end here."

    def get_reward(self) -> float:
        """The reward of the episode, 1 or 0."""
        return float(sum(map(len, self.texts)) % 2 == 0)


class EchoedNotes(Notes):
    """Notes whose answers repeat the text."""

    def note(self, text: str) -> str:
        """Keeps a text for later.

        Args:
            text: the text to keep
        """
        return f"{super().note(text)} Kept: {text}"


def forced_call(text: str) -> tuple[str, dict[str, Any]]:
    """The name of the tool and the arguments for a turn of any text, where every turn counts as a
    call.
    """
    return "note", {"text": text}
