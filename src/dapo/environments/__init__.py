"""Episodes of several turns: environments, tools, and the tokens between the turns of the policy."""

__all__ = ["calls", "rendering"]
