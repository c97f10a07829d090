"""Keeps passwords and keys out of what a run writes down and sends to trackers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
_NAME = r"(?<![a-z0-9])(token|password|passwd|passphrase|secret|credentials?|(api|access|private|auth)[_-]?key)"
_ASSIGNED = re.compile(_NAME + r"['\"]?\s*[=:]")
_NAMED = re.compile(_NAME + "$")
_URL_PASSWORD = re.compile(r"(://[^/@\s:]+:)[^/@\s]+@")


def mask_secrets(command: Sequence[str]) -> list[str]:
    """`reward.options.api_key=abc` -> `reward.options.api_key=***`, also where the key is inside a mapping."""
    masked = []
    for argument in command:
        if _ASSIGNED.search(_words(argument)):
            argument = f"{argument.partition('=')[0]}={MASK}" if "=" in argument else MASK
        masked.append(_URL_PASSWORD.sub(rf"\1{MASK}@", argument))
    return masked


def mask_options(options: Any) -> Any:
    """The same mappings and lists with `***` for every text whose name sounds like a secret, and URLs' passwords."""
    if isinstance(options, Mapping):
        return {
            name: MASK if isinstance(value, str) and is_secret_name(str(name)) else mask_options(value)
            for name, value in options.items()
        }
    if isinstance(options, list | tuple):
        return [mask_options(value) for value in options]
    return _URL_PASSWORD.sub(rf"\1{MASK}@", options) if isinstance(options, str) else options


def is_secret_name(name: str) -> bool:
    """`api_key`, `openaiApiKey` and `HF_TOKEN`, but not `max_tokens`."""
    return _NAMED.search(_words(name)) is not None


def _words(text: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).lower()  # openaiApiKey is three words
