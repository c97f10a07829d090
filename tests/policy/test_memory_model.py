"""Laws of the model of memory: what `auto` chooses from it fits, and is the most that does."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from dapo.config import Config, GpuShares, build_config, dump_config
from dapo.core.errors import ConfigError
from dapo.policy import packed_forward
from dapo.policy.fsdp.policy import ShardedPolicy
from dapo.policy.logprobs import hidden_states
from dapo.policy.memory_model import (
    CPU_TOKENS,
    GIB,
    MAX_TOKENS,
    RESERVE,
    ROUNDED_TO,
    USEFUL_TOKENS,
    FreeMemory,
    ResponseLengths,
    TrainerMemory,
    fitting_tokens,
    resolve_microbatches,
    trainer_bytes,
)
from dapo.policy.model_dimensions import dimensions_of
from dapo.policy.packed_forward import recompute_layers
from dapo.policy.packing import pack
from dapo.policy.policy import PolicyCore
from dapo.start.resolve import resolve_auto
from helpers.fake_cuda import fake_cuda, saved_bytes
from helpers.fake_models import FAMILIES, fake_model
from helpers.model_sizes import sizes_of
from helpers.tables import for_each_row
from helpers.tiny_policies import groups_of

H100 = FreeMemory(80 * GIB, "an H100")
IN_TURN = GpuShares(1, 1, is_shared=True, is_paired=True, alternates=True)
PAIRED = ["rollout.engine=vllm", "launcher=ray", "distributed.gpus_per_process=0.5"]


def config_of(*overrides: str) -> Config:
    """Prompts of up to 1,024 tokens and responses of up to 4,096 in bfloat16."""
    raw = {
        "model": {"name": "nobody/model", "dtype": "bfloat16"},
        "data": {"train": "hub:nobody/data", "max_prompt_tokens": 1024},
        "rollout": {"max_response_tokens": 4096},
    }
    return build_config(raw, overrides)


def memory_of(name: str, *overrides: str) -> TrainerMemory:
    config = config_of(*overrides)
    return TrainerMemory(config, sizes_of(name), ResponseLengths.expected(config))


def settled(name: str, *overrides: str, gpu: FreeMemory | None = H100) -> tuple[int, bool]:
    """What `auto` chooses: microbatch_tokens and recompute."""
    config, _ = resolve_microbatches(config_of(*overrides), sizes_of(name), gpu)
    assert config.train.recompute is not None
    return config.microbatch_tokens, config.train.recompute


def test_a_layers_activations_are_the_sum_of_its_parts():
    # Qwen2.5-1.5B, one layer, bytes per token: two norms keep 2 + 2 bytes of each of 1,536 numbers;
    # four products of 8,960 numbers; queries and outputs of 1,536; keys and values of 256;
    # log-sum-exps of 12 heads
    memory = memory_of("qwen2.5-1.5b")
    layer = 2 * 4 * 1536 + 4 * 2 * 8960 + 2 * 2 * 1536 + 2 * 2 * 256 + 4 * 12
    around = 2 * 1536 + 2 * 2 * 128  # the last norm, without its output; cosines and sines
    assert memory.activation_bytes(recompute=False) == 28 * layer + around
    assert memory.activation_bytes(recompute=True) == 28 * 2 * 1536 + layer + around


def test_a_fused_gate_keeps_two_of_a_layers_four_products():
    # 1.5 B: 8,960 numbers of two bytes; an adapter keeps its input, the last product, too
    memory = memory_of("qwen2.5-1.5b")
    for overrides, fewer in (((), 2), (("model.lora.rank=8",), 1)):
        config = config_of(*overrides)
        plain, fused = (replace(memory, config=config, has_fused_gate=on) for on in (False, True))
        bytes_fewer = plain.activation_bytes(recompute=False) - fused.activation_bytes(
            recompute=False
        )
        assert bytes_fewer == 28 * fewer * 2 * 8960
    on_a_cpu = replace(memory, device_type="cpu")
    assert replace(on_a_cpu, has_fused_gate=True).activation_bytes(
        recompute=False
    ) == on_a_cpu.activation_bytes(recompute=False)


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("qwen2.5-0.5b", [], (32768, False)),
        ("qwen2.5-1.5b", [], (16384, False)),
        # the longest sequence, 21,504 tokens, does not fit without
        ("qwen2.5-1.5b", ["rollout.max_response_tokens=20480"], (32768, True)),
        ("qwen2.5-7b", ["model.lora={rank: 16, alpha: 32}"], (32768, True)),
        ("qwen2.5-7b", ["distributed.trainer_ranks=8"], (8192, False)),
        (
            "qwen2.5-32b",
            ["distributed.trainer_ranks=64", "rollout.max_response_tokens=20480"],
            (32768, True),
        ),
    ],
)
def test_auto_on_gpus_of_80_gib(name: str, overrides: list[str], expected: tuple[int, bool]):
    assert settled(name, *overrides) == expected


def held(memory: TrainerMemory, tokens: int, *, recompute: bool) -> float:
    engine = 0 if memory.config.is_multiprocess else 2 * memory.dimensions.parameters
    return sum(memory.breakdown(tokens, recompute=recompute).values()) + engine


@for_each_row("name", ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen3-1.7b", "llama-3.2-3b"])
@for_each_row("gib", [24, 40, 80, 141])
def test_what_auto_chooses_fits_and_more_would_not(name: str, gib: int):
    memory = memory_of(name)
    gpu = FreeMemory(gib * GIB, "a GPU")
    try:
        tokens, recompute = settled(name, gpu=gpu)
    except ConfigError:
        assert held(memory, memory.longest_sequence, recompute=True) > (1 - RESERVE) * gpu.available
        return
    assert held(memory, tokens, recompute=recompute) <= (1 - RESERVE) * gpu.available
    assert tokens >= memory.longest_sequence
    if tokens < MAX_TOKENS:
        assert tokens == memory.longest_sequence or tokens % ROUNDED_TO == 0
        assert (
            held(memory, tokens + ROUNDED_TO, recompute=recompute) > (1 - RESERVE) * gpu.available
        )
    if recompute:
        least = max(memory.longest_sequence, USEFUL_TOKENS)
        assert held(memory, least, recompute=False) > (1 - RESERVE) * gpu.available


def test_an_option_that_is_set_stays_and_the_other_follows_from_it():
    assert settled("qwen2.5-1.5b", "train.microbatch_tokens=24576") == (24576, True)
    assert settled("qwen2.5-1.5b", "train.microbatch_tokens=6000") == (6000, False)
    assert settled("qwen2.5-1.5b", "train.recompute=true") == (32768, True)
    both = config_of("train.microbatch_tokens=99999", "train.recompute=false")
    assert resolve_microbatches(both, sizes_of("qwen2.5-72b"), H100) == (both, None)


def test_where_nothing_fits_both_options_are_named():
    with pytest.raises(ConfigError) as caught:
        settled("qwen2.5-7b")
    message = str(caught.value)
    for words in (
        "train.microbatch_tokens=5120 and train.recompute=true takes ",
        "the largest part is AdamW's moments, 56.7 GiB",
        "80.0 GiB (an H100), less 10% in reserve",
        "distributed.trainer_ranks",
        "set both train.microbatch_tokens and train.recompute",
    ):
        assert words in message
    with pytest.raises(
        ConfigError, match=r"and train\.recompute=false .* set train\.recompute=true"
    ):
        settled("qwen2.5-1.5b", "train.recompute=false", "rollout.max_response_tokens=20480")


def test_ways_out_that_a_critic_refuses_are_not_named():
    with pytest.raises(ConfigError) as caught:
        settled("qwen2.5-7b", "advantage.estimator=gae")
    message = str(caught.value)
    assert "lower rollout.max_response_tokens" in message
    assert "distributed.trainer_ranks" not in message
    assert "model.lora" not in message


def test_a_line_says_what_was_chosen_and_why():
    _, reason = resolve_microbatches(config_of(), sizes_of("qwen2.5-1.5b"), H100)
    assert reason is not None
    assert reason.startswith(
        "auto: train.microbatch_tokens=16384, train.recompute=false: an update takes "
    )
    assert "MB of activations per token) of 80.0 GiB (an H100), less 10% in reserve" in reason


def test_a_model_of_unknown_size_gets_what_takes_little_memory():
    config, reason = resolve_microbatches(config_of(), None, H100)
    assert (config.microbatch_tokens, config.train.recompute) == (CPU_TOKENS, True)
    assert reason is not None
    assert "the sizes of nobody/model are unknown" in reason


def test_on_a_cpu_auto_is_16384_tokens_without_recomputation():
    assert settled("qwen2.5-72b", gpu=None) == (16384, False)
    found = resolve_auto(config_of("train.device=cpu"))
    assert (found.train.microbatch_tokens, found.train.recompute) == (16384, False)


def test_auto_is_settled_once_and_its_result_is_settled_to_itself():
    chosen, _ = resolve_microbatches(config_of(), sizes_of("qwen2.5-1.5b"), H100)
    less = FreeMemory(10 * GIB, "what is left when the run is resumed")
    assert resolve_microbatches(chosen, sizes_of("qwen2.5-1.5b"), less) == (chosen, None)


def test_a_runs_configuration_holds_what_auto_stands_for():
    written = dump_config(
        resolve_auto(config_of("model.name=Qwen/Qwen2.5-0.5B-Instruct"), cuda=True)
    )
    assert "microbatch_tokens: 32768" in written
    assert "recompute: false" in written


def test_auto_without_being_settled_is_an_error_where_it_is_used():
    with pytest.raises(ValueError, match=r"train\.microbatch_tokens=auto is not resolved"):
        _ = config_of("train.microbatch_tokens=auto").microbatch_tokens


def test_the_most_tokens_that_fit_are_found_exactly():
    memory = memory_of("qwen2.5-1.5b")
    fitting = fitting_tokens(memory, H100, recompute=False)
    limit = (1 - RESERVE) * H100.available
    assert (
        held(memory, fitting, recompute=False) <= limit < held(memory, fitting + 1, recompute=False)
    )


@for_each_row(
    ("overrides", "gpus", "expected"),
    [
        ([], 1, 1),
        (["rollout.engine=vllm"], 2, 1),
        (["rollout.engine=vllm"], 1, 2),  # the trainer and the engine
        (["distributed.trainer_ranks=4"], 2, 3),  # the controller samples
        # on the first rank's GPU, also where others are free
        (["distributed.trainer_ranks=2"], 8, 2),
        # ranks 0 and 2, and the controller, are on the first
        (["distributed.trainer_ranks=3"], 2, 3),
        (["distributed.trainer_ranks=2", "rollout.engines=4"], 2, 3),
        (["launcher=ray", "distributed.gpus_per_process=0.5"], 8, 2),
        (["launcher=ray", "distributed.trainer_ranks=64"], 8, 1),
    ],
)
def test_processes_that_share_a_gpu_are_counted(overrides: list[str], gpus: int, expected: float):
    assert config_of(*overrides).gpu_shares(gpus).processes == expected


@for_each_row(
    ("overrides", "gpus", "expected"),
    [
        (["rollout.engine=vllm"], 1, replace(IN_TURN, transfer="ipc")),
        (["rollout.engine=vllm"], 2, GpuShares(transfer="nccl")),
        (
            ["rollout.engine=vllm", "rollout.engines=3"],
            2,
            GpuShares(1, 2, is_shared=True, alternates=True),
        ),
        # a second engine on a GPU cannot read its trainer's buffer, too
        (["rollout.engine=vllm", "rollout.engines=2"], 1, replace(IN_TURN, engines=2)),
        (
            ["rollout.engine=vllm", "rollout.engines=3", "distributed.trainer_ranks=2"],
            2,
            replace(IN_TURN, engines=2),
        ),
        (["rollout.engines=1"], 2, GpuShares()),  # the native engine gets files
        (
            ["rollout.engine=vllm", "schedule=one_step_off"],
            1,
            GpuShares(1, 1, is_shared=True, is_paired=True),
        ),
        (["rollout.engine=vllm", "train.device=cpu"], 1, GpuShares()),
        (PAIRED, 8, replace(IN_TURN, transfer="ipc")),
        (
            [*PAIRED, "distributed.trainer_ranks=2", "rollout.engines=2"],
            8,
            replace(IN_TURN, transfer="ipc"),
        ),
        # Ray may place two ranks on a GPU
        (
            [*PAIRED, "distributed.trainer_ranks=2", "rollout.engines=4"],
            8,
            GpuShares(1, 1, is_shared=True),
        ),
    ],
)
def test_ranks_and_engines_alternate_where_a_step_does_one_thing_at_a_time(
    overrides: list[str], gpus: int, expected: GpuShares
):
    assert config_of(*overrides).gpu_shares(gpus) == expected


def test_an_engine_of_several_gpus_gets_no_part_of_one_on_ray():
    with pytest.raises(
        ConfigError,
        match=r"part of one GPU.*tensor_parallel=2; leave distributed\.gpus_per_process",
    ):
        config_of(*PAIRED, "rollout.vllm.tensor_parallel=2")


def test_in_turn_each_phase_has_the_gpu_but_what_the_other_keeps():
    memory = memory_of("qwen2.5-1.5b")
    in_turn = GpuShares(1, 1, is_shared=True, alternates=True)
    assert trainer_bytes(in_turn, 80 * GIB, memory) == 76 * GIB
    # bfloat16 weights, master weights, two moments; no gradients, no activations
    assert memory.kept_bytes() == 4 * GIB + (2 + 4 + 8) * memory.dimensions.parameters


def test_a_cache_of_a_given_size_leaves_the_rest_to_a_trainer_that_computes_at_the_same_time():
    sharing = GpuShares(1, 1, is_shared=True)
    equal, given = (
        memory_of("qwen2.5-1.5b", "rollout.engine=vllm", f"rollout.vllm.cache_gib={cache}")
        for cache in ("auto", "10")
    )
    assert trainer_bytes(sharing, 80 * GIB, equal) == 40 * GIB
    assert trainer_bytes(sharing, 80 * GIB, given) == 66 * GIB - 2 * given.dimensions.parameters


def kept_bytes(
    name: str, *, layers: int, policy: type[PolicyCore] = PolicyCore, recompute: bool = False
) -> tuple[float, TrainerMemory]:
    """Bytes per token that autograd keeps of a policy's forward on a fake GPU, and the model of
    memory for it.
    """
    with fake_cuda():
        model = fake_model(name, num_hidden_layers=layers)
        with patch.object(packed_forward, "check_packed_forward"):  # which takes a while
            policy._use_packed_forward(cast("Any", SimpleNamespace(_model=model)))
        if recompute:
            recompute_layers(model)
        samples = groups_of([(24, (31, 60, 44, 52))] * 3)
        (microbatch,) = pack(samples, max_tokens=10**6, device="cuda")
        with saved_bytes(model) as kept:
            hidden = hidden_states(model, microbatch)
        found = kept() / microbatch.num_tokens
        del hidden
    dimensions = dimensions_of(model)
    assert dimensions is not None
    return found, TrainerMemory(
        config_of("rollout.group_size=4"), dimensions, ResponseLengths(24, 46.75)
    )


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, PolicyCore) for name in (*FAMILIES, "qwen2.5-1.5b")),
        *((name, ShardedPolicy) for name in ("gemma3", "qwen2.5-1.5b")),
    ],
)
def test_activations_are_what_autograd_keeps_on_a_gpu_to_ten_per_cent(
    name: str, policy: type[PolicyCore]
):
    kept, memory = kept_bytes(name, layers=4, policy=policy)
    assert memory.activation_bytes(recompute=False) == pytest.approx(kept, rel=0.1)
    of_a_layer = (kept - kept_bytes(name, layers=2, policy=policy)[0]) / 2
    inputs, _ = kept_bytes(name, layers=4, policy=policy, recompute=True)
    assert memory.activation_bytes(recompute=True) == pytest.approx(inputs + of_a_layer, rel=0.1)
