"""Evaluation: k samples per problem, their verdicts, and scores with intervals."""

__all__ = ["evaluate", "intervals", "pairing", "scores", "server"]
