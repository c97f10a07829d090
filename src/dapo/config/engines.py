"""The table of engines: how each one is opened and what sets it apart, by its name in `rollout.engine`.

Modules are named, not imported: the table loads no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineKind:
    """A row of the table. Functions are given as `module:function`."""

    open: str | None = None
    """Makes the engine around a model of its own, from `(RolloutConfig, PreTrainedModel, gpu_processes=1)`; None: the
    engine runs only in processes of its own."""
    worker_spec: str = "dapo.distributed.engine_specs:engine_spec"
    """Makes the spec of an engine process, from `(Config, threads=, gpu_processes=)`. The default process loads the
    model and calls `open`."""
    require: str | None = None
    """Raises ConfigError, from `(Config)`, where the engine cannot be started on this machine."""
    resolve: str | None = None
    """Resolves `auto` in the engine's section, from `(section, model, dtype=, device=)`."""
    temperatures: tuple[float, float] = (0.0, float("inf"))
    """Lowest and highest temperature; 0, which is greedy, is always possible."""
    rounds_as_trainer: bool = False
    """Log-probabilities equal the trainer's up to rounding in float32."""
    pages_cache: bool = False
    """Keys and values are in pages, so that a sequence takes memory for its tokens and not for its limit."""
    cache_option: str | None = None
    """The option of the engine's section that bounds its cache: GiB where it is paged, else sequences."""

    @property
    def needs_process(self) -> bool:
        """Whether the engine never runs in the training process."""
        return self.open is None


ENGINES: Mapping[str, EngineKind] = {
    "native": EngineKind(
        open="dapo.engines.native.engine:open_native_engine",
        resolve="dapo.engines.native.linear_probe:resolve_kernels",
        rounds_as_trainer=True,
        cache_option="slots",
    ),
    "vllm": EngineKind(
        worker_spec="dapo.distributed.vllm_spec:vllm_engine_spec",
        require="dapo.distributed.vllm_spec:require_vllm",
        temperatures=(0.01, 2.0),
        pages_cache=True,
        cache_option="cache_gib",
    ),
}
"""By the name of `rollout.engine`; an engine's options are the section `rollout.NAME`, if it has any."""


def engines_with(capability: str) -> str:
    """The names of the engines with a capability, for messages: `native or vllm`."""
    return " or ".join(name for name, kind in ENGINES.items() if getattr(kind, capability))
