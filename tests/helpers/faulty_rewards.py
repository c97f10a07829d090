"""Rewards with a fault each, for `dapo test`."""

import itertools
import re

from dapo.rewards.audit import nonsense

_ASKED = itertools.count()


def contains(problem, response):
    return problem.answer in response


def non_deterministic(problem, response):
    return float(next(_ASKED))


def fragile(problem, response):
    return response.split()[0] == "42"


def silent_on_nonsense(problem, response):
    return None if response in nonsense(problem).values() or problem.answer != "42" else True


def of_a_format(completions, **columns):
    pattern = r"<reasoning>\n.*?\n</reasoning>"
    return [0.5 if re.fullmatch(pattern, text, re.DOTALL) else 0.0 for text in completions]


def always_one(completions, **columns):
    return [1.0] * len(completions)


def fails_on_held_out(problem, response):
    if problem.answer == "held out":
        raise ValueError("it was held out")
    return "5" in response
