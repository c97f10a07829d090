"""Rollout engines, which sample responses."""
