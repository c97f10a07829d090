"""A graded reward: a number for each response instead of right or wrong.

    python examples/graded_reward.py

teaches a small model to answer with about twelve words, on a processor, in minutes. Groups whose scores differ train;
`reward.threshold` would say from which score on a response counts as correct.
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
ROWS = [{"prompt": question.format(topic)} for question in QUESTIONS for topic in TOPICS]


def near_twelve_words(completions: list[str], **columns: Any) -> list[float]:
    """1 for twelve words, less by a twelfth for each word more or less, never below 0."""
    return [max(0.0, 1 - abs(len(text.split()) - WANTED_WORDS) / WANTED_WORDS) for text in completions]


def train(model: str = "smollm2-135m-instruct", **options: Any) -> dapo.Run:
    """The run; `options` are laid over those here."""
    sizes = {"steps": 12, "prompts_per_step": 8, "group_size": 8, "max_response_tokens": 48, "lr": 2e-5}
    return dapo.train(model, data=ROWS, reward=near_twelve_words, **(sizes | options))


if __name__ == "__main__":
    run = train()
    print(run.metrics[["reward/score_mean", "rollout/response_tokens_mean"]])
