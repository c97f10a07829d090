"""Evaluation as the paper does it: k samples a problem, judged on the verdict alone, with intervals."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean
from typing import Any

import numpy as np

from dapo.engines.engine import RolloutEngine
from dapo.errors import EngineError
from dapo.keyed import keyed_seed
from dapo.rollout import Encoder, Judge
from dapo.types import Generation, GenerationRequest, Problem, Verdict

BOOTSTRAP_RESAMPLES = 2000


@dataclass(frozen=True)
class EvaluationPlan:
    """How evaluation samples; the paper: 32 samples, temperature 1.0, top_p 0.7."""

    name: str
    samples_per_problem: int
    temperature: float
    top_p: float
    max_response_tokens: int
    stop_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class JudgedProblem:
    """One problem's k responses."""

    problem: Problem
    texts: tuple[str, ...]
    generations: tuple[Generation, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def marks(self) -> list[float]:
        """One a valid response: 1 or 0 for right and wrong, the score itself where the verifier only grades."""
        valid = [verdict for verdict in self.verdicts if verdict.error is None]
        return [float(v.correct) if v.correct is not None else v.score for v in valid]


@dataclass(frozen=True)
class Evaluation:
    """The result over all problems."""

    plan: EvaluationPlan
    problems: tuple[JudgedProblem, ...]

    @property
    def judged(self) -> list[JudgedProblem]:
        """Problems with at least one valid verdict."""
        return [problem for problem in self.problems if problem.marks]

    def summary(self) -> dict[str, Any]:
        """Everything that is reported, as JSON values: `accuracy` is avg@k, with its 95 % interval."""
        k = self.plan.samples_per_problem
        means = [fmean(problem.marks) for problem in self.judged]
        low, high = mean_interval(means, seed=self.plan.seed)
        generations = [g for problem in self.problems for g in problem.generations]
        errors = [v.error for problem in self.problems for v in problem.verdicts if v.error is not None]
        binary = all(v.correct is not None for p in self.judged for v in p.verdicts if v.error is None)
        return {
            "name": self.plan.name,
            "accuracy": fmean(means) if means else 0.0,
            "low": low,
            "high": high,
            "problems": len(self.problems),
            "samples_per_problem": k,
            "binary": binary,
            **(self._pass_at(k) if binary else {}),
            "response_tokens_mean": fmean([len(g.token_ids) for g in generations]) if generations else 0.0,
            "truncated_fraction": fmean([g.finish == "length" for g in generations]) if generations else 0.0,
            "verifier_errors": len(errors),
            "most_frequent_error": max(set(errors), key=errors.count) if errors else None,
            "by_source": self._by_source(),
            "temperature": self.plan.temperature,
            "top_p": self.plan.top_p,
            "max_response_tokens": self.plan.max_response_tokens,
            "seed": self.plan.seed,
        }

    def metrics(self) -> dict[str, float]:
        """For the metrics file: `eval/NAME/...`."""
        summary = self.summary()
        name = self.plan.name
        metrics = {f"eval/{name}/{key}": summary[key] for key in ("accuracy", "low", "high")}
        metrics[f"eval/{name}/avg@{self.plan.samples_per_problem}"] = summary["accuracy"]
        metrics[f"eval/{name}/response_tokens_mean"] = summary["response_tokens_mean"]
        metrics[f"eval/{name}/truncated_fraction"] = summary["truncated_fraction"]
        if len(summary["by_source"]) > 1:
            metrics.update({f"eval/{source}/accuracy": row["accuracy"] for source, row in summary["by_source"].items()})
        return metrics

    def table(self) -> list[dict[str, Any]]:
        """One row a problem, with every response."""
        return [
            {
                "id": judged.problem.id,
                "source": judged.problem.source,
                "question": question_text(judged.problem),
                "answer": judged.problem.answer,
                "accuracy": fmean(judged.marks) if judged.marks else None,
                "responses": [
                    {
                        "text": text,
                        "correct": verdict.correct,
                        "score": verdict.score,
                        "error": verdict.error,
                        "tokens": len(generation.token_ids),
                        "finish": generation.finish,
                    }
                    for text, verdict, generation in zip(judged.texts, judged.verdicts, judged.generations, strict=True)
                ],
            }
            for judged in self.problems
        ]

    def _pass_at(self, k: int) -> dict[str, float]:
        powers = [j for j in (2**i for i in range(k.bit_length())) if j <= k]
        return {
            f"pass@{j}": fmean(
                [pass_at_k(len(p.marks), round(sum(p.marks)), j) for p in self.judged if len(p.marks) >= j]
            )
            for j in powers
            if any(len(p.marks) >= j for p in self.judged)
        }

    def _by_source(self) -> dict[str, dict[str, float]]:
        rows: dict[str, list[float]] = {}
        for problem in self.judged:
            rows.setdefault(problem.problem.source, []).append(fmean(problem.marks))
        return {source: {"accuracy": fmean(means), "problems": len(means)} for source, means in sorted(rows.items())}


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

    The draws are keyed by (seed, problem, sample): two evaluations of a run meet the same noise. The overlong penalty
    plays no part here.
    """
    k = plan.samples_per_problem
    responses: list[list[Generation | None]] = [[None] * k for _ in problems]
    verdicts: list[Future[tuple[Verdict, ...]] | None] = [None] * len(problems)
    texts: list[tuple[str, ...]] = [()] * len(problems)
    place: Mapping[str, tuple[int, int]] = {f"eval/{p}/{i}": (p, i) for p in range(len(problems)) for i in range(k)}
    for p, problem in enumerate(problems):
        engine.submit(_requests(p, problem, encoder, plan))
    waiting, done = set(place), 0
    while waiting:
        for generation in engine.poll():
            if generation.request_id not in waiting:
                raise EngineError(f"the engine answered request {generation.request_id!r}, which is not in flight")
            waiting.remove(generation.request_id)
            p, i = place[generation.request_id]
            responses[p][i] = generation
            finished = [g for g in responses[p] if g is not None]
            if len(finished) == k:
                ids = [g.token_ids for g in finished]
                texts[p] = tuple(encoder.decode(response) for response in ids)
                verdicts[p] = judge.submit(problems[p], texts[p], ids)
                done += 1
                on_progress(done, len(problems))
    return Evaluation(
        plan,
        tuple(
            JudgedProblem(problem, text, tuple(g for g in row if g is not None), future.result())
            for problem, text, row, future in zip(problems, texts, responses, verdicts, strict=True)
            if future is not None
        ),
    )


def _requests(p: int, problem: Problem, encoder: Encoder, plan: EvaluationPlan) -> list[GenerationRequest]:
    prompt_ids = encoder.encode(problem)
    return [
        GenerationRequest(
            id=f"eval/{p}/{i}",
            prompt_ids=prompt_ids,
            max_new_tokens=plan.max_response_tokens,
            temperature=plan.temperature,
            top_p=plan.top_p,
            seed=keyed_seed(plan.seed, "eval", problem.id, i),
            stop_ids=plan.stop_ids,
        )
        for i in range(plan.samples_per_problem)
    ]


def question_text(problem: Problem) -> str:
    """The problem as a person reads it: its text, or its last message."""
    return problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The unbiased estimate of P(at least one of k is correct) from `correct` of `samples` (Chen et al. 2021)."""
    if not 0 <= correct <= samples or not 0 < k <= samples:
        raise ValueError(f"pass@k needs 0 <= correct <= samples and 0 < k <= samples, got {correct}, {samples}, {k}")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)


def mean_interval(means: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """95 % interval of the mean over problems, by a keyed bootstrap over problems.

    Where all problems score 0, or all score 1, a bootstrap has no width: there it is Wilson's interval.
    """
    if not means:
        return 0.0, 1.0
    values = np.asarray(means, dtype=np.float64)
    if values.min() == values.max() and values[0] in (0.0, 1.0):
        return _wilson(float(values[0]), len(values))
    generator = np.random.Generator(np.random.Philox(key=keyed_seed(seed, "bootstrap")))
    resampled = np.array(
        [values[generator.integers(0, len(values), len(values))].mean() for _ in range(BOOTSTRAP_RESAMPLES)]
    )
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(low), float(high)


def _wilson(share: float, count: int) -> tuple[float, float]:
    z = 1.959964
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)
