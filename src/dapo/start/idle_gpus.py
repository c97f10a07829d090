"""Names GPUs that a configuration leaves idle, and the options that use them."""

from collections.abc import Iterator

from dapo.config import Config


def idle_gpus(config: Config, gpus: int) -> list[str]:
    """Return a line if processes leave some of `gpus` GPUs idle; no line if they use all."""
    if gpus < 2 or config.train.device == "cpu":
        return []
    sampling = config.engine_processes * config.gpus_per_engine
    used = _used(config, gpus)
    if used < gpus:
        what = f"{used} of {gpus} GPUs {'is' if used == 1 else 'are'} used"
    elif config.gpu_shares(gpus).is_shared and sampling < gpus and not config.is_supervised:
        what = f"{max(1, sampling)} of {gpus} GPUs sample, the others wait meanwhile"
    else:
        return []
    ways = list(_ways(config, gpus))
    return [f"{what}; to use all: {', or '.join(ways)}" if ways else what]


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


def _ways(config: Config, gpus: int) -> Iterator[str]:
    """Yield changes of options that use all GPUs, the one that is expected to be fastest first."""
    ranks = config.distributed.trainer_ranks
    size = config.gpus_per_engine
    half = gpus // 2 // size * size
    layouts: list[tuple[int, int, float | None, str]]
    if config.is_supervised:
        layouts = [(gpus, config.rollout.engines, None, "")]
    elif config.samples_ahead:
        layouts = [(gpus - half, half // size, None, "")]
    else:
        part = 0.5 if config.uses_ray else None
        layouts = [(gpus, gpus // size, part, " (all sample and update in turn)")]
    if not config.is_supervised:
        layouts.append((ranks, (gpus - ranks) // size, None, ""))
    named: list[str] = []
    for trainer_ranks, engines, part, note in layouts:
        if engines < config.rollout.engines or trainer_ranks < ranks:
            continue
        values: dict[str, float] = {
            "distributed.trainer_ranks": trainer_ranks,
            "rollout.engines": engines,
        }
        changed = config.changed("rollout", engines=engines)
        changed = changed.changed("distributed", trainer_ranks=trainer_ranks, gpus_per_process=part)
        if changed.conflict() is not None or _used(changed, gpus) < gpus:
            continue
        if part is not None:
            values["distributed.gpus_per_process"] = part
        texts = [
            f"{name}={value}" for name, value in values.items() if value != config.value_of(name)
        ]
        text = " ".join(texts)
        if text and text not in named:  # neither the configuration itself nor the same twice
            named.append(text)
            yield text + note
