"""An entropy bonus whose weight follows the entropy: it acts while the policy's entropy is below a
target.

The rule of Skywork-OR1 (arXiv 2505.22312) with the constants of its released scripts, once per
training step. With H_k the mean entropy of the updates of step k, and c_0 = 0:

    c_k     = min(MAX_COEFFICIENT, max(0, c_{k-1} + DELTA))   where H_k < target
              min(MAX_COEFFICIENT, max(0, c_{k-1} - DELTA))   elsewhere
    alpha_k = c_k where H_k <= target, else 0

`alpha_k` is the weight of the bonus in step k + 1. There the source uses it in step k itself,
because it measures the entropy of a batch in a pass of its own before the updates.
"""

from dataclasses import dataclass, replace

DELTA = 0.0001  # the change of c per training step
MAX_COEFFICIENT = 0.005  # the largest c


@dataclass(frozen=True)
class EntropyBonus:
    """The state of the rule."""

    target: float  # the target in nats per token
    coefficient: float = 0.0  # c: the weight while the entropy is below the target
    is_below: bool = False  # whether the entropy of the last complete step was at most the target
    step: int = 0  # the training step that is being measured
    entropy_sum: float = 0.0  # the sum of the entropies of its updates so far, in nats per token
    num_updates: int = 0  # the number of these updates

    @property
    def weight(self) -> float:
        """alpha: the weight of the entropy in the loss of this step's updates."""
        return self.coefficient if self.is_below else 0.0

    def at_step(self, step: int) -> "EntropyBonus":
        """The state in the updates of a training step; a new step follows the entropy of the one
        before.
        """
        if step == self.step or not self.num_updates:
            return replace(self, step=step)
        entropy = self.entropy_sum / self.num_updates
        change = DELTA if entropy < self.target else -DELTA
        coefficient = min(MAX_COEFFICIENT, max(0.0, self.coefficient + change))
        return EntropyBonus(self.target, coefficient, entropy <= self.target, step)

    def after(self, entropy: float) -> "EntropyBonus":
        """The state after an update of this step that has measured this entropy, in nats per
        token.
        """
        return replace(
            self, entropy_sum=self.entropy_sum + entropy, num_updates=self.num_updates + 1
        )
