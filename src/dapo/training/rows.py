"""Reads the rows of a run's data and verifies that its reward can judge them. Imports no torch."""

from collections.abc import Collection, Mapping

from dapo.config import Config
from dapo.data.problems import load_problems
from dapo.data.sources.builtin import Split
from dapo.rewards.columns import require_columns
from dapo.rewards.combine import RewardSpec
from dapo.rewards.data_check import warnings_about_rows
from dapo.types import Problem

NO_COLUMNS: Mapping[str, Collection[str]] = {}


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
    return rows, warnings_about_rows(rows, config.reward.verifier, config.reward.options, where=where)
