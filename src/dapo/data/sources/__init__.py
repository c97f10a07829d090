"""Data sources: files, the Hugging Face hub, generated tasks."""
