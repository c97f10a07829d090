"""`gym`: the scorers of reasoning-gym, on an extracted answer."""

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from dapo.core.errors import RewardError
from dapo.core.loading import Failure, require_package, try_call
from dapo.libs.strict_math.text import final_part, marked_answer, strip_formatting
from dapo.rewards.verdicts import binary_verdict, error_verdict
from dapo.types import Problem, Verdict

TASK = "gym_task"
CONFIG = "gym_config"
ENTRY = "gym_entry"
"""The fields of a problem from reasoning-gym: the task's name, its configuration, and the item
(`question`, `answer`, `metadata`).
"""

_SHORT_CHARS = 200
_TASK_CACHE_SIZE = 256
_TAG = re.compile(r"<(?P<close>/?)answer>", re.IGNORECASE)
_RUNS_CODE = re.compile(r"\b(?:eval|exec|parse_expr|sympify)\(")
_NAME = re.compile(r"[^\W\d]\w+")
_FUNCTIONS = re.compile("a?(?:sin|cos|tan)h?|log|ln|exp|sqrt|[Aa]bs|pi|oo")


@dataclass(frozen=True)
class Task:
    """The scorer of one task."""

    score_answer: Callable[[str, Mapping[str, Any]], float]
    runs_code: bool  # whether the scorer evaluates the answer as Python

    def score(self, answer: str, entry: Mapping[str, Any]) -> float:
        """Return the task's score; an answer that could run as code must equal the reference."""
        if self.runs_code and any(not _FUNCTIONS.fullmatch(name) for name in _NAME.findall(answer)):
            return float(answer == entry["answer"])
        return float(self.score_answer(answer, entry))


def missing_field(problem: Problem) -> str | None:
    """Return why no answer to a problem can be scored; None for a problem of reasoning-gym."""
    absent = [field for field in (TASK, ENTRY) if field not in problem.fields]
    if absent:
        return f"problem {problem.id!r} has no field {absent[0]}: it is not from reasoning-gym"
    return None


class GymVerifier:
    r"""Right if the task scores the answer 1; partial credit, as for a substring, is wrong.

    The answer is in the last `<answer>` tags, else on an `Answer:` line, else in the last
    `\boxed{}`, else the response itself if it is one short line.

    Some scorers pass the answer to `eval`. They get only numbers, signs and one-letter or
    mathematical names; any other answer counts if it equals the reference.
    """

    def __init__(self, partial_credit: bool = False) -> None:
        """`partial_credit`: give the task's score, not right or wrong.

        Raises RewardError without reasoning-gym.
        """
        self._partial_credit = partial_credit
        require_package("reasoning_gym", purpose="verifier gym", error=RewardError)
        import reasoning_gym

        self._create = reasoning_gym.create_dataset
        self._task = lru_cache(_TASK_CACHE_SIZE)(self._load)

    def __call__(self, problem: Problem, response: str) -> Verdict:
        if (obstacle := missing_field(problem)) is not None:
            return error_verdict(f"gym: {obstacle}")
        name = problem.fields[TASK]
        entry = problem.fields[ENTRY]
        task = try_call(
            lambda: self._task(name, json.dumps(problem.fields.get(CONFIG) or {}, sort_keys=True))
        )
        if isinstance(task, Failure):
            return error_verdict(f"gym: task {name!r} {task.reason}")
        answer = extract(response)
        # the answer as written and without bold, dollars and full stops, which few scorers accept
        texts = () if answer is None else (answer, strip_formatting(answer))
        score = try_call(
            lambda: max((task.score(text, entry) for text in dict.fromkeys(texts)), default=0.0)
        )
        if isinstance(score, Failure) or not math.isfinite(score):
            reference_score = try_call(lambda: task.score(str(entry["answer"]), entry))
            if isinstance(reference_score, Failure) or not math.isfinite(reference_score):
                if isinstance(reference_score, Failure):
                    reason = reference_score.reason
                else:
                    reason = f"returned {reference_score}"
                return error_verdict(
                    f"gym: the scorer of task {name!r} {reason}, for the reference as well"
                )
            score = 0.0  # only this answer is too much for the scorer
        if self._partial_credit:
            return Verdict(None, score)
        return binary_verdict(
            score >= 1.0, " ".join(strip_formatting(answer or "").casefold().split())
        )

    def _load(self, name: str, config: str) -> "Task":
        dataset = self._create(name, **json.loads(config))
        source = try_call(lambda: inspect.getsource(dataset.score_answer))
        return Task(
            dataset.score_answer,
            isinstance(source, Failure) or _RUNS_CODE.search(source) is not None,
        )


def extract(response: str) -> str | None:
    """Return the answer's text, or None if the response gives none."""
    text = final_part(response)
    if (tagged := _last_tagged(text)) is not None:
        return tagged.strip()
    line = marked_answer(text)
    if line is None and "\n" not in text.strip() and len(text) <= _SHORT_CHARS:
        line = text
    return line.strip() if line and line.strip() else None


def _last_tagged(text: str) -> str | None:
    """Return the last `<answer>...</answer>`. Linear time, unlike a pattern for both tags."""
    start: int | None = None
    tagged = None
    for tag in _TAG.finditer(text):
        if not tag["close"]:
            start = tag.end() if start is None else start
        elif start is not None:
            tagged = text[start : tag.start()]
            start = None
    return tagged
