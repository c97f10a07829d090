"""vLLM in process, eager, without logprobs and per-request seeds: its fastest way to sample."""

import time
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams

from benchmarks.protocol import serve

MAX_MODEL_LEN = 1024


class Vllm:
    """An engine on one model."""

    def open(self, model: str, dtype: str, device: str, threads: int) -> dict[str, Any]:
        """Load a Hugging Face directory."""
        del device, threads  # the installed wheel is for one device; threads come from the environment
        self.llm = LLM(
            model=model,
            dtype=dtype,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            enable_chunked_prefill=False,
            kv_cache_memory_bytes=2**30,
            block_size=32,
            seed=0,
        )
        return {
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
            "threads": torch.get_num_threads(),
        }

    def generate(self, prompts: list[list[int]], group: int, tokens: int) -> dict[str, Any]:
        """Exactly `tokens` tokens for `group` responses to each prompt, the group's requests adjacent."""
        requests = [{"prompt_token_ids": ids} for ids in prompts for _ in range(group)]
        settings = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = self.llm.generate(requests, settings, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "tokens": sum(len(output.outputs[0].token_ids) for output in outputs)}


if __name__ == "__main__":
    system = Vllm()
    serve({"open": system.open, "generate": system.generate})
