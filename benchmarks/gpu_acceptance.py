"""`make gpu-acceptance`: does dapo compute, on this machine's GPU, what it computes elsewhere, and
how fast?

The first thing to run on a machine with a GPU. It runs in stages, in the order of their worth: each
in a process of its own and with a budget of seconds; one that fails does not end the others. Every
number has its line in a file as soon as it is known, and `--from STAGE` goes on with that stage
where a call, or its machine, has ended. All models are made here, with random weights or from an
installed package: no network. The report is one file that can be attached to a report of a problem.

With `--device cpu` everything that can run on a CPU does, at tiny sizes, with the same code and the
same bounds.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.acceptance.check import Check
from benchmarks.acceptance.correctness import check_gradients, check_logprobs, check_long
from benchmarks.acceptance.engines import check_engine_gap, check_equal_tokens
from benchmarks.acceptance.numbers_file import NumbersFile, read_results
from benchmarks.acceptance.processes import check_engine_process, check_ranks
from benchmarks.acceptance.references import FILE as REFERENCES
from benchmarks.acceptance.report import Result, describe_environment, report_text
from benchmarks.acceptance.runner import in_own_process, run_check
from benchmarks.acceptance.speed import check_kernels, check_memory, check_speed, check_syncs
from benchmarks.acceptance.training import check_learns
from benchmarks.acceptance.vllm_cycles import check_engine_process_bfloat16, check_vllm
from benchmarks.worker_session import ROOT
from dapo.policy.model import unusable_driver

TOTAL_S = 575.0
"""On a GPU: a stage whose budget would end later is left to the next call."""
CPU_PATIENCE = 10.0
"""A CPU has this many times the seconds: it is shared with whatever else runs there."""

CHECKS = (
    # is anything wrong? What follows is about speed
    Check(
        "logprobs",
        "bfloat16 log-probabilities of the policy against float32 on the CPU by transformers' own"
        " attention: heads of 64 and 128, and sliding windows.",
        check_logprobs,
        45,
    ),
    Check(
        "gradients",
        "The bfloat16 gradient of an update, with masked tokens and shared prompts, against float32"
        " on the CPU.",
        check_gradients,
        50,
    ),
    Check(
        "engine-gap",
        "The native engine's log-probabilities against the policy's, in bfloat16.",
        check_engine_gap,
        30,
    ),
    Check(
        "vllm",
        "vLLM beside the policy on one GPU: it sleeps, wakes, and gets weights from GPU to GPU,"
        " three times; its log-probabilities against the policy's.",
        check_vllm,
        140,
    ),
    Check(
        "memory",
        "Peak memory of an update against the model of memory that `auto` settles by.",
        check_memory,
        30,
    ),
    Check(
        "speed",
        "Generation and update of whole models, as shares of what products and memory allow.",
        check_speed,
        55,
    ),
    Check("learns", "A short training of the whole system raises the reward.", check_learns, 40),
    # what rarely breaks
    Check(
        "kernels", "cuDNN's attention is off, and a decode step has few kernels.", check_kernels, 20
    ),
    Check("syncs", "How often the host waits for the device.", check_syncs, 15),
    Check(
        "long",
        "Log-probabilities of sequences of 8,192 tokens against float32 on the CPU.",
        check_long,
        20,
    ),
    Check(
        "equal-tokens",
        "In float32 the device samples the tokens that a CPU samples.",
        check_equal_tokens,
        35,
    ),
    Check(
        "engine-bfloat16",
        "A native engine in a process of its own in bfloat16: log-probabilities against the"
        " policy's, after a first and a second load of weights.",
        check_engine_process_bfloat16,
        25,
    ),
    Check(
        "engine-process",
        "An engine in a process of its own gets the policy's weights and samples from them.",
        check_engine_process,
        30,
    ),
    Check(
        "ranks",
        "Trainer ranks (NCCL on GPUs, gloo on CPUs) have the gradient and the weights of one"
        " process.",
        check_ranks,
        35,
    ),
)


def main(words: Sequence[str] | None = None) -> int:
    """0: no check failed; 1: one did; 2: the command line is wrong, or there is no GPU."""
    arguments = parse_arguments(sys.argv[1:] if words is None else words)
    if arguments.list:
        print("\n".join(f"{c.name:16}{c.limit_s:4.0f} s  {c.about}" for c in CHECKS))
        return 0
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
    numbers = arguments.out.with_suffix(".jsonl")
    earlier: dict[str, Result] = {}
    if arguments.start and numbers.is_file():
        try:
            earlier = read_results(numbers, arguments.device, environment)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
    return run_checks(
        chosen_checks(arguments.only, arguments.start),
        arguments.device,
        environment,
        out=arguments.out,
        vllm_python=arguments.vllm_python,
        references=arguments.references,
        earlier=earlier,
        goes_on=arguments.start is not None,
    )


def chosen_checks(only: Sequence[str] | None, start: str | None) -> list[Check]:
    """The named checks, from the one to begin with; all of them by default."""
    names = [check.name for check in CHECKS]
    first = 0 if start is None else names.index(start)
    return [check for check in CHECKS[first:] if only is None or check.name in only]


def run_checks(
    checks: Sequence[Check],
    device: Literal["cuda", "cpu"],
    environment: Mapping[str, Any],
    *,
    out: Path,
    vllm_python: str | None = None,
    references: Path | None = None,
    earlier: Mapping[str, Result] | None = None,
    goes_on: bool = False,
    total_s: float | None = None,
) -> int:
    """Run all of them; 0 if all passed or were skipped, else 1.

    Args:
        checks: the checks.
        device: where they compute.
        environment: the description of the machine.
        out: the report, written after each check; the file of numbers stands beside it.
        vllm_python: the interpreter of an environment with vLLM.
        references: a file of float32 references.
        earlier: the results of an earlier call, which are in the report.
        goes_on: whether the file of numbers is continued.
        total_s: seconds for all; None: those of the device.
    """
    patience = 1.0 if device == "cuda" else CPU_PATIENCE
    end = time.monotonic() + (TOTAL_S * patience if total_s is None else total_s)
    results = dict(earlier or {})
    numbers = NumbersFile(out.with_suffix(".jsonl"), device, environment, goes_on=goes_on)
    not_begun: list[str] = []
    with closing(numbers):
        for check in checks:
            limit_s = check.limit_s * patience
            if not_begun or time.monotonic() + limit_s > end:
                not_begun.append(check.name)
                reason = f"its {limit_s:.0f} s would end after the time of this call"
                results[check.name] = Result(
                    check.name, check.about, "not begun", 0.0, reason=reason
                )
                continue
            result = run_check(
                check,
                device,
                vllm_python,
                limit_s=limit_s,
                references=references,
                on_number=partial(numbers.number, check.name),
            )
            numbers.ended(result)
            results[check.name] = result
            print(
                f"{result.status:8}{check.name:16}{result.seconds:7.1f} s  {_problem(result)}",
                flush=True,
            )
            out.write_text(report_text(device, environment, _in_order(results)), encoding="utf-8")
    out.write_text(report_text(device, environment, _in_order(results)), encoding="utf-8")
    if not_begun:
        print(f"not begun: {', '.join(not_begun)}; --from {not_begun[0]} goes on")
    print(f"the report: {out}")
    has_failed = any(result.status == "fail" for result in results.values())
    return 1 if has_failed or not_begun else 0


def _in_order(results: Mapping[str, Result]) -> list[Result]:
    """The results in the order of the stages; others, which tests have, behind them."""
    names = [check.name for check in CHECKS]
    names += [name for name in results if name not in names]
    return [results[name] for name in names if name in results]


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
    parser.add_argument(
        "--from",
        dest="start",
        metavar="NAME",
        choices=[check.name for check in CHECKS],
        help="begin with this one; the report keeps what the file of numbers has of the others",
    )
    parser.add_argument("--list", action="store_true", help="name the checks, and run none")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-acceptance.md"),
        help="the report; the numbers go into a .jsonl beside it",
    )
    parser.add_argument(
        "--references", type=Path, default=REFERENCES, help="float32 references, made on a CPU"
    )
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
