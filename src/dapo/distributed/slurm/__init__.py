"""Runs on a Slurm allocation."""
