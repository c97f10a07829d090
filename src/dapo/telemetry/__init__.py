"""What a run tells: metrics, sinks, rollout tables, curves."""
