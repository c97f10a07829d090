"""A layout in words: what runs where, memory, bytes of a weight sync, an estimated step, and what cannot work."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from math import ceil
from typing import Any

from dapo.cli.check.estimate import GB, Layout
from dapo.cli.check.hardware_profile import GIB, Assumptions, assumptions_for
from dapo.cli.check.model_dimensions import KNOWN_SHAPES, find_shape
from dapo.config import Config

MAX_RANKS = 4096


def describe_layout(config: Config, given: Sequence[str] = ()) -> Iterator[str]:
    """Lines for a person: what runs where, memory, the bytes of a weight sync, an estimated step, what was assumed."""
    assumed = assumptions_for(config, given)
    shape = KNOWN_SHAPES[assumed.shape] if assumed.shape else find_shape(config.model.name)
    if shape is None:
        yield (
            f"layout: the sizes of {config.model.name} are not known here: its config.json is not on this machine. "
            f"Give the name of a model of the same shape, --assume shape=NAME: {', '.join(KNOWN_SHAPES)}"
        )
        return
    layout = Layout(config, shape, assumed)
    yield from _processes(layout)
    yield ""
    yield from _memory(layout)
    yield ""
    yield from _step(layout)
    yield ""
    yield "assumed (change it with --assume NAME=VALUE):"
    for one in fields(Assumptions):
        value = getattr(assumed, one.name)
        if value:
            shown = value if isinstance(value, str) else f"{value:g}"
            yield f"  {one.name}={shown}  {one.metadata['meaning']}".rstrip()
    for trouble in troubles(layout):
        yield ""
        yield f"DOES NOT WORK: {trouble}"


def _processes(layout: Layout) -> Iterator[str]:
    config, shape = layout.config, layout.shape
    trained = layout.trained_parameters
    adapters = f", of which LoRA trains {trained:,} more" if config.model.lora is not None else ""
    yield f"layout (launcher {config.launcher}, {shape.parameters:,} parameters{adapters}):"
    own = ["the loop, data, rollout tables, checkpoints"]
    if layout.ranks == 1:
        own.append("the policy")
    if layout.engines == 0:
        own.append("the native engine")
    yield f"  controller   1 process: {', '.join(own)}"
    if layout.ranks > 1:
        yield f"  trainer      {layout.ranks} ranks (FSDP2), {_each(layout, 1)}"
    if layout.engines:
        yield f"  engines      {layout.engines} x {config.rollout.engine}, {_each(layout, layout.devices_an_engine)}"
    yield f"  verifiers    {config.reward.workers} processes, at most {config.reward.memory_gib:g} GiB each"
    if layout.assumed.device == "gpu":
        nodes = ceil(layout.devices / layout.assumed.devices_a_node)
        yield f"  GPUs         {layout.devices} = {nodes} node{'s' * (nodes > 1)} of {layout.assumed.devices_a_node}"


def _each(layout: Layout, devices: int) -> str:
    if layout.assumed.device == "cpu":
        return "on this machine's cores"
    return "a GPU each" if devices == 1 else f"{devices} GPUs each (tensor parallel)"


def _memory(layout: Layout) -> Iterator[str]:
    available = layout.assumed.memory_gib * GIB
    if layout.shares_device:
        place = "GPU" if layout.assumed.device == "gpu" else "process"
        yield from _table(f"memory of the {place} that samples and trains", layout.process_memory(), available)
        if layout.assumed.device == "gpu" and layout.checkpoint_copy_bytes():
            copied = _gib(layout.checkpoint_copy_bytes())
            yield f"  and {copied} of main memory for the copy that a checkpoint is written from"
    else:
        device = "GPU" if layout.assumed.device == "gpu" else "process"
        yield from _table(f"memory of a trainer's {device}", layout.trainer_memory(), available)
        yield from _table(f"memory of an engine's {device}", layout.engine_memory(), available)
        mean = layout.assumed.prompt_tokens + layout.assumed.mean_response_tokens
        if layout.engines:
            versions = _gib(2 * layout.sync_bytes)
            yield f"  main memory where the weights come from: {versions} for the newest two versions"
        yield (
            f"  an engine's cache: {layout.cache_tokens:,} tokens = {layout.cache_tokens // layout.sequence_tokens:,} "
            f"sequences at full length ({layout.sequence_tokens:,}), {layout.cache_tokens / mean:,.0f} at the mean"
        )


def _table(title: str, parts: Mapping[str, float], available: float) -> Iterator[str]:
    yield f"{title}:"
    for name, size in parts.items():
        yield f"  {_gib(size):>10}  {name}"
    yield f"  {_gib(sum(parts.values())):>10}  in all, of {_gib(available)}"


def _step(layout: Layout) -> Iterator[str]:
    config, assumed = layout.config, layout.assumed
    phases = layout.step_seconds()
    copies = "" if layout.shares_device else f", {layout.sync_copies} time{'s' * (layout.sync_copies > 1)} (one a node)"
    yield f"weights to the engines, each step: {layout.sync_bytes / GB:,.2f} GB{copies}"
    tokens = layout.generated_responses * assumed.mean_response_tokens
    yield (
        f"a step, estimated: {layout.generated_responses:,.0f} responses, {tokens:,.0f} tokens; "
        f"{layout.live_sequences:,.0f} sequences at a time in an engine"
    )
    for name, seconds in phases.items():
        yield f"  {seconds:>10,.1f} s  {name}"
    total = sum(phases.values())
    if config.schedule == "one_step_off":
        training = sum(phases[name] for name in phases if name in ("update", "old log-probabilities"))
        total = phases["weights to the engines"] + max(training, total - training - phases["weights to the engines"])
    days = total * config.train.num_steps / 86400
    whole = f"{days:,.1f} days" if days >= 1 else f"{days * 24:,.1f} hours"
    steps = f"{config.train.num_steps} steps: {whole}, evaluations not counted"
    yield f"  {total:>10,.1f} s  in all ({config.schedule}); {steps}"


def troubles(layout: Layout) -> Iterator[str]:
    """What cannot work, and what to change."""
    config, shape, available = layout.config, layout.shape, layout.assumed.memory_gib * GIB
    if shape.max_positions is not None and config.rollout.max_response_tokens >= shape.max_positions:
        yield (
            f"rollout.max_response_tokens={config.rollout.max_response_tokens} leaves no room for a prompt in the "
            f"{shape.max_positions:,} positions of the model"
        )
    if layout.shares_device:
        yield from _too_large(layout, "the process", layout.process_memory(), available)
        return
    together = layout.assumed.device == "cpu"
    trainer, engine = layout.trainer_memory(), layout.engine_memory()
    if together:
        copies = {f"{layout.engines} x {name}": layout.engines * value for name, value in engine.items()}
        everything = {name: layout.ranks * value for name, value in trainer.items()} | copies
        yield from _too_large(layout, "all processes of this machine", everything, available)
    else:
        yield from _too_large(layout, "a trainer rank", trainer, available)
        yield from _engine_too_large(layout, engine, available)
    if config.rollout.engine == "vllm":
        tp = layout.devices_an_engine
        if shape.heads % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
            yield (
                f"rollout.vllm.tensor_parallel={tp} does not divide the model's {shape.heads} query and "
                f"{shape.kv_heads} key-value heads"
            )
        if layout.cache_tokens < layout.sequence_tokens:
            wanted = layout.sequence_tokens * layout.cached_token_bytes / tp
            yield (
                f"an engine's cache holds {layout.cache_tokens:,} tokens, less than one sequence at full length "
                f"({layout.sequence_tokens:,}): set rollout.vllm.cache_gib to {_up(wanted)} or more"
            )


def _too_large(layout: Layout, who: str, parts: Mapping[str, float], available: float) -> Iterator[str]:
    total = sum(parts.values())
    if total <= available:
        return
    largest = max(parts, key=lambda name: parts[name])
    remedies = list(_remedies(layout, who, available)) or [
        "use a smaller model or more memory (--assume memory_gib=...), or lower rollout.max_response_tokens"
    ]
    yield (
        f"{who} needs {_gib(total)}, and there are {_gib(available)}; the largest part is {largest} "
        f"({_gib(parts[largest])}). To make it fit: {'; or '.join(remedies)}"
    )


def _remedies(layout: Layout, who: str, available: float) -> Iterator[str]:
    """Single changes of the configuration with which it would fit."""

    def fits(changed: Layout) -> bool:
        parts = changed.process_memory() if changed.shares_device else changed.trainer_memory()
        return sum(parts.values()) <= available

    def with_(layout: Layout, section: str, **values: Any) -> Layout:
        old = getattr(layout.config, section)
        return replace(layout, config=layout.config.model_copy(update={section: old.model_copy(update=values)}))

    if who.startswith("all"):
        return
    recomputing = with_(layout, "train", recompute=True)
    if not layout.config.train.recompute and fits(recomputing):
        yield "train.recompute=true"
    longest = layout.config.rollout.max_response_tokens + round(layout.assumed.prompt_tokens)
    if layout.config.train.microbatch_tokens > longest:
        tokens = layout.config.train.microbatch_tokens // 2
        while tokens > longest and not fits(with_(layout, "train", microbatch_tokens=tokens)):
            tokens //= 2
        if fits(with_(layout, "train", microbatch_tokens=tokens)):
            yield f"train.microbatch_tokens={max(tokens, 1)}"
    if layout.assumed.device == "gpu":
        bases = [(layout, "")] if fits(recomputing) else [(layout, ""), (recomputing, " with train.recompute=true")]
        for base, also in bases:
            ranks = layout.ranks * 2
            while ranks < MAX_RANKS and not fits(with_(base, "distributed", trainer_ranks=ranks)):
                ranks *= 2
            if ranks < MAX_RANKS:
                yield f"distributed.trainer_ranks={ranks}{also}"
                return


def _engine_too_large(layout: Layout, parts: Mapping[str, float], available: float) -> Iterator[str]:
    total = sum(parts.values())
    if total <= available:
        return
    rest = available - (total - parts["cache"])
    if rest > 0:
        is_vllm = layout.config.rollout.engine == "vllm"
        name = "rollout.vllm.cache_gib" if is_vllm else "rollout.cache_tokens"
        room = rest / (GIB if is_vllm else layout.cached_token_bytes)
        yield (
            f"a GPU of an engine needs {_gib(total)}, and there are {_gib(available)}: set {name} to at most "
            f"{int(room):,}"
        )
    else:
        yield (
            f"a GPU of an engine needs {_gib(total - parts['cache'])} before any cache, and there are "
            f"{_gib(available)}: raise rollout.vllm.tensor_parallel above {layout.devices_an_engine}"
        )


def _gib(size: float) -> str:
    value = size / GIB
    return f"{value:,.2f} GiB" if value < 10 else f"{value:,.1f} GiB"


def _up(size: float) -> int:
    return ceil(size / GIB)
