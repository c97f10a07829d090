"""Experiments: several variants of a configuration, trained with several seeds, compared on
held-out problems.
"""
