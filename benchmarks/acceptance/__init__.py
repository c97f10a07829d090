"""The checks of `make gpu-acceptance`, by what they look at; `benchmarks.gpu_acceptance` runs
them.
"""
