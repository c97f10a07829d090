"""The native engine: continuous batching around a transformers model, in process."""
