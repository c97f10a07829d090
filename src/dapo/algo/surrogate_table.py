"""The losses of `loss.surrogate`, in one table that options, policy, commands and documentation
read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from dapo.core.plugins import PluginTable


@dataclass(frozen=True)
class Surrogate:
    """A row of SURROGATES: the function of a loss, and its properties, which can be read without
    importing torch.
    """

    function: str
    """`module:function`, which maps packed tokens `[T]` to loss and sums like
    `dapo.algo.loss.policy_loss`.
    """
    # a token's contribution to the objective, for the option and docs/losses.md; r is its ratio
    term: str
    # the line of `dapo check`, in which {low} and {high} stand for 1 - clip_low and 1 + clip_high
    summary: str
    # the options of `loss` that are keywords of the function; it ignores the other bounds
    bounds: tuple[str, ...] = ()
    needs_whole_responses: bool = False
    """Whether a call needs all tokens of a response; then the function takes `responses`, each
    token's response.
    """
    source: str = ""  # the paper, for docs/losses.md

    def load(self) -> Callable[..., Any]:
        """The function, imported on first use."""
        function: Callable[..., Any] = resolve_name(self.function)
        return function


_OWN_SURROGATES: Mapping[str, Surrogate] = {
    "clip": Surrogate(
        "dapo.algo.loss:policy_loss",
        "min(r A, clip(r) A) (Eq. 8)",
        "ratio clipped to [{low:g}, {high:g}]",
        bounds=("clip_low", "clip_high", "dual_clip"),
        source="DAPO, Eq. 8; PPO and GRPO with equal bounds",
    ),
    "gspo": Surrogate(
        "dapo.algo.surrogates:gspo_loss",
        "the same with one ratio per response, the geometric mean over its tokens",
        "GSPO, one ratio per response clipped to [{low:g}, {high:g}]",
        bounds=("clip_low", "clip_high"),
        needs_whole_responses=True,
        source="[GSPO](https://arxiv.org/abs/2507.18071), Eq. 5 to 7",
    ),
    "cispo": Surrogate(
        "dapo.algo.surrogates:cispo_loss",
        "min(r, 1 + clip_high) A log pi, with a gradient of log pi only",
        "CISPO, weights of log pi of at most {high:g}",
        bounds=("clip_high",),
        source="[CISPO](https://arxiv.org/abs/2506.13585), Eq. 4 and 5",
    ),
    "sapo": Surrogate(
        "dapo.algo.surrogates:sapo_loss",
        "(4 / tau) sigmoid(tau (r - 1)) A, a smooth gate with tau 1 where A > 0 and 1.05 elsewhere",
        "SAPO, a smooth gate of the ratio",
        source="[SAPO](https://arxiv.org/abs/2511.20347)",
    ),
}
SURROGATES: Mapping[str, Surrogate] = PluginTable("dapo.surrogates", _OWN_SURROGATES, Surrogate)
"""The losses by name; another package adds one by an entry point to its `Surrogate`."""


def surrogates_with(bound: str) -> str:
    """The names of the losses that use an option, for a sentence: `clip, gspo or cispo`."""
    *first_names, last = (name for name, row in SURROGATES.items() if bound in row.bounds)
    if not first_names:
        return last
    return f"{', '.join(first_names)} or {last}"
