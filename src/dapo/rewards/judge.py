"""The interface through which the training loop gets verdicts, and an in-process judge."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from dapo.core.errors import RewardError
from dapo.rewards.combine import NO_FUNCTIONS, build_verifier
from dapo.rewards.verdicts import TokenIds
from dapo.types import Problem, Verdict


class Judge(Protocol):
    """Judges groups of responses, possibly in the background."""

    def submit(self, problem: Problem, responses: Sequence[str], token_ids: TokenIds) -> "Future[tuple[Verdict, ...]]":
        """One verdict per response, in order; `token_ids[i]` are the tokens of `responses[i]`."""

    def close(self) -> None:
        """Free everything; pending verdicts become RewardError. May be called twice."""


@runtime_checkable
class TimedJudge(Protocol):
    """A judge that measures how long its verifiers take."""

    def pop_mean_latency(self) -> float | None:
        """The mean seconds per call since this was last read; None without a call."""


class InlineJudge:
    """Judges synchronously in this process, without a time limit: for tests, notebooks and trusted verifiers."""

    def __init__(
        self,
        spec: str | Mapping[str, float],
        *,
        options: Mapping[str, Any] | None = None,
        threshold: float | None = None,
        functions: Mapping[str, Callable[..., Any]] = NO_FUNCTIONS,
    ) -> None:
        """The arguments are those of `build_verifier`. Raises RewardError if the verifier cannot be built."""
        self._verifier = build_verifier(spec, options=options, threshold=threshold, functions=functions)
        self.needed_columns = self._verifier.needed_columns
        """The data columns that each user function requires."""
        self._closed = False

    def submit(self, problem: Problem, responses: Sequence[str], token_ids: TokenIds) -> "Future[tuple[Verdict, ...]]":
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
