"""Sends weights from a trainer's GPUs to vLLM's processes, in the format of vLLM's own transfer
engines.
"""

from .sender import TransferFailed, WeightSender
from .transfer import TIMEOUT_S, Engine, Ranks, WeightTransfer

__all__ = ["TIMEOUT_S", "Engine", "Ranks", "TransferFailed", "WeightSender", "WeightTransfer"]
