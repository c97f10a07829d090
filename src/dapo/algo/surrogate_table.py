"""The losses of `loss.surrogate`, in one table that options, policy, commands and documentation read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class Surrogate:
    """A row of SURROGATES: the function of a loss, and its properties, which can be read without importing torch."""

    function: str
    """`module:function` in `dapo.algo`, which maps packed tokens `[T]` to loss and sums like `policy_loss`."""
    term: str
    """A token's contribution to the objective, for the description of the option; r is its ratio."""
    summary: str
    """The line of `dapo check`, in which {low} and {high} stand for 1 - clip_low and 1 + clip_high."""
    bounds: tuple[str, ...] = ()
    """The options of `loss` that are keywords of the function; it ignores the other bounds."""
    needs_whole_responses: bool = False
    """Whether a call needs all tokens of a response; then the function takes `responses`, each token's response."""

    def load(self) -> Callable[..., Any]:
        """The function, imported on first use."""
        found: Callable[..., Any] = resolve_name(f"dapo.algo.{self.function}")
        return found


SURROGATES: Mapping[str, Surrogate] = {
    "clip": Surrogate(
        "loss:policy_loss",
        "min(r A, clip(r) A) (Eq. 8)",
        "ratio clipped to [{low:g}, {high:g}]",
        bounds=("clip_low", "clip_high", "dual_clip"),
    ),
    "gspo": Surrogate(
        "surrogates:gspo_loss",
        "the same with one ratio per response, the geometric mean over its tokens",
        "GSPO, one ratio per response clipped to [{low:g}, {high:g}]",
        bounds=("clip_low", "clip_high"),
        needs_whole_responses=True,
    ),
    "cispo": Surrogate(
        "surrogates:cispo_loss",
        "min(r, 1 + clip_high) A log pi, with a gradient of log pi only",
        "CISPO, weights of log pi of at most {high:g}",
        bounds=("clip_high",),
    ),
    "sapo": Surrogate("surrogates:sapo_loss", "a smooth gate in place of the clip", "SAPO, a smooth gate of the ratio"),
}
"""The losses by name."""


def surrogates_with(bound: str) -> str:
    """The names of the losses that use an option, for a sentence: `clip, gspo or cispo`."""
    *others, last = (name for name, row in SURROGATES.items() if bound in row.bounds)
    return f"{', '.join(others)} or {last}" if others else last
