"""Reads the options that a Python script of TRL sets, by following its values; the script is parsed
and never run.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import PurePosixPath
from typing import Any

from .formulas import Unknown, evaluate
from .reading import Reading

MAX_STEPS = 50_000  # statements and expressions that are followed
MAX_DEPTH = 12  # of functions that call each other
MAX_ITEMS = 1_000  # of a loop
MAX_OMITTED_LINES = 20  # of f-strings that this Python does not parse

_CALLS = {
    "GRPOConfig": ("output_dir",),
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "LoraConfig": ("r",),
    "get_soft_overlong_punishment": ("max_completion_len", "soft_punish_cache"),
}
"""The calls that are read, each with the names of its first positional arguments."""
_PARSERS = ("TrlParser", "HfArgumentParser", "H4ArgumentParser")
_READERS = (
    "to_dict",
    "to_json_string",
    "to_sanitized_dict",
    "get_process_log_level",
    "main_process_first",
    "device",
)
_PURE: Mapping[str, Callable[..., Any]] = {
    **{
        "int": int,
        "float": float,
        "str": str,
        "bool": bool,
        "len": len,
        "max": max,
        "min": min,
        "abs": abs,
    },
    **{
        "round": round,
        "sum": sum,
        "list": list,
        "tuple": tuple,
        "sorted": sorted,
        "any": any,
        "all": all,
    },
    **{
        "set": list,
        "zip": lambda *all: list(zip(*all, strict=False)),
        "enumerate": lambda x: list(enumerate(x)),
    },
}
_TEXT_METHODS = (
    "lower",
    "upper",
    "strip",
    "replace",
    "split",
    "join",
    "format",
    "removeprefix",
    "removesuffix",
)
_ROW_METHODS = ("shuffle", "with_format", "cast", "flatten_indices")
"""Methods of data sets that leave the rows what they are."""


@dataclass(eq=False)
class _Reference:
    """A name of another module, or a function of the script: `module:name`."""

    text: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None = None

    @property
    def name(self) -> str:
        return self.text.rpartition(":")[2].rpartition(".")[2]


@dataclass(eq=False)
class _Class:
    """A class of the script, with the values of its body."""

    text: str
    bases: list[Any]
    values: dict[str, Any]
    methods: dict[str, ast.FunctionDef]
    is_dataclass: bool = False


@dataclass(eq=False)
class _Object:
    """An object whose attributes are followed: a configuration, a trainer, or one of the script's
    own classes.
    """

    kind: str
    values: dict[str, Any]
    of: _Class | None = None
    line: int = 0


@dataclass(eq=False)
class _Data:
    """A data set, as `data.train` names it; `changes` are what the script does to its rows."""

    source: Any
    changes: tuple[str, ...] = ()

    def split(self, name: str) -> "_Data":
        if (
            isinstance(self.source, str)
            and self.source.startswith("hub:")
            and self.source.count(":") == 1
        ):
            return _Data(f"{self.source}:{name}", self.changes)
        if isinstance(self.source, dict) and "hub" in self.source and "split" not in self.source:
            return _Data(self.source | {"split": name}, self.changes)
        if isinstance(self.source, dict) and "files" in self.source:
            return _Data(self.source["files"].get(name, Unknown(name)), self.changes)
        return _Data(self.source, self.changes)


@dataclass(eq=False)
class _Model:
    """A model that the script loads, with what it sets about adapters."""

    name: Any
    lora: dict[str, Any] = field(default_factory=dict)


class _Return(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _LoopEnd(Exception):
    """`break` or `continue`."""

    def __init__(self, *, is_break: bool) -> None:
        super().__init__()
        self.is_break = is_break


class _Stop(Exception):
    """The script has too many statements to follow."""


def read_script(text: str, module: str) -> Reading:
    """The options of GRPOConfig, GRPOTrainer and LoraConfig in a script; a value that is not known
    is Unknown.

    A function of the script is `module:function`, and one that it imports has the name of its own
    module. Raises ValueError or SyntaxError.
    """
    reader = _Reader(module)
    tree, lines = _parsed_script(text)
    reader.reading.unread += lines
    try:
        reader.body(tree.body)
        reader.follow_the_rest(tree)
    except (_Return, _LoopEnd):
        pass
    except _Stop:
        reader.reading.unread.append(
            f"the rest of the script, which has over {MAX_STEPS} statements to follow"
        )
    found = reader.finished()
    if not found.options and not found.unread:
        raise ValueError("there is no call of GRPOConfig or GRPOTrainer with arguments")
    return found


def _parsed_script(text: str) -> tuple[ast.Module, list[str]]:
    """The script without the lines of f-strings that only a newer Python parses, and these lines.

    Python 3.12 allows the quotes of an f-string within its braces. Raises SyntaxError.
    """
    lines = text.split("\n")
    omitted: list[str] = []
    while True:
        try:
            return ast.parse("\n".join(lines)), omitted
        except SyntaxError as error:
            number = error.lineno or 0
            is_new_syntax = error.msg.startswith("f-string") and 0 < number <= len(lines)
            if not is_new_syntax or not lines[number - 1] or len(omitted) >= MAX_OMITTED_LINES:
                raise
            omitted.append(f"line {number}: {lines[number - 1].strip()}")
            lines[number - 1] = ""


class _Reader:
    """Follows the statements of a script."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.reading = Reading(command=f"{module}.py")
        self.scopes: list[dict[str, Any]] = [{"__name__": "__main__"}]
        self.configs: list[_Object] = []
        self.trainers: list[_Object] = []
        self.loras: list[_Object] = []
        self.models: list[_Model] = []
        self.punishment: Any = None
        self.followed: set[ast.AST] = set()
        self.undecided = 0  # how many branches around this statement may not be taken
        self.num_steps = 0
        self.depth = 0

    # --- the result

    def finished(self) -> Reading:
        """The options of the trainer, or where there is none those of the last configuration."""
        options: dict[str, Any] = {}
        trainer = self.trainers[-1] if self.trainers else None
        for other in self.trainers[:-1]:
            self._note_other(other, trainer)
        config = trainer.values.get("args") if trainer else None
        if not isinstance(config, _Object):
            if trainer is not None and config is not None:
                self.reading.unread.append(f"line {trainer.line}: args={self._shown(config)}")
            config = self.configs[-1] if self.configs else None
        for each in self.configs:
            if each is not config:
                self._note_other(each, config)
        lora = self._lora(trainer)
        for made in (config, lora, trainer):
            if made is not None:
                options |= made.values
        options.pop("args", None)
        options.pop("peft_config", None)
        if (
            trainer is not None
            and isinstance(trainer.values.get("peft_config"), Unknown)
            and lora is None
        ):
            options["peft_config"] = trainer.values["peft_config"]
        model = options.get("model")
        if isinstance(model, _Model):
            options |= {name: value for name, value in model.lora.items() if name not in options}
        if self.punishment is not None:
            options["get_soft_overlong_punishment"] = self.punishment
        line = trainer.line if trainer else 0
        self.reading.options = {
            name: self._option(name, value, line) for name, value in options.items()
        }
        self.reading.unread = [*dict.fromkeys(self.reading.unread)]
        self.reading.assumed = [*dict.fromkeys(self.reading.assumed)]
        return self.reading

    def _lora(self, trainer: _Object | None) -> _Object | None:
        """The adapters' configuration that the trainer takes, or where that is not known the last
        one.
        """
        given = trainer.values.get("peft_config") if trainer else Unknown("")
        if isinstance(given, _Object):
            return given
        return self.loras[-1] if isinstance(given, Unknown) and self.loras else None

    def _note_other(self, other: _Object, taken: _Object | None) -> None:
        differ = [
            name
            for name, value in other.values.items()
            if taken is None or taken.values.get(name) != value
        ]
        if differ and taken is not None:
            self.reading.assumed.append(
                f"line {other.line}: another {other.kind}, not that of the trainer; it sets"
                f" {', '.join(differ)}"
            )

    def _option(self, name: str, value: Any, line: int) -> Any:
        """The value of an option as it is translated."""
        if isinstance(value, _Data):
            for each in value.changes:
                self.reading.unread.append(f"{each} changes the rows of {name}")
            source = value.split("train").source
            return self._option(name, source, line) if isinstance(source, list) else source
        if isinstance(value, list | tuple):
            kept = [
                self._option(name, each, line) for each in value if not self._is_punishment(each)
            ]
            return next(
                (Unknown(self._shown(value)) for each in kept if isinstance(each, Unknown)), kept
            )
        if isinstance(value, dict):
            inner = {key: self._option(name, each, line) for key, each in value.items()}
            is_open = any(isinstance(each, Unknown) for each in inner.values())
            return Unknown(self._shown(value)) if is_open else inner
        if isinstance(value, _Model):
            return self._option(name, value.name, line)
        if isinstance(value, _Reference):
            if value.text.startswith("torch:"):
                return value.name
            return value.text if ":" in value.text else Unknown(value.text)
        if isinstance(value, _Class):
            return value.text
        if isinstance(value, _Object):
            return Unknown(f"{value.kind}(...)")
        return value

    def _is_punishment(self, value: Any) -> bool:
        return isinstance(value, _Object) and value.kind == "get_soft_overlong_punishment"

    # --- statements

    def body(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._count()
            self._statement(statement)

    def _count(self) -> None:
        self.num_steps += 1
        if self.num_steps > MAX_STEPS:
            raise _Stop

    def follow_the_rest(self, tree: ast.Module) -> None:
        """Follow functions that nobody is seen to call and that make a configuration or a
        trainer.
        """
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and node not in self.followed
            ):
                calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
                if any(self._kind(self._value(call.func)) for call in calls):
                    self.reading.assumed.append(
                        f"line {node.lineno}: {node.name} is taken to be called"
                    )
                    self._call_function(node, [], {}, node)

    def _statement(self, node: ast.stmt) -> None:  # noqa: C901, PLR0912, PLR0915 (a case for each kind)
        match node:
            case ast.Import(names=names):
                for each in names:
                    bound = each.asname or each.name.partition(".")[0]
                    self.scopes[-1][bound] = _Reference(each.name if each.asname else bound)
            case ast.ImportFrom(module=source, names=names):
                for each in names:
                    self.scopes[-1][each.asname or each.name] = _Reference(f"{source}:{each.name}")
            case ast.FunctionDef() | ast.AsyncFunctionDef() if _is_cell(node):
                self._cell(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.scopes[-1][node.name] = _Reference(f"{self.module}:{node.name}", node)
            case ast.ClassDef():
                self.scopes[-1][node.name] = self._class(node)
            case ast.Assign(targets=targets, value=value):
                found = self._value(value)
                for target in targets:
                    self._assign(target, found, node)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self._value(value), node)
            case ast.AugAssign(target=target, op=operator, value=value):
                self._augment(target, operator, value, node)
            case ast.Expr(value=value):
                self._value(value)
            case ast.If():
                self._if(node)
            case ast.For() | ast.AsyncFor():
                self._for(node)
            case ast.While(body=inner, orelse=other):
                self._perhaps([*inner, *other])
            case ast.With(items=items, body=inner) | ast.AsyncWith(items=items, body=inner):
                for item in items:
                    value = self._value(item.context_expr)
                    if item.optional_vars is not None:
                        self._assign(item.optional_vars, value, node)
                self.body(inner)
            case ast.Try(body=inner, handlers=handlers, orelse=other, finalbody=last):
                self._try(
                    [*inner, *other, *last],
                    [each for handler in handlers for each in handler.body],
                    node,
                )
            case ast.Match(cases=cases):
                for case in cases:
                    self._perhaps(case.body)
            case ast.Return(value=value):
                raise _Return(None if value is None else self._value(value))
            case ast.Raise():
                if self.undecided:
                    raise _Return(None)
            case ast.Break() | ast.Continue():
                if not self.undecided:
                    raise _LoopEnd(is_break=isinstance(node, ast.Break))
            case ast.Delete(targets=targets):
                for target in targets:
                    self._delete(target, node)

    def _cell(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Follow a cell of a marimo notebook, whose names are those of the module."""
        self.followed.add(node)
        with suppress(_Return, _LoopEnd):
            self.body(node.body)

    def _if(self, node: ast.If) -> None:
        verdict = self._value(node.test)
        if isinstance(verdict, Unknown | _Data | _Model | _Object | _Reference):
            self._perhaps(node.body)
            self._perhaps(node.orelse)
        else:
            self.body(node.body if verdict else node.orelse)

    def _perhaps(self, statements: Sequence[ast.stmt]) -> None:
        """Follow statements that may not run: what they set is unknown."""
        self.undecided += 1
        try:
            self.body(statements)
        except (_Return, _LoopEnd):
            pass
        finally:
            self.undecided -= 1

    def _try(self, body: Sequence[ast.stmt], handlers: Sequence[ast.stmt], node: ast.stmt) -> None:
        self.body(body)
        names = {target for each in handlers for target in ast.walk(each) if _is_stored(target)}
        touched = [each for each in handlers if any(self._touches(part) for part in ast.walk(each))]
        if names or touched:
            self.reading.assumed.append(f"line {node.lineno}: `except` is not followed")

    def _touches(self, node: ast.AST) -> bool:
        """Whether a name is that of a configuration."""
        return isinstance(node, ast.Name) and isinstance(self._lookup(node.id), _Object)

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        items = self._items(self._value(node.iter))
        if items is None:
            self._assign(node.target, Unknown(ast.unparse(node.target)), node)
            self._perhaps(node.body)
            return
        for item in items:
            self._assign(node.target, item, node)
            try:
                self.body(node.body)
            except _LoopEnd as end:
                if end.is_break:
                    return
        self.body(node.orelse)

    def _items(self, value: Any) -> list[Any] | None:
        if isinstance(value, list | tuple | dict | range | str) and len(value) <= MAX_ITEMS:
            return list(value)
        return None

    def _class(self, node: ast.ClassDef) -> _Class:
        bases = [self._value(each) for each in node.bases]
        values: dict[str, Any] = {}
        for base in bases:
            values |= base.values if isinstance(base, _Class) else {}
        methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        for base in bases:
            methods = {**base.methods, **methods} if isinstance(base, _Class) else methods
        self.scopes.append(values)
        self.body(
            [
                each
                for each in node.body
                if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
        )
        self.scopes.pop()
        is_dataclass = any("dataclass" in ast.unparse(each) for each in node.decorator_list)
        return _Class(f"{self.module}:{node.name}", bases, values, methods, is_dataclass)

    # --- assignment

    def _assign(self, target: ast.expr, value: Any, node: ast.stmt) -> None:
        match target:
            case ast.Name(id=name):
                before = self._lookup(name)
                self._scope_of(name)[name] = self._decided(value, before, node)
            case ast.Attribute(value=owner, attr=name):
                self._set(self._value(owner), name, value, node)
            case ast.Subscript(value=owner, slice=key):
                self._set_item(self._value(owner), self._value(key), value, node)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                items = (
                    value
                    if isinstance(value, list | tuple) and len(value) == len(targets)
                    else None
                )
                for i, each in enumerate(targets):
                    self._assign(
                        each, Unknown(ast.unparse(each)) if items is None else items[i], node
                    )
            case ast.Starred(value=inner):
                self._assign(inner, Unknown(ast.unparse(inner)), node)

    def _scope_of(self, name: str) -> dict[str, Any]:
        if self.depth and name in self._globals():
            return self.scopes[0]
        return self.scopes[-1]

    def _globals(self) -> Sequence[str]:
        names = self.scopes[-1].get(" global", ())
        return names if isinstance(names, tuple) else ()

    def _decided(self, value: Any, before: Any, node: ast.AST) -> Any:
        """A value that is set here; one that is set in a branch which may not be taken is
        unknown.
        """
        if not self.undecided:
            return value
        if type(before) is type(value) and before == value:
            return value
        line = getattr(node, "lineno", 0)
        if isinstance(value, _Reference | _Class) or (
            before is None and isinstance(value, _Object | _Model | _Data)
        ):
            self.reading.assumed.append(f"{self._line(node)}, in a branch, is taken")
            return value
        return Unknown(f"{self._shown(value)} (line {line}, in a branch)")

    def _set(self, owner: Any, name: Any, value: Any, node: ast.AST) -> None:
        """`owner.name = value`."""
        text = self._line(node)
        if isinstance(owner, _Object) and isinstance(name, str):
            if owner.kind == "GRPOTrainer" and name != "args":
                self.reading.unread.append(text)
            owner.values[name] = self._decided(value, owner.values.get(name), node)
        elif isinstance(owner, _Class) and isinstance(name, str):
            owner.values[name] = self._decided(value, owner.values.get(name), node)
        elif isinstance(owner, _Object) or self._may_be_config(owner):
            self.reading.unread.append(text)

    def _set_item(self, owner: Any, key: Any, value: Any, node: ast.AST) -> None:
        """`owner[key] = value`."""
        is_plain = isinstance(key, str | int | float | bool | None)
        if isinstance(owner, dict) and is_plain:
            owner[key] = self._decided(value, owner.get(key), node)
        elif isinstance(owner, list) and isinstance(key, int) and -len(owner) <= key < len(owner):
            owner[key] = self._decided(value, owner[key], node)
        elif isinstance(owner, dict):
            owner[f"**{self._shown(key)}"] = Unknown(self._line(node))
        elif isinstance(owner, _Object):
            self.reading.unread.append(self._line(node))

    def _augment(
        self, target: ast.expr, operator: ast.operator, value: ast.expr, node: ast.stmt
    ) -> None:
        before = self._value(target)
        after = self._value(value)
        if isinstance(operator, ast.BitOr) and isinstance(before, dict):
            self._merge(before, after, node)
            return
        self._assign(
            target, self._operated(ast.BinOp(target, operator, value), before, after), node
        )

    def _delete(self, target: ast.expr, node: ast.stmt) -> None:
        match target:
            case ast.Name(id=name):
                self.scopes[-1].pop(name, None)
            case ast.Attribute(value=owner):
                if isinstance(self._value(owner), _Object):
                    self.reading.unread.append(self._line(node))
            case ast.Subscript(value=owner, slice=key):
                found = self._value(owner)
                name = self._value(key)
                if isinstance(found, dict) and not isinstance(name, Unknown | list | dict):
                    found.pop(name, None)

    def _may_be_config(self, value: Any) -> bool:
        """Whether an unknown value is perhaps a configuration, whose text names it."""
        text = value.text if isinstance(value, Unknown) else ""
        return any(word in text for word in ("Config", "args", "config"))

    # --- expressions

    def _lookup(self, name: str) -> Any:
        for scope in (self.scopes[-1], self.scopes[0]) if self.depth else reversed(self.scopes):
            if name in scope:
                return scope[name]
        return None

    def _value(self, node: ast.expr) -> Any:  # noqa: C901, PLR0911, PLR0912 (a case for each kind)
        """The value of an expression; Unknown with its text if it is not known."""
        self._count()
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                return self._name(name, node)
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(self._value(owner), name, node)
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return self._listed(items, node)
            case ast.Dict(keys=keys, values=values):
                return self._mapping(keys, values, node)
            case ast.Subscript(value=owner, slice=key):
                return self._item(self._value(owner), self._value(key), node)
            case ast.Call():
                return self._call(node)
            case ast.JoinedStr(values=pieces):
                return self._text_of(pieces, node)
            case ast.NamedExpr(target=target, value=value):
                found = self._value(value)
                self.scopes[-1][target.id] = found
                return found
            case ast.Lambda():
                return _Reference(Unknown(ast.unparse(node)).text, node)
            case ast.Await(value=value):
                return self._value(value)
            case ast.IfExp(test=test, body=body, orelse=other):
                verdict = self._value(test)
                if isinstance(verdict, Unknown | _Reference):
                    return Unknown(ast.unparse(node))
                return self._value(body if verdict else other)
            case ast.BoolOp():
                return self._bool(node)
            case ast.UnaryOp(op=operator, operand=inner):
                return self._signed(node, operator, self._value(inner))
            case ast.BinOp(left=left, right=right):
                return self._operated(node, self._value(left), self._value(right))
            case ast.Compare(left=left, ops=[_], comparators=[right]):
                return self._compared(node, self._value(left), self._value(right))
            case ast.ListComp() | ast.DictComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node)
            case ast.Slice(lower=lower, upper=upper, step=step):
                parts = [
                    None if each is None else self._value(each) for each in (lower, upper, step)
                ]
                return (
                    Unknown("slice")
                    if any(isinstance(each, Unknown) for each in parts)
                    else slice(*parts)
                )
        try:
            return evaluate(node, {})
        except (ValueError, TypeError, ArithmeticError):
            return Unknown(ast.unparse(node))

    def _name(self, name: str, node: ast.expr) -> Any:
        for scope in reversed(self.scopes):
            if name in scope:
                value = scope[name]
                if isinstance(value, Unknown) and not value.text.endswith("in a branch)"):
                    return Unknown(name if value.text == name else f"{name} = {value.text}")
                return value
        return Unknown(name)

    def _attribute(self, owner: Any, name: str, node: ast.expr) -> Any:
        if isinstance(owner, _Object):
            if name == "__dict__":
                return owner.values
            if name in owner.values:
                return owner.values[name]
            if owner.of is not None and name in owner.of.values:
                return owner.of.values[name]
            return Unknown(ast.unparse(node))
        if isinstance(owner, _Class) and name in owner.values:
            return owner.values[name]
        if isinstance(owner, _Reference) and owner.node is None:
            parts = owner.text.replace(":", ".")
            return _Reference(f"{parts}:{name}")
        return Unknown(ast.unparse(node))

    def _listed(self, items: Sequence[ast.expr], node: ast.expr) -> Any:
        found: list[Any] = []
        for item in items:
            if isinstance(item, ast.Starred):
                inner = self._value(item.value)
                if not isinstance(inner, list | tuple):
                    return Unknown(ast.unparse(node))
                found += inner
            else:
                found.append(self._value(item))
        return found

    def _mapping(
        self, keys: Sequence[ast.expr | None], values: Sequence[ast.expr], node: ast.expr
    ) -> Any:
        found: dict[Any, Any] = {}
        for key, value in zip(keys, values, strict=True):
            inner = self._value(value)
            if key is None:
                self._merge(found, inner, node)
                continue
            name = self._value(key)
            if isinstance(name, str | int | float | bool | None):
                found[name] = inner
            else:
                found[f"**{self._shown(name)}"] = Unknown(ast.unparse(node))
        return found

    def _merge(self, into: dict[Any, Any], other: Any, node: ast.AST) -> None:
        """`into |= other`; of what is not known the text is kept, under a name that begins with
        `**`.
        """
        if isinstance(other, _Object):
            other = other.values
        if isinstance(other, dict):
            for key, value in other.items():
                into[key] = self._decided(value, into.get(key), node)
        else:
            into[f"**{self._shown(other)}"] = Unknown(self._shown(other))

    def _item(self, owner: Any, key: Any, node: ast.expr) -> Any:
        if isinstance(owner, _Data) and isinstance(key, str):
            return owner.split(key)
        if isinstance(owner, _Data):
            return _Data(owner.source, (*owner.changes, self._line(node)))
        try:
            if isinstance(owner, dict | list | tuple | str) and not isinstance(key, Unknown):
                return owner[key]
        except (KeyError, IndexError, TypeError):
            pass
        if isinstance(owner, _Reference) and owner.text == "os:environ":
            return Unknown(ast.unparse(node))
        return Unknown(ast.unparse(node))

    def _text_of(self, pieces: Sequence[ast.expr], node: ast.expr) -> Any:
        texts: list[str] = []
        for piece in pieces:
            value: Any = piece.value if isinstance(piece, ast.Constant) else None
            if isinstance(piece, ast.FormattedValue):
                value = self._value(piece.value)
                spec = "" if piece.format_spec is None else self._value(piece.format_spec)
                if not isinstance(value, str | int | float | bool) or not isinstance(spec, str):
                    return Unknown(ast.unparse(node))
                try:
                    value = format(value, spec) if len(spec) < 10 else ast.unparse(node)
                except ValueError:
                    return Unknown(ast.unparse(node))
            texts.append(str(value))
        return "".join(texts)

    def _bool(self, node: ast.BoolOp) -> Any:
        found: Any = None
        for each in node.values:
            found = self._value(each)
            if isinstance(found, Unknown):
                return Unknown(ast.unparse(node))
            if bool(found) == isinstance(node.op, ast.Or):
                return found
        return found

    def _signed(self, node: ast.expr, operator: ast.unaryop, value: Any) -> Any:
        if isinstance(value, Unknown):
            return Unknown(ast.unparse(node))
        try:
            return evaluate(ast.UnaryOp(operator, ast.Name("value")), {"value": value})
        except (ValueError, TypeError, ArithmeticError):
            return Unknown(ast.unparse(node))

    def _operated(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        if isinstance(node.op, ast.BitOr) and isinstance(left, dict):
            merged = dict(left)
            self._merge(merged, right, node)
            return merged
        if (
            isinstance(node.op, ast.Add)
            and isinstance(left, list | tuple)
            and isinstance(right, list | tuple)
        ):
            return [*left, *right]
        if (
            isinstance(node.op, ast.Div)
            and isinstance(left, PurePosixPath | str)
            and isinstance(right, str)
        ):
            return f"{left}/{right}"
        return self._computed(node, left, right)

    def _computed(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        if not isinstance(left, str | int | float) or not isinstance(right, str | int | float):
            return Unknown(ast.unparse(node))
        try:
            formula = ast.BinOp(ast.Name("left"), node.op, ast.Name("right"))
            return evaluate(formula, {"left": left, "right": right})
        except (ValueError, TypeError, ArithmeticError):
            return Unknown(ast.unparse(node))

    def _compared(self, node: ast.Compare, left: Any, right: Any) -> Any:
        if isinstance(left, Unknown | _Reference) or isinstance(right, Unknown | _Reference):
            return Unknown(ast.unparse(node))
        try:
            match node.ops[0]:
                case ast.Is():
                    return left is right
                case ast.IsNot():
                    return left is not right
                case ast.NotEq():
                    return left != right
                case ast.NotIn():
                    return left not in right
                case ast.LtE():
                    return left <= right
            formula = ast.Compare(ast.Name("left"), node.ops, [ast.Name("right")])
            return evaluate(formula, {"left": left, "right": right})
        except (ValueError, TypeError, ArithmeticError):
            return Unknown(ast.unparse(node))

    def _comprehension(
        self, node: ast.ListComp | ast.DictComp | ast.GeneratorExp | ast.SetComp
    ) -> Any:
        if len(node.generators) != 1:
            return Unknown(ast.unparse(node))
        generator = node.generators[0]
        items = self._items(self._value(generator.iter))
        if items is None:
            return Unknown(ast.unparse(node))
        pairs: list[Any] = []
        self.scopes.append({})
        try:
            for item in items:
                self._assign(generator.target, item, ast.Pass())
                verdicts = [self._value(each) for each in generator.ifs]
                if any(isinstance(each, Unknown) for each in verdicts):
                    return Unknown(ast.unparse(node))
                if not all(verdicts):
                    continue
                if isinstance(node, ast.DictComp):
                    pairs.append((self._value(node.key), self._value(node.value)))
                else:
                    pairs.append(self._value(node.elt))
        finally:
            self.scopes.pop()
        if not isinstance(node, ast.DictComp):
            return pairs
        if not all(isinstance(key, str | int | float) for key, _ in pairs):
            return Unknown(ast.unparse(node))
        return dict(pairs)

    # --- calls

    def _call(self, node: ast.Call) -> Any:
        function = self._value(node.func)
        arguments, keywords = self._arguments(node)
        kind = self._kind(function)
        if kind:
            return self._made(kind, function, arguments, keywords, node)
        if isinstance(node.func, ast.Attribute):
            owner = self._value(node.func.value)
            found = self._method(owner, node.func.attr, arguments, keywords, node)
            if found is not _NOT_FOUND:
                return found
        name = self._called_name(function, node)
        found = self._known_call(name, arguments, keywords, node)
        if found is not _NOT_FOUND:
            return found
        if isinstance(function, _Class):
            return self._instance(function, arguments, keywords, node)
        if isinstance(function, _Reference) and function.node is not None:
            return self._call_function(function.node, arguments, keywords, node)
        self._note_passed(arguments, keywords, node)
        return Unknown(ast.unparse(node))

    def _called_name(self, function: Any, node: ast.Call) -> str:
        """The last part of the name of what is called, under its own name and not an alias."""
        if isinstance(function, _Reference) and function.node is None:
            return function.name
        return ast.unparse(node.func).rpartition(".")[2] if isinstance(function, Unknown) else ""

    def _kind(self, function: Any) -> str:
        """Which of the calls that are read this is; empty: none of them."""
        if isinstance(function, _Class):
            return next((kind for base in function.bases if (kind := self._kind(base))), "")
        if isinstance(function, _Reference) and function.node is None:
            name = function.name
        elif isinstance(function, Unknown):
            name = function.text.rpartition(".")[2]
        else:
            return ""
        if name.endswith("GRPOConfig"):
            return "GRPOConfig"
        if name.endswith("GRPOTrainer"):
            return "GRPOTrainer"
        return name if name in _CALLS else ""

    def _arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        """The positional and the named arguments of a call; what `**unknown` has is under a name
        with `**`.
        """
        arguments: list[Any] = []
        keywords: dict[str, Any] = {}
        for each in node.args:
            value = self._value(each.value if isinstance(each, ast.Starred) else each)
            if not isinstance(each, ast.Starred):
                arguments.append(value)
            elif isinstance(value, list | tuple):
                arguments += value
            else:
                keywords[f"*{ast.unparse(each.value)}"] = Unknown(ast.unparse(each))
        for keyword in node.keywords:
            value = self._value(keyword.value)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif isinstance(value, dict):
                keywords |= value
            else:
                keywords[f"**{ast.unparse(keyword.value)}"] = Unknown(ast.unparse(keyword.value))
        return arguments, keywords

    def _made(
        self,
        kind: str,
        function: Any,
        arguments: list[Any],
        keywords: dict[str, Any],
        node: ast.Call,
    ) -> Any:
        """The object that one of the read calls makes."""
        values = self._class_values(function)
        values |= dict(zip(_CALLS[kind], arguments, strict=False))
        for name, value in keywords.items():
            if name.startswith("*"):
                self.reading.unread.append(f"line {node.lineno}: {name} of {kind}")
            else:
                values[name] = value
        for extra in arguments[len(_CALLS[kind]) :]:
            self.reading.unread.append(
                f"line {node.lineno}: the argument {self._shown(extra)} of {kind}"
            )
        if isinstance(function, _Class) and "__init__" in function.methods:
            self.reading.unread.append(
                f"line {function.methods['__init__'].lineno}: {function.text} has an __init__"
            )
        if isinstance(function, _Class) and "__post_init__" in function.methods:
            at = function.methods["__post_init__"].lineno
            self.reading.unread.append(f"line {at}: {function.text} has a __post_init__")
        made = _Object(
            kind, values, function if isinstance(function, _Class) else None, node.lineno
        )
        if kind == "GRPOConfig":
            self.configs.append(made)
        elif kind == "LoraConfig":
            self.loras.append(made)
        elif kind == "GRPOTrainer":
            self.trainers.append(made)
        else:
            self.punishment = values.get("soft_punish_cache", Unknown("..."))
        return made

    def _class_values(self, function: Any) -> dict[str, Any]:
        return dict(function.values) if isinstance(function, _Class) else {}

    def _instance(
        self, of: _Class, arguments: list[Any], keywords: dict[str, Any], node: ast.Call
    ) -> _Object:
        """An object of a class of the script."""
        made = _Object(of.text, dict(of.values), of, node.lineno)
        if "__init__" in of.methods:
            self._call_function(of.methods["__init__"], [made, *arguments], keywords, node)
            return made
        made.values |= dict(zip(of.values, arguments, strict=False)) | keywords
        return made

    def _call_function(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        arguments: list[Any],
        keywords: dict[str, Any],
        node: ast.AST,
    ) -> Any:
        """Follow a function of the script with these arguments."""
        self.followed.add(function)
        if self.depth >= MAX_DEPTH:
            return Unknown(ast.unparse(node) if isinstance(node, ast.expr) else "...")
        scope = self._bound(function.args, arguments, keywords)
        if isinstance(function, ast.Lambda):
            self.scopes.append(scope)
            found = self._value(function.body)
            self.scopes.pop()
            return found
        named = [
            name
            for each in ast.walk(function)
            if isinstance(each, ast.Global)
            for name in each.names
        ]
        scope[" global"] = tuple(named)
        self.scopes.append(scope)
        self.depth += 1
        try:
            self.body(function.body)
        except _Return as end:
            return end.value
        except _LoopEnd:
            return None
        finally:
            self.depth -= 1
            self.scopes.pop()
        return None

    def _bound(
        self, parameters: ast.arguments, arguments: list[Any], keywords: dict[str, Any]
    ) -> dict[str, Any]:
        """The parameters of a function with their values."""
        names = [each.arg for each in chain(parameters.posonlyargs, parameters.args)]
        scope: dict[str, Any] = {name: Unknown(name) for name in names}
        defaults = parameters.defaults
        for name, default in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            scope[name] = self._value(default)
        for each, given in zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True):
            scope[each.arg] = Unknown(each.arg) if given is None else self._value(given)
        scope |= dict(zip(names, arguments, strict=False))
        rest = {name: value for name, value in keywords.items() if name not in scope}
        scope |= {name: value for name, value in keywords.items() if name in scope}
        if parameters.vararg is not None:
            scope[parameters.vararg.arg] = arguments[len(names) :]
        if parameters.kwarg is not None:
            scope[parameters.kwarg.arg] = rest
        return scope

    def _note_passed(self, arguments: list[Any], keywords: dict[str, Any], node: ast.Call) -> None:
        """Name a function of another module that gets a configuration, which it may change."""
        given = [*arguments, *keywords.values()]
        if ast.unparse(node.func) in (
            "print",
            "logger.info",
            "logging.info",
            "asdict",
            "dataclasses.asdict",
        ):
            return
        if any(isinstance(each, _Object) and each.kind == "GRPOConfig" for each in given):
            self.reading.assumed.append(f"{self._line(node)} may change the configuration")

    def _method(
        self, owner: Any, name: str, arguments: list[Any], keywords: dict[str, Any], node: ast.Call
    ) -> Any:
        """A method of a value that is known."""
        if isinstance(owner, dict):
            return self._of_dict(owner, name, arguments, keywords, node)
        if isinstance(owner, list) and name in (
            "append",
            "extend",
            "insert",
            "remove",
            "pop",
            "copy",
        ):
            return self._of_list(owner, name, arguments, node)
        if isinstance(owner, str) and name in _TEXT_METHODS:
            given = [*arguments, *keywords.values()]
            if (
                all(isinstance(each, str | int | float | list) for each in given)
                and len(str(given)) < 10_000
            ):
                try:
                    return getattr(owner, name)(*arguments, **keywords)
                except (TypeError, ValueError, KeyError, IndexError):
                    return Unknown(ast.unparse(node))
            return Unknown(ast.unparse(node))
        if isinstance(owner, _Data):
            if name == "train_test_split":
                changed = _Data(owner.source, (*owner.changes, self._line(node)))
                return {"train": changed, "test": changed}
            changes = () if name in _ROW_METHODS else (self._line(node),)
            return _Data(owner.source, (*owner.changes, *changes))
        if isinstance(owner, _Object):
            return self._of_object(owner, name, arguments, keywords, node)
        return _NOT_FOUND

    def _of_object(
        self,
        owner: _Object,
        name: str,
        arguments: list[Any],
        keywords: dict[str, Any],
        node: ast.Call,
    ) -> Any:
        if owner.of is not None and name in owner.of.methods:
            return self._call_function(owner.of.methods[name], [owner, *arguments], keywords, node)
        if owner.kind == "parser" and name == "add_argument":
            return self._add_argument(owner, arguments, keywords)
        if owner.kind == "parser" and name.startswith("parse"):
            return self._parsed(owner, name, node)
        if name == "__setattr__" and len(arguments) == 2:
            self._set(owner, arguments[0], arguments[1], node)
        elif owner.kind == "GRPOConfig" and name not in _READERS:
            self.reading.unread.append(self._line(node))
        elif owner.kind == "GRPOTrainer" and name not in (
            "train",
            "save_model",
            "push_to_hub",
            "save_state",
        ):
            self.reading.assumed.append(f"{self._line(node)} is not followed")
        return Unknown(ast.unparse(node))

    def _of_dict(
        self,
        owner: dict[Any, Any],
        name: str,
        arguments: list[Any],
        keywords: dict[str, Any],
        node: ast.Call,
    ) -> Any:
        first = arguments[0] if arguments else None
        is_key = isinstance(first, str | int | float)
        if name == "update":
            for other in [*arguments, keywords]:
                self._merge(owner, _from_pairs(other), node)
            return None
        if name in ("get", "pop", "setdefault") and is_key:
            missing = arguments[1] if len(arguments) > 1 else None
            if name == "setdefault":
                return owner.setdefault(first, self._decided(missing, None, node))
            if name == "pop" and not self.undecided:
                return owner.pop(first, missing)
            return owner.get(first, missing)
        if name in ("items", "keys", "values", "copy"):
            found = [[key, value] for key, value in owner.items()]
            return {
                "items": found,
                "keys": [*owner],
                "values": [*owner.values()],
                "copy": dict(owner),
            }[name]
        return _NOT_FOUND

    def _of_list(self, owner: list[Any], name: str, arguments: list[Any], node: ast.Call) -> Any:
        if name == "copy":
            return [*owner]
        if self.undecided or name in ("remove", "pop", "insert"):
            owner.append(Unknown(self._line(node)))
        elif name == "append" and arguments:
            owner.append(arguments[0])
        elif name == "extend" and arguments and isinstance(arguments[0], list | tuple):
            owner += arguments[0]
        else:
            owner.append(Unknown(self._line(node)))
        return None

    def _known_call(  # noqa: C901, PLR0911, PLR0912 (a case for each function)
        self, name: str, arguments: list[Any], keywords: dict[str, Any], node: ast.Call
    ) -> Any:
        """A call of a function whose meaning is known here."""
        first = arguments[0] if arguments else next(iter(keywords.values()), None)
        if name == "dict":
            found: dict[Any, Any] = {}
            for other in arguments:
                self._merge(found, _from_pairs(other), node)
            return found | keywords
        if name == "setattr" and len(arguments) == 3:
            self._set(arguments[0], arguments[1], arguments[2], node)
            return None
        if name == "getattr" and len(arguments) in (2, 3) and isinstance(arguments[1], str):
            found_value = self._attribute(arguments[0], arguments[1], node)
            is_missing = (
                isinstance(found_value, Unknown)
                and isinstance(arguments[0], _Object)
                and len(arguments) == 3
            )
            return arguments[2] if is_missing else found_value
        if name in ("vars", "asdict", "to_dict") and isinstance(first, _Object):
            return first.values if name == "vars" else dict(first.values)
        if name in ("replace", "copy", "deepcopy") and isinstance(first, _Object):
            return self._copied(first, keywords, node)
        if name in ("copy", "deepcopy") and isinstance(first, dict | list):
            return first.copy()
        if (
            name == "partial"
            and isinstance(first, _Reference | _Class | Unknown)
            and self._kind(first)
        ):
            return _Class("partial", [first], self._class_values(first) | keywords, {})
        if name in ("getenv", "get") and (name == "getenv" or "environ" in ast.unparse(node.func)):
            return (
                arguments[1]
                if len(arguments) > 1
                else keywords.get("default", Unknown(ast.unparse(node)))
            )
        if name in ("SimpleNamespace", "Namespace", "EasyDict", "DictConfig"):
            return _Object(
                name, {**(first if isinstance(first, dict) and arguments else {}), **keywords}
            )
        if name == "ArgumentParser":
            return _Object("parser", {})
        if name in _PARSERS:
            classes = first if isinstance(first, list) else [first]
            return _Object("parser", {"classes": classes})
        if name == "field":
            return self._default_of_field(keywords, node)
        if name == "load_dataset":
            return self._loaded(arguments, keywords, node)
        if name in ("from_json", "from_csv", "from_parquet") and isinstance(first, str):
            return _Data(first)
        if name == "from_pretrained":
            return self._model(arguments, keywords, node)
        if name == "get_peft_model":
            return self._with_adapters(arguments, keywords)
        if (
            name == "join"
            and "path" in ast.unparse(node.func)
            and all(isinstance(each, str) for each in arguments)
        ):
            return "/".join(arguments)
        if name == "Path" and isinstance(first, str):
            return first
        if name == "range" and arguments and all(isinstance(each, int) for each in arguments):
            return range(*arguments) if len(arguments) < 4 else Unknown(ast.unparse(node))
        if name in _PURE and not keywords and not any(self._is_open(each) for each in arguments):
            try:
                return _PURE[name](*arguments)
            except (TypeError, ValueError, OverflowError):
                return Unknown(ast.unparse(node))
        return _NOT_FOUND

    def _is_open(self, value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(map(self._is_open, value)) or len(value) > MAX_ITEMS
        return not isinstance(value, str | int | float | bool | dict | None)

    def _copied(self, of: _Object, keywords: dict[str, Any], node: ast.Call) -> _Object:
        made = _Object(of.kind, dict(of.values), of.of, node.lineno)
        for name, value in keywords.items():
            if name.startswith("*"):
                self.reading.unread.append(f"line {node.lineno}: {name} of replace")
            else:
                made.values[name] = value
        if made.kind == "GRPOConfig":
            self.configs = [*(each for each in self.configs if each is not of), made]
        return made

    def _default_of_field(self, keywords: dict[str, Any], node: ast.Call) -> Any:
        factory = keywords.get("default_factory")
        if isinstance(factory, _Reference) and isinstance(factory.node, ast.Lambda):
            return self._value(factory.node.body)
        if isinstance(factory, Unknown) and factory.text in ("dict", "list"):
            return {} if factory.text == "dict" else []
        return keywords.get("default", Unknown(ast.unparse(node)))

    def _add_argument(
        self, parser: _Object, arguments: list[Any], keywords: dict[str, Any]
    ) -> None:
        flags = [each for each in arguments if isinstance(each, str)]
        long = next((each for each in flags if each.startswith("--")), flags[0] if flags else "")
        name = keywords.get("dest") or long.lstrip("-").replace("-", "_")
        if not isinstance(name, str):
            return
        action = keywords.get("action")
        missing = {"store_true": False, "store_false": True}.get(
            action if isinstance(action, str) else ""
        )
        is_required = keywords.get("required") or not long.startswith("-")
        default = keywords.get("default", Unknown(f"--{name}") if is_required else missing)
        convert = keywords.get("type")
        if (
            isinstance(default, str)
            and isinstance(convert, Unknown)
            and convert.text in ("int", "float")
        ):
            default = self._known_call(
                convert.text, [default], {}, ast.Call(ast.Name(convert.text), [], [])
            )
        parser.values[name] = default

    def _parsed(self, parser: _Object, name: str, node: ast.Call) -> Any:
        """What a parser of arguments gives if the command has none."""
        self.reading.assumed.append(
            f"line {node.lineno}: the command's own arguments are taken as absent"
        )
        classes = parser.values.get("classes")
        if classes is None:
            made = _Object("arguments", dict(parser.values))
            return [made, []] if "known" in name else made
        made_all: list[Any] = []
        for each in classes:
            if self._kind(each) == "GRPOConfig":
                made_all.append(self._made("GRPOConfig", each, [], {}, node))
            elif isinstance(each, _Class):
                made_all.append(self._instance(each, [], {}, node))
            else:
                made_all.append(_Object(getattr(each, "name", "arguments"), {}, None, node.lineno))
        return made_all

    def _loaded(self, arguments: list[Any], keywords: dict[str, Any], node: ast.Call) -> Any:
        """The data of `load_dataset(name, configuration, split=..., data_files=...)`."""
        given = (
            dict(zip(("path", "name", "data_dir", "data_files", "split"), arguments, strict=False))
            | keywords
        )
        path = given.get("path")
        split = given.get("split")
        files = given.get("data_files")
        if path in ("json", "csv", "parquet", "text") or files is not None:
            if isinstance(files, str):
                return _Data(files)
            if isinstance(files, list) and files and all(isinstance(each, str) for each in files):
                return _Data(files[0] if len(files) == 1 else files)
            if isinstance(files, dict):
                found = _Data({"files": files})
                return found.split(split) if isinstance(split, str) else found
            return Unknown(ast.unparse(node))
        if not isinstance(path, str) or isinstance(split, Unknown):
            return Unknown(ast.unparse(node))
        name = given.get("name")
        if isinstance(name, Unknown):
            return Unknown(ast.unparse(node))
        source: Any = f"hub:{path}" if name is None else {"hub": path, "config": name}
        found = _Data(source)
        return found.split(split) if isinstance(split, str) else found

    def _model(self, arguments: list[Any], keywords: dict[str, Any], node: ast.Call) -> Any:
        """The model of `from_pretrained`; unsloth's gives the tokenizer too."""
        names = ("pretrained_model_name_or_path", "model_name")
        name = (
            arguments[0]
            if arguments
            else next((keywords[each] for each in names if each in keywords), None)
        )
        rest = [each for each in keywords if each not in names]
        if name is None:
            return Unknown(ast.unparse(node))
        owner = ast.unparse(node.func)
        if rest and "tokenizer" not in owner.lower() and "processor" not in owner.lower():
            shown = ", ".join(f"{each}={self._shown(keywords[each])}" for each in rest)
            self.reading.assumed.append(f"line {node.lineno}: the model is loaded with {shown}")
        model = _Model(name)
        is_pair = any(
            each in owner
            for each in ("FastLanguageModel", "FastModel", "FastVisionModel", "FastLlama")
        )
        return [model, Unknown("tokenizer")] if is_pair else model

    def _with_adapters(self, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """`get_peft_model(model, LoraConfig(...))`, and unsloth's with the values themselves."""
        model = arguments[0] if arguments else keywords.get("model")
        given = arguments[1] if len(arguments) > 1 else keywords.get("peft_config")
        values = dict(given.values) if isinstance(given, _Object) else {}
        values |= {
            name: value for name, value in keywords.items() if name not in ("model", "peft_config")
        }
        if isinstance(model, _Model):
            return _Model(model.name, {**model.lora, **values})
        return Unknown("get_peft_model(...)")

    # --- texts

    def _line(self, node: ast.AST) -> str:
        text = " ".join(ast.unparse(node).split())
        return (
            f"line {getattr(node, 'lineno', 0)}: {text if len(text) < 100 else f'{text[:97]}...'}"
        )

    def _shown(self, value: Any) -> str:
        if isinstance(value, Unknown):
            return value.text
        if isinstance(value, _Reference | _Class):
            return value.text
        if isinstance(value, _Object):
            return f"{value.kind}(...)"
        if isinstance(value, _Data):
            return str(value.source)
        if isinstance(value, _Model):
            return self._shown(value.name)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._shown, value))}]"
        if isinstance(value, dict):
            return (
                f"{{{', '.join(f'{key!r}: {self._shown(each)}' for key, each in value.items())}}}"
            )
        return repr(value)


_NOT_FOUND: Any = object()


def _from_pairs(value: Any) -> Any:
    """The mapping that a list of pairs stands for; anything else is returned."""
    if isinstance(value, list) and all(isinstance(each, list) and len(each) == 2 for each in value):
        return {key: each for key, each in value if isinstance(key, str)}
    return value


def _is_cell(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a cell of a marimo notebook: `@app.cell`, `@app.cell(hide_code=True)`."""
    targets = [getattr(decorator, "func", decorator) for decorator in node.decorator_list]
    return any(ast.unparse(target) == "app.cell" for target in targets)


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
