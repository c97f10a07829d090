"""Reads the rows of a run's data before torch is imported, and warns of those that its reward
cannot judge.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapo.config import DataConfig, RewardConfig
from dapo.config.data_spec import Source, kinds
from dapo.core.text import one_line
from dapo.data.prepare.stats import conflicting_answers
from dapo.data.problems import load_problems, unique_problems
from dapo.data.question_parts import describe_unshown_parts, unshown_parts
from dapo.data.sources.builtin import Split
from dapo.data.sources.rows import describe_texts
from dapo.rewards.combine import RewardSpec
from dapo.rewards.data_check import has_tests, warnings_about_rows
from dapo.rewards.verifier import ANSWER_MARKERS, VERIFIERS
from dapo.rewards.verifiers.function import require_columns
from dapo.types import Problem, Prompt, content_text

_CHOICE_COLUMNS = ("choices", "options")
_CHOICE_TEXT_KEYS = ("text", "value")
_MAX_LABEL_CHARS = 2  # of a choice's label, such as `A` or `10`


@dataclass(frozen=True)
class RunData:
    """The problems of a run, as its data files have them."""

    train: list[Problem]  # demonstrations for supervised training; empty for an evaluation
    held_out: list[Problem]
    notes: list[str]
    # copies of each held-out problem in the file, if all problems have equally many; else 1
    copies: int = 1


def distinct(problems: Sequence[Problem], source: Source) -> tuple[list[Problem], int]:
    """Remove copies of problems; also return the copies per problem if they are equally many."""
    counted = unique_problems(problems)
    counts = {count for _, count in counted}
    copies = counts.pop() if len(counts) == 1 and kinds(source) <= {"path", "hub"} else 1
    return [problem for problem, _ in counted], copies


def load_rows(
    data: DataConfig,
    verifier: RewardConfig,
    columns: Mapping[str, Collection[str]],
    split: Split,
    *,
    has_trained: bool = False,
    demonstrations: Sequence[Problem] = (),
) -> tuple[list[Problem], list[str]]:
    """Load the rows of `data.train` or `data.eval`, with warnings about rows that cannot be judged.

    The reward's `verifier` is not `auto`, and `columns` are those that each of the user's functions
    requires. A model that has trained (`has_trained`) may mark its answers without being asked to,
    and so does one that imitates marked `demonstrations`. Raises DataError if rows lack a column,
    and RewardError if the reward can judge no row.
    """
    source = data.train_source if split == "train" else data.eval_source
    assert source is not None
    reward = RewardSpec.of(verifier.verifier, options=verifier.options)
    texts: dict[str, str] = {}
    unmatched: list[str] = []
    rows = load_problems(
        source,
        split=split,
        require_answer=reward.reads_answer,
        texts=texts,
        warnings=unmatched,
    )
    where = f"data.{split}"
    require_columns(rows, columns, where=where)
    warnings = warnings_about_rows(rows, verifier.verifier, verifier.options, where=where)
    warnings += [f"{where}: {line}" for line in unmatched]
    if texts and any(name not in VERIFIERS for name in reward.weights):
        warnings.append(f"{where}: {describe_texts(texts)}")
    if reward.reads_answer:
        conflicts = len(conflicting_answers(rows))
        if conflicts:
            warnings.append(
                f"{where}: texts with different answers: {conflicts:,}, so a row rewards what another"
                " refuses; dapo data dedupe keeps the answer of most rows, and none without a majority"
            )
    if split == "eval":
        warnings += _copies_that_differ(rows, where)
    warnings += _unread_tests(rows, reward, where)
    warnings += _unshown_choices(rows, where)
    warnings += _unshown_parts(rows, where)
    if not has_trained:
        warnings += _unrequested_markers(data, rows, demonstrations, reward, where)
    return rows, warnings


def _copies_that_differ(rows: Sequence[Problem], where: str) -> Iterator[str]:
    """Warn of rows that are taken for copies of another one, from which their columns differ."""
    first = dict[str, Problem]()
    columns: dict[str, None] = {}
    num_differing = 0
    for row in rows:
        fields = first.setdefault(row.id, row).fields
        # equal rows of a file share one object
        if fields is row.fields:
            continue
        names = [
            name for name in {**fields, **row.fields} if fields.get(name) != row.fields.get(name)
        ]
        columns.update(dict.fromkeys(names))
        num_differing += bool(names)
    if num_differing:
        yield (
            f"{where}: {num_differing:,} of {len(rows):,} rows have the prompt and the answer of"
            f" another row, and differ in {' and '.join(columns)}: they are copies of one problem,"
            " which is evaluated once; write what differs into the prompt if they are not"
        )


def _unread_tests(rows: Sequence[Problem], reward: RewardSpec, where: str) -> Iterator[str]:
    """Warn of rows with tests where every verifier compares with the reference alone."""
    names = list(reward.weights)
    if not all(
        name in VERIFIERS and VERIFIERS[name].reads_answer(reward.options[name]) for name in names
    ):
        return
    num_tested = sum(map(has_tests, rows))
    if num_tested:
        yield (
            f"{where}: {num_tested:,} of {len(rows):,} rows have tests of a program, which"
            f" {' and '.join(names)} {'do' if len(names) > 1 else 'does'} not run;"
            " reward.verifier=code runs them"
        )


def _unshown_choices(rows: Sequence[Problem], where: str) -> Iterator[str]:
    """Warn of rows whose answer choices stand in a column, while their prompts show none."""
    counts = Counter[str]()
    for row in rows:
        prompt = one_line(_text(row.prompt)).casefold()
        for column in _CHOICE_COLUMNS:
            choices = [one_line(text).casefold() for text in _choices(row.fields.get(column))]
            if len(choices) > 1 and not any(choice in prompt for choice in choices):
                counts[column] += 1
    for column, count in counts.items():
        yield (
            f"{where}: {count:,} of {len(rows):,} rows have answer choices in the column {column},"
            " of which their prompts show none, so the model is asked without them; write them"
            " into the prompt (an agent or environment may show them itself)"
        )


def _unshown_parts(rows: Sequence[Problem], where: str) -> Iterator[str]:
    """Warn of rows with a part of the question in a column, which their prompts do not show."""
    counts = Counter[str]()
    for row in rows:
        counts.update(unshown_parts(row.fields, row.prompt))
    for line in describe_unshown_parts(counts, len(rows)):
        yield f"{where}: {line} (an agent or environment may show it itself)"


def _choices(value: Any) -> list[str]:
    """Return the texts of answer choices; none for a value of another form.

    The forms are a list of texts, a list of mappings with a text each, ARC's `{text: [...],
    label: [...]}`, texts by their labels, and the JSON text of any of these.
    """
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    if isinstance(value, Mapping):
        if isinstance(value.get("text"), list):
            value = value["text"]
        elif all(len(str(label)) <= _MAX_LABEL_CHARS for label in value):
            # Arrow gives every row the labels of all rows, with null for those that it lacks
            value = [text for text in value.values() if text is not None]
        else:
            return []
    if not isinstance(value, list):
        return []
    texts = []
    for item in value:
        text = item
        if isinstance(item, Mapping):
            text = next((item[key] for key in _CHOICE_TEXT_KEYS if key in item), None)
        if not isinstance(text, str) or not text.strip():
            return []
        texts.append(text)
    return texts


def _unrequested_markers(
    data: DataConfig,
    rows: Sequence[Problem],
    demonstrations: Sequence[Problem],
    reward: RewardSpec,
    where: str,
) -> Iterator[str]:
    """Warn of each verifier that reads an answer marker which most prompts do not request.

    Most of the demonstrations may show it instead.
    """
    always = f"{data.instruction}\n{data.system or ''}"
    for name in reward.weights:
        markers = VERIFIERS[name].markers if name in VERIFIERS else ()
        if not markers or reward.options[name].get("flexible"):
            continue
        requested = Counter(
            marker
            for row in rows
            for marker in ANSWER_MARKERS
            if marker in f"{_text(row.prompt)}\n{always}".casefold()
        )
        most = max(requested[marker] for marker in markers)
        if 2 * most >= len(rows):
            continue
        num_marked = 0
        for demonstration in demonstrations:
            response = demonstration.answer.casefold()
            num_marked += any(marker in response for marker in markers)
        if demonstrations and 2 * num_marked >= len(demonstrations):
            continue
        verifier_markers = [ANSWER_MARKERS[marker] for marker in markers]
        requested_markers = [
            f"{ANSWER_MARKERS[m]} ({count:,} rows)"
            for m, count in requested.items()
            if m not in markers
        ]
        marked_by = " or ".join(verifier_markers)
        alternatives = (
            f"; they request {' and '.join(requested_markers)}" if requested_markers else ""
        )
        yield (
            f"{where}: the verifier {name} reads an answer marked by {marked_by}, which {most:,} of"
            f" {len(rows):,} prompts request{alternatives}. Request it in data.instruction, or use"
            " another verifier"
        )


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(content_text(message) for message in prompt)
