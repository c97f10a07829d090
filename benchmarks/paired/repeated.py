"""The parts of one kind of work, repeated in a process of each side: long prompts, nothing shared,
four updates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compare import CONFIG, UPDATES_IN_VARIANT, step_options
from benchmarks.compare import Work as Step
from benchmarks.paired.sides import BASE, OURS, Side, Target, in_turn, row
from benchmarks.protocol import WorkerFailed
from benchmarks.worker_session import DEFAULT_MICROBATCH, Session

ENGINE_OLD_LOGPROBS = "loss.old_logprobs=engine"
NO_SLOWER = Target(0.98, at_most=False)
NO_MORE_MEMORY = Target(1.02, at_most=True)


@dataclass(frozen=True)
class Work:
    """One repetition: a command of `benchmarks.workers.dapo_internals`, on random prompts and with
    forced lengths.
    """

    name: str
    do: str
    shape: dict[str, Any]
    target: Target
    microbatch_tokens: bool = False

    def tokens(self) -> int:
        """The response tokens of a repetition."""
        return int(self.shape["groups"] * self.shape["group"] * self.shape["tokens"])


LONG_PROMPTS = (
    Work(
        "generation, 4 prompts of 512, 16 responses of 64 to each",
        "generate",
        {"groups": 4, "group": 16, "prompt": 512, "tokens": 64, "slots": 64},
        Target(1.30, at_most=False),
    ),
)
# so hot that every word is as likely as any other: responses part with their first token
UNSHARED = {"groups": 8, "group": 8, "prompt": 50, "tokens": 64}
NOTHING_SHARED = (
    Work(
        "generation, responses of random tokens",
        "generate",
        UNSHARED | {"slots": 64, "temperature": 1000.0},
        NO_SLOWER,
    ),
    Work(
        "update, responses of random tokens", "update", UNSHARED, NO_SLOWER, microbatch_tokens=True
    ),
)


def measure_long_prompts(session: Session, sides: Sequence[Side]) -> dict[str, Any]:
    """Generation where each group's prompt is long: what its responses read of it in common."""
    return _measure(session, sides, LONG_PROMPTS)


def measure_nothing_shared(session: Session, sides: Sequence[Side]) -> dict[str, Any]:
    """Responses without common beginnings: what looking for them costs."""
    return _measure(session, sides, NOTHING_SHARED)


def _measure(session: Session, sides: Sequence[Side], works: Sequence[Work]) -> dict[str, Any]:
    """Each repetition on both sides in turn, each side in one process; the first round warms up."""
    settings = session.settings
    works = [_small(work) for work in works] if settings.quick else works
    for side in sides:
        session.log(f"loading {side.name} ({side.commit})")
        session.start(side.name, "dapo_internals", environment=side.environment)
        resolved = session.ask(
            side.name, "resolve_dtype", dtype=settings.dtype, device=settings.device
        )
        asked = {"model": settings.model, "device": settings.device, "threads": settings.threads}
        session.answers[side.name] = session.ask(side.name, "open", **asked, **resolved)
    found: dict[str, dict[str, list[float]]] = {
        work.name: {side.name: [] for side in sides} for work in works
    }
    for index in range(-1, settings.rounds):
        for work in works:
            more = (
                {"microbatch_tokens": settings.microbatch_tokens or DEFAULT_MICROBATCH}
                if work.microbatch_tokens
                else {}
            )
            for side in in_turn(sides, index):
                seconds = session.ask(side.name, work.do, **work.shape, **more)["seconds"]
                rate = work.tokens() / seconds
                session.log(
                    f"  {_round_name(index)}: {work.name}: {side.name}: {rate:.0f} tokens/s"
                )
                if index >= 0:
                    found[work.name][side.name].append(rate)
    rows = [row(work.name, "tokens/s", found[work.name], work.target) for work in works]
    memory = {side.name: [session.ask(side.name, "memory")["rss_bytes"] / 2**30] for side in sides}
    rows.append(row("peak memory of these", "GiB", memory, NO_MORE_MEMORY))
    return {"rows": rows, "dtype": session.answers[OURS]["dtype"]}


def measure_four_updates(session: Session, sides: Sequence[Side]) -> dict[str, Any]:
    """Steps of four updates: our default, and with the engine's log-probabilities as the old ones.

    Lengths are not forced: where no response may end, the engine's log-probabilities are those of
    words that do not end one. The sides sample with the same seeds, and a figure is a rate.
    """
    settings = session.settings
    base = next(side for side in sides if side.name == BASE)
    ours = next(side for side in sides if side.name == OURS)
    overrides = [
        *step_options(session, Step(settings.prompts, settings.group, settings.tokens)),
        f"rollout.native.slots={settings.responses}",
        "dynamic_sampling.enabled=false",
        f"train.minibatch_groups={settings.prompts // UPDATES_IN_VARIANT}",
        f"train.threads={settings.threads}",
    ]
    session.close(OURS)  # `step_options` has started it for the problems
    names = {BASE: (base, []), OURS: (ours, []), ENGINE_OLD_LOGPROBS: (ours, [ENGINE_OLD_LOGPROBS])}
    skipped = []
    for name, (side, more) in names.items():
        session.log(f"loading {name} ({side.commit})")
        session.start(name, "ours", environment=side.environment)
        try:
            session.answers[name] = session.ask(
                name, "open", config=CONFIG, overrides=[*overrides, *more]
            )
        except WorkerFailed as error:
            if name in (BASE, OURS):
                raise
            session.log(f"  {error}")
            session.workers.pop(name)
            skipped.append(f"{name}: {error}")
    rates: dict[str, dict[str, list[float]]] = {
        name: {"update": [], "step": []} for name in session.workers
    }
    for index in range(-1, settings.rounds):
        running = [name for name in names if name in session.workers]
        for name in running if index % 2 == 0 else reversed(running):
            answer = session.ask(name, "step")
            found = {
                phase: answer["trained_tokens"] / answer[f"{phase}_s"]
                for phase in ("update", "step")
            }
            session.log(f"  {_round_name(index)}: {name}: update {found['update']:.0f} tokens/s")
            for phase, rate in found.items():
                if index >= 0:
                    rates[name][phase].append(rate)
    return {
        "rows": _rows_of_updates(rates),
        "skipped": skipped,
        "dtype": session.answers[OURS]["dtype"],
    }


def _rows_of_updates(rates: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    rows = []
    for name, target in ((OURS, NO_SLOWER), (ENGINE_OLD_LOGPROBS, Target(1.25, at_most=False))):
        more = "" if name == OURS else f", {name}"
        for phase in ("update", "step") if name in rates else ():
            values = {BASE: rates[BASE][phase], OURS: rates[name][phase]}
            label = f"{phase}, {UPDATES_IN_VARIANT} updates{more}"
            rows.append(row(label, "tokens/s", values, target if phase == "update" else None))
    return rows


def _small(work: Work) -> Work:
    shape = work.shape | {"groups": 2, "group": 4, "tokens": 8}
    return Work(
        f"{work.name} (quick: 2 x 4 x 8)", work.do, shape, work.target, work.microbatch_tokens
    )


def _round_name(index: int) -> str:
    return "warm-up" if index < 0 else f"round {index + 1}"
