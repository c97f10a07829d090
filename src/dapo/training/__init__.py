"""Algorithm 1: sampling, samples, metrics, state, checkpoints."""
