"""Converts the values of a Python call to those of YAML, and names the objects that have none."""

import os
from collections.abc import Mapping, Sequence
from datetime import date
from decimal import Decimal
from enum import Enum
from types import FunctionType
from typing import Any

from dapo.core.errors import ConfigError
from dapo.core.terminal import print_text
from dapo.core.text import quoted

MAX_BITS = 4096  # of an integer: Python formats none of over 4,300 digits
_OF_YAML = (str, bool, int, float, list, tuple, Mapping, type(None))


def plain_value(value: Any, name: str) -> Any:
    """Convert a value to YAML's types: paths and runs to text, numpy values to Python's.

    `name` is the keyword, for the error. Raises ConfigError for an object that is none of them.
    """
    if isinstance(value, bytes) or (isinstance(value, int) and value.bit_length() > MAX_BITS):
        size = "bytes" if isinstance(value, bytes) else f"an integer of {value.bit_length():,} bits"
        raise ConfigError(f"{name}: expected text, a number, a list or a mapping, got {size}")
    if value is None or isinstance(value, str | bool | int | float | Decimal | date | FunctionType):
        return value
    if isinstance(value, os.PathLike):  # a run, too
        return os.fspath(value)
    if isinstance(value, Enum):
        return plain_value(value.value, name)
    if isinstance(value, Mapping):
        return {_key_text(key): plain_value(item, name) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain_value(item, name) for item in value]
    module = type(value).__module__.partition(".")[0]
    if module == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    if hasattr(value, "tolist"):  # an array or a number of numpy, a tensor
        return plain_value(value.tolist(), name)
    raise ConfigError(f"{name}: {_expected(value)}")


def plain_values(**values: Any) -> dict[str, Any]:
    """Convert the arguments of a call to YAML's types, each as `plain_value` does."""
    return {name: plain_value(value, name) for name, value in values.items()}


def _key_text(key: Any) -> str:
    return str(key.value if isinstance(key, Enum) else key)


def model_name(model: Any, name: str = "model") -> Any:
    """Return the name, or the path, of a model: text, a path or a run; None is none.

    The configuration answers other values of YAML. Raises ConfigError for a model or a tokenizer in
    memory, and for any other object.
    """
    if isinstance(model, list | tuple) and model and isinstance(model[0], Mapping):
        raise ConfigError(
            f"{name}: {_expected(model, 'a name, a directory or a run')}; rows are data=ROWS"
        )
    if isinstance(model, _OF_YAML):
        return model
    if isinstance(model, os.PathLike):
        return os.fspath(model)
    raise ConfigError(f"{name}: {_expected(model, 'a name, a directory or a run')}")


def described(value: Any) -> str:
    """Return a value of YAML as text, and any other object by its type: `3`, `a Linear object`."""
    if isinstance(value, _OF_YAML):
        return quoted(value)
    kind = type(value).__name__
    article = "an" if kind[:1] in "AEIOUaeiou" else "a"
    return f"{article} {kind} object"


def _expected(value: Any, expected: str = "text, a number, a list or a mapping") -> str:
    """Say what was expected in place of an object, and what to do with it."""
    text = f"expected {expected}, got {described(value)}"
    if not hasattr(value, "save_pretrained"):
        return text
    if hasattr(value, "apply_chat_template") or hasattr(value, "encode"):
        return f"{text}; the model's own tokenizer is used: leave it out"
    return (
        f"{text}; models are loaded by name: save yours with its tokenizer,"
        " `model.save_pretrained('DIR')` and `tokenizer.save_pretrained('DIR')`, and pass 'DIR'"
    )


PEFT_NAMES = {"r": "rank", "lora_alpha": "alpha"}
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "target_modules": (None, "all-linear"),
    "exclude_modules": (None,),
    "modules_to_save": (None,),
    "lora_dropout": (0, 0.0, None),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "init_lora_weights": (True, None),
    "layers_to_transform": (None,),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}
"""Fields of peft's LoraConfig that do not act here, with the values that change nothing."""


def lora_options(lora: Any) -> Any:
    """Return `model.lora` of peft's LoraConfig, or of a mapping with its names.

    What does not act here is printed. Any other value is returned.
    """
    if isinstance(lora, Mapping):
        fields = dict(lora)
    elif hasattr(lora, "r") and hasattr(lora, "lora_alpha"):
        names = [*PEFT_NAMES, *_WITHOUT_EFFECT]
        fields = {name: getattr(lora, name) for name in names if hasattr(lora, name)}
    else:
        return lora
    unused = []
    for name, harmless in _WITHOUT_EFFECT.items():
        if name in fields:
            value = fields.pop(name)
            shown = sorted(value) if isinstance(value, set | frozenset) else value
            if value not in harmless:
                unused.append(f"{name}={shown!r}")
    fields.pop("task_type", None)
    if unused:
        print_text(
            f"lora: {', '.join(unused)} is not used: adapters are in every linear layer but the"
            " head, without dropout"
        )
    return {PEFT_NAMES.get(name, name): value for name, value in fields.items()}
