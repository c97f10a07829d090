"""The part `episodes`: the same environment, episodes and steps in ours and in TRL's trainer, side
by side.

The small model calls no tools by itself, and ends turns at different lengths in both. So both are
forced alike: every turn has as many tokens, its last one is the end of a turn, and the parser of
each system reads any text as a call of the environment's tool. The model gets a chat template with
tools, which its own is not.
"""

from dataclasses import replace
from typing import Any

from benchmarks.compare import CONFIG, Work, best_microbatch, step_options
from benchmarks.protocol import WorkerFailed
from benchmarks.turn_templates import written_families
from benchmarks.worker_session import INSTALL, Session, is_installed, rotated

SHAPE = {"prompts": 4, "group": 8, "tokens": 64}
"""The tokens are those of all turns of an episode."""
SHAPE_QUICK = {"prompts": 2, "group": 4, "tokens": 16}
TURNS = 4
TEMPLATE = "qwen 2.5"
OBSERVATION_TOKENS = 64
"""The limit of tokens between two turns; fewer are used."""
LARGEST_MICROBATCH = 16
"""Of TRL, in episodes: with 32 its update takes more than 21 GB."""
COUNTS = ("trained_tokens", "generated_tokens", "observed_tokens")


def measure_episodes(session: Session) -> dict[str, dict[str, Any]]:
    """Episodes per second: played, and trained in whole steps, round by round."""
    fitting = tuple(
        size for size in session.settings.trl_microbatches if size <= LARGEST_MICROBATCH
    )
    settings = session.settings = replace(session.settings, trl_microbatches=fitting)
    work = Work(**(SHAPE_QUICK if settings.quick else SHAPE))
    prompts = _open_ours(session, work)
    systems = ["ours"]
    skipped = []
    if is_installed("trl"):
        try:
            _open_trl(session, work)
            systems.append("trl")
        except WorkerFailed as error:
            skipped.append({"system": "trl", "reason": str(error).splitlines()[0]})
            session.close(*(name for name in list(session.workers) if name.startswith("trl")))
    else:
        skipped.append({"system": "trl", "reason": f"not installed; `{INSTALL}` installs it"})
    rounds = [
        _round(session, systems, work, prompts, index) for index in range(-1, settings.rounds)
    ][1:]
    answers = session.answers
    return {
        "episodes": {
            "figures": figures(rounds, work),
            "skipped": skipped,
            "rounds": rounds,
            "parameters": answers["ours"]["parameters"],
            "versions": {
                name: answer["versions"] for name, answer in answers.items() if "versions" in answer
            },
            "dtype": session.dtype,
            "trl_microbatch": answers.get("trl", {}).get("microbatch"),
        }
    }


def episode_options(work: Work) -> list[str]:
    """Options that make the steps of `compare.step_options` episodes."""
    return [
        "environment.name=benchmarks.forced_calls:notes",
        f"environment.max_turns={TURNS}",
        f"environment.max_turn_tokens={work.tokens // TURNS}",
        f"environment.max_observation_tokens={OBSERVATION_TOKENS}",
        "reward.verifier=environment",
        f"rollout.native.slots={work.responses}",
        "dynamic_sampling.enabled=false",
        f"train.minibatch_groups={work.prompts}",
    ]


def _open_ours(session: Session, work: Work) -> int:
    """Load ours; the number of tokens of all prompts of a step."""
    options = step_options(session, work)
    directory = session.folder / "with-tools"
    directory.mkdir()
    template = written_families()[TEMPLATE].template
    session.ask("ours", "with_template", directory=str(directory), template=template)
    options += [
        f"model.name={directory}",
        f"train.threads={session.settings.threads}",
        *episode_options(work),
    ]
    session.log("loading ours")
    session.answers["ours"] = session.ask(
        "ours", "open", config=CONFIG, overrides=options, forced_turns=True
    )
    rows = session.ask("ours", "rows", count=work.prompts)["rows"]
    session.answers["rows"] = {"rows": rows}
    return work.group * sum(len(row["prompt_ids"]) for row in rows)


def _open_trl(session: Session, work: Work) -> None:
    settings = session.settings
    ours = session.answers["ours"]
    rows = [
        {"prompt": row["prompt"], "answer": row["answer"]}
        for row in session.answers.pop("rows")["rows"]
    ]
    trl = {
        "model": ours["directory"],
        "dtype": ours["dtype"],
        "device": settings.device,
        "threads": settings.threads,
        "rows": rows * 64,
        "prompts": work.prompts,
        "group": work.group,
        "max_new_tokens": work.tokens + (TURNS - 1) * OBSERVATION_TOKENS,
        "turns": {"count": TURNS, "tokens": work.tokens // TURNS},
        "forced": True,
        "updates": 1,
        "lr": 1.0e-6,
        "warmup_steps": 0,
        "buffer_tokens": 0,
        "seed": 0,
    }
    microbatch = best_microbatch(session, trl)
    session.log("loading trl")
    session.start("trl", "trl")
    answer = session.ask("trl", "open", settings=trl | {"microbatch": microbatch})
    session.answers["trl"] = answer | {"microbatch": microbatch}


def _round(
    session: Session, systems: list[str], work: Work, prompts: int, index: int
) -> dict[str, Any]:
    """One step of every system; round -1 warms up."""
    found = {}
    for name in rotated(systems, index):
        step = session.ask(name, "step")
        found[name] = {
            "play_s": step.get("episodes_s", step["generation_s"]),
            "step_s": step["step_s"],
        }
        found[name] |= {count: step[count] for count in COUNTS}
        found[name]["prompt_tokens"] = step.get("shown_prompt_tokens", prompts)
        summary = ", ".join(f"{key} {value:.2f}" for key, value in found[name].items())
        session.log(f"  {'warm-up' if index < 0 else f'round {index + 1}'}: {name}: {summary}")
    require_same_work(found, work)
    return found


def require_same_work(found: dict[str, dict[str, Any]], work: Work) -> None:
    """Raise ValueError where a system sampled or trained other tokens than forced, or systems read
    different ones.
    """
    sampled = work.responses * work.tokens
    for name, counts in found.items():
        for key in ("generated_tokens", "trained_tokens"):
            if counts[key] != sampled:
                raise ValueError(f"{name}: {key} is {counts[key]} where {sampled} were forced")
    for key in ("observed_tokens", "prompt_tokens"):
        if len({counts[key] for counts in found.values()}) > 1:
            each = ", ".join(f"{name} {counts[key]}" for name, counts in found.items())
            raise ValueError(f"{key} differ, so the figures cannot be compared: {each}")


def figures(rounds: list[dict[str, dict[str, Any]]], work: Work) -> list[dict[str, Any]]:
    """Episodes per second, played and trained."""
    shape = f"{work.responses} episodes of {TURNS} turns of {work.tokens // TURNS}"
    names = {"play_s": f"{shape}, played", "step_s": f"{shape}, trained in a whole step"}
    return [
        {"name": name, "system": system, "unit": "episodes/s", "better": "higher"}
        | {"values": [work.responses / found[system][key] for found in rounds]}
        for key, name in names.items()
        for system in ("ours", "trl")
        if system in rounds[0]
    ]
