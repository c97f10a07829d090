"""The environment variables that a process with code of users or of data gets: those that it needs, and no secrets."""

import os
from collections.abc import Collection

from dapo.core.secrets import is_secret_name, may_be_written

_NAMES = frozenset(
    (
        *("LANG", "LANGUAGE", "PATH", "SHELL", "TEMP", "TERM", "TMP", "TZ", "VIRTUAL_ENV"),
        *("ALL_PROXY", "FTP_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
        *("CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"),
    )
)
_PREFIXES = (
    *("LC_", "LD_", "DYLD_", "PYTHON", "CONDA_", "XDG_", "DAPO_", "COV", "MPL", "MALLOC_", "GLIBC_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMEXPR_", "VECLIB_", "ATEN_", "TORCH", "PYTORCH_"),
    *("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_"),
)


def is_harmless_variable(name: str) -> bool:
    """Whether a variable configures programs, and its name is no secret's: PATH, LC_ALL, https_proxy, HF_HOME."""
    is_known = name.upper() in _NAMES or name.startswith(_PREFIXES) or may_be_written(name)
    return is_known and not is_secret_name(name)


def worker_environment(named: Collection[str] = ()) -> dict[str, str]:
    """This process's harmless variables, and those that are `named`."""
    return {name: value for name, value in os.environ.items() if name in named or is_harmless_variable(name)}
