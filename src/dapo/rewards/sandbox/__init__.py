"""Confines and runs the programs that a model wrote."""
