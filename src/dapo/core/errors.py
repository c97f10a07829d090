"""Every error for users. Messages give the expected input, the actual one and the remedy."""

from collections.abc import Mapping
from typing import Any

from dapo.core.terminal import printable
from dapo.core.text import bounded

EXIT_CODES: Mapping[str, str] = {
    "0": "success",
    "1": "the run, the evaluation or an upload failed, or a check found a fault",
    "2": "the input is wrong, or the checked configuration cannot run",
    "128 + n": "signal n stopped the command after it saved its state",
}


class DapoError(Exception):
    """The base of all errors for users; the command line prints them without a traceback.

    Unsafe characters are escaped and long values cut: the text may quote models, data, user code or
    a stranger's files.
    """

    exit_code = 1
    run: Any = None
    """The `dapo.Run` that the error has ended; None if it has ended no run of this process."""

    def __init__(self, *args: object) -> None:
        safe_args = [printable(bounded(arg)) if isinstance(arg, str) else arg for arg in args]
        super().__init__(*safe_args)

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows, as the command line does: no frames."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(DapoError):
    """The command line or the configuration is wrong; nothing has been written."""

    exit_code = 2


class ConversionFault(DapoError):
    """A converted configuration cannot be trained as it is; its text has been printed."""

    def __init__(self, text: str, exit_code: int = 1) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class DataError(DapoError):
    """A data source is missing, empty or malformed; the message gives file and line."""

    exit_code = 2


class RewardError(DapoError):
    """A verifier does not exist, cannot be imported or cannot be used."""

    exit_code = 2


class VerifierFailed(RewardError):
    """Too many responses have no verdict: the verifier or the references are broken.

    The run's state is saved.
    """

    exit_code = 1


class EnvironmentFailed(VerifierFailed):
    """Too many episodes have no verdict, because their environment fails."""


class AgentFailed(VerifierFailed):
    """Too many episodes have no verdict, because their agent fails."""


class ShortfallError(DapoError):
    """Dynamic sampling reached its bound without enough informative groups; causes are counted."""


class CheckpointError(DapoError):
    """A run directory or checkpoint cannot be used as requested."""

    exit_code = 2


class PushFailed(DapoError):
    """The Hugging Face hub did not take a model; its directory, if it was written, stays."""


class EngineError(DapoError):
    """A rollout engine broke its contract or cannot serve this model."""


class OutOfMemory(DapoError):
    """A GPU ran out of memory; the message gives the allocation and the options that reduce it."""


class LossFailed(DapoError):
    """A custom loss raised an exception or returned an invalid value; the last step is saved."""


class NumericsError(DapoError):
    """Training failed numerically: skipped updates, a collapsed policy or weights not finite."""


class LaunchError(DapoError):
    """Processes of a run could not start, for lack of the resources in the message."""


class WorkerDied(DapoError):
    """A process of the run ended or does not answer; the message has its last output."""


class TrainerLost(WorkerDied):
    """A trainer rank ended or hangs, which stops the others; the run can resume."""


class WorkerFault(DapoError):
    """Code in another process of the run raised an unexpected exception, as its log shows."""
