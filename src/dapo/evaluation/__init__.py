"""Evaluation: k samples per problem, their verdicts, and scores with intervals
(`sample_intervals`).
"""

__all__ = ["evaluate", "pairing", "scores", "server"]
