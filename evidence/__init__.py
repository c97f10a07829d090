"""The experiments behind docs/evidence.md: a base model, configurations, and what their runs gave."""
