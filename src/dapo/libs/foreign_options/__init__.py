"""Reads the options that scripts of other trainers set, and translates them by tables; no script is
run.

Example:
    >>> from dapo.libs.foreign_options import read_shell
    >>> read_shell("python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=$((4 * 4))", {})[0].options
    {'actor_rollout_ref.rollout.n': 16}
"""

from .formulas import Unknown, compute
from .reading import Reading
from .scripts import read_script
from .shell import read_shell
from .tables import (
    Algorithm,
    Counterpart,
    Table,
    Translation,
    leaves_of,
    shown_value,
    translate_value,
)

__all__ = [
    "Algorithm",
    "Counterpart",
    "Reading",
    "Table",
    "Translation",
    "Unknown",
    "compute",
    "leaves_of",
    "read_script",
    "read_shell",
    "shown_value",
    "translate_value",
]
