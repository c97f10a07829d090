"""Where problems come from: files, the hub, generated tasks."""
