"""Sends weights from a trainer's GPUs to vLLM's processes, in the format of vLLM's own transfer
engines.
"""

from vllm_weights.sender import TransferFailed, WeightSender
from vllm_weights.transfer import TIMEOUT_S, Engine, Ranks, WeightTransfer

__all__ = ["TIMEOUT_S", "Engine", "Ranks", "TransferFailed", "WeightSender", "WeightTransfer"]
