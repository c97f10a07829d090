"""The lines of `dapo check` about processes, memory, weight sync and what does not fit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from dapo.analysis.check.estimate import HardwareProfile, ResourceEstimate
from dapo.config import Config, LoraConfig, ModelConfig
from dapo.config.lengths import length_as_sum, lower_lengths
from dapo.config.option_fields import option_text
from dapo.core.errors import ConfigError
from dapo.core.memory import GIB
from dapo.core.text import plural
from dapo.data.prompts import PromptEncoder
from dapo.policy.lora import adapted_layers
from dapo.policy.memory_model import FreeMemory, resolve_microbatches
from dapo.policy.model import load_local_tokenizer, load_meta_model
from dapo.policy.model_dimensions import FAMILIES, find_dimensions
from dapo.start.idle_gpus import idle_gpus
from dapo.start.read import turn_end_notes
from dapo.start.resolve import machine_notes, resolve_auto
from dapo.types import Problem


def describe_estimate(config: Config, profile: HardwareProfile) -> Iterator[str]:
    """Yield lines about processes, memory, a step's responses, weight sync and problems."""
    estimate, line = estimate_of(config, profile)
    if estimate is None:
        name = config.model.name
        yield (
            f"resources: the sizes of {name} are not known. They come from its config.json: if that"
            f" is not on this machine, run `hf download {name} config.json`. Memory is modelled for"
            f" {', '.join(FAMILIES)}"
        )
        if config.model.lora is not None:
            yield from _adapters_of_layers(config.model, config.model.lora)
        return
    yield from _processes(estimate)
    notes = notes_of(estimate)
    if line is not None:
        notes.append(line)
    if notes:
        yield ""
        yield from notes
    yield ""
    yield from _memory(estimate)
    yield ""
    yield from _step(estimate)
    yield ""
    yield from _values_taken(profile)
    yield from (f"problem: {problem}" for problem in find_problems(estimate))


def estimate_of(
    config: Config, profile: HardwareProfile
) -> tuple[ResourceEstimate | None, str | None]:
    """Return the estimate with `auto` resolved and a note; None if the sizes are unknown."""
    dimensions = find_dimensions(config.model)
    if dimensions is None:
        return None, None
    choices = list[str]()
    resolved = resolve_auto(
        config, cuda=profile.device == "gpu", training=False, log=choices.append
    )
    return resolve_estimate(ResourceEstimate(resolved, dimensions, profile, choices))


def notes_of(estimate: ResourceEstimate) -> list[str]:
    """Return what `auto` has chosen and why, the GPUs that stay idle, and an untested engine."""
    notes = list(estimate.choices)
    profile = estimate.profile
    if profile.is_here:
        notes += machine_notes(estimate.config)
    elif profile.device == "gpu" and not estimate.config.uses_ray:
        notes += idle_gpus(estimate.config, profile.devices_per_node)
    return notes


def resolve_estimate(estimate: ResourceEstimate) -> tuple[ResourceEstimate, str | None]:
    """Resolve `train.microbatch_tokens` and `train.recompute`; return a note, too.

    Where nothing fits, the estimate is of the smallest update, and the line is a problem.
    """
    is_gpu = estimate.profile.device == "gpu"
    memory = estimate.memory
    gpu = FreeMemory(estimate.available, "of a GPU") if is_gpu else None
    try:
        config, reason = resolve_microbatches(
            estimate.config, estimate.dimensions, gpu, memory.lengths
        )
    except ConfigError as error:
        train = estimate.config.train
        longest = memory.longest_sequence
        smallest = {
            "microbatch_tokens": train.microbatch_tokens or longest,
            "recompute": train.recompute is not False,
        }
        return estimate.changed("train", **smallest), f"problem: {error}"
    return replace(estimate, config=config), reason


def describe_prompts(config: Config, problems: Sequence[Problem] = ()) -> Iterator[str]:
    """Yield the end tokens and the chat template's inputs if the tokenizer is local.

    Raises DataError if a template is missing.
    """
    tokenizer_files = load_local_tokenizer(
        config.model.name, trust_remote_code=config.model.trust_remote_code
    )
    if tokenizer_files is None:
        return
    tokenizer, stop_ids = tokenizer_files
    encoder = PromptEncoder(tokenizer, config.data)
    turn_end = encoder.turn_end
    ends = set(stop_ids)
    if turn_end is not None and turn_end.token_id is not None:
        ends.add(turn_end.token_id)
    tokens = [repr(tokenizer.convert_ids_to_tokens(token_id)) for token_id in sorted(ends)]
    yield f"responses end at {', '.join(tokens) or 'no token'}"
    yield from turn_end_notes(tokenizer, stop_ids, turn_end)
    yield from encoder.notes(problems)


def _processes(estimate: ResourceEstimate) -> Iterator[str]:
    config = estimate.config
    dimensions = estimate.dimensions
    lora = estimate.config.model.lora
    yield f"resources (launcher {config.launcher}, {dimensions.parameters:,} parameters):"
    if lora is not None:
        yield _adapters(
            lora, dimensions.linears, dimensions.lora_parameters(lora.rank), dimensions.parameters
        )
        unadapted = estimate.changed("model", lora=None)
        memory = [_gib(sum(variant.trainer_memory().values())) for variant in (estimate, unadapted)]
        copies = [_gib(variant.checkpoint_copy_bytes()) for variant in (estimate, unadapted)]
        yield (
            f"               {memory[0]} to train, {copies[0]} per checkpoint (all weights:"
            f" {memory[1]}, {copies[1]})"
        )
    contents = ["the loop, data, rollout tables, checkpoints"]
    if not config.uses_trainer_group:
        contents.append("the policy")
    if not config.engine_processes:
        contents.append(f"the {config.rollout.engine} engine")
    yield f"  controller   1 process: {', '.join(contents)}"
    if config.uses_trainer_group:
        ranks = f"{estimate.ranks} ranks (FSDP2)" if estimate.ranks > 1 else "1 process"
        yield f"  trainer      {ranks}, {_each(estimate, 1)}"
        if estimate.profile.device == "gpu":
            yield (
                f"               each rank reads {estimate.load_read_bytes / 1e9:.2f} GB of the"
                f" model's files; loading takes {_gib(estimate.load_host_bytes)} of a node's main"
                " memory"
            )
    if config.engine_processes:
        order = ", in lockstep" if config.rollout.is_reproducible else ", by load"
        shared = "" if config.engine_processes == 1 else order
        resources = _each(estimate, config.gpus_per_engine)
        engines = f"{config.engine_processes} x {config.rollout.engine}{shared}"
        yield f"  engines      {engines}, {resources}"
        if config.rollout.engine == "vllm" and config.rollout.vllm.options:
            settings = config.rollout.vllm.options.items()
            arguments = ", ".join(f"{name}={option_text(value)}" for name, value in settings)
            yield f"               vLLM's arguments: {arguments}"
    processes = "1 process" if config.reward.workers == 1 else f"{config.reward.workers} processes"
    yield f"  verifiers    {processes}, at most {config.reward.memory_gib:g} GiB each"
    if estimate.profile.device == "gpu":
        per_node = estimate.profile.devices_per_node
        nodes = ceil(estimate.devices / per_node)
        yield (
            f"  GPUs         {estimate.devices} = {plural(nodes, 'node')} of"
            f" {per_node}{_shared(estimate)}"
        )


def _shared(estimate: ResourceEstimate) -> str:
    shares = estimate.shares
    if not shares.is_shared:
        return ""
    counts = (
        plural(round(shares.trainers), "trainer rank"),
        plural(round(shares.engines), "engine process"),
    )
    how = ", which use it in turn" if shares.alternates else ""
    if estimate.config.samples_ahead:
        how = ": with schedule=async both compute at the same time, so sampling gains little"
    return f", each shared by {' and '.join(counts)}{how}"


def _adapters(lora: LoraConfig, linears: int, trained: int, parameters: int) -> str:
    return (
        f"  adapters     of rank {lora.rank}, scaled by {lora.alpha / lora.rank:g}, on {linears}"
        f" linear layers: {trained:,} parameters, {trained / parameters:.2%} of the model's"
    )


def _adapters_of_layers(model: ModelConfig, lora: LoraConfig) -> Iterator[str]:
    """Count the adapters of another family's layers if its config.json is local."""
    try:
        meta = load_meta_model(
            model.name, trust_remote_code=model.trust_remote_code, local_files_only=True
        )
    except ConfigError:
        return
    linears = [meta.get_parameter(f"{name}.weight").shape for name in adapted_layers(meta)]
    yield _adapters(lora, len(linears), lora.rank * sum(map(sum, linears)), meta.num_parameters())


def _each(estimate: ResourceEstimate, devices: int) -> str:
    if estimate.profile.device == "cpu":
        return "on the cluster's cores" if estimate.config.uses_ray else "on this machine's cores"
    return "one GPU each" if devices == 1 else f"{devices} GPUs each (tensor parallel)"


def _memory(estimate: ResourceEstimate) -> Iterator[str]:
    device = "GPU" if estimate.profile.device == "gpu" else "process"
    if not estimate.config.is_multiprocess:
        yield from _table(
            estimate, f"memory of the {device} that samples and trains", estimate.process_memory()
        )
        if estimate.profile.device == "gpu" and estimate.checkpoint_copy_bytes():
            copied = _gib(estimate.checkpoint_copy_bytes())
            yield f"  and {copied} of main memory for the copy that a checkpoint is written from"
        return
    yield from _table(estimate, f"memory of a trainer's {device}", estimate.trainer_memory())
    yield from _table(
        estimate,
        f"memory of an engine's {device}",
        estimate.engine_memory(),
        estimate.engine_available,
    )
    if estimate.config.engine_processes:
        if estimate.transfer_seconds is None:
            count = 2
            versions = "newest two versions"
        else:
            count = 1
            versions = "first version"
        yield (
            f"  main memory where the weights come from: {_gib(count * estimate.sync_bytes)} for"
            f" the {versions}"
        )
    mean = estimate.profile.prompt_tokens + estimate.profile.mean_response_tokens
    yield (
        f"  an engine's cache: {estimate.cache_tokens:,} tokens ="
        f" {estimate.cache_tokens // estimate.sequence_tokens:,} sequences at full length"
        f" ({estimate.sequence_tokens:,}), {estimate.cache_tokens / mean:,.0f} at the mean"
    )


def _table(
    estimate: ResourceEstimate,
    title: str,
    breakdown: Mapping[str, float],
    available: float | None = None,
) -> Iterator[str]:
    yield f"{title}:"
    for name, size in breakdown.items():
        yield f"  {_gib(size):>10}  {name}"
    if available is None:
        available = estimate.available
    yield f"  {_gib(sum(breakdown.values())):>10}  total, of {_gib(available)}"


def _step(estimate: ResourceEstimate) -> Iterator[str]:
    tokens = estimate.generated_responses * estimate.profile.mean_response_tokens
    if tokens:
        yield f"each step: {estimate.generated_responses:,.0f} responses, {tokens:,.0f} tokens"
    times = ""
    if estimate.config.is_multiprocess:
        times = f", {plural(estimate.sync_copies, 'time')} (one per node)"
    if (seconds := estimate.transfer_seconds) is not None:
        times = f" from GPU to GPU, about {seconds:.1f} s"
    yield f"weight sync, each step: {estimate.sync_bytes / 1e9:,.2f} GB{times}"


def _values_taken(profile: HardwareProfile) -> Iterator[str]:
    """Yield the values that the estimate takes for what the configuration does not say."""
    if profile.device == "cpu":
        owner = "this machine" if profile.is_here else "each node, taken to be like this machine"
        yield f"values taken: {profile.memory_gib:g} GiB of memory of {owner}"
    elif profile.is_here:
        gpus = plural(profile.devices_per_node, "GPU")
        yield f"values taken: {gpus} of this machine, of {profile.memory_gib:g} GiB"
    else:
        gpus = plural(profile.devices_per_node, "GPU")
        yield (
            f"values taken, because the GPUs are not on this machine: {gpus} per node, of"
            f" {profile.memory_gib:g} GiB"
        )
    yield (
        f"  on average {profile.prompt_tokens:,.0f} tokens of a prompt and"
        f" {profile.mean_response_tokens:,.0f} of a response; {profile.keep_rate:.0%} of the groups"
        " carry a signal"
    )


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that the fullest device needs and has."""

    needed: float  # bytes
    available: float  # bytes
    owner: str  # what the memory is of, for behind a number; empty for this machine's


def fullest_device(estimate: ResourceEstimate) -> DeviceMemory:
    """Return the memory of the device that is filled the most."""
    is_gpu = estimate.profile.device == "gpu"
    if not estimate.config.is_multiprocess:
        owner = " of a GPU" if is_gpu else ""
        return DeviceMemory(sum(estimate.process_memory().values()), estimate.available, owner)
    trainer = sum(estimate.trainer_memory().values())
    engine = sum(estimate.engine_memory().values())
    if not is_gpu and not estimate.config.uses_ray:
        total = estimate.ranks * trainer + estimate.config.engine_processes * engine
        return DeviceMemory(total, estimate.available, "")
    device = "GPU" if is_gpu else "node"
    devices = [DeviceMemory(trainer, estimate.available, f" of a trainer's {device}")]
    if estimate.config.engine_processes:
        available = estimate.engine_available
        devices.append(DeviceMemory(engine, available, f" of an engine's {device}"))
    return max(devices, key=lambda memory: memory.needed / max(memory.available, 1))


def find_problems(estimate: ResourceEstimate) -> Iterator[str]:
    """Yield each reason why the configuration cannot run, with the option to change."""
    config = estimate.config
    dimensions = estimate.dimensions
    limit = config.rollout.max_response_tokens
    positions = dimensions.max_positions
    # a supervised run leaves out what is longer, unless it samples for an evaluation
    samples = not config.is_supervised or config.data.eval_source is not None
    if samples and positions is not None and limit + config.max_observed_tokens >= positions:
        if config.max_observed_tokens:
            yield (
                f"an episode of at most {length_as_sum(config, limit)} leaves no room for a prompt"
                f" in the {positions:,} positions of the model; {lower_lengths(config, limit)}"
            )
        else:
            yield (
                f"rollout.max_response_tokens={limit} leaves no room for a prompt in the"
                f" {positions:,} positions of the model"
            )
    if not estimate.config.is_multiprocess:
        yield from _too_large(estimate, "the process", estimate.process_memory())
        return
    trainer = estimate.trainer_memory()
    engine = estimate.engine_memory()
    if estimate.profile.device == "cpu" and not config.uses_ray:
        number = config.engine_processes
        copies = {f"{number} x {name}": number * value for name, value in engine.items()}
        all_processes = {name: estimate.ranks * value for name, value in trainer.items()} | copies
        yield from _too_large(estimate, "all processes of this machine", all_processes)
    else:
        yield from _too_large(estimate, "a trainer rank", trainer)
        yield from _engine_too_large(estimate, engine)
    if not config.rollout.engine_kind.pages_cache:
        return
    tp = config.gpus_per_engine
    if dimensions.heads % tp or (dimensions.kv_heads % tp and tp % dimensions.kv_heads):
        yield (
            f"rollout.vllm.tensor_parallel={tp} does not divide the model's {dimensions.heads}"
            f" query and {dimensions.kv_heads} key-value heads"
        )
    # an engine without any cache is named above
    if 0 < estimate.cache_tokens < estimate.sequence_tokens:
        gibibytes = ceil(estimate.sequence_tokens * estimate.cached_token_bytes / tp / GIB)
        yield (
            f"an engine's cache holds {estimate.cache_tokens:,} tokens, less than one sequence at"
            f" full length ({estimate.sequence_tokens:,}): set rollout.vllm.cache_gib to"
            f" {gibibytes} or more"
        )


def _too_large(
    estimate: ResourceEstimate, owner: str, breakdown: Mapping[str, float]
) -> Iterator[str]:
    total = sum(breakdown.values())
    available = estimate.available
    if total <= available:
        return
    largest = max(breakdown, key=lambda name: breakdown[name])
    fixes = [] if owner.startswith("all") else list(_suggest_fixes(estimate))
    fixes = fixes or [f"use a smaller model or a machine with more memory, or {_shorter(estimate)}"]
    is_cpu = estimate.profile.device == "cpu"
    note = ""
    if is_cpu:
        note = ". This is for the processor of this machine; train.device=cuda estimates a GPU"
    yield (
        f"{owner} needs {_gib(total)}, and {_gib(available)} are available; the largest part is"
        f" {largest} ({_gib(breakdown[largest])}). To make it fit: {'; or '.join(fixes)}{note}"
    )


def _shorter(estimate: ResourceEstimate) -> str:
    """Return the options to lower for shorter sequences."""
    config = estimate.config
    if not config.max_observed_tokens:
        return "lower rollout.max_response_tokens"
    return lower_lengths(config, config.rollout.max_response_tokens)


def _suggest_fixes(estimate: ResourceEstimate) -> Iterator[str]:
    """Yield single changes of the configuration that make it fit."""
    halves = [estimate.config.microbatch_tokens // 2**k for k in range(1, 8)]
    for section, option, values in (
        ("train", "recompute", [True]),
        ("train", "microbatch_tokens", halves),
        ("distributed", "trainer_ranks", _more_ranks(estimate)),
    ):
        for value in values:
            changed = estimate.changed(section, **{option: value})
            memory = changed.process_memory
            if changed.config.is_multiprocess:
                memory = changed.trainer_memory
            breakdown = memory()
            if sum(breakdown.values()) <= estimate.available:
                yield f"{section}.{option}={str(value).lower()}"
                break


def _more_ranks(estimate: ResourceEstimate) -> list[int]:
    """Return larger values of distributed.trainer_ranks that a run would not refuse."""
    profile = estimate.profile
    if profile.device != "gpu":
        return []
    most = estimate.ranks * 2**11
    if profile.is_here and not estimate.config.uses_ray:
        most = profile.devices_per_node  # NCCL takes one rank per GPU
    numbers = [estimate.ranks * 2**k for k in range(1, 12)]
    fitting = []
    for number in numbers:
        changed = estimate.config.changed("distributed", trainer_ranks=number)
        # a critic, for example, trains in one process
        if number <= most and changed.conflict() is None:
            fitting.append(number)
    return fitting


def _engine_too_large(estimate: ResourceEstimate, breakdown: Mapping[str, float]) -> Iterator[str]:
    engine = estimate.config.rollout.engine
    kind = estimate.config.rollout.engine_kind
    cache = breakdown["cache"]
    total = sum(breakdown.values())
    available = estimate.engine_available
    if total <= available:
        return
    remaining = available - (total - cache)
    requirement = f"{_gib(total)}"
    fix = f"use a smaller model, or {_shorter(estimate)}"
    if remaining > 0 and kind.cache_option is not None:
        limit = (
            remaining / GIB if kind.pages_cache else (estimate.cache_limit or 1) * remaining / cache
        )
        most: float = int(limit)
        if kind.pages_cache and most == 0:
            most = int(100 * limit) / 100  # GiB, which may be a part of one
        # an engine refuses a cache of 0
        if most > 0:
            fix = f"set rollout.{engine}.{kind.cache_option} to at most {most:,}"
    elif remaining <= 0:
        requirement = f"{_gib(total - cache)} before any cache"
        slots = _fitting_slots(estimate, breakdown)
        if slots > 0:
            fix = f"set rollout.{engine}.{kind.cache_option} to at most {slots:,}"
        elif estimate.shares.alternates and total - cache < estimate.profile.memory_gib * GIB:
            fix = f"the trainer keeps the rest; {_smaller_trainer(estimate.config)}"
        elif hasattr(estimate.config.rollout.engine_options, "tensor_parallel"):
            fix = f"raise rollout.{engine}.tensor_parallel above {estimate.config.gpus_per_engine}"
    yield f"a GPU of an engine needs {requirement}, and {_gib(available)} are available: {fix}"


def _fitting_slots(estimate: ResourceEstimate, breakdown: Mapping[str, float]) -> int:
    """Return the number of slots that fit beside the weights; 0: none, or an engine without slots.

    Each has its logits, and a cache for a sequence at full length.
    """
    kind = estimate.config.rollout.engine_kind
    slots = estimate.cache_limit
    if kind.pages_cache or slots is None:
        return 0
    logits = breakdown["logits"]
    fixed = sum(breakdown.values()) - breakdown["cache"] - logits
    slot_bytes = logits / slots + estimate.cached_token_bytes * estimate.sequence_tokens
    return max(0, int((estimate.engine_available - fixed) / slot_bytes))


def _smaller_trainer(config: Config) -> str:
    """Return the options with which a trainer keeps less of a GPU that it shares with engines."""
    # a critic trains in one process, and without adapters
    if config.has_critic:
        return "use a smaller model, or an advantage.estimator without a critic"
    more_ranks = "raise distributed.trainer_ranks where there are more GPUs"
    if config.model.lora is not None:
        return more_ranks
    return f"{more_ranks}, or train adapters (model.lora)"


def _gib(size: float) -> str:
    value = size / GIB
    return f"{value:,.2f} GiB" if value < 10 else f"{value:,.1f} GiB"
