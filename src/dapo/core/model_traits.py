"""Traits of transformers' models that neither the update nor the native engine computes, so that
both refuse them.
"""

UNPASSED_WINDOWS = ("doge", "phimoe", "qwen2_moe")
"""Types of models whose sliding window is in the mask alone: their attention call has no window."""
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""RoPE types whose angles depend on the longest sequence, and so on the rest of a batch."""
