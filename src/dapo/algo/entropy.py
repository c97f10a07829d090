"""An entropy bonus whose weight follows the entropy: it acts where the policy's entropy is below a target.

After Skywork-OR1 (arXiv 2505.22312), where H_k is the mean entropy that update k has measured and c_0 = 0:

    c_k     = max(0, c_{k-1} + delta)   where H_k < target
              max(0, c_{k-1} - delta)   elsewhere
    alpha_k = c_k where H_k <= target, else 0

`alpha_k` is the weight of the bonus in the update after k, because an update's own entropy is known only when its
gradient is. Two things differ from the source: that delay of one update, and that c does not fall below 0, from where
it would need as long to come back as the entropy had been high.
"""

from dataclasses import dataclass

DELTA = 0.005
"""The change of c per update, as published."""


@dataclass(frozen=True)
class EntropyBonus:
    """The state of the rule."""

    target: float
    """In nats per token."""
    coefficient: float = 0.0
    """c: the weight while the entropy is below the target."""
    is_below: bool = False
    """Whether the entropy that was measured last was at most the target."""

    @property
    def weight(self) -> float:
        """alpha: the weight of the entropy in the next update's loss."""
        return self.coefficient if self.is_below else 0.0

    def after(self, entropy: float) -> "EntropyBonus":
        """The state after an update that has measured this entropy, in nats per token."""
        change = DELTA if entropy < self.target else -DELTA
        return EntropyBonus(self.target, max(0.0, self.coefficient + change), entropy <= self.target)
