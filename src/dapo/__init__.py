"""DAPO: reinforcement learning that makes language models reason better (arXiv 2503.14476)."""

__version__ = "0.1.0"
