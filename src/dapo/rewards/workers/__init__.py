"""Runs verifiers in worker processes with time and memory limits."""
