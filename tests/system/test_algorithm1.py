"""The whole of it against an independent, naive Algorithm 1: no packing, no cache, no microbatches, no engine."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dapo.config import Config, build_config
from dapo.core.rng import keyed_permutation, keyed_seed, keyed_uniforms
from dapo.data.problems import load_problems
from dapo.policy.model import load_model

GROUP, PROMPTS, MINIBATCH, LIMIT, STEPS = 4, 4, 2, 8, 5
LR, WARMUP, TEMPERATURE = 2e-3, 2, 0.8


def tiny_config(model: Path) -> Config:
    return build_config(
        {
            "model": {"name": str(model), "dtype": "float64"},
            "data": {"train": {"builtin": {"sums": {}}, "size": 40, "seed": 1}},
            "rollout": {
                "prompts_per_step": PROMPTS,
                "group_size": GROUP,
                "max_response_tokens": LIMIT,
                "native": {"slots": 12},
                "temperature": TEMPERATURE,
            },
            "dynamic_sampling": {"max_groups_per_step": 40},
            "reward": {"verifier": "dapo.rewards.examples:has_digit", "workers": 1},
            "overlong": {"buffer_tokens": 4, "penalty": 0.5},
            "optim": {"lr": LR, "warmup_steps": WARMUP, "weight_decay": 0.1},
            "train": {"num_steps": STEPS, "minibatch_groups": MINIBATCH, "microbatch_tokens": 200, "save_every": 0},
        }
    )


class NaiveDapo:
    """Algorithm 1 as a reader of the paper would write it."""

    def __init__(self, model: Path) -> None:
        loaded = load_model(str(model), dtype=torch.float64)
        self.model, self.tokenizer, self.stop_ids = loaded.model, loaded.tokenizer, loaded.stop_ids
        self.problems = load_problems({"builtin": {"sums": {}}, "size": 40, "seed": 1})
        self.place = 0
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1
        )
        self.uninformative = 0

    def run(self) -> None:
        for step in range(1, STEPS + 1):
            groups = []
            while len(groups) < PROMPTS:  # Eq. 11
                group = self.sample_group(step)
                correct = [any(c.isdigit() for c in text) for text in group["texts"]]
                if 0 < sum(correct) < GROUP:
                    groups.append({**group, "correct": correct})
                else:
                    self.uninformative += 1
            for group in groups:
                rewards = [
                    (1.0 if right else -1.0) + self.overlong(len(ids))
                    for right, ids in zip(group["correct"], group["responses"], strict=True)
                ]
                mean = sum(rewards) / GROUP
                std = (sum((r - mean) ** 2 for r in rewards) / (GROUP - 1)) ** 0.5
                group["advantages"] = [(r - mean) / (std + 1e-6) for r in rewards]
                with torch.no_grad():
                    group["old"] = [self.logprobs(group["prompt"], ids) for ids in group["responses"]]
            order = keyed_permutation(PROMPTS, 0, "minibatches", step)
            for start in range(0, PROMPTS, MINIBATCH):
                self.update([groups[i] for i in order[start : start + MINIBATCH]], step)

    def sample_group(self, step: int) -> dict:
        epoch, offset = divmod(self.place, len(self.problems))
        problem = self.problems[int(keyed_permutation(len(self.problems), 0, "epoch", epoch)[offset])]
        prompt = self.tokenizer(problem.prompt)["input_ids"]
        responses = [self.sample(prompt, keyed_seed(0, "token", step, self.place, i)) for i in range(GROUP)]
        self.place += 1
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in responses]
        return {"prompt": prompt, "responses": responses, "texts": texts}

    @torch.no_grad()
    def sample(self, prompt: list[int], seed: int) -> list[int]:
        ids: list[int] = []
        for uniform in keyed_uniforms(seed, LIMIT):
            logits = self.model(torch.tensor([prompt + ids])).logits[0, -1] / TEMPERATURE
            cumulative = torch.softmax(logits, -1).cumsum(-1)
            ids.append(int((cumulative <= uniform * cumulative[-1]).sum()))
            if ids[-1] in self.stop_ids:
                break
        return ids

    def logprobs(self, prompt: list[int], response: list[int]) -> torch.Tensor:
        logits = self.model(torch.tensor([prompt + response])).logits[0] / TEMPERATURE
        scored = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        return torch.stack([scored[t, token] for t, token in enumerate(response)])

    @staticmethod
    def overlong(length: int) -> float:  # Eq. 13 with L_max 8, L_cache 4, factor 0.5
        return 0.0 if length <= 4 else -0.5 * (length - 4) / 4

    def update(self, groups: list[dict], step: int) -> None:
        total = sum(len(ids) for group in groups for ids in group["responses"])
        loss = torch.zeros((), dtype=torch.float64)
        for group in groups:
            rows = zip(group["responses"], group["advantages"], group["old"], strict=True)
            for ids, advantage, old in rows:
                new = self.logprobs(group["prompt"], ids)
                for t in range(len(ids)):  # Eq. 8, token-level
                    ratio = torch.exp(new[t] - old[t])
                    clipped = torch.clamp(ratio, 0.8, 1.28)
                    loss = loss - torch.minimum(ratio * advantage, clipped * advantage) / total
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for settings in self.optimizer.param_groups:
            settings["lr"] = LR * min(1.0, step / WARMUP)
        self.optimizer.step()


def run_real(config: Config, path: Path) -> dict[str, torch.Tensor]:
    from dapo.cli.train import start_run

    start_run(config, run_dir=path, config_name="tiny")
    (weights,) = (path / "checkpoints" / f"step_{STEPS:06d}").glob("weights*.safetensors")
    return load_file(weights)


@pytest.mark.slow
def test_five_steps_of_the_system_equal_a_naive_reimplementation(tmp_path: Path, float64_model: Path) -> None:
    naive = NaiveDapo(float64_model)
    before = {name: tensor.clone() for name, tensor in naive.model.named_parameters()}
    naive.run()
    real = run_real(tiny_config(float64_model), tmp_path / "run")

    moved = max((tensor - before[name]).abs().max().item() for name, tensor in naive.model.named_parameters())
    assert moved > 2e-3  # the comparison would mean nothing if training did nothing
    print(
        "largest difference", max((real[n] - t.detach()).abs().max().item() for n, t in naive.model.named_parameters())
    )
    for name, tensor in naive.model.named_parameters():
        torch.testing.assert_close(real[name], tensor.detach(), rtol=0, atol=1e-8)
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    dropped = sum(row["rollout/groups_all_wrong"] + row["rollout/groups_all_correct"] for row in metrics)
    assert dropped == naive.uninformative > 0
