"""The agreement of gradients is that of their coordinates, and a gradient that of each response."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dapo.policy.builtin_models import tiny_random
from evidence.gradient_signal import Weighted, cosines, gradient, weighted


@pytest.fixture
def model() -> PreTrainedModel:
    model, _ = tiny_random(torch.float32)
    return model


def digits(text: str, **_: Any) -> Mapping[str, Sequence[int]]:
    """A tokenizer: a token for each digit."""
    return {"input_ids": [int(digit) for digit in text]}


def alone(model: PreTrainedModel, response: Weighted) -> torch.Tensor:
    """The gradient of one response in single precision, without padding."""
    model.zero_grad(set_to_none=True)
    prompt = digits(response.prompt)["input_ids"]
    ids = torch.tensor([[*prompt, *response.response_ids]])
    log_probs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    of_tokens = log_probs.gather(1, ids[0, 1:, None])[len(prompt) - 1 :]
    (response.advantage * of_tokens.sum()).backward()
    return torch.cat([each.grad.reshape(-1) for each in model.parameters()])


def test_the_gradient_of_a_group_is_the_sum_of_those_of_its_responses(
    model: PreTrainedModel,
) -> None:
    group = [Weighted("12", [3, 4, 5], 0.5), Weighted("12", [6], -1.0), Weighted("7", [8, 9], 0.5)]
    expected = torch.stack([alone(model, each) for each in group]).sum(0)
    found = gradient(model, digits, group)
    # bfloat16 keeps eight bits
    assert torch.linalg.norm(found - expected) < 0.03 * torch.linalg.norm(expected)


def test_an_advantage_is_the_score_less_the_mean_of_the_others() -> None:
    rows = [
        {"correct": correct, "prompt": "1", "response_ids": [2]}
        for correct in (True, False, None, False)
    ]
    num_right, responses = weighted(rows)
    assert num_right == 1
    assert [each.advantage for each in responses] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_a_shared_direction_shows_between_the_halves_and_noise_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(10_000, generator=generator)
    sums = {}
    for half in (0, 1):
        for right, weight in ((1, 0.0), (2, 1.0)):
            noise = torch.randn(10_000, generator=generator)
            sums[half, right] = weight * signal + noise
    found = cosines(sums)
    assert set(found) == {(1, 1), (1, 2), (2, 1), (2, 2)}
    # signal and noise of one size: at most half, less by the scale; the deviation of noise is 1 / 100
    assert 0.25 < found[2, 2] < 0.5
    for key in ((1, 1), (1, 2), (2, 1)):
        assert abs(found[key]) < 0.05
