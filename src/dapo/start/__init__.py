"""Starts a run in four steps, each called once: check, resolve, read, build."""
