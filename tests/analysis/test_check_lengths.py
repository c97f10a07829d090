"""What `dapo check` says of rows that are too long, beside what a run leaves out of them."""

import re

import pytest

from dapo.analysis.check.lengths import SAMPLE, describe_lengths
from dapo.analysis.check.summary import DataFacts
from dapo.config import Config
from dapo.config.load import build_config
from dapo.core.errors import DataError
from dapo.data.prompts import PromptEncoder
from dapo.policy.model import tiny_random
from dapo.types import Problem

torch = pytest.importorskip("torch")


def demonstrations(count: int) -> list[Problem]:
    """Every fourth prompt and every fifth response is ten times as long as the others."""
    return [
        Problem(
            str(index),
            f"{index} " + "word " * (40 if index % 4 == 0 else 4),
            "word " * (50 if index % 5 == 0 else 5),
        )
        for index in range(count)
    ]


def config(**limits: int) -> Config:
    options = [f"{name.replace('__', '.')}={value}" for name, value in limits.items()]
    base = {"model": "tiny-random", "preset": "sft", "data": {"demonstrations": "rows.jsonl"}}
    return build_config(base, options)


@pytest.mark.parametrize("count", [40, 4 * SAMPLE])
def test_the_shares_are_those_of_the_rows_that_a_run_leaves_out(count: int) -> None:
    rows = demonstrations(count)
    facts = [DataFacts("train", "rows", rows)]
    options = config(data__max_prompt_tokens=200, rollout__max_response_tokens=100)
    _, tokenizer = tiny_random(torch.float32)
    _, num_dropped = PromptEncoder(tokenizer, options.data).split_by_length(rows)
    assert num_dropped == count // 4
    prompts, responses = describe_lengths(options, facts)
    if count <= SAMPLE:
        assert f"{num_dropped} of {count} prompts" in prompts
        assert f"{count // 5 - count // 20} of {count} responses" in responses
    else:
        # a quarter of 200 random rows, within four standard deviations; even steps of four hit all
        share = re.search(
            rf"about (\d+)% of {count:,} prompts \({SAMPLE} were looked at\)", prompts
        )
        assert share is not None
        assert 13 <= int(share[1]) <= 37
    assert responses.startswith("data.demonstrations: ")
    assert "longer than rollout.max_response_tokens=100, and are left out" in responses


def test_rows_that_fit_are_not_mentioned() -> None:
    facts = [DataFacts("train", "rows", demonstrations(20))]
    options = config(data__max_prompt_tokens=1000, rollout__max_response_tokens=1000)
    assert list(describe_lengths(options, facts)) == []


def test_a_source_of_which_nothing_is_left_is_refused_as_the_run_refuses_it() -> None:
    facts = [DataFacts("train", "rows", demonstrations(20))]
    with pytest.raises(DataError, match=r"all 20 demonstrations are longer than rollout\.max"):
        list(describe_lengths(config(rollout__max_response_tokens=3), facts))
    with pytest.raises(DataError, match=r"all 20 prompts are longer than data\.max_prompt"):
        list(describe_lengths(config(data__max_prompt_tokens=2), facts))


def test_a_response_that_the_run_refuses_is_refused() -> None:
    _, tokenizer = tiny_random(torch.float32)
    options = config(data__max_prompt_tokens=200, rollout__max_response_tokens=100)
    response = f"2{tokenizer.eos_token} more"
    facts = [DataFacts("train", "rows", [Problem("a", "1+1?", response)])]
    with pytest.raises(DataError, match="which ends a turn; leave it out"):
        list(describe_lengths(options, facts))
