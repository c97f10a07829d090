"""Loads language models with tokenizer and end tokens, and exports Hugging Face directories."""

import contextlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from dapo.config import Config
from dapo.config.model_options import MODEL_ALIASES
from dapo.core.errors import ConfigError
from dapo.core.memory import bound_kernels, explain_out_of_memory
from dapo.core.model_files import pickled_only, require_model_files, require_new_folder
from dapo.core.processor import NVIDIA_DRIVER
from dapo.policy.builtin_models import smollm2_directory, smollm2_path, tiny_random
from dapo.policy.hf_io import (
    StoredWeights,
    find_stored_weights,
    layout_of,
    quiet_transformers,
    reading_model,
    stored_buffers,
    tied_names,
    write_model_directory,
)
from dapo.types import WeightLayout


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer and end tokens."""

    # in evaluation mode (no dropout): a log-probability is a function of the weights
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    # all end tokens that the model's files name, ascending; base models often have two
    stop_ids: tuple[int, ...]
    name: str
    # for a model on the meta device, if its weights can be read in part
    stored: StoredWeights | None = None

    def layout(self) -> WeightLayout:
        return layout_of(dict(self.model.named_parameters()), tied_names(self.model))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its name, tied ones under each of their names, as in a `WeightSource`."""
        return self.model.named_parameters(remove_duplicate=False)


DEVICES = Path("/dev")
LESS_ON_A_GPU = (
    "set model.dtype=bfloat16, raise distributed.trainer_ranks where there are more GPUs, or lower "
    "rollout.vllm.cache_gib where vLLM shares a GPU"
)


def device_of(device: str, process: str = "torch") -> str:
    """Return the device of `train.device` on the machine of this process.

    Raises ConfigError, which names the `process`, where CUDA is required and absent, and for an
    unusable driver.
    """
    if device != "cpu":
        driver = unusable_driver()
        if driver is not None:
            raise ConfigError(
                f"{driver}; update the driver, install torch for an older CUDA, or set train.device=cpu"
            )
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise ConfigError(
            f"train.device=cuda, but {process} finds no CUDA device; use train.device=auto or cpu"
        )
    if device == "auto":
        return "cuda" if has_cuda else "cpu"
    return device


def unusable_driver() -> str | None:
    """Describe an NVIDIA driver, with versions, with which torch finds no GPU; None without one.

    A container without GPUs sees the driver of its host, but no device of it.
    """
    has_gpu = NVIDIA_DRIVER.is_file() and any(DEVICES.glob("nvidia[0-9]*"))
    if torch.version.cuda is None or torch.cuda.is_available() or not has_gpu:
        return None
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    match = re.search(r"\d+\.\d+(\.\d+)?", NVIDIA_DRIVER.read_text(encoding="utf-8"))
    version = "of an unknown version"
    if match is not None:
        version = match[0]
    least = ""
    if torch.version.cuda.startswith("13."):
        least = ", which needs 580 or newer"
    built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}{least}"
    return f"this machine's NVIDIA driver {version} gives torch no GPU: {built}"


@explain_out_of_memory(
    torch.OutOfMemoryError, "loading the model", LESS_ON_A_GPU, then="start again"
)
def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model.

    Args:
        name: an alias (one of MODEL_ALIASES), a directory or a Hugging Face id.
        dtype: the type of the weights.
        device: the device of the weights. On `meta` none is read, and buffers, such as RoPE's
            frequencies, are on the CPU.
        trust_remote_code: whether to run Python code that comes with the model.

    Raises ConfigError if there is no such model, if a directory lacks configuration, weights or
    tokenizer, if some weights would stay random, or if nothing ends a response: the files name no
    end token, and there is no chat template that could.
    """
    bound_kernels()
    model: Any
    weight_files = None
    with quiet_transformers():
        if name == "tiny-random":
            model, tokenizer = tiny_random(dtype)
            if torch.device(device).type == "meta":
                model = _without_weights(model.config, dtype)
        else:
            path = _resolve(name)
            with reading_model(path):
                if torch.device(device).type == "meta":
                    files = _meta_model(name, path, dtype, trust_remote_code)
                    model, tokenizer, weight_files = files
                else:
                    model, tokenizer = _from_pretrained(name, path, dtype, trust_remote_code)
    stop_ids = find_stop_ids(model, tokenizer)
    if not stop_ids and not tokenizer.chat_template:
        raise ConfigError(
            f"model {name!r} has no end token, so no response would end: set eos_token_id in"
            " generation_config.json"
        )
    if torch.device(device).type != "meta":
        model.to(device)
    return LoadedModel(model.eval(), tokenizer, stop_ids, name, weight_files)


def load_teacher(
    config: Config, *, device: str | torch.device | None, dtype: torch.dtype
) -> LoadedModel:
    """Load the model of `loss.reference.model`, for sharding without a device.

    Raises ConfigError like `load_model`.
    """
    name = config.loss.teacher
    trusts = config.model.trust_remote_code
    assert name is not None
    try:
        if device is None:
            return load_for_sharding(name, dtype=dtype, trust_remote_code=trusts)
        return load_model(name, dtype=dtype, device=device, trust_remote_code=trusts)
    except ConfigError as error:
        raise ConfigError(f"loss.reference.model: {error}") from error


def require_same_vocabulary(policy: LoadedModel, teacher: LoadedModel) -> None:
    """Raise ConfigError, with the first difference, unless both tokenizers have the same ids."""
    ids = policy.tokenizer.get_vocab()
    teacher_ids = teacher.tokenizer.get_vocab()
    differing = {token for token, _ in ids.items() ^ teacher_ids.items()}
    if not differing:
        return

    def order(token: str) -> tuple[float, str]:
        return min(ids.get(token, math.inf), teacher_ids.get(token, math.inf)), token

    first = min(differing, key=order)
    raise ConfigError(
        f"loss.reference.model={teacher.name} has another vocabulary than {policy.name}:"
        f" {len(differing):,} tokens differ, the first is {first!r} (id {ids.get(first, 'none')}"
        f" here, {teacher_ids.get(first, 'none')} there); the divergence compares tokens of equal"
        " ids, so choose a teacher of the policy's family"
    )


def load_for_sharding(
    name: str, *, dtype: torch.dtype, trust_remote_code: bool = False
) -> LoadedModel:
    """Load a model without weights if ranks can read their rows later, else with all weights."""
    loaded = load_model(name, dtype=dtype, device="meta", trust_remote_code=trust_remote_code)
    if loaded.stored is not None:
        return loaded
    return load_model(name, dtype=dtype, trust_remote_code=trust_remote_code)


def load_meta_model(
    name: str, *, trust_remote_code: bool = False, local_files_only: bool = False
) -> PreTrainedModel:
    """Load a model's configuration, and its weights' names and shapes, on the meta device.

    Raises ConfigError if there is no such model; `local_files_only` restricts the search to this
    machine.
    """
    if name == "tiny-random":
        return tiny_random(torch.float32)[0]
    name_or_path = _resolve(name)
    with quiet_transformers(), _as_config_error(name):
        config = AutoConfig.from_pretrained(
            name_or_path, trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
        return _without_weights(config, torch.float32, trust_remote_code=trust_remote_code)


def _without_weights(
    config: Any, dtype: torch.dtype, *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return a model with weights on the meta device; buffers, which no file has, on the CPU."""
    # with torch.device("meta") the buffers would have no values either
    # declared for hooks that return nothing
    register: Any = register_module_parameter_registration_hook
    hook = register(_without_values)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    finally:
        hook.remove()
    model.tie_weights()
    return model


def _without_values(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter on the meta device, with its own attributes."""
    empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
    vars(empty).update(vars(parameter))
    return empty


def _meta_model(
    name: str, name_or_path: str | Path, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, StoredWeights | None]:
    with _as_config_error(name):
        # first the configuration: for an unknown name, the tokenizer's loader asks the hub for it
        # twice
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
        model = _without_weights(config, dtype, trust_remote_code=trust_remote_code)
        with contextlib.suppress(OSError):  # without the file keep the model's own settings
            model.generation_config = GenerationConfig.from_pretrained(name_or_path)
        return model, tokenizer, find_stored_weights(name_or_path, model)


def load_local_tokenizer(
    name: str, *, trust_remote_code: bool = False
) -> tuple[PreTrainedTokenizerBase, tuple[int, ...]] | None:
    """Return tokenizer and end tokens of a model; None if they are not on this machine."""
    if name == "tiny-random":
        model, tokenizer = tiny_random(torch.float32)
        return tokenizer, find_stop_ids(model, tokenizer)
    path = smollm2_path() if name == "smollm2-135m-instruct" else name
    if os.path.isdir(path):
        for entry in os.scandir(path):
            if not (entry.is_file() or entry.is_dir()):
                return None  # a pipe among its files would be waited for
    options: Any = {"local_files_only": True}
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                path, trust_remote_code=trust_remote_code, **options
            )
            config = AutoConfig.from_pretrained(
                path, trust_remote_code=trust_remote_code, **options
            )
        except (OSError, ValueError):
            return None
        # many models have no generation settings
        with contextlib.suppress(OSError, ValueError):
            generation = GenerationConfig.from_pretrained(path, **options)
            return tokenizer, _union_of_ends(generation, config, tokenizer)
    return tokenizer, _union_of_ends(config, tokenizer)


def find_stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return all end tokens of generation settings, configuration and tokenizer, ascending."""
    return _union_of_ends(model.generation_config, model.config, tokenizer)


def _union_of_ends(*sources: object) -> tuple[int, ...]:
    stop_ids: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        # a number, a list or nothing, by model
        if isinstance(ids, list | tuple):
            stop_ids.update(ids)
        elif ids is not None:
            stop_ids.add(ids)
    return tuple(sorted(stop_ids))


def export_model(
    tensors: Iterable[tuple[str, Tensor]],
    source: LoadedModel,
    out_dir: str | Path,
    *,
    layout: WeightLayout | None = None,
    files: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write weights as a directory for `from_pretrained`, which appears complete or not at all.

    A tied weight is written once. The weights are read one at a time.

    Args:
        tensors: the weights, from `WeightSource.named_tensors`.
        source: has the configuration, the tokenizer and the generation settings, and what is stored
            beside weights; its weights are not read, so that a model without `stored_buffers` may
            be on the meta device.
        out_dir: the directory, which is absent or empty.
        layout: names the weights; None: the model of `source` does, in which adapters rename them.
        files: further files by name, with their text.
        dtype: the type of the written weights; None: their own.

    Raises:
        ConfigError: the directory is not empty.
        ValueError: the names of the weights are not those of the model.
    """
    out = Path(out_dir)
    require_new_folder(out)
    if layout is None:
        layout = source.layout()
    names = layout.tensors.keys()
    tied = layout.tied.keys()

    def read() -> Iterator[tuple[str, Tensor]]:
        missing = set(names | tied)
        unexpected = []
        for name, tensor in tensors:
            if name not in missing:
                unexpected.append(name)
                continue
            missing.discard(name)
            if name in names:
                yield name, tensor.to(dtype)
        differing = sorted([*missing, *unexpected])
        if differing:
            raise ValueError(
                f"{len(differing)} weight names differ from {source.name}'s, the first is"
                f" {differing[0]}"
            )
        yield from stored_buffers(source.model).items()

    write_model_directory(read(), source.model, source.tokenizer, out, files=files)


def _from_pretrained(
    name: str, name_or_path: str | Path, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with _as_config_error(name):
        # first, as in `_meta_model`
        AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=trust_remote_code)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name_or_path,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            use_safetensors=True,
        )
    model, info = loaded
    # transformers would fill them with random numbers
    mismatched = [entry[0] for entry in info["mismatched_keys"]]
    lost = sorted([*info["missing_keys"], *mismatched])
    if lost:
        raise ConfigError(
            f"model {name!r} is incomplete: {len(lost)} weights are missing, the first is {lost[0]}"
        )
    return model, tokenizer


@contextlib.contextmanager
def _as_config_error(name: str) -> Iterator[None]:
    """Turn an error of loading the model into a ConfigError of one line."""
    try:
        yield
    except torch.OutOfMemoryError:  # which is a RuntimeError
        raise
    except (
        OSError,
        ValueError,
        RuntimeError,
        ImportError,
        KeyError,
        SafetensorError,
        UnpicklingError,
    ) as error:
        cause = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        problem = (
            f"cannot be loaded as an alias ({', '.join(MODEL_ALIASES)}), a directory or a Hugging"
            f" Face id: {cause}"
        )
        if "safetensors" in str(error) and not isinstance(error, SafetensorError):
            raise ConfigError(f"model {name!r} {pickled_only(name, 'no *.safetensors')}") from error
        if "trust_remote_code" in str(error):
            problem = (
                "comes with its own Python code, which does not run by default: read the code, and"
                " set "
            )
            problem += "model.trust_remote_code=true if you trust it"
        raise ConfigError(f"model {name!r} {problem}") from error


def _resolve(name: str) -> str | Path:
    """Return the directory or id under which transformers finds the model.

    Raises ConfigError for an incomplete directory.
    """
    if name == "smollm2-135m-instruct":
        name = str(smollm2_directory())
    return require_model_files(name)
