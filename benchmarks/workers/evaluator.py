"""The third process of the accuracy part: plain `transformers.generate` on weights that another
system exported.

It shares nothing with the systems that train but the verifier: the tokenizer's own chat template,
transformers' model, its `generate` and its sampling. Two things save time and change no
distribution. What all prompts begin with (the template's system message) is computed once an
evaluation, as a cache that each batch continues. And a batch holds prompts of one length, so that
nothing is padded.
"""

import copy
import time
from collections import defaultdict
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.protocol import serve
from dapo.rewards.verifier import get_verifier
from dapo.types import Problem

ROWS = 128
"""Responses sampled at a time; more would only take more memory."""


class Evaluator:
    """The problems of an evaluation; a model is loaded for each one."""

    def open(
        self,
        problems: list[dict[str, Any]],
        samples: dict[str, int],
        sampling: dict[str, Any],
        verifier: str,
        options: dict[str, Any],
        dtype: str,
        device: str,
        threads: int,
    ) -> dict[str, Any]:
        """Take the problems, each with `id`, `prompt`, `answer` and `source`; `samples`: responses
        by source.

        `sampling`: `temperature`, `top_p` and `max_new_tokens`.
        """
        torch.set_num_threads(threads)
        self.problems = problems
        self.samples = samples
        self.sampling = sampling
        self.judge = get_verifier(verifier, **options)
        self.dtype = getattr(torch, dtype)
        self.device = device
        return {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}}

    def evaluate(self, model: str, seed: int) -> dict[str, Any]:
        """Sample and judge.

        `right`: the number of right responses to each problem, one digit each, in their order.
        """
        started = time.perf_counter()
        tokenizer = AutoTokenizer.from_pretrained(model)
        policy = (
            AutoModelForCausalLM.from_pretrained(model, dtype=self.dtype).to(self.device).eval()
        )
        asked = [
            i
            for i, problem in enumerate(self.problems)
            for _ in range(self.samples[problem["source"]])
        ]
        prompts = [prompt_ids(tokenizer, problem["prompt"]) for problem in self.problems]
        torch.manual_seed(seed)
        responses = sample(
            policy, [prompts[i] for i in asked], tokenizer.pad_token_id, **self.sampling
        )
        right = [0] * len(self.problems)
        for i, response in zip(asked, responses, strict=True):
            text = tokenizer.decode(
                response, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            problem = self.problems[i]
            right[i] += (
                self.judge(
                    Problem(problem["id"], problem["prompt"], problem["answer"]), text
                ).correct
                is True
            )
        return {
            "right": "".join(map(str, right)),
            "responses": len(asked),
            "tokens": sum(map(len, responses)),
            "seconds": time.perf_counter() - started,
        }


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """A question as the tokenizer's chat template renders it."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@torch.inference_mode()
def sample(model: Any, prompts: list[list[int]], pad_id: int, **sampling: Any) -> list[list[int]]:
    """A response to each prompt, up to its end token and with it.

    `sampling`: `max_new_tokens`, and `temperature` and `top_p`, or `do_sample=False`.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, ids in enumerate(prompts):
        by_length[len(ids)].append(i)
    shared = common_prefix(prompts)
    cache = DynamicCache(config=model.config)
    if shared:
        ids = torch.tensor([prompts[0][:shared]], device=model.device)
        model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    settings = {"do_sample": True, "top_k": 0, "pad_token_id": pad_id} | sampling
    stops = model.generation_config.eos_token_id
    stops = set(stops if isinstance(stops, list) else [stops])
    responses: list[list[int]] = [[] for _ in prompts]
    for length, members in sorted(by_length.items()):
        for start in range(0, len(members), ROWS):
            batch = members[start : start + ROWS]
            ids = torch.tensor([prompts[i] for i in batch], device=model.device)
            continued = copy.deepcopy(cache)
            continued.batch_repeat_interleave(len(batch))
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=continued if shared else None,
                **settings,
            )
            for i, row in zip(batch, output[:, length:].tolist(), strict=True):
                end = next((k + 1 for k, token in enumerate(row) if token in stops), len(row))
                responses[i] = row[:end]
    return responses


def common_prefix(prompts: list[list[int]]) -> int:
    """How many tokens all prompts begin with, at most all but the last of the shortest."""
    shortest = min(map(len, prompts))
    first = prompts[0]
    return next(
        (k for k in range(shortest - 1) if any(ids[k] != first[k] for ids in prompts)), shortest - 1
    )


if __name__ == "__main__":
    evaluator = Evaluator()
    serve({"open": evaluator.open, "evaluate": evaluator.evaluate})
