"""One file per verifier, and what they share."""
