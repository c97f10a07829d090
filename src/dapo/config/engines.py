"""The table of engines: the functions that open each one, and its capabilities.

The table names modules without importing them, so that it loads no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dapo.core.plugins import PluginTable


@dataclass(frozen=True)
class EngineKind:
    """A row of the table. Functions are given as `module:function`."""

    open: str | None = None
    """Opens the engine in this process: `(RolloutConfig, PreTrainedModel, gpu_processes=1)`; None:
    it needs its own.
    """
    worker_spec: str = "dapo.distributed.engine_specs:engine_spec"
    """Makes the spec of an engine process: `(Config, threads=, shares=)`.

    The default process calls `open`.
    """
    # raises ConfigError if the engine is not installed here, and imports no torch: `(Config)`
    require_package: str | None = None
    # raises ConfigError if the engine cannot start on this machine: `(Config)`
    require: str | None = None
    # resolves `auto` in the engine's section: `(section, model, dtype=, device=)`
    resolve: str | None = None
    # lowest and highest temperature, besides 0 (greedy)
    temperatures: tuple[float, float] = (0.0, float("inf"))
    # whether log-probabilities equal the trainer's up to rounding in float32
    rounds_as_trainer: bool = False
    receives_weights: bool = False  # whether weights can be sent to it from GPU to GPU
    # whether keys and values are in pages: a sequence takes memory for its tokens only
    pages_cache: bool = False
    cache_option: str | None = None
    """The option of the engine's section that bounds its cache: GiB if it is paged, else sequences.
    """

    # returns the sequences that an engine on this machine's device decodes at a time, where no
    # option of its section says it: `()`
    default_slots: str | None = None

    @property
    def needs_process(self) -> bool:
        return self.open is None


OWN_ENGINES: Mapping[str, EngineKind] = {
    "native": EngineKind(
        open="dapo.engines.native.engine:open_native_engine",
        resolve="dapo.engines.native.linear_probe:resolve_kernels",
        rounds_as_trainer=True,
        cache_option="slots",
    ),
    "vllm": EngineKind(
        worker_spec="dapo.distributed.vllm_spec:vllm_engine_spec",
        require_package="dapo.engines.vllm.package:require_vllm_package",
        require="dapo.distributed.vllm_spec:require_vllm",
        temperatures=(0.01, 2.0),
        receives_weights=True,
        pages_cache=True,
        cache_option="cache_gib",
        default_slots="dapo.engines.vllm.start:default_slots",
    ),
}
"""The engines of this package."""
ENGINES: Mapping[str, EngineKind] = PluginTable("dapo.engines", OWN_ENGINES, EngineKind)
"""The engines by the name in `rollout.engine`; the section `rollout.NAME` holds an engine's own
options. Another package adds one by an entry point to its `EngineKind`; its options are
`rollout.options`.
"""


def engines_with(capability: str) -> str:
    """Return the names of the engines with a capability, for messages: `native or vllm`."""
    return " or ".join(name for name, kind in ENGINES.items() if getattr(kind, capability))
