"""The native engine: continuous batching around the unmodified transformers model, in process."""
