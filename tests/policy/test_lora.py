"""Adapters: the same numbers as a model into which they were merged by hand, from the forward to
the exported files.
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from dapo.analysis.check.estimate import HardwareProfile, ResourceEstimate
from dapo.analysis.check.report import describe_estimate
from dapo.cli.main import main
from dapo.config import build_config
from dapo.config.rollout_options import NativeConfig
from dapo.core.errors import CheckpointError, ConfigError
from dapo.engines.native.engine import NativeEngine
from dapo.policy.checkpoint import SavedWeights
from dapo.policy.lora import adapted_layers, export_adapter, saved_weights
from dapo.policy.model import load_model
from dapo.policy.policy import Policy
from dapo.types import GenerationRequest
from helpers.model_sizes import sizes_of
from helpers.tiny_models import tiny_model
from helpers.tiny_policies import (
    assert_close,
    float64_model,
    gradient_of,
    groups_of,
    loaded,
    make_policy,
    master_weights_of,
    plain_copy,
    plain_scores,
    ragged,
    sample,
    weights_of,
)
from helpers.tiny_runs import CONFIGS, contents, differences, metrics

LORA: dict[str, Any] = {"rank": 3, "alpha": 4.5}
SCALE = 1.5
TINY = str(CONFIGS / "tiny.yaml")


def factors_of(policy: Policy, directory: Path) -> dict[str, Tensor]:
    """What the policy trains, by name."""
    directory.mkdir(parents=True, exist_ok=True)
    policy.save(directory)
    return load_file(directory / "weights.safetensors")


def give_factors(policy: Policy, directory: Path) -> dict[str, Tensor]:
    """Random factors for a policy that was never updated: at the start B is zero, and with it half
    of all gradients.
    """
    generator = torch.Generator().manual_seed(3)
    factors = {
        name: (
            0.1
            * torch.randn(factor.shape, generator=generator, dtype=torch.float64).to(factor.dtype)
        )
        for name, factor in factors_of(policy, directory).items()
    }
    save_file(factors, directory / "weights.safetensors")
    policy.load(directory)
    return factors


def pairs(factors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each adapted layer."""
    layers = dict.fromkeys(name.partition(".lora_")[0] for name in factors)
    return {
        layer: (
            factors[f"{layer}.lora_A.default.weight"],
            factors[f"{layer}.lora_B.default.weight"],
        )
        for layer in layers
    }


@torch.no_grad()
def hand_merged(
    model: PreTrainedModel, factors: dict[str, Tensor], scale: float = SCALE
) -> PreTrainedModel:
    """W + s B A, layer by layer; in place."""
    for layer, (a, b) in pairs(factors).items():
        weight = model.get_parameter(f"{layer}.weight")
        weight += (scale * (b.double() @ a.double())).to(weight.dtype)
    return model


def every_name(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


class TestTraining:
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    def test_log_probabilities_are_those_of_the_hand_merged_model(
        self, temperature: float, tmp_path: Path
    ):
        policy = make_policy(loaded(float64_model()), lora=LORA, temperature=temperature)
        merged = hand_merged(float64_model(), give_factors(policy, tmp_path))
        samples = ragged()
        far = []
        plain = plain_scores(float64_model(), samples, temperature)
        expected = plain_scores(merged, samples, temperature)
        for row, (here, _), (base, _) in zip(
            policy.record_old_logprobs(samples), expected, plain, strict=True
        ):
            assert row.old_logprobs == pytest.approx(here.tolist(), abs=1e-10)
            far.append((here - base).detach().abs().max().item())
        assert max(far) > 0.1

    @pytest.mark.parametrize("kl_coef", [0.0, 0.5])
    def test_gradients_of_the_factors_follow_from_those_of_the_merged_weight(
        self, kl_coef: float, tmp_path: Path
    ):
        """L(W + s B A): dL/dA = s B' G and dL/dB = s G A' for G = dL/dW; the KL term looks at W
        alone.
        """
        policy = make_policy(
            loaded(float64_model()),
            lora=LORA,
            loss={"kl_coef": kl_coef},
            microbatch_tokens=20,
            temperature=0.7,
        )
        factors = give_factors(policy, tmp_path / "start")
        merged = hand_merged(float64_model(), factors)
        samples = ragged()
        base = plain_scores(float64_model(), samples, 0.7)
        count = sum(len(row.response_ids) for row in samples)
        loss = torch.zeros((), dtype=torch.float64)
        for row, (logprobs, _), (reference, _) in zip(
            samples, plain_scores(merged, samples, 0.7), base, strict=True
        ):
            log_ratio = reference.detach() - logprobs
            kl = log_ratio.exp() - log_ratio - 1
            loss = loss + (kl_coef * kl - row.advantage * logprobs).sum() / count
        loss.backward()
        expected = {}
        for layer, (a, b) in pairs(factors).items():
            g = merged.get_parameter(f"{layer}.weight").grad
            assert g is not None
            expected |= {f"{layer}.lora_A.default.weight": SCALE * b.T @ g}
            expected |= {f"{layer}.lora_B.default.weight": SCALE * g @ a.T}
        assert_close(gradient_of(policy, samples, tmp_path / "x"), expected, relative=1e-10)

    def test_training_starts_from_the_model_as_it_is(self):
        plain = float64_model()
        for name, tensor in (
            make_policy(loaded(float64_model()), lora=LORA).weights(version=0).named_tensors()
        ):
            assert torch.equal(tensor, plain.get_parameter(name))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_only_the_factors_change_and_only_they_have_an_optimiser(
        self, dtype: torch.dtype, tmp_path: Path
    ):
        model = loaded("tied llama", dtype=dtype)
        before = {name: p.clone() for name, p in model.model.named_parameters()}
        policy = make_policy(model, lora=LORA, loss={"kl_coef": 0.1})
        for step in (1, 2, 3):
            assert policy.update(ragged(), step=step)["optim/skipped"] == 0
        after = dict(model.model.named_parameters())
        for name, weight in before.items():
            layer, _, part = name.rpartition(".")
            now = after.get(name, after.get(f"{layer}.base_layer.{part}"))
            assert now is not None
            assert now.dtype == dtype
            assert torch.equal(now, weight), name
            assert not now.requires_grad
        factors = factors_of(policy, tmp_path)
        assert set(factors) == {name for name in after if ".lora_" in name}
        assert {factor.dtype for factor in factors.values()} == {torch.float32}
        for kind in ("exp_avg", "exp_avg_sq"):
            moments = load_file(tmp_path / f"{kind}.safetensors")
            assert moments.keys() == factors.keys()
            assert all(bool(moment.any()) for moment in moments.values())
        assert all(bool(factor.any()) for factor in factors.values())

    def test_updates_make_rewarded_responses_likelier_and_punished_ones_less_likely(self):
        policy = make_policy(
            loaded("tied llama", dtype=torch.bfloat16), lora=LORA, optim={"lr": 2e-2}
        )
        samples = groups_of([(4, (6, 6))])
        before = policy.record_old_logprobs(samples)
        for step in range(1, 9):
            policy.update(samples, step=step)
        for old, new in zip(before, policy.record_old_logprobs(samples), strict=True):
            gain = sum(new.old_logprobs or ()) - sum(old.old_logprobs or ())
            assert gain > 0.5 if old.advantage > 0 else gain < -0.5

    def test_the_kl_reference_is_the_model_without_adapters(self, tmp_path: Path):
        policy = make_policy(loaded(float64_model()), lora=LORA, loss={"kl_coef": 0.1})
        assert policy.update(ragged(), step=1)["loss/kl"] == pytest.approx(0, abs=1e-12)
        factors = factors_of(policy, tmp_path)
        samples = ragged()
        terms = []
        merged = hand_merged(float64_model(), factors)
        base = float64_model()
        for (here, _), (there, _) in zip(
            plain_scores(merged, samples), plain_scores(base, samples), strict=True
        ):
            terms.append((there - here).exp() - (there - here) - 1)
        expected = torch.cat(terms).mean().item()
        assert expected > 1e-9
        assert policy.update(samples, step=2)["loss/kl"] == pytest.approx(expected, rel=1e-8)

    def test_factors_are_keyed_by_the_seed_and_no_global_generator_is_touched(self, tmp_path: Path):
        def factors(name: str, seed: int, stream: int) -> dict[str, Tensor]:
            model = loaded("llama", dtype=torch.float32)
            torch.manual_seed(stream)
            before = torch.random.get_rng_state()
            policy = make_policy(model, lora=LORA, seed=seed)
            assert torch.equal(torch.random.get_rng_state(), before)
            return factors_of(policy, tmp_path / name)

        first = factors("first", 5, stream=1)
        assert_close(factors("second", 5, stream=2), first, relative=0)
        other = factors("other", 6, stream=1)
        for layer, (a, b) in pairs(first).items():
            assert not b.any()
            bound = a.shape[1] ** -0.5
            assert float(a.abs().max()) <= bound
            assert float(a.std()) == pytest.approx(bound / 3**0.5, rel=0.25)
            assert not torch.equal(other[f"{layer}.lora_A.default.weight"], a)
        sampled = [a for a, _ in pairs(first).values()]
        assert not any(torch.equal(sampled[0], a) for a in sampled[1:])


class TestEngineWeights:
    @pytest.mark.parametrize("family", ["llama", "tied llama", "qwen2"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_they_are_the_merged_ones_under_every_plain_name(
        self, family: str, dtype: torch.dtype, tmp_path: Path
    ):
        model = loaded(family, dtype=dtype)
        plain = plain_copy(model)
        policy = make_policy(model, lora=LORA)
        policy.update(ragged(), step=1)
        policy.update(ragged(), step=2)
        before = policy.record_old_logprobs(ragged())
        found = weights_of(policy)
        expected = every_name(hand_merged(plain.float(), factors_of(policy, tmp_path)))
        assert {tensor.dtype for tensor in found.values()} == {dtype}
        assert_close(found, expected, relative=1e-6 if dtype == torch.float32 else 2**-8)
        assert policy.record_old_logprobs(ragged()) == before
        source = policy.weights(version=0)
        assert_close(dict(source.named_tensors()), dict(source.named_tensors()), relative=0)

    def test_the_engine_samples_from_the_trainers_distribution(self, tmp_path: Path):
        model = loaded("tied llama", dtype=torch.float32)
        engine = NativeEngine(plain_copy(model), NativeConfig(slots=8))
        policy = make_policy(model, lora=LORA)
        give_factors(policy, tmp_path)
        engine.load_weights(policy.weights(version=1), version=1)
        prompts = {f"{i}": tuple(range(3 + i, 9 + i)) for i in range(8)}
        engine.submit(
            [
                GenerationRequest(name, ids, 12, 1.0, 1.0, int(name), ())
                for name, ids in prompts.items()
            ]
        )
        done: list[Any] = []
        while len(done) < len(prompts):
            done += engine.poll()
        rows = groups_of([(1, (1,))])[:1]
        samples = [
            replace(
                rows[0],
                group_id=int(one.request_id),
                prompt_ids=prompts[one.request_id],
                response_ids=one.token_ids,
                engine_logprobs=one.logprobs,
                mask=(True,) * len(one.token_ids),
            )
            for one in done
        ]
        assert policy.update(samples, step=1)["rollout/engine_logprob_gap_max"] < 1e-4


class TestCheckpoints:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("updates", [0, 2])
    def test_a_saved_policy_goes_on_bit_for_bit(
        self, dtype: torch.dtype, updates: int, tmp_path: Path
    ):
        def fresh() -> Policy:
            return make_policy(
                loaded("tied llama", dtype=dtype), lora=LORA, loss={"kl_coef": 0.1}, seed=updates
            )

        policy = fresh()
        for step in range(updates):
            policy.update(ragged(), step=step + 1)
        policy.save(tmp_path)
        resumed = fresh()
        resumed.update(groups_of([(2, (3, 3))]), step=1)  # whatever it did before is forgotten
        resumed.load(tmp_path)
        for step in (3, 4):
            assert resumed.update(ragged(), step=step) == policy.update(ragged(), step=step)
            assert_close(master_weights_of(resumed), master_weights_of(policy), relative=0)

    def test_saved_weights_are_the_complete_merged_set(self, tmp_path: Path):
        model = loaded("tied llama", dtype=torch.bfloat16)
        plain = plain_copy(model)
        policy = make_policy(model, lora=LORA)
        policy.update(ragged(), step=1)
        policy.snapshot()(tmp_path)
        found = dict(saved_weights(tmp_path, plain).named_tensors())
        assert {tensor.dtype for tensor in found.values()} == {torch.float32}
        assert_close(
            {n: tensor.bfloat16() for n, tensor in found.items()}, weights_of(policy), relative=0
        )
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
        numbers = sum(factor.numel() for factor in factors_of(policy, tmp_path).values())
        assert 12 * numbers < size < 12 * numbers + 20_000  # the rest is names

    def test_what_does_not_fit_is_refused(self, tmp_path: Path):
        adapted = make_policy(loaded("llama"), lora=LORA)
        factors_of(adapted, tmp_path / "adapted")
        factors_of(make_policy(loaded("llama")), tmp_path / "whole")
        for other, message in (
            (
                {"rank": 3, "alpha": 9.0},
                r"rank: 3, alpha: 4\.5\}, but here model\.lora=\{rank: 3, alpha: 9\}",
            ),
            ({"rank": 5, "alpha": 4.5}, "resume with the saved value"),
            (None, r"model\.lora=\{rank: 3, alpha: 4\.5\}, but here model\.lora=none"),
        ):
            with pytest.raises(CheckpointError, match=message):
                make_policy(loaded("llama"), lora=other).load(tmp_path / "adapted")
        with pytest.raises(
            CheckpointError, match=r"model\.lora=none, but here model\.lora=\{rank: 3"
        ):
            adapted.load(tmp_path / "whole")
        with pytest.raises(
            CheckpointError,
            match=r"another model: .* is \(3, 80\) in the checkpoint and \(3, 64\) here",
        ):
            saved_weights(
                tmp_path / "adapted", load_model("tiny-random", dtype=torch.float32).model
            )
        with pytest.raises(CheckpointError, match=r"no linear layer model\.layers\.0\.mlp"):
            saved_weights(tmp_path / "adapted", float64_model())
        with pytest.raises(ConfigError, match="leave out --adapter"):
            export_adapter(tmp_path / "whole", loaded("llama"), tmp_path / "out")


class TestTargets:
    def test_all_linear_is_every_linear_layer_but_the_head(self):
        for family in ("llama", "tied llama"):
            names = adapted_layers(tiny_model(family))
            kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            assert [name.rpartition(".")[2] for name in names] == kinds * 2
            assert not any("head" in name or "embed" in name for name in names)

    def test_the_exported_adapter_is_of_all_linear_layers(self, tmp_path: Path):
        policy = make_policy(loaded("llama", dtype=torch.float32), lora=LORA)
        factors = give_factors(policy, tmp_path / "saved")
        assert sorted(pairs(factors)) == sorted(adapted_layers(tiny_model("llama")))
        export_adapter(
            tmp_path / "saved", loaded("llama", dtype=torch.float32), tmp_path / "adapter"
        )
        adapted: Any = peft.PeftModel.from_pretrained(tiny_model("llama"), tmp_path / "adapter")
        merged: Any = hand_merged(tiny_model("llama"), factors)
        ids = torch.arange(5, 25)[None]
        with torch.no_grad():
            torch.testing.assert_close(
                adapted(input_ids=ids).logits, merged(input_ids=ids).logits, rtol=0, atol=1e-4
            )


def estimate(lora: dict[str, Any] | None = None, dtype: str = "float32") -> ResourceEstimate:
    config = build_config(
        {"model": {"name": "tiny-random", "dtype": dtype, "lora": lora}, "data": {"train": "x"}}
    )
    return ResourceEstimate(config, sizes_of("tiny-random"), HardwareProfile())


def state_bytes(estimated: ResourceEstimate) -> float:
    return sum(estimated.memory.state().values())


class TestSizes:
    def test_counts_by_hand(self, tmp_path: Path):
        """tiny-random: widths 32 (queries), 16 (keys, values), 64 (gates); two layers of seven
        linear ones.
        """
        rank = 2
        numbers = 2 * rank * ((32 + 32) * 2 + (32 + 16) * 2 + (32 + 64) * 3)
        dimensions = sizes_of("tiny-random")
        assert (dimensions.lora_parameters(rank), dimensions.linears) == (numbers, 14)
        policy = make_policy(load_model("tiny-random", dtype=torch.float32), lora={"rank": rank})
        assert sum(factor.numel() for factor in factors_of(policy, tmp_path).values()) == numbers

    def test_bytes_by_hand(self):
        model = sizes_of("tiny-random").parameters
        adapters = sizes_of("tiny-random").lora_parameters(2)
        lora = {"rank": 2}
        assert state_bytes(estimate(dtype="bfloat16")) == model * (2 + 4 + 4 + 8)
        assert state_bytes(estimate()) == model * (4 + 4 + 8)
        assert state_bytes(estimate(lora, "bfloat16")) == model * 2 + adapters * (2 + 4 + 4 + 8)
        assert state_bytes(estimate(lora)) == model * 4 + adapters * (4 + 4 + 8)
        assert state_bytes(estimate(lora, "float64")) == model * 8 + adapters * 32
        assert estimate(dtype="bfloat16").checkpoint_copy_bytes() == 12 * model
        assert estimate(lora).checkpoint_copy_bytes() == 12 * adapters

    @pytest.mark.parametrize("lora", [None, LORA])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_a_policy_holds_what_was_counted(
        self, dtype: str, lora: dict[str, Any] | None, tmp_path: Path
    ):
        model = load_model("tiny-random", dtype=getattr(torch, dtype))
        policy = make_policy(model, lora=lora)
        policy.update(
            [sample(0, (5, 6), (7, 8, 9)), sample(0, (5, 6), (10, 11), advantage=-1.0)], step=1
        )
        master_weights = factors_of(policy, tmp_path)
        moments = [
            m
            for kind in ("exp_avg", "exp_avg_sq")
            for m in load_file(tmp_path / f"{kind}.safetensors").values()
        ]
        gradients = master_weights.values()
        kept = [
            *model.model.parameters(),
            *moments,
            *gradients,
            *(master_weights.values() if dtype == "bfloat16" else ()),
        ]
        estimated = estimate(lora, dtype)
        assert state_bytes(estimated) == sum(tensor.nbytes for tensor in kept)
        assert estimated.checkpoint_copy_bytes() == sum(
            tensor.nbytes for tensor in (*moments, *master_weights.values())
        )

    def test_check_says_what_trains_and_what_it_holds(self):
        raw = {
            "model": {"name": "tiny-random", "dtype": "bfloat16", "lora": {"rank": 2}},
            "data": {"train": "builtin:sums"},
        }
        output = "\n".join(describe_estimate(build_config(raw), HardwareProfile()))
        assert (
            "adapters     of rank 2, scaled by 16, on 14 linear layers: 2,048 parameters, "
            in output
        )
        assert "frozen weights" in output
        raw["model"] = {"name": "someone/not-on-this-machine", "lora": {"rank": 2}}
        assert "the sizes of someone/not-on-this-machine are not known" in next(
            describe_estimate(build_config(raw), HardwareProfile())
        )


def dapo(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return stopped.value.code if isinstance(stopped.value.code, int) else 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with adapters, and checkpoints after its third and sixth step."""
    path = tmp_path_factory.mktemp("runs") / "lora"
    options = [
        "train.threads=1",
        "train.num_steps=6",
        "train.save_every=3",
        "train.keep_checkpoints=2",
        "train.eval_every=6",
        "optim.lr=0.03",
    ]
    assert (
        dapo("train", TINY, *options, "model.lora={rank: 4, alpha: 8}", "--run-dir", str(path)) == 0
    )
    return path


class TestRuns:
    def test_the_run_learns_and_the_engine_has_the_trainers_distribution(self, whole: Path):
        rows = metrics(whole)
        assert rows[-1]["eval/sums/accuracy"] > rows[0]["eval/sums/accuracy"]
        accuracy = [row["reward/accuracy"] for row in rows[1:]]
        assert sum(accuracy[3:]) / 3 > sum(accuracy[:2]) / 2 + 0.15
        gaps = [row["rollout/engine_logprob_gap_max"] for row in rows[1:]]
        assert len(gaps) == 6
        assert max(gaps) < 1e-4

    def test_a_resumed_run_is_the_uninterrupted_one_to_the_byte(self, whole: Path, tmp_path: Path):
        resumed = tmp_path / "run"
        shutil.copytree(whole, resumed)
        shutil.rmtree(resumed / "checkpoints" / "step_000006")
        assert dapo("resume", str(resumed)) == 0
        assert differences(contents(resumed), contents(whole)) == []

    def test_both_exports_load_elsewhere_and_give_equal_logits(self, whole: Path, tmp_path: Path):
        merged = tmp_path / "merged"
        adapter = tmp_path / "adapter"
        assert dapo("export", str(whole), str(merged)) == 0
        assert dapo("export", str(whole), str(adapter), "--adapter") == 0
        assert dapo("export", str(whole), str(adapter), "--adapter") == 2  # it is there already
        settings = json.loads((adapter / "adapter_config.json").read_text())
        assert (settings["r"], settings["lora_alpha"], settings["base_model_name_or_path"]) == (
            4,
            8,
            "tiny-random",
        )
        base = load_model("tiny-random", dtype=torch.float32).model
        ids = torch.arange(4, 44)[None]
        with torch.no_grad():
            before = base(input_ids=ids).logits
            one = AutoModelForCausalLM.from_pretrained(merged)(input_ids=ids).logits
            two = peft.PeftModel.from_pretrained(base, adapter)(input_ids=ids).logits
        torch.testing.assert_close(one, two, rtol=0, atol=1e-4)
        assert float((one - before).abs().max()) > 0.1
        factors = SavedWeights(whole / "checkpoints" / "step_000006")
        assert (
            len(dict(factors.named_tensors()))
            == len(load_file(adapter / "adapter_model.safetensors"))
            == 28
        )

    def test_eval_of_the_run_is_that_of_its_export(self, whole: Path, tmp_path: Path):
        options = [
            "--data",
            "{builtin: {sums: {}}, size: 6}",
            "--samples-per-problem",
            "2",
            "--output",
        ]
        model = tmp_path / "model"
        first = tmp_path / "first.json"
        second = tmp_path / "second.json"
        assert dapo("eval", str(whole), *options, str(first)) == 0
        assert dapo("export", str(whole), str(model)) == 0
        alike = [
            "reward.verifier=dapo.rewards.examples:has_digit",
            "model.dtype=float32",
            "eval.max_response_tokens=8",
        ]
        assert dapo("eval", str(model), *options, str(second), *alike) == 0
        tables = [json.loads(path.read_text())["table"] for path in (first, second)]
        assert [row["responses"] for row in tables[0]] == [row["responses"] for row in tables[1]]

    def test_a_missing_package_is_reported_before_anything_is_written(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ):
        path = tmp_path / "run"
        monkeypatch.setitem(sys.modules, "peft", None)  # as where it is not installed
        assert dapo("train", TINY, "model.lora.rank=4", "--run-dir", str(path)) == 2
        assert "pip install peft" in capsys.readouterr().err
        assert not path.exists()
