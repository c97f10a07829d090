"""Activations computed again in the backward instead of being kept: a third more arithmetic, a fraction of the memory.

Of each layer only its input is kept. At the paper's lengths nothing else fits: a response of 20,480 tokens leaves
hundreds of gigabytes in the layers of a 32 B model.
"""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from dapo.core.errors import ConfigError


def recompute_layers(model: PreTrainedModel) -> int:
    """Have every decoder layer of `model` keep nothing but its input for the backward; returns how many.

    Gradients are the same to the bit. Not transformers' own switch, which works in training mode only: a policy is in
    evaluation mode, without dropout. Before the layers are sharded. Raises ConfigError for a model without such layers.
    """
    layers: list[torch.nn.Module] = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"train.recompute: no layers to compute again were found in a {type(model).__name__}")
    for layer in layers:
        # the packed forward draws no random numbers
        again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        layer.forward = again
    return len(layers)
