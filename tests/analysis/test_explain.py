"""`dapo explain`: its numbers are those of the paper's equations, written down here a second
time.
"""

import json
import math
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow.parquet import read_table, write_table

from conformance import naive
from dapo.analysis.explain import explain_group
from dapo.analysis.update_terms import token_terms
from dapo.core.errors import CheckpointError, DataError
from dapo.core.rng import keyed_permutation
from dapo.policy.model import load_model
from dapo.runs.rollout_table import read_rollouts
from dapo.training.train import train
from dapo.types import Sample
from helpers.commands import run as command
from helpers.run_files import edit_options
from helpers.tiny_runs import new_run, tiny

STEPS = 3
OPTIONS = (
    "model.dtype=float64",
    "data.eval=null",
    "rollout.prompts_per_step=3",
    "train.minibatch_groups=1",
)
RUNS = {
    "dapo": (
        "overlong.penalty=0.7",
        "overlong.buffer_tokens=5",
        "train.save_every=0",
        "optim.lr=0.01",
    ),
    "grpo": (
        "preset=grpo",
        "loss.kl_coef=0.05",
        "train.save_every=1",
        "train.keep_checkpoints=9",
        "optim.lr=0.01",
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of three steps of three updates for each of RUNS."""
    folder = tmp_path_factory.mktemp("runs")
    for name, options in RUNS.items():
        config = tiny(*OPTIONS, f"train.num_steps={STEPS}", *options)
        with new_run(config, folder / name) as run:
            train(run)
    return {name: folder / name for name in RUNS}


# --- the training of a run once more by the naive equations, in float64, with nothing of the package but the model


class Naive:
    """The whole training of a run from its stored responses, one sequence after another."""

    def __init__(self, run: Path, *, grpo: bool) -> None:
        self.run = run
        self.grpo = grpo
        self.beta, self.low, self.high = (0.05, 0.8, 1.2) if grpo else (0.0, 0.8, 1.28)
        loaded = load_model("tiny-random", dtype=torch.float64)
        self.model = loaded.model
        self.tokenizer = loaded.tokenizer
        self.initial = load_model("tiny-random", dtype=torch.float64).model
        self.adam = torch.optim.AdamW(
            self.model.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=0.0
        )

    def logprobs(self, model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits, dim=-1)[range(len(response)), response]

    def penalty(self, length: int) -> float:  # Eq. 13 at L_max = 8, L_cache = 5, times 0.7
        return 0.0 if self.grpo else naive.overlong_penalty(length, 8, 5, 0.7)

    def groups(self, step: int) -> list[dict[str, Any]]:
        rows = read_table(self.run / f"rollouts/step_{step:06d}.parquet").to_pylist()
        found = []
        for group_id, of_group in groupby(
            (r for r in rows if r["outcome"] == "trained"), key=lambda r: r["group_id"]
        ):
            members = list(of_group)
            rewards = [
                (1.0 if r["correct"] else -1.0) + self.penalty(r["response_tokens"])
                for r in members
            ]
            mean = naive.mean(rewards)
            std = naive.sample_std(rewards)
            advantages = naive.group_advantages(rewards, "std")
            prompt = self.tokenizer(members[0]["prompt"], add_special_tokens=False)["input_ids"]
            responses = [r["response_ids"] for r in members]
            found.append(locals() | {"id": group_id})
        return found

    def replay(self) -> Iterator[tuple[int, int, dict[str, Any], list[dict[str, Any]]]]:
        """Each update of the run: step, number, its one group, and a table of each response's
        tokens.
        """
        for step in range(1, STEPS + 1):
            groups = self.groups(step)
            with torch.no_grad():
                old = {
                    g["id"]: [self.logprobs(self.model, g["prompt"], o) for o in g["responses"]]
                    for g in groups
                }
            for number, i in enumerate(keyed_permutation(len(groups), 0, "minibatches", step)):
                yield step, number, groups[i], self.update(step, groups[i], old[groups[i]["id"]])

    def update(
        self, step: int, group: dict[str, Any], old: list[torch.Tensor]
    ) -> list[dict[str, Any]]:
        lengths = [len(o) for o in group["responses"]]
        weights = naive.aggregation_weights(
            lengths, [0] * len(lengths), "sequence" if self.grpo else "token", None
        )
        table = []
        total = torch.zeros((), dtype=torch.float64)
        for o, a, before, weight in zip(
            group["responses"], group["advantages"], old, weights, strict=True
        ):
            logp = self.logprobs(self.model, group["prompt"], o)
            ratio = (logp - before).exp()
            with torch.no_grad():
                reference = self.logprobs(self.initial, group["prompt"], o)
            rows = [logp.tolist()], [before.tolist()], [[True] * len(o)]
            loss, (gradient,) = naive.policy_loss(
                *rows, [a], [weight], clip_low=1 - self.low, clip_high=self.high - 1
            )
            kl, _, (slopes,) = naive.kl_loss(
                rows[0], [reference.tolist()], rows[2], [weight], estimator="k3"
            )
            loss += self.beta * kl
            pull = self.beta * torch.tensor(slopes, dtype=torch.float64)
            gradient = torch.tensor(gradient, dtype=torch.float64) + pull
            without_clip = -weight * a * ratio + pull
            clipped = [
                (a > 0 and r > self.high) or (a < 0 and r < self.low) for r in ratio.tolist()
            ]
            values = {
                "ratio": ratio,
                "gradient": gradient,
                "unclipped": without_clip,
                "logprob": logp,
            }
            row = {name: value.detach() for name, value in values.items()}
            table.append(row | {"weight": weight, "loss": loss, "clipped": clipped})
            total = total + logp @ gradient
        self.adam.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.param_groups[0]["lr"] = 0.01 * min(1, step / 2)
        self.adam.step()
        return table


@pytest.mark.parametrize("name", RUNS)
def test_every_number_is_that_of_the_equations_written_naively(
    runs: dict[str, Path], name: str
) -> None:
    clipped_tokens = later_updates = 0
    naive = Naive(runs[name], grpo=name == "grpo")
    for step, number, group, table in naive.replay():
        if step < STEPS and (step, number) != (1, 1):
            continue
        found = explain_group(runs[name], step, group["id"])
        assert (found["eq8"]["update"], found["eq8"]["updates"]) == (number + 1, 3)
        assert found["eq8"]["ratios"]["known"]
        assert found["eq9"]["mean"] == pytest.approx(group["mean"], abs=1e-9)
        assert found["eq9"]["std"] == pytest.approx(group["std"], abs=1e-9)
        whole, whole_unclipped = (
            sum(row[of].abs().sum().item() for row in table) for of in ("gradient", "unclipped")
        )
        for i, (response, row) in enumerate(zip(found["responses"], table, strict=True)):
            assert response["overlong_penalty"] == pytest.approx(
                naive.penalty(response["tokens"]), abs=1e-12
            )
            assert response["reward"] == pytest.approx(group["rewards"][i], abs=1e-9)
            assert response["advantage"] == pytest.approx(group["advantages"][i], abs=1e-6)
            assert response["weight"] == pytest.approx(row["weight"], rel=1e-9)
            assert response["loss"] == pytest.approx(row["loss"], abs=1e-6)
            values = response["token_values"]
            assert values["ratios"] == pytest.approx(row["ratio"].tolist(), rel=1e-6)
            assert values["gradients"] == pytest.approx(row["gradient"].tolist(), abs=1e-6)
            share = row["gradient"].abs() / (whole or 1.0)
            assert values["gradient_shares"] == pytest.approx(share.tolist(), abs=1e-6)
            assert [kind != "none" for kind in values["clipped"]] == row["clipped"]
            of_response = [each for each in found["clipped_tokens"] if each["sample"] == i]
            for each in of_response:
                assert each["ratio"] == pytest.approx(
                    row["ratio"][each["position"]].item(), rel=1e-6
                )
                part = abs(row["unclipped"][each["position"]].item()) / whole_unclipped
                assert each["gradient_share_without_clip"] == pytest.approx(part, abs=1e-6)
                assert each["id"] == group["responses"][i][each["position"]]
            clipped_tokens += len(of_response)
        assert found["eq8"]["loss"] == pytest.approx(sum(row["loss"] for row in table), abs=1e-6)
        later_updates += number > 0
    assert clipped_tokens > 5
    assert later_updates > 2


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ((), [0.25, 0.25, 0.0]),
        (("loss.engine_correction=1.5",), [0.25 * 1.25, 0.25 * 1.5, 0.0]),
        (("loss.engine_correction=1.5", "loss.engine_over_cap=mask"), [0.25 * 1.25, 0.0, 0.0]),
    ],
)
def test_a_tokens_weight_is_that_of_the_loss_times_the_engine_correction(
    options: tuple[str, ...], weights: list[float]
) -> None:
    """The policy gave the tokens 1.25, 2 and 1.25 times the probability that the engine did; the
    last is masked.
    """
    old = (0.5, 0.8, 0.5)
    engine = (0.4, 0.4, 0.4)
    logs = {
        "engine_logprobs": list(map(math.log, engine)),
        "old_logprobs": list(map(math.log, old)),
    }
    sample = Sample(0, (1,), (2, 3, 4), reward=1.0, advantage=2.0, mask=(1, 1, 0), **logs)
    now = [math.log(0.55), math.log(0.8), math.log(0.5)]
    (terms,) = token_terms([sample], [0.25], tiny(*options).loss, [now])
    assert terms.weight.tolist() == pytest.approx(weights)
    assert terms.ratio.tolist() == pytest.approx([1.1, 1.0, 1.0])
    assert terms.gradient.tolist() == pytest.approx(
        [-w * 2.0 * r for w, r in zip(weights, (1.1, 1, 1), strict=True)]
    )
    assert terms.loss == pytest.approx(sum(terms.gradient.tolist()))


# --- what is said where something is missing


def test_a_replayed_step_equals_the_run_to_the_last_bit_also_from_the_initial_model(
    runs: dict[str, Path],
) -> None:
    # the first has no checkpoint before its last step
    for name, start in {"dapo": 0, "grpo": STEPS - 1}.items():
        replay = explain_group(runs[name], STEPS)["eq8"]["ratios"]["replay"]
        assert (replay["from_step"], replay["to_step"]) == (start, STEPS)
        assert replay["metrics_equal"] == replay["metrics_compared"] > 10
        assert replay["largest_relative_difference"] == 0


def test_a_table_of_an_older_version_with_the_column_weight_is_read(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["dapo"], run)
    path = run / f"rollouts/step_{STEPS:06d}.parquet"
    expected = explain_group(run, STEPS)
    table = read_table(path)
    write_table(table.append_column("weight", pa.array([0.5] * len(table), pa.float64())), path)
    assert explain_group(run, STEPS) == expected
    assert read_rollouts([path]).num_rows == len(table)


def test_another_learning_rate_than_the_runs_shows_in_the_compared_metrics(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["dapo"], run)
    edit_options(run, "lr: 0.01", "lr: 0.02")
    replay = explain_group(run, 2)["eq8"]["ratios"]["replay"]
    assert replay["metrics_equal"] < replay["metrics_compared"]
    assert replay["largest_relative_difference"] > 1e-4


def test_in_the_first_update_ratios_are_one_and_need_no_replay(runs: dict[str, Path]) -> None:
    last = explain_group(runs["dapo"], 1, recompute=False)
    table = read_table(runs["dapo"] / "rollouts/step_000001.parquet")
    trained = sorted({r["group_id"] for r in table.to_pylist() if r["outcome"] == "trained"})
    (first,) = (
        found
        for g in trained
        if (found := explain_group(runs["dapo"], 1, g, recompute=False))["eq8"]["update"] == 1
    )
    assert first["eq8"]["ratios"]["source"] == "first_update"
    assert {ratio for each in first["responses"] for ratio in each["token_values"]["ratios"]} == {
        1.0
    }
    assert first["clipped_tokens"] == []
    # -sum of weight x tokens x advantage
    expected = -sum(
        each["weight"] * each["tokens"] * each["advantage"] for each in first["responses"]
    )
    assert first["eq8"]["loss"] == pytest.approx(expected, abs=1e-12)
    assert last["eq8"]["update"] == 3
    assert not last["eq8"]["ratios"]["known"]
    assert last["responses"][0]["loss"] is None
    assert last["responses"][0]["advantage"] is not None


def test_what_is_gone_is_named_with_the_option_that_keeps_it(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["dapo"], run)
    (run / "rollouts/step_000001.parquet").unlink()
    found = explain_group(run, 3)
    why = found["eq8"]["ratios"]["why"]
    assert "responses of step 1" in why
    assert "train.save_every=1" in why
    assert "log.rollouts=all" in why
    assert found["eq9"] is not None
    with pytest.raises(DataError, match="no judged responses of step 1; stored: steps 2 to 3"):
        explain_group(run, 1)
    with pytest.raises(DataError, match="has no group 999; its groups: "):
        explain_group(run, 3, 999)
    with pytest.raises(CheckpointError, match="no run directory"):
        explain_group(tmp_path / "nothing", 1)


def test_each_outcome_has_its_reason(runs: dict[str, Path]) -> None:
    reasons = {
        "all_correct": "no response is better",
        "all_wrong": "no response is better",
        "excess": "batch was full",
    }
    reasons["trained"] = "so the group carries a signal"
    seen = set()
    for step in range(1, STEPS + 1):
        rows = read_table(runs["dapo"] / f"rollouts/step_{step:06d}.parquet").to_pylist()
        for group, outcome in {r["group_id"]: r["outcome"] for r in rows}.items():
            found = explain_group(runs["dapo"], step, group, recompute=False)
            assert found["eq11"]["outcome"] == outcome
            assert reasons[outcome] in found["eq11"]["why"]
            assert (found["eq9"] is None) == (found["eq8"] is None) == (outcome != "trained")
            seen.add(outcome)
    assert len(seen) > 1


def test_the_command_prints_for_a_person_and_as_one_json_object(
    runs: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    path = str(runs["dapo"])
    code, out, err = command(capsys, "explain", path, "--step", "3", "--json")
    assert (code, len(out.splitlines())) == (0, 1)
    assert "replay step 3" in err
    found = json.loads(out)
    assert found["clipped_tokens"]
    code, out, _ = command(capsys, "explain", path, "--step", "3")
    assert code == 0
    assert "metrics are equal to the last bit" in out
    for each in found["responses"]:
        assert f"{each['advantage']:+.6g}" in out
        assert f"{each['loss']:+.6g}" in out
    for each in found["clipped_tokens"]:
        assert f"{each['ratio']:.4f}" in out
    code, out, _ = command(capsys, "explain", path, "--step", "3", "--no-replay")
    assert (code, "ratios are not known" in out) == (0, True)
