"""What training holds in memory of a model: weights, gradients, optimiser. Counted, without loading any weight."""

from dataclasses import dataclass

from dapo.config import ModelConfig
from dapo.policy.lora import adapted_layers, num_adapter_parameters
from dapo.policy.model import load_meta_model

WEIGHT_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
NUM_MOMENTS = 2


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters."""

    model: int
    adapters: int = 0
    """0: all weights of the model train."""
    adapted_layers: int = 0

    @property
    def trained(self) -> int:
        """What the optimiser updates."""
        return self.adapters or self.model

    def state_bytes(self, dtype: str) -> int:
        """Of the weights in `dtype` and, for what trains, its master weights, gradients and AdamW's moments.

        Activations, the engine's copy of the weights and the reference of the KL term are not in it.
        """
        weight, master = WEIGHT_BYTES[dtype], _master_bytes(dtype)
        rounded = weight if weight < master else 0  # otherwise the weights are the masters themselves
        frozen = self.model * weight if self.adapters else 0
        return frozen + self.trained * (rounded + master * (2 + NUM_MOMENTS))

    def checkpoint_bytes(self, dtype: str) -> int:
        """Of the master weights and moments in a checkpoint."""
        return self.trained * _master_bytes(dtype) * (1 + NUM_MOMENTS)


def count_parameters(config: ModelConfig) -> ParameterCounts:
    """Counted on the model's layers. Raises ConfigError where the model is not on this machine, or for bad targets."""
    model = load_meta_model(config.name, trust_remote_code=config.trust_remote_code, local_files_only=True)
    total = sum(parameter.numel() for parameter in model.parameters())
    if config.lora is None:
        return ParameterCounts(total)
    layers = adapted_layers(model, config.lora.targets)
    return ParameterCounts(total, num_adapter_parameters(model, layers, config.lora.rank), len(layers))


def _master_bytes(dtype: str) -> int:
    return max(WEIGHT_BYTES[dtype], WEIGHT_BYTES["float32"])
