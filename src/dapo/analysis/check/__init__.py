"""The facts of a configuration before it runs: memory, disk, data and what has no effect."""
