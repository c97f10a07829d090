"""Laws of the parts of a GPU's memory that ranks and engines take, of the shipped configurations
and layouts near them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from dapo.analysis.check.estimate import ResourceEstimate, hardware_profile_for
from dapo.analysis.check.report import estimate_of, find_problems
from dapo.config import Config, build_config, load_config
from dapo.core.errors import ConfigError, EngineError
from dapo.distributed.vllm_spec import vllm_engine_spec
from dapo.engines.vllm.start import VllmOptions, engine_arguments
from dapo.policy.model_dimensions import _FIELDS, PUBLISHED
from dapo.start.resolve import require_hardware
from helpers.paths import CONFIGS
from helpers.shipped_configs import SHIPPED
from helpers.tables import for_each_row

GIB = 2**30
GPU = 79.6 * GIB  # of an H100 of 80 GB
FULLEST = 0.95


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function from a published model's name to a directory with its config.json."""

    @cache
    def make(name: str) -> str:
        folder = tmp_path_factory.mktemp("models") / Path(name).name
        sizes = dict(zip(_FIELDS, PUBLISHED[name], strict=True))
        AutoConfig.for_model(**sizes).save_pretrained(folder)
        for file in ("model.safetensors", "tokenizer.json"):
            (folder / file).touch()
        return str(folder)

    return make


def with_gpus(name: str, *overrides: str) -> Config:
    return load_config(CONFIGS / f"{name}.yaml", ["train.device=cuda", *overrides])


def estimate(config: Config, gpus: int) -> ResourceEstimate:
    """The estimate of `dapo check` for a machine, or a cluster, of so many GPUs."""
    profile = replace(
        hardware_profile_for(config), devices_per_node=min(8, gpus), memory_gib=GPU / GIB
    )
    found = estimate_of(config, profile)[0]
    assert found is not None
    return found


def utilization(options: VllmOptions) -> float:
    """The part of a GPU that vLLM is told to fill, its weights and cache."""
    arguments = engine_arguments(options, "folder", on_cpu=False, gpu_bytes=GPU)
    share: float = arguments["gpu_memory_utilization"]
    return share


AUTO = "rollout.vllm.cache_gib=auto"
ADAPTERS = "model.lora={rank: 32}"
ALONE = ("launcher=local", "distributed.trainer_ranks=1", "rollout.engines=1")
IN_TURN = "distributed.gpus_per_process=0.5"
LAYOUTS: list[tuple[str, tuple[str, ...], int, bool]] = [
    ("dapo_7b", ALONE, 1, False),
    ("dapo_7b", (*ALONE, ADAPTERS, "rollout.max_response_tokens=8192"), 1, True),
    ("dapo_7b", (), 8, True),
    ("dapo_7b", (ADAPTERS,), 8, True),
    ("dapo_7b", ("launcher=ray", "distributed.trainer_ranks=64", "rollout.engines=64"), 128, True),
    (
        "dapo_7b",
        ("launcher=ray", "distributed.trainer_ranks=128", "rollout.engines=128", IN_TURN),
        128,
        True,
    ),
    ("dapo_32b", (*ALONE, "rollout.vllm.tensor_parallel=1", AUTO), 1, False),
    ("dapo_32b", ("launcher=local", AUTO), 1, False),
    ("dapo_32b", ("launcher=local", AUTO), 8, False),
    (
        "dapo_32b",
        ("launcher=local", "distributed.trainer_ranks=8", "rollout.engines=2", AUTO),
        8,
        False,
    ),
    (
        "dapo_32b",
        ("launcher=local", "distributed.trainer_ranks=8", "rollout.engines=2", AUTO, ADAPTERS),
        8,
        True,
    ),
    ("dapo_32b", (), 128, True),
    ("dapo_32b", (AUTO,), 128, True),
    ("dapo_32b", (IN_TURN, "distributed.trainer_ranks=128", "rollout.engines=32"), 128, True),
    ("dapo_32b", (IN_TURN, "distributed.trainer_ranks=128", "rollout.engines=32", AUTO), 128, True),
]


@for_each_row(["name", "overrides", "gpus", "fits"], LAYOUTS)
def test_check_gives_shares_of_a_gpu_that_are_some_and_not_all_of_it(
    name: str, overrides: tuple[str, ...], gpus: int, fits: bool
) -> None:
    found = estimate(with_gpus(name, *overrides), gpus)
    problems = list(find_problems(found))
    assert (problems == []) == fits, problems
    assert not any("-" in word for problem in problems for word in problem.split("GiB")[:-1])
    assert min(found.available, found.engine_available) >= 0
    if not fits:
        return
    assert found.devices == gpus
    shares = found.shares
    kept = shares.trainers * found.memory.kept_bytes() if shares.alternates else 0
    engine = shares.engines * sum(found.engine_memory().values())
    assert 0 < sum(found.trainer_memory().values()) <= FULLEST * GPU
    assert 0 < kept + engine <= FULLEST * GPU


def test_check_of_the_shipped_7b_is_for_its_eight_gpus() -> None:
    found = estimate(with_gpus("dapo_7b"), 8)
    trainer = sum(found.trainer_memory().values()) / GIB
    engine = sum(found.engine_memory().values()) / GIB
    assert (round(trainer, 1), round(engine, 1)) == (43.4, 57.0)
    assert (found.config.microbatch_tokens, found.config.train.recompute) == (32_768, True)
    assert found.shares.is_paired
    assert found.shares.alternates
    assert found.shares.transfer == "ipc"
    assert found.sync_bytes == 2 * 7_615_616_512


@for_each_row(
    ["name", "gpus"],
    [(name, gpus) for name in SHIPPED for gpus in (1, 8)],
)
def test_an_evaluation_counts_its_own_engines_only(
    model_folder: Callable[[str], str], name: str, gpus: int
) -> None:
    """Of each shipped configuration, with vLLM, on this machine."""
    options = SHIPPED[name].model_dump(mode="json")
    on_gpus = ["train.device=cuda", "rollout.engine=vllm", "launcher=local", AUTO]
    config = build_config(options, [*on_gpus, "model.dtype=bfloat16"])
    if config.model.name in PUBLISHED:
        config = config.changed("model", name=model_folder(config.model.name))
    evaluated = config.without_trainer(gpus)
    size = evaluated.gpus_per_engine
    engines = evaluated.engine_processes
    if size > gpus:  # refused by require_hardware, below
        return
    assert engines * size <= gpus
    shares = evaluated.gpu_shares(gpus)
    assert (shares.trainers, shares.alternates, shares.transfer) == (0, False, None)
    options = vllm_engine_spec(evaluated, threads=1, shares=shares).options["options"]
    # a GPU is an engine's alone, and all of the nine tenths are its
    assert (options.trainer_bytes, options.sleeps) == (0, False)
    assert utilization(options) == pytest.approx(0.9)


def test_an_engine_of_more_gpus_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = with_gpus("dapo_32b", "launcher=local")
    with pytest.raises(ConfigError, match=r"tensor_parallel=4: expected at most 1, the number of"):
        require_hardware(config, training=False)


def test_an_evaluation_of_a_run_in_turn_gives_its_engines_whole_gpus() -> None:
    config = with_gpus(
        "dapo_32b", IN_TURN, "distributed.trainer_ranks=128", "rollout.engines=32"
    ).without_trainer(None)
    assert config.distributed.gpus_per_process is None
    assert (config.gpus_needed, config.gpu_shares(0).is_shared) == (128, False)


def test_ranks_that_keep_a_whole_gpu_are_an_error_and_no_negative_share(
    model_folder: Callable[[str], str],
) -> None:
    """64 ranks of 32 B on 8 GPUs keep 78 GiB of each."""
    config = with_gpus("dapo_32b", "launcher=local", AUTO, "model.dtype=bfloat16")
    config = config.changed("model", name=model_folder(config.model.name))
    spec = vllm_engine_spec(config, threads=1, shares=config.gpu_shares(8))
    with pytest.raises(EngineError, match=r"trainer ranks keep \d+\.\d GiB of a GPU of 79\.6 GiB"):
        utilization(spec.options["options"])
