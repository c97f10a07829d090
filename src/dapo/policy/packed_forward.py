"""Prepares a model's forward for training: packed sequences, checked to compute the same, and recomputed layers."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dapo.core.errors import ConfigError
from dapo.policy.logprobs import token_logprobs
from dapo.policy.packed_attention import IMPLEMENTATION, unsupported_model_error, use_packed_attention
from dapo.policy.packing import in_callers_order, pack
from dapo.types import Sample

PACKED_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Nats by which packed and plain log-probabilities may differ on average."""


def use_packed_forward(model: PreTrainedModel) -> None:
    """Switch `model` to packed attention, and check on a few tokens that it still computes the same.

    Raises ConfigError if it does not, for example because the architecture mixes tokens outside of attention or changes
    logits after the head.
    """
    if (plain := model.config._attn_implementation) != IMPLEMENTATION:
        use_packed_attention(model)
        check_packed_forward(model, plain, lambda ids: model(input_ids=ids, use_cache=False).logits, dtype=model.dtype)


@torch.no_grad()
def check_packed_forward(
    model: PreTrainedModel, plain: str, logits: Callable[[Tensor], Tensor], *, dtype: torch.dtype, sharded: Any = None
) -> None:
    """Raise ConfigError if log-probabilities of packed sequences differ from those of single sequences.

    `model` has packed attention and computes in `dtype`, `plain` names the attention for single sequences, and `logits`
    is the model's own forward, `[1, T]` token ids -> `[1, T, V]`. If the weights are sharded, the wrapper `sharded`
    computes instead of `model`, and every rank calls this.
    """
    try:
        difference = _packed_difference(model, plain, logits, sharded or model)
    except torch.OutOfMemoryError:  # which is a RuntimeError
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise unsupported_model_error(model, f"it does not run on packed sequences ({error})") from error
    if not difference <= PACKED_TOLERANCE[dtype]:
        raise unsupported_model_error(
            model, f"log-probabilities of packed sequences differ by {difference:.2g} nats from those of single ones"
        )


def _packed_difference(model: PreTrainedModel, plain: str, logits: Callable[[Tensor], Tensor], computes: Any) -> float:
    """The mean difference in nats between log-probabilities with packed and with `plain` attention."""
    ids = tuple((7 * i + 3) % model.config.get_text_config().vocab_size for i in range(15))
    prompts, responses = (ids[:3], ids[3:8]), (ids[8:10], ids[10:14], ids[14:])
    samples = [
        Sample(group, prompt, response, 0.0, 0.0, (), None, (True,) * len(response))
        for group, prompt in enumerate(prompts)
        for response in responses
    ]
    (microbatch,) = pack(samples, max_tokens=1000, device=model.device)
    packed = in_callers_order([microbatch], [token_logprobs(computes, microbatch, temperature=1.0)], len(samples))
    model.set_attn_implementation(plain)
    alone = [_plain_logprobs(logits, sample, model.device) for sample in samples]
    model.set_attn_implementation(IMPLEMENTATION)
    return fmean(abs(a - b) for a, b in zip(chain(*packed), chain(*alone), strict=True))


def _plain_logprobs(logits: Callable[[Tensor], Tensor], sample: Sample, device: torch.device) -> list[float]:
    """A response's log-probabilities from the model's own forward over the single sequence."""
    ids = torch.tensor([(*sample.prompt_ids, *sample.response_ids)], device=device)
    of_response = logits(ids)[0, len(sample.prompt_ids) - 1 : -1]  # [response, V]
    log_p = of_response.to(torch.promote_types(of_response.dtype, torch.float32)).log_softmax(dim=1)
    return log_p.gather(1, ids[0, len(sample.prompt_ids) :, None]).flatten().tolist()


def recompute_layers(model: torch.nn.Module) -> int:
    """Make every decoder layer of `model` keep only its input for the backward; returns the number of layers.

    Gradients are the same to the bit. transformers' own switch works only in training mode, and a policy is in
    evaluation mode, without dropout. Call it before the layers are sharded. Raises ConfigError for a model without such
    layers.
    """
    layers: list[torch.nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"train.recompute=true: found no layers to recompute in a {type(model).__name__}")
    for layer in layers:
        # the packed forward uses no random numbers
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return len(layers)
