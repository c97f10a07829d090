"""The `dapo` command."""
