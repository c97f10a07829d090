"""Plain `transformers.generate`: an opponent in generation, and the neutral evaluator of trained weights."""

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.protocol import serve
from dapo.rewards.verifier import get_verifier
from dapo.types import Problem

EVALUATION_ROWS = 128
"""Responses sampled at a time; more would only take more memory."""


class Generate:
    """A model with its tokenizer."""

    def open(self, model: str, dtype: str, device: str, threads: int) -> dict[str, Any]:
        """Load a Hugging Face directory."""
        torch.set_num_threads(threads)
        self.device = device
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()
        return {"versions": {"transformers": transformers.__version__, "torch": torch.__version__}}

    def generate(
        self,
        prompts: list[list[int]],
        group: int,
        tokens: int,
        stop_ids: list[int] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> dict[str, Any]:
        """`group` responses to each prompt, all rows at once: of exactly `tokens` tokens, or up to a stop."""
        rows = [ids for ids in prompts for _ in range(group)]
        length = {"min_new_tokens": tokens} if stop_ids is None else {"eos_token_id": stop_ids}
        started = time.perf_counter()
        responses = self._sample(rows, max_new_tokens=tokens, temperature=temperature, top_p=top_p, **length)
        seconds = time.perf_counter() - started
        ended = responses.tolist()
        return {
            "seconds": seconds,
            "tokens": sum(_length(ids, stop_ids or []) for ids in ended),
            "responses": len(ended),
        }

    def evaluate(
        self,
        rows: list[dict[str, Any]],
        samples: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        verifier: str,
        options: dict[str, Any],
        seed: int,
    ) -> dict[str, Any]:
        """The share of right responses, judged as training judges them."""
        started = time.perf_counter()
        judge = get_verifier(verifier, **options)
        torch.manual_seed(seed)
        asked = [row for row in rows for _ in range(samples)]
        right = 0
        for start in range(0, len(asked), EVALUATION_ROWS):
            batch = asked[start : start + EVALUATION_ROWS]
            responses = self._sample(
                [row["prompt_ids"] for row in batch],
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
            )
            for row, response in zip(batch, responses, strict=True):
                text = self.tokenizer.decode(response, skip_special_tokens=True, clean_up_tokenization_spaces=False)
                problem = Problem(row["id"], row["prompt"], row["answer"])
                right += judge(problem, text).correct is True
        return {"accuracy": right / len(asked), "samples": len(asked), "seconds": time.perf_counter() - started}

    @torch.inference_mode()
    def _sample(self, rows: list[list[int]], **settings: Any) -> torch.Tensor:
        """`[rows, tokens]` sampled ids, padded where a response ended."""
        batch = self.tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(self.device)
        output = self.model.generate(**batch, do_sample=True, top_k=0, **settings)
        return output[:, batch["input_ids"].shape[1] :].cpu()


def _length(ids: list[int], stop_ids: list[int]) -> int:
    """The tokens up to the first stop, and with it; all where there is none."""
    return next((i + 1 for i, token in enumerate(ids) if token in stop_ids), len(ids))


if __name__ == "__main__":
    system = Generate()
    serve({"open": system.open, "generate": system.generate, "evaluate": system.evaluate})
