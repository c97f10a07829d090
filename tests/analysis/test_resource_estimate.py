"""Sizes by formula against real models, and the estimates of `dapo check` against hand-typed
numbers.
"""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from dapo.analysis.check.disk import disk_bytes
from dapo.analysis.check.estimate import ResourceEstimate, hardware_profile_for
from dapo.analysis.check.report import describe_estimate, find_problems, resolve_estimate
from dapo.config import Config, ModelConfig, build_config, load_config
from dapo.core.text import size
from dapo.policy.logprobs import hidden_states
from dapo.policy.model_dimensions import dimensions_of, find_dimensions
from dapo.policy.packed_forward import recompute_layers, use_packed_forward
from dapo.policy.packing import pack
from dapo.runs.status import run_status
from dapo.start.resolve import resolve_auto
from helpers.commands import run
from helpers.model_sizes import sizes_of
from helpers.paths import CONFIGS
from helpers.shipped_configs import SHIPPED
from helpers.tiny_models import COMMON
from helpers.tiny_policies import groups_of, loaded, make_policy, weights_of

GIB = 2**30
TOO_LARGE = (
    "model.name=Qwen/Qwen2.5-32B",
    "rollout.native.slots=16384",
    "rollout.max_response_tokens=4000",
)
"""Options of configs/tiny.yaml with which a run needs terabytes."""


def paper(*overrides: str) -> Config:
    return load_config(CONFIGS / "dapo_32b.yaml", overrides)


def make_estimate(
    config: Config, dimensions: str = "qwen2.5-32b", **profile: float
) -> ResourceEstimate:
    hardware = replace(hardware_profile_for(config.changed("train", device="cuda")), **profile)
    resolved = resolve_auto(config, cuda=True, training=False)
    return resolve_estimate(ResourceEstimate(resolved, sizes_of(dimensions), hardware))[0]


def describe(config: Config, **profile: Any) -> str:
    """What `dapo check` says of the resources, for a machine that differs from this one by some
    values.
    """
    return "\n".join(describe_estimate(config, replace(hardware_profile_for(config), **profile)))


GPT_NEOX = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 100,
}
OWN_HEAD_DIM = {name: value for name, value in COMMON.items() if name != "head_dim"}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**COMMON),
        LlamaConfig(**COMMON | {"tie_word_embeddings": True}),
        LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
        Qwen2Config(**OWN_HEAD_DIM),
        Qwen2Config(**OWN_HEAD_DIM | {"tie_word_embeddings": True}),
        Qwen3Config(**COMMON),
        Qwen3Config(**COMMON | {"head_dim": 16}, attention_bias=True),
        MistralConfig(**COMMON),
        SmolLM3Config(**OWN_HEAD_DIM, no_rope_layers=[1, 0]),
    ],
    ids=lambda config: (
        f"{config.model_type}-{'tied' if config.tie_word_embeddings else 'own-head'}"
    ),
)
def test_layers_embedding_and_last_norm_are_all_parameters(config: PretrainedConfig):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = dimensions_of(model)
    assert found is not None
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (
        found.parameters
        == found.layers * found.layer_parameters + found.embedding_parameters + found.hidden
    )


def test_models_have_the_published_numbers_of_parameters():
    published = {
        "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-1.5b": 1_543_714_304,
        "qwen2.5-7b": 7_615_616_512,
        "qwen2.5-32b": 32_763_876_352,
        "qwen3-0.6b": 596_049_920,
        "llama-3.1-8b": 8_030_261_248,
        "smollm2-135m": 134_515_008,
    }
    assert {name: sizes_of(name).parameters for name in published} == published


def model_directory(path: Path, config: PretrainedConfig) -> str:
    config.save_pretrained(path)
    for name in ("model.safetensors", "tokenizer.json"):
        (path / name).touch()
    return str(path)


def test_a_model_is_found_by_its_directory_or_as_one_of_the_shipped_configurations(tmp_path: Path):
    name = model_directory(tmp_path / "Qwen2.5-7B", LlamaConfig(**COMMON))
    with torch.device("meta"):
        expected = dimensions_of(AutoModelForCausalLM.from_config(LlamaConfig(**COMMON)))
    assert find_dimensions(ModelConfig(name=name)) == expected
    assert find_dimensions(ModelConfig(name="nobody/nothing-1b")) is None
    assert (
        find_dimensions(ModelConfig(name=model_directory(tmp_path, GPTNeoXConfig(**GPT_NEOX))))
        is None
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_the_model_of_each_shipped_configuration_has_sizes_without_a_file(name: str):
    assert find_dimensions(SHIPPED[name].model) is not None


def test_a_cached_token_of_the_papers_model_takes_a_quarter_of_a_mebibyte():
    # keys and values x 64 layers x 8 heads x 128 x 2 bytes
    assert sizes_of("qwen2.5-32b").cache_bytes(2) == 2 * 64 * 8 * 128 * 2 == 2**18


def test_adapters_are_counted_for_the_layers_they_adapt():
    dimensions = sizes_of("tiny-random")  # hidden 32, feed-forward 64, keys 16
    products = (32 + 32) + 2 * (32 + 16) + (32 + 32) + 2 * (32 + 64) + (64 + 32)
    assert dimensions.lora_parameters(4) == 2 * 4 * products


def test_adapters_of_another_family_are_counted_on_its_layers(tmp_path: Path):
    model = {"name": model_directory(tmp_path, GPTNeoXConfig(**GPT_NEOX)), "lora": {"rank": 4}}
    output = describe(build_config({"model": model, "data": {"train": "builtin:sums"}}))
    products = (32 + 96) + (32 + 32) + (32 + 64) + (64 + 32)
    assert f"on 8 linear layers: {2 * 4 * products:,} parameters" in output


def test_adapters_are_compared_with_training_all_weights():
    assert "(all weights: " in describe(paper("model.lora={rank: 16, alpha: 32}"))


def test_what_a_rank_holds_is_its_part_of_weights_gradients_and_moments():
    sharded = make_estimate(paper())
    alone = make_estimate(paper("distributed.trainer_ranks=1"))
    parameters = 32_763_876_352
    for each, ranks in ((sharded, 64), (alone, 1)):
        breakdown = each.trainer_memory()
        assert breakdown["master weights"] == breakdown["gradients"] == 4 * parameters / ranks
        assert breakdown["AdamW's moments"] == 8 * parameters / ranks
    assert "compute weights" not in sharded.trainer_memory()
    assert alone.trainer_memory()["compute weights"] == 2 * parameters


def test_lora_trains_adapters_and_keeps_the_weights_frozen():
    lora = make_estimate(
        paper("model.lora={rank: 16, alpha: 32}", "distributed.trainer_ranks=1", "launcher=local")
    )
    breakdown = lora.trainer_memory()
    adapters = sizes_of("qwen2.5-32b").lora_parameters(16)
    assert breakdown["frozen weights"] == 2 * 32_763_876_352
    assert breakdown["AdamW's moments"] == 8 * adapters
    assert lora.memory.trainable_parameters == adapters
    # engines get merged weights, in the type that computes
    assert lora.sync_bytes == 2 * 32_763_876_352


def test_an_engine_holds_its_part_of_the_weights_and_the_cache_it_is_given():
    found = make_estimate(paper("rollout.vllm.cache_gib=32"))
    assert found.engine_memory()["weights"] == 2 * 32_763_876_352 / 4
    assert found.engine_memory()["cache"] == 32 * GIB
    assert found.cache_tokens == 4 * 32 * GIB // 2**18 == 524_288
    assert found.devices == 64 + 16 * 4 == 128
    assert found.sync_bytes == 2 * 32_763_876_352
    assert found.sync_copies == 8  # 64 GPUs with engines are 8 nodes


def test_the_papers_model_loads_in_a_part_of_a_nodes_memory():
    """64 ranks on 8 nodes; each would have held all 65.5 GB, which is 524 GB on a node."""
    found = make_estimate(paper())
    assert found.load_read_bytes == 2 * 32_763_876_352 / 64 == pytest.approx(1.024e9, rel=0.001)
    assert found.load_host_bytes < 32 * GIB
    few = make_estimate(paper("distributed.trainer_ranks=4"))
    assert few.load_read_bytes == 16 * found.load_read_bytes
    assert few.load_host_bytes < found.load_host_bytes  # 4 processes on a node


def test_a_cache_of_auto_is_what_the_weights_leave_of_nine_tenths_of_a_gpu():
    found = make_estimate(paper("rollout.vllm.cache_gib=auto")).engine_memory()
    assert sum(found.values()) == pytest.approx(0.9 * 80 * GIB)
    assert found["cache"] == pytest.approx(0.9 * 80 * GIB - 2 * 32_763_876_352 / 4 - 4 * GIB)


@pytest.mark.parametrize("repeats", [2, 6])
def test_activations_are_what_the_layers_really_keep(repeats: int):
    """All bytes that a forward saves for its backward, each storage once, against the estimate a
    token.
    """
    prompt = 24
    response = 40
    tiny = loaded(dtype=torch.float32)
    use_packed_forward(tiny.model)
    (microbatch,) = pack(groups_of([(prompt, (response,) * repeats)] * 3), max_tokens=10**6)
    weights = {parameter.untyped_storage().data_ptr() for parameter in tiny.model.parameters()}

    def kept_bytes() -> int:
        kept: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            hidden = hidden_states(tiny.model, microbatch)
        del hidden
        return sum(kept.values())

    config = load_config(
        CONFIGS / "tiny.yaml", [f"rollout.group_size={repeats}", "model.dtype=float32"]
    )
    dimensions = dimensions_of(tiny.model)
    assert dimensions is not None
    profile = replace(
        hardware_profile_for(config), prompt_tokens=prompt, mean_response_tokens=response
    )
    estimate = (
        ResourceEstimate(config, dimensions, profile).memory.activation_bytes(recompute=False)
        * microbatch.num_tokens
    )
    total_kept = kept_bytes()
    assert 0.7 * total_kept < estimate < 1.4 * total_kept
    recompute_layers(tiny.model)
    assert kept_bytes() < 0.4 * total_kept


def test_recomputing_changes_no_bit_of_an_update():
    samples = groups_of([(5, (7, 9, 3)), (4, (6, 2))])
    models = [loaded(dtype=torch.float32) for _ in range(2)]
    assert recompute_layers(models[1].model) == 2
    kept, again = map(make_policy, models)
    for policy in (kept, again):
        policy.update(samples, step=1)
    for (name, one), other in zip(
        weights_of(kept).items(), weights_of(again).values(), strict=True
    ):
        assert torch.equal(one, other), name
    assert kept.record_old_logprobs(samples) == again.record_old_logprobs(samples)


def test_the_papers_run_fits_its_cluster():
    assert list(find_problems(make_estimate(paper()))) == []
    breakdown = make_estimate(paper()).trainer_memory()
    assert sum(breakdown.values()) < 80 * GIB


def test_without_recomputing_it_does_not_and_the_option_is_named():
    (problem,) = find_problems(make_estimate(paper("train.recompute=false")))
    assert problem.startswith("a trainer rank needs ")
    assert "the largest part is activations" in problem
    assert "train.recompute=true" in problem


def test_too_few_ranks_are_an_error_with_the_number_that_fits():
    (problem,) = find_problems(make_estimate(paper("distributed.trainer_ranks=4")))
    assert "distributed.trainer_ranks=16" in problem
    assert list(find_problems(make_estimate(paper("distributed.trainer_ranks=16")))) == []


def test_more_ranks_are_no_way_out_where_a_run_refuses_them():
    config = load_config(CONFIGS / "gsm8k_0.5b.yaml")
    (elsewhere,) = find_problems(make_estimate(config, "qwen2.5-7b"))
    assert "distributed.trainer_ranks=" in elsewhere
    here = make_estimate(config, "qwen2.5-7b", is_here=True, devices_per_node=1)
    (problem,) = find_problems(here)
    assert "distributed.trainer_ranks" not in problem
    with_critic = load_config(CONFIGS / "gsm8k_0.5b.yaml", ["advantage.estimator=gae"])
    (problem,) = find_problems(make_estimate(with_critic, "qwen2.5-7b"))
    assert "distributed.trainer_ranks" not in problem


def test_an_engine_for_which_nothing_is_left_is_compared_with_nothing():
    overrides = ["rollout.engine=vllm", "model.dtype=bfloat16", "train.device=cuda"]
    config = load_config(CONFIGS / "gsm8k_0.5b.yaml", overrides)
    # the trainer keeps more of a GPU of 8 GiB than it has
    assert "total, of 0.00 GiB" in describe(config, devices_per_node=1, memory_gib=8)


def engine_problem(config: Config, **profile: float) -> str:
    """What is said of an engine's GPU; empty if it fits."""
    problems = find_problems(make_estimate(config, "qwen2.5-0.5b", **profile))
    return "".join(each for each in problems if each.startswith("a GPU of an engine needs "))


def test_a_critic_that_leaves_an_engine_nothing_gets_no_ranks_and_no_adapters():
    shared = ["rollout.engine=vllm", "model.dtype=bfloat16", "train.device=cuda"]
    small = {"devices_per_node": 1, "memory_gib": 8}
    alone = engine_problem(load_config(CONFIGS / "gsm8k_0.5b.yaml", shared), **small)
    assert "raise distributed.trainer_ranks" in alone
    assert "model.lora" in alone
    critic = [*shared, "advantage.estimator=gae"]
    with_critic = engine_problem(load_config(CONFIGS / "gsm8k_0.5b.yaml", critic), **small)
    assert "or an advantage.estimator without a critic" in with_critic
    assert "trainer_ranks" not in with_critic
    assert "lora" not in with_critic


def test_where_logits_alone_fill_a_gpu_a_number_of_slots_that_fits_is_named():
    options = ["rollout.engine=native", "rollout.engines=1", "train.device=cuda"]
    two_gpus = {"devices_per_node": 2, "memory_gib": 24}

    def problem_with(slots: int) -> str:
        slot_options = [*options, f"rollout.native.slots={slots}"]
        return engine_problem(load_config(CONFIGS / "gsm8k_0.5b.yaml", slot_options), **two_gpus)

    problem = problem_with(2**14)
    assert "before any cache" in problem
    named = re.search(r"set rollout\.native\.slots to at most ([\d,]+)$", problem)
    assert named is not None
    assert problem_with(int(named[1].replace(",", ""))) == ""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.vllm.cache_gib=70"], "set rollout.vllm.cache_gib to at most 60"),
        (["rollout.vllm.tensor_parallel=1"], "at most 14"),
        (
            ["rollout.vllm.tensor_parallel=1", "rollout.vllm.cache_gib=4"],
            "set rollout.vllm.cache_gib to 6 or more",
        ),
        (
            ["rollout.vllm.tensor_parallel=3"],
            "does not divide the model's 40 query and 8 key-value heads",
        ),
        (
            ["rollout.max_response_tokens=131072"],
            "leaves no room for a prompt in the 131,072 positions",
        ),
    ],
)
def test_what_cannot_work_is_reported_with_what_to_change(overrides: list[str], words: str):
    assert any(words in problem for problem in find_problems(make_estimate(paper(*overrides))))


def test_a_model_too_large_for_the_device_it_shares_is_reported():
    config = load_config(CONFIGS / "gsm8k_0.5b.yaml")
    fits = make_estimate(config, "qwen2.5-0.5b")
    assert not fits.config.is_multiprocess
    assert list(find_problems(fits)) == []
    (problem,) = find_problems(make_estimate(config, "qwen2.5-7b"))
    assert problem.startswith("the process needs ")


def test_responses_per_step_follow_from_the_keep_rate_up_to_the_limit():
    assert make_estimate(paper(), keep_rate=0.5).generated_responses == 512 * 16 / 0.5 == 16384
    assert make_estimate(paper(), keep_rate=0.001).generated_responses == 5120 * 16


def test_check_prints_the_cluster_of_the_paper():
    output = describe(paper())
    for words in (
        "resources (launcher ray, 32,763,876,352 parameters):",
        "trainer      64 ranks (FSDP2), one GPU each",
        (
            "each rank reads 1.02 GB of the model's files; loading takes 24.4 GiB of a node's main"
            " memory"
        ),
        "engines      16 x vllm, by load, 4 GPUs each (tensor parallel)",
        "GPUs         128 = 16 nodes of 8",
        "AdamW's moments",
        "activations",
        "weight sync, each step: 65.53 GB from GPU to GPU, about 5.7 s",
        "sequences at full length (22,528)",
        "values taken, because the GPUs are not on this machine: 8 GPUs per node, of 80 GiB",
        (
            "on average 256 tokens of a prompt and 6,144 of a response; 33% of the groups carry a"
            " signal"
        ),
        "each step: 24,576 responses, 150,994,944 tokens",
    ):
        assert words in output
    assert "problem:" not in output
    assert "problem: a trainer rank needs" in describe(paper(), memory_gib=24)


def test_the_papers_weights_reach_all_engines_in_at_most_15_s():
    """25 GB per second of a link of 50, and 50 ms of calls per chunk; with half of that speed,
    too.
    """
    found = make_estimate(paper())
    assert found.transfer_seconds == pytest.approx(65.53e9 / 25e9 + 62 * 0.05, rel=1e-3)
    assert found.sync_bytes / 12.5e9 + 62 * 0.1 < 15
    ahead = make_estimate(paper("schedule=one_step_off"))
    assert ahead.transfer_seconds == found.transfer_seconds
    repeatable = paper("schedule=one_step_off", "rollout.clock=history")
    assert make_estimate(repeatable).transfer_seconds is None


def test_check_says_what_a_laptop_holds():
    config = load_config(CONFIGS / "quickstart.yaml", ["model.dtype=float32", "train.device=cpu"])
    output = describe(config, memory_gib=16)
    assert (
        "1 process: the loop, data, rollout tables, checkpoints, the policy, the native engine"
        in output
    )
    assert "memory of the process that samples and trains:" in output
    assert "problem:" not in output
    assert "values taken: 16 GiB of memory of this machine\n" in output
    assert "GPUs" not in output


def test_several_processes_on_a_cpu_share_its_memory():
    options = ["model.dtype=float32", "rollout.engines=2", "train.device=cpu"]
    config = load_config(CONFIGS / "quickstart.yaml", options)
    (line,) = (
        line for line in describe(config, memory_gib=4).splitlines() if line.startswith("problem:")
    )
    assert "all processes of this machine need" in line


def test_a_model_of_unknown_size_needs_its_config_json():
    (line,) = describe(paper("model.name=nobody/nothing-1b")).splitlines()
    assert "run `hf download nobody/nothing-1b config.json`" in line
    assert "Memory is modelled for llama, mistral, qwen2" in line


def test_gpus_that_are_not_here_are_as_many_as_ranks_and_a_cpu_is_that_of_this_machine():
    options = ["train.device=cuda", "distributed.trainer_ranks=4", "rollout.engine=vllm"]
    there = hardware_profile_for(load_config(CONFIGS / "gsm8k_0.5b.yaml", options))
    if not torch.cuda.is_available():
        assert (there.device, there.memory_gib, there.devices_per_node, there.is_here) == (
            "gpu",
            80.0,
            4,
            False,
        )
    here = hardware_profile_for(load_config(CONFIGS / "gsm8k_0.5b.yaml", ["train.device=cpu"]))
    assert (here.device, here.is_here) == ("cpu", True)
    assert here.memory_gib == pytest.approx(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, abs=0.1
    )


def test_a_single_trainer_on_ray_is_a_process_of_its_own_and_shares_no_device():
    config = load_config(
        CONFIGS / "gsm8k_0.5b.yaml", ["launcher=ray", "distributed.trainer_ranks=1"]
    )
    found = make_estimate(config, "qwen2.5-0.5b")
    assert found.config.is_multiprocess
    assert found.devices == 2
    output = describe(config)
    assert (
        "controller   1 process: the loop, data, rollout tables, checkpoints, the native engine\n"
        in output
    )
    assert "trainer      1 process, one GPU each" in output
    assert "memory of a trainer's GPU:" in output
    assert "that samples and trains" not in output
    assert "GPUs         2 = 1 node of 8" in output


def test_one_gpu_is_one_gpu_whose_processes_get_what_the_run_gives_them():
    overrides = ["rollout.engine=vllm", "model.dtype=bfloat16", "train.device=cuda"]
    config = load_config(CONFIGS / "gsm8k_0.5b.yaml", overrides)
    alone, shared = (describe(config, devices_per_node=n, memory_gib=80) for n in (2, 1))
    assert "GPUs         2 = 1 node of 2\n" in alone
    assert (
        "GPUs         1 = 1 node of 1, each shared by 1 trainer rank and 1 engine process, which"
        " use it in turn" in shared
    )
    assert "total, of 76.0 GiB" in shared
    kept = (2 + 4 + 8) * sizes_of("qwen2.5-0.5b").parameters / GIB + 4
    assert f"GiB  total, of {80 - kept:.1f} GiB" in shared
    assert "problem" not in shared
    config = load_config(CONFIGS / "gsm8k_0.5b.yaml", [*overrides, "schedule=one_step_off"])
    at_once = describe(config, devices_per_node=1, memory_gib=80)
    assert at_once.count("total, of 40.0 GiB") == 2


def test_processes_and_their_order_are_described():
    def engines(*overrides: str) -> list[str]:
        output = describe(load_config(CONFIGS / "tiny.yaml", ["train.device=cpu", *overrides]))
        return [line for line in output.splitlines() if line.startswith("  engines ")]

    assert engines() == []
    assert engines("rollout.engines=2") == [
        "  engines      2 x native, in lockstep, on this machine's cores"
    ]
    assert engines("rollout.engines=2", "rollout.clock=load") == [
        "  engines      2 x native, by load, on this machine's cores"
    ]
    arguments = "rollout.vllm.options={max_num_seqs: 2048, kv_cache_dtype: fp8}"
    overrides = ["rollout.engine=vllm", "model.dtype=bfloat16", arguments]
    output = describe(load_config(CONFIGS / "gsm8k_0.5b.yaml", overrides))
    assert "vLLM's arguments: max_num_seqs=2048, kv_cache_dtype=fp8\n" in output


def test_check_prints_problems_first_and_the_values_that_it_took(
    capsys: pytest.CaptureFixture[str],
):
    code, out, _ = run(capsys, "check", "tiny", "train.device=cpu", *TOO_LARGE)
    assert code == 2
    verdict, problem, *_ = out.splitlines()
    assert verdict.startswith("does not fit: needs ")
    assert problem.startswith("problem: the process needs ")
    assert "train.device=cuda estimates a GPU" in " ".join(out.split())
    code, out, _ = run(capsys, "check", "tiny", "train.device=cpu", "--verbose")
    assert out.startswith("ok: ")
    assert (code, "\nproblem: " in f"\n{out}", "\nvalues taken: " in out) == (0, False, True)


def test_the_estimated_disk_space_is_that_of_a_run_within_30_percent(
    capsys: pytest.CaptureFixture[str], sync_run: Path
):
    """The run keeps four whole checkpoints of a tiny model: half of it is in other files."""
    code, out, _ = run(capsys, "check", str(sync_run / "config.yaml"), "--json")
    found = json.loads(out)
    left = run_status(sync_run).disk_bytes["total"]
    assert code == 0
    assert sum(found["disk_bytes"].values()) == pytest.approx(left, rel=0.3)
    assert f"{size(sum(found['disk_bytes'].values()))} of disk" in found["verdict"]


@pytest.mark.parametrize(
    ("overrides", "whole_checkpoints"),
    [
        ([], 4),  # the best, two, and the one that is being written
        (["data.eval=null"], 3),
        (["train.eval_every=0"], 3),
        (["train.num_steps=60"], 3),  # no more are written
        (["train.keep_checkpoints=5"], 7),
    ],
)
def test_the_best_checkpoint_counts_in_the_largest_size_of_a_run(
    overrides: list[str], whole_checkpoints: int
):
    """The run writes ten checkpoints: a master weight and two moments of 4 bytes each."""
    config = load_config(CONFIGS / "gsm8k_0.5b.yaml", overrides)
    estimate = make_estimate(config, "qwen2.5-0.5b")
    largest = disk_bytes(estimate, eval_problems=500, in_training=True)
    assert largest["checkpoints"] == whole_checkpoints * 12 * sizes_of("qwen2.5-0.5b").parameters


def test_a_budget_of_tokens_ends_the_run_whose_disk_space_is_estimated():
    config = load_config(CONFIGS / "gsm8k_0.5b.yaml", ["train.num_steps=40"])
    estimate = make_estimate(config, "qwen2.5-0.5b")
    step_tokens = estimate.generated_responses * estimate.profile.mean_response_tokens
    limited = estimate.changed("train", token_budget=round(19.5 * step_tokens))
    shorter = estimate.changed("train", num_steps=20)
    found = disk_bytes(limited, eval_problems=500)
    assert found == disk_bytes(shorter, eval_problems=500)
    assert found != disk_bytes(estimate, eval_problems=500)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_here_is_a_problem_beside_the_estimate_for_it(
    capsys: pytest.CaptureFixture[str],
):
    missing = "train.device=cuda, but torch finds no CUDA device; use train.device=auto or cpu"
    code, out, _ = run(capsys, "check", "gsm8k_0.5b", "train.device=cuda", "--verbose")
    assert (code, out.splitlines()[0]) == (2, "cannot run: 1 problem")
    assert f"problem: {missing}" in " ".join(out.split())
    assert "memory of the GPU that samples and trains:" in out
    code, out, _ = run(capsys, "check", "gsm8k_0.5b", "train.device=cuda", "--json")
    found = json.loads(out)
    assert (code, found["problems"]) == (2, [missing])
    assert found["estimate"]["assumed"]["device"] == "gpu"
