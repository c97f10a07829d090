"""The benchmarks that papers report, by the names they go by: where they lie on the hub, and how they are asked."""

from collections.abc import Mapping
from typing import Any

BENCHMARKS: Mapping[str, Mapping[str, Any]] = {
    "aime24": {"hub": "HuggingFaceH4/aime_2024", "split": "train", "prompt": "problem", "answer": "answer"},
    "aime25": {"hub": "math-ai/aime25", "split": "test", "prompt": "problem", "answer": "answer"},
    "math500": {"hub": "HuggingFaceH4/MATH-500", "split": "test", "prompt": "problem", "answer": "answer"},
    "gsm8k": {"hub": "openai/gsm8k", "config": "main", "split": "test", "prompt": "question", "answer": "answer"},
    "amc23": {"hub": "math-ai/amc23", "split": "test", "prompt": "question", "answer": "answer"},
}
"""Data specs that a name stands for."""

INSTRUCTION = (
    "Solve the problem step by step. The last line of your response must be of the form Answer: $ANSWER, "
    "where $ANSWER is the answer to the problem."
)
"""What `dapo eval` adds to their problems, unless data.instruction says something else: the verifiers look for it."""
