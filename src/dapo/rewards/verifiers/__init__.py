"""One file for each verifier."""
