"""Traits of transformers' models that neither the update nor the native engine computes, so that
both refuse them.
"""

from collections.abc import Iterator
from typing import Any

UNPASSED_WINDOWS = ("doge", "phimoe", "qwen2_moe")
"""Types of models whose sliding window is in the mask alone: their attention call has no window."""
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""RoPE types whose angles depend on the longest sequence, and so on the rest of a batch."""


def uncomputed_traits(model: Any) -> Iterator[str]:
    """Yield what both leave out of a transformers model that has a head, as far as it can be seen.

    Logits are those of `get_output_embeddings()` on the last states of `base_model`.
    """
    computed = {
        id(parameter)
        for module in (model.base_model, model.get_output_embeddings())
        for parameter in module.parameters()
    }
    others = [name for name, weight in model.named_parameters() if id(weight) not in computed]
    if others:
        yield f"its logits need weights between its layers and its head, such as {others[0]}"
    # of a model of several kinds of input the text's, else the same
    tuning = getattr(model.config.get_text_config(), "attn_temperature_tuning", None)
    if tuning:
        yield (
            f"with attn_temperature_tuning={tuning} it scales queries by their place in the batch,"
            " not by their position"
        )
