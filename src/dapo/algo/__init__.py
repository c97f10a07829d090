"""The paper as pure functions: no I/O, no configuration objects."""

__all__ = [
    "advantages",
    "chance",
    "entropy",
    "gae",
    "kl",
    "loss",
    "overlong",
    "sampling",
    "surrogates",
]
