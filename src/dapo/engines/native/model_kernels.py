"""The kernels that compute a model, chosen by device and type."""

from dataclasses import dataclass
from typing import cast

import torch
from transformers import PreTrainedModel

from dapo.core.processor import BFLOAT16_CAPABILITY
from dapo.engines.native.attention import VarlenAttention
from dapo.engines.native.cache import LengthSlots, MaskedSlots, SlotCache
from dapo.engines.native.decode_graphs import DecodeGraphs

# the widest head of the kernel that attends by lengths; it also needs multiples of 8
WIDEST_HEAD = 256


@dataclass(frozen=True)
class ModelKernels:
    """The kernels of decoder layers and of their attention."""

    # whether layers use fused weights (`fused_weight_layers`) or weights prepacked for a CPU
    fuses_weights: bool
    # attention of a decode step by the lengths of its rows; None: under a mask
    attend: VarlenAttention | None = None
    num_splits: int | None = None
    """The kernel's number of splits of a row. 1: a row's attention rounds independently of the rest
    of the batch. None: the kernel splits long rows freely, which is faster for few rows.
    """
    compiled: bool = False  # whether `cpu_kernels` attends in a decode step and samples
    # whether decode steps are CUDA graphs, where all layers use fused weights
    captures: bool = False

    def new_slots(self) -> SlotCache:
        """Return an empty cache of the kind that the attention reads."""
        if self.attend is None:
            return MaskedSlots(compiled=self.compiled)
        graphs = DecodeGraphs() if self.captures else None
        return LengthSlots(self.attend, num_splits=self.num_splits, graphs=graphs)


def model_kernels_for(
    model: PreTrainedModel, *, reproducible: bool, compiled: bool = False
) -> ModelKernels:
    """Choose prepacked weights on a CPU, fused ones on a GPU, attention by lengths if possible."""
    if model.device.type == "cpu":
        return ModelKernels(fuses_weights=False, compiled=compiled)
    has_kernel = model.dtype in (torch.bfloat16, torch.float16) and head_width(model) is not None
    if not (has_kernel and torch.cuda.get_device_capability(model.device) >= BFLOAT16_CAPABILITY):
        return ModelKernels(fuses_weights=True)
    from torch.nn.attention.varlen import varlen_attn  # slow to import, and useless on a CPU

    attend = cast(VarlenAttention, varlen_attn)  # it returns only a tensor by default
    num_splits = 1 if reproducible else None
    return ModelKernels(fuses_weights=True, attend=attend, num_splits=num_splits, captures=True)


def head_width(model: PreTrainedModel) -> int | None:
    """Return the width of an attention head if the kernel supports it, otherwise None."""
    config = model.config
    if getattr(config, "v_head_dim", None) is not None:  # keys and values of different widths
        return None
    width: int | None = getattr(config, "head_dim", None)
    if not width:
        width = config.hidden_size // config.num_attention_heads
    return width if width % 8 == 0 and width <= WIDEST_HEAD else None
