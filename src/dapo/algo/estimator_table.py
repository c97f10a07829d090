"""The estimators of `advantage.estimator`, in one table that options, training, commands and
documentation read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal

STD_EPS = 1e-6
"""The number that Eq. 9 adds to the standard deviation."""


@dataclass(frozen=True)
class Estimator:
    """A row of ESTIMATORS: the function of an estimator, and its properties, which need no import
    of torch.
    """

    function: str | None
    """`module:function` in `dapo.algo`, from shaped rewards to advantages; None: a critic estimates
    them per token.
    """
    baseline: str  # the baseline in words, for the description of the option
    formula: str  # the advantage of response i, for docs/losses.md
    source: str  # the paper, for docs/losses.md
    mean_over: Literal["group", "batch"] = "group"
    """The rewards whose mean is the baseline: the response's group, or all responses of the step.
    """
    std_over: Literal["group", "batch"] | None = None
    """Whose standard deviation scales the advantages: the response's group, or the whole step.
    None: there is no scaling.
    """

    @property
    def takes_batch(self) -> bool:
        """True if the function takes all rewards of a step with their group ids, instead of the
        rewards of a group.
        """
        return self.std_over == "batch"

    def load(self) -> Callable[..., Any]:
        """The function, imported on first use."""
        function: Callable[..., Any] = resolve_name(f"dapo.algo.{self.function}")
        return function


ESTIMATORS: Mapping[str, Estimator] = {
    "group": Estimator(
        "advantages:group_advantages",
        "the mean reward of its group (Eq. 9)",
        "(R_i - mean of the group) / (std of the group + 1e-6); with `advantage.scale=none` the"
        " difference alone",
        "DAPO, Eq. 9",
        std_over="group",
    ),
    "rloo": Estimator(
        "advantages:rloo_advantages",
        "the mean of the other responses of its group",
        "R_i - mean of the others of the group = G / (G - 1) (R_i - mean of the group)",
        "RLOO, arXiv 2402.14740",
    ),
    "reinforce_pp": Estimator(
        "advantages:reinforce_pp_advantages",
        "the mean of the step's batch, with its standard deviation as the divisor",
        "(R_i - mean of the batch) / (std of the batch + 1e-6)",
        "REINFORCE++, arXiv 2501.03262",
        mean_over="batch",
        std_over="batch",
    ),
    "reinforce_pp_baseline": Estimator(
        "advantages:reinforce_pp_baseline_advantages",
        "the mean reward of its group, with the standard deviation of the step's differences as the"
        " divisor",
        "D_i / (std of D over the batch + 1e-6), with D_i = R_i - mean of the group",
        "REINFORCE++ w/ baseline, arXiv 2501.03262",
        std_over="batch",
    ),
    "gae": Estimator(
        None,
        "the critic's value of each token (PPO)",
        "a number for each token, from the values of a critic",
        "PPO: [PPO](#ppo)",
    ),
}
"""The estimators by name."""
