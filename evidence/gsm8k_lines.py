"""GSM8K's worked solutions as problems of one line each.

    python -m evidence.gsm8k_lines MODEL train.jsonl FOLDER

A problem's prompt ends with the first lines of its worked solution, so many as chance says; its
answer is the result of the next line. FOLDER/lines.jsonl has these rows, rendered in the chat
template of MODEL, a Hugging Face directory. FOLDER/model is MODEL with the line break as a second
end token. `evidence.gsm8k_lines:next_line` is the verifier.
"""

import argparse
import json
import random
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from dapo.rewards.verifiers.gsm8k import results_of
from dapo.types import Problem

_CALCULATOR_MARK = re.compile(r"<<.*?>>")


def next_line(problem: Problem, response: str) -> bool:
    """Whether the last result of a line is that of the worked line."""
    results = results_of(response)
    return bool(results) and results[-1] == Fraction(problem.answer)


def line_problems(
    rows: Sequence[Mapping[str, str]], tokenizer: Any, *, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield a problem for each row whose solution has a line with a result."""
    chance = random.Random(seed)
    for row in rows:
        solution = _CALCULATOR_MARK.sub("", row["answer"]).rpartition("\n#### ")[0]
        lines = solution.split("\n")
        with_result = [number for number, line in enumerate(lines) if results_of(line)]
        if not with_result:
            continue
        number = chance.choice(with_result)
        message = {"role": "user", "content": row["question"]}
        prompt = tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
        given = "".join(f"{line}\n" for line in lines[:number])
        yield {"prompt": prompt + given, "answer": str(results_of(lines[number])[-1])}


def main() -> None:
    """Write the rows and the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    rows = [json.loads(line) for line in arguments.rows.read_text("utf-8").splitlines()]
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (arguments.folder / "lines.jsonl").open("w", encoding="utf-8") as file:
        for problem in line_problems(rows, tokenizer):
            file.write(json.dumps(problem) + "\n")

    copied = shutil.copytree(arguments.model, arguments.folder / "model", dirs_exist_ok=True)
    path = Path(copied) / "generation_config.json"
    settings = json.loads(path.read_text("utf-8"))
    ends = settings["eos_token_id"]
    line_break = tokenizer("\n", add_special_tokens=False)["input_ids"]
    settings["eos_token_id"] = [*(ends if isinstance(ends, list) else [ends]), *line_break]
    path.write_text(json.dumps(settings), "utf-8")


if __name__ == "__main__":
    main()
