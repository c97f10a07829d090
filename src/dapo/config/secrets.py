"""Keeps passwords and keys out of what a run writes down and sends to trackers."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MASK = "***"
# `stop_token` and `max_tokens` are no secrets, `token` and `hf_token` are
_NAME = (
    r"(?<![a-z0-9])(password|passwd|passphrase|secret|credentials?|(api|access|private|auth|secret)[_-]?key"
    r"|(api|access|auth|bearer|bot|github|hf|hub|openai|refresh|session|secret|wandb)[_-]?token|(?<![_-])token)"
)
_ASSIGNED = re.compile(_NAME + r"['\"]?\s*[=:]")
_NAMED = re.compile(_NAME + "$")
_URL_PASSWORD = re.compile(r"(://[^/@\s:]+:)[^/@\s]+@")


def is_secret_name(name: str) -> bool:
    """`api_key`, `openaiApiKey` and `HF_TOKEN`, but not `max_tokens`."""
    return _NAMED.search(_words(name)) is not None


def secret_names(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted names of the options whose name says that their text is a secret."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from secret_names(value, f"{prefix}{name}.")
        elif isinstance(value, str) and value and is_secret_name(str(name)):
            yield f"{prefix}{name}"


def mask_secrets(command: Sequence[str]) -> list[str]:
    """`reward.options.api_key=abc` -> `reward.options.api_key=***`, also where the key is inside a mapping."""
    masked = []
    for argument in command:
        if _ASSIGNED.search(_words(argument)):
            argument = f"{argument.partition('=')[0]}={MASK}" if "=" in argument else MASK
        masked.append(_URL_PASSWORD.sub(rf"\1{MASK}@", argument))
    return masked


def mask_options(options: Any) -> Any:
    """The same mappings and lists with `***` for every text that is named like a secret, and for URLs' passwords."""
    if isinstance(options, Mapping):
        return {
            name: MASK if isinstance(value, str) and is_secret_name(str(name)) else mask_options(value)
            for name, value in options.items()
        }
    if isinstance(options, list | tuple):
        return [mask_options(value) for value in options]
    return _URL_PASSWORD.sub(rf"\1{MASK}@", options) if isinstance(options, str) else options


def _words(text: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower()  # openaiApiKey is three words
