"""Engines and trainer ranks in processes of their own: what reaches them, what they compute, and
their settings.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.acceptance.check import Measurement, Setting
from benchmarks.acceptance.correctness import GRADIENT_ERROR, SMALL_MODEL_GAP_NATS, total_error
from benchmarks.acceptance.engines import (
    EQUAL_RESPONSES,
    answers,
    equal_share,
    sampling_requests,
)
from benchmarks.acceptance.models import ragged_samples
from benchmarks.acceptance.observed import Observed
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


class ObservingLauncher(LocalLauncher):
    """Starts every worker's object inside of an `Observed`."""

    def __init__(self, logs: Path, observed: type[Observed] = Observed) -> None:
        super().__init__(logs, timeout_s=START_S)
        self._factory = f"{observed.__module__}:{observed.__qualname__}"
        self.started: list[LocalWorker] = []

    def start(
        self, names: Sequence[str], specs: Sequence[WorkerSpec], *, together: bool = False
    ) -> list[LocalWorker]:
        wrapped = [
            replace(
                spec,
                factory=self._factory,
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
    config = run_config(setting, dtype="float32", rollout={"engines": 1})
    loaded = loaded_model(config)
    policy = Policy(config, loaded_model(config))
    requests = sampling_requests(vocabulary_of(loaded))
    with closing(ObservingLauncher(setting.folder / "logs")) as launcher:
        engine = build_engine(config, loaded, launcher)
        # other weights than those of the files
        policy.update(ragged_samples(vocabulary_of(loaded)), step=1)
        started = perf_counter()
        engine.load_weights(policy.weights(version=1), 1)
        seconds = perf_counter() - started
        preferring = launcher.with_cudnn_attention()
        found = answers(engine, requests)
    here = NativeEngine(loaded.model, NativeConfig(slots=16))
    before = answers(here, requests)
    here = NativeEngine(loaded_model(config).model, NativeConfig(slots=16))
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
        Measurement(f"sending {gigabytes:.2g} GB of weights", seconds, "s"),
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
    config = run_config(setting, dtype=dtype, distributed={"trainer_ranks": ranks})
    alone = Policy(run_config(setting, dtype=dtype), loaded_model(config))
    samples = [
        replace(sample, engine_logprobs=(-4.0,) * len(sample.response_ids))
        for sample in ragged_samples(vocabulary_of(loaded_model(config)))
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


def run_config(
    setting: Setting, *, dtype: str, small: bool | None = None, **sections: Any
) -> Config:
    """A run of the builtin small model; on a CPU of the tiny one, unless `small` is False."""
    tiny = not setting.on_gpu if small is None else small
    return build_config(
        {
            "model": {"name": "tiny-random" if tiny else "smollm2-135m-instruct", "dtype": dtype},
            "data": {"train": "builtin:sums"},
            "overlong": {"mode": "off"},
            "optim": {"lr": 3e-2 if tiny else 1e-3, "warmup_steps": 0},
            "train": {"microbatch_tokens": 512, "recompute": False, "device": setting.device},
            **sections,
            "rollout": {"max_response_tokens": 200, **sections.get("rollout", {})},
        }
    )


def loaded_model(config: Config) -> LoadedModel:
    """The run's model, with its files' weights."""
    return load_model(
        config.model.name, dtype=getattr(torch, config.model.dtype), device=config.train.device
    )


def vocabulary_of(loaded: LoadedModel) -> int:
    """The number of tokens that the model knows."""
    return int(loaded.model.config.vocab_size)


def _new_folder(setting: Setting, name: str) -> Path:
    folder = setting.folder / name
    folder.mkdir()
    return folder


def _moments(policy: Policy, folder: Path) -> dict[str, Tensor]:
    """AdamW's first moments, which after one update are a multiple of the gradient."""
    policy.save(folder)
    return load_file(folder / "exp_avg.safetensors")
