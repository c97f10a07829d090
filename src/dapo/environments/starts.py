"""Begins episodes from the data's problems, with the prompts that were encoded for them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dapo.core.errors import DataError
from dapo.core.rng import keyed_seed
from dapo.core.terminal import to_json
from dapo.data.begun import is_begun_by_environment
from dapo.environments.environment import prompt_to_json
from dapo.types import Problem, Prompt

if TYPE_CHECKING:
    from dapo.environments.pool import EnvironmentPool, EpisodeHandle

_FIRST = 8
_SPREAD = 56
_AT_A_TIME = 1024


def environment_seed(seed: int, problem: Problem) -> int:
    """Return the seed of a problem's environment: equal for a whole group, in every epoch."""
    return keyed_seed(seed, "environment", problem.id)


class NoPrompt(DataError):
    """Neither `reset` nor the data has a prompt."""


class EpisodeStarts:
    """Opens the episodes of a run.

    `reset` always gets the problem as the data has it, when the prompts are read and when an
    episode begins, because it may append to the problem's prompt.
    """

    def __init__(self, pool: "EnvironmentPool", *, seed: int) -> None:
        """Take the run's seed, on which, and on its problem, an environment's seed depends."""
        self._pool = pool
        self._seed = seed
        self._prompts_of_data: dict[tuple[str, str], Prompt] = {}
        """The data's prompts that `reset` replaced, by the id and the new prompt of a problem."""

    def open(self, problem: Problem) -> "EpisodeHandle":
        """Begin an episode of a problem, which has the prompt that `with_prompts` gave it."""
        data_problem = self._of_data(problem)
        return self._pool.open(data_problem, environment_seed(self._seed, data_problem))

    def with_prompts(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the problems with the prompts with which the environment begins their episodes.

        If 64 problems keep their own prompts, the first and others spread over the data, all do.
        Raises DataError if no episode can begin, or one whose prompt only the environment has.
        """
        later = range(_FIRST, len(problems), max(1, len(problems) // _SPREAD))
        tried = [*problems[:_FIRST], *(problems[i] for i in later)]
        if self._with_prompts(tried, must_begin=True) == tried:
            return list(problems)
        starts = range(0, len(problems), _AT_A_TIME)
        results: list[Problem] = []
        for start in starts:
            results += self._with_prompts(problems[start : start + _AT_A_TIME])
        return results

    def difference(self, problem: Problem, prompt: Any) -> str | None:
        """Describe how the prompt of `reset` differs from the encoded one; None if it does not."""
        data_problem = self._of_data(problem)
        first_prompt = prompt_to_json(data_problem.prompt) if prompt is None else prompt
        if first_prompt == prompt_to_json(problem.prompt):
            return None
        what = "returned a different prompt from that at the start"
        if data_problem is problem:
            what = (
                f"returned a prompt, and none for the first {_FIRST} problems and {_SPREAD} others"
                " at the start,"
            )
        difference = f"reset {what} for problem {problem.id} and the same seed"
        if data_problem is problem:
            return difference
        return f"{difference}; draw from the global `random` or a generator of `seed`"

    def _of_data(self, problem: Problem) -> Problem:
        prompt = self._prompts_of_data.get(_key(problem))
        return problem if prompt is None else replace(problem, prompt=prompt)

    def _with_prompts(
        self, problems: Sequence[Problem], *, must_begin: bool = False
    ) -> list[Problem]:
        """Return problems with their prompts; with `must_begin` the episode of one must begin."""
        handles = [self.open(problem) for problem in problems]
        results: list[Problem] = []
        failures: list[str] = []
        for problem, handle in zip(problems, handles, strict=True):
            answer = handle.reset.result()
            handle.close()
            if "error" in answer:
                failures.append(f"problem {problem.id}: {answer['error']}")
                all_fail = must_begin and len(failures) == len(problems)
                if all_fail or is_begun_by_environment(problem):
                    raise DataError(failures[0])
                # with its own prompt; its episodes get error verdicts if this stays so
                results.append(problem)
                continue
            if answer["prompt"] is None:
                if is_begun_by_environment(problem):
                    raise NoPrompt(
                        "reset returned no prompt, and the problems have none either; return the"
                        " prompt from reset, or name problems in data.train"
                    )
                results.append(problem)
                continue
            new = replace(problem, prompt=answer["prompt"])
            if new != problem:
                self._prompts_of_data[_key(new)] = self._of_data(problem).prompt
            results.append(new)
        return results


def _key(problem: Problem) -> tuple[str, str]:
    return problem.id, to_json(prompt_to_json(problem.prompt))
