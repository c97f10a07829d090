"""Evaluation: k samples per problem, their verdicts, and scores with intervals."""
