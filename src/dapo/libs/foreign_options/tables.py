"""Tables that translate the options of one program to those of another."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from .formulas import Unknown, compute, value_of


@dataclass(frozen=True)
class Counterpart:
    """A row of the table: an option of another system, and the options that do the same here."""

    theirs: str
    """Its name, `name=value` for one of its values, or `section.*` for all options of a section
    without a row.
    """
    ours: tuple[str, ...]
    """Names of options here, or overrides `option=value`; empty: there is none."""
    remark: str
    converted: bool
    """Whether the value of a single option changes, in the way that the remark describes."""
    formula: str
    """The value here, from their options by name; empty: it is the same, or a person converts it.
    """

    @property
    def name(self) -> str:
        return self.theirs.partition("=")[0]

    @property
    def keeps_value(self) -> bool:
        """Whether the value moves to our option unchanged."""
        return (
            len(self.ours) == 1
            and "=" not in self.ours[0]
            and "=" not in self.theirs
            and not self.converted
        )

    @property
    def reason(self) -> str:
        """The remark in the middle of a sentence."""
        text = self.remark.rstrip(".")
        return (
            text if text[1:2].isupper() or text.startswith("`") else f"{text[:1].lower()}{text[1:]}"
        )

    def states(self, value: object) -> bool:
        """Whether the row is that of this value."""
        return (
            "=" in self.theirs
            and self.theirs.partition("=")[2].casefold() == shown_value(value).casefold()
        )


def translate_value(
    rows: Sequence[Counterpart], value: Any, names: Mapping[str, Any]
) -> tuple[Counterpart | None, dict[str, Any]]:
    """The row of an option that holds for a value, and the values of our options that it gives;
    None: no row does.

    `names` are all options of the other system by name, for formulas. A row without values here is
    for a person.
    """
    row = next((row for row in rows if row.states(value)), None)
    row = row or next((row for row in rows if "=" not in row.theirs), None)
    if row is None:
        return row, {}
    is_unset = value is None and not row.states(value)
    if not row.formula and (is_unset or row.converted):
        return row, {}
    pairs = (option.partition("=") for option in row.ours if "=" in option)
    constants = {
        option: text if text in ("on", "off") else yaml.safe_load(text) for option, _, text in pairs
    }
    if row.keeps_value:
        return row, {row.ours[0]: value}
    if not row.formula:
        return row, constants
    try:
        result = compute(row.formula, names)
    except (TypeError, ValueError, ArithmeticError):
        return row, {}  # one of the options in it is not set, or no number
    values = result if len(row.ours) > 1 else [result]
    options = [option.partition("=")[0] for option in row.ours]
    return row, {
        option: item for option, item in zip(options, values, strict=True) if item is not None
    }


_SECTION = "A section of options, which sets none."


@dataclass
class Translation:
    """A configuration of ours, and the options of another system that have no place in it."""

    title: str
    ours: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Values by option, each with the option of the other system that it comes from; empty: from
    its defaults.
    """
    missing: list[str] = field(default_factory=list)
    """Sentences on the algorithms that there are none of here."""
    unread: list[str] = field(default_factory=list)
    """What may set further options, or others of ours, and could not be read."""
    assumed: list[str] = field(default_factory=list)
    """What the values rest on."""
    unknown: dict[str, list[str]] = field(default_factory=dict)
    """Options whose value is not known or not possible here, by what a person is to do."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    """Options of the other system by the reason why they have no place."""

    @property
    def is_whole(self) -> bool:
        """Whether each option that has a place here was read."""
        return not self.unread and not self.unknown

    def text(self, order: Sequence[str], escape: Callable[[Any], Any]) -> str:
        """The options as YAML in this order, with comments on where values come from and what is
        left out.

        What the values lack stands above them. `escape` changes a value so that it is read
        literally.
        """
        lines = [*self._head()]
        positions = {name: i for i, name in enumerate(order)}
        by_default = f"the default of {self.title}"
        if self.unread:
            by_default = f"{self.title}'s own value, unless what is not read above sets it"
        current_sections: tuple[str, ...] = ()
        for option in sorted(self.ours, key=lambda option: positions.get(option, 0)):
            value, origin = self.ours[option]
            *sections, leaf = option.split(".")
            for depth, section in enumerate(sections):
                if current_sections[: depth + 1] != (*sections[: depth + 1],):
                    lines.append(f"{'  ' * depth}{section}:")
            current_sections = (*sections,)
            literal = yaml.safe_dump(
                escape(value), default_flow_style=True, width=10**6
            ).removesuffix("...\n")
            lines.append(
                f"{'  ' * len(sections)}{leaf}: {literal.strip()}  # {origin or by_default}"
            )
        for reason, options in self.left_out.items():
            lines += ["", f"# {reason}:", *(f"#   {option}" for option in options)]
        return "\n".join(lines) + "\n"

    def _head(self) -> Iterator[str]:
        """The comments above the options."""
        blocks = {
            "There is no such algorithm here, so what follows is another one": self.missing,
            f"Not read; it may set options of {self.title} that are missing below": self.unread,
            **self.unknown,
            "Taken as follows": self.assumed,
        }
        for reason, texts in blocks.items():
            if texts:
                yield f"# {reason}:"
                yield from (f"#   {' '.join(text.split())}" for text in texts)
                yield ""


@dataclass(frozen=True)
class Algorithm:
    """An option of another system that selects an algorithm."""

    same: tuple[Any, ...] = ()
    """Values without a counterpart that change nothing."""
    condition: str = ""
    """A formula that holds where the option has an effect; empty: always."""


@dataclass(frozen=True)
class Table:
    """How the options of a system are translated."""

    title: str
    rows: tuple[Counterpart, ...]
    defaults: Mapping[str, Any]
    """Values of its options that are not set, and names that formulas use."""
    defaults_here: Mapping[str, Any]
    """Values of our options that no option of it sets."""
    algorithms: Mapping[str, Algorithm] = field(default_factory=dict)
    """Its options that select an algorithm, of which a value without a counterpart is no detail."""

    def rows_of(self, name: str) -> list[Counterpart]:
        """The rows of an option by its whole name, else the row `section.*` of a section that it is
        in.

        A section that is an option itself, because it is empty, has a row without a counterpart.
        """
        exact = [row for row in self.rows if row.name == name]
        prefixes = [f"{name[:i]}.*" for i, sign in enumerate(name) if sign == "."]
        rows = (
            exact
            or [row for prefix in reversed(prefixes) for row in self.rows if row.name == prefix][:1]
        )
        is_section = not rows and any(row.name.startswith(f"{name}.") for row in self.rows)
        return (
            [Counterpart(name, (), _SECTION, converted=False, formula="")] if is_section else rows
        )

    def fold_mappings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options with those mappings whole that were typed key by key:
        `chat_template_kwargs.enable_thinking`.
        """
        mappings = {row.name for row in self.rows if row.name.endswith("kwargs")}
        folded_options: dict[str, Any] = {}
        for name, value in options.items():
            whole = next((mapping for mapping in mappings if name.startswith(f"{mapping}.")), None)
            if whole is None or any(row.name == name for row in self.rows):
                folded_options[name] = value
                continue
            inner = folded_options.get(whole)
            inner = inner if isinstance(inner, dict) else {}
            folded_options[whole] = (
                value
                if isinstance(value, Unknown)
                else {**inner, name.removeprefix(f"{whole}."): value}
            )
        return folded_options

    def translate(
        self, options: Mapping[str, Any], facts: Mapping[str, Any] | None = None
    ) -> Translation:
        """Translate options of another system; those that are not set have its defaults.

        `facts` are names for formulas that are no options, such as the number of processes.
        """
        translation = Translation(
            self.title, {option: (value, "") for option, value in self.defaults_here.items()}
        )
        values = {**self.defaults, **options, **(facts or {})}
        names = {name: value for name, value in values.items() if not isinstance(value, Unknown)}
        defaults = {
            name: value_of(name, names)
            for name in self._defaults_in_force(options)
            if self._has_value(name, names)
        }
        for name, value in {**defaults, **options}.items():
            self._translate_one(name, value, options, names, translation)
        return translation

    def _defaults_in_force(self, options: Mapping[str, Any]) -> list[str]:
        return [name for name in self.defaults if name not in options and self.rows_of(name)]

    def _has_value(self, name: str, names: Mapping[str, Any]) -> bool:
        """Whether a default is known: that of a formula is not if one of its options is not."""
        try:
            value_of(name, names)
        except (ValueError, TypeError, ArithmeticError):
            return False
        return True

    def _translate_one(
        self,
        name: str,
        value: Any,
        options_of_script: Mapping[str, Any],
        names: Mapping[str, Any],
        translation: Translation,
    ) -> None:
        """Add an option of the other system to a translation."""
        rows = self.rows_of(name)
        assignment = f"{name}={_one_line(value)}"
        if not rows:
            if name in options_of_script:
                reason = f"{self.title} may have these options; the table does not"
                translation.left_out.setdefault(reason, []).append(assignment)
            return
        row, ours = (
            (rows[0], {}) if isinstance(value, Unknown) else translate_value(rows, value, names)
        )
        sources_here = [name] if name in options_of_script else []
        sources_here += self._origins(row, options_of_script)
        for option, our_value in ours.items():
            before, source = translation.ours.get(option, (our_value, ""))
            sources = source.split(", ") if source else []
            if before == our_value:
                sources_here = [*sources, *sources_here]
            elif name in options_of_script and options_of_script.keys() & {*sources}:
                reason = f"Also {option}={_one_line(our_value)} by {name}, which holds"
                translation.left_out.setdefault(reason, []).append(source)
        origin = ", ".join(dict.fromkeys(sources_here))
        translation.ours |= {option: (our_value, origin) for option, our_value in ours.items()}
        if name not in options_of_script or ours:
            return
        options = dict.fromkeys(
            option.partition("=")[0] for counterpart in rows for option in counterpart.ours
        )
        is_algorithm = self._selects(name, value, names)
        if value is None:
            translation.left_out.setdefault("Null, as if they were not set", []).append(assignment)
        elif isinstance(value, Unknown) and (options or is_algorithm):
            person = f"Set {', '.join(options) or 'the algorithm'} yourself"
            translation.unknown.setdefault(
                f"{person}: the value is known only when the script runs", []
            ).append(assignment)
        elif is_algorithm and (row is None or not row.ours):
            why = "" if row is None else f" ({row.reason})"
            translation.missing.append(f"{assignment} has no counterpart{why}")
        elif row is None:
            translation.left_out.setdefault(
                f"{' and '.join(options)}: no such value here", []
            ).append(assignment)
        else:
            reason = (
                " or ".join(options)
                + ": " * bool(options)
                + (row.remark or "the default").rstrip(".")
            )
            translation.left_out.setdefault(reason, []).append(assignment)

    def _selects(self, name: str, value: Any, names: Mapping[str, Any]) -> bool:
        """Whether an option selects an algorithm by this value."""
        algorithm = self.algorithms.get(name)
        if algorithm is None or value is None or value in algorithm.same:
            return False
        try:
            return not algorithm.condition or bool(compute(algorithm.condition, names))
        except (ValueError, TypeError, ArithmeticError):
            return True

    def _origins(self, row: Counterpart | None, options: Mapping[str, Any]) -> list[str]:
        """The options that are set and that the formula of another option uses."""
        text = row.formula if row else ""
        formulas = {
            name: value
            for name, value in self.defaults.items()
            if isinstance(value, str) and value[:2] == "= "
        }
        for _ in range(4):  # formulas of formulas
            text = re.sub(r"[\w.]+", lambda match: formulas.get(match[0], match[0]), text)
        words = set(re.findall(r"[\w.]+", text))
        return [name for name in options if name in words]


def leaves_of(name: str, value: object) -> Iterator[tuple[str, Any]]:
    """Yield the options in a section by their whole names."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from leaves_of(f"{name}.{key}".lstrip("."), inner)
    else:
        yield name, value


def shown_value(value: object) -> str:
    """Format the value of another system's option as it is typed."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _one_line(value: Any) -> str:
    return " ".join(str(value if isinstance(value, Unknown) else shown_value(value)).split())
