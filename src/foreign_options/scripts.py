"""Reads the arguments of calls in a Python script of TRL, which is parsed and never run."""

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from foreign_options.formulas import Unknown, evaluate


def read_script(text: str, module: str) -> dict[str, Any]:
    """The arguments of GRPOConfig, GRPOTrainer and LoraConfig in a script; a value that is no literal is Unknown.

    A function of the script is `module:function`, and one that it imports has the name of its own module. Raises
    ValueError or SyntaxError.
    """
    tree, names = ast.parse(text), dict[str, Any]()
    found: dict[str, Any] = {}
    for node in _in_order(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names[node.name] = f"{module}:{node.name}"
            case ast.ImportFrom(module=source, names=imported):
                names |= {each.asname or each.name: f"{source}:{each.name}" for each in imported}
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.AST() as value)
            ):
                names[name] = _python_value(value, names)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _CALLS:
                given = [*zip(_CALLS[name], node.args, strict=False), *((key.arg, key.value) for key in node.keywords)]
                values = {
                    key or f"**{ast.unparse(value)}": _python_value(value, names)
                    for key, value in given
                    if key not in _OBJECTS
                }
                if name == "get_soft_overlong_punishment":
                    values = {name: values.get("soft_punish_cache", Unknown("..."))}
                found |= values
    if not found:
        raise ValueError("there is no call of GRPOConfig or GRPOTrainer with arguments")
    return found


_CALLS = {
    "GRPOConfig": ("output_dir",),
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "LoraConfig": ("r",),
    "get_soft_overlong_punishment": ("max_completion_len", "soft_punish_cache"),
}
"""The calls that are read, each with the names of its first positional arguments."""
_OBJECTS = ("args", "peft_config")  # their own calls are read


def _in_order(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a script, as they are written."""
    for node in ast.iter_child_nodes(tree):
        yield node
        yield from _in_order(node)


def _python_value(node: ast.AST, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.List(elts=inner) | ast.Tuple(elts=inner):
            values = [_python_value(each, names) for each in inner if not _is_overlong(each)]
            return Unknown(ast.unparse(node)) if any(isinstance(each, Unknown) for each in values) else values
        case ast.Subscript(value=ast.Call() as call, slice=ast.Constant(value=split)):
            return _dataset(call, str(split)) or Unknown(ast.unparse(node))
        case ast.Call(func=ast.Attribute(attr="from_pretrained"), args=[first, *_]):
            return _python_value(first, names)
        case ast.Call() if dataset := _dataset(node, ""):
            return dataset
    try:
        found = evaluate(node, names)
    except (ValueError, TypeError, ArithmeticError):
        return Unknown(ast.unparse(node))
    return found


def _is_overlong(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("get_soft_overlong_punishment")


def _dataset(call: ast.Call, split: str) -> str | None:
    """The data source of `load_dataset(...)` with literal arguments."""
    if ast.unparse(call.func).rpartition(".")[2] != "load_dataset":
        return None
    try:
        keywords = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        name = ast.literal_eval(call.args[0]) if call.args else keywords.get("path")
    except ValueError:
        return None
    if isinstance(files := keywords.get("data_files"), str):
        return files
    return f"hub:{name}:{keywords.get('split') or split or 'train'}" if isinstance(name, str) and not files else None
