"""The provenance of a checkpoint: options, versions, processor and data, on which the next steps' bytes depend."""

import json
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dapo.config import Config
from dapo.config.option_entries import flat_options
from dapo.core.files import read_json
from dapo.core.processor import cpu_model
from dapo.runs.manifest import package_versions
from dapo.types import Problem

PROVENANCE_FILE = "provenance.json"

_FREE_OPTIONS = (
    "train.num_steps",
    "train.token_budget",
    "train.save_every",
    "train.eval_every",
    "train.keep_checkpoints",
    "log.",
    "profile.",
)
"""Options, and prefixes of options, that change no step."""

_PATHS = re.compile(r"data\.(train|eval)(\.mix\.[^.]+)?(\.path)?")
"""Options that locate the data: the problems themselves are compared instead."""

_ROUNDING_OPTIONS = ("train.microbatch_tokens", "train.recompute", "rollout.native.kernels")
"""Options, and beginnings of them, that change in which pieces the same sums are computed."""

_END_OF_DECAY = "train.num_steps"
"""The option that changes no step with a constant learning rate; a decaying rate reaches its floor there."""


def provenance(config: Config, train: Sequence[Problem], held_out: Sequence[Problem]) -> dict[str, dict[str, Any]]:
    """Collect options, versions, processor and data of this process, as JSON values."""
    options = flat_options(config)
    kept = {name: value for name, value in options.items() if not name.startswith(_FREE_OPTIONS)}
    if config.decays_lr:
        kept[_END_OF_DECAY] = config.train.num_steps
    return {
        "options": kept,
        "versions": package_versions(),
        "machine": {"processor": cpu_model(), "number of threads": torch.get_num_threads()},
        "data": {"training problems": _fingerprint(train), "evaluation problems": _fingerprint(held_out)},
    }


def provenance_diff(
    checkpoint: Path, now: Mapping[str, Mapping[str, Any]], *, step: int, expected: Collection[str] = ()
) -> list[str]:
    """Describe each difference from the provenance of a step's checkpoint, one line each.

    The `expected` options, which a fork changes, are left out.
    """
    try:
        before = read_json(checkpoint / PROVENANCE_FILE)
    except FileNotFoundError:
        return []
    lines = []
    for kind, values in now.items():
        for name in sorted(values.keys() | before[kind].keys()):
            old, new = before[kind].get(name), values.get(name)
            if old != new and not _PATHS.fullmatch(name) and not (kind == "options" and name in expected):
                is_other = kind in ("options", "data") and not name.startswith(_ROUNDING_OPTIONS)
                means = "this is another run" if is_other else "results may differ by rounding"
                if name == _END_OF_DECAY:
                    if old is None or new is None:  # a constant rate, then or now, which optim.schedule says
                        continue
                    means = f"the learning rate (optim.schedule={values['optim.schedule']}) falls until there"
                lines.append(f"warning: {name} was {old} up to step {step} and is {new} now; from here on {means}")
    return lines


def _fingerprint(problems: Sequence[Problem]) -> str:
    """The number of problems, and a checksum of all of them in their order."""
    crc = 0
    for problem in problems:
        text = json.dumps([problem.id, problem.prompt, problem.answer, dict(problem.fields)], default=str)
        crc = zlib.crc32(text.encode(), crc)
    return f"{len(problems)} with checksum {crc:08x}"
