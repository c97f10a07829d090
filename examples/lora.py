"""LoRA: train low-rank adapters instead of all weights. It needs peft: pip install peft.

    python examples/lora.py

trains on small sums, on a processor, and writes the adapter in peft's format. Adapters want a
learning rate about ten times as large as that of all weights (docs/machines.md).
"""

from pathlib import Path
from typing import Any

import dapo


def train(model: str = "smollm2-135m-instruct", **options: Any) -> dapo.Run:
    """The run; `options` are laid over those here."""
    sizes = {
        "steps": 18,
        "prompts_per_step": 8,
        "group_size": 8,
        "max_response_tokens": 20,
        "lr": 2e-4,
    }
    data = {"data": {"builtin": {"sums": {"high": 12}}, "size": 2000, "seed": 1}}
    return dapo.train(model, lora={"rank": 16, "alpha": 32}, **(data | sizes | options))


if __name__ == "__main__":
    run = train()
    print(run.export(Path("my-adapter"), adapter=True))
