"""Engines and trainer ranks in processes of their own: what reaches them, what they compute, and
their settings.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.acceptance.check import Measurement, Setting, Skipped
from benchmarks.acceptance.correctness import GRADIENT_ERROR, SMALL_MODEL_GAP_NATS, total_error
from benchmarks.acceptance.engines import (
    EQUAL_RESPONSES,
    answers,
    engine_gap,
    equal_share,
    sampled,
    sampling_requests,
)
from benchmarks.acceptance.models import ragged_samples
from dapo.config import Config
from dapo.config.load import build_config
from dapo.config.rollout_options import NativeConfig
from dapo.distributed.local import LocalLauncher, LocalWorker
from dapo.distributed.protocol import WorkerSpec
from dapo.distributed.trainer_group import TrainerGroup
from dapo.engines.native.engine import NativeEngine
from dapo.policy.model import LoadedModel, load_model
from dapo.policy.policy import Policy
from dapo.start.build import build_engine

RANKS = 2
ERRORS = {"float32": 1e-4, "bfloat16": GRADIENT_ERROR}
"""Bounds on the norm of an error over the norm: ranks sum in another order, and in bfloat16 round
other sums.
"""
GAPS_NATS = {"float32": 1e-4, "bfloat16": SMALL_MODEL_GAP_NATS}
START_S = 240.0


class Observed:
    """In a worker: the object that the run would create there, and what its process is set to."""

    def __init__(self, factory: str, options: dict[str, Any]) -> None:
        self._target: Any = resolve_name(factory)(**options)

    def prefers_cudnn_attention(self) -> bool:
        """Whether torch may choose cuDNN's attention in this process, after its model has been set
        up.
        """
        return bool(torch.backends.cuda.cudnn_sdp_enabled())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class ObservingLauncher(LocalLauncher):
    """Starts every worker's object inside of an `Observed`."""

    def __init__(self, logs: Path) -> None:
        super().__init__(logs, timeout_s=START_S)
        self.started: list[LocalWorker] = []

    def start(
        self, names: Sequence[str], specs: Sequence[WorkerSpec], *, together: bool = False
    ) -> list[LocalWorker]:
        wrapped = [
            replace(
                spec,
                factory=f"{Observed.__module__}:{Observed.__qualname__}",
                options={"factory": spec.factory, "options": dict(spec.options)},
            )
            for spec in specs
        ]
        workers = super().start(names, wrapped, together=together)
        self.started += workers
        return workers

    def with_cudnn_attention(self) -> int:
        """How many of the started processes prefer cuDNN's attention."""
        return sum(
            worker.call("prefers_cudnn_attention").result(START_S) for worker in self.started
        )


def check_engine_process(setting: Setting) -> list[Measurement]:
    """A native engine in a process of its own, given weights, samples what one in this process
    does.
    """
    config = _config(setting, dtype="float32", rollout={"engines": 1})
    loaded = _load(config)
    policy = Policy(config, _load(config))
    requests = sampling_requests(_vocabulary(loaded))
    messages: list[str] = []
    with closing(ObservingLauncher(setting.folder / "logs")) as launcher:
        engine = build_engine(config, loaded, launcher, log=messages.append)
        # other weights than those of the files
        policy.update(ragged_samples(_vocabulary(loaded)), step=1)
        started = perf_counter()
        engine.load_weights(policy.weights(version=1), 1)
        seconds = perf_counter() - started
        preferring = launcher.with_cudnn_attention()
        found = answers(engine, requests)
    here = NativeEngine(loaded.model, NativeConfig(slots=16))
    before = answers(here, requests)
    here = NativeEngine(_load(config).model, NativeConfig(slots=16))
    here.load_weights(policy.weights(version=1), 1)
    gigabytes = sum(weight.nbytes for _, weight in loaded.named_tensors()) / 1e9
    return [
        Measurement(
            "responses equal to this process's",
            equal_share(found, answers(here, requests)),
            at_least=EQUAL_RESPONSES,
        ),
        Measurement(
            "responses equal to those of the old weights", equal_share(found, before), at_most=0.5
        ),
        Measurement("processes that prefer cuDNN's attention", preferring, at_most=0),
        Measurement("transfers without a file that failed", len(messages), at_most=0),
        Measurement(f"sending {gigabytes:.2g} GB of weights", seconds, "s"),
    ]


def check_engine_process_bfloat16(setting: Setting) -> list[Measurement]:
    """A native engine in another process in bfloat16, where a GPU attends by lengths, over two
    loads of weights.
    """
    return _gaps_of_two_loads(setting, {"engines": 1})


def check_vllm(setting: Setting) -> list[Measurement]:
    """VLLM as runs use it, with graphs on a GPU: weights are loaded, sampled from, given up, and
    loaded again.
    """
    if setting.vllm_python is None and find_spec("vllm") is None:
        raise Skipped(
            "no vLLM in this environment, and none named: VLLM_PYTHON=PATH of another one's"
            " interpreter"
        )
    vllm = {"python": setting.vllm_python, "cache_gib": 1.0}
    return _gaps_of_two_loads(setting, {"engine": "vllm", "engines": 1, "vllm": vllm}, small=False)


def _gaps_of_two_loads(
    setting: Setting, rollout: dict[str, Any], *, small: bool | None = None
) -> list[Measurement]:
    """The engine's log-probabilities against the policy's in bfloat16, before and after an update
    of the policy.

    Before the second load the engine drops its weights: where it shares the GPU with the policy,
    vLLM sleeps and wakes.
    """
    config = _config(setting, dtype="bfloat16", rollout=rollout, small=small)
    loaded = _load(config)
    policy = Policy(config, loaded)
    requests = sampling_requests(_vocabulary(loaded))
    with closing(LocalLauncher(setting.folder / "logs", timeout_s=START_S)) as launcher:
        engine = build_engine(config, loaded, launcher)
        engine.load_weights(policy.weights(version=1), 1)
        first = sampled(engine, requests)
        gaps = {"first load": engine_gap(policy, requests, first)}
        engine.drop_weights()
        policy.update(ragged_samples(_vocabulary(loaded)), step=1)
        engine.load_weights(policy.weights(version=2), 2)
        second = answers(engine, requests)
    gaps["second load"] = engine_gap(policy, requests, second)
    stale = engine_gap(policy, requests, first)[0]
    return [
        *(
            Measurement(f"{name}: mean gap", gap[0], "nats", at_most=SMALL_MODEL_GAP_NATS)
            for name, gap in gaps.items()
        ),
        Measurement("second load: largest gap", gaps["second load"][1], "nats"),
        Measurement(
            "mean gap if the first weights had stayed",
            stale,
            "nats",
            at_least=2 * SMALL_MODEL_GAP_NATS,
        ),
    ]


def check_ranks(setting: Setting) -> list[Measurement]:
    """The gradient of a sharded model against that of one process, in float32 and in mixed
    precision; the weights.

    There are two ranks; on a single GPU there is one, over NCCL.
    """
    ranks = min(RANKS, torch.cuda.device_count()) if setting.on_gpu else RANKS
    return [
        replace(each, what=f"{dtype}, {ranks} ranks: {each.what}")
        for dtype in ERRORS
        for each in _ranks_in(setting, dtype, ranks)
    ]


def _ranks_in(setting: Setting, dtype: str, ranks: int) -> list[Measurement]:
    config = _config(setting, dtype=dtype, distributed={"trainer_ranks": ranks})
    alone = Policy(_config(setting, dtype=dtype), _load(config))
    samples = [
        replace(sample, engine_logprobs=(-4.0,) * len(sample.response_ids))
        for sample in ragged_samples(_vocabulary(_load(config)))
    ]
    with (
        closing(ObservingLauncher(setting.folder / f"logs-{dtype}")) as launcher,
        _group(config, launcher) as group,
    ):
        metrics = group.update(group.record_old_logprobs(samples), step=1)
        group.save(_new_folder(setting, f"group-{dtype}"))
        source = group.weights(version=1)
        weights = {name: weight.float().cpu().clone() for name, weight in source.named_tensors()}
        preferring = launcher.with_cudnn_attention()
    alone_metrics = alone.update(alone.record_old_logprobs(samples), step=1)
    expected = _moments(alone, _new_folder(setting, f"alone-{dtype}"))
    alone_weights = {
        name: weight.float().cpu().clone()
        for name, weight in alone.weights(version=1).named_tensors()
    }
    alone.load(setting.folder / f"group-{dtype}")
    found = _moments(alone, _new_folder(setting, f"joined-{dtype}"))
    name = "rollout/engine_logprob_gap_mean"  # it depends on the log-probability of every token
    gap = abs(metrics[name] - alone_metrics[name])
    error = total_error(weights, alone_weights)
    return [
        Measurement("error of the gradient", total_error(found, expected), at_most=ERRORS[dtype]),
        Measurement("error of the gathered weights", error, at_most=ERRORS[dtype]),
        Measurement(
            "difference of the mean log-probability gap", gap, "nats", at_most=GAPS_NATS[dtype]
        ),
        Measurement("processes that prefer cuDNN's attention", preferring, at_most=0),
    ]


@contextmanager
def _group(config: Config, launcher: LocalLauncher) -> Iterator[TrainerGroup]:
    with closing(TrainerGroup(config, launcher)) as group:
        yield group


def _config(setting: Setting, *, dtype: str, small: bool | None = None, **sections: Any) -> Config:
    """A run of the builtin small model; on a CPU of the tiny one, unless `small` is False."""
    tiny = not setting.on_gpu if small is None else small
    return build_config(
        {
            "model": {"name": "tiny-random" if tiny else "smollm2-135m-instruct", "dtype": dtype},
            "data": {"train": "builtin:sums"},
            "overlong": {"mode": "off"},
            "optim": {"lr": 1e-2 if tiny else 1e-3, "warmup_steps": 0},
            "train": {"microbatch_tokens": 512, "recompute": False, "device": setting.device},
            **sections,
            "rollout": {"max_response_tokens": 200, **sections.get("rollout", {})},
        }
    )


def _load(config: Config) -> LoadedModel:
    return load_model(
        config.model.name, dtype=getattr(torch, config.model.dtype), device=config.train.device
    )


def _vocabulary(loaded: LoadedModel) -> int:
    return int(loaded.model.config.vocab_size)


def _new_folder(setting: Setting, name: str) -> Path:
    folder = setting.folder / name
    folder.mkdir()
    return folder


def _moments(policy: Policy, folder: Path) -> dict[str, Tensor]:
    """AdamW's first moments, which after one update are a multiple of the gradient."""
    policy.save(folder)
    return load_file(folder / "exp_avg.safetensors")
