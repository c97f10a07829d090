"""Options of a run: definition, parsing and error messages. Imports no torch."""

from dapo.config.load import (
    build_config,
    dump_config,
    find_config,
    load_config,
    parse_data_argument,
    parse_overrides,
)
from dapo.config.messages import SECTIONS
from dapo.config.model_options import DataConfig, DataSpec, LoraConfig, ModelConfig
from dapo.config.options import PRESETS, Config, GpuShares
from dapo.config.reward_options import RewardConfig
from dapo.config.rollout_options import RolloutConfig
from dapo.config.training_options import (
    AdvantageConfig,
    LossConfig,
    OptimConfig,
    ReferenceConfig,
    ReferenceServerConfig,
)

__all__ = [
    "PRESETS",
    "SECTIONS",
    "AdvantageConfig",
    "Config",
    "DataConfig",
    "DataSpec",
    "GpuShares",
    "LoraConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "ReferenceConfig",
    "ReferenceServerConfig",
    "RewardConfig",
    "RolloutConfig",
    "build_config",
    "dump_config",
    "find_config",
    "load_config",
    "parse_data_argument",
    "parse_overrides",
]
