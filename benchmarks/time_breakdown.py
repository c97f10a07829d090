"""Where the seconds of generation and of an update go, by kind of work: the part `profile` of the
benchmark.
"""

from statistics import median
from typing import Any

from benchmarks.compute_limits import GENERATE_FLOP, UPDATE_FLOP
from benchmarks.dapo_only import open_internals
from benchmarks.worker_session import Session

SHAPES = {
    "generation": {"groups": 8, "group": 8, "prompt": 48, "tokens": 64},
    "update": {"groups": 4, "group": 8, "prompt": 48, "tokens": 64},
}
QUICK = {"groups": 2, "group": 2, "prompt": 8, "tokens": 8}


def measure_profile(session: Session) -> dict[str, dict[str, Any]]:
    """Shares of the seconds of a generation and an update, and the arithmetic's own seconds at the
    matmul rate.
    """
    opened = open_internals(session, session.settings.model)
    figures = []
    gflops = []
    for phase, flop in (("generation", GENERATE_FLOP), ("update", UPDATE_FLOP)):
        shape = QUICK if session.settings.quick else SHAPES[phase]
        rates, answers = _trace(session, phase, shape)
        floors = [
            flop * opened["parameters"] * answer["tokens"] / rate / 1e9
            for rate, answer in zip(rates, answers, strict=True)
        ]
        size = f"{shape['groups']} x {shape['group']} x {shape['tokens']} tokens"
        figures += [
            _figure(f"{phase}, {size}, traced", "s", [answer["seconds"] for answer in answers]),
            _figure(f"{phase}: the arithmetic at the matmul rate", "s", floors),
            *_shares(phase, answers),
        ]
        gflops += rates
    return {
        "profile": {
            "figures": figures,
            "gflops": gflops,
            "parameters": opened["parameters"],
            "dtype": opened["dtype"],
        }
    }


def _trace(
    session: Session, phase: str, shape: dict[str, int]
) -> tuple[list[float], list[dict[str, Any]]]:
    """The matmul rate and what the worker answered, round by round; the first round warms up."""
    rates = []
    answers = []
    for _ in range(session.settings.rounds + 1):
        rates.append(session.matmul_gflops())
        slots = shape["groups"] * shape["group"]
        budget = session.settings.microbatch_tokens
        answers.append(
            session.ask(
                "dapo_internals",
                "profile",
                phase=phase,
                **shape,
                slots=slots,
                microbatch_tokens=budget,
            )
        )
        session.log(f"  {phase} {answers[-1]['seconds']:.2f} s")
    return rates[1:], answers[1:]


def _shares(phase: str, answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One figure per kind of work, the largest first."""
    shares: dict[str, list[float]] = {}
    for answer in answers:
        for kind, seconds in answer["kinds"].items():
            shares.setdefault(kind, []).append(100 * seconds / answer["seconds"])
    ordered = sorted(shares, key=lambda kind: -median(shares[kind]))
    return [_figure(f"{phase}: {kind}", "% of its seconds", shares[kind]) for kind in ordered]


def _figure(name: str, unit: str, values: list[float]) -> dict[str, Any]:
    return {"name": name, "system": "ours", "unit": unit, "better": "neither", "values": values}
