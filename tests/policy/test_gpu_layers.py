"""Laws of the functions that replace parts of a layer on a GPU, with stand-ins that behave as
Liger's do: they write over their inputs.
"""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from dapo.policy.gpu_layers import (
    LayerFunctions,
    layer_notes,
    liger_functions,
    use_flash_attention_3,
    use_layer_functions,
)
from dapo.policy.packed_forward import recompute_layers
from helpers.tables import for_each_row
from helpers.tiny_models import tiny_model


class Gate(torch.autograd.Function):
    """silu(gate) * up, whose backward writes the gradients over its inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            inputs = [each.detach().clone().requires_grad_() for each in (gate, up)]
            out = silu(inputs[0]) * inputs[1]
        for_gate, for_up = torch.autograd.grad(out, inputs, gradient)
        gate.data.copy_(for_gate)
        up.data.copy_(for_up)
        return gate, up


class Rotate(torch.autograd.Function):
    """The rotary embedding by halves, which writes over its inputs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        # in the order of memory, whose numbers are written over
        rows = [states.transpose(1, 2).contiguous() for states in (query, key)]
        for states in rows:
            states.data.copy_(rotated(states.transpose(1, 2), cos, sin).transpose(1, 2))
        return tuple(states.transpose(1, 2) for states in rows)

    @staticmethod
    def backward(ctx: Any, for_query: Tensor, for_key: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return rotated(for_query, cos, -sin), rotated(for_key, cos, -sin), None, None


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


class Counted:
    """Stand-ins that count their calls, and know which products are alive."""

    def __init__(self) -> None:
        self.calls = {"gate": 0, "rotate": 0}
        self.products: list[weakref.ref[Tensor]] = []
        self.on = True

    @property
    def functions(self) -> LayerFunctions:
        return LayerFunctions(self._gate, self._rotate, serves=lambda tensor: self.on)

    def _gate(self, gate: Tensor, up: Tensor) -> Tensor:
        self.calls["gate"] += 1
        out: Tensor = Gate.apply(gate, up)  # type: ignore[no-untyped-call]
        self.products.append(weakref.ref(out))
        return out

    def _rotate(self, *states: Tensor) -> Any:
        self.calls["rotate"] += 1
        return Rotate.apply(*states)  # type: ignore[no-untyped-call]


IDS = torch.tensor([[5, 9, 3, 7, 11, 2, 8]])


def logits_and_gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False).logits
    logits.log_softmax(-1)[0, torch.arange(7), IDS[0]].sum().backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    return logits.detach(), found


@for_each_row(
    ("family", "rotations", "recompute"),
    [
        *((family, 2, False) for family in ("llama", "qwen2", "qwen3", "mistral with a window")),
        ("llama", 4, True),
        ("gemma3", 0, False),
    ],
)
def test_replaced_parts_give_the_same_logits_and_gradients(
    family: str, rotations: int, recompute: bool
) -> None:
    model = tiny_model(family, dtype=torch.float32).eval()
    plain = logits_and_gradients(copy.deepcopy(model))
    counted = Counted()
    gates = use_layer_functions(model, counted.functions)
    if recompute:
        recompute_layers(model)
    logits, gradients = logits_and_gradients(model)
    torch.testing.assert_close(logits, plain[0], rtol=0, atol=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain[1][name], rtol=1e-4, atol=1e-5, msg=name)
    assert gates == (0 if family == "gemma3" else 2)
    assert counted.calls["rotate"] == rotations
    # once in the forward and once in the backward; with recomputation the forward runs twice
    assert counted.calls["gate"] == gates * (3 if recompute else 2)
    counted.on = False
    assert torch.equal(logits_and_gradients(model)[0], plain[0]), "elsewhere nothing changes"


def test_no_product_of_a_gate_is_kept_for_the_backward() -> None:
    model = tiny_model("llama", dtype=torch.float32).eval()
    counted = Counted()
    use_layer_functions(model, counted.functions)
    logits = model(input_ids=IDS, use_cache=False).logits
    assert len(counted.products) == 2
    assert [each() for each in counted.products] == [None, None]
    logits.sum().backward()
    counted.on = False  # the file of the family's layers keeps the function


def test_without_a_gpu_nothing_is_replaced_or_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert liger_functions() is None
    assert not use_flash_attention_3()
    assert layer_notes("cuda") == layer_notes("cpu") == []
