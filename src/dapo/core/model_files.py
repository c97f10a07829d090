"""The files in a model's directory, before anything is loaded."""

import json
from pathlib import Path
from typing import Literal, TypeAlias

from dapo.core.errors import ConfigError
from dapo.core.loading import reading_hub

WEIGHT_FILES = ("*.safetensors",)
PICKLE_FILES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
"""Names of weights that only unpickling reads, which can run code."""
CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
DtypeName: TypeAlias = Literal["auto", "bfloat16", "float32", "float64"]
_SHOWN_FOLDERS = 3


def require_new_folder(out: Path) -> None:
    """Raise ConfigError unless `out` is absent or an empty directory."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} already exists and is not an empty directory; choose another place for the"
            " model"
        )


def require_model_files(name: str) -> str | Path:
    """Return the directory of a model, or its Hugging Face id as it is.

    Raises ConfigError for a directory that is absent or incomplete.
    """
    path = Path(name).expanduser()
    if (reason := unusable_weights(name)) is not None:
        raise ConfigError(f"model {name!r} {reason}")
    if not path.exists():
        if path.is_absolute() or name.startswith(".") or name.count("/") > 1:
            raise ConfigError(f"model {name!r}: there is no such directory")
        return name
    if not (path / CONFIG_FILE).is_file() and (path / ADAPTER_FILE).is_file():
        raise ConfigError(
            f"model {name!r} holds an adapter, expected a whole model: merge it into its base model"
            " by peft (merge_and_unload), or export its run without --adapter"
        )
    if not (path / CONFIG_FILE).is_file():
        raise ConfigError(
            f"model {name!r} is not a Hugging Face model directory: it has no config.json"
            f"{_named_folders(path)}"
        )
    try:
        json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model {name!r}: its config.json is not JSON: {error}") from None
    for kind, patterns in (("weights", WEIGHT_FILES), ("tokenizer", TOKENIZER_FILES)):
        if not any(file for pattern in patterns for file in path.glob(pattern)):
            raise ConfigError(
                f"model {name!r} has no {kind}: expected one of {', '.join(patterns)} in the"
                " directory"
            )
    return path


def _named_folders(path: Path) -> str:
    """Name the first folders in a directory, of which a run or a model may be meant."""
    folders = sorted(str(entry) for entry in path.iterdir() if entry.is_dir())
    if not folders:
        return ""
    shown = ", ".join(folders[:_SHOWN_FOLDERS])
    if len(folders) > _SHOWN_FOLDERS:
        shown += f" and {len(folders) - _SHOWN_FOLDERS} more"
    return f"; it holds {shown}: name the run or the model that you mean"


def is_model_here(name: str) -> bool:
    """Return True if a path exists, or this machine's cache of the hub has the model of that id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(name).expanduser().exists():
        return True
    try:
        return isinstance(try_to_load_from_cache(name, CONFIG_FILE), str)
    except HFValidationError:
        return False


def require_hub_model(name: str) -> None:
    """Raise ConfigError unless the hub, or this machine's cache of it, has the model's config.json.

    It is downloaded if it is not in the cache; the errors of the hub's client are many, and those
    not answered here are left to the loading of the model.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if is_model_here(name):
        return
    try:
        with reading_hub():
            hf_hub_download(name, CONFIG_FILE)
    except HFValidationError:
        reason = "is not a valid Hugging Face id (OWNER/NAME), and there is no such directory"
    except GatedRepoError:
        reason = (
            f"is gated: accept its terms at https://huggingface.co/{name}, and run hf auth login"
        )
    except RepositoryNotFoundError:
        reason = (
            "is no directory here, and the Hugging Face hub has no such model, or a private one"
        )
    except LocalEntryNotFoundError:
        reason = (
            "is no directory here and not in this machine's cache, and the Hugging Face hub was not"
            f" reached; download it where there is a network: hf download {name}"
        )
    except EntryNotFoundError:
        reason = f"has no {CONFIG_FILE} on the Hugging Face hub; expected a model for transformers"
    except OSError:
        return
    else:
        return
    raise ConfigError(f"model {name!r} {reason}")


def unusable_weights(name: str) -> str | None:
    """Return why the weights at a path are not read, to end a sentence; None if they are.

    A path that does not exist, such as a Hugging Face id, has nothing wrong.
    """
    path = Path(name).expanduser()
    if path.is_file() and any(path.match(pattern) for pattern in (*PICKLE_FILES, *WEIGHT_FILES)):
        return (
            "is a file of weights; expected a directory with config.json, tokenizer and"
            " *.safetensors"
        )
    pickled = []
    for pattern in PICKLE_FILES:
        pickled += [file.name for file in path.glob(pattern) if file.stat().st_size]
    has_weights = any(any(path.glob(pattern)) for pattern in WEIGHT_FILES)
    if pickled and not has_weights:
        return pickled_only(name, min(pickled))
    return None


def pickled_only(name: str, weights: str) -> str:
    """Return the end of a sentence about a model without safetensors, with a command for them."""
    load = f"from transformers import AutoModelForCausalLM as M; M.from_pretrained({name!r})"
    code = f"{load}.save_pretrained('converted')"
    return (
        f"has no safetensors but pickled weights ({weights}), and unpickling can run code. If you"
        " trust them, convert "
        f'them once where nothing is secret: python -c "{code}", and copy the other files to'
        " converted/"
    )
