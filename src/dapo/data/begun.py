"""Problems of `data.train=environment`: names, in whose place the environment gives prompts."""

import re

from dapo.types import Problem

_NAME = re.compile(r"episode \d+ of \w+, seed -?\d+")


def episode_name(index: int, *, split: str, seed: int) -> str:
    """Return what stands in the place of a prompt; it also makes the problem's id distinct."""
    return f"episode {index} of {split}, seed {seed}"


def is_begun_by_environment(problem: Problem) -> bool:
    """Return True if a problem has a mere name instead of a prompt."""
    return problem.source == "environment" and _NAME.fullmatch(str(problem.prompt)) is not None
