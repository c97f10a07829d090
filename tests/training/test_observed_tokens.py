"""Tokens that the policy did not sample count nowhere: not in lengths, weights, metrics or
tables.
"""

import shutil
from array import array
from collections.abc import Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from pyarrow.parquet import read_schema, read_table

from dapo.analysis.explain import explain_group
from dapo.analysis.stored_groups import read_groups
from dapo.analysis.view.queries import _response
from dapo.config import Config
from dapo.core.errors import EngineError
from dapo.core.ranges import mask_of, merged, select, spread
from dapo.data.prompts import PromptEncoder
from dapo.distributed.rank_samples import ALL, decode, encode
from dapo.engines.checked import CheckedEngine
from dapo.engines.engine import RolloutEngine
from dapo.policy.policy import Policy
from dapo.runs.directory import RunDirectory
from dapo.runs.rollout_table import read_rollouts, write_rollouts
from dapo.sampling.queue import Batch
from dapo.sampling.rollout_metrics import response_metrics, rollout_metrics, staleness_metrics
from dapo.sampling.samples import length_penalty, shaped_reward, with_advantages
from dapo.sampling.saved_groups import BATCH_RESPONSES_FILE
from dapo.training.state import Run
from dapo.training.step_metrics import rollout_rows
from dapo.training.train import train
from dapo.training.updates import with_token_advantages
from dapo.types import Generation, GenerationRequest, Group, Problem, Sample, Verdict
from helpers.async_runs import ONE_STEP_OFF, run_or_resume
from helpers.fake_engines import FaultyEngine
from helpers.tiny_policies import float64_model, loaded, make_policy, off_policy, plain_scores
from helpers.tiny_runs import contents, differences, new_run, tiny

RAGGED = ((0, 2), (5, 6), (7, 9))
"""Ranges of five sampled tokens among ten."""


def episode(
    length: int = 10, sampled: Sequence[tuple[int, int]] | None = RAGGED, **changes: Any
) -> Generation:
    ids = array("i", range(20, 20 + length))
    logprobs = array("f", [-0.5] * length)
    return replace(Generation("1/0/0", ids, logprobs, "stop", 0, sampled=sampled), **changes)  # type: ignore[arg-type]


def group(*generations: Generation, rewards: Sequence[float] = (1.0, -1.0)) -> Group:
    verdicts = tuple(Verdict(reward > 0, reward) for reward in rewards)
    texts = tuple("?" for _ in generations)
    return Group(
        Problem("p", "?", "!"), (1, 2), generations, verdicts, texts=texts, rewards=tuple(rewards)
    )


# --- the type


@pytest.mark.parametrize("kind", [tuple, lambda row: array("f", row), lambda row: array("d", row)])
def test_log_probabilities_of_observed_tokens_are_zero_whatever_was_given(kind: Any) -> None:
    found = Generation(
        "a", tuple(range(10)), kind([-50.0] * 2 + [-0.5] * 8), "stop", 0, sampled=RAGGED
    )
    assert list(found.logprobs) == [-50.0, -50.0, 0, 0, 0, -0.5, 0, -0.5, -0.5, 0]
    assert type(found.logprobs) is type(kind([]))
    assert list(found.mask) == [1, 1, 0, 0, 0, 1, 0, 1, 1, 0]
    assert (found.num_sampled, group(found, found).num_tokens) == (5, 10)
    # none were kept
    assert Generation("a", (1, 2, 3), (), "stop", 0, sampled=((0, 1),)).logprobs == ()


def test_ranges_are_joined_and_those_of_a_whole_response_are_none() -> None:
    assert merged([(0, 2), (2, 3), (3, 3), (5, 6)], 7) == ((0, 3), (5, 6))
    assert merged([(0, 2), (2, 7)], 7) is None
    assert merged([], 7) == ()
    assert Generation("a", (1, 2), (-1.0, -1.0), "stop", 0, sampled=((0, 1), (1, 2))) == Generation(
        "a", (1, 2), (-1.0, -1.0), "stop", 0
    )
    for wrong in ([(2, 1)], [(0, 3), (2, 4)], [(0, 8)], [(-1, 2)], [(0, 1, 2)]):
        with pytest.raises(ValueError, match="expected ascending ranges"):
            merged(wrong, 7)


def test_values_of_sampled_tokens_are_taken_out_and_put_back() -> None:
    row = [float(i) for i in range(10)]
    assert select(row, RAGGED) == [0, 1, 5, 7, 8]
    assert list(spread(select(row, RAGGED), RAGGED, 10)) == [0, 1, 0, 0, 0, 5, 0, 7, 8, 0]
    assert select(row, None) is spread(row, None, 10) is row


# --- lengths


def test_lengths_are_numbers_of_sampled_tokens() -> None:
    config = tiny("rollout.max_response_tokens=6", "overlong.buffer_tokens=2")
    assert length_penalty(episode(), config) == -0.5  # 5 of 6 tokens
    assert length_penalty(episode(sampled=None), config) == -1
    groups = [group(episode(version=1), episode(sampled=((3, 4),), version=3))]
    metrics = rollout_metrics([(groups[0], "trained")], {"trained": 1}, {"trained": 6}, shortfall=0)
    assert (metrics["rollout/response_tokens_mean"], metrics["rollout/response_tokens_max"]) == (
        3,
        5,
    )
    assert metrics["rollout/entropy_estimate"] == pytest.approx(0.5)
    assert staleness_metrics(groups, version=3)["rollout/staleness_mean"] == pytest.approx(
        2 * 5 / 6
    )


def test_only_the_last_turn_can_be_a_loop() -> None:
    ids = array("i", [1] * 10 + [7] * 60)
    loop = Generation("a", ids, array("f", [-1.0] * 70), "length", 0, sampled=((0, 4), (10, 70)))
    observed = replace(loop, sampled=((0, 10),))
    assert response_metrics([group(loop, observed)]) == {"rollout/looping_fraction": 0.5}


def test_an_episode_may_have_stop_ids_inside_and_is_checked_otherwise() -> None:
    request = GenerationRequest("1/0/0", (1, 2), 5, 1.0, 1.0, 0, stop_ids=(21, 25))
    for change, message in (
        ({}, None),
        ({"sampled": ((0, 6),)}, "at most 5 tokens, got 6"),
        ({"version": 9}, "version"),
    ):
        engine = CheckedEngine(
            FaultyEngine(
                lambda r: ((3,), "stop"), lambda found, c=change: [episode(**c) for _ in found]
            ),
            vocabulary=40,
        )
        engine.load_weights(None, 0)  # type: ignore[arg-type]
        engine.submit([request])
        if message is None:
            assert engine.poll()[0].num_sampled == 5
        else:
            with pytest.raises(EngineError, match=message):
                engine.poll()


# --- advantages and loss


class KnownValues:
    """A critic whose values are given."""

    def __init__(self, rows: Sequence[Sequence[float]], kl: Sequence[Sequence[float]]) -> None:
        self._rows = rows
        self._kl = kl

    def values(self, samples: Sequence[Sample]) -> list[Sequence[float]]:
        return list(self._rows)

    def token_kl(self, samples: Sequence[Sample], *, step: int) -> list[Sequence[float]]:
        return list(self._kl)


def test_the_steps_of_a_critic_are_the_sampled_tokens() -> None:
    """Advantages are those of the response without its observations."""
    config = tiny("preset=ppo", "critic.gae_lambda=0.9", "loss.kl_coef=0.3", "loss.kl_in=reward")
    whole = with_advantages([group(episode(), episode(sampled=None))], config)
    short = with_advantages([group(episode(5, None), episode(sampled=None))], config)
    chance = np.random.default_rng(0)
    values = chance.normal(size=(2, 10))
    kl = chance.normal(size=(2, 10))
    observed = ~np.asarray(mask_of(RAGGED, 10)).astype(bool)
    values[0, observed] = 1e6
    kl[0, observed] = 1e6
    rows = [
        [values[0][~observed].tolist(), values[1].tolist()],
        [kl[0][~observed].tolist(), kl[1].tolist()],
    ]
    expected = with_token_advantages(short, KnownValues(*rows), config, step=1)
    found = with_token_advantages(whole, KnownValues(values.tolist(), kl.tolist()), config, step=1)
    for name in ("token_advantages", "old_values", "value_targets"):
        row = getattr(found[0], name)
        assert list(select(row, RAGGED)) == list(getattr(expected[0], name))
        assert not any(np.asarray(row)[observed])
        assert list(getattr(found[1], name)) == list(getattr(expected[1], name))
    assert [(s.reward, s.advantage, s.kl) for s in found] == [
        (s.reward, s.advantage, s.kl) for s in expected
    ]


def test_the_loss_equals_a_naive_sum_over_sampled_tokens() -> None:
    config = tiny("overlong.mode=off")
    groups = [
        group(episode(), episode(7, ((1, 3),)), episode(4, None), rewards=(1.0, -1.0, 0.5)),
        replace(
            group(episode(9, ((0, 1), (8, 9))), episode(6, ((2, 6),))), id=1, prompt_ids=(3, 4, 5)
        ),
    ]
    found = with_advantages(groups, config)
    samples = off_policy(
        [replace(s, response_ids=tuple(s.response_ids), engine_logprobs=()) for s in found]
    )
    policy = make_policy(loaded(float64_model()), temperature=0.7)
    now = [row.detach().tolist() for row, _ in plain_scores(float64_model(), samples, 0.7)]
    total = 0.0
    count = 0
    for sample, row in zip(samples, now, strict=True):
        for t, (new, old) in enumerate(zip(row, sample.old_logprobs or (), strict=True)):
            if any(start <= t < end for start, end in sample.sampled or [(0, len(row))]):
                ratio = float(np.exp(new - old))
                total -= min(
                    ratio * sample.advantage, min(max(ratio, 0.8), 1.28) * sample.advantage
                )
                count += 1
    assert count == 5 + 2 + 4 + 2 + 4
    metrics = policy.update(samples, step=1)
    assert metrics["loss/policy"] == pytest.approx(total / count, abs=1e-10)
    assert metrics["optim/update_tokens"] == count


# --- whole runs


class Observing:
    """A `RolloutEngine` that puts observations between the tokens of another one, and garbage at
    them.
    """

    def __init__(self, engine: RolloutEngine, observation: Sequence[int], garbage: float) -> None:
        self._engine = engine
        self._observation = array("i", observation)
        self._garbage = garbage
        self.load_weights = engine.load_weights
        self.drop_weights = engine.drop_weights
        self.submit = engine.submit
        self.close = engine.close

    def poll(self) -> list[Generation]:
        return [self._episode(generation) for generation in self._engine.poll()]

    def abort(self, request_ids: Sequence[str]) -> list[Generation]:
        return [self._episode(generation) for generation in self._engine.abort(request_ids)]

    def _episode(self, generation: Generation) -> Generation:
        n = len(generation.token_ids)
        k = len(self._observation)
        if n < 2 or sum(generation.token_ids) % 3 == 0:
            return generation  # ends in its first turn
        ids = array("i", generation.token_ids)
        logprobs = array("f", generation.logprobs)
        values = array("f", [self._garbage] * k)
        return replace(
            generation,
            token_ids=ids[:1] + self._observation + ids[1:],
            logprobs=logprobs[:1] + values + logprobs[1:],
            sampled=((0, 1), (1 + k, n + k)),
        )


class GarbagePolicy(Policy):
    """A policy that finds, and is given, garbage at observed tokens."""

    size = 0.0

    def token_kl(self, samples: Sequence[Sample], *, step: int) -> list[Sequence[float]]:
        return self._with_garbage(super().token_kl(samples, step=step), samples, self.size)

    def values(self, samples: Sequence[Sample]) -> list[Sequence[float]]:
        return self._with_garbage(super().values(samples), samples, self.size)

    def update(
        self, minibatch: Sequence[Sample], *, step: int, custom: Any = None
    ) -> dict[str, float]:
        sizes = dict.fromkeys(("token_advantages", "old_values", "value_targets"), self.size)
        sizes |= dict.fromkeys(("engine_logprobs", "old_logprobs"), -self.size / 2e4)
        for name, size in sizes.items():
            if all(getattr(sample, name) for sample in minibatch):
                rows = self._with_garbage(
                    [getattr(sample, name) for sample in minibatch], minibatch, size
                )
                minibatch = [
                    replace(s, **{name: row}) for s, row in zip(minibatch, rows, strict=True)
                ]  # type: ignore[arg-type]
        return super().update(minibatch, step=step, custom=custom)

    def _with_garbage(
        self, rows: Any, samples: Sequence[Sample], size: float
    ) -> list[Sequence[float]]:
        found = []
        for row, sample in zip(rows, samples, strict=True):
            kept = mask_of(sample.sampled or ((0, len(row)),), len(row))
            found.append(
                tuple(value if own else size for value, own in zip(row, kept, strict=True))
            )
        return found


RUN = ("train.num_steps=2", "train.eval_every=0", "data.eval=null", "rollout.max_response_tokens=6")
RUN += (
    "overlong.buffer_tokens=4",
    "reward.verifier=dapo.rewards.examples:has_digit",
    "optim.lr=0.01",
    "train.save_every=1",
)
TWO_UPDATES = ("train.minibatch_groups=2", "rollout.prompts_per_step=4")
RUNS: dict[str, tuple[str, ...]] = {
    "dapo, two updates": TWO_UPDATES,
    "grpo, KL in the loss": ("preset=grpo", "loss.kl_coef=0.1", *TWO_UPDATES),
    "KL in the reward, overlong filter": (
        "loss.kl_coef=0.1",
        "loss.kl_in=reward",
        "overlong.mode=filter",
    ),
    "ppo": ("preset=ppo", "loss.kl_coef=0.1", "loss.kl_in=reward", "critic.lr=0.01", *TWO_UPDATES),
    "gspo": ("preset=gspo", *TWO_UPDATES),
    "correction by token": ("loss.engine_correction=2", *TWO_UPDATES),
    "masked by response": (
        "loss.engine_correction=2",
        "loss.engine_ratio=sequence",
        "loss.engine_over_cap=mask",
    ),
    "one step off": ("schedule=one_step_off", "rollout.engines=1", "loss.engine_correction=2"),
}


def run_observing(path: Path, config: Config, size: float) -> None:
    def change(run: Run) -> None:
        encoder = run.sampling.encoder
        assert isinstance(encoder, PromptEncoder)
        run.sampling.engine = Observing(
            run.sampling.engine, encoder.encode_rendered("+="), -size / 2e4
        )
        run.policy.__class__ = GarbagePolicy
        run.policy.size = size  # type: ignore[attr-defined]

    if config.samples_ahead:
        run_or_resume(path, config, change=change)
        return
    with new_run(config, path) as run:
        change(run)
        train(run)


@pytest.mark.parametrize("name", RUNS)
def test_garbage_at_observed_tokens_changes_no_bit(name: str, tmp_path: Path) -> None:
    config = tiny(*RUN, *RUNS[name])
    for size in (0.0, 1e6):
        run_observing(tmp_path / f"{size:g}", config, size)
    found = contents(tmp_path / "1e+06")
    expected = contents(tmp_path / "0")
    assert differences(found, expected) == []
    assert (
        sum(
            row["optim/update_tokens"] > 0 and row["optim/grad_norm"] > 0
            for row in found["metrics"]
        )
        > 0
    )
    table = read_table(tmp_path / "0" / "rollouts" / "step_000001.parquet")
    assert 0 < table["sampled"].null_count < len(table)
    for row in table.to_pylist():
        length = len(row["response_ids"])
        flat = row["sampled"] or [0, length]
        assert (
            row["response_tokens"]
            == sum(flat[1::2]) - sum(flat[::2])
            == length - 2 * bool(row["sampled"])
        )
        assert "+=" in row["response"] or not row["sampled"]
        explained = explain_group(tmp_path / "0", 1, row["group_id"])
        shown = _response(None, explained["responses"][row["sample"]], None)
        observed = [not own for own in shown["sampled"] or [1] * length]
        chances = [
            exp(p)
            for p, not_own in zip(row["engine_logprobs"], observed, strict=True)
            if not not_own
        ]
        assert shown["mean_probability"] == pytest.approx(fmean(chances), abs=1e-4)
    for stored in read_groups(RunDirectory.open(tmp_path / "0"), 1):
        pairs = zip(stored.group.generations, stored.group.verdicts, strict=True)
        assert [shaped_reward(g, verdict, config) for g, verdict in pairs] == list(
            stored.group.rewards
        )


def test_a_run_with_observations_resumes_to_the_byte_from_its_prefetched_batch(
    tmp_path: Path,
) -> None:
    config = tiny(*RUN, *ONE_STEP_OFF, "train.num_steps=4", "train.keep_checkpoints=9")
    run_observing(tmp_path / "whole", config, 0.0)
    assert (
        "sampled"
        in read_schema(
            tmp_path / "whole" / "checkpoints" / "step_000002" / BATCH_RESPONSES_FILE
        ).names
    )
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in (3, 4):
        shutil.rmtree(tmp_path / "cut" / "checkpoints" / f"step_{step:06d}")
    run_observing(tmp_path / "cut", config, 0.0)
    assert differences(contents(tmp_path / "cut"), contents(tmp_path / "whole")) == []


def test_ranges_reach_the_ranks_of_a_trainer() -> None:
    """The divergence of a response is summed there."""
    samples = dict(enumerate(with_advantages([group(episode(), episode(sampled=None))], tiny())))
    found = decode(encode(samples, ALL[:2] + ALL[3:]))
    for number, sample in samples.items():
        assert found[number].sampled == sample.sampled
        assert list(found[number].mask) == list(sample.mask)


def test_tables_with_and_without_the_column_are_read_together(tmp_path: Path) -> None:
    paths = []
    for step, generations in enumerate(
        ((episode(sampled=None),) * 2, (episode(), episode(sampled=None)))
    ):
        batch = Batch((), ((group(*generations), "trained"),), {}, {}, shortfall=0)
        paths.append(tmp_path / f"{step}.parquet")
        write_rollouts(paths[-1], rollout_rows(batch, (), str, step=step))
    assert "sampled" not in read_schema(paths[0]).names
    for order in (paths, paths[::-1]):
        rows = read_rollouts(order).to_pylist()
        assert sorted(map(str, (row["sampled"] for row in rows))) == ["None"] * 3 + [
            str([0, 2, 5, 6, 7, 9])
        ]
    assert read_rollouts(paths[:1]).column_names == [
        *map(str, read_rollouts(paths).column_names[:-1])
    ]
