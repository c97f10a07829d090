"""The same comparison on a GPU in bfloat16, on random weights of two Qwen2 sizes: speed does not look at values."""

from dataclasses import replace
from typing import Any

from benchmarks.compare import COMPARED, measure_one_update
from benchmarks.worker_session import Session

MODELS = ("qwen2-0.5b", "qwen2-1.5b")


def measure_gpu(session: Session) -> dict[str, dict[str, Any]]:
    """Every compared part for each size; skipped, and said so, where there is no GPU."""
    session.start("matmul", "matmul")
    if reason := session.ask("matmul", "why_no_gpu")["reason"]:
        return {"gpu": {"figures": [], "skipped": [{"system": "all", "reason": reason}]}}
    session.close("matmul")
    found = {}
    for model in MODELS:
        settings = replace(session.settings, device="cuda", dtype="bfloat16", model=model)
        with Session(settings) as inner:
            parts = measure_one_update(inner, wanted=set(COMPARED))
        for name, part in parts.items():
            figures = [figure | {"name": f"{model} on a GPU: {figure['name']}"} for figure in part["figures"]]
            found[f"gpu {model} {name}"] = part | {"figures": figures}
    return found
