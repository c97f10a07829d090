"""Computes literals, arithmetic and formulas of names; no code is run."""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

MAX_BASE = 1e6
MAX_EXPONENT = 64  # of a power


@dataclass(frozen=True)
class Unknown:
    """The text of a value that is known only when the script runs."""

    text: str

    def __str__(self) -> str:
        return self.text


def compute(formula: str, names: Mapping[str, Any]) -> Any:
    """Compute a formula of `names`.

    Raises ValueError, TypeError or ArithmeticError if it has no value.

    Example:
        >>> compute("batch / group if group else None", {"batch": 64, "group": 8})
        8
    """
    try:
        return evaluate(ast.parse(formula.strip(), mode="eval"), names)
    except (SyntaxError, RecursionError):
        raise ValueError(formula) from None


def evaluate(node: ast.AST, names: Mapping[str, Any]) -> Any:
    """Compute a literal, or a formula of `names`, without running code.

    Raises ValueError, TypeError.
    """
    match node:
        case ast.Expression(body=inner):
            return evaluate(inner, names)
        case ast.Constant(value=value):
            return value
        case ast.List(elts=inner) | ast.Tuple(elts=inner):
            return [evaluate(item, names) for item in inner]
        case ast.Dict(keys=keys, values=inner):
            mapping = {}
            for key, item in zip(keys, inner, strict=True):
                if key is not None:  # `**other` has no key
                    name = evaluate(key, names)
                    mapping[name] = evaluate(item, names)
            return mapping
        case ast.Name() | ast.Attribute():
            return value_of(ast.unparse(node), names)
        case ast.Call(func=ast.Name(id=name), args=inner) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(evaluate(item, names) for item in inner))
    return _operation(node, names)


def _operation(node: ast.AST, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.IfExp(test=test, body=body, orelse=alternative):
            return evaluate(body if evaluate(test, names) else alternative, names)
        case ast.BoolOp(op=op, values=[first, *operands]):
            value = evaluate(first, names)
            is_result = bool(value) == isinstance(op, ast.Or) or not operands
            return value if is_result else evaluate(ast.BoolOp(op, operands), names)
        case ast.UnaryOp(op=op, operand=inner) if type(op) in _UNARY:
            return _UNARY[type(op)](evaluate(inner, names))
        case (
            ast.BinOp(left=left, op=op, right=right)
            | ast.Compare(left=left, ops=[op], comparators=[right])
        ):
            if type(op) in _BINARY:
                return _apply(_BINARY[type(op)], evaluate(left, names), evaluate(right, names))
    raise ValueError(ast.unparse(node))


def value_of(name: str, names: Mapping[str, Any]) -> Any:
    """The value of one of their options, of which a default may be a formula.

    Raises ValueError if it is not known.
    """
    if name not in names:
        raise ValueError(name)
    value = names[name]
    if isinstance(value, str) and value.startswith("= "):
        return compute(value.removeprefix("= "), names)
    return value


def _apply(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Apply an operator of two numbers, of bounded size, or of two texts; an integral quotient is
    an integer.
    """
    if function is operator.pow and (abs(left) > MAX_BASE or abs(right) > MAX_EXPONENT):
        raise ValueError(f"{left} ** {right}")
    if function is operator.mul and not isinstance(left, int | float):
        raise TypeError(f"expected numbers, got {left!r}")
    result = function(left, right)
    is_quotient = function is operator.truediv
    if is_quotient and isinstance(result, float) and result.is_integer():
        return int(result)
    return result


def _rewards(functions: Any, weights: Any) -> Any:
    """TRL's reward functions as `reward.verifier`: the names of its own are in `trl.rewards`."""
    listing = functions if isinstance(functions, list) else [functions]
    names = [_reward_name(name) for name in listing]
    if len(names) == 1:
        return names[0]
    equal_weights = [1.0] * len(names)
    return dict(zip(names, weights or equal_weights, strict=True))


def _reward_name(name: str) -> str:
    """`module:function`, of `module:function`, `module.function` or a function of TRL's own.

    Raises ValueError for another name, which is a model's or one that the script has a table of.
    """
    if ":" in name:
        return name
    if name in _REWARDS_OF_TRL:
        return f"trl.rewards:{name}"
    if "." not in name or "/" in name:
        raise ValueError(name)
    return ":".join(name.rsplit(".", 1))


_REWARDS_OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
"""The functions that `trl grpo` takes by their names alone."""


def _function(path: Any, name: str) -> str:
    """A function in a file, or in a module (`pkg://recipe.rewards` in verl), as `module:function`.

    A file below the current directory keeps its folders, and of any other its own name is left.
    Raises ValueError if no file is named.
    """
    if not isinstance(path, str):
        raise ValueError(path)
    text = path.removeprefix("pkg://")
    if not text.endswith(".py"):
        return f"{text}:{name}"
    file = PurePosixPath(text.replace("\\", "/"))
    parts = file.with_suffix("").parts
    if not all(part.isidentifier() for part in parts):
        parts = parts[-1:]
    return f"{'.'.join(parts)}:{name}"


def _functions(value: Any) -> Any:
    """A function or a class as `module:name`, or a list of them.

    Raises ValueError for anything else, such as a mapping of several environments.
    """
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(name, str) and ":" in name for name in names):
        raise ValueError(value)
    return value


def _sinks(value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    return [name for name in names if name in ("tensorboard", "wandb", "trackio", "mlflow")]


def _schedule(kind: str, fraction: float) -> str:
    """A schedule of the learning rate, with the fraction of it that is left at the end."""
    return f"{kind}:{fraction:g}" if kind in ("linear", "cosine") else kind


def _min_rate(arguments: Mapping[str, Any], rate: float) -> float:
    """The fraction of the learning rate that transformers' `cosine_with_min_lr` falls to.

    Raises ValueError if its arguments name none.
    """
    if "min_lr_rate" in arguments:
        return float(arguments["min_lr_rate"])
    if "min_lr" not in arguments:
        raise ValueError("min_lr_rate")
    return float(arguments["min_lr"]) / rate


def _dataset(
    name: Any, split: str, configuration: str | None = None, prompt: str | None = None
) -> Any:
    """A data set: that of the hub is `OWNER/NAME` there; one without a default configuration needs
    its name.
    """
    if not re.fullmatch(r"[\w.-]+/[\w-]+", str(name)):
        return _with_prompt(name, prompt)
    configuration = configuration or _CONFIGURATIONS.get(str(name))
    column = {} if prompt in (None, "prompt") else {"prompt": prompt}
    if configuration is None and not column:
        return f"hub:{name}:{split}"
    chosen = {} if configuration is None else {"config": configuration}
    return {"hub": name, **chosen, "split": split, **column}


def _with_prompt(path: Any, prompt: str | None) -> Any:
    """A file, with the column of its prompts unless that is called `prompt`."""
    return path if prompt in (None, "prompt") else {"path": path, "prompt": prompt}


def _files(value: Any, prompt: str | None = None) -> Any:
    """A file or another source; several are a mix, whose parts have the shortest names that
    differ.
    """
    if not isinstance(value, list):
        return _with_prompt(value, prompt)
    sources = [_with_prompt(path, prompt) for path in value]
    if len(sources) == 1:
        return sources[0]
    names = _part_names([str(path) for path in value])
    return {"mix": dict(zip(names, sources, strict=True))}


def _part_names(paths: list[str]) -> list[str]:
    """Names of files: the last parts of their paths, as many as it takes, else with a number."""
    parts_of_paths = []
    for path in paths:
        without_ending = re.sub(r"\.\w+$", "", path)
        parts_of_paths.append(without_ending.strip("/").split("/"))
    names: list[str] = []
    for length in range(1, max(map(len, parts_of_paths)) + 1):
        names = [_joined_name(parts[-length:]) for parts in parts_of_paths]
        if len(set(names)) == len(names):
            return names
    return [f"{name}_{i}" for i, name in enumerate(names, start=1)]


def _joined_name(parts: Sequence[str]) -> str:
    """Parts of a path as one name of letters, digits and `_`."""
    name = re.sub(r"[^A-Za-z0-9-]+", "_", "_".join(parts))
    return name.strip("_") or "part"


_CONFIGURATIONS = {"openai/gsm8k": "main", "gsm8k": "main"}
"""Configurations of data sets that have no default, as the recipes of other systems name them in
their code.
"""
_UNARY: Mapping[type[ast.AST], Any] = {ast.USub: operator.neg, ast.Not: operator.not_}
_BINARY: Mapping[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.Eq: operator.eq,
    ast.In: lambda item, items: item in items,
    ast.Is: operator.is_,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "floor": math.floor,
    "max": max,
    "sinks": _sinks,
    "schedule": _schedule,
    "min_rate": _min_rate,
    "rewards": _rewards,
    "dataset": _dataset,
    "startswith": str.startswith,
    "files": _files,
    "function": _function,
    "functions": _functions,
}
