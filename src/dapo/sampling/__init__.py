"""Sampling of training batches: queue, batch, continuous; Eq. 11, and what belongs to a batch."""
