"""Verifiers in processes of their own, with time and memory limits."""
