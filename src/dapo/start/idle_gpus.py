"""Names GPUs that a configuration leaves idle, and the options that use them."""

from collections.abc import Iterator
from dataclasses import dataclass

from dapo.config import Config


def idle_gpus(config: Config, gpus: int) -> list[str]:
    """Return a line if processes leave some of `gpus` GPUs idle; no line if they use all."""
    if gpus < 2 or config.train.device == "cpu":
        return []
    sampling = config.engine_processes * config.gpus_per_engine
    used = _used(config, gpus)
    some_wait = config.gpu_shares(gpus).is_shared and sampling < gpus
    if used < gpus:
        verb = "is" if used == 1 else "are"
        line = f"{used} of {gpus} GPUs {verb} used"
    elif some_wait and not config.is_supervised:
        line = f"{max(1, sampling)} of {gpus} GPUs sample, the others wait meanwhile"
    else:
        return []
    ways = list(_ways(config, gpus))
    if ways:
        line += f"; to use all: {', or '.join(ways)}"
    return [line]


def _used(config: Config, gpus: int) -> int:
    """Return the GPUs on which a process computes."""
    if config.uses_ray:
        return min(gpus, config.gpus_needed)
    if not config.engine_processes:  # the controller samples on the first rank's GPU
        return min(gpus, config.distributed.trainer_ranks)
    if config.gpus_wanted <= gpus:
        return config.gpus_wanted
    sampling = config.engine_processes * config.gpus_per_engine
    return min(gpus, max(config.distributed.trainer_ranks, sampling))


@dataclass(frozen=True)
class _Layout:
    """How processes may be spread over the GPUs of a machine."""

    trainer_ranks: int
    engines: int
    gpus_per_process: float | None = None
    note: str = ""

    def apply(self, config: Config) -> Config:
        """Return the configuration with this layout."""
        changed = config.changed("rollout", engines=self.engines)
        return changed.changed(
            "distributed",
            trainer_ranks=self.trainer_ranks,
            gpus_per_process=self.gpus_per_process,
        )

    def assignments(self, config: Config) -> str:
        """Return the options that differ from a configuration's, as a command takes them."""
        values: dict[str, float] = {
            "distributed.trainer_ranks": self.trainer_ranks,
            "rollout.engines": self.engines,
        }
        if self.gpus_per_process is not None:
            values["distributed.gpus_per_process"] = self.gpus_per_process
        changes = []
        for name, value in values.items():
            if value != config.value_of(name):
                changes.append(f"{name}={value}")
        return " ".join(changes)


def _layouts(config: Config, gpus: int) -> list[_Layout]:
    """Return layouts that may use all GPUs, the one that is expected to be fastest first."""
    if config.is_supervised:
        return [_Layout(gpus, config.rollout.engines)]
    size = config.gpus_per_engine
    ranks = config.distributed.trainer_ranks
    rest_samples = _Layout(ranks, (gpus - ranks) // size)
    if config.samples_ahead:
        num_engines = gpus // 2 // size
        return [_Layout(gpus - num_engines * size, num_engines), rest_samples]
    part = 0.5 if config.uses_ray else None
    in_turn = _Layout(gpus, gpus // size, part, " (all sample and update in turn)")
    return [in_turn, rest_samples]


def _ways(config: Config, gpus: int) -> Iterator[str]:
    """Yield changes of options that use all GPUs, in the order of `_layouts`."""
    ways: list[str] = []
    for layout in _layouts(config, gpus):
        if layout.engines < config.rollout.engines:
            continue
        if layout.trainer_ranks < config.distributed.trainer_ranks:
            continue
        changed = layout.apply(config)
        if changed.conflict() is not None or _used(changed, gpus) < gpus:
            continue
        way = layout.assignments(config)
        if way and way not in ways:  # neither the configuration itself nor the same twice
            ways.append(way)
            yield way + layout.note
