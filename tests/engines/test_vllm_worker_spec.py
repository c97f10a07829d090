"""Laws of the vLLM engine that need no vLLM: what its process is started with, and what it says
where vLLM fails.
"""

import importlib
import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from dapo.cli.train import start_run
from dapo.config import Config, GpuShares, load_config
from dapo.config.option_entries import option_differences
from dapo.core.errors import ConfigError, EngineError, OutOfMemory
from dapo.core.rng import keyed_seed
from dapo.distributed.local import LocalLauncher
from dapo.distributed.vllm_spec import require_vllm, vllm_engine_spec, vllm_options, weight_shapes
from dapo.engines.vllm.engine import VllmEngine
from dapo.engines.vllm.package import require_vllm_package
from dapo.engines.vllm.start import engine_arguments, open_vllm_engine, sampling_arguments
from dapo.types import GenerationRequest
from helpers import vllm_engines
from helpers.paths import ROOT, TESTS, TINY
from helpers.tables import for_each_row
from helpers.tiny_models import ModelWeights, wide_model


def tiny(*overrides: str) -> Config:
    return load_config(TINY, ["model.dtype=float32", "rollout.engine=vllm", *overrides])


@pytest.mark.skipif(vllm_engines.AVAILABLE, reason="vLLM is installed here")
def test_a_missing_package_is_named_with_its_install_command_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    message = (
        r"needs the Python package vllm.*pip install vllm.*dapo show docs"
        r" machines.*rollout\.vllm\.python"
    )
    with pytest.raises(ConfigError, match=message):
        start_run(tiny(), run_dir=tmp_path / "run", config_name="tiny")
    assert not list(tmp_path.iterdir())
    with pytest.raises(EngineError, match=message):  # in a process elsewhere
        open_vllm_engine(vllm_options(tiny()))


def use_vllm(monkeypatch: pytest.MonkeyPatch, start: Any, *, finds_a_device: bool = True) -> None:
    """A package vllm whose engines are made by `start`."""
    vllm = SimpleNamespace(
        EngineArgs=dict, SamplingParams=dict, LLMEngine=SimpleNamespace(from_engine_args=start)
    )
    platform = SimpleNamespace(is_cpu=lambda: False, is_unspecified=lambda: not finds_a_device)
    for name, module in {
        "vllm": vllm,
        "vllm.platforms": SimpleNamespace(current_platform=platform),
        "vllm.sampling_params": SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY=2)),
        "vllm.usage.usage_lib": SimpleNamespace(UsageContext=SimpleNamespace(LLM_CLASS="LLM")),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in (
        "VLLM_RPC_BASE_PATH",
        "TORCH_COMPILE_DISABLE",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
    ):
        # what the start changes ends with the test
        monkeypatch.setenv(name, os.environ.get(name, ""))
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(rendezvous, "TCPStore", rendezvous.TCPStore)


def test_vllm_for_gpus_does_not_start_without_one_and_names_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_vllm(monkeypatch, None, finds_a_device=False)
    with pytest.raises(
        EngineError, match=r"not built for any device .*nvidia-smi.*dapo show docs machines"
    ):
        open_vllm_engine(vllm_options(tiny()))


def test_memory_that_ends_while_vllm_starts_names_its_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(arguments: dict[str, object], *, usage_context: str) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has 3 MiB in use."
        )

    use_vllm(monkeypatch, start)
    with pytest.raises(
        OutOfMemory,
        match=r"^starting vLLM ran out of memory \(1\.50 GiB .*rollout\.vllm\.cache_gib",
    ):
        open_vllm_engine(vllm_options(tiny()))


def test_equal_models_start_from_one_path_by_which_vllm_finds_what_it_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[tuple[str, str]] = []

    def start(arguments: dict[str, Any], *, usage_context: str) -> None:
        # of the others vLLM's limits are those of a server: 128 sequences
        assert usage_context == "LLM"
        content = (Path(arguments["model"]) / "config.json").read_text(encoding="utf-8")
        started.append((arguments["model"], content))
        assert os.environ["VLLM_RPC_BASE_PATH"] != arguments["model"]
        raise EngineError("seen")

    use_vllm(monkeypatch, start)
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path / "cache"))
    small = vllm_options(tiny())
    other = replace(vllm_options(tiny()), model_config='{"model_type": "llama"}')
    for options in (small, small, other):
        with pytest.raises(EngineError, match="seen"):
            open_vllm_engine(options)
    assert [content for _, content in started] == [
        small.model_config,
        small.model_config,
        other.model_config,
    ]
    first, second, third = (Path(model) for model, _ in started)
    assert first == second != third
    assert first.parent == third.parent == tmp_path / "cache" / "vllm"
    assert (
        len(list(tmp_path.rglob("*.json")))
        == len([path for path in tmp_path.rglob("*") if path.is_file()])
        == 2
    )


def test_the_engine_gets_the_shape_of_every_weight_and_no_weights() -> None:
    options = vllm_options(tiny())
    assert (
        options.weight_shapes["lm_head.weight"]
        == options.weight_shapes["model.embed_tokens.weight"]
        == (100, 32)
    )
    assert len(options.weight_shapes) == 21
    assert '"LlamaForCausalLM"' in options.model_config
    assert engine_arguments(options, "folder", on_cpu=True)["load_format"] == "dummy"


def test_a_meta_model_has_the_names_of_the_model_itself(tmp_path: Path) -> None:
    from dapo.policy.model import load_meta_model, load_model

    loaded = load_model("tiny-random", dtype=torch.float32)
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    meta_model = load_meta_model(str(tmp_path))
    assert all(weight.is_meta for weight in meta_model.parameters())
    assert weight_shapes(meta_model) == weight_shapes(loaded.model)


def test_max_tokens_is_prompt_plus_response_limit_capped_by_the_models_context() -> None:
    tokens = ("data.max_prompt_tokens=100", "rollout.max_response_tokens=50", "overlong.mode=off")
    assert vllm_options(tiny(*tokens)).max_tokens == 150
    assert vllm_options(tiny(*tokens, "eval.max_response_tokens=70")).max_tokens == 170
    assert vllm_options(tiny(*tokens, "eval.max_response_tokens=7000")).max_tokens == 4096


@pytest.mark.parametrize(
    ("model", "expected"),
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float64", "float32")],
)
def test_the_dtype_is_the_models_as_far_as_vllm_has_it(model: str, expected: str) -> None:
    assert vllm_options(tiny(f"model.dtype={model}")).dtype == expected


def test_memory_is_what_the_option_says() -> None:
    arguments = engine_arguments(
        vllm_options(tiny("rollout.vllm.cache_gib=1.5")), "folder", on_cpu=True
    )
    assert arguments["kv_cache_memory_bytes"] == 3 * 2**29


def test_memory_and_graphs_are_chosen_by_the_device_where_no_option_says_it() -> None:
    options = vllm_options(tiny())
    on_cpu, on_gpu = (
        engine_arguments(options, "folder", on_cpu=is_cpu) for is_cpu in (True, False)
    )
    assert (on_cpu["kv_cache_memory_bytes"], on_cpu["enforce_eager"]) == (2 * 2**30, True)
    assert "kv_cache_memory_bytes" not in on_gpu
    assert (on_gpu["gpu_memory_utilization"], on_gpu["enforce_eager"]) == (0.9, False)
    shared = engine_arguments(replace(options, gpu_processes=2), "folder", on_cpu=False)
    in_turn = replace(options, sleeps=True, trainer_bytes=20)
    assert (
        engine_arguments(in_turn, "folder", on_cpu=False, gpu_bytes=80)["gpu_memory_utilization"]
        == 0.65
    )
    assert engine_arguments(in_turn, "folder", on_cpu=False, gpu_bytes=80)["enable_sleep_mode"]
    assert not engine_arguments(in_turn, "folder", on_cpu=True)["enable_sleep_mode"]
    assert shared["gpu_memory_utilization"] == 0.45


def test_only_a_reproducible_run_has_seeds_per_request_and_steps_that_wait_for_each_other() -> None:
    request = GenerationRequest("a", (1, 2), 3, 1.0, 1.0, 5, ())
    slow, fast = (vllm_options(tiny(f"rollout.clock={value}")) for value in ("history", "load"))
    assert engine_arguments(slow, "folder", on_cpu=False)["async_scheduling"] is False
    assert engine_arguments(fast, "folder", on_cpu=False)["async_scheduling"] is None
    # else the engines of a run would draw the same numbers
    seeds = {engine_arguments(fast, "folder", on_cpu=False)["seed"] for _ in range(20)}
    assert len(seeds) > 1
    assert sampling_arguments(request, seeded=True)["seed"] == 5
    assert sampling_arguments(request, seeded=False)["seed"] is None
    # the generator starts anew where a response goes on: it must not repeat its numbers
    later = {
        sampling_arguments(replace(request, offset=offset), seeded=True)["seed"]
        for offset in range(9)
    }
    assert len(later) == 9
    assert keyed_seed(5, "offset", 8) in later
    assert sampling_arguments(replace(request, offset=8), seeded=False)["seed"] is None


def test_an_engine_on_several_gpus_is_no_ray_cluster_of_its_own() -> None:
    backends = [
        engine_arguments(
            vllm_options(tiny(f"rollout.vllm.tensor_parallel={n}")), "folder", on_cpu=False
        )
        for n in (1, 4)
    ]
    assert [found["distributed_executor_backend"] for found in backends] == ["uni", "mp"]


def test_a_seeded_request_never_meets_a_chunked_prefill_on_a_cpu() -> None:
    arguments = engine_arguments(vllm_options(tiny()), "folder", on_cpu=True)
    assert arguments["enable_chunked_prefill"] is False
    assert arguments["max_num_batched_tokens"] >= arguments["max_model_len"]


def test_limits_are_vllms_own_on_a_gpu_and_its_arguments_go_to_it_unchanged() -> None:
    limits = {"max_num_seqs", "max_num_batched_tokens"}
    plain = engine_arguments(vllm_options(tiny()), "folder", on_cpu=False)
    assert limits.isdisjoint(plain)
    assert engine_arguments(vllm_options(tiny()), "folder", on_cpu=True)["max_num_seqs"] == 256
    given = {"max_num_seqs": 2048, "compilation_config": {"cudagraph_mode": "FULL"}}
    options = vllm_options(tiny(f"rollout.vllm.options={json.dumps(given)}"))
    assert engine_arguments(options, "folder", on_cpu=False) == {**plain, **given}
    # a resume and the page compare each argument
    fewer = tiny("rollout.vllm.options={max_num_seqs: 2000}")
    more = tiny("rollout.vllm.options={max_num_seqs: 2048}")
    assert option_differences(fewer, more) == {"rollout.vllm.options.max_num_seqs": [2000, 2048]}
    on_cpu = engine_arguments(options, "folder", on_cpu=True)
    assert on_cpu.items() >= given.items()
    in_parts = replace(options, arguments={"enable_chunked_prefill": True})
    with pytest.raises(EngineError, match="on a CPU a request with a seed ends vLLM"):
        engine_arguments(in_parts, "folder", on_cpu=True)
    assert engine_arguments(in_parts, "folder", on_cpu=False)["enable_chunked_prefill"]


@for_each_row(
    ("argument", "advice"),
    [
        ("model: other", "set model.name"),
        ("seed: 3", "set train.seed"),
        ("dtype: float16", "set model.dtype"),
        ("tensor_parallel_size: 2", "set rollout.vllm.tensor_parallel"),
        ("gpu_memory_utilization: 0.5", "set rollout.vllm.cache_gib"),
        ("async_scheduling: true", "set rollout.clock"),
        ("logprobs_mode: raw_logprobs", "must be those of the model at rollout.temperature"),
        ("kv_offloading_size: 4", "must not outlive the weights"),
    ],
)
def test_arguments_that_dapo_sets_or_that_break_logprobs_are_refused_with_the_option_to_set(
    argument: str, advice: str
) -> None:
    name = argument.partition(":")[0]
    with pytest.raises(
        ConfigError, match=rf"rollout\.vllm\.options\.{name} cannot be set; .*{advice}"
    ):
        tiny(f"rollout.vllm.options={{{argument}}}")


def test_arguments_are_checked_against_the_source_of_the_package_which_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm"
    (package / "engine").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    source = "class EngineArgs:\n    max_num_seqs: int = 1\n    block_size: int = 2\n"
    (package / "engine" / "arg_utils.py").write_text(source)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    for options in ([], [f"rollout.vllm.python={python}"]):
        require_vllm_package(tiny(*options, "rollout.vllm.options={max_num_seqs: 8}"))
        with pytest.raises(ConfigError, match=r"max_num_seq is no .*did you mean max_num_seqs\?"):
            require_vllm_package(tiny(*options, "rollout.vllm.options={max_num_seq: 8}"))


def test_threads_are_settled_before_the_interpreter_starts() -> None:
    environment = vllm_engine_spec(tiny(), threads=3, shares=GpuShares()).environment
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    divided = vllm_engine_spec(
        tiny("rollout.vllm.tensor_parallel=2"), threads=6, shares=GpuShares()
    )
    assert (divided.cpus, divided.environment["OMP_NUM_THREADS"]) == (6, "3")


def test_another_interpreter_sees_this_package_and_none_of_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAPO_CACHE", str(tmp_path))
    config = tiny(f"rollout.vllm.python={sys.executable}")
    specs = [vllm_engine_spec(config, threads=1, shares=GpuShares()) for _ in range(2)]
    folder = Path(specs[0].environment["PYTHONPATH"])
    assert specs[0] == specs[1]
    assert [path.name for path in folder.iterdir()] == ["dapo"]
    # without the site-packages that others need
    program = "import dapo.core.errors as c; print(c.__file__)"
    done = subprocess.run(
        [specs[0].python or "", "-S", "-c", program],
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(folder))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    own = replace(specs[0], factory="helpers.fake_workers:CountingWorker", options={})
    own = replace(own, environment={"PYTHONPATH": f"{folder}:{TESTS}"})
    with closing(LocalLauncher(tmp_path / "logs", timeout_s=60)) as launcher:
        [worker] = launcher.start(["one"], [own])
        assert worker.call("variable", "PYTHONPATH").result(60) == f"{folder}:{TESTS}"


def test_the_engines_process_needs_no_package_that_vllm_does_not_bring() -> None:
    program = (
        "import sys, dapo.distributed.engine_worker, dapo.distributed.worker_main,"
        " dapo.distributed.weight_files;import"
        " dapo.engines.vllm.start;print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    others = {
        "gguf",
        "math_verify",
        "matplotlib",
        "omegaconf",
        "pyarrow",
        "pydantic",
        "rich",
        "typer",
    }
    assert "safetensors" in done.stdout.split()
    assert not others & set(done.stdout.split())


def test_an_interpreter_that_is_not_there_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.python=/nowhere/python"):
        vllm_engine_spec(tiny("rollout.vllm.python=/nowhere/python"), threads=1, shares=GpuShares())


@pytest.mark.parametrize("has_ray", [True, False])
def test_an_interpreter_without_ray_is_refused_before_ray_would_start_an_engine_with_it(
    tmp_path: Path, has_ray: bool
) -> None:
    if has_ray:
        (tmp_path / "ray.py").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    options = (f"rollout.vllm.python={python}", "model=tiny-random")
    require_vllm(tiny(*options))
    if has_ray:
        require_vllm(tiny(*options, "launcher=ray"))
    else:
        with pytest.raises(
            ConfigError, match=r"rollout\.vllm\.python=.*/python has no Ray.*-m pip install ray"
        ):
            require_vllm(tiny(*options, "launcher=ray"))


@pytest.mark.parametrize(
    ("gpus", "options", "count"),
    [
        (1, ("rollout.engines=2",), "2"),
        (2, ("rollout.engines=3",), "2"),  # of which the first GPU has two
        (0, ("rollout.engines=8", "launcher=ray", "distributed.gpus_per_process=0.125"), "4"),
        (2, ("rollout.engines=2",), None),
        (1, ("rollout.engines=2", "rollout.vllm.cache_gib=10"), None),
        (1, ("rollout.engines=2", "train.device=cpu"), None),
        (0, ("rollout.engines=2",), None),
    ],
)
def test_engines_that_share_a_gpu_need_a_cache_of_a_given_size(
    monkeypatch: pytest.MonkeyPatch, gpus: int, options: tuple[str, ...], count: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = tiny(
        "model=tiny-random", "train.device=auto", f"rollout.vllm.python={sys.executable}", *options
    )
    if count is None:
        require_vllm(config)
    else:
        with pytest.raises(
            ConfigError,
            match=rf"cache_gib=auto .* here {count} engines share one.*cache_gib=NUMBER",
        ):
            require_vllm(config)


def test_a_model_that_is_more_than_its_weights_is_refused() -> None:
    """Its engine would keep whatever it started with."""
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=20,
            hidden_size=16,
            intermediate_size=16,
            moe_intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            n_routed_experts=2,
            num_experts_per_tok=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=0,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=4,
            pad_token_id=None,
        )
    )
    with pytest.raises(
        ConfigError, match=r"1 tensors other than weights.*e_score_correction_bias.*native"
    ):
        weight_shapes(model)


class FakeVllm:
    """In the place of vLLM's engine: it does not do what it is told."""

    def __init__(
        self, *, left_out: tuple[str, ...] = (), is_reset: bool = True, finish: str = "stop"
    ) -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 197, max_model_len=64)
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=4))
        self._left_out = list(left_out)
        self._is_reset = is_reset
        self._finish = finish
        self.abort_request = self.set_weight_version = lambda _: None
        self.added: list[str] = []
        self.calls: list[str] = []

    def sleep(self, *, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls += tags

    def collective_rpc(
        self, method: str, args: object = (), kwargs: object = None
    ) -> list[list[str]]:
        self.calls.append(method)
        if self._left_out == ["everything"]:
            raise RuntimeError("out of memory")
        return [[], self._left_out]

    def reset_prefix_cache(self) -> bool:
        return self._is_reset

    def add_request(self, name: str, *_: object) -> None:
        self.added.append(name)

    def step(self) -> list[SimpleNamespace]:
        logprobs = SimpleNamespace(logprobs=[float("nan") if self._finish == "nan" else -1.0])
        output = SimpleNamespace(
            token_ids=[3], logprobs=logprobs, finish_reason=self._finish.replace("nan", "stop")
        )
        return [
            SimpleNamespace(request_id=name, outputs=[output], finished=True) for name in self.added
        ]


def engine_on(vllm: FakeVllm, *, sleeps: bool = False) -> VllmEngine:
    shapes = weight_shapes(wide_model("llama"))
    options = {
        "weight_shapes": shapes,
        "temperatures": (0.01, 2.0),
        "sleeps": sleeps,
    }
    return VllmEngine(vllm, sampling_params=lambda r: None, **options)


def test_an_engine_that_shares_its_gpu_sleeps_until_weights_come_and_its_cache_wakes_last() -> None:
    vllm = FakeVllm()
    engine = engine_on(vllm, sleeps=True)
    for version in range(2):
        engine.load_weights(ModelWeights(wide_model("llama")), version)
        engine.load_weights(ModelWeights(wide_model("llama")), version)  # awake
        for _ in range(2):
            engine.drop_weights()
        with pytest.raises(EngineError, match="dropped"):
            engine.submit([GenerationRequest("a", (1, 2), 3, 1.0, 1.0, 5, ())])
    loaded = ["weights", "dapo_load_weights", "kv_cache", "dapo_load_weights", "sleep 2"]
    assert vllm.calls == ["sleep 2", *loaded, *loaded]
    awake = FakeVllm()
    engine_on(awake).drop_weights()
    assert awake.calls == []


def test_sent_weights_wake_an_engine_in_order_and_count_when_all_have_come() -> None:
    vllm = FakeVllm()
    engine = engine_on(vllm, sleeps=True)
    weights = ModelWeights(wide_model("llama"))
    engine.load_weights(weights, 0)
    engine.drop_weights()
    del vllm.calls[:]
    connected = ["shutdown_weight_transfer_engine", "init_weight_transfer_engine"]
    engine.connect_weights({"packed": True})
    engine.receive_weights({"names": ["a"]}, weights.layout(), None)
    with pytest.raises(EngineError, match="incomplete"):
        engine.submit([GenerationRequest("a", (1, 2), 3, 1.0, 1.0, 5, ())])
    engine.receive_weights({"names": ["b"]}, None, 1)
    received = [
        "weights",
        "start_weight_update",
        "update_weights",
        "update_weights",
        "finish_weight_update",
    ]
    assert vllm.calls == [*connected, *received, "kv_cache"]
    engine.submit([GenerationRequest("a", (1, 2), 3, 1.0, 1.0, 5, ())])
    assert [one.version for one in engine.poll()] == [1]


def test_an_engine_is_closed_by_half_a_transfer_and_not_by_a_failed_connection() -> None:
    engine = engine_on(FakeVllm())
    weights = ModelWeights(wide_model("llama"))
    engine.load_weights(weights, 0)
    engine._engine.collective_rpc = fail
    with pytest.raises(RuntimeError, match="no such interface"):
        engine.connect_weights({})
    engine.submit([GenerationRequest("a", (1, 2), 3, 1.0, 1.0, 5, ())])
    assert [one.version for one in engine.poll()] == [0]
    with pytest.raises(EngineError, match="failed to load the weights: no such interface"):
        engine.receive_weights({}, weights.layout(), None)
    with pytest.raises(EngineError, match="closed"):
        engine.poll()


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("no such interface")


@pytest.mark.parametrize(
    ("vllm", "message"),
    [
        (
            FakeVllm(left_out=("lm_head.weight",)),
            r"older than the weights of version 7: the weights lm_head\.weight",
        ),
        (FakeVllm(is_reset=False), "older than the weights of version 7: keys and values"),
        (
            FakeVllm(left_out=("everything",)),
            "failed to load the weights of version 7: out of memory",
        ),
    ],
)
def test_an_engine_that_may_hold_older_weights_is_closed(vllm: FakeVllm, message: str) -> None:
    engine = engine_on(vllm)
    with pytest.raises(EngineError, match=message):
        engine.load_weights(ModelWeights(wide_model("llama")), 7)
    with pytest.raises(EngineError, match="closed"):
        engine.poll()


@pytest.mark.parametrize(
    ("finish", "message"),
    [
        ("error", "vLLM ended request 'a' by 'error'"),
        ("nan", r"logits are not finite \(weights version 7\)"),
    ],
)
def test_an_answer_that_cannot_be_right_is_an_error(finish: str, message: str) -> None:
    engine = engine_on(FakeVllm(finish=finish))
    engine.load_weights(ModelWeights(wide_model("llama")), 7)
    engine.submit([GenerationRequest("a", (1, 2), 3, 1.0, 1.0, 5, ())])
    with pytest.raises(EngineError, match=message):
        engine.poll()


def test_temperatures_that_vllm_does_not_sample_at_are_a_config_error() -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.temperature must be from 0\.01 to 2 with rollout\.engine=vllm"
    ):
        tiny("rollout.temperature=2.5")
    with pytest.raises(ConfigError, match=r"eval\.temperature must be from 0\.01 to 2.*got 0\.001"):
        tiny("eval.temperature=0.001")
    assert tiny("eval.temperature=0").eval.temperature == 0


LISTENING = """
import os, socket, sys
from dapo.engines.vllm.start import listen_on_loopback
from helpers.sockets import is_private, listeners
if sys.argv[1] == "loopback":
    listen_on_loopback()
import torch.distributed as dist
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=1, rank=0)
dist.barrier()
found = listeners({os.getpid()})
print(len(found) > 0, all(map(is_private, found)))
dist.destroy_process_group()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize(("how", "private"), [("loopback", "True"), ("by itself", "False")])
def test_the_group_of_an_engines_process_listens_on_the_loopback_interface_only(
    how: str, private: str
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(TESTS)])}
    command = [sys.executable, "-P", "-c", LISTENING, how]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.split() == ["True", private]
