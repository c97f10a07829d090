"""What is wrong with a run, by rules over its metrics: `dapo doctor`, and warnings while it trains.

Imports no torch.
"""
