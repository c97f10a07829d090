"""The first responses of a run's model, shown before training: where a beginner looks for the cause."""

from collections.abc import Iterator

from dapo.core.text import one_line, shorten
from dapo.evaluation.scores import Evaluation, JudgedProblem, question_text
from dapo.training.state import Run

_SHOWN_RESPONSES, _SHOWN_CHARS = 2, 160


def show_responses(run: Run, evaluation: Evaluation) -> None:
    """Print some judged responses of the model as it is."""
    run.tracker.message(
        f"step {run.state.step}: responses of the model as it is:\n" + "\n".join(_responses(evaluation))
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
    return shorten(one_line(text), _SHOWN_CHARS, keep="end")
