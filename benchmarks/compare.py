"""The interleaved parts: the same forced tokens, and whole steps, in every system."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.compute_limits import GENERATE_FLOP, UPDATE_FLOP
from benchmarks.geometries import NAMES
from benchmarks.protocol import WorkerFailed
from benchmarks.worker_session import (
    MAX_MODEL_LEN,
    Session,
    install_command,
    is_installed,
    rotated,
)

CONFIG = "configs/quickstart.yaml"
UPDATES_IN_VARIANT = 4
TRL_ON_A_GPU = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_enable_sleep_mode": True,
    "vllm_max_model_length": MAX_MODEL_LEN,
}
"""How TRL's users sample on a GPU: with vLLM in the trainer's process."""
COMPARED = ("generation", "update", "step", "memory")
STEPPING = ("ours", "trl")
"""The systems that train; their generation is that of their steps, where steps are measured."""
FLOP = {"generation": GENERATE_FLOP, "update": UPDATE_FLOP, "step": GENERATE_FLOP + UPDATE_FLOP}


def measure_one_update(session: Session, *, wanted: set[str]) -> dict[str, dict[str, Any]]:
    """Generation, update, step and memory, with one update per step."""
    return _measure(session, wanted, updates=1)


def measure_four_updates(session: Session, *, wanted: set[str]) -> dict[str, dict[str, Any]]:
    """The variant where old log-probabilities are computed and clipping is live."""
    return _measure(session, wanted, updates=UPDATES_IN_VARIANT)


@dataclass(frozen=True)
class Work:
    """The work of one step, equal for every system, and its model."""

    prompts: int
    group: int
    tokens: int
    """Length of each response; the largest length where lengths are natural."""
    updates: int = 1
    model: str | None = None
    """A directory; None: the session's model."""
    forced: bool = True
    """Whether every response has exactly as many tokens; else the model ends it."""

    @property
    def responses(self) -> int:
        """The number of responses per step."""
        return self.prompts * self.group


def _measure(session: Session, wanted: set[str], *, updates: int) -> dict[str, dict[str, Any]]:
    stepping = bool(wanted & {"update", "step", "memory"})
    systems = ["ours", "trl"] if stepping or "generation" in wanted else []
    systems += ["transformers", "vllm"] if "generation" in wanted else []
    settings = session.settings
    rows, skipped = open_systems(
        session, systems, Work(settings.prompts, settings.group, settings.tokens, updates)
    )
    prompts = [row["prompt_ids"] for row in rows]
    systems = [name for name in systems if name in session.workers]
    rounds = [
        _round(session, systems, prompts, wanted, i) for i in range(-1, session.settings.rounds)
    ][1:]
    memory = {
        name: session.ask(name, "memory") for name in systems if name in STEPPING and stepping
    }
    return {
        name: _part(session, name, rounds, memory, skipped, updates)
        for name in COMPARED
        if name in wanted
    }


def open_systems(
    session: Session, systems: Sequence[str], work: Work
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Start every system that is installed, ours first, which settles the session's dtype.

    Returns:
        The problems of every step, with `prompt_ids`; and which systems were not started, with the
        reason.
    """
    skipped = [
        {
            "system": name,
            "reason": f"not installed; `{install_command(session.settings)}` installs it",
        }
        for name in systems
        if not is_installed(name)
    ]
    rows = _open_ours(session, work)
    for name in systems:
        if name == "ours" or not is_installed(name):
            continue
        session.log(f"loading {name}")
        try:
            session.answers[name] = (
                _open_trl(session, rows, work) if name == "trl" else open_plain(session, name)
            )
        except WorkerFailed as error:
            session.log(f"  {error}")
            skipped.append({"system": name, "reason": str(error).splitlines()[0]})
            session.close(*(worker for worker in list(session.workers) if worker.startswith(name)))
    return rows, skipped


def _open_ours(session: Session, work: Work) -> list[dict[str, Any]]:
    settings = session.settings
    overrides = [
        *step_options(session, work),
        f"rollout.native.slots={work.responses}",
        "dynamic_sampling.enabled=false",
        f"train.minibatch_groups={work.prompts // work.updates}",
        f"train.threads={settings.threads}",
    ]
    session.log("loading ours")
    config = {"config": CONFIG, "overrides": overrides, "forced_lengths": work.forced}
    session.answers["ours"] = session.ask("ours", "open", **config)
    rows: list[dict[str, Any]] = session.ask("ours", "rows", count=work.prompts)["rows"]
    return rows


def step_options(session: Session, work: Work) -> list[str]:
    """Options of the quickstart under which every step has the same problems and trains all of
    them.

    Starts our worker. With natural lengths the quickstart's held-out problems stay, for its
    evaluation.
    """
    settings = session.settings
    session.start("ours", "ours")
    first = session.ask("ours", "problems", config=CONFIG, count=work.prompts)
    path = session.folder / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in first["rows"]), encoding="utf-8")
    model = work.model or settings.model
    if model in NAMES:
        session.log(f"writing {model} with random weights")
        directory = str(session.folder / model)
        session.ask("ours", "random_model", directory=directory, name=model)
        model = directory
    return [
        f"model.name={model}",
        f"model.dtype={settings.dtype}",
        f"data.train={path}",
        *(["data.eval=null"] if work.forced else []),
        f"rollout.prompts_per_step={work.prompts}",
        f"rollout.group_size={work.group}",
        f"rollout.max_response_tokens={work.tokens}",
        "dynamic_sampling.max_groups_per_step=null",
        "overlong.mode=off",
        "reward.verifier=benchmarks.reward:every_second",
        "optim.lr=1.0e-6",
        "optim.warmup_steps=0",
        f"train.microbatch_tokens={settings.microbatch_tokens or 'auto'}",
        f"train.device={settings.device}",
        "log.rollouts=none",
    ]


def open_plain(session: Session, name: str) -> dict[str, Any]:
    """A system that only generates."""
    settings = session.settings
    ours = session.answers["ours"]
    session.start(name, name)
    return session.ask(
        name,
        "open",
        model=ours["directory"],
        dtype=ours["dtype"],
        device=settings.device,
        threads=settings.threads,
    )


def _open_trl(session: Session, rows: list[dict[str, Any]], work: Work) -> dict[str, Any]:
    """TRL's steps on the same problems, with its fastest microbatch."""
    settings = session.settings
    ours = session.answers["ours"]
    trl = {
        "model": ours["directory"],
        "dtype": ours["dtype"],
        "device": settings.device,
        "threads": settings.threads,
        "rows": [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows] * 64,
        "prompts": work.prompts,
        "group": work.group,
        "max_new_tokens": work.tokens,
        "forced": work.forced,
        "updates": work.updates,
        "lr": 1.0e-6,
        "warmup_steps": 0,
        "buffer_tokens": 0,
        "seed": 0,
        "sampler": TRL_ON_A_GPU if settings.device == "cuda" else {},
    }
    microbatch = best_microbatch(session, trl)
    session.start("trl", "trl")
    return session.ask("trl", "open", settings=trl | {"microbatch": microbatch}) | {
        "microbatch": microbatch
    }


def best_microbatch(session: Session, trl: dict[str, Any]) -> int:
    """TRL's fastest microbatch, measured in a process of its own (so that its peak memory is not
    the step's).
    """
    largest = trl["prompts"] * trl["group"] // trl["updates"]
    sizes = [size for size in session.settings.trl_microbatches if size <= largest]
    if len(sizes) < 2:
        return sizes[0] if sizes else largest
    if "probe" not in session.answers:
        session.log(f"probing trl with {', '.join(map(str, sizes))} responses in a microbatch")
        session.start("trl-probe", "trl")
        session.ask(
            "trl-probe",
            "open",
            settings=trl | {"updates": 1, "microbatch": trl["prompts"] * trl["group"]},
        )
        session.answers["probe"] = session.ask("trl-probe", "probe", sizes=sizes)[
            "seconds_per_response"
        ]
        session.close("trl-probe")
        summary = ", ".join(
            f"{size}: {float(s):.3f}" for size, s in session.answers["probe"].items()
        )
        session.log(f"  seconds per response: {summary}")
    found = session.answers["probe"]
    return int(min(found, key=lambda size: found[size]))


def _round(
    session: Session, systems: list[str], prompts: list[list[int]], wanted: set[str], index: int
) -> dict[str, Any]:
    """One repetition of everything; round -1 warms up."""
    settings = session.settings
    measured: dict[str, Any] = {"gflops": session.matmul_gflops()}
    for name in rotated(systems, index):
        found: dict[str, Any] = {}
        if name in STEPPING and wanted & {"update", "step", "memory"}:
            step = session.ask(name, "step")
            require_tokens(name, step["trained_tokens"], settings.responses * settings.tokens)
            found["generation"] = step["generated_tokens"] / step["generation_s"]
            found["update"] = step["trained_tokens"] / step["update_s"]
            found["step"] = step["generated_tokens"] / step["step_s"]
            found["phases"] = step
        else:
            answer = session.ask(
                name, "generate", prompts=prompts, group=settings.group, tokens=settings.tokens
            )
            require_tokens(name, answer["tokens"], settings.responses * settings.tokens)
            found["generation"] = answer["tokens"] / answer["seconds"]
        measured[name] = found
        summary = ", ".join(
            f"{key} {value:.0f} tokens/s" for key, value in found.items() if key != "phases"
        )
        session.log(f"  {'warm-up' if index < 0 else f'round {index + 1}'}: {name}: {summary}")
    return measured


def require_tokens(name: str, tokens: int, expected: int) -> None:
    """Raise ValueError where a system did not do the forced work."""
    if tokens != expected:
        raise ValueError(
            f"{name} computed {tokens} tokens where {expected} were forced: the figures cannot be"
            " compared"
        )


def _part(
    session: Session,
    name: str,
    rounds: list[dict[str, Any]],
    memory: dict[str, dict[str, Any]],
    skipped: list[dict[str, str]],
    updates: int,
) -> dict[str, Any]:
    variant = f", {updates} updates" if updates > 1 else ""
    if name == "memory":
        key = "gpu_bytes" if session.settings.device == "cuda" else "rss_bytes"
        figures = [
            {"name": f"peak memory of a step{variant}", "system": system}
            | {"unit": "GiB", "better": "lower", "values": [found[key] / 2**30]}
            for system, found in memory.items()
        ]
    else:
        systems = [key for key in rounds[0] if key != "gflops" and name in rounds[0][key]]
        figures = [
            {
                "name": f"{name}{variant}",
                "system": system,
                "unit": "tokens/s",
                "better": "higher",
                "flop_per_parameter": FLOP[name],
                "values": [found[system][name] for found in rounds],
            }
            for system in systems
        ]
    return {
        "figures": figures,
        "skipped": [entry for entry in skipped if name == "generation" or entry["system"] == "trl"],
        "gflops": [found["gflops"] for found in rounds],
        "parameters": session.answers["ours"]["parameters"],
        "versions": {
            key: answer["versions"]
            for key, answer in session.answers.items()
            if "versions" in answer
        },
        "dtype": session.answers["ours"]["dtype"],
        "trl_microbatch": session.answers.get("trl", {}).get("microbatch"),
        "phases": [
            {key: value["phases"] for key, value in found.items() if _has_phases(value)}
            for found in rounds
        ],
    }


def _has_phases(value: Any) -> bool:
    return isinstance(value, dict) and "phases" in value
