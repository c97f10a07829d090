"""The parts `gsm8k_update` and `gsm8k_evaluation`: worked solutions and test problems of GSM8K, at
their own lengths.

An update is one of configs/gsm8k_laptop.yaml's first stage, ours and TRL's SFTTrainer on the same
token ids. An evaluation has the first test problems, ours and vLLM's, each with responses of its
own.
"""

from pathlib import Path
from typing import Any

from benchmarks.compare import open_plain
from benchmarks.compute_limits import GENERATE_FLOP, UPDATE_FLOP
from benchmarks.natural import require_responses
from benchmarks.supervised import LR, open_trl, update_round
from benchmarks.supervised import figures as update_figures
from benchmarks.worker_session import INSTALL, Session, is_installed, rotated
from dapo.config import dump_config
from dapo.config.load import find_config, read_options
from dapo.config.stages import build_stages

UPDATE = "gsm8k_update"
EVALUATION = "gsm8k_evaluation"
CONFIG = "configs/gsm8k_laptop.yaml"
STAGE = "solutions"
PROBLEMS = 132
"""A tenth of the test set."""
SAMPLES = 4
QUICK_PROBLEMS = 4
QUICK_PER_UPDATE = 4


def measure_update(session: Session) -> dict[str, dict[str, Any]]:
    """Trained tokens per second of whole updates on worked solutions, and the peak memory.

    Raises ValueError without `settings.gsm8k`, the folder with train.jsonl and test.jsonl.
    """
    settings = session.settings
    _open_ours(session)
    per_update = session.answers["ours"]["config"]["train"]["minibatch_groups"]
    count = per_update * (settings.rounds + 1)
    samples = session.ask("ours", "demonstrations", count=count)["samples"]
    systems = ["ours"]
    skipped = []
    if is_installed("trl"):
        open_trl(session, samples, per_update)
        systems.append("trl")
    else:
        skipped.append({"system": "trl", "reason": f"not installed; `{INSTALL}` installs it"})
    update_round(session, systems, -1)
    rounds = []
    gflops = []
    for index in range(settings.rounds):
        gflops.append(session.matmul_gflops())
        rounds.append(update_round(session, systems, index))
    memory = {name: session.ask(name, "memory")["rss_bytes"] / 2**30 for name in systems}
    figures = update_figures(rounds, memory, per_update)
    trained = sum(len(each["response_ids"]) for each in samples)
    fed = trained + sum(len(each["prompt_ids"]) for each in samples)
    for figure in figures:
        if figure["unit"] == "tokens/s":
            # the questions are fed, too, and take as much as the tokens that are trained
            figure["flop_per_parameter"] = UPDATE_FLOP * fed / trained
    return _part(
        session,
        UPDATE,
        figures=figures,
        skipped=skipped,
        gflops=gflops,
        rounds=rounds,
        work={"tokens_per_update": fed / (settings.rounds + 1)},
    )


def measure_evaluation(session: Session) -> dict[str, dict[str, Any]]:
    """Tokens and responses per second of an evaluation, ours with its verdicts.

    Raises ValueError without `settings.gsm8k`, the folder with train.jsonl and test.jsonl.
    """
    _open_ours(session)
    systems = ["ours"]
    skipped = []
    if is_installed("vllm"):
        session.log("loading vllm")
        session.answers["vllm"] = open_plain(session, "vllm")
        systems.append("vllm")
    else:
        skipped.append({"system": "vllm", "reason": f"not installed; `{INSTALL}` installs it"})
    held_out = session.ask("ours", "held_out")
    rounds = []
    gflops = []
    for index in range(session.settings.rounds):
        gflops.append(session.matmul_gflops())
        rounds.append(_evaluation_round(session, systems, held_out, index))
    return _part(
        session,
        EVALUATION,
        figures=evaluation_figures(rounds),
        skipped=skipped,
        gflops=gflops,
        rounds=rounds,
        work={"held_out": len(held_out["rows"]), "samples": SAMPLES},
    )


def _part(session: Session, name: str, **measured: Any) -> dict[str, dict[str, Any]]:
    answers = session.answers
    versions = {
        system: answer["versions"] for system, answer in answers.items() if "versions" in answer
    }
    return {
        name: measured
        | {
            "parameters": answers["ours"]["parameters"],
            "versions": versions,
            "dtype": session.dtype,
        }
    }


def _open_ours(session: Session) -> None:
    """Start ours on the stage's configuration."""
    folder = session.settings.gsm8k
    if folder is None:
        raise ValueError(f"{UPDATE} and {EVALUATION} need --gsm8k FOLDER, see --help")
    config = write_config(session, folder)
    session.start("ours", "ours")
    session.log("loading ours")
    session.answers["ours"] = session.ask("ours", "open", config=str(config), overrides=[])


def write_config(session: Session, folder: Path) -> Path:
    """Write the stage as a configuration on the files of `folder`, with the session's model."""
    settings = session.settings
    problems = QUICK_PROBLEMS if settings.quick else PROBLEMS
    overrides = [
        f"data.demonstrations.path={folder / 'train.jsonl'}",
        f"data.eval={{path: {folder / 'test.jsonl'}, size: {problems}}}",
        f"model.name={settings.model}",
        f"model.dtype={settings.dtype}",
        f"train.threads={settings.threads}",
        f"eval.samples_per_problem={SAMPLES}",
        # the rate of update_round's other system
        f"optim.lr={LR}",
        "optim.schedule=constant",
        "optim.warmup_steps=0",
    ]
    if settings.quick:
        overrides.append(f"train.minibatch_groups={QUICK_PER_UPDATE}")
    own = [f"stages.{STAGE}.{override}" for override in overrides]
    stages = build_stages(read_options(find_config(CONFIG)), own, where=CONFIG)
    path = session.folder / "gsm8k.yaml"
    path.write_text(dump_config(stages[STAGE].config), encoding="utf-8")
    return path


def _evaluation_round(
    session: Session, systems: list[str], held_out: dict[str, Any], index: int
) -> dict[str, dict[str, float]]:
    """The evaluation by every system, as often as each problem has samples."""
    found = {}
    for name in rotated(systems, index):
        if name == "ours":
            found[name] = session.ask(name, "evaluate")
        else:
            found[name] = session.ask(
                name,
                "generate",
                prompts=[row["prompt_ids"] for row in held_out["rows"]],
                group=SAMPLES,
                tokens=held_out["max_new_tokens"],
                stop_ids=session.answers["ours"]["stop_ids"],
                temperature=held_out["temperature"],
                top_p=held_out["top_p"],
            )
        asked = SAMPLES * len(held_out["rows"])
        require_responses(name, {"evaluation": found[name]}, asked, asked)
    summary = ", ".join(f"{name} {values['seconds']:.1f} s" for name, values in found.items())
    session.log(f"  round {index + 1}: evaluation: {summary}")
    return found


def evaluation_figures(rounds: list[dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """Tokens and responses per second, and the mean lengths that make them comparable."""
    units = (
        ("evaluation of GSM8K", "tokens/s", "higher", "tokens", "seconds"),
        ("evaluation of GSM8K", "responses/s", "higher", "responses", "seconds"),
        ("mean response of GSM8K's evaluation", "tokens", "neither", "tokens", "responses"),
    )
    figures: list[dict[str, Any]] = []
    for name, unit, better, counted, per in units:
        for system in sorted(rounds[0]):
            values = [measured[system][counted] / measured[system][per] for measured in rounds]
            figure: dict[str, Any] = {
                "name": name,
                "system": system,
                "unit": unit,
                "better": better,
            }
            if unit == "tokens/s":
                figure["flop_per_parameter"] = GENERATE_FLOP
            figures.append(figure | {"values": values})
    return figures
