"""Section 3.5: problems rewritten by a model so that the answer is an integer, and checked by solving them anew."""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

from dapo.core.math_text import final_part, marked_answer, strip_formatting
from dapo.core.rng import keyed_seed
from dapo.data.prepare.normalize import InstructionTemplate, answer_type, answer_value, normalize_text
from dapo.data.sources.rows import problem_id
from dapo.types import Message, Problem

Ask: TypeAlias = Callable[[str, int], str]
"""A request and a seed to a response."""
Action: TypeAlias = Literal["unchanged", "rewritten", "rejected"]
ACTIONS: tuple[Action, ...] = ("unchanged", "rewritten", "rejected")
REWRITE_ATTEMPTS = 2
_MAX_DIGITS = 18
_PART = r"<{0}>\s*(.*?)\s*</{0}>"

REWRITE = """\
Below are a mathematics problem and its answer, which is not an integer. Rewrite the problem so that its answer is one \
integer.

Keep the mathematics of the problem. At its end, say which form the original answer has, with letters in the place of \
its integers and with whatever makes these letters unique (positive, lowest terms, no square factor under a root), and \
ask for one integer that is computed from them, for example their sum. If the answer were (3 + sqrt(5))/2, the new \
problem would say that it can be written as (a + sqrt(b))/c with positive integers a, b and c in lowest terms, and ask \
for a + b + c, which is 10. The new problem must be complete in itself and must not give its answer away.

Think it through, then end with exactly this:
<problem>the whole new problem</problem>
<answer>the integer</answer>

The problem:
{question}

Its answer:
{answer}"""
SOLVE = """\
{question}

Solve this problem step by step. The answer is an integer. End with a line of the form "Answer: N", where N is the \
integer."""


@dataclass(frozen=True)
class Decision:
    """What becomes of one problem, and why."""

    id: str
    action: Action
    reason: str
    question: str | None = None
    """The problem that was accepted, or the last one that was not."""
    answer: str | None = None
    """Its integer, as the rewriting says."""
    votes: tuple[str | None, ...] = ()
    """What solving it gave; None: no integer."""
    attempts: int = 0

    def as_json(self) -> dict[str, Any]:
        """A line of the journal."""
        return {**asdict(self), "votes": list(self.votes)}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> "Decision":
        """Back from the journal."""
        return cls(**{**record, "votes": tuple(record["votes"])})


def decide_without_model(problem: Problem) -> Decision | None:
    """For problems that no model needs to see; None for the others."""
    kind = answer_type(problem.answer)
    if kind == "integer":
        return Decision(problem.id, "unchanged", "the answer is an integer")
    value = answer_value(problem.answer)
    if value is not None and value.denominator == 1:
        return Decision(problem.id, "unchanged", f"the answer is the integer {value}", answer=str(value))
    if kind in ("letter", "text"):
        return Decision(problem.id, "rejected", f"the answer is a {kind}, which has no integers to ask for")
    return None


def decide(problem: Problem, instruction_template: InstructionTemplate, ask: Ask, *, num_solutions: int) -> Decision:
    """Rewrite it, and accept what more than half of `num_solutions` solutions confirm; else a second attempt."""
    question = instruction_template.strip_instruction(_question_text(problem))
    decision = Decision(problem.id, "rejected", "not tried")
    for attempt in range(1, REWRITE_ATTEMPTS + 1):
        seed = _seed(problem, attempt, 0)
        rewriting = read_rewriting(ask(_filled(REWRITE, question=question, answer=problem.answer), seed), question)
        if isinstance(rewriting, str):
            decision = Decision(problem.id, "rejected", rewriting, attempts=attempt)
            continue
        text, answer = rewriting
        votes = _solve(problem, text, answer, ask, num_solutions=num_solutions, attempt=attempt)
        agreeing = votes.count(answer)
        accepted = 2 * agreeing > num_solutions
        decision = Decision(
            problem.id,
            "rewritten" if accepted else "rejected",
            f"{agreeing} of {len(votes)} solutions give {answer}"
            + ("" if accepted else f", of {num_solutions} at most"),
            question=text,
            answer=answer,
            votes=tuple(votes),
            attempts=attempt,
        )
        if accepted:
            break
    return decision


def apply(problem: Problem, decision: Decision, instruction_template: InstructionTemplate) -> Problem | None:
    """The problem as decided; None: it is left out. A new one keeps the instruction around it."""
    if decision.action == "rejected":
        return None
    if decision.action == "unchanged":
        answer = decision.answer or problem.answer
        return replace(problem, id=problem_id(problem.prompt, answer), answer=answer)
    assert decision.question is not None
    assert decision.answer is not None
    before = _question_text(problem)
    start, end = instruction_template.span(before)
    after = before[:start] + decision.question + before[end:]
    prompt: str | list[dict[str, str]] = after
    if not isinstance(problem.prompt, str):
        prompt = [dict(message) for message in problem.prompt]
        prompt[_question_message_index(problem.prompt)]["content"] = after
    original = {"original_id": problem.id, "original_question": before[start:end], "original_answer": problem.answer}
    return replace(
        problem,
        id=problem_id(prompt, decision.answer),
        prompt=prompt,
        answer=decision.answer,
        fields={**problem.fields, **original},
    )


def question_texts(problems: Sequence[Problem]) -> list[str]:
    """What is rewritten of each problem: its text, or its last user message."""
    return [_question_text(problem) for problem in problems]


def read_rewriting(response: str, original: str) -> tuple[str, str] | str:
    """New problem and its integer; or what is wrong with the response."""
    final = final_part(response)
    found = [re.findall(_PART.format(name), final, re.DOTALL | re.IGNORECASE) for name in ("problem", "answer")]
    if not found[0] or not found[1]:
        return "the rewriting has no <problem> or no <answer>"
    text, answer = found[0][-1], read_integer(found[1][-1])
    if answer is None:
        return f"the rewriting's answer is no integer: {found[1][-1][:60]!r}"
    if not text or normalize_text(text) == normalize_text(original):
        return "the rewriting leaves the problem as it was"
    return text, answer


def read_integer(text: str) -> str | None:
    """An integer as it is written plainly, `1,000` and `$1000$` as 1000; None for anything else."""
    plain = strip_formatting(text.strip("*_` \t"), braces=True).replace("−", "-")
    if answer_type(plain) != "integer" or len(plain) > _MAX_DIGITS:
        return None
    return str(int(plain.replace(",", "")))


def read_solution(response: str) -> str | None:
    """The integer on the last line `Answer: N`, or else in the last box."""
    marked = marked_answer(final_part(response))
    return None if marked is None else read_integer(marked)


def _solve(problem: Problem, text: str, answer: str, ask: Ask, *, num_solutions: int, attempt: int) -> list[str | None]:
    """Up to `num_solutions` solutions; no more than settle whether most of them agree."""
    votes: list[str | None] = []
    while len(votes) < num_solutions:
        votes.append(read_solution(ask(_filled(SOLVE, question=text), _seed(problem, attempt, len(votes) + 1))))
        agreeing = votes.count(answer)
        if 2 * agreeing > num_solutions or 2 * (agreeing + num_solutions - len(votes)) <= num_solutions:
            break
    return votes


def _filled(template: str, **values: str) -> str:
    # not str.format, and in one pass: problems are full of braces
    return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], template)


def _seed(problem: Problem, attempt: int, use: int) -> int:
    # servers take 32 bits
    return keyed_seed("integerize", problem.id, attempt, use) % 2**31


def _question_text(problem: Problem) -> str:
    prompt = problem.prompt
    return prompt if isinstance(prompt, str) else prompt[_question_message_index(prompt)]["content"]


def _question_message_index(messages: Sequence[Message]) -> int:
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return users[-1] if users else len(messages) - 1
