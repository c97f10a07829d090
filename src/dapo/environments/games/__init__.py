"""Environments that need no other package."""
