"""One process for each measured system, in that system's own virtual environment."""
