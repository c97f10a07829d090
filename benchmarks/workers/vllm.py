"""vLLM in process with prefix caching, without logprobs and per-request seeds: its fastest way to
sample. On a GPU it has its own defaults: graphs, compilation, and as many sequences as it chooses.
"""

import time
from typing import Any

import torch

from benchmarks.protocol import serve
from benchmarks.worker_session import MAX_MODEL_LEN

ON_A_CPU = {
    "enforce_eager": True,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 8192,
    "enable_chunked_prefill": False,
    "kv_cache_memory_bytes": 2**30,
    # positions: the cache of common beginnings holds whole blocks, and smaller ones are not offered
    "block_size": 32,
}
"""What is fastest there; nothing compiles."""


def arguments_of(model: str, dtype: str, device: str) -> dict[str, Any]:
    """The arguments of `vllm.LLM`."""
    common = {
        "model": model,
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "max_model_len": MAX_MODEL_LEN,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    return common if device == "cuda" else common | ON_A_CPU


class Vllm:
    """An engine on one model."""

    def open(self, model: str, dtype: str, device: str, threads: int) -> dict[str, Any]:
        """Load a Hugging Face directory."""
        import vllm
        from vllm import LLM

        del threads  # they come from the environment
        self.llm = LLM(**arguments_of(model, dtype, device))
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
        from vllm import SamplingParams

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
