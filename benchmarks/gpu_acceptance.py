"""`make gpu-acceptance`: does dapo compute, on this machine's GPU, what it computes elsewhere, and
how fast?

The first thing to run on a machine with a GPU. Every check runs in a process of its own and gives
numbers with stated bounds; one that fails does not end the others. All models are made here, with
random weights or from an installed package: no network. The report is one file that can be attached
to a report of a problem.

With `--device cpu` everything that can run on a CPU does, at tiny sizes, with the same code and the
same bounds.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from benchmarks.acceptance.check import Check
from benchmarks.acceptance.correctness import check_gradients, check_logprobs, check_long
from benchmarks.acceptance.engines import check_engine_gap, check_equal_tokens
from benchmarks.acceptance.processes import (
    check_engine_process,
    check_engine_process_bfloat16,
    check_ranks,
    check_vllm,
)
from benchmarks.acceptance.report import Result, describe_environment, report_text
from benchmarks.acceptance.runner import in_own_process, run_check
from benchmarks.acceptance.speed import check_kernels, check_memory, check_speed, check_syncs
from benchmarks.acceptance.training import check_learns
from benchmarks.worker_session import ROOT
from dapo.policy.model import unusable_driver

TOTAL_S = 900.0
"""A check that would begin later fails instead."""

CHECKS = (
    Check(
        "logprobs",
        "bfloat16 log-probabilities of the policy against float32 on the CPU by transformers' own"
        " attention: heads of 64 and 128, and sliding windows.",
        check_logprobs,
        180,
    ),
    Check(
        "long",
        "Log-probabilities of sequences of 8,192 tokens against float32 on the CPU.",
        check_long,
        120,
    ),
    Check(
        "gradients",
        "The bfloat16 gradient of an update, with masked tokens and shared prompts, against float32"
        " on the CPU.",
        check_gradients,
        300,
    ),
    Check(
        "kernels", "cuDNN's attention is off, and a decode step has few kernels.", check_kernels, 90
    ),
    Check("syncs", "How often the host waits for the device.", check_syncs, 90),
    Check(
        "memory",
        "Peak memory of an update against the model of memory that `auto` settles by.",
        check_memory,
        120,
    ),
    Check(
        "engine-gap",
        "The native engine's log-probabilities against the policy's, in bfloat16.",
        check_engine_gap,
        90,
    ),
    Check(
        "equal-tokens",
        "In float32 the device samples the tokens that a CPU samples.",
        check_equal_tokens,
        120,
    ),
    Check(
        "engine-process",
        "An engine in a process of its own gets the policy's weights and samples from them.",
        check_engine_process,
        180,
    ),
    Check(
        "engine-bfloat16",
        "The same in bfloat16: log-probabilities against the policy's, after a first and a second"
        " load of weights.",
        check_engine_process_bfloat16,
        120,
    ),
    Check(
        "ranks",
        "Trainer ranks (NCCL on GPUs, gloo on CPUs) have the gradient and the weights of one"
        " process.",
        check_ranks,
        240,
    ),
    Check(
        "vllm",
        "vLLM's log-probabilities against the policy's in bfloat16, before and after it sleeps and"
        " loads weights.",
        check_vllm,
        300,
    ),
    Check("learns", "A short training of the whole system raises the reward.", check_learns, 240),
    Check(
        "speed",
        "Generation and update of whole models, as shares of what products and memory allow.",
        check_speed,
        240,
    ),
)


def main(words: Sequence[str] | None = None) -> int:
    """0: no check failed; 1: one did; 2: the command line is wrong, or there is no GPU."""
    arguments = parse_arguments(sys.argv[1:] if words is None else words)
    if arguments.list:
        print("\n".join(f"{check.name:16}{check.about}" for check in CHECKS))
        return 0
    chosen = [
        check for check in CHECKS if check.name in (arguments.only or [c.name for c in CHECKS])
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    environment = in_own_process(describe_environment, limit_s=120)[1]
    if not isinstance(environment, dict):
        print(f"this machine cannot be described: {environment}", file=sys.stderr)
        return 2
    if arguments.device == "cuda" and environment["GPUs"] == "none":
        reason = unusable_driver() or "torch finds no CUDA device here"
        print(f"{reason}; --device cpu checks what a CPU can", file=sys.stderr)
        return 2
    return run_checks(
        chosen, arguments.device, environment, out=arguments.out, vllm_python=arguments.vllm_python
    )


def run_checks(
    checks: Sequence[Check],
    device: Literal["cuda", "cpu"],
    environment: Mapping[str, Any],
    *,
    out: Path,
    vllm_python: str | None = None,
) -> int:
    """Run all of them, and write the report after each; 1 if one failed, else 0."""
    results: list[Result] = []
    started = time.monotonic()
    for check in checks:
        limit_s = min(check.limit_s, TOTAL_S - (time.monotonic() - started))
        result = run_check(check, device, vllm_python, limit_s=limit_s)
        results.append(result)
        print(
            f"{result.status:8}{check.name:16}{result.seconds:7.1f} s  {_problem(result)}",
            flush=True,
        )
        out.write_text(report_text(device, environment, results), encoding="utf-8")
    print(f"the report: {out}")
    return 1 if any(result.status == "fail" for result in results) else 0


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    description = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_acceptance", description=description
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", action="append", metavar="NAME", choices=[check.name for check in CHECKS]
    )
    parser.add_argument("--list", action="store_true", help="name the checks, and run none")
    parser.add_argument("--out", type=Path, default=Path("gpu-acceptance.md"), help="the report")
    parser.add_argument(
        "--vllm-python", default=os.environ.get("VLLM_PYTHON") or None, metavar="PATH"
    )
    return parser.parse_args(words)


def _problem(result: Result) -> str:
    """In a few words, on the terminal."""
    if result.reason:
        return result.reason.strip().splitlines()[-1]
    return "; ".join(
        f"{m.what}: {m.value:.4g} {m.unit}".strip() for m in result.measurements if not m.ok
    )


if __name__ == "__main__":
    sys.exit(main())
