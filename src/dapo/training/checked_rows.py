"""Reads the rows of a run's data and verifies that its reward can judge them. Imports no torch."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from dapo.config import DataConfig, RewardConfig
from dapo.data.problems import load_problems
from dapo.data.sources.builtin import Split
from dapo.rewards.combine import RewardSpec
from dapo.rewards.data_check import warnings_about_rows
from dapo.rewards.verifier import ANSWER_MARKERS, VERIFIERS
from dapo.rewards.verifiers.function import require_columns
from dapo.types import Problem, Prompt

NO_COLUMNS: Mapping[str, Collection[str]] = {}


def load_rows(
    data: DataConfig,
    verifier: RewardConfig,
    split: Split,
    needed_columns: Mapping[str, Collection[str]] = NO_COLUMNS,
) -> tuple[list[Problem], list[str]]:
    """The rows of `data.train` or `data.eval`, and warnings about those that the reward cannot judge.

    Args:
        data: the options of the data.
        verifier: the options of the reward, `auto` resolved.
        split: `train` or `eval`.
        needed_columns: the columns that each user function of the reward requires (`VerifierPool`).

    Raises:
        DataError: rows lack a column that the reward reads.
        RewardError: the reward can judge none of them.
    """
    source = data.train_source if split == "train" else data.eval_source
    assert source is not None
    reward = RewardSpec.of(verifier.verifier, options=verifier.options)
    rows = load_problems(source, split=split, require_answer=reward.reads_answer)
    where = f"data.{split}"
    require_columns(rows, needed_columns, where=where)
    warnings = warnings_about_rows(rows, verifier.verifier, verifier.options, where=where)
    return rows, [*warnings, *_unrequested_markers(data, rows, reward, where)]


def _unrequested_markers(data: DataConfig, rows: Sequence[Problem], reward: RewardSpec, where: str) -> Iterator[str]:
    """Warn of each verifier that reads a marker of the answer which most prompts do not request."""
    always = f"{data.instruction}\n{data.system or ''}"
    for name in reward.weights:
        markers = VERIFIERS[name].markers if name in VERIFIERS else ()
        if not markers or reward.options[name].get("flexible"):
            continue
        requested = Counter(
            marker for row in rows for marker in ANSWER_MARKERS if marker in f"{_text(row.prompt)}\n{always}".casefold()
        )
        most = max(requested[marker] for marker in markers)
        if 2 * most >= len(rows):
            continue
        known = [ANSWER_MARKERS[marker] for marker in markers]
        others = [f"{ANSWER_MARKERS[m]} ({count:,} rows)" for m, count in requested.items() if m not in markers]
        yield (
            f"{where}: the verifier {name} reads an answer marked by {' or '.join(known)}, which {most:,} of "
            f"{len(rows):,} prompts request{'; they request ' + ' and '.join(others) if others else ''}. Request it in "
            "data.instruction, or use another verifier"
        )


def _text(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
