"""The files of weights in a model's directory, before anything is loaded."""

from pathlib import Path

WEIGHT_FILES = ("*.safetensors",)
PICKLE_FILES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
"""Names of weights that only unpickling reads, which can run code."""


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
