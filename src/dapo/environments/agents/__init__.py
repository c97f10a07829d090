"""Agents that own their loop: they talk to an OpenAI endpoint, and train from what they said."""
