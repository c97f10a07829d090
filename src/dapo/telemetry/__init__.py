"""Telemetry: metrics, their sinks, the console, curves, rollout tables and the profiler."""
