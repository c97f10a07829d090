"""Rollout engines: what samples responses."""
