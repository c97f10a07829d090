"""Which groups of a run carry a signal: the agreement of gradients from two halves of its steps.

    python -m evidence.gradient_signal RUN MODEL --steps 20

MODEL is the model with which the run began, as a Hugging Face directory. For each number of right
responses in a group, from 1 up to `--most` and more, the policy gradient of accuracy is summed over
the groups of the odd steps, and over those of the even ones: the responses' advantages are their
scores, 1 or 0, less the mean of the group's other responses. Noise alone has a cosine of 0 between
the halves; with n groups in each, the cosine of a signal grows with n. Each coordinate is divided
by its root mean square over all sums first, as Adam does, so that no few of them decide.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pyarrow.parquet import read_table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

COLUMNS = ["group_id", "correct", "prompt", "response_ids", "outcome"]
KEPT = ("trained", "excess", "filtered")
MICROBATCH = 16
Sums = Mapping[tuple[int, int], torch.Tensor]
"""Gradients by half, 0 or 1, and number of right responses."""


@dataclass(frozen=True)
class Weighted:
    """A stored response with its advantage."""

    prompt: str
    response_ids: Sequence[int]
    advantage: float


def groups_of(run: Path, steps: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield the step and the responses of each group with right and wrong ones."""
    for step in range(1, steps + 1):
        path = run / "rollouts" / f"step_{step:06}.parquet"
        groups: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in read_table(path, columns=COLUMNS).to_pylist():
            if row["outcome"] in KEPT:
                groups[row["group_id"]].append(row)
        for rows in groups.values():
            yield step, rows


def weighted(rows: Sequence[Mapping[str, Any]]) -> tuple[int, list[Weighted]]:
    """Return the number of right responses, and each with its leave-one-out advantage."""
    num_right = sum(bool(row["correct"]) for row in rows)
    responses = []
    for row in rows:
        score = float(bool(row["correct"]))
        mean_of_others = (num_right - score) / (len(rows) - 1)
        responses.append(Weighted(row["prompt"], row["response_ids"], score - mean_of_others))
    return num_right, responses


def gradient(model: PreTrainedModel, tokenizer: Any, responses: Sequence[Weighted]) -> torch.Tensor:
    """Return the gradient of the advantages times the log-probabilities, of shape [parameters]."""
    model.zero_grad(set_to_none=True)
    encoded = []
    for response in responses:
        prompt_ids = tokenizer(response.prompt, add_special_tokens=False)["input_ids"]
        encoded.append((prompt_ids, list(response.response_ids), response.advantage))
    # equal lengths beside each other pad little
    encoded.sort(key=lambda each: len(each[0]) + len(each[1]))
    for start in range(0, len(encoded), MICROBATCH):
        _add_gradient(model, encoded[start : start + MICROBATCH])
    parts = [each.grad for each in model.parameters() if each.grad is not None]
    return torch.cat([part.reshape(-1) for part in parts])


def _add_gradient(
    model: PreTrainedModel, part: Sequence[tuple[list[int], list[int], float]]
) -> None:
    width = max(len(prompt) + len(response) for prompt, response, _ in part)
    ids = torch.zeros(len(part), width, dtype=torch.long)
    attention = torch.zeros_like(ids)
    advantages = torch.zeros(len(part), width)
    for index, (prompt, response, advantage) in enumerate(part):
        end = len(prompt) + len(response)
        ids[index, :end] = torch.tensor(prompt + response)
        attention[index, :end] = 1
        advantages[index, len(prompt) : end] = advantage
    trained = advantages[:, 1:] != 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids, attention_mask=attention).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[trained])
    log_probs = -torch.nn.functional.cross_entropy(
        logits.float(), ids[:, 1:][trained], reduction="none"
    )
    objective = (log_probs * advantages[:, 1:][trained]).sum()
    objective.backward()


def cosines(sums: Sums) -> dict[tuple[int, int], float]:
    """Return the cosine between the halves, by the numbers of right responses in each."""
    keys = sorted(sums)
    stacked = torch.stack([sums[key] for key in keys])
    # a coordinate without a gradient in any sum stays 0
    scale = stacked.square().mean(dim=0).sqrt_().clamp_(min=torch.finfo(torch.float32).tiny)
    stacked /= scale
    normed = torch.nn.functional.normalize(stacked, dim=1)
    products = normed @ normed.T
    found = {}
    for row, (first_half, first) in enumerate(keys):
        for column, (second_half, second) in enumerate(keys):
            if (first_half, second_half) == (0, 1):
                found[first, second] = float(products[row, column])
    return found


def main() -> None:
    """Print the cosines, a row for each number of right responses in the odd steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--most", type=int, default=4)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)

    responses: dict[tuple[int, int], list[Weighted]] = defaultdict(list)
    num_groups: dict[tuple[int, int], int] = defaultdict(int)
    for step, rows in groups_of(arguments.run, arguments.steps):
        num_right, members = weighted(rows)
        if num_right in (0, len(rows)):
            continue
        # odd steps first
        key = (1 - step % 2, min(num_right, arguments.most))
        responses[key].extend(members)
        num_groups[key] += 1
    sums = {key: gradient(model, tokenizer, each) for key, each in responses.items()}
    found = cosines(sums)
    for first in sorted({right for right, _ in found}):
        row = {f"{second} right": cosine for (odd, second), cosine in found.items() if odd == first}
        print(json.dumps({"right": first, "groups": num_groups[0, first], **row}))


if __name__ == "__main__":
    main()
