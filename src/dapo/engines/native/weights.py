"""Copies a complete set of weights into a model, by name."""

import torch
from torch import Tensor, nn

from dapo.core.errors import EngineError
from dapo.engines.engine import WeightSource
from dapo.engines.native.linear import PrepackedLinear, prepacked_weights

NAMES_SHOWN = 5


@torch.no_grad()
def copy_weights(source: WeightSource, model: nn.Module) -> None:
    """Copy every tensor of `source` into the parameter of its name, converted to its dtype and device.

    A tied weight may come under one of its names or under each. Raises EngineError if a name is unknown, a parameter
    gets nothing, a shape differs, or the names of a tied weight disagree; the model is then partly overwritten.
    """
    targets = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    layers = prepacked_weights(model)
    given: dict[int, str] = {}
    unexpected = []
    for name, tensor in source.named_tensors():
        if name in buffers:
            _copy(name, tensor, buffers[name])
        elif name not in targets:
            unexpected.append(name)
        else:
            _copy_parameter(name, tensor, targets[name], given, layers.get(id(targets[name])))
    missing = [name for name, target in targets.items() if id(target) not in given]
    if missing or unexpected:
        raise EngineError(
            f"load_weights needs exactly the model's {len(targets)} parameters by name; "
            f"missing: {_format_names(missing)}; unexpected: {_format_names(unexpected)}"
        )


def _copy_parameter(
    name: str, tensor: Tensor, target: Tensor, given: dict[int, str], layer: PrepackedLinear | None
) -> None:
    """`given` holds the name that each target has been filled under, by identity; `layer` keeps its values packed."""
    if id(target) not in given:
        _copy(name, tensor, target if layer is None else layer)
        given[id(target)] = name
    elif not torch.equal(tensor.to(target), target):
        raise EngineError(
            f"{given[id(target)]} and {name} are one tied weight in the engine's model, but load_weights got different "
            "values for them"
        )


def _copy(name: str, tensor: Tensor, target: Tensor | PrepackedLinear) -> None:
    shape = (target.weight if isinstance(target, PrepackedLinear) else target).shape
    if tensor.shape != shape:
        raise EngineError(
            f"load_weights: {name} has shape {tuple(tensor.shape)}, the engine's model needs {tuple(shape)}"
        )
    if isinstance(target, PrepackedLinear):
        target.load(tensor)
    else:
        target.copy_(tensor)


def _format_names(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more if names else "none"
