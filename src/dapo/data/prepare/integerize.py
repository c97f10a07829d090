"""Section 3.5: a model rewrites problems so that the answer is an integer; solving them again
checks the rewriting.
"""

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from dapo.core.http_client import ServerFailed
from dapo.core.journal import Journal
from dapo.core.rng import keyed_seed
from dapo.data.prepare import normalize
from dapo.data.problems import unique_problems
from dapo.data.sources.rows import ANSWER_COLUMNS, PROMPT_COLUMNS, other_fields, problem_id
from dapo.libs.strict_math.text import final_part, marked_answer, strip_formatting
from dapo.types import Message, Problem, content_text

Generate: TypeAlias = Callable[[str, int], str]  # maps a request and a seed to the model's response
Action: TypeAlias = Literal["unchanged", "rewritten", "rejected"]
ACTIONS: tuple[Action, ...] = ("unchanged", "rewritten", "rejected")
Item = TypeVar("Item")
Result = TypeVar("Result")
TEMPERATURE = 0.7  # for rewriting and solving: identical solutions would confirm nothing
REWRITE_ATTEMPTS = 2
# after this many failed requests in a row the server is taken to be down
MAX_CONSECUTIVE_FAILURES = 8
_MAX_DIGITS = 18
_PART = r"<{0}>\s*(.*?)\s*</{0}>"
_TEXTS = [
    Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8")
    for name in ("rewrite", "solve")
]
REWRITE, SOLVE = (text.removesuffix("\n") for text in _TEXTS)
"""The requests to rewrite and to solve a problem, with its parts in braces."""


@dataclass(frozen=True)
class Decision:
    """The action for one problem, and the reason for it."""

    id: str
    action: Action
    reason: str
    question: str | None = None  # the accepted rewriting, or the last rejected one
    # the integer answer that the rewriting gives, or that an unchanged answer is equal to
    answer: str | None = None
    # the answers of the solutions; None where a solution gives no integer
    votes: Sequence[str | None] = ()
    attempts: int = 0


def integerize(
    problems: Sequence[Problem],
    generate: Generate,
    journal: Journal,
    *,
    num_solutions: int,
    concurrency: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[list[Problem], dict[str, Decision]]:
    """Rewrite the problems whose answers are not integers, copies once.

    Args:
        problems: The problems of a data set.
        generate: Called from `concurrency` threads, each with one problem.
        journal: The decisions of an interrupted run; takes the new ones.
        num_solutions: The solutions of a rewritten problem, of which more than half must agree.
        concurrency: The number of threads.
        on_progress: Gets the number of finished problems and their total.

    Returns the problems that remain, in order, and the decision for each distinct problem by id.

    Raises:
        ServerFailed: the server failed for some of the problems; the journal keeps the other
            decisions.
    """
    template = normalize.find_instruction_template(_question_text(problem) for problem in problems)
    decisions: dict[str, Decision | None] = {}
    to_decide = []
    for problem, _ in unique_problems(problems):
        decisions[problem.id] = decide_without_model(problem)
        if decisions[problem.id] is None:
            to_decide.append(problem)

    def work(problem: Problem, check: Callable[[], None]) -> Decision:
        def checked_generate(request: str, seed: int) -> str:
            check()
            return generate(request, seed)

        return decide(problem, template, checked_generate, num_solutions=num_solutions)

    def keep(decision: Decision) -> None:
        journal.add(asdict(decision))
        on_progress(len(journal.records), len(to_decide))

    on_progress(len(journal.records), len(to_decide))
    undecided = [problem for problem in to_decide if problem.id not in journal.records]
    failures = concurrent_map(undecided, work, keep, concurrency=concurrency)
    if failures:
        num_undecided = sum(problem.id not in journal.records for problem in undecided)
        raise ServerFailed(
            f"{num_undecided:,} of {len(to_decide):,} problems are undecided: the server failed"
            f" {len(failures)} times ({failures[-1]}); the other decisions are kept: repeat the"
            " command to continue"
        )
    complete = {}
    for key, decision in decisions.items():
        complete[key] = decision or Decision(**journal.records[key])
    remaining = []
    for problem in problems:
        rewritten = apply(problem, complete[problem.id], template)
        if rewritten is not None:
            remaining.append(rewritten)
    return remaining, complete


def concurrent_map(
    items: Sequence[Item],
    work: Callable[[Item, Callable[[], None]], Result],
    keep: Callable[[Result], None],
    *,
    concurrency: int,
) -> list[ServerFailed]:
    """Call `keep(work(item, check))` per item, `work` in `concurrency` threads, `keep` in this one.

    Returns the failures of the server; after `MAX_CONSECUTIVE_FAILURES` in a row no further item is
    started. Other errors of `work` are raised after the running calls have ended.

    Args:
        items: The items.
        work: Calls `check`, its second argument, before each slow operation; that raises once the
            map is being abandoned.
        keep: Takes the results in the order of their ends.
        concurrency: The number of threads.
    """
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise ServerFailed("abandoned")

    failures: list[ServerFailed] = []
    consecutive_failures = 0
    remaining = iter(items)
    running: set[Future[Result]] = set()
    with ThreadPoolExecutor(concurrency) as pool:
        try:
            while True:
                while len(running) < concurrency and (item := next(remaining, None)) is not None:
                    running.add(pool.submit(work, item, check))
                if not running:
                    return failures
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    try:
                        keep(future.result())
                        consecutive_failures = 0
                    except ServerFailed as error:
                        failures.append(error)
                        consecutive_failures += 1
                if consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
                    return failures
        finally:
            stop.set()


def decide_without_model(problem: Problem) -> Decision | None:
    """Return the decision for a problem that needs no rewriting or cannot have one, or None."""
    kind = normalize.answer_type(problem.answer)
    if kind == "integer":
        return Decision(problem.id, "unchanged", "the answer is an integer")
    value = normalize.answer_value(problem.answer)
    if value is not None and value.denominator == 1:
        reason = f"the answer is the integer {value}"
        return Decision(problem.id, "unchanged", reason, answer=str(value))
    if kind in ("letter", "text"):
        reason = f"the answer is a {kind}, which contains no integers"
        return Decision(problem.id, "rejected", reason)
    return None


def decide(
    problem: Problem,
    template: normalize.InstructionTemplate,
    generate: Generate,
    *,
    num_solutions: int,
) -> Decision:
    """Rewrite a problem, twice at most, until more than half of its solutions agree.

    Args:
        problem: the problem.
        template: the instructions around problems of its data set.
        generate: returns the model's response to a request.
        num_solutions: the number of solutions.
    """
    question = template.strip_instruction(_question_text(problem))
    decision = Decision(problem.id, "rejected", "not tried")
    for attempt in range(1, REWRITE_ATTEMPTS + 1):
        request = _filled(REWRITE, question=question, answer=problem.answer)
        response = generate(request, _seed(problem, attempt, 0))
        rewriting = read_rewriting(response, question)
        if isinstance(rewriting, str):
            decision = Decision(problem.id, "rejected", rewriting, attempts=attempt)
            continue
        text, answer = rewriting
        votes = _solve(
            problem, text, answer, generate, num_solutions=num_solutions, attempt=attempt
        )
        num_agreeing = votes.count(answer)
        reason = f"{num_agreeing} of {len(votes)} solutions give {answer}"
        if 2 * num_agreeing > num_solutions:
            return Decision(problem.id, "rewritten", reason, text, answer, tuple(votes), attempt)
        reason += f", of {num_solutions} at most"
        decision = Decision(problem.id, "rejected", reason, text, answer, tuple(votes), attempt)
    return decision


def apply(
    problem: Problem, decision: Decision, template: normalize.InstructionTemplate
) -> Problem | None:
    """Return the problem after the decision, with its instruction; None if it is rejected."""
    if decision.action == "rejected":
        return None
    if decision.action == "unchanged":
        answer = decision.answer or problem.answer
        fields = problem.fields if answer == problem.answer else other_fields(problem)
        new_id = problem_id(problem.prompt, answer, fields.get("tools"))
        return replace(problem, id=new_id, answer=answer, fields=fields)
    assert decision.question is not None
    assert decision.answer is not None
    text = _question_text(problem)
    start, end = template.span(text)
    rewritten = text[:start] + decision.question + text[end:]
    prompt: str | list[dict[str, Any]] = rewritten
    if not isinstance(problem.prompt, str):
        prompt = [dict(message) for message in problem.prompt]
        prompt[_question_message_index(problem.prompt)]["content"] = rewritten
    original_fields = {
        "original_id": problem.id,
        "original_question": text[start:end],
        "original_answer": problem.answer,
    }
    # columns with the old question or answer would contradict the new ones
    read_as_either = {*PROMPT_COLUMNS, *ANSWER_COLUMNS}
    fields = {}
    for name, value in problem.fields.items():
        is_old = value == problem.prompt or str(value) == problem.answer
        if name not in read_as_either and not is_old:
            fields[name] = value
    fields |= original_fields
    new_id = problem_id(prompt, decision.answer, problem.fields.get("tools"))
    return replace(problem, id=new_id, prompt=prompt, answer=decision.answer, fields=fields)


def read_rewriting(response: str, original: str) -> tuple[str, str] | str:
    """Return the new problem and its integer, or the reason why the response cannot be used."""
    final = final_part(response)
    texts = re.findall(_PART.format("problem"), final, re.DOTALL | re.IGNORECASE)
    answers = re.findall(_PART.format("answer"), final, re.DOTALL | re.IGNORECASE)
    if not texts or not answers:
        return "the rewriting has no <problem> or no <answer>"
    # the last of each: a model may quote the request before
    text = texts[-1]
    answer = read_integer(answers[-1])
    if answer is None:
        return f"the rewritten problem's answer is not an integer: {answers[-1][:60]!r}"
    if not text or normalize.normalize_text(text) == normalize.normalize_text(original):
        return "the rewriting leaves the problem as it was"
    return text, answer


def read_integer(text: str) -> str | None:
    """Return the integer in plain digits (`1,000` and `$1000$` give 1000), or None."""
    plain = strip_formatting(text.strip("*_` \t"), braces=True).replace("−", "-")
    if normalize.answer_type(plain) != "integer" or len(plain) > _MAX_DIGITS:
        return None
    return str(int(plain.replace(",", "")))


def read_solution(response: str) -> str | None:
    """Return the integer on the last line `Answer: N`, or else in the last box."""
    marked = marked_answer(final_part(response))
    return None if marked is None else read_integer(marked)


def _solve(
    problem: Problem,
    text: str,
    answer: str,
    generate: Generate,
    *,
    num_solutions: int,
    attempt: int,
) -> list[str | None]:
    """Return the answers of up to `num_solutions` solutions; stops once the majority is certain."""
    request = _filled(SOLVE, question=text)
    votes: list[str | None] = []
    while len(votes) < num_solutions:
        response = generate(request, _seed(problem, attempt, len(votes) + 1))
        votes.append(read_solution(response))
        num_agreeing = votes.count(answer)
        most_agreeing = num_agreeing + num_solutions - len(votes)
        if 2 * num_agreeing > num_solutions or 2 * most_agreeing <= num_solutions:
            break
    return votes


def _filled(template: str, **values: str) -> str:
    # not str.format, and in one pass: problems contain braces
    return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], template)


def _seed(problem: Problem, attempt: int, use: int) -> int:
    # servers take 32 bits
    return keyed_seed("integerize", problem.id, attempt, use) % 2**31


def _question_text(problem: Problem) -> str:
    prompt = problem.prompt
    if isinstance(prompt, str):
        return prompt
    return content_text(prompt[_question_message_index(prompt)])


def _question_message_index(messages: Sequence[Message]) -> int:
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return users[-1] if users else len(messages) - 1
