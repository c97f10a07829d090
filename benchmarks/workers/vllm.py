"""vLLM in process, eager, with prefix caching, without logprobs and per-request seeds: its fastest
way to sample.
"""

import time
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams

from benchmarks.protocol import serve

MAX_MODEL_LEN = 1024
MAX_SEQUENCES = 128
BLOCK_SIZE = 32
"""Positions.

The cache of common beginnings holds whole blocks; on a CPU smaller ones are not offered.
"""


class Vllm:
    """An engine on one model."""

    def open(self, model: str, dtype: str, device: str, threads: int) -> dict[str, Any]:
        """Load a Hugging Face directory."""
        # the installed wheel is for one device; threads come from the environment
        del device, threads
        self.llm = LLM(
            model=model,
            dtype=dtype,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_SEQUENCES,
            max_num_batched_tokens=8192,
            enable_chunked_prefill=False,
            kv_cache_memory_bytes=2**30,
            enable_prefix_caching=True,
            block_size=BLOCK_SIZE,
            seed=0,
        )
        return {
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
            "threads": torch.get_num_threads(),
        }

    def generate(
        self,
        prompts: list[list[int]],
        group: int,
        tokens: int,
        stop_ids: list[int] | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> dict[str, Any]:
        """`group` responses to each prompt, the group's requests adjacent: of exactly `tokens`
        tokens, or up to a stop.

        The cache of common beginnings starts empty, as it does in training, where the weights are
        new in every step.
        """
        requests = [{"prompt_token_ids": ids} for ids in prompts for _ in range(group)]
        length = {"ignore_eos": True} if stop_ids is None else {"stop_token_ids": stop_ids}
        settings = SamplingParams(
            temperature=temperature, top_p=top_p, max_tokens=tokens, detokenize=False, **length
        )
        self.llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = self.llm.generate(requests, settings, use_tqdm=False)
        seconds = time.perf_counter() - started
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        return {"seconds": seconds, "tokens": sum(counts), "responses": len(counts)}


if __name__ == "__main__":
    system = Vllm()
    serve({"open": system.open, "generate": system.generate})
