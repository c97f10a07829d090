"""Data specs: the values of `data.train` and `data.eval`, parsed into typed sources."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from dapo.core.errors import DataError
from dapo.core.text import did_you_mean

BENCHMARKS: Mapping[str, Mapping[str, Any]] = {
    "aime24": {
        "hub": "HuggingFaceH4/aime_2024",
        "split": "train",
        "prompt": "problem",
        "answer": "answer",
    },
    "aime25": {"hub": "math-ai/aime25", "split": "test", "prompt": "problem", "answer": "answer"},
    "math500": {
        "hub": "HuggingFaceH4/MATH-500",
        "split": "test",
        "prompt": "problem",
        "answer": "answer",
    },
    "gsm8k": {
        "hub": "openai/gsm8k",
        "config": "main",
        "split": "test",
        "prompt": "question",
        "answer": "answer",
    },
    "amc23": {"hub": "math-ai/amc23", "split": "test", "prompt": "question", "answer": "answer"},
}
"""Data specs by their short names."""

INSTRUCTION = (
    "Solve the problem step by step. The last line of your response must be of the form Answer:"
    " $ANSWER, where $ANSWER is the answer to the problem."
)
"""Instruction that `dapo eval` adds to benchmarks unless data.instruction is set; verifiers parse
this format.
"""

Kind: TypeAlias = Literal["path", "hub", "builtin", "gym", "environment"]
TaskKind: TypeAlias = Literal["builtin", "gym", "environment"]
KINDS: tuple[Kind, ...] = ("path", "hub", "builtin", "gym", "environment")
MIX = "mix"  # the key of a mapping of data specs by name
TASK_KINDS: tuple[TaskKind, ...] = ("builtin", "gym", "environment")
FILE_TYPES = (".jsonl", ".parquet", ".csv", ".tsv", ".json")  # the supported file endings
EXPECTED = (
    "expected a path (.jsonl, .parquet, .csv, .tsv, .json), hub:NAME[:SPLIT], builtin:TASK,...,"
    f" gym:TASK,..., environment, a benchmark ({', '.join(BENCHMARKS)}) or a mapping with one of"
    " the keys path, hub, builtin, gym, environment, mix"
)
_OPTIONS: dict[Kind, tuple[str, ...]] = {
    "path": ("path", "prompt", "answer", "remove", "size"),
    "hub": ("hub", "config", "split", "prompt", "answer", "remove", "size"),
    "builtin": ("builtin", "size", "seed"),
    "gym": ("gym", "size", "seed"),
    "environment": ("environment", "size", "seed"),
}
_TEXTS = ("path", "hub", "config", "split", "prompt", "answer", "remove")
_BOUNDS = {"size": (1, 10**9), "seed": (0, 2**63 - 1)}
MAX_GENERATED = 10**6
_PART_NAME = re.compile(r"[A-Za-z0-9_-]+")
_EXAMPLES = {"builtin": "sums,products", "gym": "chain_sum,gcd"}


@dataclass(frozen=True)
class Columns:
    """The columns of the question and the answer; None: the first column with a known name."""

    prompt: str | None = None
    answer: str | None = None
    remove: str | None = None  # a regular expression; its matches are deleted from answers

    def cleaned(self, answer: str) -> str:
        """Return an answer without what `remove` matches."""
        return answer if self.remove is None else re.sub(self.remove, "", answer)


@dataclass(frozen=True)
class CountingColumns(Columns):
    """Columns that count the answers which they have cleaned."""

    counts: Counter[str] = field(default_factory=Counter)  # the keys are `read` and `changed`

    def cleaned(self, answer: str) -> str:
        """Return an answer without what `remove` matches, and count it."""
        cleaned_answer = super().cleaned(answer)
        self.counts["read"] += 1
        self.counts["changed"] += cleaned_answer != answer
        return cleaned_answer


ANY_COLUMNS = Columns()


@dataclass(frozen=True)
class FileSource:
    """A file of problems."""

    path: Path
    columns: Columns = ANY_COLUMNS
    size: int | None = None  # the number of first rows to read; None: all
    kind: ClassVar[Kind] = "path"

    @property
    def label(self) -> str:
        return self.path.stem


@dataclass(frozen=True)
class HubSource:
    """A data set of the Hugging Face hub."""

    name: str
    split: str = "train"  # an evaluation reads `train` too, unless the spec names another split
    config: str | None = None  # the data set's configuration (`main` of openai/gsm8k)
    columns: Columns = ANY_COLUMNS
    size: int | None = None
    benchmark: str | None = None  # its key in BENCHMARKS
    kind: ClassVar[Kind] = "hub"

    @property
    def label(self) -> str:
        return self.benchmark or self.name.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True)
class TaskSource:
    """Generated problems: tasks in round-robin order, or those of the run's environment."""

    kind: TaskKind
    tasks: Mapping[str, Mapping[str, Any]]  # task -> its options
    size: int | None = None  # over all tasks together; None: the default for training or evaluation
    seed: int | None = None

    @property
    def label(self) -> str:
        return _joined(self.tasks)


OneSource: TypeAlias = FileSource | HubSource | TaskSource


@dataclass(frozen=True)
class MixSource:
    """Several sources under names; a problem's `source` is the name of its part."""

    parts: Mapping[str, OneSource]

    @property
    def label(self) -> str:
        return _joined(self.parts)


Source: TypeAlias = OneSource | MixSource


def kinds(source: Source) -> frozenset[Kind]:
    """Return the kind of a source, or the kinds of the parts of a mix."""
    if isinstance(source, MixSource):
        return frozenset(part.kind for part in source.parts.values())
    return frozenset([source.kind])


def paths_in(spec: str | Mapping[str, Any], name: str) -> dict[str, str]:
    """Return possible file paths in a spec by option; the spec may be invalid."""
    if isinstance(spec, str):
        return {name: spec}
    paths = {}
    if isinstance(spec.get("path"), str):
        paths[f"{name}.path"] = spec["path"]
    parts = spec.get(MIX)
    if isinstance(parts, Mapping):
        for part, part_spec in parts.items():
            if isinstance(part_spec, str | Mapping):
                paths |= paths_in(part_spec, f"{name}.{MIX}.{part}")
    return paths


def mix_of(specs: Sequence[Any]) -> dict[str, Any]:
    """Make a mix of a list of data sources, named by files, data sets and tasks."""
    parts: dict[str, Any] = {}
    for number, spec in enumerate(specs, start=1):
        try:
            source = parse_spec(str(spec) if isinstance(spec, Path) else spec)
            label = re.sub(r"[^A-Za-z0-9_-]+", "-", source.label).strip("-")
        except DataError:  # reported with the name of the part
            label = ""
        name = label or f"part{number}"
        if name in parts:
            name = f"{name}-{number}"
        parts[name] = spec
    return {MIX: parts}


def parse_spec(spec: str | Mapping[str, Any] | Source) -> Source:
    """Parse a spec; a parsed one is returned.

    Raises DataError with the expected form, the value and similar names.
    """
    if isinstance(spec, Source):
        return spec
    if isinstance(spec, str):
        return _from_string(spec)
    if isinstance(spec, Mapping):
        return _from_mapping({str(key): value for key, value in spec.items()})
    if isinstance(spec, list | tuple) and spec:
        return _mix(mix_of(spec))
    raise DataError(f"data source {spec!r} is a {type(spec).__name__}; {EXPECTED}")


def _from_string(spec: str) -> Source:
    if not spec.strip():
        raise DataError(f"the data source is empty; {EXPECTED}")
    spec = spec.strip()
    if spec in BENCHMARKS:
        return _source("hub", BENCHMARKS[spec], benchmark=spec)
    if spec == "environment":
        return _source("environment", {"environment": None})
    prefix, colon, value = spec.partition(":")
    if colon and prefix == "hub":
        name, _, split = value.partition(":")
        options = {"hub": name}
        if split:
            options["split"] = split
        return _source("hub", options)
    for kind in TASK_KINDS:
        if colon and prefix == kind:
            return _source(kind, {kind: value})
    # one letter is a Windows drive
    if colon and len(prefix) > 1 and prefix.isidentifier() and not spec.endswith(FILE_TYPES):
        raise DataError(
            f"data source {spec!r}: unknown kind {prefix!r}, {did_you_mean(prefix, KINDS[1:])};"
            f" {EXPECTED}"
        )
    return _source("path", {"path": spec})


_ANSWERS = ("response", "completion", "output", "solution")
"""What other programs call the column of answers."""


def _from_mapping(spec: dict[str, Any]) -> Source:
    kinds = [kind for kind in (*KINDS, MIX) if kind in spec]
    if len(kinds) != 1:
        problem = f"the keys {', '.join(spec) or '(none)'}"
        if kinds:
            problem = f"both {' and '.join(kinds)}"
        raise DataError(f"data source: {problem}; {EXPECTED}")
    if MIX in spec:
        return _mix(spec)
    kind: Kind = kinds[0]  # type: ignore[assignment]
    for key in spec:
        if key not in _OPTIONS[kind]:
            hint = did_you_mean(key, _OPTIONS[kind])
            if key in _ANSWERS and "answer" in _OPTIONS[kind]:
                hint = f"the column of answers or responses is named by answer: {spec[key]}"
            raise DataError(f"data source {kind}: unknown option {key!r}; {hint}")
    options = {key: value for key, value in spec.items() if value is not None or key == kind}
    return _source(kind, options)


def without_other_kinds(base: Mapping[str, Any], top: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out of a source what the kind of another source, which replaces its kind, has not.

    `{hub: org/a, split: test, prompt: question}` under `{path: a.jsonl}` keeps its prompt.
    """
    kinds = [kind for kind in (*KINDS, MIX) if kind in top]
    if len(kinds) != 1 or kinds[0] in base:
        return base
    # a mix has no options of its own
    kept = [key for kind, keys in _OPTIONS.items() if kind == kinds[0] for key in keys]
    return {key: value for key, value in base.items() if key in kept}


def _mix(spec: Mapping[str, Any]) -> MixSource:
    sources = spec[MIX]
    extra = [key for key in spec if key != MIX]
    if extra:
        raise DataError(
            f"data source mix: unknown option {extra[0]!r}; options belong to the parts of the mix"
        )
    if not isinstance(sources, Mapping) or not sources:
        raise DataError(
            f"data source mix: expected a mapping of names to data sources, got {sources!r}"
        )
    parts: dict[str, OneSource] = {}
    for name, inner in sources.items():
        if not _PART_NAME.fullmatch(str(name)):
            raise DataError(
                f"data source mix: {name!r} is not a valid name of a part; use letters, digits, _"
                " and -"
            )
        try:
            part = parse_spec(inner)
        except DataError as error:
            raise DataError(
                f"data source mix, part {name}: {str(error).removeprefix('data source ')}"
            ) from None
        if isinstance(part, MixSource):
            raise DataError(
                f"data source mix, part {name}: a mix within a mix; name its parts in the outer one"
            )
        parts[str(name)] = part
    return MixSource(parts)


def _source(kind: Kind, spec: Mapping[str, Any], *, benchmark: str | None = None) -> OneSource:
    """Make a source of the options of a spec. Raises DataError."""
    texts = {key: _text(value, f"{kind}: {key}") for key, value in spec.items() if key in _TEXTS}
    bounds = dict(_BOUNDS)
    # a file is read as far as it goes, but tasks would generate problems without end
    if kind in TASK_KINDS:
        bounds["size"] = (1, MAX_GENERATED)
    integers = {}
    for key, (low, high) in bounds.items():
        if key in spec:
            integers[key] = _integer(spec[key], f"{kind}: {key}", low, high)
    columns = Columns(texts.get("prompt"), texts.get("answer"), _pattern(texts.get("remove"), kind))
    size = integers.get("size")
    if kind == "path":
        return FileSource(Path(texts["path"]).expanduser(), columns, size)
    if kind == "hub":
        return HubSource(
            texts["hub"], texts.get("split", "train"), texts.get("config"), columns, size, benchmark
        )
    if kind == "environment" and spec[kind]:
        raise DataError(
            f"data source environment takes no options, got {spec[kind]!r}; write environment: {{}}"
        )
    tasks: dict[str, dict[str, Any]] = {kind: {}}
    if kind != "environment":
        tasks = _task_options(kind, spec[kind])
    return TaskSource(kind, tasks, size, integers.get("seed"))


def _task_options(kind: str, value: object) -> dict[str, dict[str, Any]]:
    """Return the options of each task in `"a,b"`, `[a, b]` or `{a: {option: value}, b: null}`."""
    if isinstance(value, str):
        value = value.split(",")
    if isinstance(value, Mapping):
        tasks = [(str(name), options) for name, options in value.items()]
    elif isinstance(value, Sequence) and all(isinstance(name, str) for name in value):
        tasks = [(name.strip(), None) for name in value if name.strip()]
    else:
        raise DataError(
            f"data source {kind}: expected names of tasks or a mapping of tasks to options, got"
            f" {value!r}"
        )
    if not tasks:
        raise DataError(
            f"data source {kind}: no task is named; write for example {kind}:{_EXAMPLES[kind]}"
        )
    by_name: dict[str, dict[str, Any]] = {}
    for name, options in tasks:
        if name in by_name:
            raise DataError(f"data source {kind}: task {name} is listed twice")
        if options is not None and not isinstance(options, Mapping):
            expected = "must be a mapping (option: value)"
            raise DataError(
                f"data source {kind}: the options of task {name} {expected}, got {options!r}"
            )
        by_name[name] = {str(key): option for key, option in (options or {}).items()}
    return by_name


def _joined(names: Iterable[str]) -> str:
    """Return names as one; of many the first, and how many others there are."""
    first, *others = names
    if len(others) >= 4:
        return f"{first}+{len(others)}"
    return "+".join([first, *others])


def _text(value: object, name: str) -> str:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise DataError(f"data source {name} must be text, got {value!r}")
    return str(value)


def _pattern(text: str | None, kind: Kind) -> str | None:
    """Return a regular expression that compiles. Raises DataError for another one."""
    if text is None:
        return None
    try:
        re.compile(text)
    except re.error as error:
        raise DataError(
            f"data source {kind}: remove is no regular expression ({error}): {text!r}; a backslash"
            " before a sign such as ( takes it literally"
        ) from None
    return text


def _integer(value: object, name: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise DataError(f"data source {name} must be an integer of at least {low}, got {value!r}")
    if value > high:
        raise DataError(f"data source {name} must be at most {high}, got {value!r}")
    return value
