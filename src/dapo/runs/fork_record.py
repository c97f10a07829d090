"""What a fork's manifest records of the run that it was forked from. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dapo.core.files import read_json
from dapo.runs.directory import RunDirectory

MANIFEST_KEY = "fork"


@dataclass(frozen=True)
class Fork:
    """Where a run was forked from, as its manifest records it.

    Example: Fork("/runs/x", 40, None, "6e1b0c52", {"optim.lr": (1e-06, 2e-06)})
    """

    parent: str
    """The parent's run directory."""
    step: int
    """Up to this step the run is its parent."""
    branch: int | None
    """Of several branches with seeds of their own the number, from 1; None: the parent's seed."""
    parent_config_crc32: str
    """Of the parent's config.yaml when the fork was made."""
    changed: Mapping[str, tuple[Any, Any]]
    """The options that were changed, each with the parent's value and the run's own."""

    @classmethod
    def of(cls, run: RunDirectory) -> "Fork | None":
        """What a run's manifest says; None for a run that is no fork, or whose manifest is damaged."""
        try:
            return cls.of_record(read_json(run.manifest)[MANIFEST_KEY])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @classmethod
    def of_record(cls, found: Any) -> "Fork | None":
        """What `asdict` of a fork was made of, before or after it was JSON; None for anything else."""
        try:
            changed = {str(name): (old, new) for name, (old, new) in found["changed"].items()}
            return cls(
                str(found["parent"]), int(found["step"]), found["branch"], str(found["parent_config_crc32"]), changed
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def describe(self) -> str:
        """For a person: `step 40 of runs/x, branch 2; train.seed 0 -> 7`."""
        branch = "" if self.branch is None else f", branch {self.branch}"
        changes = ", ".join(f"{name} {_show(old)} -> {_show(new)}" for name, (old, new) in self.changed.items())
        return f"step {self.step} of {self.parent}{branch}; {changes or 'no option changed'}"


def _show(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
