"""The trained model: loading, packing, log-probabilities, updates, checkpoints."""
