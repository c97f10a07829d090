"""One file per verifier, and their shared code."""
