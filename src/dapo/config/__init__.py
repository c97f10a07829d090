"""Every option of a run, how a configuration is read, and what is said where it is wrong. Imports no torch."""

from dapo.config.load import (
    PRESETS,
    SECTIONS,
    build_config,
    dump_config,
    load_config,
    parse_data_argument,
    parse_overrides,
)
from dapo.config.options import (
    AdvantageConfig,
    Config,
    DataConfig,
    DataSpec,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimConfig,
    ScoreThresholdsConfig,
    secret_names,
)

__all__ = [
    "PRESETS",
    "SECTIONS",
    "AdvantageConfig",
    "Config",
    "DataConfig",
    "DataSpec",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "ScoreThresholdsConfig",
    "build_config",
    "dump_config",
    "load_config",
    "parse_data_argument",
    "parse_overrides",
    "secret_names",
]
