"""The environment variables that a process of a run gets: no secrets but those that options name.

Engines and trainers, which run dapo's code, get all others; verifiers and generators of problems,
which run code of users and of data, only those that are known to configure programs.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from dapo.core.loading import module_file
from dapo.core.secrets import (
    HUB_VARIABLES,
    PROXIES,
    is_secret_name,
    may_be_written,
    secret_variables,
)

_NAMES = frozenset(
    (
        "LANG",
        "LANGUAGE",
        "PATH",
        "SHELL",
        "TEMP",
        "TERM",
        "TMP",
        "TZ",
        "VIRTUAL_ENV",
        "ALL_PROXY",
        "FTP_PROXY",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "CURL_CA_BUNDLE",
        "REQUESTS_CA_BUNDLE",
        "SSL_CERT_FILE",
    )
)
_PREFIXES = (
    "LC_",
    "LD_",
    "DYLD_",
    "PYTHON",
    "CONDA_",
    "XDG_",
    "DAPO_",
    "COV",
    "MPL",
    "MALLOC_",
    "GLIBC_",
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "NUMEXPR_",
    "VECLIB_",
    "ATEN_",
    "TORCH",
    "PYTORCH_",
    "CUDA_",
    "NVIDIA_",
    "HIP_",
    "ROCR_",
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
)


def public_environment(exceptions: Collection[str] = ()) -> dict[str, str]:
    """Return the variables of this process without secrets, except for the `exceptions`."""
    hidden = secret_variables().keys() - exceptions
    return {name: value for name, value in os.environ.items() if name not in hidden}


def worker_environment(exceptions: Collection[str] = ()) -> dict[str, str]:
    """Return the public variables that configure programs, such as PATH, and the `exceptions`."""
    public = public_environment({*exceptions, *PROXIES})
    harmless = {
        n for n in public if n.upper() in _NAMES or n.startswith(_PREFIXES) or may_be_written(n)
    }
    return {
        name: public[name]
        for name in public
        if name in exceptions or (name in harmless and not is_secret_name(name))
    }


def needed_environment(
    options_by_name: Mapping[str, Mapping[str, Any]], *, files: Iterable[str] = ()
) -> dict[str, str]:
    """Return a worker's variables: harmless ones, and those that options, modules or files name.

    The names are those of verifiers, `module:function`, or an environment's `module:Class`.
    """
    variables = set(HUB_VARIABLES) if "reward_model" in options_by_name else set()
    sources = [Path(name) for name in files]
    for name, options in options_by_name.items():
        variables |= {str(value) for option, value in options.items() if option.endswith("_env")}
        source = module_file(name.partition(":")[0]) if ":" in name else None
        if source is not None:
            sources.append(source)
    for source in sources:
        text = source.read_text(encoding="utf-8", errors="replace")
        variables |= set(re.findall(r"\w+", text))
    return worker_environment(variables)
