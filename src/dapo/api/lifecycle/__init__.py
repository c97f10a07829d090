"""Starts, continues, evaluates and exports runs, for the Python interface and for the commands."""
