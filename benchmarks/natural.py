"""The part `natural`: a sharpened policy whose responses end by themselves, in every system.

Each system samples its own responses to the same prompts, as many of them and with the same limit,
so figures are per second: tokens, and responses. Every response trains in every system (the reward
is that of the forced steps), so that leaving out groups without a signal is no part of the
comparison.
"""

from typing import Any

from benchmarks.compare import STEPPING, Work, open_systems
from benchmarks.sharpened import sharpened_policy
from benchmarks.worker_session import Session, rotated

SHAPE = {"prompts": 8, "group": 16, "tokens": 20}
"""The quickstart's limit of tokens."""
SHAPE_QUICK = {"prompts": 2, "group": 4, "tokens": 8}
PHASES = ("generation", "update", "step", "evaluation")
EVALUATING = ("ours", "transformers", "vllm")
"""TRL's generation is transformers'."""


def measure_natural(session: Session) -> dict[str, dict[str, Any]]:
    """Generation, update, whole step and evaluation, round by round."""
    quick = session.settings.quick
    policy, origin = (None, {}) if quick else sharpened_policy(session.log)
    work = Work(
        **(SHAPE_QUICK if quick else SHAPE), model=str(policy) if policy else None, forced=False
    )
    rows, skipped = open_systems(session, ["ours", "trl", "transformers", "vllm"], work)
    prompts = [row["prompt_ids"] for row in rows]
    held_out = session.ask("ours", "held_out")
    rounds = [
        _round(session, work, prompts, held_out, i) for i in range(-1, session.settings.rounds)
    ][1:]
    return {
        "natural": {
            "figures": figures(rounds),
            "skipped": skipped,
            "policy": origin,
            "work": {
                **(SHAPE_QUICK if quick else SHAPE),
                "prompt_tokens": sum(map(len, prompts)),
                "held_out": len(held_out["rows"]),
                "held_out_prompt_tokens": sum(len(row["prompt_ids"]) for row in held_out["rows"]),
            },
            "rounds": rounds,
            "parameters": session.answers["ours"]["parameters"],
            "versions": {
                key: answer["versions"]
                for key, answer in session.answers.items()
                if "versions" in answer
            },
            "dtype": session.answers["ours"]["dtype"],
            "trl_microbatch": session.answers.get("trl", {}).get("microbatch"),
        }
    }


def _round(
    session: Session, work: Work, prompts: list[list[int]], held_out: dict[str, Any], index: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Seconds, tokens and responses of each phase of each system; round -1 warms up."""
    measured = {}
    for name in rotated([name for name in session.workers if name != "matmul"], index):
        found = _step(session, name, work) if name in STEPPING else {}
        sampling = {"stop_ids": session.answers["ours"]["stop_ids"]}
        if name not in STEPPING:
            answer = session.ask(
                name, "generate", prompts=prompts, group=work.group, tokens=work.tokens, **sampling
            )
            found["generation"] = answer
        if name == "ours":
            found["evaluation"] = session.ask(name, "evaluate")
        elif name in EVALUATING:
            sampling |= {"temperature": held_out["temperature"], "top_p": held_out["top_p"]}
            asked = [row["prompt_ids"] for row in held_out["rows"]]
            limit = held_out["max_new_tokens"]
            found["evaluation"] = session.ask(
                name, "generate", prompts=asked, group=1, tokens=limit, **sampling
            )
        require_responses(name, found, work.responses, len(held_out["rows"]))
        measured[name] = found
        summary = ", ".join(f"{phase} {values['seconds']:.2f} s" for phase, values in found.items())
        session.log(f"  {'warm-up' if index < 0 else f'round {index + 1}'}: {name}: {summary}")
    return measured


def _step(session: Session, name: str, work: Work) -> dict[str, dict[str, float]]:
    """The phases of a step. Tokens of the update are those that it trains."""
    step = session.ask(name, "step")
    trained = step["trained_tokens"]
    tokens = {"generation": step["generated_tokens"], "update": trained, "step": trained}
    return {
        phase: {"seconds": step[f"{phase}_s"], "tokens": count, "responses": work.responses}
        for phase, count in tokens.items()
    }


def require_responses(
    name: str, found: dict[str, dict[str, float]], in_step: int, in_evaluation: int
) -> None:
    """Raise ValueError where a system did not answer as often as asked, or trained fewer tokens
    than it sampled.
    """
    for phase, values in found.items():
        expected = in_evaluation if phase == "evaluation" else in_step
        if values["responses"] != expected:
            raise ValueError(
                f"{name}: {phase}: {values['responses']} responses where {expected} were asked for"
            )
    if "update" in found and found["update"]["tokens"] != found["generation"]["tokens"]:
        raise ValueError(
            f"{name} trained {found['update']['tokens']} tokens of {found['generation']['tokens']}"
            " that it sampled: the figures cannot be compared"
        )


def figures(rounds: list[dict[str, dict[str, dict[str, float]]]]) -> list[dict[str, Any]]:
    """Tokens and responses per second of every phase, and the mean lengths that make them
    comparable.
    """
    found = []
    for phase in PHASES:
        systems = [
            name
            for name in ("ours", "trl", "transformers", "vllm")
            if phase in rounds[0].get(name, {})
        ]
        for unit, counted in (("tokens/s", "tokens"), ("responses/s", "responses")):
            name = f"{phase}, natural lengths"
            for system in systems:
                phases = [measured[system][phase] for measured in rounds]
                values = [each[counted] / each["seconds"] for each in phases]
                found.append(
                    {
                        "name": name,
                        "system": system,
                        "unit": unit,
                        "better": "higher",
                        "values": values,
                    }
                )
        if phase in ("generation", "evaluation"):
            for system in systems:
                phases = [measured[system][phase] for measured in rounds]
                lengths = [each["tokens"] / each["responses"] for each in phases]
                name = f"mean response of {'a step' if phase == 'generation' else 'an evaluation'}"
                found.append(
                    {
                        "name": name,
                        "system": system,
                        "unit": "tokens",
                        "better": "neither",
                        "values": lengths,
                    }
                )
    return found
