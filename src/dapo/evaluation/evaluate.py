"""Evaluation as the paper does it: k samples a problem, from an engine or a server, judged on the verdict alone."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Protocol

from dapo.core.errors import EngineError
from dapo.core.journal import Journal
from dapo.core.rng import keyed_seed
from dapo.data.prompts import Encoder
from dapo.engines.engine import RolloutEngine
from dapo.evaluation.scores import Evaluation, EvaluationPlan, JudgedProblem, JudgedResponse
from dapo.rewards.judge import Judge
from dapo.types import Finish, GenerationRequest, Problem, Verdict


@dataclass(frozen=True)
class Response:
    """One sampled response, before it is judged."""

    text: str
    token_ids: Sequence[int]
    """Empty where a server only gives text."""
    tokens: int
    finish: Finish | None
    """None: it could not be had."""
    error: str | None = None
    """Why it could not be had."""


class Sampler(Protocol):
    """Where an evaluation's responses come from."""

    def submit(self, index: int, problem: Problem) -> None:
        """Ask for the k responses to a problem; `index` comes back with each."""

    def poll(self) -> list[tuple[int, int, Response]]:
        """What has arrived (maybe nothing): the problem's place, which of its k it is, and the response."""


class EngineSampler:
    """Responses from a rollout engine; the draws are keyed by (seed, problem, sample)."""

    def __init__(self, engine: RolloutEngine, encoder: Encoder, plan: EvaluationPlan) -> None:
        self._engine, self._encoder, self._plan = engine, encoder, plan
        self._waiting: dict[str, tuple[int, int]] = {}

    def submit(self, index: int, problem: Problem) -> None:
        """Requests that share their prompt are adjacent."""
        prompt_ids = self._encoder.encode(problem)
        plan = self._plan
        names = [f"eval/{index}/{i}" for i in range(plan.samples_per_problem)]
        self._waiting |= {name: (index, i) for i, name in enumerate(names)}
        self._engine.submit(
            [
                GenerationRequest(
                    id=name,
                    prompt_ids=prompt_ids,
                    max_new_tokens=plan.max_response_tokens,
                    temperature=plan.temperature,
                    top_p=plan.top_p,
                    seed=keyed_seed(plan.seed, "eval", problem.id, i),
                    stop_ids=plan.stop_ids,
                )
                for i, name in enumerate(names)
            ]
        )

    def poll(self) -> list[tuple[int, int, Response]]:
        """Raises EngineError for an answer that nobody waits for."""
        found = []
        for generation in self._engine.poll():
            if generation.request_id not in self._waiting:
                raise EngineError(f"the engine answered request {generation.request_id!r}, which is not in flight")
            index, i = self._waiting.pop(generation.request_id)
            ids = generation.token_ids
            found.append((index, i, Response(self._encoder.decode(ids), ids, len(ids), generation.finish)))
        return found


def evaluate(
    engine: RolloutEngine,
    judge: Judge,
    encoder: Encoder,
    problems: Sequence[Problem],
    plan: EvaluationPlan,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Sample k responses to each problem from the weights that the engine holds, and judge them.

    Two evaluations of a run meet the same noise. The overlong penalty plays no part here.
    """
    return evaluate_samples(EngineSampler(engine, encoder, plan), judge, problems, plan, on_progress=on_progress)


def evaluate_samples(
    sampler: Sampler,
    judge: Judge,
    problems: Sequence[Problem],
    plan: EvaluationPlan,
    *,
    journal: Journal | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """As `evaluate`, from any source of responses; what the journal holds already is not sampled again."""
    known = journal.records if journal is not None else {}
    finished = {
        int(index): JudgedProblem(problems[int(index)], tuple(JudgedResponse(**r) for r in record["responses"]))
        for index, record in known.items()
    }
    waiting: dict[int, dict[int, Response]] = {}
    for index, problem in enumerate(problems):
        if index not in finished:
            waiting[index] = {}
            sampler.submit(index, problem)
    judging: dict[int, tuple[list[Response], Future[tuple[Verdict, ...]]]] = {}
    on_progress(len(finished), len(problems))
    while waiting or judging:
        for index, i, response in sampler.poll() if waiting else ():
            waiting[index][i] = response
            if len(waiting[index]) == plan.samples_per_problem:
                responses = [response for _, response in sorted(waiting.pop(index).items())]
                judging[index] = responses, _submit_to_judge(judge, problems[index], responses)
        for index in [index for index, (_, future) in judging.items() if future.done() or not waiting]:
            responses, future = judging.pop(index)
            finished[index] = JudgedProblem(problems[index], _with_verdicts(responses, future.result()))
            if journal is not None:
                journal.add({"id": str(index), "responses": [asdict(r) for r in finished[index].responses]})
            on_progress(len(finished), len(problems))
    return Evaluation(plan, tuple(finished[index] for index in range(len(problems))))


def _submit_to_judge(judge: Judge, problem: Problem, responses: Sequence[Response]) -> "Future[tuple[Verdict, ...]]":
    """The verdicts on those responses that could be had."""
    successful = [response for response in responses if response.error is None]
    if successful:
        return judge.submit(problem, [r.text for r in successful], [r.token_ids for r in successful])
    no_verdicts: Future[tuple[Verdict, ...]] = Future()
    no_verdicts.set_result(())
    return no_verdicts


def _with_verdicts(responses: Sequence[Response], verdicts: Sequence[Verdict]) -> tuple[JudgedResponse, ...]:
    """One verdict for each response that could be had; the others carry their error."""
    remaining = iter(verdicts)
    found = []
    for response in responses:
        verdict = next(remaining) if response.error is None else Verdict(None, 0.0, response.error)
        found.append(JudgedResponse.of(response.text, verdict, tokens=response.tokens, finish=response.finish))
    return tuple(found)
