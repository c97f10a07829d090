"""Weights between processes of one machine: one file in shared memory for each version."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dapo.core.errors import EngineError
from dapo.engines.engine import WeightSource

VERSION_KEY = "version"
TIED_KEY = "tied"
PREFIX = "dapo-weights-"


@dataclass(frozen=True)
class WeightsFile:
    """A version's weights in a safetensors file."""

    path: Path
    version: int

    def open(self) -> "WeightsFile":
        """Check that the file is there and holds this version. Raises EngineError."""
        try:
            with safe_open(self.path, framework="pt") as file:
                found = (file.metadata() or {}).get(VERSION_KEY)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"the weights of version {self.version} cannot be read: {error}") from error
        if found != str(self.version):
            raise EngineError(f"{self.path} holds weights of version {found}, expected {self.version}")
        return self

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight by its Hugging Face name, tied ones under each of their names."""
        with safe_open(self.path, framework="pt") as file:
            tied = dict(pair.split("=", 1) for pair in (file.metadata() or {}).get(TIED_KEY, "").split())
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                yield name, file.get_tensor(name)
            for name, stored in tied.items():
                yield name, file.get_tensor(stored)


class WeightsFolder:
    """A private folder in shared memory (`/dev/shm` where there is one) with the newest two versions."""

    def __init__(self, parent: Path | None = None) -> None:
        memory = Path("/dev/shm")
        parent_dir = parent or (
            memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
        )
        _remove_abandoned(parent_dir)
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent_dir)
        self._lock = _locked(self.path)
        self._versions: list[Path] = []

    @property
    def path(self) -> Path:
        """Its random name can be seen wherever its files can be read, and nowhere else."""
        return Path(self._folder.name)

    def write(self, weights: WeightSource, version: int) -> WeightsFile:
        """Write a complete file and give it its name when it is whole; the version before the last is removed."""
        if isinstance(weights, WeightsFile):  # where every process of this machine can read it already
            return weights
        path = self.path_of(version)
        write_weights(path, weights, version)
        return self.keep(path, version)

    def path_of(self, version: int) -> Path:
        """Where somebody may write a version."""
        return self.path / f"version_{version}.safetensors"

    def keep(self, path: Path, version: int) -> WeightsFile:
        """Count a version that has been written; the one before the last is removed."""
        if path not in self._versions:
            self._versions.append(path)
        for old in self._versions[:-2]:
            old.unlink(missing_ok=True)
        self._versions = self._versions[-2:]
        return WeightsFile(path, version)

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()
        os.close(self._lock)


def write_weights(path: Path, weights: WeightSource, version: int) -> None:
    """Write a complete file, and give it its name when it is whole. Raises EngineError."""
    tensors, metadata = dense_weights(weights, version)
    temporary = path.with_suffix(".tmp")
    try:
        save_file(tensors, temporary, metadata=metadata)
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise EngineError(f"the weights cannot be handed to the engines: {path.parent}: {error}") from error
    os.replace(temporary, path)


def dense_weights(weights: WeightSource, version: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a weights file in main memory, tied ones once, and what stands beside them."""
    tensors: dict[str, torch.Tensor] = {}
    first: dict[tuple[int, torch.Size], str] = {}
    tied: list[str] = []
    for name, tensor in weights.named_tensors():
        key = (tensor.data_ptr(), tensor.shape)
        dense = tensor.detach().cpu().contiguous()
        # where tensors are made as they are asked for, another one may lie at the same place by now
        if key in first and torch.equal(dense, tensors[first[key]]):
            tied.append(f"{name}={first[key]}")
        else:
            first[key] = name
            tensors[name] = dense
    return tensors, {VERSION_KEY: str(version), TIED_KEY: " ".join(tied)}


def _locked(folder: Path) -> int:
    """A handle whose lock says that the folder's owner lives; the system frees it, however that process ends."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _remove_abandoned(parent_dir: Path) -> None:
    """Folders whose owner was killed would fill the shared memory."""
    for folder in parent_dir.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or just being made or removed
            handle = os.open(folder / "lock", os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)
