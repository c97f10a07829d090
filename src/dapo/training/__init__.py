"""Algorithm 1 and what it needs: sampling, samples, metrics, state, checkpoints."""
