"""GSM8K: grade-school word problems with a 0.5 B model, on one GPU.

    python examples/gsm8k.py

downloads the model and the data set, and trains 200 steps: the options are those of
configs/gsm8k_0.5b.yaml, and the verifier `gsm8k` reads the number after "####" or "Answer:".
"""

from typing import Any

import dapo


def train(**options: Any) -> dapo.Run:
    """The run; `options` are laid over the configuration:
    `train(model="Qwen/Qwen2.5-1.5B-Instruct", steps=100)`.
    """
    return dapo.train(config="gsm8k_0.5b", **options)


if __name__ == "__main__":
    run = train()
    print(run.evaluation())
