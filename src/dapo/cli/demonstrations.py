"""`dapo data demonstrations`: rejection sampling from judged responses of runs and results."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dapo.analysis.stored_groups import SAMPLES_NOTHING, is_supervised
from dapo.config import parse_data_argument
from dapo.core.errors import ConfigError, DapoError, DataError
from dapo.core.files import PRIVATE, atomic_file
from dapo.core.rng import keyed_seed
from dapo.core.terminal import to_json
from dapo.data.demonstrations import LABEL, RESPONSE_COLUMNS
from dapo.data.prepare.decontaminate import find_contaminated
from dapo.data.problems import load_problems
from dapo.data.question_parts import SYSTEM_COLUMNS
from dapo.data.sources.rows import CONVERSATION_COLUMNS, json_value
from dapo.runs.directory import RunDirectory
from dapo.runs.evaluations import load_evaluation
from dapo.runs.rollout_table import EPISODE, all_columns, episode_of, iterate_rows
from dapo.runs.stored_config import load_run_config
from dapo.types import Message, Problem, content_text

Choice: TypeAlias = Literal["shortest", "random"]
_COLUMNS = (
    "problem_id",
    "question",
    "response",
    "answer",
    "correct",
    "score",
    "finish",
    "response_tokens",
    "step",
)
_OWN_COLUMNS = ("prompt", "answer", *SYSTEM_COLUMNS, *RESPONSE_COLUMNS, *CONVERSATION_COLUMNS)
"""The columns of a demonstration that its response, or the problem's prompt and answer, fill.

The policy has answered without a column `system`, which a demonstration would put into its prompt.
"""


@dataclass(frozen=True)
class Judged:
    """A judged response, with what chooses among those of its problem."""

    problem: Problem
    text: str
    tokens: int
    correct: bool | None
    score: float | None
    is_cut: bool
    turns: Sequence[Message] = ()
    """The conversation behind the prompt; empty for a single response."""

    @property
    def has_empty_turn(self) -> bool:
        """Return True if the policy said nothing in a turn: such an episode cannot be used."""
        if self.turns:
            turns = [content_text(turn) for turn in self.turns if turn["role"] == "assistant"]
        else:
            turns = [self.text]
        return not all(map(str.strip, turns))

    def row(self) -> dict[str, Any]:
        """Return a row of `prompt` and `response`, or of `messages` for several turns.

        The problem's other columns follow, such as `tools`.
        """
        prompt = self.problem.prompt
        columns = {
            name: json_value(value, name)
            for name, value in self.problem.fields.items()
            if name not in _OWN_COLUMNS and value != prompt
        }
        # a demonstration with a false one is refused, and this response was judged as wanted
        if columns.get(LABEL) is False:
            del columns[LABEL]
        if self.problem.answer:
            columns["answer"] = self.problem.answer
        if not self.turns:
            return {"prompt": prompt, "response": self.text, **columns}
        if isinstance(prompt, str):
            prompt_messages = [{"role": "user", "content": prompt}]
        else:
            prompt_messages = [dict(message) for message in prompt]
        return {"messages": [*prompt_messages, *map(dict, self.turns)], **columns}


def read_judged(source: Path) -> Iterator[Judged]:
    """Yield the judged responses of a run or of a result of `dapo eval`. Raises DataError."""
    if source.is_dir():
        yield from _of_run(RunDirectory.open(source))
        return
    for row in load_evaluation(source)["table"]:
        problem = Problem(row["id"], row["question"], row["answer"], row["source"])
        for response in row["responses"]:
            is_cut = response["finish"] != "stop"
            yield Judged(
                problem,
                response["text"],
                int(response["tokens"]),
                response["correct"],
                response["score"],
                is_cut,
            )


def choose(
    judged: Sequence[Judged],
    *,
    per_problem: int,
    choice: Choice,
    min_score: float | None,
    seed: int,
) -> tuple[list[Judged], dict[str, int]]:
    """Choose up to `per_problem` distinct responses of each problem, and count the rest.

    A response that was cut is never chosen.

    Args:
        judged: the responses.
        per_problem: the maximum number of responses to a problem.
        choice: `shortest` prefers fewer tokens; `random` follows from `seed` and the problem alone.
        min_score: the least score of a right response; None: the verifier calls it correct.
        seed: the seed of `random`.
    """
    counts: Counter[str] = Counter(responses=len(judged))
    by_problem: dict[str, dict[str, Judged]] = {}
    for response in judged:
        by_text = by_problem.setdefault(response.problem.id, {})
        text = to_json([response.text, [dict(turn) for turn in response.turns]])
        if response.is_cut:
            counts["removed: cut at the length limit"] += 1
        elif not _is_right(response, min_score):
            counts["removed: not right"] += 1
        elif response.has_empty_turn:
            counts["removed: an empty turn"] += 1
        elif text in by_text:
            counts["removed: equal to another response"] += 1
        else:
            by_text[text] = response
    demonstrations: list[Judged] = []
    for by_text in by_problem.values():
        # equal ranks are ordered by the text, so that the order of the sources has no effect
        ranked = sorted(by_text, key=lambda text: (_rank(by_text[text], choice, seed), text))
        demonstrations += [by_text[text] for text in ranked[:per_problem]]
        counts["removed: enough of the problem"] += max(0, len(ranked) - per_problem)
        counts["problems without one"] += not by_text
    counts["problems"] = len(by_problem)
    shown = {name: count for name, count in counts.items() if count or name == "problems"}
    return demonstrations, shown


def without_held_out(demonstrations: Sequence[Judged], held_out: Sequence[Problem]) -> list[Judged]:
    """Drop demonstrations that contain a held-out problem (`dapo data decontaminate`)."""
    problems = [demonstration.problem for demonstration in demonstrations]
    _, contaminated = find_contaminated(problems, held_out, ngram=8, min_overlap=0.5)
    held_out_rows = {problem.row for problem in contaminated}
    rows = enumerate(demonstrations, start=1)
    return [demonstration for row, demonstration in rows if row not in held_out_rows]


def held_out_of(sources: Sequence[Path], against: Sequence[str]) -> list[Problem]:
    """Return the problems of `against`, and the held-out ones of the runs among the sources."""
    problems: list[Problem] = []
    for source in sources:
        if not source.is_dir():
            continue
        spec = load_run_config(RunDirectory.open(source)).data.eval_source
        if spec is not None:
            problems += load_problems(spec, split="eval")
    for spec_text in against:
        problems += _held_out(spec_text)
    return problems


def _held_out(spec: str) -> list[Problem]:
    return load_problems(
        parse_data_argument(spec, name="--against"), split="eval", require_answer=False
    )


def write_demonstrations(path: Path, demonstrations: Sequence[Judged]) -> None:
    """Write the demonstrations as JSON lines."""
    with atomic_file(path, PRIVATE) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(to_json(response.row()) + "\n" for response in demonstrations)


def _is_right(response: Judged, min_score: float | None) -> bool:
    if min_score is None:
        return bool(response.correct)
    return response.score is not None and response.score >= min_score


def _rank(response: Judged, choice: Choice, seed: int) -> int:
    if choice == "shortest":
        return response.tokens
    return keyed_seed(seed, "demonstrations", response.problem.id, response.text)


def _of_run(run: RunDirectory) -> Iterator[Judged]:
    """Yield the responses in rollouts/, each with its whole problem."""
    paths = list(run.rollout_tables().values())
    if not paths and is_supervised(run):
        raise DataError(f"{run.path} {SAMPLES_NOTHING}")
    if not paths:
        raise DataError(
            f"{run.path} has no judged responses: no step has finished, or log.rollouts=none"
        )
    problems = _problems_of(run)
    for path in paths:
        columns = [*_COLUMNS]
        if EPISODE.name in all_columns(path):
            columns.append(EPISODE.name)
        for row in iterate_rows(path, columns):
            problem = problems.get(row["problem_id"]) or Problem(
                row["problem_id"], row["question"], row["answer"]
            )
            episode = episode_of(row)
            is_cut = row["finish"] != "stop" or (episode is not None and episode.is_cut)
            turns = () if episode is None else tuple(episode.messages)
            yield Judged(
                problem,
                row["response"],
                row["response_tokens"],
                row["correct"],
                row["score"],
                is_cut,
                turns,
            )


def _problems_of(run: RunDirectory) -> Mapping[str, Problem]:
    """Return a run's training problems by id; empty if its data is gone."""
    try:
        problems = load_problems(load_run_config(run).data.train_source, require_answer=False)
    except (DapoError, OSError):
        return {}
    return {problem.id: problem for problem in problems}


def require_sources(sources: Sequence[Path]) -> None:
    """Raise ConfigError for a source that is neither a run nor a file."""
    for source in sources:
        if not source.exists():
            raise ConfigError(f"{source}: there is no such run or result of dapo eval")
