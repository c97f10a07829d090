"""Answers a call with names of other libraries by the same call with the names of dapo.

The tables are foreign_names.tsv, for what only a Python call has, and config/other_names.tsv.
"""

import ast
import csv
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any

from dapo.api.call_site import UNKNOWN, CallSite, call_site, literal_text
from dapo.api.python_words import assigned, in_python, keyword_of
from dapo.config import Config
from dapo.config.messages import nearest_option
from dapo.config.option_fields import names_by_keyword, options_of
from dapo.config.other_names import OTHERS, TITLES, Peer, peer_that_knows, rows_named
from dapo.config.run_options import EvalConfig
from dapo.core.text import did_you_mean, shorten
from dapo.libs.foreign_options import Unknown, leaves_of

LINE = 88
"""The width up to which a call stands on one line."""
KEYWORDS = frozenset({"teacher", "tools", "demonstrations", "agent"})
"""Keywords of calls with options that are no options."""
CALLS: Mapping[str, str] = {
    "train": "train",
    "check": "train",
    "resume": "train",
    "session": "train",
    "evaluate": "evaluate",
    "compare": "evaluate",
    "collect": "collect",
    "generate": "generate",
    "chat": "generate",
    "export": "export",
    "load": "load",
}
"""The rows of foreign_names.tsv that hold for a function, after those of its own name."""


@dataclass(frozen=True)
class Name:
    """A row of foreign_names.tsv: a name of another library, and the keyword here."""

    here: str
    """Empty: there is none, and the remark says what to do."""
    remark: str


def _read_table() -> dict[str, dict[str, Name]]:
    """Return the rows by call and name."""
    lines = Path(__file__).with_name("foreign_names.tsv").read_text("utf-8").splitlines()
    tables: dict[str, dict[str, Name]] = {}
    for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
        for name in row["theirs"].split():
            tables.setdefault(row["call"], {})[name] = Name(row["here"], row["remark"])
    return tables


NAMES = _read_table()


@dataclass(frozen=True)
class Function:
    """What is known of a function of the Python interface."""

    name: str
    parameters: Sequence[str]
    takes_options: bool
    """Whether it takes the options of a run as keywords."""

    @property
    def kind(self) -> str:
        return CALLS.get(self.name, "")

    def takes(self, keyword: str) -> bool:
        """Return True if the function takes a keyword, or one that is misspelt in a section."""
        return keyword in self.parameters or (self.takes_options and is_option(keyword))

    def row_of(self, keyword: str) -> Name | None:
        """Return the row of a name that the function does not take."""
        if keyword in self.parameters:
            return None
        row = NAMES.get(self.name, {}).get(keyword)
        if row is None and not self.takes(keyword):
            row = NAMES.get(self.kind, {}).get(keyword)
        if row is not None and row.here == "data" and "problems" in self.parameters:
            row = Name("problems", row.remark)  # of a session
        return row


@dataclass
class Answer:
    """The keywords of a call with names of other libraries, in the names of dapo."""

    function: Function
    site: CallSite
    extra: Sequence[str] = ()
    """Arguments that were given by position."""
    ours: dict[str, str] = field(default_factory=dict)
    """The text of each keyword of the call to paste."""
    notes: list[str] = field(default_factory=list)
    """What has no place in that call, and why."""
    systems: set[str] = field(default_factory=set)
    num_foreign: int = 0
    single: str = ""
    """The whole answer if the call has one such name."""
    unknown: list[str] = field(default_factory=list)
    """Names that nobody knows, with the nearest ones."""

    def text(self) -> str:
        """Return the message."""
        is_single = self.num_foreign == 1 and not self.unknown and not self.extra
        if is_single and self.single:
            return self.single
        if is_single and len(self.notes) == 1:
            return self.notes[0]
        heads = []
        if self.extra:
            arguments = " and ".join(self.extra)
            heads.append(f"{arguments} by position, where a name is expected")
        if self.num_foreign:
            libraries = " and ".join(sorted(self.systems)) or "another library"
            heads.append(f"names of {libraries}")
        lines = [f"{', and '.join(heads)}; the same call here:", "", *self._call()]
        if self.notes or self.unknown:
            lines.append("")
        lines += [f"  {line}" for line in [*self.unknown, *self.notes]]
        return "\n".join(lines)

    def _call(self) -> list[str]:
        """Return the lines of the call to paste."""
        names = sorted(self.ours, key=lambda name: name not in _BEGIN)
        keywords = {name: self.ours[name] for name in names if "." not in name}
        dotted = {name: text for name, text in self.ours.items() if "." in name}
        arguments = []
        first_name = _FIRST.get(self.function.name, "")
        first = keywords.pop(first_name, None)
        if first is not None:
            arguments.append(first)
        arguments += [f"{name}={text}" for name, text in keywords.items()]
        if dotted:
            inner = ", ".join(f'"{name}": {text}' for name, text in dotted.items())
            arguments.append(f"**{{{inner}}}")
        function = self.site.function or f"dapo.{self.function.name}"
        line = f"    {function}({', '.join(arguments)})"
        if len(line) <= LINE:
            return [line]
        inner_lines = [f"        {argument}," for argument in arguments]
        return [f"    {function}(", *inner_lines, "    )"]


_BEGIN = ("model", "data", "eval_data", "reward")
"""The keywords that a call begins with."""
_FIRST = {
    "train": "model",
    "session": "model",
    "check": "model",
    "resume": "path",
    "evaluate": "data",
    "compare": "other",
    "collect": "problems",
    "generate": "prompt",
    "export": "path",
    "load": "path",
}
"""The argument that is written without its name."""


def foreign_answer(
    function: Function, keywords: Mapping[str, Any], site: CallSite, extra: Sequence[str] = ()
) -> str | None:
    """Return the answer to a call with names of other libraries; None: it has none.

    Args:
        function: the function that is called.
        keywords: the arguments of the call by name.
        site: the source of the call.
        extra: the arguments that were given by position, and have names here.
    """
    keywords, texts = _expanded(keywords, site)
    answer = Answer(function, site, extra)
    theirs: dict[str, Any] = {}
    for name, value in keywords.items():
        text = texts.get(name) or site.text_of(value, name)
        row = function.row_of(name)
        if row is not None:
            answer.num_foreign += 1
            system, _ = rows_named(name, None)
            if system is not None and function.kind == "train":
                answer.systems.add(TITLES[system])
            _add_named(answer, name, row, text)
        elif function.takes(name):
            answer.ours[name] = text
        else:
            theirs[name] = value
    unknown = theirs
    if function.takes_options:
        unknown = _add_options(answer, theirs, keywords, texts)
    has_only_own_names = not answer.num_foreign and not extra
    if has_only_own_names and (function.kind == "train" or not unknown):
        # the configuration answers misspelt options, together with wrong values
        return None
    answer.unknown = [_nearest(function, name, value) for name, value in unknown.items()]
    if has_only_own_names:
        return "\n".join(answer.unknown)
    _weigh_rewards(answer, keywords)
    return answer.text()


def may_be_foreign(function: Function, keywords: Mapping[str, Any]) -> bool:
    """Return True if a keyword is none of the function's, or holds those of another library."""
    return any(
        function.row_of(name) is not None
        or not function.takes(name)
        or _settings_in(name, value) is not None
        for name, value in keywords.items()
    )


def _nearest(function: Function, name: str, value: Any) -> str:
    """Return the answer for a name that no table has."""
    own = list(function.parameters)
    if function.kind == "evaluate":
        own += EvalConfig.model_fields
    near = get_close_matches(name, own, n=1, cutoff=0.75)
    if function.takes_options and not near:
        return in_python(f"unknown option {name}; {nearest_option([name], value)}", own)
    kind = "option" if function.takes_options else "keyword"
    return f"unknown {kind} {name}; {did_you_mean(name, own)}"


def is_option(keyword: str) -> bool:
    """Return True if a keyword is an option, or may be one that is misspelt within a section."""
    first = keyword.partition(".")[0]
    return (
        keyword in KEYWORDS
        or keyword in names_by_keyword()
        or (first in Config.model_fields and not _is_foreign(keyword))
    )


def _is_foreign(name: str) -> bool:
    """Return True if a dotted name is an option of another library, and none here."""
    own_names = {option for option, _ in options_of()}
    if "." not in name or name in own_names:
        return False
    return any(table.rows_of(name) for table in OTHERS.values())


def _expanded(keywords: Mapping[str, Any], site: CallSite) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the keywords with those in `args=GRPOConfig(...)` and in sections of verl, and texts.

    The second value has the texts of keywords that stand within another argument.
    """
    expanded: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for name, value in keywords.items():
        settings = _settings_in(name, value)
        if settings is None:
            expanded[name] = value
            continue
        node = site.nodes.get(name)
        sources = {
            keyword.arg: keyword.value
            for keyword in getattr(node, "keywords", ())
            if keyword.arg is not None
        }
        for option, item in settings.items():
            expanded[option] = item
            if option in sources:
                texts[option] = literal_text(item) or ast.unparse(sources[option])
    return expanded, texts


_SOURCE_KINDS = frozenset({"builtin", "environment", "gym", "hub", "mix", "path"})
"""The keys of which each data source has one."""


def _settings_in(name: str, value: Any) -> dict[str, Any] | None:
    """Return the options that an argument holds: a configuration object or a section of verl."""
    if isinstance(value, Mapping):
        if name == "args":
            return dict(value)
        if _SOURCE_KINDS & value.keys():  # a data source, whose keys are its own
            return None
        leaves = dict(leaves_of(name, value))
        return leaves if any(_is_foreign(leaf) for leaf in leaves) else None
    if isinstance(value, str | Path) or name not in ("args", "config") or value is None:
        return None
    if not dataclasses.is_dataclass(value):
        return dict(vars(value)) if hasattr(value, "__dict__") else None
    settings = {}  # without those that have their defaults
    for option in dataclasses.fields(value):
        item = getattr(value, option.name)
        default = option.default
        if option.default_factory is not dataclasses.MISSING:
            default = option.default_factory()
        if item != default and not option.name.startswith("_"):
            settings[option.name] = item
    return settings


def _add_named(answer: Answer, name: str, row: Name, text: str) -> None:
    """Add a name of foreign_names.tsv."""
    shown = shorten(text, 60)
    if not row.here:
        answer.notes.append(f"{name}={shown} has no keyword here: {row.remark}")
        return
    events = [
        f"{parameter}=FUNCTION"
        for parameter in answer.function.parameters
        if parameter.startswith("on_")
    ]
    if row.here == "on_step" and events:
        answer.notes.append(f"{name}={shown} is {' or '.join(events)} here: {row.remark}")
        return
    answer.ours.setdefault(row.here, text)
    answer.single = f"{name}={shown} is {row.here}={shown} here"


def _add_options(
    answer: Answer,
    theirs: Mapping[str, Any],
    keywords: Mapping[str, Any],
    texts: Mapping[str, str],
) -> dict[str, Any]:
    """Add options of other trainers; return the names that no table has."""
    unknown: dict[str, Any] = {}
    by_system: dict[Peer, dict[str, Any]] = {}
    full_names: dict[str, str] = {}
    main = peer_that_knows(theirs)
    for name, value in theirs.items():
        text = texts.get(name) or answer.site.text_of(value, name)
        option = _OPTIONS_BY_UNDERSCORES.get(name.replace("__", "_"))
        if option is not None:
            answer.num_foreign += 1
            _add_option(answer, name, option, text)
            continue
        system, rows = rows_named(name, main)
        if name == "reward_weights":
            answer.num_foreign += 1
            continue
        if system is None:
            unknown[name] = value
            continue
        answer.num_foreign += 1
        answer.systems.add(TITLES[system])
        row = rows[0]
        is_plain = literal_text(value) is not None
        if not is_plain and row.keeps_value:
            _add_option(answer, name, row.ours[0], text)
            continue
        is_pattern = "*" in row.name
        options = by_system.setdefault(system, {})
        options[name if is_pattern else row.name] = value if is_plain else Unknown(text)
        full_names[row.name] = name
    for system, options in by_system.items():
        _add_system(answer, system, options, full_names, keywords, texts)
    return unknown


def _add_option(answer: Answer, name: str, option: str, text: str) -> None:
    """Add an option that is written in another way: `name=text` is `option=text` here."""
    keyword = keyword_of(option) or option
    answer.ours.setdefault(keyword, text)
    answer.single = f"{name}={text} is {keyword}={text} here"


def _add_system(
    answer: Answer,
    system: Peer,
    options: Mapping[str, Any],
    full_names: Mapping[str, str],
    keywords: Mapping[str, Any],
    texts: Mapping[str, str],
) -> None:
    """Add the options of one trainer, by its table.

    Args:
        answer: what they are added to.
        system: the trainer.
        options: their values by the names of its table.
        full_names: the name in the call of each of those names.
        keywords: the arguments of the call.
        texts: the sources of those within another argument.
    """
    translation = OTHERS[system].translate(options)
    num_notes = len(answer.notes)
    pairs = []
    used_names: set[str] = set()
    rows = [row for name in options for row in OTHERS[system].rows_of(name)]
    # the translation has the trainer's defaults too
    counterparts = {option.partition("=")[0] for row in rows for option in row.ours}
    if len(options) > 1 and _SIZES & options.keys():
        # without it a step has the paper's 512 prompts, where TRL has a few
        counterparts.add("rollout.prompts_per_step")
    for option, (value, origin) in translation.ours.items():
        is_fraction = isinstance(value, float) and option == "rollout.prompts_per_step"
        if option not in counterparts or is_fraction:
            continue
        keyword = keyword_of(option) or option
        typed = full_names.get(origin, origin)
        text = literal_text(value) or UNKNOWN
        if typed in keywords and keywords[typed] == value:
            text = texts.get(typed) or answer.site.text_of(value, typed)
        answer.ours.setdefault(keyword, text)
        used_names.update(origin.split(", "))
        if origin:
            pairs.append(assigned(option, text))
    reasons = {**translation.unknown, **translation.left_out}
    for reason, all_assignments in reasons.items():
        # an option without a counterpart may be a part of the size of a batch
        assignments = [
            assignment
            for assignment in all_assignments
            if assignment.partition("=")[0] not in used_names
        ]
        if not assignments:
            continue
        begins_with_acronym = reason[1:2].isupper()
        if not begins_with_acronym:
            reason = reason[:1].lower() + reason[1:]
        answer.notes.append(f"no keyword here for {', '.join(assignments)}: {in_python(reason)}")
    answer.notes += [in_python(sentence) for sentence in translation.missing]
    has_new_notes = len(answer.notes) > num_notes
    if pairs and not has_new_notes:
        name = next(iter(options))
        typed = full_names.get(name, name)
        text = texts.get(typed) or answer.site.text_of(keywords[typed], typed)
        answer.single = (
            f"unknown option {typed}; {TITLES[system]}'s {name}={text} is {' and '.join(pairs)}"
            " here"
        )


_SIZES = frozenset(
    {
        "num_generations",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "steps_per_generation",
        "generation_batch_size",
        "max_steps",
    }
)
"""The options of TRL that say how large a batch is, with its defaults for the others."""


_OPTIONS_BY_UNDERSCORES = {
    option.replace(".", "_"): option for option, _ in options_of() if "." in option
}
"""The options by names such as `optim_lr`."""
_TRAINING_ROWS = [name for name, row in NAMES["train"].items() if row.here == "data"]


def _weigh_rewards(answer: Answer, keywords: Mapping[str, Any]) -> None:
    """Write `reward_weights` into the reward: a mapping from functions to weights."""
    weights = keywords.get("reward_weights")
    if weights is None:
        return
    names_of_reward = ["reward"]
    names_of_reward += [name for name, row in NAMES["train"].items() if row.here == "reward"]
    arguments = [name for name in names_of_reward if name in keywords]
    functions = keywords[arguments[0]] if arguments else None
    names = [UNKNOWN] * len(weights)
    if isinstance(functions, list | tuple) and len(functions) == len(weights):
        names = [answer.site.text_of(function) for function in functions]
    pairs = [f"{name}: {weight}" for name, weight in zip(names, weights, strict=True)]
    mapping = f"{{{', '.join(pairs)}}}"
    shown = literal_text(list(weights)) or UNKNOWN
    answer.ours["reward"] = mapping
    answer.single = f"reward_weights={shown} is reward={mapping} here"


def foreign_attribute(name: str, own: Sequence[str], frame: FrameType | None) -> str:
    """Answer for a name that `dapo`, which has the names `own`, does not have.

    A trainer's call is answered with the whole call of `dapo.train`.
    """
    row = NAMES["dapo"].get(name)
    if row is None:
        return f"module 'dapo' has no attribute {name!r}; {did_you_mean(name, own)}"
    site = call_site(frame, attribute=True)
    if row.here != "train" or not (site.nodes or site.positional):
        return f"dapo has no {name}: {row.remark}"
    names = _TRAINER_ARGUMENTS[: len(site.positional)]
    texts = {**dict(zip(names, site.positional, strict=True)), **site.keywords}
    site = replace(site, function="run = dapo.train", keywords=texts)
    keywords = {key: _value_of(text, site) for key, text in texts.items()}
    function = Function("train", ("model", "data", "reward", "eval_data", "run_dir"), True)
    answer = foreign_answer(function, keywords, site)
    return f"dapo has no {name}: {row.remark}; {answer}"


_TRAINER_ARGUMENTS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")


class _Written:
    """A value of which only the source is known; its attributes are the keywords of a call."""

    def __init__(self, **keywords: Any) -> None:
        self.__dict__.update(keywords)


def _value_of(text: str, site: CallSite) -> Any:
    """Return the value that a source text has without running it."""
    try:
        node = ast.parse(text, mode="eval").body
        return ast.literal_eval(node)
    except (SyntaxError, ValueError):
        pass
    if isinstance(node, ast.Name) and node.id in site.variables:
        return site.variables[node.id]
    if isinstance(node, ast.List):
        return [_value_of(ast.unparse(item), site) for item in node.elts]
    keywords = {}
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg is not None:
                keywords[keyword.arg] = _value_of(ast.unparse(keyword.value), site)
    return _Written(**keywords)
