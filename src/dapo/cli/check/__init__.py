"""`dapo check`: what a configuration would run, what it needs, and what is wrong with it."""
