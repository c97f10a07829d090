"""The verifier `shortest`: a response scores higher the shorter it is."""

from dapo.rewards.verifier import Registration
from dapo.types import Problem, Verdict


class ShortestVerifier:
    """Scores a response by its length; `max_chars` becomes `reward.options.max_chars`."""

    def __init__(self, max_chars: int = 100) -> None:
        self.max_chars = max_chars

    def __call__(self, problem: Problem, response: str) -> Verdict:
        """Return a score of 1 for an empty response, and of 0 from `max_chars` characters on."""
        return Verdict(correct=None, score=max(0.0, 1 - len(response) / self.max_chars))


SHORTEST = Registration("dapo_extras.rewards:ShortestVerifier")
