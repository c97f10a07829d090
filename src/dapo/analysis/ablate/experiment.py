"""An experiment: variants of a configuration, conditions, seeds.

It is read from a YAML file; imports no torch.

    base: base.yaml                      a configuration: relative to this file, or a shipped one's name
    seeds: [0, 1, 2]
    set: [train.num_steps=100]           options of every run
    conditions:                          a second axis: each has its own table
      clean: []
      short: [rollout.max_response_tokens=64]
    variants:                            the rows of the tables, in order; or the name of a shipped ladder
      GRPO: {set: [preset=grpo]}
      + clip-higher: {inherits: GRPO, set: [loss.clip_high=0.28]}
    baseline: GRPO                       every row is compared with it; default: the first row
    plots:
      - {metric: accuracy, against: [steps, tokens, seconds], title: GRPO learns faster, windows:
        [[6, 20]]}
    claims: [...]                        not read: what the experiment tests, for a tool that judges
    its results

A run takes its options from `base`, `set`, its condition, the variants that its row inherits, its
variant and its seed. Later ones override earlier ones.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from dapo.config import Config, find_config, load_config
from dapo.config.load import parse_overrides, read_options
from dapo.config.option_entries import option_differences
from dapo.core.errors import ConfigError
from dapo.core.text import did_you_mean
from dapo.evaluation.pairing import EVALUATION_OPTIONS
from dapo.runs.metric_table import metric_of

ACCURACY = "accuracy"  # the metric of held-out accuracy, avg@k, for an evaluation of any name
AXES = ("steps", "tokens", "seconds")
"""The horizontal axes of plots: training steps, generated tokens, seconds without evaluations."""
DEFAULT_LADDER = "table1"
_LADDERS = Path(__file__).parent / "ladders"
_KEYS = ("base", "seeds", "set", "conditions", "variants", "baseline", "plots", "claims")
_PANELS = (
    ("accuracy", AXES),
    ("rollout/entropy_estimate", ("steps",)),
    ("rollout/response_tokens_mean", ("steps",)),
)
_MAX_SEED = 2**63 - 1
_SET_ELSEWHERE = {
    "train.seed": "`seeds` sets it, so that the rows of a seed are paired",
    "train.threads": (
        "`--jobs` divides the machine's threads; set it in the configuration or after the file"
    ),
}


@dataclass(frozen=True)
class Variant:
    """A row of the table."""

    name: str
    own: tuple[str, ...]  # its own options, `key=value`
    inherits: str | None  # the variant that it inherits options from


@dataclass(frozen=True)
class Condition:
    """A setting in which every variant is run."""

    name: str  # the name; empty if the experiment has no conditions
    own: tuple[str, ...] = ()


@dataclass(frozen=True)
class Panel:
    """One plot: a metric against steps, generated tokens or seconds."""

    metric: str
    against: str
    title: str = ""  # the heading; by default the metric
    # the windows to mark against steps: the first and last step of each
    windows: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment."""

    condition: str
    variant: str
    seed: int
    base: Path
    overrides: tuple[str, ...]  # its options, `key=value`, the seed included

    @property
    def name(self) -> str:
        parts = (file_name(self.condition), file_name(self.variant), f"seed{self.seed}")
        return "-".join(part for part in parts if part)

    def describe(self) -> str:
        return ", ".join([*filter(None, [self.condition]), self.variant, f"seed {self.seed}"])

    @cached_property
    def config(self) -> Config:
        return load_config(self.base, self.overrides)


@dataclass(frozen=True)
class Experiment:
    """Variants, conditions and seeds on a base configuration."""

    name: str
    base: Path
    seeds: tuple[int, ...]
    shared: tuple[str, ...]  # options of every run
    conditions: tuple[Condition, ...]
    variants: tuple[Variant, ...]
    baseline: str
    panels: tuple[Panel, ...]

    def runs(self) -> list[PlannedRun]:
        """List all runs, by seed first, so that the first seeds of all rows finish early."""
        return [self.run(*key) for key in product(self.seeds, self.conditions, self.variants)]

    def run(self, seed: int, condition: Condition, variant: Variant) -> PlannedRun:
        overrides = (*self.shared, *condition.own, *self.options_of(variant), f"train.seed={seed}")
        return PlannedRun(condition.name, variant.name, seed, self.base, overrides)

    def options_of(self, variant: Variant) -> tuple[str, ...]:
        """Return a variant's options: the inherited ones, then its own."""
        inherited = (
            () if variant.inherits is None else self.options_of(self.variant(variant.inherits))
        )
        return (*inherited, *variant.own)

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)

    def predecessor(self, variant: Variant) -> str | None:
        """Return the row that a row is compared with: the one it inherits or the one before."""
        if variant.inherits is not None:
            return variant.inherits
        index = self.variants.index(variant)
        return self.variants[index - 1].name if index else None


def shipped_ladders() -> dict[str, Path]:
    """Return the files of the shipped ladders, by name."""
    return {path.stem: path for path in sorted(_LADDERS.glob("*.yaml"), reverse=True)}


def find_ladder(name: str) -> Path:
    """Return the file of a shipped ladder. Raises ConfigError."""
    ladders = shipped_ladders()
    if name not in ladders:
        raise ConfigError(f"no ladder {name!r}; {did_you_mean(name, ladders)}")
    return ladders[name]


def load_experiment(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    ladder: str | None = None,
    seeds: Sequence[int] | None = None,
) -> Experiment:
    """Read and check an experiment, or make one of a configuration and a ladder.

    Args:
        path: an experiment file, which has `variants`; or a configuration, or a shipped one's name.
        overrides: `key=value` for every run; they override `set`, and conditions and variants
            override them.
        ladder: the ladder to run on a configuration; None: `table1`.
        seeds: seeds that replace those of the file.

    Raises ConfigError for an invalid name, value or configuration.
    """
    path = find_config(path)
    raw = read_options(path)
    if any(key in raw for key in ("variants", "conditions", "seeds", "base")):
        if ladder is not None:
            raise ConfigError(
                f"{path} is an experiment and has its own rows; --ladder needs a plain"
                " configuration"
            )
        experiment = parse_experiment(raw, name=path.stem, where=path)
    else:
        file = find_ladder(ladder or DEFAULT_LADDER)
        experiment = parse_experiment(
            read_options(file), name=f"{path.stem}-{file.stem}", where=file
        )
        experiment = replace(experiment, base=path)
    experiment = replace(
        experiment, shared=(*experiment.shared, *_overrides(list(overrides), "command line"))
    )
    if seeds is not None:
        experiment = replace(experiment, seeds=_seeds(list(seeds), "--seeds"))
    require_valid(experiment, where=str(path))
    return experiment


def parse_experiment(raw: Mapping[str, Any], *, name: str, where: Path) -> Experiment:
    """Parse the content `raw` of an experiment file; its configurations are not checked yet.

    Raises ConfigError, naming the file `where`, for an invalid key or value: an unknown key, a seed
    listed twice.
    """
    _require_known(raw, _KEYS, str(where))
    if absent := [key for key in ("base", "variants") if not raw.get(key)]:
        raise ConfigError(f"{where}: {absent[0]} is missing; an experiment has {', '.join(_KEYS)}")
    variants = _variants(raw["variants"], f"{where}: variants")
    conditions = _conditions(raw.get("conditions"), f"{where}: conditions")
    baseline = raw.get("baseline", variants[0].name)
    if baseline not in (names := [variant.name for variant in variants]):
        raise ConfigError(
            f"{where}: baseline {baseline!r} is not a variant; {did_you_mean(str(baseline), names)}"
        )
    return Experiment(
        name,
        _base(raw["base"], where),
        _seeds(raw.get("seeds", [0, 1, 2, 3, 4]), f"{where}: seeds"),
        _overrides(raw.get("set"), f"{where}: set"),
        conditions,
        variants,
        baseline,
        _panels(raw.get("plots"), f"{where}: plots"),
    )


def require_valid(experiment: Experiment, *, where: str) -> None:
    """Load the configuration of every row. Raises ConfigError with a line for each invalid one.

    Rows of a condition must be evaluated in the same way, so that their accuracies can be compared.
    """
    _require_own_folders(experiment)
    faults = []
    for condition in experiment.conditions:
        first: Config | None = None
        for variant in experiment.variants:
            run = experiment.run(experiment.seeds[0], condition, variant)
            label = ", ".join([*filter(None, [condition.name]), variant.name])
            try:
                fault = _why_not_comparable(first := first or run.config, run.config)
            except ConfigError as error:
                fault = str(error).removeprefix("command line: ").removeprefix(f"{run.base}: ")
            if fault:
                faults.append(f"{label}: {fault}")
    if faults:
        lines = "\n".join(f"  {fault}" for fault in faults)
        raise ConfigError(f"{where}: {faults[0]}" if len(faults) == 1 else f"{where}:\n{lines}")


def _why_not_comparable(first: Config, second: Config) -> str | None:
    if second.data.eval is None:
        return "data.eval is missing: an experiment compares accuracy on held-out problems"
    fixed = (*EVALUATION_OPTIONS, "model.name")
    if differing := [name for name in option_differences(first, second) if name.startswith(fixed)]:
        return (
            f"{', '.join(differing)} differs from the first row's; evaluations may differ only"
            " between conditions"
        )
    return None


def _require_own_folders(experiment: Experiment) -> None:
    by_folder: dict[str, PlannedRun] = {}
    for run in experiment.runs():
        namesake = by_folder.setdefault(run.name.lower(), run)
        if namesake is not run:
            raise ConfigError(
                f"{namesake.describe()} and {run.describe()} would share one folder, {run.name};"
                " rename one of them"
            )


def file_name(name: str) -> str:
    """Replace characters that are not letters, digits, dots or underscores by underscores."""
    return re.sub(r"[^\w.]+", "_", name).strip("_.")


def _base(value: Any, where: Path) -> Path:
    if not isinstance(value, str):
        raise ConfigError(
            f"{where}: base must be the path or name of a configuration, got {value!r}"
        )
    path = where.parent / value
    try:
        return path if path.is_file() else find_config(value)
    except ConfigError as error:
        raise ConfigError(
            f"{where}: base: {error} (searched next to the file, then here)"
        ) from None


def _seeds(value: Any, where: str) -> tuple[int, ...]:
    is_list = isinstance(value, list) and value
    if not is_list or any(type(seed) is not int or not 0 <= seed <= _MAX_SEED for seed in value):
        raise ConfigError(
            f"{where}: expected a list of integers from 0, such as [0, 1, 2], got {value!r}"
        )
    if repeated := sorted({seed for seed in value if value.count(seed) > 1}):
        raise ConfigError(f"{where}: {repeated[0]} is listed twice")
    return tuple(value)


def _overrides(value: Any, where: str) -> tuple[str, ...]:
    """Check a list of `key=value`; None is an empty one."""
    if value is None:
        return ()
    if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
        raise ConfigError(
            f"{where}: expected a list of options as text, such as [loss.clip_high=0.28], got"
            f" {value!r}"
        )
    for item in value:
        try:
            parse_overrides([item])
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        option = item.partition("=")[0]
        if option in _SET_ELSEWHERE and not where.startswith("command line"):
            raise ConfigError(f"{where}: {option} cannot be set here: {_SET_ELSEWHERE[option]}")
        if option == "train.seed":
            raise ConfigError(f"{where}: train.seed cannot be set here: give --seeds")
    return tuple(value)


def _named(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        raise ConfigError(
            f"{where}: expected names with their options, `name: [key=value]`, got {value!r}"
        )
    for name, entry in value.items():
        text = str(name)
        if not file_name(text):
            raise ConfigError(f"{where}: the name {text!r} has no letter and no digit")
        yield text, entry


def _conditions(value: Any, where: str) -> tuple[Condition, ...]:
    if value is None:
        return (Condition(""),)
    return tuple(
        Condition(name, _options_of(options, f"{where}: {name}", ())[0])
        for name, options in _named(value, where)
    )


def _variants(value: Any, where: str) -> tuple[Variant, ...]:
    if isinstance(value, str):
        file = find_ladder(value)
        return _variants(read_options(file)["variants"], f"{file}: variants")
    variants = [
        Variant(name, *_options_of(options, f"{where}: {name}", ("inherits",)))
        for name, options in _named(value, where)
    ]
    by_name = {variant.name: variant for variant in variants}
    for variant in variants:
        _require_no_cycle(variant, by_name, where)
    return tuple(variants)


def _require_no_cycle(variant: Variant, by_name: Mapping[str, Variant], where: str) -> None:
    """Raise ConfigError if `inherits` names no variant or is circular."""
    trail = [variant.name]
    while (name := by_name[trail[-1]].inherits) is not None:
        if name not in by_name:
            raise ConfigError(
                f"{where}: {trail[-1]}: inherits {name!r} is not a variant;"
                f" {did_you_mean(name, by_name)}"
            )
        if name in trail:
            raise ConfigError(
                f"{where}: `inherits` is circular: {' inherits '.join([*trail, name])}"
            )
        trail.append(name)


def _options_of(
    value: Any, where: str, extra_keys: tuple[str, ...]
) -> tuple[tuple[str, ...], str | None]:
    """Options, and the name of the variant they inherit, from a list or a mapping with `set`."""
    if value is None or isinstance(value, list):
        return _overrides(value, where), None
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where}: expected a list of options or a mapping with `set`, got {value!r}"
        )
    _require_known(value, ("set", *extra_keys), where)
    inherits = value.get("inherits")
    if inherits is not None and not isinstance(inherits, str):
        raise ConfigError(f"{where}: inherits must be the name of a variant, got {inherits!r}")
    return _overrides(value.get("set"), f"{where}: set"), inherits


def _panels(value: Any, where: str) -> tuple[Panel, ...]:
    if value is None:
        return tuple(Panel(metric, against) for metric, axes in _PANELS for against in axes)
    if not isinstance(value, list) or not value:
        raise ConfigError(
            f"{where}: expected a list of plots, - {{metric: accuracy, against: [steps]}}, got"
            f" {value!r}"
        )
    return tuple(panel for entry in value for panel in _panels_of(entry, where))


def _panels_of(value: Any, where: str) -> Iterator[Panel]:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where}: expected {{metric: accuracy, against: [steps]}}, got {value!r}"
        )
    _require_known(value, ("metric", "against", "title", "windows"), where)
    metric = value.get("metric")
    against = value.get("against", ["steps"])
    if not isinstance(metric, str) or not _is_metric(metric):
        raise ConfigError(
            f"{where}: no metric {metric!r}; expected accuracy (held out) or one of `dapo show docs"
            " metrics`"
        )
    axes = [against] if isinstance(against, str) else against
    if not isinstance(axes, list) or not axes or any(axis not in AXES for axis in axes):
        raise ConfigError(
            f"{where}: {metric}: against must be some of {', '.join(AXES)}, got {against!r}"
        )
    windows = value.get("windows", [])
    listed = windows if isinstance(windows, list) else []
    pairs = [
        window
        for window in listed
        if isinstance(window, list) and list(map(type, window)) == [int, int]
    ]
    if pairs != windows or any(first > last for first, last in pairs):
        raise ConfigError(
            f"{where}: {metric}: windows must be pairs of steps, such as [[6, 20]], got {windows!r}"
        )
    for axis in axes:
        marked = tuple((first, last) for first, last in pairs) if axis == "steps" else ()
        yield Panel(metric, axis, str(value.get("title", "")), marked)


def _is_metric(name: str) -> bool:
    """Return True if runs log this metric; metrics of a user's loss function are unknown."""
    try:
        return name == ACCURACY or metric_of(name).name != "loss/{name}"
    except KeyError:
        return False


def _require_known(value: Mapping[Any, Any], keys: Sequence[str], where: str) -> None:
    for key in value:
        if key not in keys:
            raise ConfigError(f"{where}: unknown key {key!r}; {did_you_mean(str(key), keys)}")
