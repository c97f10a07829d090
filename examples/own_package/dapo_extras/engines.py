"""The row of the engine `counted`, which is read without importing torch."""

from dapo.config.engines import EngineKind

COUNTED = EngineKind(open="dapo_extras.counted_engine:open_counted", rounds_as_trainer=True)
