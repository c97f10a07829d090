"""Every error a user can meet. Messages name the expected input, the actual one, and the remedy."""

from collections.abc import Mapping

EXIT_CODES: Mapping[str, str] = {
    "0": "it is done, and well",
    "1": "the run or the evaluation failed, or what was examined is bad",
    "2": "the input is wrong, or what was checked cannot work",
    "128 + n": "signal n stopped it, its state saved",
}


class DapoError(Exception):
    """The base of all errors that are written for people; the command line prints them without a traceback."""

    exit_code = 1


class ConfigError(DapoError):
    """The command line or the configuration is wrong; nothing has been written."""

    exit_code = 2


class DataError(DapoError):
    """A data source is missing, empty or malformed; names the file and line."""

    exit_code = 2


class RewardError(DapoError):
    """A verifier does not exist, cannot be imported or cannot be used."""

    exit_code = 2


class VerifierFailed(RewardError):
    """Too many responses have no verdict: the verifier or the references are broken. The run's state is saved."""

    exit_code = 1


class ShortfallError(DapoError):
    """Dynamic sampling reached its bound without enough informative groups; names the causes with counts."""


class CheckpointError(DapoError):
    """A run directory or checkpoint cannot be used as requested."""

    exit_code = 2


class EngineError(DapoError):
    """A rollout engine broke its contract or cannot serve this model."""


class OutOfMemory(DapoError):
    """A GPU had no memory left for the model or a part of a step; names it, and the options that make it smaller."""


class LossFailed(DapoError):
    """The user's own loss raised, or returned something that is no loss; the state of the last step is saved."""


class NumericsError(DapoError):
    """The numbers of training went wrong: updates skipped in a row, a collapsed policy, weights that are not finite."""


class LaunchError(DapoError):
    """Processes that a run needs could not be started: names the requested and the available resources."""


class WorkerDied(DapoError):
    """A process of the run is gone or does not answer; names it and its last output."""


class TrainerLost(WorkerDied):
    """A trainer rank is gone or hangs; the other ranks cannot continue. The run can resume from its checkpoint."""


class WorkerFault(DapoError):
    """Code in another process of the run raised something unforeseen; its log has the traceback."""
