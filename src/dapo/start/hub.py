"""Publishes an exported model on the Hugging Face hub, by the hub's own client and login."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dapo.core.errors import ConfigError, PushFailed
from dapo.core.loading import quiet_hub
from dapo.core.secrets import mask_text
from dapo.core.text import one_line, shorten

_LOGIN = "run hf auth login, or set HF_TOKEN"
_REASON_CHARS = 300


@dataclass(frozen=True)
class Repository:
    """A model's repository on the hub, which may not exist yet."""

    id: str  # OWNER/NAME
    is_private: bool  # whether it is made private; one that exists keeps its visibility


def find_repository(name: str, *, private: bool) -> Repository:
    """Check name, login and network, before anything is written.

    Args:
        name: OWNER/NAME, or a name for the user who is logged in.
        private: whether a new repository is private.

    Raises:
        ConfigError: the name, the token or the environment does not allow it, or the repository is
            public and `private` is wanted.
        PushFailed: the hub did not answer.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ConfigError(
            f"repository {name!r}: expected OWNER/NAME, or a NAME of your own, of letters, digits,"
            " -, _ and ."
        ) from None
    if is_offline_mode():
        raise ConfigError(
            f"a push to {name} needs the network, which HF_HUB_OFFLINE=1 forbids; unset"
            " HF_HUB_OFFLINE, or export without a push and upload the directory later"
        )
    api = HfApi()
    with _errors(name, "the model is not written"):
        if get_token() is None:
            raise ConfigError(f"push to {name}: you are not logged in to the hub; {_LOGIN}")
        user = api.whoami()
        repository = name if "/" in name else f"{user['name']}/{name}"
        if private:
            try:
                is_public = not api.model_info(repository).private
            except RepositoryNotFoundError:
                is_public = False
            if is_public:
                raise ConfigError(
                    f"push to {repository}: it exists and is public, and a private repository is"
                    " wanted; choose another name, or make it private on its page first"
                )
    return Repository(repository, private)


def push_folder(folder: Path, repository: Repository, *, message: str) -> str:
    """Upload a model directory, make its repository if it is missing, and return its address.

    Raises PushFailed; the directory stays as it is.
    """
    from huggingface_hub import HfApi

    words = ["hf", "upload", repository.id, str(folder), "."]
    if repository.is_private:
        words.append("--private")
    api = HfApi()
    with _errors(repository.id, f"{folder} is written; upload it with: {shlex.join(words)}"):
        # None: as the owner's settings say, which is public for most
        private = True if repository.is_private else None
        url = api.create_repo(repository.id, private=private, exist_ok=True)
        with _bars_on_terminals():
            api.upload_folder(repo_id=repository.id, folder_path=folder, commit_message=message)
    return str(url)


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Keep the client's progress bars out of files."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    hides = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if hides:
        disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            enable_progress_bars()


@contextmanager
def _errors(name: str, consequence: str) -> Iterator[None]:
    """Turn the errors of the hub's client into one sentence, and what it means for the export."""
    from huggingface_hub import constants, errors

    try:
        with quiet_hub():
            yield
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            reason = f"the hub does not accept the token; {_LOGIN} to a valid one"
        elif status == 403:
            reason = (
                f"the token may not write to {name}; make one with write access at"
                f" {constants.ENDPOINT}/settings/tokens, and check the owner's name"
            )
        else:
            answer = error.server_message or str(error)
            reason = f"the hub answered {status}: {_sentence(answer)}"
        raise PushFailed(f"push to {name}: {reason}; {consequence}") from None
    except errors.HTTPError as error:  # of the client below the hub's: no answer
        reason = f"{constants.ENDPOINT} was not reached: {_sentence(str(error))}"
        raise PushFailed(f"push to {name}: {reason}; {consequence}") from None
    except (OSError, ValueError, RuntimeError) as error:
        reason = _sentence(str(error))
        # the client says in the cause why a file was not uploaded
        if error.__cause__ is not None:
            reason += f": {_sentence(str(error.__cause__))}"
        raise PushFailed(f"push to {name}: {reason}; {consequence}") from None


def _sentence(text: str) -> str:
    return shorten(one_line(mask_text(text)).rstrip("."), _REASON_CHARS)
