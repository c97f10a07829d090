"""Experiments: variants of a configuration, trained with several seeds and compared."""
