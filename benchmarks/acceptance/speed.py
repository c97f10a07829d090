"""Speed against the machine's limits, host synchronisations, kernels, and peak memory against the
model of memory.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.acceptance.check import Measurement, Setting, Skipped, require_gpu
from benchmarks.acceptance.models import (
    COMPARED_TINY,
    QWEN_HALF,
    QWEN_ONE_AND_A_HALF,
    Geometry,
    as_loaded,
    policy_config,
    random_model,
    token_ids,
)
from benchmarks.compute_limits import (
    GENERATE_FLOP,
    UPDATE_FLOP,
    limit_tokens_per_s,
    memory_limit_tokens_per_s,
)
from benchmarks.workers.matmul import copy_rate, multiply
from dapo.config.rollout_options import NativeConfig
from dapo.core.rng import keyed_seed
from dapo.engines.native.engine import NativeEngine
from dapo.engines.native.model_kernels import model_kernels_for
from dapo.policy.memory_model import RESERVE, ResponseLengths, TrainerMemory
from dapo.policy.minibatch import partition_minibatch
from dapo.policy.model_dimensions import dimensions_of
from dapo.policy.policy import Policy
from dapo.types import GenerationRequest, Sample

GENERATION_SHARE = 0.04
UPDATE_SHARE = 0.10
"""Shares of the limit. An H100 reached 0.08 and 0.12 with the smaller model."""
SYNCS_PER_DECODE_STEP = 2
SYNCS_PER_UPDATE = 2
"""Bounds on synchronizations; that of an update holds for any number of microbatches."""
PREDICTED_PART = 0.7
"""Smallest share of the predicted peak; below it `auto` leaves memory unused."""
KERNELS_PER_LAYER = 20
KERNELS_PER_STEP = 80
"""Kernels of a decode step: per layer, and for embedding, head and sampling."""


@dataclass(frozen=True)
class Work:
    """How much is computed: `groups` prompts of `prompt` tokens with `size` responses of `tokens`
    tokens each.
    """

    groups: int
    size: int
    prompt: int
    tokens: int
    microbatch_tokens: int

    def requests(self, vocabulary: int, *, tokens: int | None = None) -> list[GenerationRequest]:
        """All responses, of exactly `tokens` tokens."""
        return [
            GenerationRequest(
                id=f"{p}/{i}",
                prompt_ids=token_ids(self.prompt, "speed", p, vocabulary=vocabulary),
                max_new_tokens=tokens or self.tokens,
                temperature=1.0,
                top_p=1.0,
                seed=keyed_seed("speed", p, i),
                stop_ids=(),
            )
            for p in range(self.groups)
            for i in range(self.size)
        ]

    def samples(self, vocabulary: int) -> list[Sample]:
        """Responses of as many tokens, all of which train; no two begin alike."""
        responses = [
            token_ids(self.tokens, "response", r.id, vocabulary=vocabulary)
            for r in self.requests(vocabulary)
        ]
        return [
            Sample(
                int(r.id.split("/")[0]),
                r.prompt_ids,
                ids,
                0.0,
                (-1.0) ** i,
                (),
                None,
                (True,) * self.tokens,
                i,
            )
            for i, (r, ids) in enumerate(zip(self.requests(vocabulary), responses, strict=True))
        ]

    @property
    def response_tokens(self) -> int:
        """Number of tokens of all responses."""
        return self.groups * self.size * self.tokens


def sizes(setting: Setting) -> tuple[dict[str, Geometry], Work]:
    """Real geometries and hundreds of rows on a GPU."""
    if setting.on_gpu:
        models = {"Qwen2.5-0.5B": QWEN_HALF, "Qwen2.5-1.5B": QWEN_ONE_AND_A_HALF}
        return models, Work(groups=16, size=16, prompt=100, tokens=128, microbatch_tokens=8192)
    return {"tiny": COMPARED_TINY["heads of 64"]}, Work(
        groups=2, size=4, prompt=10, tokens=12, microbatch_tokens=128
    )


def check_speed(setting: Setting) -> list[Measurement]:
    """Tokens per second of the native engine and of an update, as shares of what products and
    memory allow.
    """
    models, work = sizes(setting)
    size, threads = (8192, torch.get_num_threads()) if setting.on_gpu else (256, 1)
    rates = (
        multiply("bfloat16", setting.device, size, 5, threads)["gflops"],
        copy_rate(setting.device, size)["gb_per_s"],
    )
    found = [
        Measurement("rate of large bfloat16 products", rates[0] / 1e3, "TFLOP/s"),
        Measurement("rate of copying memory", rates[1], "GB/s"),
    ]
    for name, geometry in models.items():
        found += _speed_of(name, geometry, work, setting, rates)
        if setting.on_gpu:
            torch.cuda.empty_cache()
    return found


def _speed_of(
    name: str, geometry: Geometry, work: Work, setting: Setting, rates: tuple[float, float]
) -> list[Measurement]:
    model = random_model(geometry, device=setting.device, dtype=torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    weight_bytes = sum(p.nbytes for p in model.parameters())
    requests = work.requests(geometry.vocabulary)
    uneven = [
        replace(each, max_new_tokens=1 + 37 * i % (4 * work.tokens))
        for i, each in enumerate(requests)
    ]
    seconds, seconds_uneven = _generation_s(model, work, [requests, uneven])
    rows = work.groups * work.size
    cache_bytes = geometry.cache_bytes_per_token * (work.prompt + work.tokens // 2)
    limit = min(
        limit_tokens_per_s(rates[0], parameters, GENERATE_FLOP),
        memory_limit_tokens_per_s(
            rates[1], rows=rows, weight_bytes=weight_bytes, cache_bytes_per_row=cache_bytes
        ),
    )
    found = _rate(
        f"{name}: generation, {rows} rows",
        work.response_tokens / seconds,
        limit,
        GENERATION_SHARE,
        setting,
    )
    rate = sum(each.max_new_tokens for each in uneven) / seconds_uneven
    found.append(
        Measurement(f"{name}: generation, 1 to {4 * work.tokens} tokens", rate, "tokens/s")
    )
    if setting.on_gpu:
        (seconds,) = _generation_s(model, work, [requests], captures=False)
        found.append(
            Measurement(
                f"{name}: generation without graphs", work.response_tokens / seconds, "tokens/s"
            )
        )
    config = policy_config(
        setting.device, microbatch_tokens=work.microbatch_tokens, max_response_tokens=work.tokens
    )
    policy = Policy(config, as_loaded(model, name))
    samples = work.samples(geometry.vocabulary)
    policy.update(samples, step=1)
    started = perf_counter()
    policy.update(samples, step=2)
    rate = work.response_tokens / (perf_counter() - started)
    limit = limit_tokens_per_s(rates[0], parameters, UPDATE_FLOP)
    return found + _rate(f"{name}: update", rate, limit, UPDATE_SHARE, setting)


def _generation_s(
    model: PreTrainedModel,
    work: Work,
    batches: Sequence[list[GenerationRequest]],
    *,
    captures: bool = True,
) -> list[float]:
    """The seconds of each batch, after a short one; `captures`: decode steps as graphs where the
    engine has them.
    """
    model = copy.deepcopy(model)
    kernels = model_kernels_for(model, reproducible=True)
    kernels = replace(kernels, captures=kernels.captures and captures)
    with closing(
        NativeEngine(model, NativeConfig(slots=work.groups * work.size), model_kernels=kernels)
    ) as engine:
        generate_all(
            engine, [replace(each, max_new_tokens=min(4, work.tokens)) for each in batches[0]]
        )
        return [generate_all(engine, batch) for batch in batches]


def _rate(
    what: str, rate: float, limit: float, share: float, setting: Setting
) -> list[Measurement]:
    """A rate, and which part of its limit it is; that has a bound on a GPU only, where nothing else
    runs.
    """
    return [
        Measurement(what, rate, "tokens/s"),
        Measurement(
            f"{what}, of the limit", rate / limit, at_least=share if setting.on_gpu else None
        ),
    ]


def generate_all(engine: NativeEngine, requests: list[GenerationRequest]) -> float:
    """Seconds until the last response is there."""
    started = perf_counter()
    engine.submit(requests)
    while engine.in_flight:
        engine.poll()
    return perf_counter() - started


def check_memory(setting: Setting) -> list[Measurement]:
    """Peak GPU memory of an update, as a fraction of what the model of memory says, with and
    without recomputation.
    """
    require_gpu(
        setting,
        "a CPU's peak is its process's; the suite compares the model of memory with fake CUDA"
        " tensors",
    )
    found = []
    for name, geometry, recompute in (
        ("0.5B", QWEN_HALF, False),
        ("1.5B", QWEN_ONE_AND_A_HALF, True),
    ):
        policy, samples, predicted = _update_with_prediction(setting, geometry, recompute=recompute)
        policy.update(samples, step=1)  # makes AdamW's moments, and begins a new peak when it ends
        peak = policy.update(samples, step=2)["time/peak_gpu_memory_gib"] * 2**30
        what = f"Qwen2.5-{name}{', recomputed' if recompute else ''}"
        found += [
            Measurement(f"{what}: peak", peak / 2**30, "GiB"),
            Measurement(
                f"{what}: peak over prediction",
                peak / predicted,
                at_most=1 + RESERVE,
                at_least=PREDICTED_PART,
            ),
        ]
        del policy
        torch.cuda.empty_cache()
    return found


def _update_with_prediction(
    setting: Setting, geometry: Geometry, *, recompute: bool
) -> tuple[Policy, list[Sample], float]:
    """A policy, a minibatch of full microbatches, and the bytes that the model of memory gives to
    its update.
    """
    work = Work(groups=32, size=4, prompt=100, tokens=128, microbatch_tokens=8192)
    config = policy_config(
        setting.device, microbatch_tokens=work.microbatch_tokens, max_response_tokens=work.tokens
    )
    config = config.changed("train", recompute=recompute).changed("rollout", group_size=work.size)
    model = random_model(geometry, device=setting.device, dtype=torch.bfloat16)
    dimensions = dimensions_of(model)
    assert dimensions is not None
    memory = TrainerMemory(config, dimensions, ResponseLengths(work.prompt, work.tokens))
    samples = work.samples(geometry.vocabulary)
    (microbatches,) = partition_minibatch(samples, config, ranks=1)
    tokens = max(_stream_tokens(microbatch.samples) for microbatch in microbatches)
    predicted = sum(memory.breakdown(tokens, recompute=recompute).values())
    return Policy(config, as_loaded(model, "memory")), samples, predicted


def _stream_tokens(samples: Sequence[Sample]) -> int:
    """The tokens of a packed microbatch: each group's prompt once, and all responses."""
    prompts = {sample.group_id: len(sample.prompt_ids) for sample in samples}
    return sum(prompts.values()) + sum(len(sample.response_ids) for sample in samples)


def check_syncs(setting: Setting) -> list[Measurement]:
    """How often the host waits for the device: per decode step, and per update of several
    microbatches.
    """
    require_gpu(setting, "a CPU has nothing to wait for; the suite counts on fake CUDA tensors")
    geometry = next(iter(sizes(setting)[0].values()))
    engine, decode_steps = _decoding_engine(setting, geometry)
    with _counted_syncs() as in_decode:
        for _ in range(decode_steps):
            engine.poll()
    policy, samples = _small_update(setting, geometry)
    policy.update(samples, step=1)
    with _counted_syncs() as in_update:
        policy.update(samples, step=2)
    return [
        Measurement(
            "waits per decode step",
            in_decode.total() / decode_steps,
            at_most=SYNCS_PER_DECODE_STEP,
            detail=_most_common(in_decode),
        ),
        Measurement(
            "waits per update",
            in_update.total(),
            at_most=SYNCS_PER_UPDATE,
            detail=_most_common(in_update),
        ),
    ]


def check_kernels(setting: Setting) -> list[Measurement]:
    """Which kernels run: none of cuDNN's attention, and few enough per decode step."""
    require_gpu(
        setting, "there are no kernels on a CPU; the suite counts them on fake CUDA tensors"
    )
    geometry = next(iter(sizes(setting)[0].values()))
    engine, decode_steps = _decoding_engine(setting, geometry)
    in_decode = _kernels(lambda: [engine.poll() for _ in range(decode_steps)])
    policy, samples = _small_update(setting, geometry)
    in_update = _kernels(lambda: policy.update(samples, step=1))
    if not in_decode or not in_update:
        raise Skipped("torch's profiler recorded no kernels: CUPTI may lack the permission")
    budget = KERNELS_PER_LAYER * geometry.layers + KERNELS_PER_STEP
    cudnn = Counter(
        {name: count for name, count in (in_decode + in_update).items() if "cudnn" in name.lower()}
    )
    preferred = float(torch.backends.cuda.cudnn_sdp_enabled())
    return [
        Measurement("cuDNN's attention is allowed (0: no)", preferred, at_most=0),
        Measurement("kernels of cuDNN", cudnn.total(), at_most=0, detail=_most_common(cudnn)),
        Measurement("kernels per decode step", in_decode.total() / decode_steps, at_most=budget),
        Measurement("kernels of an update", in_update.total(), detail=_most_common(in_update)),
    ]


def _decoding_engine(setting: Setting, geometry: Geometry) -> tuple[NativeEngine, int]:
    """An engine of which the next so many polls are decode steps that finish nothing."""
    work = Work(groups=4, size=8, prompt=50, tokens=64, microbatch_tokens=1)
    model = random_model(geometry, device=setting.device, dtype=torch.bfloat16)
    engine = NativeEngine(model, NativeConfig(slots=32))
    engine.submit(work.requests(geometry.vocabulary))
    for _ in range(20):
        engine.poll()
    return engine, 20


def _small_update(setting: Setting, geometry: Geometry) -> tuple[Policy, list[Sample]]:
    """A policy and a minibatch of two microbatches."""
    work = Work(groups=8, size=8, prompt=64, tokens=120, microbatch_tokens=4096)
    model = random_model(geometry, device=setting.device, dtype=torch.bfloat16)
    config = policy_config(
        setting.device, microbatch_tokens=work.microbatch_tokens, max_response_tokens=work.tokens
    )
    return Policy(config, as_loaded(model, "small")), work.samples(geometry.vocabulary)


@contextmanager
def _counted_syncs() -> Iterator[Counter[str]]:
    """Counts by line of Python, filled when the block ends."""
    counts: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield counts
        finally:
            torch.cuda.set_sync_debug_mode("default")
    lines = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    counts.update(f"{Path(w.filename).name}:{w.lineno}" for w in lines)


def _kernels(compute: Callable[[], Any]) -> Counter[str]:
    """The CUDA kernels of a computation by name, copies and fills left out."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        compute()
        torch.cuda.synchronize()
    events = [
        event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return Counter(e.name for e in events if not e.name.startswith(("Memcpy", "Memset")))


def _most_common(counts: Counter[str]) -> str:
    return ", ".join(f"{name[:80]} x{count}" for name, count in counts.most_common(8))
