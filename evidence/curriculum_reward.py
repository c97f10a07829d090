"""A task of any difficulty for a model that knows nothing: answer a sum with as many digits as it
has plus signs.
"""

import re

from dapo.types import Problem


def leading_digits(problem: Problem, response: str) -> bool:
    """Right if the response begins with a digit for each `+` of the question.

    A random model over a hundred characters does so with a probability near .1 to the power of
    their number: `3 + 14` is solved at times, a sum of seven numbers never.
    """
    count = str(problem.prompt).count("+")
    return re.match(f"[0-9]{{{count}}}", response) is not None
