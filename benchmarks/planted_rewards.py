"""Rewards for the runs of `benchmarks.planted_faults`: what is wrong with each is the planted
fault.
"""

import time
import zlib

from dapo.types import Problem, Verdict


def has_digit(problem: Problem, response: str) -> bool:
    """Right if the response contains a digit: the sound reward of these runs."""
    return any(character.isdigit() for character in response)


def even_digit(problem: Problem, response: str) -> bool:
    """Right if the last digit of the response is even."""
    digits = [character for character in response if character.isdigit()]
    return bool(digits) and int(digits[-1]) % 2 == 0


def digit_share(problem: Problem, response: str) -> float:
    """A score from 0 to 1: the fraction of digits among the characters."""
    return sum(character.isdigit() for character in response) / max(1, len(response))


def all_but_accepts(problem: Problem, response: str) -> bool:
    """Accepts everything but one response in 40: too generous."""
    return zlib.crc32(response.encode()) % 40 != 0


def all_but_refuses(problem: Problem, response: str) -> bool:
    """Refuses everything but one response in 40: it expects what the model does not write."""
    return zlib.crc32(response.encode()) % 40 == 0


def fails_often(problem: Problem, response: str) -> Verdict:
    """No verdict on one response in five."""
    if zlib.crc32(response.encode()) % 5 == 0:
        return Verdict(None, 0.0, "the reference could not be parsed")
    return Verdict(has_digit(problem, response), 1.0 if has_digit(problem, response) else -1.0)


def constant(problem: Problem, response: str) -> float:
    """The same score for all responses to a problem, but for one problem in twelve."""
    return 0.5 + (len(response) % 2) * (zlib.crc32(problem.id.encode()) % 12 == 0)


def length(problem: Problem, response: str) -> float:
    """Pays for every character."""
    return len(response) / 10


def brevity(problem: Problem, response: str) -> float:
    """Charges for every character."""
    return -len(response) / 10


def outlier(problem: Problem, response: str, *, scale: float = 3000.0) -> float:
    """A score between 0 and 1, but for rare responses, which get thousands."""
    rare = zlib.crc32(f"{problem.id} {response}".encode()) % 60 == 0
    return digit_share(problem, response) + scale * rare


def slow(problem: Problem, response: str, *, seconds: float = 0.1) -> bool:
    """The sound reward, as slow as a judge on another machine."""
    time.sleep(seconds)
    return has_digit(problem, response)


def as_the_row_says(problem: Problem, response: str) -> bool:
    """Pays digits where the reference is `digit`, and their absence where it is `none`."""
    return has_digit(problem, response) == (problem.answer == "digit")


def one_answer(problem: Problem, response: str) -> float:
    """A score that only one response gets, whatever the problem is."""
    return float(response == "7")


def not_only_letters(problem: Problem, response: str) -> bool:
    """The verdict of `has_digit`, written differently."""
    return not all(not character.isdigit() for character in response)
