"""Rewards with a fault each, for `dapo test`."""

import itertools

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
