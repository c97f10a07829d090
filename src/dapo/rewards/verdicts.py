"""Makes verdicts: right or wrong, errors, and from the results of user code; None where a verifier
does not apply.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Real
from typing import Any, TypeAlias

from dapo.core.loading import try_call
from dapo.core.secrets import mask_text
from dapo.core.text import shorten
from dapo.core.typed_values import of_json_values, to_json_values, with_texts
from dapo.types import Episode, EpisodeText, Problem, Verdict

TokenIds: TypeAlias = Sequence[Sequence[int]]  # the tokens of each of several responses
_SHOWN_CHARS = 80


def binary_verdict(correct: bool, answer: str | None = None) -> Verdict:
    """Return a verdict of right or wrong, scored +1 or -1 (Eq. 7); `answer` as in `Verdict`."""
    return Verdict(correct=correct, score=1.0 if correct else -1.0, answer=answer)


def number_verdict(reference: Fraction | None, number: Fraction | None) -> Verdict:
    """Right if the number that was found, if any, is the reference's."""
    from dapo.libs.strict_math.text import normalize_number  # few verifiers wait for its import

    return binary_verdict(number == reference, "" if number is None else normalize_number(number))


def error_verdict(reason: str) -> Verdict:
    """Return the verdict on a response that cannot be judged, which is left out of training.

    `reason` starts with the verifier's name; secrets in it are masked.
    """
    # a reason may quote what no file can hold: halves of surrogate pairs
    return Verdict(
        correct=None, score=0.0, error=mask_text(reason.encode(errors="backslashreplace").decode())
    )


def problem_to_json(problem: Problem) -> dict[str, Any]:
    """Return a problem as JSON values, for a judge that is not ours: dates and decimals as text."""
    return {**_with_plain_prompt(problem), "fields": with_texts(problem.fields)}


def problem_to_frame(problem: Problem) -> dict[str, Any]:
    """Return a problem as JSON values from which `problem_of_frame` makes it, types included."""
    fields = to_json_values(problem.fields)
    # most problems have JSON values alone, which are not searched in every process again
    return {**_with_plain_prompt(problem), "fields": fields, "typed": fields != problem.fields}


def problem_of_frame(values: Mapping[str, Any]) -> Problem:
    """Return the problem that `problem_to_frame` wrote."""
    fields = of_json_values(values["fields"]) if values["typed"] else values["fields"]
    rest = {name: value for name, value in values.items() if name not in ("fields", "typed")}
    return Problem(**rest, fields=fields)


def _with_plain_prompt(problem: Problem) -> dict[str, Any]:
    prompt: str | list[dict[str, Any]]
    if isinstance(problem.prompt, str):
        prompt = problem.prompt
    else:
        prompt = [dict(message) for message in problem.prompt]
    return {**vars(problem), "prompt": prompt}


def responses_to_json(responses: Sequence[str]) -> dict[str, Any]:
    """Return responses as JSON values for a judge in another process: texts, and any episodes."""
    episodes = [vars(text.episode) if isinstance(text, EpisodeText) else None for text in responses]
    return {"responses": list(responses), **({"episodes": episodes} if any(episodes) else {})}


def responses_of_json(values: Mapping[str, Any]) -> list[str]:
    """Return the responses that `responses_to_json` wrote."""
    texts: list[str] = values["responses"]
    episodes = values.get("episodes") or [None] * len(texts)
    pairs = zip(texts, episodes, strict=True)
    return [text if episode is None else EpisodeText(Episode(**episode)) for text, episode in pairs]


def to_verdict(name: str, value: Any) -> Verdict | None:
    """One result of the function `name` as a verdict.

    A bool is right or wrong (Eq. 7: +1 or -1), a number a score without right or wrong; None means
    not applicable.
    """
    value = _unboxed(value)
    if value is None:
        return None
    if isinstance(value, Verdict):
        return _checked(name, value)
    if isinstance(value, bool):
        return binary_verdict(value)
    score = _finite(value)
    if score is None:
        return error_verdict(
            f"{name} returned {shown_result(value)}, expected a finite number, a bool or None"
        )
    return Verdict(None, score)


def to_verdicts(name: str, results: Any, count: int) -> list[Verdict | None]:
    """Return the verdict of each of `count` responses; errors unless `results` is such a list."""
    if hasattr(results, "tolist"):  # a NumPy array or a tensor
        results = results.tolist()
    if not isinstance(results, list | tuple):
        reason = (
            f"{name} returned {shown_result(results)}, expected a list with one number for each"
            f" response ({count})"
        )
    elif len(results) != count:
        reason = f"{name} returned {len(results)} results for {count} responses"
    else:
        return [to_verdict(name, value) for value in results]
    return [error_verdict(reason) for _ in range(count)]


def to_correct(value: Any) -> bool | None:
    """Return a value of any type that equals 1 or 0 as right or wrong; None for another value."""
    value = _unboxed(value)
    if try_call(lambda: bool(value == 1)) is True:
        return True
    return False if try_call(lambda: bool(value == 0)) is True else None


def shown_result(value: Any) -> str:
    """Return a result of user code, for a message."""
    text = try_call(lambda: repr(value))
    if not isinstance(text, str):
        return f"a {type(value).__name__}"
    return shorten(text, _SHOWN_CHARS)


def _unboxed(value: Any) -> Any:
    """Return a NumPy or torch scalar as a Python scalar."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _checked(name: str, verdict: Verdict) -> Verdict:
    if verdict.error is not None:
        return error_verdict(f"{name}: {verdict.error}")
    correct = None if verdict.correct is None else to_correct(verdict.correct)
    score = _finite(_unboxed(verdict.score))
    if score is None or (correct is None and verdict.correct is not None):
        expected = "a bool (or 1, 0) or None as correct, a finite score"
        return error_verdict(f"{name} returned {shown_result(verdict)}, expected {expected}")
    return Verdict(
        correct, score, answer=verdict.answer if isinstance(verdict.answer, str) else None
    )
