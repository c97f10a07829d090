"""The paper as pure functions: no I/O, no configuration objects."""
