"""`dapo explain`: its numbers are those of the paper's equations, written down here a second time."""

import math
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow.parquet import read_table

from dapo.analysis.explain import explain_group
from dapo.core.rng import keyed_permutation
from dapo.policy.model import load_model
from dapo.training.train import train
from helpers.tiny_runs import new_run, tiny

STEPS = 3
OPTIONS = ("model.dtype=float64", "data.eval=null", "rollout.prompts_per_step=3", "train.minibatch_groups=1")
RUNS = {
    "dapo": ("overlong.penalty=0.7", "overlong.buffer_tokens=5", "train.save_every=0", "optim.lr=0.01"),
    "grpo": ("preset=grpo", "loss.kl_coef=0.05", "train.save_every=1", "train.keep_checkpoints=9", "optim.lr=0.01"),
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


# --- the equations once more, one token after the other, in float64 and with nothing of the package but the model


class Naive:
    """The whole training of a run from its stored responses, by autograd over single sequences."""

    def __init__(self, run: Path, *, grpo: bool) -> None:
        self.run, self.grpo = run, grpo
        self.beta, self.low, self.high = (0.05, 0.8, 1.2) if grpo else (0.0, 0.8, 1.28)
        loaded = load_model("tiny-random", dtype=torch.float64)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.initial = load_model("tiny-random", dtype=torch.float64).model
        self.adam = torch.optim.AdamW(self.model.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=0.0)

    def logprobs(self, model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits, dim=-1)[range(len(response)), response]

    def penalty(self, length: int) -> float:  # Eq. 13 at L_max = 8, L_cache = 5, times 0.7
        if self.grpo or length <= 8 - 5:
            return 0.0
        return 0.7 * ((8 - 5) - length) / 5 if length <= 8 else -0.7

    def groups(self, step: int) -> list[dict[str, Any]]:
        rows = read_table(self.run / f"rollouts/step_{step:06d}.parquet").to_pylist()
        found = []
        for group_id, of_group in groupby((r for r in rows if r["outcome"] == "trained"), key=lambda r: r["group_id"]):
            members = list(of_group)
            rewards = [(1.0 if r["correct"] else -1.0) + self.penalty(r["response_tokens"]) for r in members]
            mean = sum(rewards) / len(rewards)
            std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
            advantages = [(r - mean) / (std + 1e-6) if std else 0.0 for r in rewards]  # Eq. 9
            prompt = self.tokenizer(members[0]["prompt"], add_special_tokens=False)["input_ids"]
            responses = [r["response_ids"] for r in members]
            found.append(locals() | {"id": group_id})
        return found

    def replay(self) -> Iterator[tuple[int, int, dict[str, Any], list[dict[str, Any]]]]:
        """Each update of the run: step, number, its one group, and a table of each response's tokens."""
        for step in range(1, STEPS + 1):
            groups = self.groups(step)
            with torch.no_grad():
                old = {g["id"]: [self.logprobs(self.model, g["prompt"], o) for o in g["responses"]] for g in groups}
            for number, i in enumerate(keyed_permutation(len(groups), 0, "minibatches", step)):
                yield step, number, groups[i], self.update(step, groups[i], old[groups[i]["id"]])

    def update(self, step: int, group: dict[str, Any], old: list[torch.Tensor]) -> list[dict[str, Any]]:
        tokens = sum(len(o) for o in group["responses"])
        table, total = [], torch.zeros((), dtype=torch.float64)
        for o, a, before in zip(group["responses"], group["advantages"], old, strict=True):
            weight = 1 / (len(group["responses"]) * len(o)) if self.grpo else 1 / tokens  # Eq. 5, Eq. 8 and 12
            logp = self.logprobs(self.model, group["prompt"], o)
            ratio = (logp - before).exp()
            with torch.no_grad():
                reference = self.logprobs(self.initial, group["prompt"], o)
            bounded = ratio.clamp(self.low, self.high)
            kl = (reference - logp).exp() - (reference - logp) - 1
            loss = (weight * (-torch.minimum(ratio * a, bounded * a) + self.beta * kl)).sum()
            (gradient,) = torch.autograd.grad(loss, logp, retain_graph=True)
            (without_clip,) = torch.autograd.grad(
                (weight * (-ratio * a + self.beta * kl)).sum(), logp, retain_graph=True
            )
            clipped = [(a > 0 and r > self.high) or (a < 0 and r < self.low) for r in ratio.tolist()]
            values = {"ratio": ratio, "gradient": gradient, "unclipped": without_clip, "logprob": logp}
            row = {name: value.detach() for name, value in values.items()}
            table.append(row | {"weight": weight, "loss": loss.item(), "clipped": clipped})
            total = total + loss
        self.adam.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.param_groups[0]["lr"] = 0.01 * min(1, step / 2)
        self.adam.step()
        return table


@pytest.mark.parametrize("name", RUNS)
def test_every_number_is_that_of_the_equations_written_naively(runs: dict[str, Path], name: str) -> None:
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
        whole, whole_unclipped = (sum(row[of].abs().sum().item() for row in table) for of in ("gradient", "unclipped"))
        for i, (response, row) in enumerate(zip(found["responses"], table, strict=True)):
            assert response["overlong_penalty"] == pytest.approx(naive.penalty(response["tokens"]), abs=1e-12)
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
                assert each["ratio"] == pytest.approx(row["ratio"][each["position"]].item(), rel=1e-6)
                part = abs(row["unclipped"][each["position"]].item()) / whole_unclipped
                assert each["gradient_share_without_clip"] == pytest.approx(part, abs=1e-6)
                assert each["id"] == group["responses"][i][each["position"]]
            clipped_tokens += len(of_response)
        assert found["eq8"]["loss"] == pytest.approx(sum(row["loss"] for row in table), abs=1e-6)
        later_updates += number > 0
    assert clipped_tokens > 5
    assert later_updates > 2
