"""Writes 300 worked sums of four digits as demonstrations: `python examples/worked_sums.py
sums.jsonl`.

A sum is worked column by column, from the right, and the verifier reads what stands after the
reasoning: `4821 + 3977` gives `<think>1+7=8; 2+7=9; 8+9=17; 4+3=7, 7+1=8</think>8798`.
"""

import json
import sys

from dapo.data.problems import load_problems


def worked(a: int, b: int) -> str:
    """The columns of a sum from the right, each with its carry, and the sum."""
    columns = []
    carry = 0
    for x, y in zip(reversed(f"{a:04}"), reversed(f"{b:04}"), strict=True):
        digits = int(x) + int(y)
        columns.append(f"{x}+{y}={digits}" + (f", {digits}+1={digits + 1}" if carry else ""))
        carry = (digits + carry) // 10
    return f"<think>{'; '.join(columns)}</think>{a + b}"


if __name__ == "__main__":
    problems = load_problems({"builtin": {"sums": {"digits": 4}}, "size": 300, "seed": 7})
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        for problem in problems:
            a, b = (
                int(word.rstrip("?"))
                for word in problem.question.split()
                if word.rstrip("?").isdigit()
            )
            file.write(json.dumps({"prompt": problem.prompt, "response": worked(a, b)}) + "\n")
