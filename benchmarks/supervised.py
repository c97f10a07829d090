"""The part `supervised`: the same demonstrations in ours and in TRL's SFTTrainer, one update a
step, side by side.

Both train the same token ids with the same rate, in the same order. So the losses of each step must
agree: the part fails where they differ by more than `TOLERANCE`, relative, in float32.
"""

import json
from typing import Any

from benchmarks.protocol import WorkerFailed
from benchmarks.worker_session import INSTALL, Session, is_installed, rotated
from examples.worked_sums import worked

CONFIG = "configs/quickstart.yaml"
PER_UPDATE = 16
TOKENS = 48
TOLERANCE = 1e-4
LR = 2.0e-5


def measure_supervised(session: Session) -> dict[str, dict[str, Any]]:
    """Tokens per second of whole updates, the losses, and the peak memory."""
    settings = session.settings
    per_update = 4 if session.settings.quick else PER_UPDATE
    count = per_update * (settings.rounds + 1)
    path = session.folder / "sums.jsonl"
    pairs = [(1000 + 7919 * i % 9000, 1000 + 104729 * i % 9000) for i in range(1, count + 1)]
    rows = [
        {"prompt": f"What is {a} + {b}? Reply with only the answer.", "response": worked(a, b)}
        for a, b in pairs
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = [
        "preset=sft",
        f"data.demonstrations={path}",
        "data.eval=null",
        f"model.name={settings.model}",
        f"model.dtype={settings.dtype}",
        f"rollout.max_response_tokens={TOKENS}",
        f"train.minibatch_groups={per_update}",
        f"train.microbatch_tokens={settings.microbatch_tokens}",
        f"train.threads={settings.threads}",
        f"optim.lr={LR}",
        "optim.warmup_steps=0",
    ]
    session.start("ours", "ours")
    session.log("loading ours")
    session.answers["ours"] = session.ask("ours", "open", config=CONFIG, overrides=options)
    samples = session.ask("ours", "demonstrations", count=count)["samples"]
    systems = ["ours"]
    skipped = []
    if is_installed("trl"):
        try:
            open_trl(session, samples, per_update)
            systems.append("trl")
        except WorkerFailed as error:
            skipped.append({"system": "trl", "reason": str(error).splitlines()[0]})
    else:
        skipped.append({"system": "trl", "reason": f"not installed; `{INSTALL}` installs it"})
    rounds = [update_round(session, systems, index) for index in range(-1, settings.rounds)][1:]
    memory = {name: session.ask(name, "memory")["rss_bytes"] / 2**30 for name in systems}
    answers = session.answers
    return {
        "supervised": {
            "figures": figures(rounds, memory, per_update),
            "skipped": skipped,
            "rounds": rounds,
            "parameters": answers["ours"]["parameters"],
            "versions": {name: answer["versions"] for name, answer in answers.items()},
            "dtype": session.dtype,
        }
    }


def open_trl(session: Session, samples: list[dict[str, Any]], per_update: int) -> None:
    """Start TRL's SFTTrainer on the token ids of these demonstrations."""
    settings = session.settings
    ours = session.answers["ours"]
    trl = {
        "model": ours["directory"],
        "dtype": ours["dtype"],
        "device": settings.device,
        "threads": settings.threads,
    }
    session.log("loading trl")
    session.start("trl", "trl_supervised")
    microbatch = min(settings.trl_microbatches[0], per_update)
    given = trl | {"samples": samples, "per_update": per_update, "microbatch": microbatch, "lr": LR}
    session.answers["trl"] = session.ask("trl", "open", settings=given)


def update_round(session: Session, systems: list[str], index: int) -> dict[str, Any]:
    """One update of every system; round -1 warms up."""
    found = {name: session.ask(name, "step") for name in rotated(systems, index)}
    summary = ", ".join(
        f"{name} {step['step_s']:.2f} s, loss {step['loss']:.6f}" for name, step in found.items()
    )
    session.log(f"  {'warm-up' if index < 0 else f'round {index + 1}'}: {summary}")
    require_same_loss(found, session.dtype)
    return found


def require_same_loss(found: dict[str, dict[str, Any]], dtype: str) -> None:
    """Raise ValueError where systems trained other tokens, or in float32 had another loss."""
    if len({step["trained_tokens"] for step in found.values()}) > 1:
        raise ValueError(f"the trained tokens differ: {found}")
    losses = [step["loss"] for step in found.values()]
    if dtype == "float32" and max(losses) - min(losses) > TOLERANCE * max(losses):
        raise ValueError(f"the losses differ by more than {TOLERANCE:g}: {losses}")


def figures(
    rounds: list[dict[str, Any]], memory: dict[str, float], per_update: int
) -> list[dict[str, Any]]:
    """Trained tokens per second, and peak memory."""
    speed = [
        {
            "name": f"update of {per_update} demonstrations",
            "system": system,
            "unit": "tokens/s",
            "better": "higher",
        }
        | {
            "values": [
                found[system]["trained_tokens"] / found[system]["step_s"] for found in rounds
            ]
        }
        for system in memory
    ]
    return speed + [
        {
            "name": "peak memory, demonstrations",
            "system": system,
            "unit": "GiB",
            "better": "lower",
            "values": [size],
        }
        for system, size in memory.items()
    ]
