"""A graded reward: a number for each response instead of right or wrong.

    python examples/graded_reward.py

trains a small model on a processor to answer with about twelve words. Groups whose scores differ
train, so a score should differ wherever responses do: this one is never flat. `reward.threshold`
would say from which score on a response counts as correct.
"""

from typing import Any

import dapo

WANTED_WORDS = 12
TOPICS = ["the sea", "bread", "winter", "a train", "music", "a market", "the moon", "a bicycle"]
QUESTIONS = [
    "What is {}?",
    "Why do people like {}?",
    "Say something about {}.",
    "What would you tell a child about {}?",
]
LENGTH = "Answer in one sentence of about twelve words."
ROWS = [
    {"prompt": f"{question.format(topic)} {LENGTH}"} for question in QUESTIONS for topic in TOPICS
]


def near_twelve_words(completions: list[str], **columns: Any) -> list[float]:
    """1 for twelve words; 0.5 for six and for twenty-four."""
    lengths = [max(1, len(text.split())) for text in completions]
    return [min(length, WANTED_WORDS) / max(length, WANTED_WORDS) for length in lengths]


def train(model: str = "smollm2-135m-instruct", **options: Any) -> dapo.Run:
    """The run; `options` are laid over those here."""
    sizes = {
        "steps": 12,
        "prompts_per_step": 8,
        "group_size": 8,
        "max_response_tokens": 64,
        "lr": 2e-5,
    }
    return dapo.train(model, data=ROWS, reward=near_twelve_words, **(sizes | options))


if __name__ == "__main__":
    run = train()
    print(run.metrics[["reward/score_mean", "rollout/response_tokens_mean"]])
