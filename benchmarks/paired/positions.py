"""How many positions a run's steps consist of, and how many of them differ: from its tables of
responses.

A position's hidden state is a function of all tokens up to it. Positions with equal prefixes need
computing once.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

COLUMNS = ["group_id", "prompt", "prompt_tokens", "response_ids", "advantage"]


def count_prefixes(sequences: Iterable[tuple[int, Sequence[int]]]) -> int:
    """The number of distinct non-empty prefixes of `(skipped, tokens)`, the first `skipped` tokens
    not counted.
    """
    found: set[int] = set()
    children: dict[tuple[int, int], int] = {}
    for skipped, tokens in sequences:
        node = 0
        for depth, token in enumerate(tokens):
            node = children.setdefault((node, int(token)), len(children) + 1)
            if depth >= skipped:
                found.add(node)
    return len(found)


def positions_of_step(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """(all, distinct) positions of each kind, from a step's responses with `prompt_ids` and
    `response_ids`.

    All: a prompt once for its group, and each token that is fed, which is every one of a response
    but its last. `update`: responses with an advantage. `decode`: the fed tokens of all judged
    responses. `prefill`: their prompts.
    """
    fed = [(row, tuple(row["prompt_ids"]) + tuple(row["response_ids"][:-1])) for row in rows]
    trained = [(row, tokens) for row, tokens in fed if row["advantage"]]
    prompts = {row["group_id"]: tuple(row["prompt_ids"]) for row in rows}
    trained_prompts = {row["group_id"]: len(row["prompt_ids"]) for row, _ in trained}
    of_responses = [len(tokens) - len(row["prompt_ids"]) for row, tokens in fed]
    of_trained = [len(tokens) - len(row["prompt_ids"]) for row, tokens in trained]
    return {
        "update": (
            sum(trained_prompts.values()) + sum(of_trained),
            count_prefixes((0, tokens) for _, tokens in trained),
        ),
        "decode": (
            sum(of_responses),
            count_prefixes((len(row["prompt_ids"]), tokens) for row, tokens in fed),
        ),
        "prefill": (
            sum(map(len, prompts.values())),
            count_prefixes((0, tokens) for tokens in prompts.values()),
        ),
    }


def positions_of_run(run: Path, tokenizer: Any) -> list[dict[str, tuple[int, int]]]:
    """`positions_of_step` of every table of responses in a run directory.

    Raises ValueError where a prompt's text does not give its number of tokens again.
    """
    return [
        positions_of_step(_rows(path, tokenizer))
        for path in sorted((run / "rollouts").glob("step_*.parquet"))
    ]


def _rows(path: Path, tokenizer: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path, columns=COLUMNS).to_pylist()
    ids = {
        text: tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in {row["prompt"] for row in rows}
    }
    for row in rows:
        row["prompt_ids"] = ids[row["prompt"]]
        if len(row["prompt_ids"]) != row["prompt_tokens"]:
            raise ValueError(
                f"{path.name}: a prompt of {row['prompt_tokens']} tokens is"
                f" {len(row['prompt_ids'])} here"
            )
    return rows
