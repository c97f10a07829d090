"""Weights between processes of one machine: one safetensors file per version in shared memory."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dapo.core.errors import EngineError
from dapo.engines.engine import WeightSource

VERSION_KEY = "version"
TIED_KEY = "tied"
PREFIX = "dapo-weights-"
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class WeightsFile:
    """A version's weights in a safetensors file: a WeightSource, and its own handle."""

    path: Path
    version: int

    def open(self) -> "WeightsFile":
        """Check that the file exists and holds this version. Raises EngineError."""
        try:
            with safe_open(self.path, framework="pt") as file:
                found = (file.metadata() or {}).get(VERSION_KEY)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"the weights of version {self.version} cannot be read: {error}") from error
        if found != str(self.version):
            raise EngineError(f"{self.path} holds weights of version {found}, expected {self.version}")
        return self

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with safe_open(self.path, framework="pt") as file:
            for name, stored in stored_names(file).items():
                yield name, file.get_tensor(stored)


def stored_names(file: Any) -> dict[str, str]:
    """The name under which an open weights file stores each weight: tied weights are stored once."""
    tied = (file.metadata() or {}).get(TIED_KEY, "").split()
    return {name: name for name in file.keys()} | dict(pair.split("=", 1) for pair in tied)  # noqa: SIM118


class WeightsFolder:
    """A private folder in shared memory (`/dev/shm` where it exists) that keeps the last two versions."""

    def __init__(self, parent: Path | None = None) -> None:
        if parent is None:
            parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        _remove_abandoned(parent)
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)
        self._lock = _locked(self.path)
        self._versions: list[Path] = []

    @property
    def path(self) -> Path:
        """The folder. A process that sees its random name can read its files."""
        return Path(self._folder.name)

    def write(self, weights: WeightSource, version: int) -> WeightsFile:
        """Write a version; weights that are in shared memory already are returned as they are."""
        if isinstance(weights, WeightsFile):
            return weights
        path = self.path_of(version)
        write_weights(path, weights, version)
        return self.keep(path, version)

    def path_of(self, version: int) -> Path:
        """The file to which a version is written, by this process or another."""
        return self.path / f"version_{version}.safetensors"

    def keep(self, path: Path, version: int) -> WeightsFile:
        """Register a version that has been written, and remove all but the last two."""
        if path not in self._versions:
            self._versions.append(path)
        for old in self._versions[:-2]:
            old.unlink(missing_ok=True)
        self._versions = self._versions[-2:]
        return WeightsFile(path, version)

    def close(self) -> None:
        self._folder.cleanup()
        os.close(self._lock)


def write_weights(path: Path, weights: WeightSource, version: int) -> None:
    """Write a complete file under another name, then rename it to `path`. Raises EngineError."""
    tensors, metadata = dense_weights(weights, version)
    temporary = path.with_suffix(".tmp")
    try:
        save_file(tensors, temporary, metadata=metadata)
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise EngineError(f"the weights cannot be published to the engines: {path.parent}: {error}") from error
    os.replace(temporary, path)


def dense_weights(weights: WeightSource, version: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The contiguous CPU tensors of a weights file, tied ones once, and the file's metadata."""
    tensors: dict[str, torch.Tensor] = {}
    first: dict[tuple[int, torch.Size], str] = {}
    tied: list[str] = []
    for name, tensor in weights.named_tensors():
        key = (tensor.data_ptr(), tensor.shape)
        dense = tensor.detach().cpu().contiguous()
        # an equal address proves nothing where tensors are generated one after the other in the same memory
        if key in first and torch.equal(dense, tensors[first[key]]):
            tied.append(f"{name}={first[key]}")
        else:
            first[key] = name
            tensors[name] = dense
    return tensors, {VERSION_KEY: str(version), TIED_KEY: " ".join(tied)}


def _locked(folder: Path) -> int:
    """Lock the folder for as long as its owner lives: the system frees the lock however the process ends."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return handle


def _remove_abandoned(parent: Path) -> None:
    """Remove folders whose owner was killed: they would fill the shared memory."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or just being made or removed
            handle = os.open(folder / "lock", os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)
