"""Begins episodes: each from its problem as the data has it, with the prompt that was encoded for
it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dapo.core.errors import DataError
from dapo.core.rng import keyed_seed
from dapo.core.terminal import to_json
from dapo.data.problems import is_begun_by_environment
from dapo.environments.environment import prompt_to_json
from dapo.types import Problem, Prompt

if TYPE_CHECKING:
    from dapo.environments.pool import EnvironmentPool, EpisodeHandle

_FIRST = 8
_SPREAD = 56
_AT_A_TIME = 1024


def environment_seed(seed: int, problem: Problem) -> int:
    """The seed of a problem's environment: equal for all members of a group, in every epoch."""
    return keyed_seed(seed, "environment", problem.id)


class EpisodeStarts:
    """Opens the episodes of a run.

    `reset` always gets the problem as the data has it, when the prompts are read and when an
    episode begins, because it may append to the problem's prompt.
    """

    def __init__(self, pool: "EnvironmentPool", *, seed: int) -> None:
        """`seed` is the run's: an episode's environment gets a seed that depends on it and on the
        problem.
        """
        self._pool = pool
        self._seed = seed
        self._prompts_of_data: dict[tuple[str, str], Prompt] = {}
        """The prompts of the data, by the id and the new prompt of a problem that `reset` gave
        another one.
        """

    def open(self, problem: Problem) -> "EpisodeHandle":
        """Begin an episode of a problem, which has the prompt that `with_prompts` gave it."""
        of_data = self._of_data(problem)
        return self._pool.open(of_data, environment_seed(self._seed, of_data))

    def with_prompts(self, problems: Sequence[Problem]) -> list[Problem]:
        """The problems with the prompts with which the environment begins their episodes.

        If 64 problems keep their own prompts, the first and others spread over the data, all do.
        Raises DataError if no episode can begin, or one whose prompt only the environment has.
        """
        later = range(_FIRST, len(problems), max(1, len(problems) // _SPREAD))
        tried = [*problems[:_FIRST], *(problems[i] for i in later)]
        if self._with_prompts(tried) == tried:
            return list(problems)
        starts = range(0, len(problems), _AT_A_TIME)
        return [each for i in starts for each in self._with_prompts(problems[i : i + _AT_A_TIME])]

    def difference(self, problem: Problem, prompt: Any) -> str | None:
        """Why the prompt that `reset` returned is not the one that was encoded; None if it is."""
        of_data = self._of_data(problem)
        begun = prompt_to_json(of_data.prompt) if prompt is None else prompt
        if begun == prompt_to_json(problem.prompt):
            return None
        what = "returned another prompt than at the start"
        if of_data is problem:
            what = (
                f"returned a prompt, and none for the first {_FIRST} problems and {_SPREAD} others"
                " at the start,"
            )
        return f"reset {what} for problem {problem.id} and the same seed"

    def _of_data(self, problem: Problem) -> Problem:
        prompt = self._prompts_of_data.get(_key(problem))
        return problem if prompt is None else replace(problem, prompt=prompt)

    def _with_prompts(self, problems: Sequence[Problem]) -> list[Problem]:
        handles = [self.open(problem) for problem in problems]
        begun: list[Problem] = []
        failures: list[str] = []
        for problem, handle in zip(problems, handles, strict=True):
            answer = handle.reset.result()
            handle.close()
            if "error" in answer:
                failures.append(f"problem {problem.id}: {answer['error']}")
                if len(failures) == len(problems) or is_begun_by_environment(problem):
                    raise DataError(failures[0])
                # with its own prompt; its episodes get error verdicts if this stays so
                begun.append(problem)
                continue
            if answer["prompt"] is None:
                begun.append(problem)
                continue
            new = replace(problem, prompt=answer["prompt"])
            if new != problem:
                self._prompts_of_data[_key(new)] = self._of_data(problem).prompt
            begun.append(new)
        return begun


def _key(problem: Problem) -> tuple[str, str]:
    return problem.id, to_json(prompt_to_json(problem.prompt))
