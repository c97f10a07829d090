"""The part `distillation`: steps with a teacher in ours and in TRL's DistillationTrainer, and in
ours without one.

Each prompt has one response of a fixed length, and the loss is the reverse divergence over the
whole vocabulary. The teacher is the model itself, so it costs what a teacher of the student's size
costs. Without a teacher, responses to half of the problems are right, and the baseline is the mean
reward of the batch: the same work, one forward less.
"""

from typing import Any

from benchmarks.compare import CONFIG, Work, require_tokens, step_options
from benchmarks.protocol import WorkerFailed
from benchmarks.worker_session import INSTALL, Session, is_installed, rotated

SHAPE = {"prompts": 32, "group": 1, "tokens": 48}
SHAPE_QUICK = {"prompts": 8, "group": 1, "tokens": 16}
ALONE = "ours, no teacher"
TEACHER = ("preset=distill", "loss.reference.model=smollm2-135m-instruct")
NO_TEACHER = (
    "advantage.estimator=reinforce_pp",
    "reward.verifier=benchmarks.reward:half_of_the_problems",
)


def measure_distillation(session: Session) -> dict[str, dict[str, Any]]:
    """Tokens per second of updates and of whole steps, and the peak memory."""
    settings = session.settings
    work = Work(**(SHAPE_QUICK if settings.quick else SHAPE))
    options = [*shared_options(session, work), f"train.threads={settings.threads}"]
    session.start(ALONE, "ours")
    for name, chosen in (("ours", TEACHER), (ALONE, NO_TEACHER)):
        session.log(f"loading {name}")
        opening = {"config": CONFIG, "overrides": [*options, *chosen], "forced_lengths": True}
        session.answers[name] = session.ask(name, "open", **opening)
    rows = session.ask("ours", "rows", count=work.prompts)["rows"]
    systems = ["ours", ALONE]
    skipped = []
    if is_installed("trl"):
        try:
            _open_trl(session, rows, work)
            systems.append("trl")
        except WorkerFailed as error:
            skipped.append({"system": "trl", "reason": str(error).splitlines()[0]})
    else:
        skipped.append({"system": "trl", "reason": f"not installed; `{INSTALL}` installs it"})
    rounds = [_round(session, systems, work, index) for index in range(-1, settings.rounds)][1:]
    memory = {name: session.ask(name, "memory")["rss_bytes"] / 2**30 for name in systems}
    return {
        "distillation": {
            "figures": figures(rounds, memory),
            "skipped": skipped,
            "rounds": rounds,
            "parameters": session.answers["ours"]["parameters"],
            "versions": {
                name: answer["versions"]
                for name, answer in session.answers.items()
                if "versions" in answer
            },
            "dtype": session.dtype,
        }
    }


def shared_options(session: Session, work: Work) -> list[str]:
    """Options of a step with one update, with and without a teacher."""
    own = [f"train.minibatch_groups={work.prompts}", f"rollout.native.slots={work.responses}"]
    return [*step_options(session, work), *own, "dynamic_sampling.enabled=false"]


def _open_trl(session: Session, rows: list[dict[str, Any]], work: Work) -> None:
    settings = session.settings
    ours = session.answers["ours"]
    session.log("loading trl")
    session.start("trl", "trl_distillation")
    given = {
        "model": ours["directory"],
        "dtype": ours["dtype"],
        "device": settings.device,
        "threads": settings.threads,
        "rows": [{"prompt": row["prompt"]} for row in rows] * 64,
        "prompts": work.prompts,
        "microbatch": min(settings.trl_microbatches[0], work.prompts),
        "tokens": work.tokens,
        "lr": 1.0e-6,
    }
    session.answers["trl"] = session.ask("trl", "open", settings=given)


def _round(session: Session, systems: list[str], work: Work, index: int) -> dict[str, Any]:
    """One step of every system; round -1 warms up."""
    found = {name: session.ask(name, "step") for name in rotated(systems, index)}
    for name, step in found.items():
        require_tokens(name, step["trained_tokens"], work.responses * work.tokens)
    summary = ", ".join(
        f"{name} {each['step_s']:.1f} s, update {each['update_s']:.1f}"
        for name, each in found.items()
    )
    session.log(f"  {'warm-up' if index < 0 else f'round {index + 1}'}: {summary}")
    return found


def figures(rounds: list[dict[str, Any]], memory: dict[str, float]) -> list[dict[str, Any]]:
    """Trained tokens per second of updates and steps, and peak memory."""
    speed = [
        {"name": name, "system": system, "unit": "tokens/s", "better": "higher"}
        | {"values": [found[system]["trained_tokens"] / found[system][seconds] for found in rounds]}
        for name, seconds in (
            ("update with a teacher", "update_s"),
            ("step with a teacher", "step_s"),
        )
        for system in memory
    ]
    return speed + [
        {
            "name": "peak memory with a teacher",
            "system": system,
            "unit": "GiB",
            "better": "lower",
            "values": [size],
        }
        for system, size in memory.items()
    ]
