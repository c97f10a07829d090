"""Measures dapo against other systems and against the machine's arithmetic limit: `make bench`."""
