"""Options of the reward: `reward`, `overlong`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import model_validator

from dapo.config.section import (
    Float,
    Gibibytes,
    Processes,
    Seconds,
    Section,
    Switch,
    Tokens,
    option,
)
from dapo.core.verifier_limits import CODE_MEMORY_MIB, CODE_TIME_S, PATTERN_CPU_S, SERVER_TOTAL_S

_TIME_LIMITS = {
    "code": ("time_s", CODE_TIME_S),
    "server": ("total_s", SERVER_TOTAL_S),
    "regex": ("", PATTERN_CPU_S),
    "json_schema": ("", PATTERN_CPU_S),
}
"""Verifiers with a limit below the verdict's: its option and default, or a fixed limit."""


class RewardConfig(Section):
    verifier: str | dict[str, float] = option(
        "auto",
        "The verifier: a name (math, exact, ...), module:function, or a mapping of several to their"
        " weights. auto: environment for episodes, exact for builtin:, gym for gym:, math"
        " otherwise.",
    )
    options: dict[str, Any] = option(
        {},
        "Options of the verifier, such as letters: ABCD for choice; of several, by name (`dapo show"
        " docs verifiers`).",
    )
    coef: Float = option(
        1.0,
        "Weight of the advantages in the loss. 0: rewards are measured and stored but do not"
        " train; a teacher (loss.reference with loss.kl_coef) then trains alone, and"
        " dynamic_sampling.enabled is false unless it is set.",
        paper=1.0,
        ge=0,
    )
    threshold: Float | None = option(
        None,
        "Smallest score of a correct response, for verifiers that return scores. none: a score is"
        " neither correct nor wrong.",
        paper=None,
    )
    timeout_s: Seconds = option(
        10.0,
        "Time limit of a verdict; beyond it the verdict is an error. A function that receives a"
        " whole group has this time for each response.",
        unit="s",
    )
    workers: Processes = option(2, "Processes that run verifiers.", unit="processes")
    memory_gib: Gibibytes = option(
        4.0, "Memory limit of each verifier process and its children.", unit="GiB"
    )

    @property
    def judging(self) -> dict[str, Any]:
        """The options that decide the verdicts, as they are stored with each evaluation."""
        return {
            "verifier": self.verifier,
            "verifier_options": self.options,
            "threshold": self.threshold,
        }

    @model_validator(mode="after")
    def _verifiers_end_in_time(self) -> "RewardConfig":
        for name in [self.verifier] if isinstance(self.verifier, str) else self.verifier:
            if name not in _TIME_LIMITS:
                continue
            limit, default = _TIME_LIMITS[name]
            path, seconds = self._limit_of(name, limit, default)
            if isinstance(seconds, int | float) and seconds >= self.timeout_s:
                path = path if limit else f"{name}'s limit for a pattern"
                raise ValueError(
                    f"{path}={seconds:g} (s) must be less than reward.timeout_s={self.timeout_s:g},"
                    " a verdict's limit"
                )
        return self

    @model_validator(mode="after")
    def _programs_fit_into_the_memory(self) -> "RewardConfig":
        """A program at its own limit is wrong; one that reaches the worker's limit is an error."""
        names = [self.verifier] if isinstance(self.verifier, str) else self.verifier
        if "code" not in names:
            return self
        path, mebibytes = self._limit_of("code", "memory_mib", CODE_MEMORY_MIB)
        if isinstance(mebibytes, int | float) and mebibytes >= 1024 * self.memory_gib:
            raise ValueError(
                f"{path}={mebibytes:g} (MiB) must be less than reward.memory_gib="
                f"{self.memory_gib:g} ({1024 * self.memory_gib:g} MiB), the limit of the process"
                " that runs the program; raise reward.memory_gib or lower the other"
            )
        return self

    def _limit_of(self, name: str, limit: str, default: float) -> tuple[str, Any]:
        """Return the path of a verifier's option, and its value."""
        is_only = name == self.verifier
        options = self.options if is_only else self.options.get(name, {})
        path = f"reward.options.{limit}" if is_only else f"reward.options.{name}.{limit}"
        return path, options.get(limit, default) if isinstance(options, Mapping) else default


class AuditConfig(Section):
    """A second verifier that judges some of the trained responses, but trains nothing."""

    verifier: str | dict[str, dict[str, Any]] | None = option(
        None,
        "Second verifier: a name, module:function, or one with options, {choice: {letters: ABCD}};"
        " none: no audit.",
        paper=None,
    )
    share: Float = option(
        0.05,
        "Fraction of the trained responses that are audited.",
        only_with="audit.verifier",
        gt=0,
        le=1,
    )

    @property
    def name_and_options(self) -> tuple[str, dict[str, Any]] | None:
        """The audit's verifier with its options; None without an audit."""
        if self.verifier is None:
            return None
        if isinstance(self.verifier, str):
            return (self.verifier, {})
        return next(iter(self.verifier.items()))

    @model_validator(mode="after")
    def _is_one_verifier(self) -> "AuditConfig":
        if isinstance(self.verifier, dict) and len(self.verifier) != 1:
            raise ValueError(
                f"audit.verifier must be one verifier with its options, got {len(self.verifier)}; "
                "for example audit.verifier={choice: {letters: ABCD}}"
            )
        return self


class OverlongConfig(Section):
    mode: Annotated[Literal["soft", "filter", "off"], Switch] = option(
        "soft",
        "Treatment of responses near the length limit. soft: a length penalty (Eq. 13); filter:"
        " exclude truncated responses from training; off: none.",
        paper="soft",
    )
    buffer_tokens: Tokens = option(
        4096,
        "L_cache: length of the interval before rollout.max_response_tokens over which the penalty"
        " grows.",
        paper=4096,
        only_with="overlong.mode=soft",
        unit="tokens",
    )
    penalty: Float = option(
        1.0,
        "Largest penalty, for a response of rollout.max_response_tokens tokens.",
        paper=1.0,
        only_with="overlong.mode=soft",
        ge=0,
    )
