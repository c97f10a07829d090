"""The part `schedule`: a step of async against a synchronous one, on the same two cores and the
same work.

Lengths are forced and dynamic sampling keeps every second group, so that generation and update cost
about the same and every system generates and trains the same tokens, whatever its weights are.
"""

from statistics import median
from typing import Any

from benchmarks.compare import CONFIG, Work, step_options
from benchmarks.worker_session import Session, rotated

SHAPE = {"prompts": 4, "group": 8, "tokens": 32}
SHAPE_QUICK = {"prompts": 2, "group": 4, "tokens": 8}

_ASYNC = ("schedule=async", "train.threads=1", "rollout.engines=1")
ONE_STEP_OFF = "async, max_staleness=1: trainer and engine process, 1 thread each"
SYSTEMS = {
    ONE_STEP_OFF: (*_ASYNC, "max_staleness=1"),
    "async, max_staleness=2: trainer and engine process, 1 thread each": (
        *_ASYNC,
        "max_staleness=2",
    ),
    "sync: one process, 2 threads": ("train.threads=2",),
    "sync: trainer and engine process, 1 thread each": ("train.threads=1", "rollout.engines=1"),
    "sync: trainer and engine process, 2 threads each": ("train.threads=2", "rollout.engines=1"),
}
"""The last has both cores for whichever of the two is at work."""

UNCOUNTED = 2
WORK = ("generated_tokens", "trained_tokens")
SECONDS = ("generation_s", "update_s", "load_weights_s", "wait_s")


def measure_schedule(session: Session) -> dict[str, dict[str, Any]]:
    """Whole steps in alternation, each system in processes of its own."""
    settings = session.settings
    shape = SHAPE_QUICK if settings.quick else SHAPE
    names = {system: f"schedule-{i}" for i, system in enumerate(SYSTEMS)}
    overrides = [
        *step_options(session, Work(**shape)),
        "dynamic_sampling.enabled=true",
        "dynamic_sampling.filter=benchmarks.reward:every_second_group",
        f"rollout.native.slots={2 * shape['prompts'] * shape['group']}",
        f"train.minibatch_groups={shape['prompts']}",
        "train.num_steps=1000000",
    ]
    opened = {}
    for system, name in names.items():
        session.log(f"loading {system}")
        session.start(name, "ours")
        config = {
            "config": CONFIG,
            "overrides": [*overrides, *SYSTEMS[system]],
            "forced_lengths": True,
        }
        opened[system] = session.ask(name, "open", **config)
    # these are not counted: the keep rate is not known yet, and nothing has been sampled ahead
    rounds = [_round(session, names, i) for i in range(-UNCOUNTED, settings.rounds)][UNCOUNTED:]
    _require_equal_work(rounds)
    unit = {"name": f"step, {_format_shape(shape)}", "unit": "s", "better": "lower"}
    labels = {system: "ours" if system == ONE_STEP_OFF else system for system in SYSTEMS}
    return {
        "schedule": {
            "figures": [
                unit
                | {
                    "system": label,
                    "values": [answers[system]["step_s"] for answers in rounds],
                }
                for system, label in labels.items()
            ],
            "dtype": opened[ONE_STEP_OFF]["dtype"],
            "ours": ONE_STEP_OFF,
            "work": {key: rounds[-1][ONE_STEP_OFF][key] for key in WORK},
            "median_seconds": {
                system: {key: median(answers[system][key] for answers in rounds) for key in SECONDS}
                for system in SYSTEMS
            },
        }
    }


def _round(session: Session, names: dict[str, str], index: int) -> dict[str, dict[str, Any]]:
    """A step of each."""
    answers = {
        system: session.ask(names[system], "step") for system in rotated(list(names), max(index, 0))
    }
    for system, answer in answers.items():
        seconds = ", ".join(f"{key.removesuffix('_s')} {answer[key]:.2f}" for key in SECONDS)
        session.log(f"  {system}: step {answer['step_s']:.2f} s ({seconds})")
    return answers


def _require_equal_work(rounds: list[dict[str, dict[str, Any]]]) -> None:
    """Raise ValueError unless all systems trained the same tokens and generated as many, within
    those of a step.

    A group counts in the step that decides it, and with max_staleness=2 groups are begun a batch
    before.
    """
    work = {
        system: tuple(sum(each[system][key] for each in rounds) for key in WORK)
        for system in SYSTEMS
    }
    generated, trained = zip(*work.values(), strict=True)
    if len(set(trained)) > 1 or max(generated) - min(generated) > min(generated) / len(rounds):
        raise ValueError(
            f"the systems did not do the same work (tokens generated, tokens trained): {work}"
        )


def _format_shape(shape: dict[str, int]) -> str:
    return (
        f"{shape['prompts']} groups of {shape['group']} x {shape['tokens']} tokens trained of twice"
        " as many"
    )
