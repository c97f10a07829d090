"""vLLM for real: the same log-probabilities as a plain float32 forward, whatever the weights were
before.

The contract that it shares with other engines is in test_engine_contract.py.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from dapo.cli.train import start_run
from dapo.config import load_config
from dapo.core.errors import EngineError
from dapo.core.rng import keyed_seed
from dapo.distributed.engine_specs import engine_specs
from dapo.engines.vllm.start import engine_arguments
from dapo.policy.hf_io import layout_of
from dapo.policy.model import load_model
from dapo.types import Generation, GenerationRequest, WeightLayout
from helpers import vllm_engines
from helpers.paper_model import NODES, PARAMETERS, paper_config
from helpers.paths import CONFIGS, ROOT, TESTS
from helpers.processes import wait_until_ended
from helpers.sockets import descendants, is_private, listeners
from helpers.tiny_models import ModelWeights, tiny_model, wide_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not vllm_engines.AVAILABLE, reason=vllm_engines.MISSING),
]

TOLERANCE = 1e-4
# longer than two blocks, so that their keys and values are kept for the next request that begins
# alike
LONG_PROMPT = tuple(keyed_seed("prompt", i) % 190 for i in range(70))


def request(label: str, **changes: object) -> GenerationRequest:
    return replace(
        GenerationRequest(label, LONG_PROMPT, 24, 1.0, 1.0, keyed_seed("test", label), stop_ids=()),
        **changes,
    )


def requests() -> list[GenerationRequest]:
    """Two groups at two temperatures."""
    return [
        request(f"{g}/{i}/{t}", prompt_ids=(*LONG_PROMPT, g), temperature=t)
        for t in (1.0, 0.7)
        for g in range(2)
        for i in range(4)
    ]


def run(
    engine: vllm_engines.RemoteEngine, wanted: list[GenerationRequest]
) -> dict[str, Generation]:
    engine.submit(wanted)
    done: dict[str, Generation] = {}
    for _ in range(5000):
        if len(done) == len(wanted):
            break
        done |= {generation.request_id: generation for generation in engine.poll()}
    assert done.keys() == {one.id for one in wanted}
    return done


@torch.no_grad()
def largest_gap(
    model: PreTrainedModel, wanted: list[GenerationRequest], done: dict[str, Generation]
) -> float:
    """Of all log-probabilities, against the model's own forward in its own dtype."""
    gap = 0.0
    for one in wanted:
        response = done[one.id].token_ids
        logits = model(
            input_ids=torch.tensor([[*one.prompt_ids, *response]]), use_cache=False
        ).logits[0]
        distribution = (logits[len(one.prompt_ids) - 1 : -1] / one.temperature).log_softmax(-1)
        expected = distribution[range(len(response)), list(response)]
        gap = max(gap, float((torch.tensor(done[one.id].logprobs) - expected).abs().max()))
    return gap


def log_gap(what: str, gap: float) -> float:
    """Shown with `make test-vllm ARGS=-s`; docs/lab/performance.md has the figures."""
    print(f"\n{what}: largest difference of a log-probability {gap:.1e}")
    return gap


@pytest.mark.parametrize("name", ["tied llama", "qwen2"])
def test_logprobs_are_those_of_the_plain_forward_with_every_new_set_of_weights(name: str) -> None:
    engine = vllm_engines.fresh(name)
    wanted = requests()
    for version in range(3):
        model = wide_model(name, seed=version)
        engine.load_weights(ModelWeights(model), version)
        done = run(engine, wanted)
        assert log_gap(f"{name}, weights {version}", largest_gap(model, wanted, done)) < TOLERANCE
        assert {one.version for one in done.values()} == {version}
    # the test can tell one set from another
    assert largest_gap(wide_model(name, seed=0), wanted, done) > 1


def test_prompts_that_begin_alike_are_computed_once_but_never_with_older_weights() -> None:
    engine = vllm_engines.fresh("tied llama")
    for version in range(2):
        engine.load_weights(ModelWeights(wide_model("tied llama", seed=version)), version)
        assert engine.call("cached_tokens", request(f"v{version}")) == [
            0,
            2 * vllm_engines.BLOCK_TOKENS,
        ]


def test_nothing_is_sampled_before_there_are_weights() -> None:
    with pytest.raises(EngineError, match=r"never loaded.*load a complete set first"):
        vllm_engines.fresh("tied llama").submit([request("a")])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lm_head.weight": None, "other": torch.ones(3)},
            r"missing: lm_head\.weight; unexpected: other",
        ),
        (
            {"model.norm.weight": torch.ones(47)},
            r"model\.norm\.weight has shape \(47,\), .* needs \(48,\)",
        ),
    ],
)
def test_a_wrong_set_of_weights_is_refused_and_the_old_ones_stay(
    changes: dict[str, object], message: str
) -> None:
    engine = vllm_engines.fresh("tied llama")
    wanted = requests()[:2]
    model = wide_model("tied llama")
    engine.load_weights(ModelWeights(model), 4)
    wrong = dict(ModelWeights(wide_model("tied llama", seed=1)).named_tensors()) | changes
    with pytest.raises(EngineError, match=message):
        engine.load_weights(
            Weights({name: tensor for name, tensor in wrong.items() if tensor is not None}), 5
        )
    done = run(engine, wanted)
    assert largest_gap(model, wanted, done) < TOLERANCE
    assert {one.version for one in done.values()} == {4}


class Weights:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def layout(self) -> WeightLayout:
        return layout_of(self.tensors, {})

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.tensors.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.005}, r"temperatures of 0 \(greedy\) and from 0\.01 to 2, got 0\.005"),
        ({"temperature": 2.5}, r"from 0\.01 to 2, got 2\.5"),
        (
            {"max_new_tokens": 187},
            r"needs 257 positions \(70 prompt \+ 187 max_new_tokens\).* is 256",
        ),
        ({"prompt_ids": (3, 197)}, "prompt token 197 is outside the model's vocabulary of 197"),
    ],
)
def test_what_vllm_would_change_or_refuse_is_an_error_that_says_why(
    changes: dict[str, object], message: str
) -> None:
    engine = vllm_engines.fresh("tied llama")
    engine.load_weights(ModelWeights(wide_model("tied llama")), 0)
    with pytest.raises(EngineError, match=message):
        engine.submit([request("a", **changes)])
    assert engine.poll() == []


def test_sequences_that_the_cache_cannot_hold_at_once_are_answered_as_if_alone() -> None:
    """vLLM throws the last ones out and computes them again later."""
    engine = vllm_engines.fresh("tied llama", slots=256)
    model = wide_model("tied llama")
    engine.load_weights(ModelWeights(model), 0)
    # 3 blocks each
    wanted = [request(f"r{i}", prompt_ids=(5, 6, i % 190), max_new_tokens=85) for i in range(256)]
    together = run(engine, wanted)
    assert largest_gap(model, wanted[-32:], together) < TOLERANCE
    alone = run(engine, wanted[-32:])
    assert [alone[one.id].token_ids == together[one.id].token_ids for one in wanted[-32:]] == [
        True
    ] * 32


def test_an_engine_of_two_processes_samples_as_one_and_listens_for_nobody_else() -> None:
    """What `tensor_parallel` is on GPUs, with the CPU in their place."""
    model = wide_model("tied llama")
    wanted = requests()
    engine = vllm_engines.start(
        "two-processes",
        vllm_engines.options_for(model, tensor_parallel=2, arguments={"max_num_seqs": 16}),
    )
    for version in range(2):
        model = wide_model("tied llama", seed=version)
        engine.load_weights(ModelWeights(model), version)
        assert largest_gap(model, wanted, run(engine, wanted)) < TOLERANCE
    processes = descendants(engine.worker.pid)
    assert len(processes) >= 3
    found = listeners(processes)
    assert any(listener.port for listener in found)
    assert [listener for listener in found if listener.port and not is_private(listener)] == []
    # sockets by which they have met, in a folder that is gone
    assert [
        listener.address
        for listener in found
        if not listener.port and Path(listener.address).exists()
    ] == []
    engine.worker.close()
    wait_until_ended(*processes, timeout_s=120)


PAPER = {
    "executor": "mp",
    "tensor_parallel": 4,
    "uses_ray": False,
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 16384,
    "async_scheduling": True,
    "max_model_len": 22528,
    "dtype": "torch.bfloat16",
    "eager": False,
    "graphs": "FULL_AND_PIECEWISE",
    "cache_bytes": 48 * 2**30,
    "memory": 0.01,
    "prefix_caching": True,
    "transfer": "nccl",
    "sleeps": False,
}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], PAPER),
        (["rollout.vllm.cache_gib=auto"], PAPER | {"cache_bytes": None, "memory": 0.9}),
        (["launcher=local"], PAPER | {"transfer": "ipc", "sleeps": True}),
        (
            ["rollout.vllm={tensor_parallel: 1, cache_gib: auto}", "rollout.clock=history"],
            PAPER
            | {"executor": "uni", "tensor_parallel": 1}
            | {"cache_bytes": None, "memory": 0.9, "async_scheduling": False, "seed": 0},
        ),
        (
            ["rollout.vllm.options={max_num_seqs: 2000, enable_prefix_caching: false}"],
            PAPER | {"max_num_seqs": 2000, "prefix_caching": False},
        ),
    ],
)
def test_vllms_own_classes_take_the_papers_layout_as_it_is_meant(
    overrides: list[str],
    expected: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher `local` finds a GPU for each trainer rank, which an engine's rank shares."""
    config = paper_config(tmp_path, *overrides)
    gpus = [str(gpu) for gpu in range(config.distributed.trainer_ranks)]
    monkeypatch.setattr(f"{engine_specs.__module__}.visible_gpus", lambda: gpus)
    spec = engine_specs(config, NODES)[0]
    arguments = engine_arguments(spec.options["options"], str(tmp_path), on_cpu=False)
    command = [
        sys.executable,
        "-P",
        "-m",
        "helpers.vllm_config_on_cuda",
        str(tmp_path),
        json.dumps(dict(arguments)),
    ]
    environment = (
        os.environ
        | spec.environment
        | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(TESTS)])}
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: found[name] for name in expected} == expected
    # engines that draw without seeds of requests must not draw the same
    assert (found["seed"] == 0) == config.rollout.is_reproducible
    weights = 2 * PARAMETERS / found["tensor_parallel"]
    assert found["cache_bytes"] is None or weights + found["cache_bytes"] < 0.9 * 80 * 2**30


def test_vllms_own_classes_read_the_calls_of_a_transfer_and_one_buffer_per_chunk() -> None:
    command = [sys.executable, "-P", "-m", "helpers.vllm_receives"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(TESTS), str(ROOT)])
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "worker": True,
        "ranks": [[1, 5], [3, 5]],
        "buffers": [[600], [900], [40]],  # two small weights together, a large one alone
        "received": True,
        "ipc": True,
    }


def test_without_seeds_of_requests_responses_differ_and_their_logprobs_are_right() -> None:
    model = wide_model("tied llama")
    options = vllm_engines.options_for(model, reproducible=False, arguments={"max_num_seqs": 16})
    engine = vllm_engines.start("unseeded", options)
    wanted = requests()
    engine.load_weights(ModelWeights(model), 0)
    first = run(engine, wanted)
    second = run(engine, wanted)
    assert largest_gap(model, wanted, first) < TOLERANCE
    assert all(first[one.id].token_ids != second[one.id].token_ids for one in wanted)
    # on a GPU steps are then scheduled ahead, which vLLM does not do on a CPU
    long = [replace(one, max_new_tokens=100) for one in wanted]
    engine.submit(long)
    for _ in range(12):
        assert engine.poll() == []
    aborted = {
        generation.request_id: generation for generation in engine.abort([one.id for one in long])
    }
    assert aborted.keys() == {one.id for one in long}
    assert all(0 < len(one.token_ids) == len(one.logprobs) < 100 for one in aborted.values())
    assert largest_gap(model, long, aborted) < TOLERANCE
    model = wide_model("tied llama", seed=1)
    engine.load_weights(ModelWeights(model), 1)
    assert largest_gap(model, wanted, run(engine, wanted)) < TOLERANCE
    engine.worker.close()


def test_a_process_takes_no_more_memory_than_the_model_and_the_cache_need() -> None:
    pid = vllm_engines.process("tied llama").worker.pid
    status = Path(f"/proc/{pid}/status").read_text()
    peak_kib = next(
        int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")
    )
    assert peak_kib < 2 * 2**20


def test_a_model_or_a_size_that_vllm_refuses_is_an_error_that_says_why() -> None:
    worker = vllm_engines.start_worker("refused", "VllmStartWorker")
    tiny_cache = vllm_engines.options_for(wide_model("llama"), cache_gib=1e-5)
    with pytest.raises(
        EngineError, match=r"vLLM does not start.*rollout\.vllm\.cache_gib=1e-05.*(cache|memory)"
    ):
        worker.call("open", tiny_cache).result(vllm_engines.CALL_S)
    narrow_heads = vllm_engines.options_for(tiny_model("llama"))
    with pytest.raises(EngineError, match=r"heads of 8.*takes 32, 64, .*rollout\.engine=native"):
        worker.call("open", narrow_heads).result(vllm_engines.CALL_S)
    worker.close()


def test_smollm2_agrees_with_its_float32_forward_and_repeats_itself() -> None:
    loaded = load_model("smollm2-135m-instruct", dtype=torch.float32)
    engine = vllm_engines.start("smollm2", vllm_engines.options_for(loaded.model, cache_gib=0.25))
    prompt = tuple(loaded.tokenizer("What is 3 + 4? Answer: 7. What is 12 + 5? Answer:").input_ids)
    wanted = [
        request(
            f"s{i}/{t}",
            prompt_ids=prompt,
            stop_ids=loaded.stop_ids,
            temperature=t,
            max_new_tokens=12,
        )
        for t in (1.0, 0.7)
        for i in range(4)
    ]
    engine.load_weights(ModelWeights(loaded.model), 0)
    first = run(engine, wanted)
    assert log_gap("smollm2, weights 0", largest_gap(loaded.model, wanted, first)) < TOLERANCE
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.01)
    engine.load_weights(ModelWeights(loaded.model), 1)
    second = run(engine, wanted)
    assert log_gap("smollm2, weights 1", largest_gap(loaded.model, wanted, second)) < TOLERANCE
    assert [run(engine, wanted)[one.id].token_ids for one in wanted[:1]] == [
        second[wanted[0].id].token_ids
    ]
    engine.worker.close()


def test_smollm2_trains_with_vllm_in_another_interpreters_process(tmp_path: Path) -> None:
    config = load_config(
        CONFIGS / "quickstart.yaml",
        [
            "rollout={engine: vllm, prompts_per_step: 2, group_size: 4, max_response_tokens: 16}",
            f"rollout.vllm={{cache_gib: 0.5, python: {sys.executable}}}",
            "dynamic_sampling={enabled: false, max_groups_per_step: null}",
            (
                "train={num_steps: 3, minibatch_groups: 2, microbatch_tokens: 512, save_every: 0,"
                " eval_every: 0}"
            ),
            "data.eval=null",
            "model.dtype=float32",
            "data.max_prompt_tokens=256",
        ],
    )
    start_run(config, run_dir=tmp_path / "run", config_name="quickstart")
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    trained = [row for row in rows if "loss/policy" in row]
    assert [row["step"] for row in trained] == [1, 2, 3]
    # the sampler's law is the trainer's, also after the weights have moved
    gap = max(row["rollout/engine_logprob_gap_max"] for row in trained)
    assert log_gap("smollm2, against the trainer", gap) < TOLERANCE
