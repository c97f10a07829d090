"""Reads the rows of a run's data and verifies that its reward can judge them. Imports no torch."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from dapo.config import Config
from dapo.data.problems import load_problems
from dapo.data.sources.builtin import Split
from dapo.rewards.columns import require_columns
from dapo.rewards.combine import RewardSpec
from dapo.rewards.data_check import warnings_about_rows
from dapo.types import Problem, Prompt

NO_COLUMNS: Mapping[str, Collection[str]] = {}
ALL_MARKS = {"answer:": "a line `Answer: ...`", "boxed": "\\boxed{...}", "####": "`#### ...`"}
"""How prompts ask for a mark of the answer, in lower case, and how it is called."""
MARKS = {"math_dapo": ("answer:",), "math": ("answer:", "boxed"), "gsm8k": ("answer:", "boxed", "####")}
"""The marks that the verifiers read which read nothing else."""


def load_rows(
    config: Config, split: Split, needed_columns: Mapping[str, Collection[str]] = NO_COLUMNS
) -> tuple[list[Problem], list[str]]:
    """The rows of `data.train` or `data.eval`, and warnings about those that the reward cannot judge.

    Args:
        config: the configuration, its verifier settled.
        split: which of the two.
        needed_columns: the columns that each function of the reward cannot be called without (`VerifierPool`).

    Raises:
        DataError: rows lack what the reward reads.
        RewardError: the reward can judge none of them.
    """
    source = config.data.train_source if split == "train" else config.data.eval_source
    assert source is not None
    reward = RewardSpec.of(config.reward.verifier, options=config.reward.options)
    rows = load_problems(source, split=split, require_answer=reward.reads_answer)
    where = f"data.{split}"
    require_columns(rows, needed_columns, where=where)
    warnings = warnings_about_rows(rows, config.reward.verifier, config.reward.options, where=where)
    return rows, [*warnings, *_unasked_marks(config, rows, reward, where)]


def _unasked_marks(config: Config, rows: Sequence[Problem], reward: RewardSpec, where: str) -> Iterator[str]:
    """Which verifiers look for a mark of the answer that most prompts do not ask for."""
    always = f"{config.data.instruction}\n{config.data.system or ''}"
    for name, marks in MARKS.items():
        if name not in reward.weights or reward.options[name].get("flexible"):
            continue
        asked = Counter(
            mark for row in rows for mark in ALL_MARKS if mark in f"{_text(row.prompt)}\n{always}".casefold()
        )
        if 2 * max(asked[mark] for mark in marks) >= len(rows):
            continue
        known = [ALL_MARKS[mark] for mark in marks]
        others = [f"{ALL_MARKS[mark]} ({count:,} rows)" for mark, count in asked.items() if mark not in marks]
        yield (
            f"{where}: the verifier {name} reads an answer marked by {' or '.join(known)}, for which "
            f"{max(asked[mark] for mark in marks):,} of {len(rows):,} prompts ask"
            f"{'; they ask for ' + ' and '.join(others) if others else ''}. Ask for it in data.instruction, or take "
            "another verifier"
        )


def _text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
