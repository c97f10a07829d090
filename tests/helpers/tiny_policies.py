"""Samples, policies and the slow, obvious log-probabilities that the policy's tests compare
with.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, Starcoder2Config, Starcoder2ForCausalLM

from dapo.config import Config
from dapo.core.rng import keyed_seed, keyed_uniforms
from dapo.policy.custom_loss import load_loss
from dapo.policy.model import LoadedModel, load_model
from dapo.policy.policy import Policy
from dapo.types import Sample
from helpers.tiny_models import COMMON, VOCABULARY, randomised, tiny_model

NO_CLIPPING = 1e9


def ids(length: int, *key: int | str, vocabulary: int = VOCABULARY) -> tuple[int, ...]:
    """Keyed random tokens."""
    return tuple(int(u * vocabulary) for u in keyed_uniforms(keyed_seed("ids", *key), length))


def sample(
    group: int,
    prompt: Sequence[int],
    response: Sequence[int],
    advantage: float = 1.0,
    **fields: Any,
) -> Sample:
    """A sample whose tokens all train, without anyone's log-probabilities."""
    values: dict[str, Any] = {
        "reward": 0.0,
        "engine_logprobs": (),
        "old_logprobs": None,
        "mask": (True,) * len(response),
    }
    return Sample(
        group_id=group,
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        advantage=advantage,
        **(values | fields),
    )


def groups_of(lengths: Sequence[tuple[int, Sequence[int]]], **fields: Any) -> list[Sample]:
    """One group for each (prompt length, response lengths); advantages differ from sample to
    sample.
    """
    return [
        sample(
            g,
            ids(prompt, "prompt", g),
            ids(length, "response", g, i),
            (-1) ** (g + i) * (0.5 + 0.25 * i),
            **fields,
        )
        for g, (prompt, responses) in enumerate(lengths)
        for i, length in enumerate(responses)
    ]


def ragged(**fields: Any) -> list[Sample]:
    """Lengths that differ a lot, in no order, among them a single token."""
    return groups_of([(5, (1, 3, 50, 7)), (12, (2, 30, 9)), (1, (4, 4)), (3, (1, 1))], **fields)


def branching(**fields: Any) -> list[Sample]:
    """Groups with repeated responses, responses that part late or end where others go on, and
    prompts that begin alike, one of them with the prompt and response of another group.
    """
    start = ids(4, "start")
    long = ids(20, "long")
    prompts = [(*start, 7, 8), (*start, 9), (*start, 7, 8), (*start, 7, 8, *long[:3]), (*start, 7)]
    responses = [
        [long, long, (*long[:12], 3), long[:12], (*long[:12], *ids(9, "late")), ids(5, "own")],
        [long, long[:1], (*long[:1], 5), (*long[:1], 5), (6,)],
        [long, (*long[:19], 2), (4, 4)],
        [long[3:], (*long[3:9], 1, 1), (1,)],
        [(8, *long), (8, *long[:5])],
    ]
    return [
        sample(g, prompts[g], response, (-1) ** (g + i) * (0.5 + 0.25 * i), **fields)
        for g, own in enumerate(responses)
        for i, response in enumerate(own)
    ]


def loaded(
    model: PreTrainedModel | str = "llama", *, dtype: torch.dtype = torch.float64
) -> LoadedModel:
    """A tiny random model of a family, or a model that is given."""
    tiny = load_model("tiny-random", dtype=dtype)
    return LoadedModel(
        tiny_model(model, dtype=dtype) if isinstance(model, str) else model,
        tiny.tokenizer,
        (1,),
        "tiny",
    )


def float64_model(seed: int = 0) -> PreTrainedModel:
    """A model that computes in float64 throughout: those with RMSNorm round to float32 inside of
    it.
    """
    options: dict[str, Any] = COMMON | {"head_dim": None, "pad_token_id": None}
    return randomised(Starcoder2ForCausalLM(Starcoder2Config(**options)), seed).double().eval()


def policy_config(
    *,
    loss: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    temperature: float = 1.0,
    microbatch_tokens: int = 64,
    lora: dict[str, Any] | None = None,
    seed: int = 0,
) -> Config:
    """The options of a policy that takes full steps from the first update and does not clip
    gradients by default.
    """
    return Config.model_validate(
        {
            "model": {"name": "tiny-random", "lora": lora},
            "data": {"train": "builtin:sums"},
            "rollout": {"temperature": temperature, "max_response_tokens": 50},
            "overlong": {"mode": "off"},
            "loss": loss or {},
            "optim": {"lr": 1e-3, "warmup_steps": 0, "max_grad_norm": NO_CLIPPING} | (optim or {}),
            "train": {"microbatch_tokens": microbatch_tokens, "seed": seed},
        }
    )


def make_policy(
    model: LoadedModel | None = None,
    *,
    loss: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    temperature: float = 1.0,
    microbatch_tokens: int = 64,
    lora: dict[str, Any] | None = None,
    seed: int = 0,
) -> Policy:
    """A policy in this process with the options of `policy_config`."""
    config = policy_config(
        loss=loss,
        optim=optim,
        temperature=temperature,
        microbatch_tokens=microbatch_tokens,
        lora=lora,
        seed=seed,
    )
    return Policy(config, model or loaded(), load_loss(config.loss.function))


def plain_scores(
    model: PreTrainedModel, samples: Sequence[Sample], temperature: float = 1.0
) -> list[tuple[Tensor, Tensor]]:
    """Log-probabilities and entropies of each response by the model's own forward over the one
    sequence.
    """
    rows = plain_distributions(model, samples, temperature)
    return [
        (
            log_p[torch.arange(len(log_p)), torch.tensor(row.response_ids)],
            -(log_p.exp() * log_p).sum(dim=1),
        )
        for log_p, row in zip(rows, samples, strict=True)
    ]


def plain_distributions(
    model: PreTrainedModel, samples: Sequence[Sample], temperature: float = 1.0
) -> list[Tensor]:
    """`[T, V]` log-probabilities of all tokens at each position of each response, by the model's
    own forward.
    """
    found = []
    for row in samples:
        tokens = torch.tensor([row.prompt_ids + row.response_ids])
        logits = (
            model(input_ids=tokens, use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1]
            / temperature
        )
        found.append(logits.log_softmax(dim=1))
    return found


def plain_copy(model: LoadedModel) -> PreTrainedModel:
    """The model with its own attention; to be taken before a policy takes over the model."""
    return copy.deepcopy(model.model)


def gradient_of(policy: Policy, minibatch: Sequence[Sample], directory: Path) -> dict[str, Tensor]:
    """The gradient of a fresh policy's first update: AdamW's first moment is a tenth of it."""
    policy.update(minibatch, step=1)
    directory.mkdir(parents=True)
    policy.save(directory)
    return {
        name: moment / (1 - 0.9)
        for name, moment in load_file(directory / "exp_avg.safetensors").items()
    }


def weights_of(policy: Policy) -> dict[str, Tensor]:
    """A copy of everything that `weights()` yields."""
    return {name: tensor.clone() for name, tensor in policy.weights(version=0).named_tensors()}


def master_weights_of(policy: Policy) -> dict[str, Tensor]:
    """A copy of the weights that the optimiser holds, which a bfloat16 model computes with in
    rounded copies.
    """
    return {
        name: weight.detach().clone() for name, weight in policy._optimizer.master_weights.items()
    }


def assert_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], *, relative: float
) -> None:
    """Every tensor within `relative` of the largest number in it."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = float(tensor.abs().max()) or 1.0
        assert float((actual[name] - tensor).abs().max()) <= relative * scale, name


RATIOS = (0.4, 0.76, 1.0, 1.24, 3.5)
"""Of the float64 model to the policy before: on both sides of the clips 0.8 and 1.28, and where
these change places.
"""


def off_policy(samples: list[Sample], *, seed: int = 0) -> list[Sample]:
    """Old log-probabilities that give the tokens of the float64 model, at temperature 0.7, each of
    RATIOS in turn.
    """
    scores = [
        logprobs.detach().numpy() for logprobs, _ in plain_scores(float64_model(seed), samples, 0.7)
    ]
    ratios = [
        [RATIOS[(i + 3 * t) % len(RATIOS)] for t in range(len(row.mask))]
        for i, row in enumerate(samples)
    ]
    return [
        replace(row, old_logprobs=tuple(now - np.log(ratio)))
        for row, now, ratio in zip(samples, scores, ratios, strict=True)
    ]


def with_masked_tokens(samples: list[Sample]) -> list[Sample]:
    """Some tokens do not train; one response not at all."""
    masked = [
        replace(row, mask=tuple(i != 2 and (i + t) % 4 != 0 for t in range(len(row.mask))))
        for i, row in enumerate(samples)
    ]
    assert not any(masked[2].mask)
    return masked
