"""What every section of options is made of: its base class, its types, and an option with what is known about it."""

from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """A group of options; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)


_UNSET: Any = object()


def option(
    default: Any = ..., description: str = "", *, paper: Any = _UNSET, only_with: str = "", **bounds: Any
) -> Any:
    """An option of a section.

    Args:
        default: The value where nothing is set; without one the option is required.
        description: Full sentences for a user, with units.
        paper: The paper's value, where it has one.
        only_with: The condition under which the option has an effect: `option=value`, or the name of an option or of a
            property of Config that must be true.
        bounds: `gt`, `ge`, `lt`, `le`, as for pydantic's Field.
    """
    known = ({} if paper is _UNSET else {"paper": paper}) | ({"only_with": only_with} if only_with else {})
    return Field(default, description=description, json_schema_extra=known, **bounds)


def _yaml_switch(value: object) -> object:
    """YAML reads a bare `on` or `off` as a boolean; here they are names."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def reject_bool(value: object) -> object:
    """Refuse `true` where a number is expected: Python counts it as 1."""
    if isinstance(value, bool):
        raise ValueError("expected a number")
    return value


Int: TypeAlias = Annotated[int, BeforeValidator(reject_bool)]
Float: TypeAlias = Annotated[float, BeforeValidator(reject_bool)]
Positive: TypeAlias = Annotated[Int, Field(gt=0)]
Switch = BeforeValidator(_yaml_switch)
