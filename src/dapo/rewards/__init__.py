"""Rewards: verifiers that judge a response's text, and the processes in which they run.

Imports no torch.
"""

from dapo.rewards.combine import CombinedVerifier, InlineJudge, Judge, build_verifier
from dapo.rewards.pool import VerifierPool
from dapo.rewards.verifier import Verifier, get_verifier

__all__ = [
    "CombinedVerifier",
    "InlineJudge",
    "Judge",
    "Verifier",
    "VerifierPool",
    "build_verifier",
    "get_verifier",
]
