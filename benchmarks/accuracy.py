"""Held-out accuracy against generated tokens and against seconds of training: ours and TRL's
GRPOTrainer.

A race is a seed. In it every system trains the quickstart, with the same model, problems in the
same order, reward, learning rate at each step, group size and precision, at natural lengths, until
it has generated a budget of tokens. One that is not clearly above the target then goes on to GO_ON
budgets, so that its crossing is measured too. Systems take turns: each trains to the next multiple
of `evaluate_every` tokens, then its weights are evaluated by a third process
(`benchmarks.workers.evaluator`). Loading, exporting and evaluating are not in the seconds.

A system's curve in a race is kept when it is complete, in a cache folder and in the results file,
so that an interrupted command goes on with the next race, and further seeds and systems join those
before. `python -m benchmarks.accuracy_report` makes the table and the picture.
"""

import hashlib
import itertools
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks.accuracy_report import figures
from benchmarks.compare import CONFIG, best_microbatch
from benchmarks.crossing import HeldOut
from benchmarks.machine import describe_commit, describe_machine, today
from benchmarks.sharpened import cache_folder
from benchmarks.worker_session import INSTALL, ROOT, Session, Settings, is_installed, rotated
from dapo.config import load_config
from dapo.core.rng import keyed_seed
from dapo.data.problems import load_problems

MODULES = {"ours": "ours", "all_groups": "ours", "trl": "trl"}
"""The worker's module by system.

`all_groups` is ours without dynamic sampling, which is TRL's algorithm.
"""
OVERRIDES: dict[str, tuple[str, ...]] = {
    "ours": (),
    "all_groups": ("dynamic_sampling.enabled=false",),
}
SAMPLES = {"sums": 3, "products": 3, "largest": 1}
"""Responses to each problem: the first two tasks have few held-out questions, all of which are
asked.
"""

GO_ON = 1.5
"""Budgets after which a system ends that is not clearly above the target."""


@dataclass(frozen=True)
class Design:
    """The settings of a race; only curves of equal designs are compared."""

    token_budget: int = 20_000
    evaluate_every: int = 2_000
    """Generated tokens, discarded ones included."""
    held_out_size: int = 756
    """The size of `data.eval`: a third per task, unless a task has fewer held-out questions."""
    dtype: str = "auto"
    threads: int = 2
    device: str = "cpu"
    overrides: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Settings) -> "Design":
        """The settings' design; a quick one does two small steps on a few problems."""
        same = {"dtype": settings.dtype, "threads": settings.threads, "device": settings.device}
        if settings.quick:
            small = (
                "rollout.prompts_per_step=2",
                "rollout.group_size=4",
                "train.minibatch_groups=2",
            )
            return cls(
                token_budget=240, evaluate_every=120, held_out_size=12, overrides=small, **same
            )
        rate = () if settings.rate is None else (f"optim.lr={settings.rate!r}",)
        own = {"token_budget": settings.budget, "held_out_size": settings.held_out_size}
        return cls(overrides=rate, **own, **same)

    @property
    def name(self) -> str:
        """The name of the folder: a digest of design and machine."""
        machine = describe_machine()
        key = json.dumps([asdict(self), machine["cpu"], machine["cores"]])
        return hashlib.blake2b(key.encode(), digest_size=4).hexdigest()


@dataclass
class Leg:
    """One system in one race."""

    seed: int
    system: str
    steps: list[dict[str, float]] = field(default_factory=list)
    """Seconds, generated tokens and trained tokens per step."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Step, generated tokens and seconds of training until then, and the right responses to each
    problem.
    """
    is_complete: bool = False
    made_with: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return int(sum(step["tokens"] for step in self.steps))

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return sum(step["seconds"] for step in self.steps)


class Legs:
    """The complete legs of a design: in a folder, and those that a results file brought."""

    def __init__(self, folder: Path, earlier: dict[str, Any] | None, design: Design) -> None:
        self.folder = folder
        self.by_key: dict[tuple[int, str], Leg] = {}
        stored = [
            json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))
        ]
        if earlier is not None:
            require_same_design(earlier, design)
            stored = [*earlier["legs"], *stored]
        for found in stored:
            if found["is_complete"]:
                self.by_key[found["seed"], found["system"]] = Leg(**found)

    def write(self, leg: Leg) -> None:
        """Keep a leg as it is; it counts when it is complete."""
        path = self.folder / f"{leg.seed:03d}-{leg.system}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(leg)) + "\n", encoding="utf-8")
        os.replace(temporary, path)
        if leg.is_complete:
            self.by_key[leg.seed, leg.system] = leg

    def missing(self, seed: int, systems: list[str], is_over: Callable[[Leg], bool]) -> list[str]:
        """The systems that have no leg in a race, or one that ended too early for today's
        target.
        """
        return [
            s for s in systems if (seed, s) not in self.by_key or not is_over(self.by_key[seed, s])
        ]

    def race_minutes(self) -> float:
        """Duration of the longest race so far, evaluations included; 0 without any."""
        return max((leg.made_with["race_s"] for leg in self.by_key.values()), default=0.0) / 60


def as_json(design: Design) -> dict[str, Any]:
    """A design as it is after a round trip through JSON."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(design)))
    return found


def require_same_design(part: dict[str, Any], design: Design) -> None:
    """Raise ValueError where a results file holds curves of another design: they would be lost."""
    here = as_json(design)
    there = part.get("design", {})
    if here != there:
        other = [
            f"{key} {there.get(key)}, here {value}"
            for key, value in here.items()
            if there.get(key) != value
        ]
        raise ValueError(
            f"the results file holds other curves ({'; '.join(other)}): give another --name, or"
            " --again to forget them"
        )


def measure_accuracy(
    session: Session, *, installed: Callable[[str], bool] = is_installed
) -> dict[str, dict[str, Any]]:
    """Run the races that are missing, as far as the time goes, and give the figures of all that are
    there.
    """
    settings = session.settings
    design = Design.of(session.settings)
    folder = cache_folder() / "accuracy" / design.name
    if settings.again:
        shutil.rmtree(folder, ignore_errors=True)
    legs = Legs(folder, None if settings.again else _earlier(settings.results), design)
    systems = [system for system in settings.systems if installed(MODULES[system])]
    held_out, problems = held_out_problems(design)
    over = partial(is_over, design=design, held_out=held_out, target=settings.target)
    session.log(f"curves are kept in {folder}")
    started = time.monotonic()
    for seed in range(settings.first_seed, settings.first_seed + settings.seeds):
        missing = legs.missing(seed, systems, over)
        if not missing:
            session.log(f"seed {seed}: complete already")
            continue
        needed = legs.race_minutes()
        used = (time.monotonic() - started) / 60
        if settings.minutes is not None and used + needed > settings.minutes:
            session.log(
                f"seed {seed}: a race takes about {needed:.0f} minutes, and {used:.0f} of --minutes"
                f" {settings.minutes:g} are over: the same command again goes on here"
            )
            break
        Race(session, design, seed, missing, legs).run(held_out, problems, over)
    if not legs.by_key:
        raise ValueError(
            f"there is no complete race, and --minutes {settings.minutes:g} allows none"
        )
    skipped = (
        []
        if installed("trl")
        else [{"system": "trl", "reason": f"not installed; `{INSTALL}` installs it"}]
    )
    ordered = [asdict(legs.by_key[key]) for key in sorted(legs.by_key)]
    part = {
        "design": as_json(design),
        "target": settings.target,
        "held_out": vars(held_out),
        "legs": ordered,
    }
    versions: dict[str, Any] = {}
    for leg in ordered:
        versions |= leg["made_with"]["versions"]
    dtype = ordered[0]["made_with"]["dtype"]
    return {
        "accuracy": {
            "figures": figures(part),
            "skipped": skipped,
            "dtype": dtype,
            "versions": versions,
            **part,
        }
    }


def _earlier(path: Path | None) -> dict[str, Any] | None:
    """The accuracy part of a results file."""
    if path is None or not path.is_file():
        return None
    found: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8"))["parts"].get(
        "accuracy"
    )
    return found


@cache
def held_out_problems(design: Design) -> tuple[HeldOut, list[dict[str, Any]]]:
    """The evaluated problems, task by task, each task with its share of the quickstart's own
    held-out problems.
    """
    config = load_config(CONFIG)
    own = Counter(problem.source for problem in load_problems(config.data.eval, split="eval"))
    spec = {**config.data.eval, "size": design.held_out_size}
    found = sorted(
        load_problems(spec, split="eval"), key=lambda problem: list(SAMPLES).index(problem.source)
    )
    held_out = HeldOut(
        problems=dict(Counter(problem.source for problem in found)),
        samples=SAMPLES,
        shares={task: count / own.total() for task, count in own.items()},
    )
    rows = [{"id": p.id, "prompt": p.prompt, "answer": p.answer, "source": p.source} for p in found]
    return held_out, rows


def is_over(leg: Leg, design: Design, held_out: HeldOut, target: float) -> bool:
    """Whether a leg needs no further step.

    Its budget is spent, and its last evaluation is above the target with the whole interval; or
    GO_ON budgets are.
    """
    if not leg.evaluations or leg.tokens < design.token_budget:
        return False
    _, low, _ = held_out.accuracy(held_out.rates(leg.evaluations[-1]["right"]))
    return low > target or leg.tokens >= GO_ON * design.token_budget


def require_same_rates(legs: list[Leg]) -> None:
    """Raise ValueError where two systems trained a step with different learning rates."""
    for first, second in itertools.pairwise(legs):
        for i, (one, other) in enumerate(zip(first.steps, second.steps, strict=False), start=1):
            if not math.isclose(one["lr"], other["lr"], rel_tol=1e-9):
                raise ValueError(
                    f"step {i}: {first.system} trained at rate {one['lr']:g} and {second.system} at"
                    f" {other['lr']:g}: the curves cannot be compared"
                )


class Race:
    """The systems of one seed, side by side."""

    def __init__(
        self, session: Session, design: Design, seed: int, systems: list[str], legs: Legs
    ) -> None:
        self.session = session
        self.design = design
        self.seed = seed
        self.kept = legs
        self.legs = {system: Leg(seed, system) for system in systems}
        self.started = time.monotonic()

    def run(
        self, held_out: HeldOut, problems: list[dict[str, Any]], over: Callable[[Leg], bool]
    ) -> None:
        """Train and evaluate until each leg is over; they are kept when all are complete."""
        design = self.design
        session = self.session
        session.log(f"seed {self.seed}: loading {', '.join(self.legs)}")
        opened = self._open()
        self._open_evaluator(opened, problems)
        base = self._evaluate(opened["directory"], "base", 0)
        for leg in self.legs.values():
            leg.evaluations.append({"step": 0, "tokens": 0, "seconds": 0.0, **base})
        for i in itertools.count():
            for leg in [self.legs[system] for system in rotated(list(self.legs), i)]:
                if not over(leg):
                    self._advance(leg, (i + 1) * design.evaluate_every, held_out)
            if all(over(leg) for leg in self.legs.values()):
                break
        require_same_rates(list(self.legs.values()))
        for system, leg in self.legs.items():
            leg.is_complete = True
            leg.made_with = self._made_with(system)
            self.kept.write(leg)
        session.close("evaluator", *self.legs)

    def _advance(self, leg: Leg, mark: int, held_out: HeldOut) -> None:
        """Train until `mark` tokens have been generated, and evaluate."""
        while leg.tokens < mark:
            step = self.session.ask(leg.system, "step")
            measured = {"seconds": round(step["step_s"], 3), "tokens": step["generated_tokens"]}
            leg.steps.append(
                measured | {"trained_tokens": step["trained_tokens"], "lr": step["lr"]}
            )
        if leg.evaluations[-1]["step"] == len(leg.steps):
            return  # a step went beyond two marks
        directory = self.session.folder / f"{leg.system}-{self.seed}"
        self.session.ask(leg.system, "export", directory=str(directory))
        found = self._evaluate(str(directory), leg.system, len(leg.steps))
        shutil.rmtree(directory)
        leg.evaluations.append(
            {
                "step": len(leg.steps),
                "tokens": leg.tokens,
                "seconds": round(leg.seconds, 3),
                **found,
            }
        )
        self.kept.write(leg)
        accuracy, low, high = held_out.accuracy(held_out.rates(found["right"]))
        self.session.log(
            f"  seed {self.seed}, {leg.system}: step {len(leg.steps)}, {leg.tokens:,} tokens,"
            f" {leg.seconds:.0f} s: {accuracy:.1%} right ({low:.0%} to {high:.0%}), evaluated in"
            f" {found['evaluation_s']:.0f} s"
        )

    def _evaluate(self, directory: str, system: str, step: int) -> dict[str, Any]:
        # each evaluation has noise of its own, so that smoothing a curve averages it out
        seed = keyed_seed("accuracy", self.seed, system, step) % 2**31
        found = self.session.ask("evaluator", "evaluate", model=directory, seed=seed)
        return {
            "right": found["right"],
            "evaluation_s": round(found["seconds"], 1),
            "answers": found["responses"],
        }

    def _open(self) -> dict[str, Any]:
        """Start the systems; what ours answered, which reads the configuration even where it does
        not train.
        """
        for system in self.legs:
            if system != "trl":
                self.session.answers[system] = self._open_ours(system)
        opened = next(
            (self.session.answers[system] for system in self.legs if system != "trl"), None
        )
        if opened is None:
            opened = self._open_ours("ours")
        self.session.answers["ours"] = opened
        if "trl" in self.legs:
            reader = next(name for name in ("ours", "all_groups") if name in self.session.workers)
            self._open_trl(opened, reader)
            if reader not in self.legs:
                self.session.close(reader)
        return opened

    def _open_ours(self, system: str) -> dict[str, Any]:
        settings = self.session.settings
        overrides = [
            f"model.dtype={settings.dtype}",
            f"train.seed={self.seed}",
            f"train.threads={settings.threads}",
            f"train.device={settings.device}",
            "log.rollouts=none",
            *self.design.overrides,
            *OVERRIDES[system],
        ]
        self.session.start(system, "ours")
        return self.session.ask(system, "open", config=CONFIG, overrides=overrides)

    def _open_trl(self, ours: dict[str, Any], reader: str) -> None:
        session = self.session
        config = ours["config"]
        settings = session.settings
        # a row a group: as many problems as the budget could take with responses of one token, in
        # our run's order
        group = config["rollout"]["group_size"]
        prompts = config["rollout"]["prompts_per_step"]
        count = round(GO_ON * self.design.token_budget) // group + prompts
        rows = session.ask(reader, "rows", count=count)["rows"]
        trl = {
            "model": ours["directory"],
            "dtype": ours["dtype"],
            "device": settings.device,
            "threads": settings.threads,
            "rows": [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows],
            "prompts": prompts,
            "group": group,
            "max_new_tokens": config["rollout"]["max_response_tokens"],
            "forced": False,
            "updates": prompts // config["train"]["minibatch_groups"],
            "lr": config["optim"]["lr"],
            "warmup_steps": config["optim"]["warmup_steps"],
            "buffer_tokens": config["overlong"]["buffer_tokens"],
            "verifier": config["reward"]["verifier"],
            "options": config["reward"]["options"],
            "seed": self.seed,
        }
        microbatch = best_microbatch(session, trl)
        session.start("trl", "trl")
        answer = session.ask("trl", "open", settings=trl | {"microbatch": microbatch})
        session.answers["trl"] = answer | {"microbatch": microbatch}

    def _open_evaluator(self, opened: dict[str, Any], problems: list[dict[str, Any]]) -> None:
        config = opened["config"]
        settings = self.session.settings
        limit = config["eval"]["max_response_tokens"] or config["rollout"]["max_response_tokens"]
        sampling = {"temperature": config["eval"]["temperature"], "top_p": config["eval"]["top_p"]}
        self.session.start("evaluator", "evaluator")
        self.session.answers["evaluator"] = self.session.ask(
            "evaluator",
            "open",
            problems=problems,
            samples=SAMPLES,
            sampling=sampling | {"max_new_tokens": limit},
            verifier=config["reward"]["verifier"],
            options=config["reward"]["options"],
            dtype=opened["dtype"],
            device=settings.device,
            threads=settings.threads,
        )

    def _made_with(self, system: str) -> dict[str, Any]:
        """The provenance of a race: commit, versions, settings, machine, duration."""
        answers = self.session.answers
        versions = {name: answers[name]["versions"] for name in (system, "evaluator")}
        return {
            "commit": describe_commit(ROOT),
            "date": today(),
            "versions": versions,
            "dtype": answers["ours"]["dtype"],
            "together_with": [name for name in self.legs if name != system],
            "race_s": round(time.monotonic() - self.started, 1),
        } | ({"microbatch": answers["trl"]["microbatch"]} if system == "trl" else {})
