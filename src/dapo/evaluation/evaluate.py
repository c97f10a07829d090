"""Evaluates as the paper does: k samples per problem, from an engine or a server, scored by their
verdicts alone.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Protocol

from dapo.core.errors import DataError, EngineError
from dapo.core.journal import Journal
from dapo.core.rng import keyed_seed
from dapo.data.prompts import Encoder
from dapo.engines.engine import RolloutEngine, capabilities_of, episode_problem
from dapo.evaluation.scores import (
    Beginning,
    Evaluation,
    EvaluationPlan,
    JudgedProblem,
    JudgedResponse,
)
from dapo.rewards.combine import Judge
from dapo.types import EpisodeText, Finish, GenerationRequest, Problem, Verdict


@dataclass(frozen=True)
class Response:
    """One sampled response that has no verdict yet."""

    text: str
    token_ids: Sequence[int]  # empty if a server returns only text
    tokens: int  # sampled ones
    finish: Finish | None  # None if the response could not be sampled
    error: str | None = None  # the reason why it could not be sampled


class Sampler(Protocol):
    """The source of an evaluation's responses, sampled by `plan`."""

    @property
    def plan(self) -> EvaluationPlan: ...

    def submit(self, index: int, problem: Problem) -> None:
        """Request the k responses to `problem`; each is returned with `index`."""

    def poll(self) -> list[tuple[int, int, Response]]:
        """Return the responses since the last call, with the indices of problem and sample."""

    def abort(self) -> None:
        """Drop all requests in flight."""


class EngineSampler:
    """Samples from a rollout engine; a seed is a function of (run seed, problem, sample)."""

    def __init__(
        self,
        engine: RolloutEngine,
        encoder: Encoder,
        plan: EvaluationPlan,
        *,
        positions: int | None = None,
    ) -> None:
        """Sample nothing yet.

        Args:
            engine: the engine, which may sample for others too, but not at the same time.
            encoder: encodes the problems' prompts.
            plan: the sampling settings.
            positions: the tokens that the model can read, with which a response ends at the latest;
                None: the plan's limit is known to fit.
        """
        self.plan = plan
        self.engine = engine
        self._encoder = encoder
        self._positions = positions
        self._pending: dict[str, tuple[int, int]] = {}

    def with_plan(self, plan: EvaluationPlan) -> "EngineSampler":
        return EngineSampler(self.engine, self._encoder, plan, positions=self._positions)

    def submit(self, index: int, problem: Problem) -> None:
        """See Sampler. Raises DataError if the prompt leaves no room for a response."""
        prompt_ids = self._encoder.encode(problem)
        plan = self.plan
        limit = plan.max_response_tokens
        if self._positions is not None:
            limit = min(limit, self._positions - len(prompt_ids))
        if limit < 1:
            raise DataError(
                f"a prompt of {len(prompt_ids):,} tokens fills the context of the model, which is"
                f" {self._positions:,} tokens long; shorten it"
            )
        requests = [
            GenerationRequest(
                id=f"eval/{index}/{i}",
                prompt_ids=prompt_ids,
                max_new_tokens=limit,
                temperature=plan.temperature,
                top_p=plan.top_p,
                seed=keyed_seed(plan.seed, "eval", problem.id, i),
                stop_ids=plan.stop_ids,
                problem=episode_problem(self.engine, problem),
            )
            for i in range(plan.samples_per_problem)
        ]
        # requests with the same prompt are adjacent: engines share its prefill
        self.engine.submit(requests)
        # after the engine has taken them, so that `abort` names no request that it refused
        for i, request in enumerate(requests):
            self._pending[request.id] = (index, i)

    def abort(self) -> None:
        """Drop all requests in flight: the engine is used for something else afterwards."""
        self.engine.abort(list(self._pending))
        self._pending.clear()

    def poll(self) -> list[tuple[int, int, Response]]:
        """See Sampler. Raises EngineError if the engine answers a request that is not in flight."""
        answers = []
        for generation in self.engine.poll():
            if generation.request_id not in self._pending:
                raise EngineError(
                    f"the engine answered request {generation.request_id!r}, which is not in flight"
                )
            index, i = self._pending.pop(generation.request_id)
            text = generation.text(self._encoder.decode)
            response = Response(
                text, generation.token_ids, generation.num_sampled, generation.finish
            )
            answers.append((index, i, response))
        return answers

    def partial(self) -> list[tuple[int, int, Response]]:
        """Return the responses in flight as far as they are sampled, without a finish.

        Empty if the engine returns whole responses only.
        """
        partial = capabilities_of(self.engine).partial
        if partial is None:
            return []
        responses = []
        for name, ids in partial().items():
            if name in self._pending:
                index, i = self._pending[name]
                text = self._encoder.decode(ids)
                responses.append((index, i, Response(text, ids, len(ids), None)))
        return responses


def evaluate(
    sampler: Sampler,
    judge: Judge,
    problems: Sequence[Problem],
    *,
    journal: Journal | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, total, estimate: None,
    check: Callable[[], None] = lambda: None,
    until_width: float | None = None,
) -> Evaluation:
    """Sample k responses per problem and score them, without the overlong penalty.

    Args:
        sampler: The source of the responses; nothing else may be in flight in its engine.
        judge: The source of the verdicts.
        problems: The problems of the evaluation.
        journal: Records each judged problem; problems already in it are not sampled again.
        on_progress: Called with the numbers of scored and of all problems, and with the accuracy of
            those at the beginning of the order and its interval, as text.
        check: Called before each poll of the sampler; its exception ends the evaluation.
        until_width: End when the 95 % interval of the accuracy is at most this wide, in points. The
            problems are then evaluated in an order that is drawn by the plan's seed, and those at
            its beginning count: which ones does not depend on the lengths of responses.
    """
    judged = _read_journal(journal, problems)
    order = list(range(len(problems)))
    if until_width is not None:
        random.Random(keyed_seed(sampler.plan.seed, "evaluation order")).shuffle(order)
    beginning = Beginning(order, until_width)
    beginning.extend(judged)
    sampling: dict[int, dict[int, Response]] = {}
    for index in order:
        if index not in judged and not beginning.suffices:
            sampling[index] = {}
            sampler.submit(index, problems[index])
    judging: dict[int, tuple[list[Response], Future[tuple[Verdict, ...]]]] = {}
    on_progress(len(judged), len(problems), beginning.estimate)
    # problems are judged while others are sampled; a verifier may take longer than the engine
    while (sampling or judging) and not beginning.suffices:
        if sampling:
            check()
            for index, i, response in sampler.poll():
                sampling[index][i] = response
                if len(sampling[index]) == sampler.plan.samples_per_problem:
                    responses = [response for _, response in sorted(sampling.pop(index).items())]
                    future = _submit_to_judge(judge, problems[index], responses)
                    judging[index] = responses, future
        for index, (responses, future) in list(judging.items()):
            # with nothing left to sample `result` may wait
            if sampling and not future.done():
                continue
            del judging[index]
            judged[index] = JudgedProblem(
                problems[index], _with_verdicts(responses, future.result())
            )
            _write_journal(journal, index, judged[index])
            beginning.extend(judged)
            on_progress(len(judged), len(problems), beginning.estimate)
    if sampling:
        sampler.abort()
    counted = sorted(order[: beginning.num_problems])
    return Evaluation(
        sampler.plan,
        tuple(judged[index] for index in counted),
        num_all=len(problems),
        until_width=until_width if beginning.suffices else None,
    )


def _read_journal(journal: Journal | None, problems: Sequence[Problem]) -> dict[int, JudgedProblem]:
    """Return the judged problems of an evaluation that was interrupted, by index."""
    judged = {}
    if journal is not None:
        for key, record in journal.records.items():
            responses = tuple(JudgedResponse(**response) for response in record["responses"])
            judged[int(key)] = JudgedProblem(problems[int(key)], responses)
    return judged


def _write_journal(journal: Journal | None, index: int, judged: JudgedProblem) -> None:
    if journal is not None:
        responses = [asdict(response) for response in judged.responses]
        journal.add({"id": str(index), "responses": responses})


def _submit_to_judge(
    judge: Judge, problem: Problem, responses: Sequence[Response]
) -> "Future[tuple[Verdict, ...]]":
    """Request the verdicts of the responses that could be sampled, in their order."""
    sampled = [response for response in responses if response.error is None]
    if sampled:
        texts = [response.text for response in sampled]
        token_ids = [response.token_ids for response in sampled]
        return judge.submit(problem, texts, token_ids)
    no_verdicts: Future[tuple[Verdict, ...]] = Future()
    no_verdicts.set_result(())
    return no_verdicts


def _with_verdicts(
    responses: Sequence[Response], verdicts: Sequence[Verdict]
) -> tuple[JudgedResponse, ...]:
    """Join responses with their verdicts; one that could not be sampled has none."""
    verdicts_of_sampled = iter(verdicts)
    judged_responses = []
    for response in responses:
        if response.error is None:
            verdict = next(verdicts_of_sampled)
        else:
            verdict = Verdict(None, 0.0, response.error)
        judged = verdict.correct, verdict.score, verdict.error, verdict.answer
        if isinstance(response.text, EpisodeText):
            text = response.text.episode.transcript
        else:
            text = response.text
        judged_responses.append(JudgedResponse(text, *judged, response.tokens, response.finish))
    return tuple(judged_responses)
