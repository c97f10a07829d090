"""What a run says of itself where a beginner would look for the cause: each piece of advice once, with what to do."""

from collections.abc import Iterator, Mapping, Sequence

from dapo.evaluation.scores import Evaluation, JudgedProblem, question_text
from dapo.training.shortfall import reward_test_command
from dapo.training.state import Run
from dapo.types import Sample

TRUNCATED = 0.5
"""The fraction of responses that end at the limit of tokens above which a run says so."""
JUDGE_WAIT = 0.5
"""The fraction of a step spent waiting for verdicts above which a run says so."""
_MIN_JUDGE_WAIT_S = 1.0
_SHOWN_RESPONSES, _SHOWN_CHARS = 2, 160


def advise_after_evaluation(run: Run, evaluation: Evaluation) -> None:
    """After the first evaluation: some judged responses, and whether most of them are cut off at the limit."""
    if run.state.step == 0:
        _say(run, "responses", "\n".join(["responses of the model as it is:", *_responses(evaluation)]))
    summary = evaluation.summary()
    if summary["truncated_fraction"] > TRUNCATED:
        limit = evaluation.plan.max_response_tokens
        _say(run, "truncated", _truncated(summary["truncated_fraction"], limit, penalised=False))


def advise_after_step(run: Run, metrics: Mapping[str, float]) -> None:
    """Whether most responses of the step were cut off, and whether most of its time was spent waiting for verdicts."""
    truncated, config = metrics["rollout/truncated_fraction"], run.config
    if truncated > TRUNCATED:
        limit, penalised = config.rollout.max_response_tokens, config.overlong.mode == "soft"
        _say(run, "truncated", _truncated(truncated, limit, penalised=penalised))
    waited = metrics["time/judge_wait_s"]
    training_s = metrics["time/step_s"] - metrics.get("time/evaluate_s", 0.0)
    if waited > max(JUDGE_WAIT * training_s, _MIN_JUDGE_WAIT_S):
        _say(
            run,
            "verifier",
            f"the engine waited {waited:.1f} of {training_s:.1f} s for verdicts: the verifier is slower than "
            "the model; raise reward.workers or make it faster (dapo reward test times it)",
        )


def advise_on_advantages(run: Run, samples: Sequence[Sample]) -> None:
    """Whether the step had no advantage but zeros, and so taught nothing: possible without dynamic sampling only."""
    if samples and not any(sample.advantage for sample in samples):
        _say(
            run,
            "advantages",
            "every advantage is zero, as the responses of each group have equal rewards: such a step teaches nothing; "
            f"{reward_test_command(run.config)} shows what the reward gives",
        )


def _say(run: Run, kind: str, text: str) -> None:
    if kind not in run.given_advice:
        run.given_advice.add(kind)
        run.tracker.message(f"step {run.state.step}: {text}")


def _truncated(fraction: float, limit: int, *, penalised: bool) -> str:
    consequence = " and are penalised" if penalised else ""
    return (
        f"{fraction:.1%} of the responses end at the limit of {limit} tokens{consequence}; raise "
        "rollout.max_response_tokens (or eval.max_response_tokens), or ask for shorter answers"
    )


def _responses(evaluation: Evaluation) -> Iterator[str]:
    shown = [problem for problem in evaluation.problems if problem.valid][:_SHOWN_RESPONSES]
    for problem in shown:
        yield f"  question   {_line(question_text(problem.problem.prompt))}"
        yield f"  reference  {_line(problem.problem.answer)}"
        yield f"  response   {_line(problem.valid[0].text)}  [{_mark(problem)}]"


def _mark(problem: JudgedProblem) -> str:
    response = problem.valid[0]
    return f"score {response.score:g}" if response.correct is None else "correct" if response.correct else "wrong"


def _line(text: str) -> str:
    """The end of a text on one line: a question and an answer stand there."""
    words = " ".join(text.split())
    return words if len(words) <= _SHOWN_CHARS else f"... {words[-_SHOWN_CHARS:]}"
