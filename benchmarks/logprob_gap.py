"""Measure how far the native engine's log-probabilities are from the plain forward's.

    python -m benchmarks.logprob_gap [--model smollm2-135m-instruct] [--responses 16] [--tokens 32]

Samples responses in float32, computes the log-probability of each token again with transformers'
forward, one sequence at a time, and prints the mean and the largest difference in nats.
"""

import argparse
import copy

import torch

from dapo.config.rollout_options import NativeConfig
from dapo.engines.native.engine import NativeEngine
from dapo.policy.model import load_model
from dapo.types import Generation, GenerationRequest

SEED = 1
PROMPTS = ("What is 17 + 25?", "Name a colour.", "Count from 1 to 5.", "Write a short sentence.")


def main() -> None:
    """Print the gap of a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--responses", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    loaded = load_model(options.model, dtype=torch.float32)
    requests = []
    for i in range(options.responses):
        prompt = PROMPTS[i % len(PROMPTS)]
        ids = loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        requests.append(
            GenerationRequest(
                id=str(i),
                prompt_ids=tuple(ids),
                max_new_tokens=options.tokens,
                temperature=1.0,
                top_p=1.0,
                seed=SEED + i,
                stop_ids=loaded.stop_ids,
            )
        )
    engine = NativeEngine(copy.deepcopy(loaded.model), NativeConfig(slots=len(requests)))
    engine.submit(requests)
    generations: list[Generation] = []
    while len(generations) < len(requests):
        generations += engine.poll()
    engine.close()
    prompts = {request.id: request.prompt_ids for request in requests}
    gaps = []
    for generation in generations:
        prompt_ids = prompts[generation.request_id]
        sequence = torch.tensor([[*prompt_ids, *generation.token_ids]])
        with torch.no_grad():
            logits = loaded.model(sequence).logits[0, len(prompt_ids) - 1 : -1].double()
        token_ids = torch.tensor(list(generation.token_ids))[:, None]
        plain = logits.log_softmax(-1).gather(1, token_ids)[:, 0]
        gaps.append((plain - torch.tensor(list(generation.logprobs)).double()).abs())
    gap = torch.cat(gaps)
    print(
        f"{options.model}: {len(gap)} tokens, mean difference {gap.mean():.1e},"
        f" largest {gap.max():.1e} nats"
    )


if __name__ == "__main__":
    main()
