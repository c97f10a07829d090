"""Seconds of training until the policy answers three quarters of the held-out quickstart problems.

Both systems get the quickstart's problems, prompts, reward, learning rate and group size, at natural lengths, and take
turns step by step. Their weights are evaluated by one third process with plain `transformers.generate`; loading,
evaluating and exporting are not in the seconds.
"""

import shutil
from dataclasses import dataclass, field
from typing import Any

from benchmarks.compare import CONFIG, best_microbatch
from benchmarks.worker_session import INSTALL, Session, is_installed

EVALUATE_EVERY = 2
SAMPLES_PER_PROBLEM = 1
QUICK_HELD_OUT = 8
QUICK_OVERRIDES = ("rollout.prompts_per_step=2", "rollout.group_size=4", "train.minibatch_groups=2")
MAX_STEPS = 80
"""Of our system; an opponent may take `cap` times our seconds."""


@dataclass
class Runner:
    """How far one system is in one seed's race."""

    name: str
    seconds: float = 0.0
    evaluation_s: float = 0.0
    steps: int = 0
    curve: list[tuple[float, float]] = field(default_factory=list)
    """Seconds of training and held-out accuracy at each evaluation."""
    reached: bool = False
    given_up: bool = False

    @property
    def running(self) -> bool:
        """Is there a next step?"""
        return not (self.reached or self.given_up)


def measure_accuracy(session: Session) -> dict[str, dict[str, Any]]:
    """One race for each seed."""
    settings = session.settings
    systems = [name for name in ("ours", "trl") if is_installed(name)]
    first = settings.first_seed
    races = [_race(session, systems, seed) for seed in range(first, first + settings.seeds)]
    figures = []
    for name in systems:
        runners = [race[name] for race in races]
        figures.append(
            {
                "name": f"training until {settings.target:.0%} of held-out problems are right",
                "system": name,
                "unit": "s",
                "better": "lower",
                "values": [runner.seconds for runner in runners],
                "unfinished": any(not runner.reached for runner in runners),
            }
        )
    skipped = [] if "trl" in systems else [{"system": "trl", "reason": f"not installed; `{INSTALL}` installs it"}]
    return {
        "accuracy": {
            "figures": figures,
            "skipped": skipped,
            "dtype": session.dtype,
            "races": [{name: vars(runner) for name, runner in race.items()} for race in races],
            "versions": {key: answer["versions"] for key, answer in session.answers.items() if "versions" in answer},
            "trl_microbatch": session.answers.get("trl", {}).get("microbatch"),
        }
    }


def joined(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Join the races of further seeds to those that were run before."""
    others = {figure["system"]: figure for figure in earlier["figures"]}
    figures = [
        figure
        | {
            "values": others[figure["system"]]["values"] + figure["values"],
            "unfinished": others[figure["system"]]["unfinished"] or figure["unfinished"],
        }
        for figure in later["figures"]
    ]
    return later | {"figures": figures, "races": earlier["races"] + later["races"]}


def _race(session: Session, systems: list[str], seed: int) -> dict[str, Runner]:
    settings = session.settings
    _open_ours(session, seed)
    if "trl" in systems:
        _open_trl(session, seed)
    held_out = session.ask("ours", "held_out")
    held_out["rows"] = held_out["rows"][: QUICK_HELD_OUT if settings.quick else None]
    session.start("evaluator", "transformers")
    runners = {name: Runner(name) for name in systems}
    max_steps = EVALUATE_EVERY if settings.quick else MAX_STEPS
    while any(runner.running for runner in runners.values()):
        for runner in runners.values():
            if runner.running:
                _step(session, runner, held_out, seed)
        ours, trl = runners["ours"], runners.get("trl")
        ours.given_up = not ours.reached and ours.steps >= max_steps
        if trl is not None and not trl.reached:
            beyond = ours.reached and trl.seconds > settings.cap * ours.seconds
            trl.given_up = beyond or ours.given_up
    session.close("evaluator", *systems)
    return runners


def _step(session: Session, runner: Runner, held_out: dict[str, Any], seed: int) -> None:
    runner.seconds += session.ask(runner.name, "step")["step_s"]
    runner.steps += 1
    if runner.steps % EVALUATE_EVERY:
        return
    directory = session.folder / f"{runner.name}-{seed}-{runner.steps}"
    session.ask(runner.name, "export", directory=str(directory))
    settings = session.settings
    session.ask(
        "evaluator",
        "open",
        model=str(directory),
        dtype=session.dtype,
        device=settings.device,
        threads=settings.threads,
    )
    # the same noise at every evaluation of both
    found = session.ask("evaluator", "evaluate", **held_out, samples=SAMPLES_PER_PROBLEM, seed=seed)
    shutil.rmtree(directory)
    runner.evaluation_s += found["seconds"]
    runner.curve.append((runner.seconds, found["accuracy"]))
    runner.reached = found["accuracy"] >= settings.target
    session.log(
        f"  seed {seed}, {runner.name}: step {runner.steps}, {runner.seconds:.0f} s: {found['accuracy']:.1%} right"
    )


def _open_ours(session: Session, seed: int) -> None:
    settings = session.settings
    overrides = [
        f"model.dtype={settings.dtype}",
        f"train.seed={seed}",
        f"train.threads={settings.threads}",
        f"train.device={settings.device}",
        "log.rollouts=none",
        *(QUICK_OVERRIDES if settings.quick else ()),
    ]
    session.log(f"seed {seed}: loading")
    session.start("ours", "ours")
    session.answers["ours"] = session.ask("ours", "open", config=CONFIG, overrides=overrides)


def _open_trl(session: Session, seed: int) -> None:
    settings, ours = session.settings, session.answers["ours"]
    config = ours["config"]
    # as many problems as our run could meet, in its order
    count = config["rollout"]["prompts_per_step"] * MAX_STEPS * int(settings.cap)
    rows = session.ask("ours", "rows", count=count)["rows"]
    trl = {
        "model": ours["directory"],
        "dtype": ours["dtype"],
        "device": settings.device,
        "threads": settings.threads,
        "rows": [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows],
        "prompts": config["rollout"]["prompts_per_step"],
        "group": config["rollout"]["group_size"],
        "max_new_tokens": config["rollout"]["max_response_tokens"],
        "forced": False,
        "updates": config["rollout"]["prompts_per_step"] // config["train"]["minibatch_groups"],
        "lr": config["optim"]["lr"],
        "warmup_steps": config["optim"]["warmup_steps"],
        "buffer_tokens": config["overlong"]["buffer_tokens"],
        "verifier": config["reward"]["verifier"],
        "options": config["reward"]["options"],
        "seed": seed,
    }
    microbatch = best_microbatch(session, trl)
    session.start("trl", "trl")
    answer = session.ask("trl", "open", settings=trl | {"microbatch": microbatch})
    session.answers["trl"] = answer | {"microbatch": microbatch}
