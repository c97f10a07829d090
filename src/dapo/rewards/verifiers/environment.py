"""The verifier `environment`: the sum of the rewards of an episode, and what its agent measured."""

from math import fsum

from dapo.rewards.verdicts import error_verdict
from dapo.types import EpisodeText, Problem, Verdict


class EnvironmentVerifier:
    """Scores an episode with the sum of its rewards; the environment decides if it is correct."""

    def __call__(self, problem: Problem, response: str) -> Verdict:
        if not isinstance(response, EpisodeText):
            return error_verdict(
                "environment: the response is not an episode; set environment.name, or another verifier"
            )
        episode = response.episode
        if episode.failure is not None:
            return error_verdict(episode.failure)
        return Verdict(episode.correct, fsum(episode.rewards), components=episode.components)
