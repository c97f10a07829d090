"""Building blocks of sections: the base class, the types of values, and options with metadata."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from dapo.core.errors import ConfigError

_CANNOT_CHANGE = (
    "{name}: the options of a run cannot be changed in place: `dapo.resume('RUN', {name}=VALUE)`"
    " continues it with another value"
)


class Section(BaseModel):
    """A group of options, which rejects unknown names."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(_CANNOT_CHANGE.format(name=name))

    def __delattr__(self, name: str) -> None:
        raise ConfigError(_CANNOT_CHANGE.format(name=name))

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield what repr shows: the options whose values are not the defaults."""
        for name, value in super().__repr_args__():
            if name is None or value != type(self).model_fields[name].default:
                yield name, value


_UNSET: Any = object()


def option(
    default: Any = ...,
    description: str = "",
    *,
    paper: Any = _UNSET,
    only_with: str = "",
    unit: str = "",
    also: Sequence[Mapping[str, Any]] = (),
    **bounds: Any,
) -> Any:
    """Return an option of a section; without a `default` it is required.

    Args:
        default: the value of an option that is not set.
        description: a text for users.
        paper: the value in the paper.
        only_with: the condition of an effect: `option=value`, or the name of an option or property
            of Config.
        unit: the unit of a number.
        also: JSON schemas of further values that a validator converts.
        bounds: `gt`, `ge`, `lt` and `le`, as for pydantic's Field.
    """
    facts: dict[str, Any] = {}
    # None is a value that the paper may have
    if paper is not _UNSET:
        facts["paper"] = paper
    if only_with:
        facts["only_with"] = only_with
    if unit:
        facts["unit"] = unit
    if also:
        facts["also"] = also
    return Field(default, description=description, json_schema_extra=facts, **bounds)


def one_or_several(value: object) -> object:
    """Accept `3` for `[3]`, `a,b` for `[a, b]`, and null for none."""
    if value is None:
        return []
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return value if isinstance(value, list | tuple) else [value]


def reject_bool(value: object) -> object:
    """Reject `true` for a number, which Python counts as 1."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


MAX_COUNT = 10**9  # largest count; options that cost memory, processes or threads have lower limits
MAX_SECONDS = 1e6
MAX_PROCESSES = 4096

Int: TypeAlias = Annotated[int, BeforeValidator(reject_bool), Field(le=MAX_COUNT)]
Float: TypeAlias = Annotated[float, BeforeValidator(reject_bool)]
Positive: TypeAlias = Annotated[Int, Field(gt=0)]
Processes: TypeAlias = Annotated[Positive, Field(le=MAX_PROCESSES)]
Tokens: TypeAlias = Annotated[Positive, Field(le=10**8)]
Seconds: TypeAlias = Annotated[Float, Field(gt=0, le=MAX_SECONDS)]
Gibibytes: TypeAlias = Annotated[Float, Field(gt=0, le=1e6)]
Seed: TypeAlias = Annotated[int, BeforeValidator(reject_bool), Field(ge=0, lt=2**63)]
_SWITCHES = {True: "on", False: "off"}
Switch = BeforeValidator(lambda value: _SWITCHES[value] if isinstance(value, bool) else value)
"""Accepts the booleans as which YAML reads `on` and `off`."""
Auto = BeforeValidator(lambda value: None if value == "auto" else value)
"""Accepts `auto` for none, if none means a choice at the start."""
