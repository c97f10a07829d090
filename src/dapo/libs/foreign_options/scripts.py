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
MAX_SHOWN = 100  # signs of a statement in a message
MAX_TEXT = 10_000  # signs in the arguments of a text's method
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
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "len": len,
    "max": max,
    "min": min,
    "abs": abs,
    "round": round,
    "sum": sum,
    "list": list,
    "tuple": tuple,
    "sorted": sorted,
    "any": any,
    "all": all,
    "set": list,
    "zip": lambda *iterables: list(zip(*iterables, strict=False)),
    "enumerate": lambda iterable: list(enumerate(iterable)),
}
"""Functions that may be called: their results depend on the arguments alone, and are bounded by them.
"""
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
_MODEL_NAMES = ("pretrained_model_name_or_path", "model_name")
_CLASSES_OF_UNSLOTH = (
    "FastLanguageModel",
    "FastModel",
    "FastVisionModel",
    "FastLlama",
)
_LIST_METHODS = (
    "append",
    "extend",
    "insert",
    "remove",
    "pop",
    "copy",
)
_TRAINER_METHODS = (
    "train",
    "save_model",
    "push_to_hub",
    "save_state",
)
"""Methods that leave the options of a trainer what they are."""
_HARMLESS_CALLS = (
    "print",
    "logger.info",
    "logging.info",
    "asdict",
    "dataclasses.asdict",
)
"""Functions of other modules that get a configuration and do not change it."""
_ROW_METHODS = ("shuffle", "with_format", "cast", "flatten_indices")
"""Methods of data sets that leave the rows what they are."""


@dataclass(frozen=True)
class _Call:
    """The call of a function in a script, with the values of its arguments."""

    name: str  # the last part of the function's name
    arguments: list[Any]
    keywords: dict[str, Any]  # a name that is not known begins with `*`
    node: ast.Call

    @property
    def first(self) -> Any:
        """The first argument, whether it has a name or not; None without any."""
        if self.arguments:
            return self.arguments[0]
        return next(iter(self.keywords.values()), None)


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
        """Return the part of this name; a data set that is a part already stays what it is."""
        source = self.source
        is_name_of_hub = isinstance(source, str) and source.startswith("hub:")
        if is_name_of_hub and source.count(":") == 1:
            source = f"{source}:{name}"
        elif isinstance(source, dict) and "hub" in source and "split" not in source:
            source = source | {"split": name}
        elif isinstance(source, dict) and "files" in source:
            source = source["files"].get(name, Unknown(name))
        return _Data(source, self.changes)


@dataclass(eq=False)
class _Model:
    """A model that the script loads, with what it sets about adapters."""

    name: Any
    lora: dict[str, Any] = field(default_factory=dict)


class _Return(Exception):
    """`return`, with its value."""

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


def read_script(text: str, module: str, arguments: Mapping[str, Any] | None = None) -> Reading:
    """Read the options of GRPOConfig, GRPOTrainer and LoraConfig in a script, without running it.

    In a script without these two, SFTConfig and SFTTrainer take their places. `arguments` are those
    of the command that runs the script, by name; None: it is not known, and they are taken as
    absent.

    A value that is not known is Unknown. A function of the script is `module:function`, and one
    that it imports has the name of its own module. Raises ValueError or SyntaxError.
    """
    reader = _Reader(module, arguments)
    # a warm start in the same script has options of its own
    if "GRPO" not in text:
        reader.suffixes_of_configs += ("SFTConfig",)
        reader.suffixes_of_trainers += ("SFTTrainer",)
    tree, lines = _parse(text)
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
    reading = reader.result()
    if not reading.options and not reading.unread:
        raise ValueError("there is no call of GRPOConfig or GRPOTrainer with arguments")
    return reading


def _parse(text: str) -> tuple[ast.Module, list[str]]:
    """Parse a script without the lines of f-strings that only a newer Python parses; return both.

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

    def __init__(self, module: str, arguments: Mapping[str, Any] | None) -> None:
        self.module = module
        self.arguments = arguments
        self.reading = Reading(command=f"{module}.py")
        self.scopes: list[dict[str, Any]] = [{"__name__": "__main__"}]
        self.configs: list[_Object] = []
        self.trainers: list[_Object] = []
        self.loras: list[_Object] = []
        self.models: list[_Model] = []
        self.punishment: Any = None
        self.called_functions: set[ast.AST] = set()
        self.num_open_branches = 0  # how many branches around this statement may not be taken
        self.num_steps = 0
        self.depth = 0
        self.suffixes_of_configs: tuple[str, ...] = ("GRPOConfig",)
        self.suffixes_of_trainers: tuple[str, ...] = ("GRPOTrainer",)

    # --- the result

    def result(self) -> Reading:
        """Return the options of the trainer, or of the last configuration where there is none."""
        trainer = self.trainers[-1] if self.trainers else None
        for other in self.trainers[:-1]:
            self._note_other(other, trainer)
        config = self._config_of(trainer)
        for candidate in self.configs:
            if candidate is not config:
                self._note_other(candidate, config)
        options = self._options_of(trainer, config)
        line = trainer.line if trainer else 0
        self.reading.options = {
            name: self._option(name, value, line) for name, value in options.items()
        }
        # a statement of a loop, or of a function that is called twice, stands there once
        self.reading.unread = [*dict.fromkeys(self.reading.unread)]
        self.reading.assumed = [*dict.fromkeys(self.reading.assumed)]
        return self.reading

    def _config_of(self, trainer: _Object | None) -> _Object | None:
        """The configuration that the trainer takes, or where that is not known the last one."""
        config = trainer.values.get("args") if trainer else None
        if isinstance(config, _Object):
            return config
        if trainer is not None and config is not None:
            self.reading.unread.append(f"line {trainer.line}: args={self._display(config)}")
        return self.configs[-1] if self.configs else None

    def _options_of(self, trainer: _Object | None, config: _Object | None) -> dict[str, Any]:
        """The options of the configuration, the adapters, the trainer and its model, by name."""
        options: dict[str, Any] = {}
        lora = self._lora(trainer)
        for source in (config, lora, trainer):
            if source is not None:
                options |= source.values
        options.pop("args", None)
        options.pop("peft_config", None)
        if trainer is not None and lora is None:
            peft_config = trainer.values.get("peft_config")
            if isinstance(peft_config, Unknown):
                options["peft_config"] = peft_config
        model = options.get("model")
        if isinstance(model, _Model):
            # what the trainer says holds before what the model was loaded with
            for name, value in model.lora.items():
                options.setdefault(name, value)
        if self.punishment is not None:
            options["get_soft_overlong_punishment"] = self.punishment
        return options

    def _lora(self, trainer: _Object | None) -> _Object | None:
        """The adapters' configuration that the trainer takes, or where that is not known the last
        one.
        """
        config = trainer.values.get("peft_config") if trainer else Unknown("")
        if isinstance(config, _Object):
            return config
        if isinstance(config, Unknown) and self.loras:
            return self.loras[-1]
        return None

    def _note_other(self, other: _Object, current: _Object | None) -> None:
        """Name the options of an object that the trainer does not use, where they differ.

        One of the same line is the trainer's own, of an expression that was followed twice.
        """
        differ = [
            name
            for name, value in other.values.items()
            if current is None or current.values.get(name) != value
        ]
        if differ and current is not None and other.line != current.line:
            self.reading.assumed.append(
                f"line {other.line}: another {other.kind}, not that of the trainer; it sets"
                f" {', '.join(differ)}"
            )

    def _option(self, name: str, value: Any, line: int) -> Any:
        """The value of an option as it is translated."""
        if isinstance(value, _Data):
            for statement in value.changes:
                self.reading.unread.append(f"{statement} changes the rows of {name}")
            source = value.split("train").source
            if isinstance(source, list):
                return self._option(name, source, line)
            return source
        if isinstance(value, list | tuple):
            # the punishment of long responses is an option of its own here, and no reward function
            rewards = [item for item in value if not self._is_punishment(item)]
            items = [self._option(name, item, line) for item in rewards]
            if any(isinstance(item, Unknown) for item in items):
                return Unknown(self._display(value))
            return items
        if isinstance(value, dict):
            mapping = {key: self._option(name, item, line) for key, item in value.items()}
            if any(isinstance(item, Unknown) for item in mapping.values()):
                return Unknown(self._display(value))
            return mapping
        if isinstance(value, _Model):
            return self._option(name, value.name, line)
        if isinstance(value, _Reference):
            return _option_of_reference(value)
        if isinstance(value, _Class):
            self.reading.methods[value.text] = [*value.methods]
            return value.text
        if isinstance(value, _Object):
            return Unknown(f"{value.kind}(...)")
        return value

    def _is_punishment(self, value: Any) -> bool:
        """Whether a reward function is TRL's punishment of long responses."""
        return isinstance(value, _Object) and value.kind == "get_soft_overlong_punishment"

    # --- statements

    def body(self, statements: Sequence[ast.stmt]) -> None:
        """Follow statements one after the other."""
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
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            # one of them may have called another
            if function in self.called_functions:
                continue
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            if any(self._kind(self._value(call.func)) for call in calls):
                self.reading.assumed.append(
                    f"line {function.lineno}: {function.name} is taken to be called"
                )
                self._call_function(function, [], {}, function)

    def _statement(self, node: ast.stmt) -> None:  # noqa: C901, PLR0912, PLR0915 (a case for each kind)
        match node:
            case ast.Import(names=modules):
                for module in modules:
                    # `import a.b` makes the name `a` known
                    name = module.asname or module.name.partition(".")[0]
                    reference = module.name if module.asname else name
                    self.scopes[-1][name] = _Reference(reference)
            case ast.ImportFrom(module=source, names=imports):
                for item in imports:
                    name = item.asname or item.name
                    self.scopes[-1][name] = _Reference(f"{source}:{item.name}")
            case ast.FunctionDef() | ast.AsyncFunctionDef() if _is_cell(node):
                self._cell(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.scopes[-1][node.name] = _Reference(f"{self.module}:{node.name}", node)
            case ast.ClassDef():
                self.scopes[-1][node.name] = self._class(node)
            case ast.Assign(targets=targets, value=expression):
                value = self._value(expression)
                for target in targets:
                    self._assign(target, value, node)
            case ast.AnnAssign(target=target, value=ast.expr() as expression):
                self._assign(target, self._value(expression), node)
            case ast.AugAssign(target=target, op=operator, value=expression):
                self._augment(target, operator, expression, node)
            case ast.Expr(value=expression):
                self._value(expression)
            case ast.If():
                self._if(node)
            case ast.For() | ast.AsyncFor():
                self._for(node)
            case ast.While(body=inner, orelse=alternative):
                self._perhaps([*inner, *alternative])
            case ast.With(items=items, body=inner) | ast.AsyncWith(items=items, body=inner):
                for context in items:
                    value = self._value(context.context_expr)
                    if context.optional_vars is not None:
                        self._assign(context.optional_vars, value, node)
                self.body(inner)
            case ast.Try(body=inner, handlers=handlers, orelse=alternative, finalbody=last):
                statements = [statement for handler in handlers for statement in handler.body]
                self._try([*inner, *alternative, *last], statements, node)
            case ast.Match(cases=cases):
                for case in cases:
                    self._perhaps(case.body)
            case ast.Return(value=None):
                raise _Return(None)
            case ast.Return(value=ast.expr() as expression):
                raise _Return(self._value(expression))
            case ast.Raise():
                # elsewhere it belongs to a check that the script passes
                if self.num_open_branches:
                    raise _Return(None)
            case ast.Break() | ast.Continue():
                if not self.num_open_branches:
                    raise _LoopEnd(is_break=isinstance(node, ast.Break))
            case ast.Delete(targets=targets):
                for target in targets:
                    self._delete(target, node)

    def _cell(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Follow a cell of a marimo notebook, whose names are those of the module."""
        self.called_functions.add(node)
        with suppress(_Return, _LoopEnd):
            self.body(node.body)

    def _if(self, node: ast.If) -> None:
        """Follow the branch that is taken, or each of them where that is not known."""
        verdict = self._value(node.test)
        if isinstance(verdict, Unknown | _Data | _Model | _Object | _Reference):
            self._perhaps(node.body)
            self._perhaps(node.orelse)
        else:
            self.body(node.body if verdict else node.orelse)

    def _perhaps(self, statements: Sequence[ast.stmt]) -> None:
        """Follow statements that may not run: what they set is unknown."""
        self.num_open_branches += 1
        try:
            self.body(statements)
        except (_Return, _LoopEnd):
            pass
        finally:
            self.num_open_branches -= 1

    def _try(self, body: Sequence[ast.stmt], handlers: Sequence[ast.stmt], node: ast.stmt) -> None:
        """Follow a `try` in which nothing is raised.

        Args:
            body: the statements that run then.
            handlers: those of `except`, which do not.
            node: the whole statement.
        """
        self.body(body)
        nodes = [part for statement in handlers for part in ast.walk(statement)]
        if any(_is_stored(part) or self._touches(part) for part in nodes):
            self.reading.assumed.append(f"line {node.lineno}: `except` is not followed")

    def _touches(self, node: ast.AST) -> bool:
        """Whether a name is that of a configuration."""
        return isinstance(node, ast.Name) and isinstance(self._lookup(node.id), _Object)

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        """Follow a loop for each item, or once where the items are not known."""
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
        """The items of a loop; None: they are not known, or too many."""
        if isinstance(value, list | tuple | dict | range | str) and len(value) <= MAX_ITEMS:
            return list(value)
        return None

    def _class(self, node: ast.ClassDef) -> _Class:
        bases = [self._value(base) for base in node.bases]
        values: dict[str, Any] = {}
        methods: dict[str, ast.FunctionDef] = {}
        for base in bases:
            if isinstance(base, _Class):
                values |= base.values
                methods = {**base.methods, **methods}
        fields = []
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                methods[statement.name] = statement
            elif not isinstance(statement, ast.AsyncFunctionDef):
                fields.append(statement)
        self.scopes.append(values)
        self.body(fields)
        self.scopes.pop()
        return _Class(f"{self.module}:{node.name}", bases, values, methods)

    # --- assignment

    def _assign(self, target: ast.expr, value: Any, node: ast.stmt) -> None:
        match target:
            case ast.Name(id=name):
                before = self._lookup(name)
                self._scope_of(name)[name] = self._value_in_branch(value, before, node)
            case ast.Attribute(value=owner, attr=name):
                self._set_attribute(self._value(owner), name, value, node)
            case ast.Subscript(value=owner, slice=key):
                self._set_item(self._value(owner), self._value(key), value, node)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                has_items = isinstance(value, list | tuple) and len(value) == len(targets)
                for i, inner in enumerate(targets):
                    item: Any = Unknown(ast.unparse(inner))
                    if has_items:
                        item = value[i]
                    elif isinstance(value, Unknown):
                        item = Unknown(f"{value.text}[{i}]")
                    self._assign(inner, item, node)
            case ast.Starred(value=inner):
                self._assign(inner, Unknown(ast.unparse(inner)), node)

    def _scope_of(self, name: str) -> dict[str, Any]:
        """The scope in which an assignment to this name takes effect."""
        if self.depth and name in self._globals():
            return self.scopes[0]
        return self.scopes[-1]

    def _globals(self) -> Sequence[str]:
        """The names that the present function declares with `global`."""
        names = self.scopes[-1].get(" global", ())
        return names if isinstance(names, tuple) else ()

    def _value_in_branch(self, value: Any, before: Any, node: ast.AST) -> Any:
        """A value that is set here; one that is set in a branch which may not be taken is
        unknown.
        """
        if not self.num_open_branches:
            return value
        if type(before) is type(value) and before == value:
            return value
        is_definition = isinstance(value, _Reference | _Class)
        is_first_object = before is None and isinstance(value, _Object | _Model | _Data)
        if is_definition or is_first_object:
            # without it the script has no trainer at all: the branch is the one that trains
            self.reading.assumed.append(f"{self._line(node)}, in a branch, is taken")
            return value
        line = getattr(node, "lineno", 0)
        return Unknown(f"{self._display(value)} (line {line}, in a branch)")

    def _set_attribute(self, owner: Any, name: Any, value: Any, node: ast.AST) -> None:
        """Follow `owner.name = value`.

        Args:
            owner: the object.
            name: the attribute; anything but a text is a name that is not known.
            value: its new value.
            node: the statement or the call of `setattr`.
        """
        text = self._line(node)
        if isinstance(owner, _Object) and isinstance(name, str):
            if owner.kind == "GRPOTrainer" and name != "args":
                # a trainer has attributes that are no options, and some that change the training
                self.reading.unread.append(text)
            owner.values[name] = self._value_in_branch(value, owner.values.get(name), node)
        elif isinstance(owner, _Class) and isinstance(name, str):
            owner.values[name] = self._value_in_branch(value, owner.values.get(name), node)
        elif isinstance(owner, _Object) or self._may_be_config(owner):
            self.reading.unread.append(text)

    def _set_item(self, owner: Any, key: Any, value: Any, node: ast.AST) -> None:
        """Follow `owner[key] = value`.

        Args:
            owner: the dictionary or list.
            key: its key or position.
            value: the new item.
            node: the statement.
        """
        is_plain = isinstance(key, str | int | float | bool | None)
        if isinstance(owner, dict) and is_plain:
            owner[key] = self._value_in_branch(value, owner.get(key), node)
        elif isinstance(owner, list) and _has_item(owner, key):
            owner[key] = self._value_in_branch(value, owner[key], node)
        elif isinstance(owner, dict):
            owner[f"**{self._display(key)}"] = Unknown(self._line(node))
        elif isinstance(owner, _Object):
            self.reading.unread.append(self._line(node))

    def _augment(
        self, target: ast.expr, operator: ast.operator, value: ast.expr, node: ast.stmt
    ) -> None:
        """Follow `target += value` and its like.

        Args:
            target: what is changed.
            operator: the operator before the equals sign.
            value: the operand.
            node: the statement.
        """
        before = self._value(target)
        after = self._value(value)
        if isinstance(operator, ast.BitOr) and isinstance(before, dict):
            self._merge(before, after, node)
            return
        operation = ast.BinOp(target, operator, value)
        self._assign(target, self._operation(operation, before, after), node)

    def _delete(self, target: ast.expr, node: ast.stmt) -> None:
        """Follow `del target`."""
        match target:
            case ast.Name(id=name):
                self.scopes[-1].pop(name, None)
            case ast.Attribute(value=owner):
                if isinstance(self._value(owner), _Object):
                    self.reading.unread.append(self._line(node))
            case ast.Subscript(value=owner, slice=key):
                mapping = self._value(owner)
                name = self._value(key)
                if isinstance(mapping, dict) and not isinstance(name, Unknown | list | dict):
                    mapping.pop(name, None)

    def _may_be_config(self, value: Any) -> bool:
        """Whether an unknown value is perhaps a configuration, whose text names it."""
        text = value.text if isinstance(value, Unknown) else ""
        return any(word in text for word in ("Config", "args", "config"))

    # --- expressions

    def _lookup(self, name: str) -> Any:
        """The value of a name that a statement changes; None if there is none."""
        scopes = self.scopes[::-1]
        if self.depth:
            # within a function: its own names and those of the module
            scopes = [self.scopes[-1], self.scopes[0]]
        for scope in scopes:
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
                return self._name(name)
            case ast.Attribute(value=owner, attr=name):
                return self._attribute(self._value(owner), name, node)
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return self._list_of(items, node)
            case ast.Dict(keys=keys, values=values):
                return self._mapping(keys, values, node)
            case ast.Subscript(value=owner, slice=key):
                return self._item(self._value(owner), self._value(key), node)
            case ast.Call():
                return self._call(node)
            case ast.JoinedStr(values=pieces):
                return self._text_of(pieces, node)
            case ast.NamedExpr(target=target, value=expression):
                value = self._value(expression)
                self.scopes[-1][target.id] = value
                return value
            case ast.Lambda():
                return _Reference(_unknown(node).text, node)
            case ast.Await(value=value):
                return self._value(value)
            case ast.IfExp(test=test, body=body, orelse=alternative):
                verdict = self._value(test)
                if isinstance(verdict, Unknown | _Reference):
                    return _unknown(node)
                return self._value(body if verdict else alternative)
            case ast.BoolOp():
                return self._bool(node)
            case ast.UnaryOp(op=operator, operand=inner):
                return self._signed(node, operator, self._value(inner))
            case ast.BinOp(left=left, right=right):
                return self._operation(node, self._value(left), self._value(right))
            case ast.Compare(left=left, ops=[_], comparators=[right]):
                return self._comparison(node, self._value(left), self._value(right))
            case ast.ListComp() | ast.DictComp() | ast.GeneratorExp() | ast.SetComp():
                return self._comprehension(node)
            case ast.Slice():
                return self._slice(node)
        try:
            return evaluate(node, {})
        except (ValueError, TypeError, ArithmeticError):
            return _unknown(node)

    def _slice(self, node: ast.Slice) -> Any:
        """The bounds of `items[lower:upper:step]`; Unknown if one of them is."""
        parts = (node.lower, node.upper, node.step)
        bounds = [None if part is None else self._value(part) for part in parts]
        if any(isinstance(bound, Unknown) for bound in bounds):
            return Unknown("slice")
        return slice(*bounds)

    def _name(self, name: str) -> Any:
        """The value of a name; of one that is not known, its assignment is the text."""
        for scope in reversed(self.scopes):
            if name not in scope:
                continue
            value = scope[name]
            if not isinstance(value, Unknown) or value.text.endswith("in a branch)"):
                return value
            return Unknown(name if value.text == name else f"{name} = {value.text}")
        return Unknown(name)

    def _attribute(self, owner: Any, name: str, node: ast.expr) -> Any:
        if isinstance(owner, _Object):
            if name == "__dict__":
                return owner.values
            if name in owner.values:
                return owner.values[name]
            if owner.of is not None and name in owner.of.values:
                return owner.of.values[name]
            return _unknown(node)
        if isinstance(owner, _Class) and name in owner.values:
            return owner.values[name]
        if isinstance(owner, _Reference) and owner.node is None:
            parts = owner.text.replace(":", ".")
            return _Reference(f"{parts}:{name}")
        return _unknown(node)

    def _list_of(self, items: Sequence[ast.expr], node: ast.expr) -> Any:
        values: list[Any] = []
        for item in items:
            if isinstance(item, ast.Starred):
                inner = self._value(item.value)
                if not isinstance(inner, list | tuple):
                    return _unknown(node)
                values += inner
            else:
                values.append(self._value(item))
        return values

    def _mapping(
        self, keys: Sequence[ast.expr | None], values: Sequence[ast.expr], node: ast.expr
    ) -> Any:
        mapping: dict[Any, Any] = {}
        for key, value in zip(keys, values, strict=True):
            inner = self._value(value)
            if key is None:
                self._merge(mapping, inner, node)
                continue
            name = self._value(key)
            if isinstance(name, str | int | float | bool | None):
                mapping[name] = inner
            else:
                mapping[f"**{self._display(name)}"] = _unknown(node)
        return mapping

    def _merge(self, into: dict[Any, Any], other: Any, node: ast.AST) -> None:
        """`into |= other`; of what is not known the text is kept, under a name that begins with
        `**`.
        """
        if isinstance(other, _Object):
            other = other.values
        if isinstance(other, dict):
            for key, value in other.items():
                into[key] = self._value_in_branch(value, into.get(key), node)
        else:
            into[f"**{self._display(other)}"] = Unknown(self._display(other))

    def _item(self, owner: Any, key: Any, node: ast.expr) -> Any:
        if isinstance(owner, _Data) and isinstance(key, str):
            return owner.split(key)
        if isinstance(owner, _Data):
            return _Data(owner.source, (*owner.changes, self._line(node)))
        is_container = isinstance(owner, dict | list | tuple | str)
        if not is_container or isinstance(key, Unknown):
            return _unknown(node)
        try:
            return owner[key]
        except (KeyError, IndexError, TypeError):
            return _unknown(node)

    def _text_of(self, pieces: Sequence[ast.expr], node: ast.expr) -> Any:
        """The text of an f-string."""
        texts: list[str] = []
        for piece in pieces:
            if not isinstance(piece, ast.FormattedValue):
                texts.append(str(getattr(piece, "value", None)))
                continue
            value = self._value(piece.value)
            spec = "" if piece.format_spec is None else self._value(piece.format_spec)
            if not isinstance(value, str | int | float | bool) or not isinstance(spec, str):
                return _unknown(node)
            if len(spec) >= 10:
                # a width of many signs would make a text of as many
                texts.append(ast.unparse(node))
                continue
            try:
                texts.append(format(value, spec))
            except ValueError:
                return _unknown(node)
        return "".join(texts)

    def _bool(self, node: ast.BoolOp) -> Any:
        """The value of `a and b` or `a or b`: the first operand that decides, else the last."""
        decisive = isinstance(node.op, ast.Or)
        value: Any = None
        for operand in node.values:
            value = self._value(operand)
            if isinstance(value, Unknown):
                return _unknown(node)
            if bool(value) == decisive:
                return value
        return value

    def _signed(self, node: ast.expr, operator: ast.unaryop, value: Any) -> Any:
        """The value of `-value`, `+value`, `not value` or `~value`."""
        if isinstance(value, Unknown):
            return _unknown(node)
        try:
            return evaluate(ast.UnaryOp(operator, ast.Name("value")), {"value": value})
        except (ValueError, TypeError, ArithmeticError):
            return _unknown(node)

    def _operation(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        """The value of `left + right` and its like: of dictionaries, lists, paths and numbers."""
        if isinstance(node.op, ast.BitOr) and isinstance(left, dict):
            mapping = dict(left)
            self._merge(mapping, right, node)
            return mapping
        are_lists = isinstance(left, list | tuple) and isinstance(right, list | tuple)
        if isinstance(node.op, ast.Add) and are_lists:
            return [*left, *right]
        # `Path(folder) / name`: a path is followed as its text
        are_paths = isinstance(left, PurePosixPath | str) and isinstance(right, str)
        if isinstance(node.op, ast.Div) and are_paths:
            return f"{left}/{right}"
        return self._arithmetic(node, left, right)

    def _arithmetic(self, node: ast.BinOp, left: Any, right: Any) -> Any:
        if not isinstance(left, str | int | float) or not isinstance(right, str | int | float):
            return _unknown(node)
        try:
            formula = ast.BinOp(ast.Name("left"), node.op, ast.Name("right"))
            return evaluate(formula, {"left": left, "right": right})
        except (ValueError, TypeError, ArithmeticError):
            return _unknown(node)

    def _comparison(self, node: ast.Compare, left: Any, right: Any) -> Any:
        if isinstance(left, Unknown | _Reference) or isinstance(right, Unknown | _Reference):
            return _unknown(node)
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
            return _unknown(node)

    def _comprehension(
        self, node: ast.ListComp | ast.DictComp | ast.GeneratorExp | ast.SetComp
    ) -> Any:
        if len(node.generators) != 1:
            return _unknown(node)
        generator = node.generators[0]
        items = self._items(self._value(generator.iter))
        if items is None:
            return _unknown(node)
        values: list[Any] = []  # of a dictionary, pairs
        self.scopes.append({})
        try:
            for item in items:
                self._assign(generator.target, item, ast.Pass())
                verdicts = [self._value(condition) for condition in generator.ifs]
                if any(isinstance(verdict, Unknown) for verdict in verdicts):
                    return _unknown(node)
                if not all(verdicts):
                    continue
                if isinstance(node, ast.DictComp):
                    key = self._value(node.key)
                    values.append((key, self._value(node.value)))
                else:
                    values.append(self._value(node.elt))
        finally:
            self.scopes.pop()
        if not isinstance(node, ast.DictComp):
            return values
        if not all(isinstance(key, str | int | float) for key, _ in values):
            return _unknown(node)
        return dict(values)

    # --- calls

    def _call(self, node: ast.Call) -> Any:
        function = self._value(node.func)
        arguments, keywords = self._arguments(node)
        kind = self._kind(function)
        if kind:
            return self._construct(kind, function, arguments, keywords, node)
        if isinstance(node.func, ast.Attribute):
            owner = self._value(node.func.value)
            result = self._method(owner, node.func.attr, arguments, keywords, node)
            if result is not _NOT_FOUND:
                return result
        name = self._called_name(function, node)
        result = self._known_call(_Call(name, arguments, keywords, node))
        if result is not _NOT_FOUND:
            return result
        if isinstance(function, _Class):
            return self._instance(function, arguments, keywords, node)
        if isinstance(function, _Reference) and function.node is not None:
            return self._call_function(function.node, arguments, keywords, node)
        self._note_passed(arguments, keywords, node)
        return _unknown(node)

    def _called_name(self, function: Any, node: ast.Call) -> str:
        """The last part of the name of what is called, under its own name and not an alias."""
        if isinstance(function, _Reference) and function.node is None:
            return function.name
        if isinstance(function, Unknown):
            return ast.unparse(node.func).rpartition(".")[2]
        return ""

    def _kind(self, function: Any) -> str:
        """Which of the calls that are read this is; empty: none of them."""
        if isinstance(function, _Class):
            for base in function.bases:
                kind = self._kind(base)
                if kind:
                    return kind
            return ""
        if isinstance(function, _Reference) and function.node is None:
            name = function.name
        elif isinstance(function, Unknown):
            name = function.text.rpartition(".")[2]
        else:
            return ""
        if name.endswith(self.suffixes_of_configs):
            return "GRPOConfig"
        if name.endswith(self.suffixes_of_trainers):
            return "GRPOTrainer"
        return name if name in _CALLS else ""

    def _arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        """The positional and the named arguments of a call; what `**unknown` has is under a name
        with `**`.
        """
        arguments: list[Any] = []
        keywords: dict[str, Any] = {}
        for argument in node.args:
            if not isinstance(argument, ast.Starred):
                arguments.append(self._value(argument))
                continue
            value = self._value(argument.value)
            if isinstance(value, list | tuple):
                arguments += value
            else:
                keywords[f"*{ast.unparse(argument.value)}"] = Unknown(ast.unparse(argument))
        for keyword in node.keywords:
            value = self._value(keyword.value)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif isinstance(value, dict):
                keywords |= value
            else:
                text = ast.unparse(keyword.value)
                keywords[f"**{text}"] = Unknown(text)
        return arguments, keywords

    def _construct(
        self,
        kind: str,
        function: Any,
        arguments: list[Any],
        keywords: dict[str, Any],
        node: ast.Call,
    ) -> Any:
        """The object that a call of `_CALLS` makes.

        Args:
            kind: its name in `_CALLS`.
            function: what is called: the class itself, or one of the script that derives from it.
            arguments: its positional arguments.
            keywords: its named arguments; one whose name is not known begins with `*`.
            node: the call.
        """
        names = _CALLS[kind]
        values = self._class_values(function)
        values |= dict(zip(names, arguments, strict=False))
        for name, value in keywords.items():
            if name.startswith("*"):
                self.reading.unread.append(f"line {node.lineno}: {name} of {kind}")
            else:
                values[name] = value
        for extra in arguments[len(names) :]:
            self.reading.unread.append(
                f"line {node.lineno}: the argument {self._display(extra)} of {kind}"
            )
        class_of_script = function if isinstance(function, _Class) else None
        if class_of_script is not None:
            self._note_constructors(class_of_script)
        instance = _Object(kind, values, class_of_script, node.lineno)
        if kind == "GRPOConfig":
            self.configs.append(instance)
        elif kind == "LoraConfig":
            self.loras.append(instance)
        elif kind == "GRPOTrainer":
            self.trainers.append(instance)
        else:
            self.punishment = values.get("soft_punish_cache", Unknown("..."))
        return instance

    def _note_constructors(self, of: _Class) -> None:
        """Name the methods of a class that may set options when an object is made."""
        for name, article in (("__init__", "an"), ("__post_init__", "a")):
            if name in of.methods:
                line = of.methods[name].lineno
                self.reading.unread.append(f"line {line}: {of.text} has {article} {name}")

    def _class_values(self, function: Any) -> dict[str, Any]:
        """The values in the body of a class of the script, which are options of what it makes."""
        return dict(function.values) if isinstance(function, _Class) else {}

    def _instance(
        self, of: _Class, arguments: list[Any], keywords: dict[str, Any], node: ast.Call
    ) -> _Object:
        """An object of a class of the script.

        Args:
            of: the class.
            arguments: its positional arguments.
            keywords: its named arguments; one whose name is not known begins with `*`.
            node: the call.
        """
        instance = _Object(of.text, dict(of.values), of, node.lineno)
        if "__init__" in of.methods:
            self._call_function(of.methods["__init__"], [instance, *arguments], keywords, node)
            return instance
        instance.values |= dict(zip(of.values, arguments, strict=False)) | keywords
        return instance

    def _call_function(
        self,
        function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        arguments: list[Any],
        keywords: dict[str, Any],
        node: ast.AST,
    ) -> Any:
        """Follow a function of the script and return its value.

        Args:
            function: the function.
            arguments: its positional arguments.
            keywords: its named arguments; one whose name is not known begins with `*`.
            node: the call, or the function itself where nobody is seen to call it.
        """
        self.called_functions.add(function)
        if self.depth >= MAX_DEPTH:
            return Unknown(ast.unparse(node) if isinstance(node, ast.expr) else "...")
        scope = self._parameters_of(function.args, arguments, keywords)
        if isinstance(function, ast.Lambda):
            self.scopes.append(scope)
            value = self._value(function.body)
            self.scopes.pop()
            return value
        global_names = [
            name
            for statement in ast.walk(function)
            if isinstance(statement, ast.Global)
            for name in statement.names
        ]
        scope[" global"] = tuple(global_names)
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

    def _parameters_of(
        self, parameters: ast.arguments, arguments: list[Any], keywords: dict[str, Any]
    ) -> dict[str, Any]:
        """The parameters of a function with their values: defaults, then what the call passes."""
        names = [parameter.arg for parameter in chain(parameters.posonlyargs, parameters.args)]
        scope: dict[str, Any] = {name: Unknown(name) for name in names}
        # defaults belong to the last positional parameters
        defaults = parameters.defaults
        names_with_default = names[len(names) - len(defaults) :]
        for name, default in zip(names_with_default, defaults, strict=True):
            scope[name] = self._value(default)
        keyword_only = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
        for parameter, keyword_default in keyword_only:
            name = parameter.arg
            scope[name] = Unknown(name)
            if keyword_default is not None:
                scope[name] = self._value(keyword_default)
        scope |= dict(zip(names, arguments, strict=False))
        extra_keywords: dict[str, Any] = {}
        for name, value in keywords.items():
            if name in scope:
                scope[name] = value
            else:
                extra_keywords[name] = value
        if parameters.vararg is not None:
            scope[parameters.vararg.arg] = arguments[len(names) :]
        if parameters.kwarg is not None:
            scope[parameters.kwarg.arg] = extra_keywords
        return scope

    def _note_passed(self, arguments: list[Any], keywords: dict[str, Any], node: ast.Call) -> None:
        """Name a function of another module that gets a configuration, which it may change."""
        if ast.unparse(node.func) in _HARMLESS_CALLS:
            return
        values = [*arguments, *keywords.values()]
        if any(isinstance(value, _Object) and value.kind == "GRPOConfig" for value in values):
            self.reading.assumed.append(f"{self._line(node)} may change the configuration")

    def _method(
        self, owner: Any, name: str, arguments: list[Any], keywords: dict[str, Any], node: ast.Call
    ) -> Any:
        """The value of a method's call; `_NOT_FOUND` if nothing is known of the method.

        Args:
            owner: the value that has the method.
            name: the method.
            arguments: its positional arguments.
            keywords: its named arguments; one whose name is not known begins with `*`.
            node: the call.
        """
        if isinstance(owner, dict):
            return self._of_dict(owner, name, arguments, keywords, node)
        if isinstance(owner, list) and name in _LIST_METHODS:
            return self._of_list(owner, name, arguments, node)
        if isinstance(owner, str) and name in _TEXT_METHODS:
            return self._of_text(owner, name, arguments, keywords, node)
        if isinstance(owner, _Data):
            return self._of_data(owner, name, node)
        if isinstance(owner, _Object):
            return self._of_object(owner, name, arguments, keywords, node)
        return _NOT_FOUND

    def _of_text(
        self, owner: str, name: str, arguments: list[Any], keywords: dict[str, Any], node: ast.Call
    ) -> Any:
        """The value of a text's method.

        Args:
            owner: the text.
            name: the method, one of `_TEXT_METHODS`.
            arguments: its positional arguments.
            keywords: its named arguments; one whose name is not known begins with `*`.
            node: the call.
        """
        values = [*arguments, *keywords.values()]
        are_plain = all(isinstance(value, str | int | float | list) for value in values)
        if not are_plain or len(str(values)) >= MAX_TEXT:
            return _unknown(node)
        try:
            return getattr(owner, name)(*arguments, **keywords)
        except (TypeError, ValueError, KeyError, IndexError):
            return _unknown(node)

    def _of_data(self, owner: _Data, name: str, node: ast.Call) -> Any:
        """The data set that a data set's method gives, with what the method does to the rows."""
        statement = self._line(node)
        result_data = _Data(owner.source, (*owner.changes, statement))
        if name == "train_test_split":
            return {"train": result_data, "test": result_data}
        if name in _ROW_METHODS:
            return _Data(owner.source, owner.changes)
        return result_data

    def _of_object(
        self,
        owner: _Object,
        name: str,
        arguments: list[Any],
        keywords: dict[str, Any],
        node: ast.Call,
    ) -> Any:
        """The value of an object's method.

        Args:
            owner: the object.
            name: the method.
            arguments: its positional arguments.
            keywords: its named arguments; one whose name is not known begins with `*`.
            node: the call.
        """
        if owner.of is not None and name in owner.of.methods:
            return self._call_function(owner.of.methods[name], [owner, *arguments], keywords, node)
        if owner.kind == "parser" and name == "add_argument":
            return self._add_argument(owner, arguments, keywords)
        if owner.kind == "parser" and name.startswith("parse"):
            return self._parser_result(owner, name, node)
        if name == "__setattr__" and len(arguments) == 2:
            self._set_attribute(owner, arguments[0], arguments[1], node)
        elif owner.kind == "GRPOConfig" and name not in _READERS:
            self.reading.unread.append(self._line(node))
        elif owner.kind == "GRPOTrainer" and name not in _TRAINER_METHODS:
            self.reading.assumed.append(f"{self._line(node)} is not followed")
        return _unknown(node)

    def _of_dict(
        self,
        owner: dict[Any, Any],
        name: str,
        arguments: list[Any],
        keywords: dict[str, Any],
        node: ast.Call,
    ) -> Any:
        """The value of a dictionary's method, which may change the dictionary.

        Args:
            owner: the dictionary.
            name: the method.
            arguments: its positional arguments.
            keywords: its named arguments; one whose name is not known begins with `*`.
            node: the call.
        """
        first = arguments[0] if arguments else None
        is_key = isinstance(first, str | int | float)
        if name == "update":
            for argument in [*arguments, keywords]:
                self._merge(owner, _mapping_of_pairs(argument), node)
            return None
        if name in ("get", "pop", "setdefault") and is_key:
            default = arguments[1] if len(arguments) > 1 else None
            if name == "setdefault":
                return owner.setdefault(first, self._value_in_branch(default, None, node))
            if name == "pop" and not self.num_open_branches:
                return owner.pop(first, default)
            return owner.get(first, default)
        match name:
            case "items":
                return [[key, value] for key, value in owner.items()]
            case "keys":
                return [*owner]
            case "values":
                return [*owner.values()]
            case "copy":
                return dict(owner)
        return _NOT_FOUND

    def _of_list(self, owner: list[Any], name: str, arguments: list[Any], node: ast.Call) -> Any:
        """The value of a list's method, which may change the list.

        Args:
            owner: the list.
            name: the method, one of `_LIST_METHODS`.
            arguments: its positional arguments.
            node: the call.
        """
        if name == "copy":
            return [*owner]
        if self.num_open_branches or name in ("remove", "pop", "insert"):
            owner.append(Unknown(self._line(node)))
        elif name == "append" and arguments:
            owner.append(arguments[0])
        elif name == "extend" and arguments and isinstance(arguments[0], list | tuple):
            owner += arguments[0]
        else:
            owner.append(Unknown(self._line(node)))
        return None

    def _known_call(self, call: _Call) -> Any:
        """The value of a function whose meaning is known here; `_NOT_FOUND` for any other."""
        for calls in (self._call_of_language, self._call_of_library, self._call_of_pure_function):
            value = calls(call)
            if value is not _NOT_FOUND:
                return value
        return _NOT_FOUND

    def _call_of_language(self, call: _Call) -> Any:
        """The value of a function that makes, reads or changes objects."""
        first = call.first
        if call.name == "dict":
            mapping: dict[Any, Any] = {}
            for argument in call.arguments:
                self._merge(mapping, _mapping_of_pairs(argument), call.node)
            return mapping | call.keywords
        num_arguments = len(call.arguments)
        if call.name == "setattr" and num_arguments == 3:
            owner, name, value = call.arguments
            self._set_attribute(owner, name, value, call.node)
            return None
        if call.name == "getattr" and num_arguments in (2, 3):
            if isinstance(call.arguments[1], str):
                return self._getattr(call.arguments, call.node)
            return _NOT_FOUND
        if call.name == "vars" and isinstance(first, _Object):
            return first.values
        if call.name in ("asdict", "to_dict") and isinstance(first, _Object):
            return dict(first.values)
        if call.name in ("replace", "copy", "deepcopy") and isinstance(first, _Object):
            return self._copy_of(first, call.keywords, call.node)
        if call.name in ("copy", "deepcopy") and isinstance(first, dict | list):
            return first.copy()
        is_callable = isinstance(first, _Reference | _Class | Unknown)
        if call.name == "partial" and is_callable and self._kind(first):
            return _Class("partial", [first], self._class_values(first) | call.keywords, {})
        if call.name in ("SimpleNamespace", "Namespace", "EasyDict", "DictConfig"):
            values = first if isinstance(first, dict) and call.arguments else {}
            return _Object(call.name, {**values, **call.keywords})
        return _NOT_FOUND

    def _getattr(self, arguments: list[Any], node: ast.Call) -> Any:
        """`getattr(owner, name)`, or `getattr(owner, name, default)`."""
        owner, name, *defaults = arguments
        value = self._attribute(owner, name, node)
        # an attribute of an unknown object may exist
        is_absent = isinstance(value, Unknown) and isinstance(owner, _Object)
        if defaults and is_absent:
            return defaults[0]
        return value

    def _call_of_library(self, call: _Call) -> Any:
        """The value of a function of the libraries that recipes use."""
        first = call.first
        if call.name == "ArgumentParser":
            return _Object("parser", {})
        if call.name in _PARSERS:
            classes = first if isinstance(first, list) else [first]
            return _Object("parser", {"classes": classes})
        if call.name == "field":
            return self._default_of_field(call.keywords, call.node)
        if call.name == "load_dataset":
            return self._dataset(call.arguments, call.keywords, call.node)
        if call.name in ("from_json", "from_csv", "from_parquet") and isinstance(first, str):
            return _Data(first)
        if call.name == "from_pretrained":
            return self._model(call.arguments, call.keywords, call.node)
        if call.name == "get_peft_config" and self.arguments is not None:
            return None  # use_peft and the rank are options of the command
        if call.name == "get_peft_model":
            return self._with_adapters(call.arguments, call.keywords)
        return _NOT_FOUND

    def _call_of_pure_function(self, call: _Call) -> Any:
        """The value of a function of plain values, or of the environment."""
        is_of_environment = call.name == "getenv"
        if call.name == "get":
            is_of_environment = "environ" in ast.unparse(call.node.func)
        if is_of_environment:
            # the environment of the script's own run is not that of this process
            if len(call.arguments) > 1:
                return call.arguments[1]
            return call.keywords.get("default", _unknown(call.node))
        first = call.first
        are_texts = all(isinstance(argument, str) for argument in call.arguments)
        if call.name == "join" and are_texts and "path" in ast.unparse(call.node.func):
            return "/".join(call.arguments)
        if call.name == "Path" and isinstance(first, str):
            return first
        are_integers = all(isinstance(argument, int) for argument in call.arguments)
        if call.name == "range" and call.arguments and are_integers:
            if len(call.arguments) > 3:
                return _unknown(call.node)
            return range(*call.arguments)
        if call.name not in _PURE or call.keywords:
            return _NOT_FOUND
        if any(self._is_open(argument) for argument in call.arguments):
            return _NOT_FOUND
        try:
            return _PURE[call.name](*call.arguments)
        except (TypeError, ValueError, OverflowError):
            return _unknown(call.node)

    def _is_open(self, value: Any) -> bool:
        """Whether a value is not known, or too large to compute with."""
        if isinstance(value, list | tuple):
            return any(map(self._is_open, value)) or len(value) > MAX_ITEMS
        return not isinstance(value, str | int | float | bool | dict | None)

    def _copy_of(self, of: _Object, keywords: dict[str, Any], node: ast.Call) -> _Object:
        copy = _Object(of.kind, dict(of.values), of.of, node.lineno)
        for name, value in keywords.items():
            if name.startswith("*"):
                self.reading.unread.append(f"line {node.lineno}: {name} of replace")
            else:
                copy.values[name] = value
        if copy.kind == "GRPOConfig":
            # the script continues with the copy
            self.configs = [config for config in self.configs if config is not of]
            self.configs.append(copy)
        return copy

    def _default_of_field(self, keywords: dict[str, Any], node: ast.Call) -> Any:
        """The default that `dataclasses.field` gives."""
        factory = keywords.get("default_factory")
        if isinstance(factory, _Reference) and isinstance(factory.node, ast.Lambda):
            return self._value(factory.node.body)
        if isinstance(factory, Unknown) and factory.text in ("dict", "list"):
            return {} if factory.text == "dict" else []
        return keywords.get("default", _unknown(node))

    def _add_argument(
        self, parser: _Object, arguments: list[Any], keywords: dict[str, Any]
    ) -> None:
        """Follow `parser.add_argument(...)`: the argument has its default, as if it is not passed."""
        flags = [flag for flag in arguments if isinstance(flag, str)]
        long_flags = [flag for flag in flags if flag.startswith("--")]
        flag = next(iter([*long_flags, *flags]), "")
        name = keywords.get("dest") or flag.lstrip("-").replace("-", "_")
        if not isinstance(name, str):
            return
        is_required = keywords.get("required") or not flag.startswith("-")
        action = keywords.get("action")
        value: Any = None
        if is_required:
            value = Unknown(f"--{name}")
        elif action in ("store_true", "store_false"):
            value = action == "store_false"
        value = keywords.get("default", value)
        # argparse converts a default that is a text
        convert = keywords.get("type")
        type_name = convert.text if isinstance(convert, Unknown) else ""
        if isinstance(value, str) and type_name in ("int", "float"):
            call = ast.Call(ast.Name(type_name), [], [])
            value = self._known_call(_Call(type_name, [value], {}, call))
        parser.values[name] = value

    def _parser_result(self, parser: _Object, name: str, node: ast.Call) -> Any:
        """What a parser of arguments gives for those of the command."""
        if self.arguments is None:
            self.reading.assumed.append(
                f"line {node.lineno}: the command's own arguments are taken as absent; a shell"
                " script with the command is read with them"
            )
        arguments = dict(self.arguments or {})
        classes = parser.values.get("classes")
        if classes is None:
            namespace = _Object("arguments", parser.values | arguments)
            return [namespace, []] if "known" in name else namespace
        # what the script's own classes take is no option of the trainer
        own_names: set[str] = set()
        for kind in classes:
            if isinstance(kind, _Class) and self._kind(kind) != "GRPOConfig":
                own_names |= kind.values.keys()
        options = {name: value for name, value in arguments.items() if name not in own_names}
        instances: list[Any] = []
        for kind in classes:
            if self._kind(kind) == "GRPOConfig":
                instances.append(self._construct("GRPOConfig", kind, [], options, node))
            elif isinstance(kind, _Class):
                instances.append(self._instance(kind, [], arguments, node))
            else:
                name_of_kind = getattr(kind, "name", "arguments")
                instances.append(_Object(name_of_kind, dict(arguments), None, node.lineno))
        return instances

    def _dataset(self, arguments: list[Any], keywords: dict[str, Any], node: ast.Call) -> Any:
        """The data of `load_dataset(name, configuration, split=..., data_files=...)`."""
        positions = ("path", "name", "data_dir", "data_files", "split")
        options = dict(zip(positions, arguments, strict=False)) | keywords
        path = options.get("path")
        split = options.get("split")
        if isinstance(split, list) and all(isinstance(part, str) for part in split):
            # a data set for each of them
            return [self._dataset([], {**options, "split": part}, node) for part in split]
        files = options.get("data_files")
        if path in ("json", "csv", "parquet", "text") or files is not None:
            return self._data_of_files(files, split, node)
        name = options.get("name")
        is_open = isinstance(split, Unknown) or isinstance(name, Unknown)
        if not isinstance(path, str) or is_open:
            return _unknown(node)
        data = _Data(f"hub:{path}")
        if name is not None:
            data = _Data({"hub": path, "config": name})
        return data.split(split) if isinstance(split, str) else data

    def _data_of_files(self, files: Any, split: Any, node: ast.Call) -> Any:
        """The data of `data_files`: a file, a list, or a dictionary of them by split."""
        if isinstance(files, str):
            return _Data(files)
        if isinstance(files, list) and files and all(isinstance(file, str) for file in files):
            return _Data(files[0] if len(files) == 1 else files)
        if not isinstance(files, dict):
            return _unknown(node)
        data = _Data({"files": files})
        return data.split(split) if isinstance(split, str) else data

    def _model(self, arguments: list[Any], keywords: dict[str, Any], node: ast.Call) -> Any:
        """The model of `from_pretrained`; unsloth's gives the tokenizer too."""
        names = [keyword for keyword in _MODEL_NAMES if keyword in keywords]
        name = arguments[0] if arguments else None
        if not arguments and names:
            name = keywords[names[0]]
        if name is None:
            return _unknown(node)
        options = [
            f"{keyword}={self._display(value)}"
            for keyword, value in keywords.items()
            if keyword not in _MODEL_NAMES
        ]
        owner = ast.unparse(node.func)
        is_model = "tokenizer" not in owner.lower() and "processor" not in owner.lower()
        if options and is_model:
            self.reading.assumed.append(
                f"line {node.lineno}: the model is loaded with {', '.join(options)}"
            )
        model = _Model(name)
        is_pair = any(class_name in owner for class_name in _CLASSES_OF_UNSLOTH)
        return [model, Unknown("tokenizer")] if is_pair else model

    def _with_adapters(self, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """`get_peft_model(model, LoraConfig(...))`, and unsloth's with the values themselves."""
        options = dict(zip(("model", "peft_config"), arguments, strict=False))
        options = {**keywords, **options}
        model = options.pop("model", None)
        config = options.pop("peft_config", None)
        values = dict(config.values) if isinstance(config, _Object) else {}
        values |= options
        if isinstance(model, _Model):
            return _Model(model.name, {**model.lora, **values})
        return Unknown("get_peft_model(...)")

    # --- texts

    def _line(self, node: ast.AST) -> str:
        """A statement with its line, for people."""
        text = " ".join(ast.unparse(node).split())
        if len(text) >= MAX_SHOWN:
            text = f"{text[: MAX_SHOWN - 3]}..."
        return f"line {getattr(node, 'lineno', 0)}: {text}"

    def _display(self, value: Any) -> str:
        """A value for people, as it could stand in the script."""
        if isinstance(value, Unknown):
            return value.text
        if isinstance(value, _Reference | _Class):
            return value.text
        if isinstance(value, _Object):
            return f"{value.kind}(...)"
        if isinstance(value, _Data):
            return str(value.source)
        if isinstance(value, _Model):
            return self._display(value.name)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(self._display, value))}]"
        if isinstance(value, dict):
            pairs = [f"{key!r}: {self._display(item)}" for key, item in value.items()]
            return f"{{{', '.join(pairs)}}}"
        return repr(value)


_NOT_FOUND: Any = object()


def _mapping_of_pairs(value: Any) -> Any:
    """The mapping that a list of pairs stands for; anything else is returned."""
    if not isinstance(value, list):
        return value
    if not all(isinstance(item, list) and len(item) == 2 for item in value):
        return value
    return {key: item for key, item in value if isinstance(key, str)}


def _option_of_reference(reference: _Reference) -> Any:
    """The value of an option that names a function, a class or a type of torch."""
    if reference.text.startswith("torch:"):
        return reference.name
    if ":" in reference.text:
        return reference.text
    return Unknown(reference.text)


def _unknown(node: ast.AST) -> Unknown:
    """The value of an expression that only the running script knows."""
    return Unknown(ast.unparse(node))


def _is_cell(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is a cell of a marimo notebook: `@app.cell`, `@app.cell(hide_code=True)`."""
    targets = [getattr(decorator, "func", decorator) for decorator in node.decorator_list]
    return any(ast.unparse(target) == "app.cell" for target in targets)


def _has_item(items: list[Any], position: Any) -> bool:
    return isinstance(position, int) and -len(items) <= position < len(items)


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
