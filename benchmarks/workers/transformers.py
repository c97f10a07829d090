"""Plain `transformers.generate`: an opponent in generation."""

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.protocol import serve


class Generate:
    """A model with its tokenizer."""

    def open(self, model: str, dtype: str, device: str, threads: int) -> dict[str, Any]:
        """Load a Hugging Face directory."""
        torch.set_num_threads(threads)
        self.device = device
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.model = (
            AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
            .to(device)
            .eval()
        )
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
        """`group` responses to each prompt, all rows at once: of exactly `tokens` tokens, or up to
        a stop.
        """
        rows = [ids for ids in prompts for _ in range(group)]
        length = {"min_new_tokens": tokens} if stop_ids is None else {"eos_token_id": stop_ids}
        started = time.perf_counter()
        responses = self._sample(
            rows, max_new_tokens=tokens, temperature=temperature, top_p=top_p, **length
        )
        seconds = time.perf_counter() - started
        ended = responses.tolist()
        return {
            "seconds": seconds,
            "tokens": sum(_length(ids, stop_ids or []) for ids in ended),
            "responses": len(ended),
        }

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
    serve({"open": system.open, "generate": system.generate})
