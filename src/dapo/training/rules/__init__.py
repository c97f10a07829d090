"""Rules over a run's metrics that find problems, for `dapo doctor` and for warnings in training.

Imports no torch.
"""
