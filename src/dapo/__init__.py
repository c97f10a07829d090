"""DAPO: reinforcement learning that makes language models reason better (arXiv 2503.14476).

The Python interface: `train`, `resume` and `load`, the `Run` that they return, `Stop` and `STOP` to
end a run from a callback, `session` for your own loop, `check`, `check_reward`, `play` and
`compare` for a look before and after, and the errors that they raise. Each is imported on first
use, so that `import dapo` is immediate.

Example:
    >>> import dapo
    >>> run = dapo.train("tiny-random", data="builtin:sums", reward="dapo.rewards.examples:has_digit", steps=1,
    ...                  prompts_per_step=2, group_size=4, max_response_tokens=8)
    set to fit: minibatch_groups=2, buffer_tokens=1, warmup_steps=0
    writing to ...
    >>> run.status
    'finished'
"""

import sys

# type checkers assume true; importing typing here could find a typing.py of the user
TYPE_CHECKING = False

if sys.platform == "win32":
    raise ImportError(
        "dapo does not run on Windows; it runs in the Windows Subsystem for Linux (WSL): wsl"
        " --install"
    )

__version__ = "0.1.0"

if TYPE_CHECKING:
    from types import FrameType

    from dapo.api.checks import check, check_reward, compare
    from dapo.api.entry_points import load, resume, train
    from dapo.api.play import play
    from dapo.api.run import Run, TrainingInterrupted
    from dapo.api.session import session
    from dapo.core.errors import ConfigError, DapoError, DataError, RewardError
    from dapo.training.signals import STOP, Stop

_HOMES = {
    "Run": "dapo.api.run",
    "TrainingInterrupted": "dapo.api.run",
    "check": "dapo.api.checks",
    "check_reward": "dapo.api.checks",
    "compare": "dapo.api.checks",
    "load": "dapo.api.entry_points",
    "play": "dapo.api.play",
    "resume": "dapo.api.entry_points",
    "session": "dapo.api.session",
    "train": "dapo.api.entry_points",
    "ConfigError": "dapo.core.errors",
    "DapoError": "dapo.core.errors",
    "DataError": "dapo.core.errors",
    "RewardError": "dapo.core.errors",
    "STOP": "dapo.training.signals",
    "Stop": "dapo.training.signals",
}
"""The module of each public name."""
_HOME_OF_ANSWERS = "dapo.api.foreign_calls"

__all__ = [
    "ConfigError",
    "DapoError",
    "DataError",
    "RewardError",
    "Run",
    "STOP",
    "Stop",
    "TrainingInterrupted",
    "__version__",
    "check",
    "check_reward",
    "compare",
    "load",
    "play",
    "resume",
    "session",
    "train",
]


def __getattr__(name: str) -> object:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(_answer(name, sys._getframe(1)))
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def _answer(name: str, frame: "FrameType") -> str:
    """Answer for a name that dapo does not have, in particular those of other libraries."""
    if not name.startswith("_"):
        from importlib import import_module

        return str(import_module(_HOME_OF_ANSWERS).foreign_attribute(name, __all__, frame))
    return f"module 'dapo' has no attribute {name!r}; it has {', '.join(__all__)}"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
