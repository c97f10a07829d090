"""Prepares a model's forward for training: packed sequences, verified, recomputed layers."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dapo.core.errors import ConfigError
from dapo.libs.cpu_kernels import fuse_layers
from dapo.policy.gpu_layers import liger_functions, use_flash_attention_3, use_layer_functions
from dapo.policy.logprobs import token_logprobs
from dapo.policy.packed_attention import (
    IMPLEMENTATION,
    unsupported_model_error,
    use_packed_attention,
)
from dapo.policy.packing import in_callers_order, pack
from dapo.types import Sample

MIN_TOLERANCE = 1e-3
"""Nats by which packed and plain scores may differ on average; a wrong mask gives 0.05 or more."""
ROUNDING_FACTOR = 4
"""They may also differ by this multiple of the mean difference of two roundings."""


def use_packed_forward(model: PreTrainedModel) -> None:
    """Switch `model` to packed attention, and check on a few tokens that it computes the same.

    Raises ConfigError if it does not, for example because the architecture mixes tokens outside of
    attention or changes logits after the head.
    """
    check_packed_forward(model, prepare_packed_forward(model))


def prepare_packed_forward(model: PreTrainedModel) -> str | None:
    """Switch to packed attention and fused layers; return the attention before, None if packed."""
    plain = model.config._attn_implementation
    if plain == IMPLEMENTATION:
        return None
    use_packed_attention(model)
    fuse_layers(model)
    functions = liger_functions()
    if functions is not None:
        use_layer_functions(model, functions)
    use_flash_attention_3()
    return str(plain)


@torch.no_grad()
def check_packed_forward(model: PreTrainedModel, plain: str | None, sharded: Any = None) -> None:
    """Raise ConfigError if packed sequences have other log-probabilities than single ones.

    Rounding is measured on the same device, in the same type: the difference that a padded batch
    and the other of PyTorch's two attentions make to a plain forward.

    Args:
        model: has packed attention.
        plain: the name of the attention for single sequences; None: it was checked before.
        sharded: the wrapper that gathers sharded weights for each forward, in which case every rank
            calls this; None: the weights are whole.
    """
    if plain is None:
        return
    try:
        difference, rounding = _packed_differences(model, plain, sharded)
    except torch.OutOfMemoryError:  # which is a RuntimeError
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise unsupported_model_error(
            model, f"it does not run on packed sequences ({error})"
        ) from error
    if sharded is not None:
        sharded.reshard()
    # `not <=`: nan is a difference too
    if not difference <= max(MIN_TOLERANCE, ROUNDING_FACTOR * rounding):
        different = (
            f"log-probabilities of packed sequences differ by {difference:.2g} nats from those of"
            " single ones"
        )
        raise unsupported_model_error(
            model, f"{different}, and two plain forwards differ by {rounding:.2g}"
        )


def _packed_differences(model: PreTrainedModel, plain: str, sharded: Any) -> list[float]:
    """Return mean differences in nats from single sequences, of packed and of padded ones."""
    run = sharded or (lambda compute: compute())
    vocabulary = model.config.get_text_config().vocab_size
    # arbitrary ids, the same in each call and on each rank
    ids = tuple((7 * i + 3) % vocabulary for i in range(15))
    responses = (ids[8:10], ids[10:14], ids[14:])
    samples = []
    for group, prompt in enumerate((ids[:3], ids[3:8])):
        for response in responses:
            mask = (True,) * len(response)
            samples.append(Sample(group, prompt, response, 0.0, 0.0, (), None, mask))
    (microbatch,) = pack(samples, max_tokens=1000, device=model.device)
    scores = token_logprobs(sharded or model, microbatch, temperature=1.0)
    packed = list(chain(*in_callers_order([microbatch], [scores], len(samples))))
    model.set_attn_implementation("sdpa" if plain == "eager" else "eager")
    padded = _plain_logprobs(model, run, samples)
    model.set_attn_implementation(plain)
    single: list[float] = []
    for sample in samples:
        single += _plain_logprobs(model, run, [sample])
    model.set_attn_implementation(IMPLEMENTATION)
    return [_mean_difference(packed, single), _mean_difference(padded, single)]


def _mean_difference(first: Sequence[float], second: Sequence[float]) -> float:
    return fmean(abs(a - b) for a, b in zip(first, second, strict=True))


def _plain_logprobs(
    model: PreTrainedModel, run: Callable[..., Tensor], samples: list[Sample]
) -> list[float]:
    """Return all responses' log-probabilities from the model's forward over a padded batch."""
    rows = [
        torch.tensor((*sample.prompt_ids, *sample.response_ids), device=model.device)
        for sample in samples
    ]
    ids = pad_sequence(rows, batch_first=True)
    logits = run(lambda: model(input_ids=ids, use_cache=False).logits)[:, :-1]  # [N, T - 1, V]
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=2)
    scores = log_p.gather(2, ids[:, 1:, None]).squeeze(2)
    parts = []
    for sample, row, row_scores in zip(samples, rows, scores, strict=True):
        # a token's score is at the position before it
        parts.append(row_scores[len(sample.prompt_ids) - 1 : len(row) - 1])
    return torch.cat(parts).tolist()


def recompute_layers(model: torch.nn.Module) -> int:
    """Make each decoder layer keep only its input for the backward; return their number.

    Gradients are the same to the bit. transformers' own switch works only in training mode, and a
    policy is in evaluation mode, without dropout. Call it before the layers are sharded. Raises
    ConfigError for a model without such layers.
    """
    modules = list(model.modules())
    layers = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"train.recompute=true: found no layers to recompute in a {type(model).__name__}"
        )
    for layer in layers:
        # the packed forward uses no random numbers
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
    return len(layers)
