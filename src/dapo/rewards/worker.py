"""The process that runs verifiers for a VerifierPool. Imports no torch."""

from typing import Any

from dapo.core.loading import OUT_OF_MEMORY
from dapo.processes.worker import Answer, run
from dapo.rewards.combine import CombinedVerifier, RewardSpec
from dapo.rewards.verdicts import problem_of_frame, responses_of_json
from dapo.types import Verdict

_MAX_ERROR_CHARS = 1000
_MAX_ANSWER_CHARS = 200


def _judging(spec: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Return the verifiers of a reward, which judge some of a group's responses per call.

    Raises RewardError.
    """
    verifier = CombinedVerifier(RewardSpec(**spec))

    def judge(task: dict[str, Any]) -> dict[str, Any]:
        rows = verifier.verdicts(
            task["scope"],
            problem_of_frame(task["problem"]),
            responses_of_json(task),
            task["token_ids"],
        )
        verdicts = [[_verdict_to_json(verdict) for verdict in row] for row in rows]
        # the memory may still be full
        is_full = any(
            OUT_OF_MEMORY in (v[2] or "") for row in verdicts for v in row if v is not None
        )
        return {"verdicts": verdicts, "needs_restart": is_full}

    return {"scopes": verifier.scopes, "columns": verifier.needed_columns}, judge


def _verdict_to_json(verdict: Verdict | None) -> list[Any] | None:
    if verdict is None:
        return None
    error = verdict.error
    answer = verdict.answer
    return [
        verdict.correct,
        verdict.score,
        error and error[:_MAX_ERROR_CHARS],
        answer and answer[:_MAX_ANSWER_CHARS],
        dict(verdict.components),
    ]


if __name__ == "__main__":
    run(_judging)
