"""Recognizes secrets: in options, which are refused, and in text, where they are masked.

A run writes its options to config.yaml and to trackers, so it refuses secrets among them. It masks
secrets in other text that it writes, such as the command line and error messages.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MASK = "***"

_ALWAYS = frozenset(
    (
        "apikey",
        "auth",
        "authorization",
        "authtoken",
        "bearer",
        "cookie",
        "cookies",
        "cred",
        "credential",
        "credentials",
        "creds",
        "jwt",
        "keytab",
        "pass",
        "passcode",
        "passphrase",
        "passwd",
        "password",
        "passwords",
        "pat",
        "pw",
        "pwd",
        "secret",
        "secrets",
    )
)
"""Last words of names of secrets, whatever precedes them."""
_HARMLESS_BEFORE = {
    "token": (
        "answer",
        "begin",
        "bos",
        "buffer",
        "cache",
        "cls",
        "code",
        "context",
        "delimiter",
        "draft",
        "end",
        "eos",
        "first",
        "image",
        "last",
        "mask",
        "max",
        "microbatch",
        "min",
        "model",
        "new",
        "next",
        "num",
        "number",
        "observation",
        "observed",
        "of",
        "pad",
        "padding",
        "per",
        "prefix",
        "prompt",
        "reasoning",
        "response",
        "sep",
        "separator",
        "special",
        "start",
        "stop",
        "suffix",
        "system",
        "text",
        "think",
        "tool",
        "total",
        "turn",
        "unk",
        "vocabulary",
    ),
    "key": (
        "answer",
        "cache",
        "column",
        "config",
        "data",
        "dict",
        "dictionary",
        "feature",
        "field",
        "foreign",
        "group",
        "id",
        "index",
        "input",
        "item",
        "json",
        "label",
        "lookup",
        "map",
        "mapping",
        "merge",
        "metric",
        "name",
        "order",
        "output",
        "partition",
        "primary",
        "problem",
        "prompt",
        "public",
        "question",
        "reference",
        "response",
        "result",
        "reward",
        "row",
        "score",
        "shard",
        "shortcut",
        "sort",
        "source",
        "task",
        "text",
        "unique",
        "value",
    ),
}
"""Words before `token` or `key` that make a name harmless: `stop_token`, `answer_key`."""
_PASSWORDS = frozenset(
    ("apikey", "authorization", "passcode", "passphrase", "passwd", "password", "passwords")
)
_IN_URLS = frozenset(("sig", "signature", "sign", "code", "assertion"))

_NAME_WITH_VALUE = re.compile(r"""([A-Za-z][\w.-]*)['"]?\s*[:=]\s*['"]?(?=[^\s'",}\]])""")
# a list of a name and its value, as YAML writes pairs
_PAIR = re.compile(r"""\[\s*['"]?([A-Za-z][\w-]*)['"]?\s*,""")
# a search for the name of the scheme takes a minute in a megabyte without one
_USER_IN_URL = re.compile(r"(?<=[A-Za-z0-9+.-]://)[^/?#\s'\"]+@")
_PARAMETER = re.compile(r"([?&;#])([A-Za-z][\w.-]*)=([^&;#\s'\"]+)")
_HEADER = re.compile(
    r"(?i)\b((?:proxy-)?authorization|x-[a-z-]{0,40}(?:key|token|secret)|api-key|(?:set-)?cookie)(['\"]?\s*[:=]\s*['\"]?)"
    r"[^\r\n'\"]+"
)
# ordinary words have no digit, and braces hold the name of what is filled in
_CREDENTIALS = re.compile(r"(?=.*\d)[^{}]{8,}")
# a digit or many characters after the first word, because sentences hold `bearer` and `basic` too
_SHAPE = re.compile(
    r"\b[Bb]earer\s+(?=\S*\d|\S{16})\S+|\bBasic\s+(?=\S*\d)(?=\S*[A-Z])[A-Za-z0-9+/]{8,}=*"
    r"|(?<![\w-])("
    r"hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]*\d)[\w-]{12,}|gh[oprsu]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abeoprs]-[\w-]{10,}|nvapi-[\w-]{16,}|r8_[A-Za-z0-9]{20,}|AIza[\w-]{30,}|(AKIA|ASIA)[A-Z0-9]{16}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+"
    r")(?![\w-])"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""Tokens of Hugging Face, OpenAI, GitHub, GitLab, Slack, NVIDIA, Replicate, Google and AWS; JSON
web tokens; keys.
"""
_LOCATION_WORDS = (
    "cache",
    "data",
    "dir",
    "directory",
    "folder",
    "home",
    "host",
    "hostname",
    "id",
    "name",
    "path",
    "port",
    "project",
    "root",
    "scratch",
)
# names that end in a word for a password, but hold the working directory
_NO_PASSWORDS = ("PWD", "OLDPWD")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
HUB_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", *PROXIES)
"""Variables that may be secret and that a process needs to load a model from the Hugging Face hub.
"""
_MIN_VALUE_CHARS = 6  # shorter values of variables occur in ordinary words


def is_secret_name(name: str) -> bool:
    """Return True if a name is a secret's: `api_key`, `HF_TOKEN`, but not `answer_key`."""
    *first_words, last = words_of(name) or [""]
    for ending, harmless in _HARMLESS_BEFORE.items():
        if last in (ending, f"{ending}s"):
            return not first_words or first_words[-1] not in harmless
    return last in _ALWAYS


def is_password_name(name: str) -> bool:
    """Return True if a name is a password's or an API key's: `DB_PASSWORD`, `apiKey`, not `key`."""
    words = words_of(name)
    return bool(_PASSWORDS.intersection(words[-1:])) or words[-2:] == ["api", "key"]


def has_secret_form(text: str) -> bool:
    """Return True if a text holds a known token, a URL with a password or key, or such a header."""
    if _SHAPE.search(text) or _USER_IN_URL.search(text):
        return True
    if any(_is_url_secret(match[2]) for match in _PARAMETER.finditer(text)):
        return True
    words: list[str] = []
    for match in _HEADER.finditer(text):
        # the first word is the name of the header
        words += match[0].split()[1:]
    return any(_CREDENTIALS.fullmatch(word) for word in words)


def mask_secrets(command: Sequence[str]) -> list[str]:
    """Mask secrets of a command line: `reward.options.api_key=abc` -> `...api_key=***`."""
    masked: list[str] = []
    hides_next = False
    for argument in command:
        is_flag = argument.startswith("-") and "=" not in argument
        if hides_next and not is_flag:
            masked.append(MASK)
            # a header has two words: `Authorization: Bearer TOKEN`
            hides_next = argument.strip().lower() in ("bearer", "basic")
            continue
        hides_next = _announces_secret(argument)
        masked.append(argument if hides_next else _mask_argument(argument))
    return masked


def mask_text(text: str) -> str:
    """Mask secrets in text: credentials in URLs, headers, known tokens, values of variables."""
    for name, value in os.environ.items():
        # the cheap test first: most values are not in the text
        if len(value) < _MIN_VALUE_CHARS or value not in text:
            continue
        if name not in _NO_PASSWORDS and is_secret_name(name):
            text = text.replace(value, MASK)
    text = _USER_IN_URL.sub(f"{MASK}@", text)
    text = _PARAMETER.sub(_mask_parameter, text)
    text = _HEADER.sub(rf"\1\2{MASK}", text)
    return _SHAPE.sub(MASK, text)


def _mask_parameter(match: re.Match[str]) -> str:
    """Mask the value of a parameter of a URL, if it is a secret by its name."""
    if _is_url_secret(match[2]):
        return f"{match[1]}{match[2]}={MASK}"
    return match[0]


def may_be_written(variable: str) -> bool:
    """Return True if a configuration may use `${oc.env:VARIABLE}`: it holds a place or a user."""
    if variable in ("USER", "PWD", "LOGNAME", "TMPDIR"):
        return True
    words = words_of(variable)
    return bool(words) and words[-1] in _LOCATION_WORDS


def secret_variables() -> dict[str, str]:
    """Return the environment variables that are secrets, by name or by value."""
    variables = {name: os.environ[name] for name in os.environ if name not in _NO_PASSWORDS}
    return {name: value for name, value in variables.items() if any(find_secrets({name: value}))}


_Names = tuple[str, ...]
"""The secret names among the names of a value and of the mappings around it."""


def find_secrets(value: Any, name: str = "", secrets: _Names = ()) -> Iterator[tuple[str, str]]:
    """Yield the dotted names of the secrets in an option's value, each with the reason.

    A text is a secret by its own name or that of a surrounding mapping, by a user, password or key
    in its URL, or by its form.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            dotted_name = f"{name}.{key}" if name else str(key)
            yield from find_secrets(item, dotted_name, _with(secrets, key))
    elif isinstance(value, list | tuple):
        for item, names in _items(value, secrets):
            yield from find_secrets(item, name, names)
    elif _is_secret(value, secrets):
        yield name, "looks like a secret"
    elif isinstance(value, str) and _USER_IN_URL.search(value):
        yield name, "has a user's name or a password in its URL"
    elif isinstance(value, str) and mask_text(value) != value:
        yield name, "holds what looks like a secret"


def mask_options(value: Any, secrets: _Names = ()) -> Any:
    """Copy mappings and lists with `***` for every secret."""
    if isinstance(value, Mapping):
        return {key: mask_options(item, _with(secrets, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask_options(item, names) for item, names in _items(value, secrets)]
    if _is_secret(value, secrets):
        return MASK
    if isinstance(value, str):
        return mask_text(value)
    return value


def _items(values: Sequence[Any], secrets: _Names) -> Iterator[tuple[Any, _Names]]:
    """Yield the items of a list with their names; in a pair of texts the first names the second."""
    is_pair = len(values) == 2 and all(isinstance(value, str) for value in values)
    for position, value in enumerate(values):
        yield value, _with(secrets, values[0]) if is_pair and position == 1 else secrets


def _with(secrets: _Names, name: object) -> _Names:
    """Add the name of a value, if it is a secret's."""
    text = str(name)
    # `my_rewards:token` is a verifier
    if ":" in text or not is_secret_name(text):
        return secrets
    return (*secrets, text)


def _is_secret(value: Any, secrets: _Names) -> bool:
    """Return True if a text, or a number that counts nothing, has the name of a secret."""
    if isinstance(value, int) and not isinstance(value, bool):
        for name in secrets:
            words = words_of(name)
            # a number of tokens or a key of a table is not a secret, a numeric password is
            if words[-1] in _ALWAYS or words[-2:-1] == ["api"]:
                return True
        return False
    return isinstance(value, str) and bool(value) and bool(secrets)


def _announces_secret(argument: str) -> bool:
    """Return True if a secret follows: after `--api-key`, `Authorization:` or `Bearer`."""
    if argument.startswith("-"):
        return "=" not in argument and is_secret_name(argument)
    if argument.lower() in ("bearer", "basic"):
        return True
    return argument.endswith(":") and is_secret_name(argument[:-1])


def _mask_argument(argument: str) -> str:
    for match in (*_NAME_WITH_VALUE.finditer(argument), *_PAIR.finditer(argument)):
        # `my_rewards:token` is no pair, nor is the scheme of a URL
        has_sign = re.search(r"[=,\s'\"]", match[0]) is not None
        is_first = not argument[: match.start()].strip("{ ")
        is_pair = has_sign or is_first
        remainder = argument[match.end() :]
        if is_pair and is_secret_name(match[1]) and not remainder.startswith("//"):
            first, equals, _ = argument[: match.end()].partition("=")
            return f"{first}={MASK}" if equals else MASK
    return mask_text(argument)


def _is_url_secret(name: str) -> bool:
    if is_secret_name(name):
        return True
    words = words_of(name)
    return bool(words) and words[-1] in _IN_URLS


def words_of(name: str) -> list[str]:
    """Return the words of a name in lower case; `openaiApiKey` has three."""
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.findall(r"[a-z0-9]+", separated.lower())
