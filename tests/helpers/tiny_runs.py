"""Whole runs of the tiny model for tests, and what of them must not depend on the machine or the moment."""

import json
from pathlib import Path
from typing import Any

from dapo.config import Config, load_config
from helpers.paths import CONFIGS


def tiny(*overrides: str) -> Config:
    return load_config(CONFIGS / "tiny.yaml", ["train.threads=1", *overrides])


def metrics(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def logged_names(run: Path) -> set[str]:
    """Every name in the metrics of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {name for row in rows for name in row} - {"step"}


def contents(run: Path, *, checkpoints: str = "*") -> dict[str, Any]:
    """Metrics, rollouts, evaluations, and the checkpoints whose name matches; with all of them, the history too."""
    files = {
        path.relative_to(run).as_posix(): path.read_bytes()
        for pattern in (
            "rollouts/*",
            "eval/*",
            f"checkpoints/{checkpoints}/*",
            *(["problems.json"] if checkpoints == "*" else []),
        )
        for path in run.glob(pattern)
        # the wall time of a run stands in its state, and so in the checkpoint's list of checksums
        if path.is_file() and path.name not in ("state.json", "manifest.json")
    }
    states = {
        path.parent.name: json.loads(path.read_text()) for path in run.glob(f"checkpoints/{checkpoints}/state.json")
    }
    for state in states.values():
        state["train_state"].pop("wall_s")
    return {"files": files, "states": states, "metrics": metrics(run)}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """What is not equal, by name: two runs printed side by side would fill screens."""
    names = [
        (kind, name) for kind in ("files", "states") for name in sorted(found[kind].keys() | expected[kind].keys())
    ]
    differing = [name for kind, name in names if found[kind].get(name) != expected[kind].get(name)]
    if found["metrics"] != expected["metrics"]:
        differing.append("metrics.jsonl")
    return differing


def saved_steps(run: Path) -> list[str]:
    """The names of a run's checkpoints, and whatever else lies there."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())
