"""Laws of configs/dapo_32b.yaml on its cluster of 16 nodes with 8 GPUs, as far as they need no
GPU.
"""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dapo.config import Config, load_config
from dapo.core.secrets import HUB_VARIABLES
from dapo.distributed.engine_specs import engine_specs
from dapo.distributed.launch import threads_on_cluster
from dapo.distributed.protocol import Node
from dapo.distributed.ray.placement import bundle_of
from dapo.distributed.trainer_group import trainer_specs
from dapo.engines.vllm.start import engine_arguments
from dapo.policy.fsdp.policy import shard
from dapo.policy.fsdp.ranks import Ranks
from dapo.policy.hf_io import rows_of_rank
from dapo.policy.model import load_meta_model, load_model
from dapo.start.read import read_model
from dapo.start.resolve import device_for_inputs
from helpers.paper_model import NODES, PARAMETERS, paper_config
from helpers.paths import TINY
from helpers.tiny_models import tiny_model

GIB = 2**30


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    return paper_config(tmp_path)


def test_every_rank_and_engine_gets_its_gpus_and_their_part_of_the_nodes_cpus(
    config: Config,
) -> None:
    ranks = trainer_specs(config, NODES)
    engines = engine_specs(config, NODES)
    assert [(spec.gpus, spec.cpus) for spec in ranks] == [(1, 12)] * 64
    assert [(spec.gpus, spec.cpus) for spec in engines] == [(4, 48)] * 16
    assert {spec.environment["OMP_NUM_THREADS"] for spec in (*ranks, *engines)} == {"12"}
    assert {spec.options["threads"] for spec in ranks} == {12}


def test_an_engine_reserves_its_gpus_for_the_ranks_on_them_which_are_its_own(
    tmp_path: Path,
) -> None:
    config = paper_config(
        tmp_path,
        "distributed.gpus_per_process=0.5",
        "distributed.trainer_ranks=128",
        "rollout.engines=32",
    )
    ranks = trainer_specs(config, NODES)
    engines = engine_specs(config, NODES)
    assert [(spec.gpus, spec.cpus) for spec in engines] == [(4, 48)] * 32
    assert {spec.gpus for spec in ranks} == {0}
    assert [spec.shares for spec in ranks] == [(f"engine-{i // 4}", i % 4) for i in range(128)]
    assert {spec.environment["OMP_NUM_THREADS"] for spec in (*ranks, *engines)} == {"6"}
    options = engines[0].options["options"]
    assert (options.sleeps, options.transfer, options.tensor_parallel) == (True, "ipc", 4)


def test_all_bundles_fit_on_the_sixteen_nodes_at_once(config: Config) -> None:
    specs = [*trainer_specs(config, NODES), *engine_specs(config, NODES)]
    free = [node._asdict() for node in NODES]
    for bundle in (bundle_of(spec, counts_cpus=True) for spec in specs):
        node = next(n for n in free if n["cpus"] >= bundle["CPU"] and n["gpus"] >= bundle["GPU"])
        node["cpus"] -= bundle["CPU"]
        node["gpus"] -= bundle["GPU"]
    assert all(node["gpus"] == 0 for node in free)


def test_segments_of_torchs_allocator_grow_in_ranks_and_native_engines_but_not_in_vllm(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = "PYTORCH_CUDA_ALLOC_CONF"
    native = load_config(TINY, ["rollout.engines=1", "launcher=ray"])
    trainers = trainer_specs(config, NODES)
    assert {spec.environment[variable] for spec in (*trainers, *engine_specs(native))} == {
        "expandable_segments:True"
    }
    # its all-reduce between GPUs cannot share such memory: vLLM issue 42609
    assert all(variable not in spec.environment for spec in engine_specs(config, NODES))
    assert (
        variable not in trainer_specs(config.changed("train", device="cpu"), NODES)[0].environment
    )
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert variable not in trainer_specs(config, NODES)[0].environment


def test_only_processes_that_load_a_model_by_its_name_get_secrets_and_only_the_hubs(
    config: Config,
) -> None:
    native = load_config(TINY, ["rollout.engines=1", "launcher=ray"])
    assert {spec.secrets for spec in (*trainer_specs(config, NODES), *engine_specs(native))} == {
        HUB_VARIABLES
    }
    assert {spec.secrets for spec in engine_specs(config, NODES)} == {()}
    trusting = config.changed("model", trust_remote_code=True)
    assert {spec.secrets for spec in engine_specs(trusting, NODES)} == {HUB_VARIABLES}


def test_an_engine_is_one_process_per_gpu_without_ray_and_its_weights_and_cache_fit(
    config: Config,
) -> None:
    options = engine_specs(config, NODES)[0].options["options"]
    arguments = engine_arguments(options, "folder", on_cpu=False)
    assert (arguments["distributed_executor_backend"], arguments["tensor_parallel_size"]) == (
        "mp",
        4,
    )
    assert (
        arguments["enforce_eager"],
        arguments["async_scheduling"],
    ) == (False, None)
    # vLLM's own for the GPU
    assert arguments.keys().isdisjoint({"max_num_seqs", "max_num_batched_tokens"})
    assert (arguments["max_model_len"], arguments["dtype"]) == (2048 + 20480, "bfloat16")
    assert arguments["kv_cache_memory_bytes"] == 48 * GIB
    assert 2 * PARAMETERS / 4 + arguments["kv_cache_memory_bytes"] < 0.9 * 80 * GIB
    assert sum(map(_elements, options.weight_shapes.values())) == PARAMETERS
    assert "rope_theta" in options.model_config


def test_an_engine_that_shares_its_gpu_takes_its_part_of_the_memory() -> None:
    shared = [
        "rollout.engine=vllm",
        "launcher=ray",
        "distributed.gpus_per_process=0.5",
        "model.dtype=bfloat16",
    ]
    (spec,) = engine_specs(load_config(TINY, shared), [Node(cpus=8, gpus=1)])
    assert (spec.gpus, spec.cpus) == (1, 8)  # its rank's half, too
    options = spec.options["options"]
    used = engine_arguments(options, "folder", on_cpu=False, gpu_bytes=80 * GIB)[
        "gpu_memory_utilization"
    ]
    assert options.sleeps
    # all but what its trainer's rank keeps of a tiny model
    assert used == pytest.approx(0.9 - 4 / 80, rel=1e-4)
    (spec,) = engine_specs(
        load_config(TINY, [*shared, "schedule=one_step_off"]), [Node(cpus=8, gpus=1)]
    )
    assert (
        engine_arguments(spec.options["options"], "folder", on_cpu=False)["gpu_memory_utilization"]
        == 0.45
    )


def _elements(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def test_the_controller_holds_none_of_the_models_65_gb(config: Config) -> None:
    folder = Path(config.model.name)
    load_model("tiny-random", dtype=torch.float32).tokenizer.save_pretrained(folder)
    (folder / "model.safetensors").rename(folder / "unread.safetensors")
    before = peak_memory()
    loaded = read_model(config.model, config.train, device_for_inputs(config, training=True))
    assert peak_memory() - before < GIB / 2
    assert all(weight.is_meta for weight in loaded.model.parameters())
    assert loaded.model.num_parameters() == PARAMETERS
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.model.config.max_position_embeddings == 131072


def peak_memory() -> int:
    """Bytes of main memory that this process has held at most."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def one_of_ranks(rank: int, size: int) -> Iterator[Ranks]:
    """Ranks as this one sees them, without the others: nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        found: Any = SimpleNamespace(
            device=torch.device("cpu"), mesh=init_device_mesh("cpu", (size,))
        )
        yield found
    finally:
        dist.destroy_process_group()


def test_a_rank_holds_a_64th_of_the_model_in_float32(config: Config) -> None:
    model = load_meta_model(config.model.name).to(torch.bfloat16)
    with one_of_ranks(63, 64) as ranks:
        weights = dict(shard(model, ranks).model.named_parameters())
        assert sum(weight.to_local().numel() for weight in weights.values()) == PARAMETERS / 64
        assert {weight.dtype for weight in weights.values()} == {torch.float32}
        assert all(weight.is_meta for weight in weights.values())


@pytest.mark.parametrize("rank", range(5))
def test_the_rows_that_a_rank_reads_are_those_that_it_holds(rank: int) -> None:
    with one_of_ranks(rank, 5) as ranks:
        for weight in shard(tiny_model("tied llama"), ranks).model.parameters():
            rows = rows_of_rank(weight.shape[0], rank, 5)
            assert rows.stop - rows.start == len(weight.to_local())


def test_threads_follow_the_gpus_of_a_node_or_spread_over_nodes_without_any() -> None:
    config = load_config(
        TINY, ["launcher=ray:auto", "distributed.trainer_ranks=3", "rollout.engines=2"]
    )
    head = Node(cpus=4, gpus=0)
    assert threads_on_cluster(config, [head, *NODES], gpus=1) == 12
    assert threads_on_cluster(config, [Node(cpus=32, gpus=4), *NODES], gpus=1) == 8
    assert threads_on_cluster(config, NODES, gpus=0.5) == 6
    assert threads_on_cluster(config, [Node(cpus=2, gpus=8)], gpus=1) == 1
    assert threads_on_cluster(config, [head], gpus=0) is None
    # 3 processes on a node of 4
    assert threads_on_cluster(config, [head, Node(cpus=9, gpus=0)], gpus=0) == 1
    assert threads_on_cluster(config, [head] * 5, gpus=0) == 4
