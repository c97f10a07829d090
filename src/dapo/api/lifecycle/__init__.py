"""The life of a run: start, continue, evaluate and export it, for the commands and for Python alike."""
