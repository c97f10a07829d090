"""The parts that concern dapo alone: shared prompts, slots under a heavy tail, checkpoints, and how
cost grows.
"""

from statistics import median
from typing import Any

import numpy as np

from benchmarks.compute_limits import UPDATE_FLOP, heavy_tail_lengths, static_slot_steps
from benchmarks.plots import Curve, plot_growth
from benchmarks.worker_session import DEFAULT_MICROBATCH, Session

SHARED = {"groups": 1, "group": 16, "prompt": 512, "tokens": 64}
SHARED_QUICK = {"groups": 1, "group": 4, "prompt": 64, "tokens": 16}
GRADIENT_TOLERANCE = 1e-4
"""Relative, in float32: a sum of the same products in another order."""

CHECKPOINT_STEP = {"prompt": 50, "tokens": 20}
"""The quickstart's lengths: a short step, to which a checkpoint costs the more."""

SMALL = {"width": 128, "layers": 4, "vocabulary": 1024}
"""A geometry whose 2,048-token responses are sampled in seconds."""


def measure_shared(session: Session) -> dict[str, dict[str, Any]]:
    """One update on 16 responses to one long prompt, with the prompt computed once and with a copy
    for each.
    """
    settings = session.settings
    shape = SHARED_QUICK if settings.quick else SHARED
    # room for the prompt and all its responses; for both variants the same
    budget = max(
        settings.microbatch_tokens or DEFAULT_MICROBATCH,
        shape["prompt"] + shape["group"] * shape["tokens"],
    )
    opened = open_internals(session, settings.model)
    session.log("comparing the gradients with and without shared prompts")
    gap = session.ask("dapo_internals", "gradient_gap", **shape, microbatch_tokens=budget)[
        "relative_gap"
    ]
    if opened["dtype"] == "float32" and gap > GRADIENT_TOLERANCE:
        raise ValueError(
            f"the gradients with and without shared prompts differ by {gap:.1e}, relatively"
        )
    figures: dict[str, list[float]] = {"ours": [], "unshared": []}
    gflops = []
    for _ in range(-1, settings.rounds):
        gflops.append(session.matmul_gflops())
        for system in figures:
            answer = session.ask(
                "dapo_internals",
                "update",
                **shape,
                microbatch_tokens=budget,
                shared=system == "ours",
            )
            figures[system].append(answer["tokens"] / answer["seconds"])
        session.log(
            f"  shared prompt {figures['ours'][-1]:.0f}, unshared {figures['unshared'][-1]:.0f}"
            " tokens/s"
        )
    name = (
        f"update, {shape['group']} responses of {shape['tokens']} to a prompt of {shape['prompt']}"
    )
    unit = {"name": name, "unit": "tokens/s", "better": "higher", "flop_per_parameter": UPDATE_FLOP}
    labels = {"ours": "ours", "unshared": "ours, prompt not shared"}
    return {
        "shared": {
            "figures": [
                unit | {"system": labels[key], "values": values[1:]}
                for key, values in figures.items()
            ],
            "gflops": gflops[1:],
            "parameters": opened["parameters"],
            "dtype": opened["dtype"],
            "relative_gradient_gap": gap,
        }
    }


def measure_longtail(session: Session) -> dict[str, dict[str, Any]]:
    """Which part of the computed slot-steps gave a token, where one response in a hundred reaches
    the limit.
    """
    quick = session.settings.quick
    slots = 64
    group = 8
    prompt = 32
    count, limit = (512, 256) if quick else (2048, 1024)
    opened = open_internals(session, SMALL)
    uniforms = np.random.Generator(np.random.Philox(key=0)).random(count).tolist()
    lengths = heavy_tail_lengths(uniforms, shortest=16, limit=limit, share_at_limit=0.01)
    session.log(f"sampling {count} responses, {sum(lengths)} tokens, the longest {max(lengths)}")
    found = session.ask(
        "dapo_internals", "long_tail", lengths=lengths, group=group, prompt=prompt, slots=slots
    )
    # the first token of a response comes out of the prefill, so a response of n tokens takes n - 1
    # steps of a slot
    decoded = [length - 1 for length in lengths]
    if found["slot_steps"] != sum(decoded):
        raise ValueError(
            f"the engine counts {found['slot_steps']} slot-steps where {sum(decoded)} are needed"
        )
    static = sum(decoded) / static_slot_steps(decoded, slots)
    shares = {
        "until the queue is empty": (
            found["slot_steps_until_queue_empty"] / (found["steps_until_queue_empty"] * slots)
        ),
        "to the last token": found["slot_steps"] / (found["steps"] * slots),
    }
    figures = []
    for label, share in shares.items():
        unit = {
            "name": f"useful slot-steps under a heavy tail, {label}",
            "unit": "%",
            "better": "higher",
        }
        figures += [unit | {"system": "ours", "values": [100 * share]}]
        figures += [unit | {"system": f"static batches of {slots}", "values": [100 * static]}]
    return {
        "longtail": {
            "figures": figures,
            "dtype": opened["dtype"],
            "lengths": {
                "count": count,
                "mean": sum(lengths) / count,
                "at_limit": lengths.count(limit),
                "limit": limit,
            },
        }
    }


def measure_checkpoint(session: Session) -> dict[str, dict[str, Any]]:
    """The cost of a checkpoint for the step that writes it: steps with and without one, in
    alternation.
    """
    settings = session.settings
    opened = open_internals(session, settings.model)
    shape = {"groups": settings.prompts, "group": settings.group} | CHECKPOINT_STEP
    seconds: dict[bool, list[float]] = {True: [], False: []}
    checkpoints = []
    for index in range(-1, settings.rounds):
        # the first round makes the copy's memory and the optimiser's state, and another one begins
        # in every round
        for saves in (False, True) if index % 2 else (True, False):
            answer = session.ask(
                "dapo_internals",
                "step",
                **shape,
                slots=settings.responses,
                microbatch_tokens=settings.microbatch_tokens or DEFAULT_MICROBATCH,
                folder=str(session.folder / "run") if saves else None,
            )
            if index >= 0:
                seconds[saves].append(answer["seconds"])
                checkpoints += [answer["checkpoint"]] if saves else []
            session.log(f"  step {answer['seconds']:.2f} s, checkpoint {answer['checkpoint']}")
    extra = [100 * (a / b - 1) for a, b in zip(seconds[True], seconds[False], strict=True)]
    step = {"name": "step beside which a checkpoint is written", "unit": "s", "better": "lower"}
    cost = {"name": "checkpoint: cost to the step", "unit": "%", "better": "lower"}
    # what the step stands still for, and the processor time that is taken from it or from what it
    # leaves idle: no difference of two noisy steps, but a bound
    taken = [
        100 * (c["snapshot_s"] + c["writer_cpu_s"]) / median(seconds[False]) for c in checkpoints
    ]
    return {
        "checkpoint": {
            "figures": [
                step | {"system": "ours", "values": seconds[True]},
                step | {"system": "ours, no checkpoint", "values": seconds[False]},
                cost | {"system": "ours", "values": extra},
                cost
                | {
                    "name": "checkpoint: time it takes of the step, at most",
                    "system": "ours",
                    "values": taken,
                },
            ],
            "parameters": opened["parameters"],
            "dtype": opened["dtype"],
            "step": CHECKPOINT_STEP,
            "checkpoints": checkpoints,
        }
    }


def measure_growth(session: Session) -> dict[str, dict[str, Any]]:
    """Cost against response length, group size, slots and width, and memory against vocabulary x
    tokens.
    """
    quick = session.settings.quick
    curves = {
        "length": _growth_in_length(
            session, [16, 32, 64] if quick else [64, 128, 256, 512, 1024, 2048]
        ),
        "group": _growth_in_group(session, [4, 8] if quick else [4, 8, 16, 32, 64]),
        "slots": _growth_in_slots(session, [8, 16] if quick else [1, 2, 4, 8, 16, 32, 64]),
        "width": _growth_in_width(session, [64, 128] if quick else [64, 128, 256, 512, 1024]),
        "memory": _growth_in_memory(
            session, [1024, 4096] if quick else [1024, 4096, 16384, 65536, 131072]
        ),
    }
    files = [
        plot_growth(session.settings.plots / f"growth_{name}.png", found)
        for name, found in curves.items()
    ]
    session.log(f"plots: {', '.join(map(str, files))}")
    return {
        "growth": {
            "figures": [figure for found in curves.values() for figure in _slopes(found)],
            "dtype": "float32",
            "curves": {name: [vars(curve) for curve in found] for name, found in curves.items()},
        }
    }


def _slopes(curves: list[Curve]) -> list[dict[str, Any]]:
    """The exponent over the last doubling or more: what growth looks like where it matters."""
    return [
        {
            "name": f"growth: {curve.label} against {curve.axis}",
            "system": "ours",
            "unit": "exponent at the end",
            "better": "neither",
            "values": [curve.final_slope()],
        }
        for curve in curves
        if curve.is_measured
    ]


def _growth_in_length(session: Session, lengths: list[int]) -> list[Curve]:
    open_internals(session, SMALL)
    work = {"groups": 2, "group": 8, "prompt": 64}
    points = {
        (do, n): (
            do,
            {
                **work,
                "tokens": n,
                **({"slots": 16} if do == "generate" else {"microbatch_tokens": 4096}),
            },
        )
        for n in lengths
        for do in ("generate", "update")
    }
    return _curves(session, points, lengths, "response length, tokens", slope=1.0, per=1)


def _growth_in_group(session: Session, sizes: list[int]) -> list[Curve]:
    open_internals(session, SMALL)
    total = max(sizes)
    points = {
        (do, n): (
            do,
            {"groups": total // n, "group": n, "prompt": 512, "tokens": 64}
            | ({"slots": total} if do == "generate" else {"microbatch_tokens": 8192}),
        )
        for n in sizes
        for do in ("generate", "update")
    }
    return _curves(session, points, sizes, "group size G", slope=-1.0, per=total)


def _growth_in_slots(session: Session, slots: list[int]) -> list[Curve]:
    open_internals(session, SMALL)
    points = {
        ("generate", n): (
            "generate",
            {"groups": 8, "group": 8, "prompt": 64, "tokens": 64, "slots": n},
        )
        for n in slots
    }
    return _curves(session, points, slots, "slots", slope=-1.0, per=64)


def _growth_in_width(session: Session, widths: list[int]) -> list[Curve]:
    work = {"groups": 2, "group": 8, "prompt": 32, "tokens": 32}
    found: dict[tuple[str, int], list[float]] = {}
    for width in widths:
        open_internals(session, SMALL | {"width": width})
        points = {
            ("generate", width): ("generate", work | {"slots": 16}),
            ("update", width): ("update", work | {"microbatch_tokens": 1024}),
        }
        found |= _measure_points(session, points)
    return _as_curves(found, widths, "model width", slope=2.0, per=16)


def _growth_in_memory(session: Session, vocabularies: list[int]) -> list[Curve]:
    """Every point in a fresh process: a peak never goes down again."""
    curves = []
    for tokens in (512, 2048):
        values = []
        for vocabulary in vocabularies:
            open_internals(session, {"width": 64, "layers": 2, "vocabulary": vocabulary})
            work = {"groups": 1, "group": 8, "prompt": 32, "tokens": tokens // 8}
            answer = session.ask(
                "dapo_internals", "update_memory", **work, microbatch_tokens=4 * tokens
            )
            values.append(max(answer["extra_bytes"], 2**20) / 2**30)
            session.log(f"  vocabulary {vocabulary}, {tokens} tokens: {values[-1]:.3f} GiB")
        curves.append(
            Curve(
                f"update of {tokens} tokens",
                "vocabulary",
                "extra peak memory, GiB",
                vocabularies,
                values,
            )
        )
        naive = [tokens * vocabulary * 4 / 2**30 for vocabulary in vocabularies]
        label = f"one float32 [{tokens}, vocabulary]"
        curves.append(
            Curve(
                label,
                "vocabulary",
                "extra peak memory, GiB",
                vocabularies,
                naive,
                is_measured=False,
            )
        )
    session.close("dapo_internals")
    return curves


def _curves(
    session: Session,
    points: dict[tuple[str, int], tuple[str, dict[str, Any]]],
    sizes: list[int],
    axis: str,
    *,
    slope: float,
    per: int,
) -> list[Curve]:
    return _as_curves(_measure_points(session, points), sizes, axis, slope=slope, per=per)


def _measure_points(
    session: Session, points: dict[tuple[str, int], tuple[str, dict[str, Any]]]
) -> dict[tuple[str, int], list[float]]:
    """Seconds of every point in every round; round by round, so that a drift of the machine bends
    no curve.
    """
    rounds = 1 if session.settings.quick else 3
    found: dict[tuple[str, int], list[float]] = {key: [] for key in points}
    for index in range(rounds + 1):
        for key, (do, work) in points.items():
            if (
                index == 0
                and key != min(points, key=lambda other: other[1])
                and not session.settings.quick
            ):
                continue  # the cheapest point warms up
            seconds = session.ask("dapo_internals", do, **work)["seconds"]
            if index:
                found[key].append(seconds)
    for (do, size), seconds_of in found.items():
        session.log(f"  {do} at {size}: {sorted(seconds_of)[len(seconds_of) // 2]:.3f} s")
    return found


def _as_curves(
    found: dict[tuple[str, int], list[float]],
    sizes: list[int],
    axis: str,
    *,
    slope: float,
    per: int,
) -> list[Curve]:
    unit = "seconds" if per == 1 else "seconds per response"
    curves = []
    for do in dict.fromkeys(key[0] for key in found):
        values = [sorted(found[do, n])[len(found[do, n]) // 2] / per for n in sizes]
        curves.append(Curve(do, axis, unit, sizes, values))
    start = max(curve.values[0] for curve in curves)
    reference = [start * (n / sizes[0]) ** slope for n in sizes]
    curves.append(Curve(f"slope {slope:g}", axis, unit, sizes, reference, is_measured=False))
    return curves


def open_internals(session: Session, model: dict[str, Any] | str) -> dict[str, Any]:
    """A fresh worker on this model; the session's dtype is dapo's choice for this machine."""
    settings = session.settings
    if "dapo_internals" in session.workers:
        session.close("dapo_internals")
    session.start("dapo_internals", "dapo_internals")
    if "ours" not in session.answers:
        dtype = session.ask(
            "dapo_internals", "resolve_dtype", dtype=settings.dtype, device=settings.device
        )["dtype"]
        session.answers["ours"] = {"dtype": dtype}
    return session.ask(
        "dapo_internals",
        "open",
        model=model,
        dtype=session.dtype,
        device=settings.device,
        threads=settings.threads,
    )
