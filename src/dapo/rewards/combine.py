"""One reward from one or several verifiers with weights: the specification, the sum, and the built
verifiers.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from dapo.core.errors import RewardError
from dapo.core.loading import Failure, own_name, try_call
from dapo.core.verifier_limits import MAX_SCORE
from dapo.rewards.verdicts import TokenIds, error_verdict
from dapo.rewards.verifier import GroupVerifier, TemplateReader, get_verifier, reads_answer
from dapo.rewards.verifiers.function import (
    NOT_APPLIED,
    FunctionVerifier,
    RewardFunction,
    ScoreFunction,
    function_verifier,
)
from dapo.types import EpisodeText, Problem, Verdict

_COPIED = re.compile(r"^reward_[0-9a-f]{8}:")
"""The module of a function that was copied into the run (`api/code_writer.py`)."""
NO_FUNCTIONS: Mapping[str, Callable[..., Any]] = {}
Scope: TypeAlias = Literal["response", "group"]  # what a verifier sees in one call


@dataclass(frozen=True)
class RewardSpec:
    """The verifiers of a reward with weights and options, from which a worker can rebuild it."""

    weights: Mapping[str, float]
    options: Mapping[str, Mapping[str, Any]]  # options by verifier
    threshold: float | None = None
    template_time: str | None = None
    """The local time that a chat template of a verifier reads as now, in ISO format; None: that at
    which the verifier is built.
    """

    @classmethod
    def of(
        cls,
        spec: str | Mapping[str, float],
        *,
        options: Mapping[str, Any] | None = None,
        threshold: float | None = None,
        template_time: datetime | None = None,
    ) -> "RewardSpec":
        """Read a `reward` section; with several verifiers `options` are keyed by verifier.

        Raises RewardError if the section is invalid.
        """
        options = options or {}
        time = None if template_time is None else template_time.isoformat()
        if isinstance(spec, str):
            return cls({spec: 1.0}, {spec: dict(options)}, threshold, time)
        if not spec:
            raise RewardError(
                "no verifier: expected a name, module:function, or a mapping of several to their"
                " weights"
            )
        for name, weight in spec.items():
            if (
                isinstance(weight, bool)
                or not isinstance(weight, int | float)
                or not math.isfinite(weight)
            ):
                raise RewardError(
                    f"the weight of verifier {name} must be a finite number, got {weight!r}"
                )
        for name, values in options.items():
            if name not in spec:
                raise RewardError(
                    f"options of {name!r}, which is not among the verifiers ({', '.join(spec)}); "
                    "with several verifiers, options are given as {verifier: {option: value}}"
                )
            if not isinstance(values, Mapping):
                raise RewardError(
                    f"the options of verifier {name} must be a mapping, got {values!r}"
                )
        options_by_name = {name: dict(options.get(name, {})) for name in spec}
        return cls(dict(spec), options_by_name, threshold, time)

    @property
    def reads_answer(self) -> bool:
        """Return True if a registered verifier compares with the answer; functions name columns."""
        return any(reads_answer(name, self.options[name]) for name in self.weights)

    def combine(self, verdicts: Sequence[Verdict | None]) -> Verdict:
        """Combine verdicts in the order of `weights`, None from verifiers that do not apply.

        The score is the weighted sum over the verifiers that apply; their own scores, and the
        numbers that an agent returned, are the `components`. `correct` is whether all binary
        verdicts are right; without any, whether the score reaches the threshold (None without one).
        An error of one verifier is the error of the sum: without a part it would be a different
        reward.
        """
        applied = {name: o for name, o in zip(self.weights, verdicts, strict=True) if o is not None}
        errors = [verdict.error for verdict in applied.values() if verdict.error is not None]
        if errors:
            return error_verdict("; ".join(errors))
        if not applied:
            return error_verdict(f"{', '.join(map(own_name, self.weights))}: {NOT_APPLIED}")
        score = 0.0
        for name, verdict in applied.items():  # `sum` rounds differently from Python 3.12 on
            score += self.weights[name] * verdict.score
        if not abs(score) <= MAX_SCORE:
            name = f"the {'weighted sum of the scores' if len(applied) > 1 else 'score'}"
            return error_verdict(
                f"{', '.join(map(own_name, applied))}: {name} is {score:g}, expected {MAX_SCORE:g} at most in size"
            )
        decided = {
            name: verdict.correct
            for name, verdict in applied.items()
            if verdict.correct is not None
        }
        reaches_threshold = None if self.threshold is None else score >= self.threshold
        answer = next(
            (verdict.answer for verdict in applied.values() if verdict.answer is not None), None
        )
        are_several = len(self.weights) > 1
        labels = component_labels(self.weights)
        components = {}
        if are_several:
            components = {labels[name]: verdict.score for name, verdict in applied.items()}
        for name, verdict in applied.items():
            for label, value in verdict.components.items():
                free_label = f"{labels[name]}.{label}" if label in components else label
                components[free_label] = value
        return Verdict(
            all(decided.values()) if decided else reaches_threshold,
            score,
            answer=answer,
            components=components,
            deciders=tuple(decided) if are_several else (),
        )


def component_labels(names: Iterable[str]) -> dict[str, str]:
    """Return the names of components, in metrics and tables, by those of their verifiers.

    A function that was copied into the run has its own name, without its module's checksum, which
    changes with its code; two of one name keep their modules.

    Example:
        >>> component_labels(["math", "reward_13f1aaba:has_digit"])
        {'math': 'math', 'reward_13f1aaba:has_digit': 'has_digit'}
    """
    short_names = {name: _COPIED.sub("", name) for name in names}
    counts = Counter(short_names.values())
    return {name: short if counts[short] == 1 else name for name, short in short_names.items()}


class CombinedVerifier:
    """The verifiers of a specification, built to judge groups in this process."""

    def __init__(
        self, spec: RewardSpec, functions: Mapping[str, Callable[..., Any]] = NO_FUNCTIONS
    ) -> None:
        """Import all verifiers but `functions`, which are given. Raises RewardError."""
        self.spec = spec
        self._verifiers = [
            (
                function_verifier(name, functions[name], spec.options[name])
                if name in functions
                else get_verifier(name, **spec.options[name])
            )
            for name in spec.weights
        ]
        if spec.template_time is not None:
            for verifier in self._verifiers:
                if isinstance(verifier, TemplateReader):
                    verifier.template_time = datetime.fromisoformat(spec.template_time)
        self.scopes: Mapping[Scope, tuple[int, ...]] = {
            "response": tuple(
                i for i, v in enumerate(self._verifiers) if not isinstance(v, GroupVerifier)
            ),
            "group": tuple(
                i for i, v in enumerate(self._verifiers) if isinstance(v, GroupVerifier)
            ),
        }
        """Positions in `spec.weights` of the verifiers that judge single responses, and of those
        that judge groups.
        """
        self.needed_columns: Mapping[str, Sequence[str]] = {
            name: sorted(verifier.needed_columns)
            for name, verifier in zip(spec.weights, self._verifiers, strict=True)
            if isinstance(verifier, ScoreFunction | RewardFunction)
        }
        """The data columns that each user function requires."""

    def judge_group(
        self, problem: Problem, responses: Sequence[str], token_ids: TokenIds
    ) -> list[Verdict]:
        columns = [
            self._column(index, problem, responses, token_ids)
            for index in range(len(self._verifiers))
        ]
        return [self.spec.combine(row) for row in zip(*columns, strict=True)]

    def verdicts(
        self, scope: Scope, problem: Problem, responses: Sequence[str], token_ids: TokenIds
    ) -> list[list[Verdict | None]]:
        """Return the verdicts of the verifiers of one scope, as `[response][verifier]`."""
        columns = [
            self._column(index, problem, responses, token_ids) for index in self.scopes[scope]
        ]
        return [[column[i] for column in columns] for i in range(len(responses))]

    def _column(
        self, index: int, problem: Problem, responses: Sequence[str], token_ids: TokenIds
    ) -> Sequence[Verdict | None]:
        """Return one verifier's verdicts, without those on episodes whose environment failed."""
        failures = [
            text.episode.failure if isinstance(text, EpisodeText) else None for text in responses
        ]
        judged = self._judged(index, problem, responses, token_ids)
        return [
            verdict if failure is None else error_verdict(failure)
            for verdict, failure in zip(judged, failures, strict=True)
        ]

    def _judged(
        self, index: int, problem: Problem, responses: Sequence[str], token_ids: TokenIds
    ) -> Sequence[Verdict | None]:
        name = own_name(list(self.spec.weights)[index])
        verifier = self._verifiers[index]
        if isinstance(verifier, GroupVerifier):
            result = try_call(lambda: verifier.judge_group(problem, responses, token_ids))
            if isinstance(result, Failure):
                return [error_verdict(f"{name} {result.reason}")] * len(responses)
            return result
        verify = verifier.judge if isinstance(verifier, FunctionVerifier) else verifier
        results = [try_call(partial(verify, problem, response)) for response in responses]
        return [
            error_verdict(f"{name} {r.reason}") if isinstance(r, Failure) else r for r in results
        ]


def build_verifier(
    spec: str | Mapping[str, float],
    *,
    options: Mapping[str, Any] | None = None,
    threshold: float | None = None,
    functions: Mapping[str, Callable[..., Any]] = NO_FUNCTIONS,
    template_time: datetime | None = None,
) -> CombinedVerifier:
    """Return the verifiers of a `reward` section, ready to judge in this process.

    Args:
        spec: a verifier's name, or several with their weights.
        options: options of the only verifier, or by verifier if there are several.
        threshold: the lowest score of a correct response, for verifiers that give scores.
        functions: callables by their name in `spec`, instead of an import.
        template_time: the local time that a verifier's chat template reads as now; None: this one.

    Raises:
        RewardError: a verifier does not exist or cannot be used.
    """
    reward = RewardSpec.of(spec, options=options, threshold=threshold, template_time=template_time)
    return CombinedVerifier(reward, functions)


class Judge(Protocol):
    """Judges groups of responses, possibly in the background."""

    def submit(
        self, problem: Problem, responses: Sequence[str], token_ids: TokenIds
    ) -> "Future[tuple[Verdict, ...]]":
        """One verdict per response, in order; `token_ids[i]` are the tokens of `responses[i]`."""

    def close(self) -> None:
        """Free everything; pending verdicts become RewardError. May be called twice."""


@runtime_checkable
class TimedJudge(Protocol):
    """A judge that measures how long its verifiers take."""

    def pop_mean_latency(self) -> float | None:
        """Return the mean seconds per call since this was last read; None without a call."""


class InlineJudge:
    """Judges synchronously in this process without a time limit: for tests and trusted code."""

    def __init__(
        self,
        spec: str | Mapping[str, float],
        *,
        options: Mapping[str, Any] | None = None,
        threshold: float | None = None,
        functions: Mapping[str, Callable[..., Any]] = NO_FUNCTIONS,
        template_time: datetime | None = None,
    ) -> None:
        """The arguments are those of `build_verifier`.

        Raises RewardError if the verifier cannot be built.
        """
        self._verifier = build_verifier(
            spec,
            options=options,
            threshold=threshold,
            functions=functions,
            template_time=template_time,
        )
        self.needed_columns = self._verifier.needed_columns
        """The data columns that each user function requires."""
        self._closed = False

    def log_to(self, log: Callable[[str], None]) -> None:
        """Log nothing: there are no workers to lose."""

    def submit(
        self, problem: Problem, responses: Sequence[str], token_ids: TokenIds
    ) -> "Future[tuple[Verdict, ...]]":
        if self._closed:
            raise RewardError("the judge is closed")
        future: Future[tuple[Verdict, ...]] = Future()
        future.set_result(tuple(self._verifier.judge_group(problem, responses, token_ids)))
        return future

    def close(self) -> None:
        self._closed = True

    def __enter__(self) -> "InlineJudge":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
