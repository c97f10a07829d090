"""What people bring from TRL, verl and AReaL: options have the counterparts that pages state,
rewards and data run.
"""

import ast
import json
import re
import shlex
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dapo.config import build_config
from dapo.config.load import override
from dapo.config.option_fields import options_of
from dapo.config.other_names import COUNTERPARTS, TITLES, Peer, called_elsewhere
from dapo.core.errors import ConfigError
from dapo.rewards import get_verifier
from dapo.rewards.verifiers.function import RewardFunction
from dapo.types import Problem
from helpers.commands import run
from helpers.paths import ROOT

pytestmark = pytest.mark.usefixtures("forked_workers")

ANY = {"model": "tiny-random", "data": {"train": "builtin:sums"}}
OPTIONS = {name for name, _ in options_of()}


def page(peer: Peer) -> str:
    """The section of a system in docs/coming_from.md."""
    text = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {TITLES[peer]}\n")[2].partition("\n## ")[0]
    assert section, peer
    return section


def blocks(peer: Peer) -> tuple[str, dict[str, Any]]:
    """The first two blocks of a section: a run as the other system has it, and the same here."""
    theirs, ours = re.findall(r"^```\w*\n(.*?)^```", page(peer), flags=re.DOTALL | re.MULTILINE)[:2]
    return theirs, yaml.safe_load(ours)


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def their_values(peer: Peer) -> dict[str, Any]:
    """The options that the first block of a section sets."""
    text, _ = blocks(peer)
    if peer == "areal":
        return dict(flat(yaml.safe_load(text)))
    if peer == "verl":
        pairs = [line.partition("=") for line in text.splitlines() if not line.startswith("#")]
        return {name: yaml.safe_load(value) for name, _, value in pairs}
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    of_config = next(
        call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "GRPOConfig"
    )
    values = {
        keyword.arg: ast.literal_eval(keyword.value)
        for keyword in of_config.keywords
        if keyword.arg
    }
    return {"model": "Qwen/Qwen2.5-0.5B-Instruct", **values}


@pytest.mark.parametrize("peer", COUNTERPARTS)
def test_each_counterpart_is_an_option_whose_stated_value_is_accepted(peer: Peer):
    for row in COUNTERPARTS[peer]:
        assert OPTIONS.issuperset(ours.partition("=")[0] for ours in row.ours), row
        build_config(ANY, [ours for ours in row.ours if "=" in ours])
        assert row.ours or row.remark, f"{row.theirs}: neither an option nor a reason"
        assert not row.converted or row.remark, f"{row.theirs}: converted how?"


@pytest.mark.parametrize("peer", COUNTERPARTS)
def test_a_run_of_theirs_translated_by_the_table_is_the_run_that_the_page_shows(peer: Peer):
    _, ours = blocks(peer)
    config = build_config(ours)
    values = their_values(peer)
    assert len(values) >= 12
    carried = 0
    for name, value in values.items():
        rows = [row for row in COUNTERPARTS[peer] if row.name == name]
        assert rows, f"{name} is not in the table"
        literal = str(value).lower() if isinstance(value, bool) else str(value)
        stated = next(
            (row for row in rows if row.theirs.lower() == f"{name}={literal}".lower()), None
        )
        overrides: tuple[str, ...] = (
            stated.ours if stated is not None and not stated.converted else ()
        )
        if rows[0].keeps_value:
            overrides = (override(rows[0].ours[0], value),)
        assert build_config(ours, overrides) == config, f"{name}={value} is {overrides}"
        carried += len(overrides)
    assert carried >= 10


def test_the_numbers_that_change_on_the_way_are_converted_as_the_pages_say():
    trl = their_values("trl")
    config = build_config(blocks("trl")[1])
    groups = (
        trl["per_device_train_batch_size"] * trl["steps_per_generation"] // trl["num_generations"]
    )
    assert config.rollout.prompts_per_step == groups
    assert config.updates_per_step == trl["steps_per_generation"]
    assert config.train.num_steps == trl["max_steps"] / trl["steps_per_generation"]
    assert config.optim.warmup_steps == trl["warmup_steps"] / trl["steps_per_generation"]
    verl = their_values("verl")
    config = build_config(blocks("verl")[1])
    limit = verl["algorithm.filter_groups.max_num_gen_batches"] * verl["data.train_batch_size"]
    assert config.dynamic_sampling.max_groups_per_step == limit
    areal = their_values("areal")
    config = build_config(blocks("areal")[1])
    assert config.updates_per_step == areal["actor.ppo_n_minibatches"]


def test_dynamic_bs_of_areal_bounds_the_groups_by_the_batch_and_trains_on_what_is_accepted():
    found = re.findall(r"^```yaml\n(.*?)^```", page("areal"), flags=re.DOTALL | re.MULTILINE)
    config = build_config(
        ANY | yaml.safe_load(next(text for text in found if "max_groups_per_step" in text))
    )
    assert config.dynamic_sampling.max_groups_per_step == config.rollout.prompts_per_step
    assert build_config(ANY).dynamic_sampling.max_groups_per_step is None


@pytest.mark.parametrize("peer", COUNTERPARTS)
def test_an_option_of_theirs_is_answered_with_ours(peer: Peer):
    for row in COUNTERPARTS[peer]:
        sentence = called_elsewhere(row.name)
        assert sentence is not None
        named = [name for name in TITLES.values() if sentence.startswith(f"{name}'s {row.name} ")]
        # several have one called `dynamic_bs` or `seed`: it is then the first of them
        assert named, sentence
        if TITLES[peer] in named and row.ours:
            assert row.ours[0].partition("=")[0] in sentence
    assert called_elsewhere("nothing_of_the_kind") is None


def test_a_whole_section_of_theirs_is_answered_with_the_option_in_it():
    with pytest.raises(
        ConfigError, match=r"verl's actor_rollout_ref\.rollout\.n=16 is rollout\.group_size=16 here"
    ):
        build_config(ANY | {"actor_rollout_ref": {"rollout": {"n": 16}}})


TRL_REWARDS = '''
import asyncio


class Accuracy:
    """TRL's convention as a class with __call__; its data are conversations with a column `solution`."""

    def __call__(self, prompts, completions, completion_ids, solution, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        assert all(completion[0]["role"] == "assistant" for completion in completions)
        assert [prompt[-1]["content"] for prompt in prompts] == kwargs["question"]
        assert all(isinstance(token, int) for ids in completion_ids for token in ids)
        return [float(len(text) % 3) + float(known) for text, known in zip(contents, solution)]


async def only_even(completions, level, **kwargs):
    await asyncio.sleep(0)
    return [None if each % 2 else 0.5 for each in level]
'''
VERL_REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    assert data_source == "openai/gsm8k" and extra_info["split"] == "train" and ground_truth.isdigit()
    right = len(solution_str) % 2 == 0
    return {"score": (1.0 if right else -1.0) + bonus, "acc": right, "pred": solution_str[:3], "more": [1]}
"""
SMALL = """
model: {name: tiny-random, dtype: float32}
rollout: {prompts_per_step: 2, group_size: 4, max_response_tokens: 6, native: {slots: 8}}
overlong: {mode: "off"}
dynamic_sampling: {max_groups_per_step: 12}
train: {num_steps: 1, minibatch_groups: 1, microbatch_tokens: 512, threads: 1}
"""


def trained(
    folder: Path, own: Mapping[str, Any], capsys: pytest.CaptureFixture[str]
) -> list[dict[str, Any]]:
    """The rows of the responses of a training step of the tiny model, by the command, in
    `folder`.
    """
    (folder / "my.yaml").write_text(yaml.safe_dump(yaml.safe_load(SMALL) | dict(own)))
    code, out, err = run(capsys, "train", "my.yaml", "--run-dir", "run")
    assert code == 0, out + err
    rows: list[dict[str, Any]] = pq.read_table(
        folder / "run" / "rollouts" / "step_000001.parquet"
    ).to_pylist()
    assert rows
    assert [row["error"] for row in rows if row["error"]] == []
    return rows


def test_conversations_and_reward_functions_of_trl_train_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trl_rewards.py").write_text(TRL_REWARDS + "\naccuracy = Accuracy()\n")
    problems = [
        {
            "prompt": [{"role": "user", "content": f"{n} + 1?"}],
            "solution": str(n + 1),
            "level": n,
            "question": f"{n} + 1?",
        }
        for n in range(8)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    weights = {"trl_rewards:accuracy": 1.0, "trl_rewards:only_even": 0.2}
    rows = trained(
        tmp_path,
        {"data": {"train": "train.jsonl"}, "reward": {"verifier": weights, "workers": 1}},
        capsys,
    )
    for row in rows:
        level = (
            json.loads(row["fields"])["level"]
            if isinstance(row["fields"], str)
            else dict(row["fields"])["level"]
        )
        expected = len(row["response"]) % 3 + int(level) + 1
        assert row["score"] == pytest.approx(expected + (0.0 if int(level) % 2 else 0.1))


def test_prompts_without_answers_train_with_a_function_of_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "only_prompts.py").write_text(
        "def reward(completions, **kwargs):\n    return [float(len(text) % 3) for text in"
        " completions]\n"
    )
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(8))
    )
    own = {
        "data": {"train": "train.jsonl"},
        "reward": {"verifier": "only_prompts:reward", "workers": 1},
    }
    assert all(row["score"] == len(row["response"]) % 3 for row in trained(tmp_path, own, capsys))


def test_parquet_and_compute_score_of_verl_train_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "verl_rewards.py").write_text(VERL_REWARDS)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {n} + 1?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    reward = {"verifier": "verl_rewards:compute_score", "options": {"bonus": 0.25}, "workers": 1}
    for row in trained(tmp_path, {"data": {"train": "train.parquet"}, "reward": reward}, capsys):
        right = len(row["response"]) % 2 == 0
        assert (row["correct"], row["score"]) == (right, 1.25 if right else -0.75)


def test_the_wrapper_for_rewards_of_areal_calls_them_once_per_response(
    monkeypatch: pytest.MonkeyPatch,
):
    (text,) = (
        block
        for block in re.findall(
            r"^```python\n(.*?)^```", page("areal"), flags=re.DOTALL | re.MULTILINE
        )
        if "gsm8k_reward_fn" in block
    )
    calls: list[tuple[Any, ...]] = []

    def gsm8k_reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
        calls.append((prompt, completions, completion_ids, answer))
        return float(answer in completions)

    names: dict[str, Any] = {"gsm8k_reward_fn": gsm8k_reward_fn}
    exec(text, names)
    module = types.ModuleType("rewards_from_areal")
    module.__dict__.update(reward=names["reward"])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    verifier = get_verifier("rewards_from_areal:reward")
    assert isinstance(verifier, RewardFunction)
    problem = Problem("1", "2 + 2?", "4", "s", {})
    verdicts = verifier.judge_group(problem, ["4", "5"], [(7,), (8, 9)])
    assert [verdict.score for verdict in verdicts if verdict] == [1.0, 0.0]
    assert calls == [("2 + 2?", "4", [7], "4"), ("2 + 2?", "5", [8, 9], "4")]


def test_the_commands_of_the_pages_are_quoted_for_a_shell():
    for peer in COUNTERPARTS:
        for line in re.findall(r"`(dapo [^`]+)`", page(peer)):
            assert shlex.split(line)[0] == "dapo"
