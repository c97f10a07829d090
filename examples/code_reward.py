"""A code reward: programs are run in a sandbox against tests that they never see. Linux.

    python examples/code_reward.py

trains a 0.5 B model on small Python functions; a GPU is advisable. The verifier `code` reads the
column `tests`, and docs/verifiers.md says what it runs and what it forbids.
"""

from typing import Any

import dapo

ASK = "Write a Python function `{}`. Reply with one code block."
TASKS = {
    "add(a, b) that returns the sum of two numbers": [
        "assert add(1, 2) == 3",
        "assert add(-1, 1) == 0",
    ],
    "last(items) that returns the last item of a list": [
        "assert last([1, 2]) == 2",
        "assert last('ab') == 'b'",
    ],
    "is_even(n) that says whether n is even": [
        "assert is_even(4) is True",
        "assert is_even(7) is False",
    ],
    "double(items) that doubles each number of a list": [
        "assert double([1, 2]) == [2, 4]",
        "assert double([]) == []",
    ],
    "count(text, letter) that counts a letter": [
        "assert count('banana', 'a') == 3",
        "assert count('', 'a') == 0",
    ],
    "reverse(text) that reverses a text": [
        "assert reverse('abc') == 'cba'",
        "assert reverse('') == ''",
    ],
    "largest(items) that returns the largest number": [
        "assert largest([3, 9, 2]) == 9",
        "assert largest([-1]) == -1",
    ],
    "square(n) that returns n times n": ["assert square(5) == 25", "assert square(-2) == 4"],
}
ROWS = [
    {"prompt": ASK.format(task), "answer": "see tests", "tests": tests}
    for task, tests in TASKS.items()
]


def train(model: str = "Qwen/Qwen2.5-Coder-0.5B-Instruct", **options: Any) -> dapo.Run:
    """The run; `options` are laid over those here."""
    sizes = {
        "steps": 30,
        "prompts_per_step": 8,
        "group_size": 8,
        "max_response_tokens": 256,
        "lr": 1e-5,
    }
    return dapo.train(model, data=ROWS, reward="code", **(sizes | options))


if __name__ == "__main__":
    run = train()
    print(run.metrics[["reward/accuracy", "rollout/keep_rate"]])
