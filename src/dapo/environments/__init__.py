"""Episodes of several turns: environments, tools, and the tokens between the turns of the
policy.
"""

from dapo.environments.environment import Environment, StepResult

__all__ = ["Environment", "StepResult"]
