"""Linear layers in the processor's own order, and layers fused around them: the same products, new
weights taken in.
"""

import copy
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dapo.engines.native import linear_probe
from dapo.engines.native.cache import MaskedSlots
from dapo.engines.native.compatibility import patch_model
from dapo.engines.native.model_kernels import ModelKernels
from dapo.libs.cpu_kernels import Prompts, Rows
from dapo.libs.cpu_kernels.prepacked import (
    KERNELS,
    LAYERS,
    FusedQKVLinear,
    PrepackedLinear,
    can_prepack,
    default_kernel,
    multiplies,
    prepack_linears,
    prepacked_weights,
)
from helpers.tiny_models import SERVED, tiny_model

FLOAT32 = pytest.mark.skipif(
    not can_prepack(nn.Linear(1, 1)), reason="this torch has no packed matmul for float32"
)


def keyed(*shape: int) -> Tensor:
    """Numbers that are a function of the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class TiedLayers(nn.Module):
    """An embedding whose weight is the head's too, and a layer with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.inner = nn.Linear(24, 24)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.requires_grad_(False)


@FLOAT32
@pytest.mark.parametrize("rows", [1, 3, 16, 64, 200])
def test_any_number_of_rows_gives_the_plain_product(rows: int) -> None:
    plain = nn.Linear(48, 33)
    prepacked = PrepackedLinear(plain, rows=16, tied=False)
    inputs = keyed(rows, 48)
    with torch.inference_mode():
        assert torch.allclose(prepacked(inputs), plain(inputs), atol=1e-5, rtol=1e-5)
        assert torch.allclose(prepacked(inputs[None]), plain(inputs)[None], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_gives_the_plain_product_and_is_used_where_it_is_chosen(
    name: str, dtype: torch.dtype
) -> None:
    if not multiplies(name, dtype):
        pytest.skip(f"no {name} kernel for {dtype} on this processor")
    plain = nn.Linear(48, 32).to(dtype)
    prepacked = PrepackedLinear(plain, rows=8, tied=False, kernels={"32x48": name})
    assert type(prepacked.prepacked) is KERNELS[name]
    inputs = keyed(8, 48).to(dtype)
    other = keyed(8, 32).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    with torch.inference_mode():
        product = plain(inputs)
        for found, expected in (
            (prepacked(inputs), product),
            (prepacked.silu(inputs), nn.functional.silu(product)),
            (prepacked.plus(inputs, other), product + other),
            (prepacked.times(inputs, other), product * other),
        ):
            assert torch.allclose(found, expected, atol=tolerance, rtol=tolerance)
        before = prepacked(inputs)
        plain.weight.data.zero_()  # as when the policy, whose weights they were, updates
        assert torch.equal(prepacked(inputs), before)


@FLOAT32
def test_a_kernel_that_is_unknown_here_is_replaced_by_the_one_for_the_type() -> None:
    chosen = PrepackedLinear(
        nn.Linear(48, 32), rows=8, tied=False, kernels={"32x48": "of another processor"}
    )
    assert type(chosen.prepacked) is KERNELS[default_kernel(torch.float32) or ""]
    assert default_kernel(torch.float64) is None


@FLOAT32
def test_only_a_kernel_that_is_clearly_faster_is_chosen_and_small_weights_are_not_timed() -> None:
    default = default_kernel(torch.float32)
    timed = []

    def seconds(
        names: Iterable[str], outputs: int, inputs: int, rows: int, dtype: torch.dtype
    ) -> dict[str, float]:
        timed.append((outputs, inputs))
        slower = {default: 1.0, "compiled": 1.06}
        return {name: slower.get(name, 0.85 if inputs == 512 else 0.75) for name in names}

    shapes = [(512, 512), (1024, 512), (512, 1024), (100_000, 1024), (511, 511)]
    found = linear_probe.choose_kernels(shapes, torch.float32, rows=4, measure=seconds)
    assert timed == [(512, 512), (512, 1024), (1024, 512), (4096, 1024)]
    assert found.keys() == {"512x1024", "100000x1024"}
    assert default not in found.values()
    assert linear_probe.choose_kernels(shapes, torch.float64, rows=4) == {}


class Clock:
    """Measures one kernel as fast, the others as equally slow, and the compiled one as slower than
    its margin.
    """

    def __init__(self, fastest: str) -> None:
        self.fastest = fastest
        self.timed = 0

    def __call__(self, names: Iterable[str], *args: object) -> dict[str, float]:
        self.timed += 1
        return {
            name: 0.5 if name == self.fastest else 1.1 if name == "compiled" else 1.0
            for name in names
        }


def choose(clock: Clock, choices: Path, *, rows: int = 4, shapes: int = 1) -> dict[str, str]:
    return linear_probe.choose_kernels(
        [(512 * (i + 1), 512) for i in range(shapes)],
        torch.float32,
        rows,
        choices=choices,
        measure=clock,
    )


@FLOAT32
@pytest.mark.parametrize("first", ["plain", default_kernel(torch.float32) or ""])
def test_a_later_run_takes_the_choices_of_an_earlier_one_whatever_its_own_clock_says(
    tmp_path: Path, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache" / "kernels.json"
    default = default_kernel(torch.float32)
    other = Clock("plain" if first == default else default or "")
    found = choose(Clock(first), path)
    assert found == ({} if first == default else {"512x512": first})
    assert choose(other, path) == found
    assert other.timed == 0
    choose(other, path, shapes=2)  # only a new shape is timed
    assert other.timed == 1
    choose(other, path, rows=8)  # and all of them for another number of rows
    assert other.timed == 2
    assert choose(other, path) == found
    monkeypatch.setattr(linear_probe, "cpu_model", lambda: "another processor")
    assert choose(other, path) != found
    assert other.timed == 3


@FLOAT32
@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 100_000, '{"a": 3}', '{"a": {"512x512": 3}}', "\xff"]
)
def test_choices_that_cannot_be_read_are_made_anew_and_written(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(content, encoding="latin-1")
    assert choose(Clock("plain"), path) == {"512x512": "plain"}
    assert choose(Clock("none"), path) == {"512x512": "plain"}


@FLOAT32
def test_a_remembered_kernel_that_this_processor_does_not_have_is_timed_anew(
    tmp_path: Path,
) -> None:
    path = tmp_path / "kernels.json"
    choose(Clock("plain"), path)
    path.write_text(path.read_text().replace('"plain"', '"of another torch"'))
    assert choose(Clock("plain"), path) == {"512x512": "plain"}
    assert '"plain"' in path.read_text()


@FLOAT32
def test_choices_are_neither_read_nor_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    path = tmp_path / "kernels.json"
    choose(Clock("plain"), victim)
    before = victim.read_text()
    path.symlink_to(victim)
    clock = Clock("none")
    assert choose(clock, path) == {}
    assert (clock.timed, victim.read_text(), path.is_symlink()) == (1, before, False)


@FLOAT32
def test_a_folder_that_cannot_be_written_keeps_no_choice_and_stops_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "kernels.json").mkdir(parents=True)
    for path in (tmp_path / "file" / "kernels.json", tmp_path / "folder" / "kernels.json"):
        for kernel in ("plain", "none"):
            assert choose(Clock(kernel), path) == (
                {"512x512": "plain"} if kernel == "plain" else {}
            )


@FLOAT32
def test_of_two_runs_that_time_at_once_both_take_what_was_written_first(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"

    class Slow(Clock):
        def __call__(self, names: Iterable[str], *args: object) -> dict[str, float]:
            choose(Clock("plain"), path)
            return super().__call__(names, *args)

    assert choose(Slow("none"), path) == choose(Clock("none"), path) == {"512x512": "plain"}


@FLOAT32
def test_the_probe_times_every_kernel_of_this_processor() -> None:
    names = [name for name in KERNELS if multiplies(name, torch.float32)]
    seconds = linear_probe.measure_kernels(names, 64, 64, 4, torch.float32)
    assert set(seconds) == set(names) >= {"plain"}
    assert all(0 < value < 60 for value in seconds.values())


@FLOAT32
def test_the_shapes_to_time_are_those_that_a_model_is_prepacked_with() -> None:
    model = tiny_model("llama")
    shapes = {linear_probe.shape_name(*shape) for shape in linear_probe.linear_shapes(model)}
    used: set[str] = set()

    class Recording(dict[str, str]):
        def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
            used.add(name)
            return "plain"

    patch_model(model, rows=4, kernels=Recording(), model_kernels=ModelKernels(fuses_weights=False))
    assert used
    assert used - {LAYERS} <= shapes
    prepacked = [
        m for m in model.modules() if isinstance(m, PrepackedLinear) and hasattr(m, "prepacked")
    ]
    assert {type(layer.prepacked) for layer in prepacked} == {KERNELS["plain"]}


@FLOAT32
def test_new_weights_are_used_and_old_ones_are_gone() -> None:
    prepacked = PrepackedLinear(nn.Linear(48, 32, bias=False), rows=8, tied=False)
    weight = keyed(32, 48)
    inputs = keyed(8, 48)
    prepacked.load(weight.double())
    with torch.inference_mode():
        assert torch.allclose(prepacked(inputs), inputs @ weight.T, atol=1e-5, rtol=1e-5)


@FLOAT32
def test_a_prepacked_weight_has_its_shape_and_takes_no_memory_of_its_own() -> None:
    prepacked = PrepackedLinear(nn.Linear(48, 32), rows=8, tied=False)
    assert prepacked.weight.shape == (32, 48)
    assert prepacked.weight.untyped_storage().nbytes() == 4


@FLOAT32
def test_a_tied_weight_stays_whole_for_its_other_user() -> None:
    model = TiedLayers()
    assert prepack_linears(model, rows=8) == 2
    weight = keyed(40, 24)
    inputs = keyed(8, 24)
    prepacked_weights(model)[id(model.embedding.weight)].load(weight)
    assert torch.equal(model.embedding.weight, weight)
    with torch.inference_mode():
        assert torch.allclose(model.head(inputs), inputs @ weight.T, atol=1e-5, rtol=1e-5)
    assert sorted(name for name, _ in model.named_parameters()) == [
        "embedding.weight",
        "inner.bias",
        "inner.weight",
    ]


def test_float64_layers_and_layers_of_another_class_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4).double(), Own(4, 4))
    assert prepack_linears(model, rows=8) == 0
    assert [type(module) for module in model] == [nn.Linear, Own]


@FLOAT32
def test_activation_factor_and_sum_come_with_the_product() -> None:
    plain = nn.Linear(48, 32)
    prepacked = PrepackedLinear(plain, rows=8, tied=False)
    inputs = keyed(8, 1, 48)
    other = keyed(8, 1, 32)
    with torch.inference_mode():
        product = plain(inputs)
        for found, expected in (
            (prepacked.silu(inputs), nn.functional.silu(product)),
            (prepacked.plus(inputs, other), product + other),
            (prepacked.times(inputs, other), product * other),
        ):
            assert torch.allclose(found, expected, atol=1e-5, rtol=1e-5)


@FLOAT32
@pytest.mark.parametrize("bias", [False, True])
def test_a_joint_product_is_those_of_its_layers_whose_new_values_count_when_all_have_come(
    bias: bool,
) -> None:
    plain = [nn.Linear(48, size, bias=bias) for size in (24, 8, 8)]
    fused_qkv = FusedQKVLinear(plain, rows=8)
    inputs = keyed(8, 48)
    with torch.inference_mode():
        before = fused_qkv(inputs)
        assert torch.allclose(
            before, torch.cat([layer(inputs) for layer in plain], 1), atol=1e-5, rtol=1e-5
        )
        weights = [keyed(*layer.weight.shape) for layer in plain]
        for layer, weight in zip(fused_qkv.layers[1:], weights[1:], strict=True):
            layer.load(weight)
        assert torch.equal(fused_qkv(inputs), before)
        fused_qkv.layers[0].load(weights[0])
        expected = [
            nn.functional.linear(inputs, w, p.bias) for w, p in zip(weights, plain, strict=True)
        ]
        assert torch.allclose(fused_qkv(inputs), torch.cat(expected, 1), atol=1e-5, rtol=1e-5)


@FLOAT32
@pytest.mark.parametrize("name", SERVED)
def test_fused_layers_compute_what_the_model_does(name: str) -> None:
    torch.manual_seed(0)
    model = SERVED[name]().eval().requires_grad_(False)
    plain = copy.deepcopy(model)
    ids = [torch.tensor([[3 * i % 197 for i in range(length)]]) for length in (9, 4)]
    forward = patch_model(model, rows=4)
    fused = sum(isinstance(layer.forward, partial) for layer in model.base_model.layers)
    is_known = name.split()[0] in ("llama", "tied", "qwen2", "qwen3", "mistral")
    assert fused == (2 if is_known else 0)
    with torch.inference_mode():
        prefilled = forward.prefill([row[0, :-1].tolist() for row in ids])
        cache = MaskedSlots()
        cache.reserve(2, 9, 9)
        cache.store(prefilled.cache, [0, 1], [0, 1], 8)
        logits = forward.decode(cache, [row[0, -1].item() for row in ids], [8, 3])
        for i, row in enumerate(ids):
            expected = plain(input_ids=row).logits[0]
            assert torch.allclose(prefilled.logits[i], expected[-2], atol=1e-6, rtol=1e-5)
            assert torch.allclose(logits[i], expected[-1], atol=1e-6, rtol=1e-5)


def test_shared_prompts_that_attention_cannot_read_are_refused() -> None:
    cache = MaskedSlots(compiled=True)
    cache.reserve(1, 4, 4)
    # compiled attention does not serve values that are narrower than keys
    cache.tensors = [torch.zeros(1, 1, 4, 16), torch.zeros(1, 1, 4, 8)]
    zero = torch.tensor([0])
    last = torch.tensor([2])
    prompts = Prompts(zero, torch.tensor([3]), torch.zeros(1, 2, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="needs the prompts in the rows, got shared prompts"):
        cache.begin_step(last, 3, Rows(zero, zero, last + 1, prompts))
    cache.begin_step(last, 3, Rows(zero, zero, last + 1))
    assert cache.get_query_offset() is last
