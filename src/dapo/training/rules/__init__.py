"""Rules over a run's metrics that find problems, for `dapo doctor` and for warnings during training. Imports no torch."""
